"""`hf-vit predict`, `embed` and `search`: images, order, numbers and files."""

import csv
import json
import os
import re
import shutil
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image

from hf_vit.cli import main
from hf_vit.cli.image_list import load_on_device, read_named
from hf_vit.inference.feature_files import Features
from hf_vit.inference.predictor import embed
from hf_vit.loading import load

from ..auditing.conftest import draw
from ..paths import ROOT
from ..tiny_models import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", representation_size=9)


@pytest.fixture
def photographs(tmp_path):
    """Folder with seven intact images in subfolders, and a text file."""
    rng = np.random.default_rng(0)
    for place in ("b/0.png", "b/1.JPG", "a/2.png", "a/deep/3.jpg", "a/4.png", "c.png", "a.png"):
        file = tmp_path / "photographs" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (31, 45, 3), np.uint8)).save(file)
    (tmp_path / "photographs" / "notes.txt").write_text("no image")
    return tmp_path / "photographs"


SORTED = ["a/2.png", "a/4.png", "a/deep/3.jpg", "a.png", "b/0.png", "b/1.JPG", "c.png"]


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def rows_of(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines()]


def damage(folder):
    """Damage two files: one is truncated, one is not an image."""
    (folder / "b" / "0.png").write_bytes((folder / "b" / "0.png").read_bytes()[:900])
    (folder / "a" / "4.png").write_text("no image")
    return [str(folder / name) for name in SORTED if name not in ("a/4.png", "b/0.png")]


def alone(folder, file) -> np.ndarray:
    """Return the input of the classifier's head for one image, recorded by a hook."""
    model: Any
    model, processor = load(folder)
    seen = []
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(**processor(str(file), return_tensors="pt"))
    return seen[0][0].numpy()


def test_folders_globs_and_files_in_their_order(model, photographs, run_command):
    (photographs / ".hidden.png").write_text("no image")
    (photographs / "a" / "link").symlink_to(photographs)  # leads back
    places = [photographs / "c.png", photographs, photographs / "[ab]" / "*.png"]
    answers = rows_of(run_command(["predict", model, *places, "--json", "--batch-size", "2"]))
    globbed = ["a/2.png", "a/4.png", "b/0.png"]
    assert [entry["image"] for entry in answers] == [str(photographs / name) for name in ["c.png", *SORTED, *globbed]]
    assert answers[0]["predictions"][0]["label"] == answers[7]["predictions"][0]["label"]
    classifier, processor = load(model)
    with torch.inference_mode():
        logits = classifier(**processor(answers[4]["image"], return_tensors="pt")).logits[0].double()
    scores = (logits - logits.logsumexp(0)).exp().sort(descending=True).values[:5]
    np.testing.assert_allclose([entry["score"] for entry in answers[4]["predictions"]], scores, rtol=1e-4)
    (photographs / "a" / "link").unlink()
    (photographs / "a" / "deep").rename(photographs.parent / "elsewhere")
    (photographs / "a" / "deep").symlink_to(photographs.parent / "elsewhere")
    answers = rows_of(run_command(["predict", model, photographs / "[ac]*" / "**", "--json"]))
    assert [entry["image"] for entry in answers] == [str(photographs / name) for name in SORTED[:3]]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_damaged_image_is_named_and_skipped(model, photographs, tmp_path, suffix, capsys):
    good = damage(photographs)
    output = tmp_path / f"classes.{suffix}"
    assert run("predict", model, photographs, "--top-k", "2", "--batch-size", "3", "--output", output) == 1
    out, err = capsys.readouterr()
    assert out == ""
    first, second, last = [line for line in err.splitlines() if line.startswith("hf-vit predict: ")]
    assert "a/4.png" in first
    assert "b/0.png" in second
    assert re.search("2 .* 7", last)
    if suffix == "csv":
        rows = list(csv.DictReader(output.read_text().splitlines()))
        assert [(row["image"], row["rank"]) for row in rows] == [(name, rank) for name in good for rank in "12"]
    else:
        assert [row["image"] for row in rows_of(output.read_text())] == good


def test_without_a_readable_image_nothing_is_written(model, tmp_path, run_command):
    one, two, output = (tmp_path / name for name in ("one.jpg", "two.jpg", "classes.csv"))
    for file in (one, two):
        file.write_text("no image")
    for files, named in (([one], "one.jpg"), ([one, two], "2")):
        error = run_command(["predict", model, *files, "--output", output], status=2)
        assert named in error.splitlines()[-1]
        assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--dataset"),
        (["{folder}/*.gif"], ".gif"),
        (["{folder}/empty"], "empty"),
        (["{folder}/a.png", "--device", "cuda:99"], "--device"),
        (["{folder}/a.png", "--device", "gpu"], "--device"),
        (["http://example.org/a.png"], "a.png"),
        (["{folder}/a.png", "--split", "test"], "--split"),
        (["--dataset", "digits"], "--split"),
    ],
)
def test_files_that_are_not_images(model, photographs, arguments, sentence, run_command):
    (photographs / "empty").mkdir()
    arguments = [text.format(folder=photographs) for text in arguments]
    assert sentence in run_command(["predict", model, *arguments], status=2)


def test_another_size_and_preset(model, photographs, run_command):
    image = str(photographs / "c.png")
    options = ["--image-size", "48x66", "--preset", "timm", "--top-k", "2", "--json"]
    (answer,) = rows_of(run_command(["predict", model, image, *options]))
    other, processor = load(model, image_size=(48, 66), preset="timm")
    with torch.inference_mode():
        expected = other(**processor(image, return_tensors="pt")).logits.softmax(dim=-1)[0].topk(2).values
    assert [entry["score"] for entry in answer["predictions"]] == pytest.approx(expected.tolist(), abs=1e-6)


def test_the_device_is_the_accelerator_where_there_is_one(monkeypatch):
    def moved_to(device, backend=None, *fields):
        model = Mock(spec=["to", *fields])
        monkeypatch.setattr("hf_vit.loading.load", lambda *_, **__: (model, None))
        monkeypatch.setattr("hf_vit.loading.use_backend", lambda model, *_: model)
        load_on_device("model", device, backend)
        return [call.args[0] for call in model.to.call_args_list]

    assert moved_to("auto") == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu:0"))
    assert moved_to("auto") == ["cpu:0"]
    assert moved_to("auto", "openvino") == moved_to("auto", None, "write_program") == []
    assert moved_to("cpu:0", None, "write_program") == ["cpu:0"]


def test_rows_of_parquet_files_and_data_sets(model, photographs, tmp_path, run_command):
    files = [str(photographs / name) for name in SORTED[:3]]
    contents = [(photographs / name).read_bytes() for name in SORTED[:3]]
    pictures = [*({"bytes": content} for content in contents), None]
    rows = datasets.Dataset.from_dict({"number": [1, 2, 3, 4], "picture": pictures})
    rows.cast_column("picture", datasets.Image()).to_parquet(tmp_path / "some[1].parquet")
    separate = rows_of(run_command(["predict", model, *files, "--json"]))
    command = ["predict", model, tmp_path / "some[1].parquet", "--json", "--output", tmp_path / "rows"]
    assert "some[1].parquet:train:3" in run_command(command, status=1)
    answers = rows_of((tmp_path / "rows").read_text())
    for answer, expected in zip(answers, separate, strict=True):
        for found, wanted in zip(answer["predictions"], expected["predictions"], strict=True):
            assert found == {"label": wanted["label"], "score": pytest.approx(wanted["score"], rel=1e-4)}
    assert answers[2]["image"] == f"{tmp_path / 'some[1].parquet'}:train:2"
    assert read_named(answers[2]["image"]) == {"bytes": contents[2], "path": answers[2]["image"]}
    answers = rows_of(run_command(["predict", model, "--dataset", "digits", "--split", "test[:2]", "--json"]))
    assert [entry["image"] for entry in answers] == ["digits:test[:2]:0", "digits:test[:2]:1"]


@pytest.mark.parametrize("fields", [{}, {"representation_size": 9}, {"pooling": "mean"}, {"hybrid": True}])
def test_features_equal_the_heads_input_for_each_image(fields, photographs, tmp_path):
    folder = save_tiny(tmp_path / "tiny", **fields)
    files = [str(photographs / name) for name in SORTED]
    expected = np.stack([alone(folder, file) for file in files])
    pair = load(folder)
    np.testing.assert_allclose(embed(pair, files, batch_size=2), expected, rtol=1e-4, atol=1e-5)
    lengths = np.sqrt((expected.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    found = embed(pair, files, batch_size=3, workers=2, normalize=True)
    np.testing.assert_allclose(found, expected / lengths, rtol=1e-4, atol=1e-5)


def test_names_of_files_that_are_not_utf8(model, photographs, tmp_path):
    name = os.fsdecode(b"caf\xe9\n,.png")
    (photographs / "c.png").rename(tmp_path / name)
    for command, output in (("predict", "f.txt"), ("predict", "f.csv"), ("embed", "f.parquet"), ("embed", "f.NPZ")):
        assert run(command, model, tmp_path / name, "--output", tmp_path / output) == 0
    assert r"caf\udce9" in (tmp_path / "f.txt").read_text()
    (row, *_) = csv.DictReader((tmp_path / "f.csv").read_text().splitlines(keepends=True))
    assert row["image"] == str(tmp_path / name).replace("\udce9", r"\udce9")
    assert Features(tmp_path / "f.parquet").names() == {0: row["image"]}
    assert Features(tmp_path / "f.NPZ").names() == {0: str(tmp_path / name)}


HOSTILE = ["=cmd|calc!A0", "\x1b]0;title\x07", "\x9b31m", "back\r\x08"]


@pytest.mark.parametrize("text", HOSTILE)
def test_labels_and_names_are_no_code(text, photographs, tmp_path, capsys):
    """A terminal gets no control characters, and a spreadsheet no formula."""
    labels = {index: f"{text}{index}" for index in range(11)}
    model = save_tiny(tmp_path / "model", id2label=labels, label2id={label: index for index, label in labels.items()})
    (photographs / "c.png").rename(photographs / f"{text}.png")
    (photographs / "a.png").rename(photographs / f"damaged{text}.png")
    (photographs / f"damaged{text}.png").write_text("no image")
    assert run("predict", model, photographs) == 1
    out, err = capsys.readouterr()
    messages = re.findall("hf-vit predict: (.*)", err)  # a progress bar may stand before them
    assert len(messages) == 2
    assert "".join(out.split("\n") + messages).isprintable()
    assert run("predict", model, photographs, "--format", "csv", "--output", tmp_path / "classes.csv") == 1
    with open(tmp_path / "classes.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + 6 * 5
    assert all(cell.isprintable() and not cell.startswith(("=", "+", "@")) for row in rows for cell in row)


@pytest.mark.parametrize("suffix", ["parquet", "npz"])
def test_search_finds_the_same_files_as_numpy(model, photographs, tmp_path, suffix, run_command, capsys, monkeypatch):
    good = damage(photographs)
    (photographs / "c.png").rename(photographs / "c$_$.png")  # mathematics for matplotlib
    good[-1] = str(photographs / "c$_$.png")
    features, sheet = tmp_path / f"features.{suffix}", tmp_path / "sheet.png"
    monkeypatch.chdir(model.parent)  # the file knows the model from elsewhere too
    assert run("embed", "tiny", photographs, "--output", features, "--normalize", "--batch-size", "4") == 1
    monkeypatch.chdir(tmp_path)
    assert str(features) in capsys.readouterr().out
    stored = Features(features)
    assert list(stored.names().values()) == good
    expected = np.stack([alone(model, file) for file in good]).astype(np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(np.concatenate(list(stored.chunks())), expected, rtol=1e-4, atol=1e-5)
    found = rows_of(run_command(["search", features, good[3], "--top-k", "5", "--sheet", sheet, "--json"]))
    cosines = expected @ expected[3]
    order = np.argsort(-cosines)
    assert [entry["image"] for entry in found] == [good[place] for place in order]
    np.testing.assert_allclose([entry["similarity"] for entry in found], cosines[order], atol=1e-5)
    with Image.open(sheet) as drawn:
        assert min(drawn.size) > 100


def test_many_queries_and_groups_of_near_duplicates(model, photographs, tmp_path, capsys, run_command):
    (folder := tmp_path / "drawn").mkdir()
    rng = np.random.default_rng(0)
    for number in range(5):
        image = draw((90, 120, 30), rng)
        image.save(folder / f"{number}.png")
        image.resize((70, 60)).save(folder / f"{number}_small.jpg", quality=60)
    features = tmp_path / "features.npz"
    run_command(["embed", model, folder, "--output", features])
    good = damage(photographs)
    assert run("search", features, photographs, "--top-k", "3", "--json") == 1  # two queries cannot be read
    assert [row["query"] for row in rows_of(capsys.readouterr().out)] == [name for name in good for _ in range(3)]
    firsts = [str(folder / f"{number}.png") for number in range(5)]
    groups = rows_of(run_command(["search", features, *firsts, "--top-k", "2", "--group", "--json"]))
    assert len(groups) == 10
    for number, first in enumerate(firsts):
        own = groups[2 * number]
        assert (own["query"], own["image"]) == (first, first)
        assert own["duplicates"] == [str(folder / f"{number}_small.jpg")]
    text = run_command(["search", features, *firsts[:2], "--group"]).splitlines()
    assert [text[0], text[2].split()] == [firsts[0], ["=", str(folder / "0_small.jpg")]]
    assert "--sheet" in run_command(["search", features, *firsts, "--sheet", tmp_path / "sheet.png"], status=2)
    assert run("search", features, firsts[0], "--sheet", tmp_path / "sheet.xyz") == 2
    out, err = capsys.readouterr()
    assert (out, "--sheet" in err) == ("", True)


def test_features_as_text(model, photographs, tmp_path, run_command, monkeypatch):
    """A name that begins like a formula is none; a backend computes the same."""
    monkeypatch.chdir(photographs)
    (photographs / "a.png").rename("=a.png")
    command = ["embed", model, "=a.png", photographs / "c.png", "--output", tmp_path / "f.csv"]
    run_command([*command, "--backend", "openvino"])
    first, second = csv.reader((tmp_path / "f.csv").read_text().splitlines()[1:])
    assert [first[0], second[0]] == ["'=a.png", str(photographs / "c.png")]
    np.testing.assert_allclose([float(text) for text in second[1:]], alone(model, second[0]), rtol=1e-4, atol=1e-5)
    assert "f.csv" in run_command(["search", tmp_path / "f.csv", photographs / "c.png"], status=2)


RULES = [[], ["--top-k", 3], ["--threshold", 0.05], ["--threshold", "auto"], ["--coverage", 0.9], ["--reject"]]


@pytest.fixture(scope="module", params=["onnx", "openvino"])
def exported(request, tmp_path_factory):
    """A calibrated model, and its exported folder."""
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[request.param])
    folder = tmp_path_factory.mktemp("exported")
    config = {"coverage_thresholds": {"0.9": 0.08}, "rejection_thresholds": [0.15] * 11, "label_thresholds": [0.1] * 11}
    model = save_tiny(folder / "model", representation_size=9, **config)
    assert run("export", model, folder / "deployed", "--to", request.param) == 0
    return model, folder / "deployed"


def test_an_exported_folder_prints_the_same(exported, photographs, tmp_path, capsys, run_command):
    deployed = exported[1]
    damaged = photographs / "a" / "4.png"
    intact = damaged.read_bytes()
    for rule in RULES:
        printed = [run_command(["predict", folder, photographs, *rule]) for folder in exported]
        assert printed[0] == printed[1]
        rows = [rows_of(run_command(["predict", folder, photographs, "--json", *rule])) for folder in exported]
        for expected, found in zip(*rows, strict=True):
            assert expected["image"] == found["image"]
            assert [one["label"] for one in expected["predictions"]] == [one["label"] for one in found["predictions"]]
            scores = [[one["score"] for one in answer["predictions"]] for answer in (expected, found)]
            np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
    csv_rows = [run_command(["predict", folder, photographs, "--format", "csv"]).splitlines() for folder in exported]
    assert [row.rpartition(",")[0] for row in csv_rows[0]] == [row.rpartition(",")[0] for row in csv_rows[1]]
    damaged.write_text("no image")
    for folder in exported:
        assert run("predict", folder, photographs, "--batch-size", 2) == 1
        assert str(damaged) in capsys.readouterr().err
    damaged.write_bytes(intact)
    refused = run_command(["predict", deployed, photographs, "--coverage", "0.5"], status=2)
    assert "0.9" in refused
    assert "--image-size" in run_command(["predict", deployed, photographs, "--image-size", "32"], status=2)


def test_an_exported_folder_of_an_older_version_is_named(photographs, run_command):
    folder = ROOT / "tests" / "old_folders" / "deployed"
    assert "older" in run_command(["predict", folder, photographs], status=2)


def test_features_of_an_exported_folder(exported, photographs, tmp_path, run_command):
    features = []
    for number, folder in enumerate(exported):
        stored = tmp_path / f"{number}.npz"
        run_command(["embed", folder, photographs, "--output", stored, "--normalize"])
        features.append(Features(stored))
        found = rows_of(run_command(["search", stored, photographs / "c.png", "--json", "--top-k", 2]))
        assert found[0]["image"] == str(photographs / "c.png")
        run_command(["embed", folder, photographs, "--output", f"{tmp_path}/{number}/", "--normalize"])
        parts = Features(tmp_path / str(number))
        assert parts.names() == features[-1].names()
        np.testing.assert_allclose(parts.rows(np.arange(3)), features[-1].rows(np.arange(3)), atol=1e-4)
    assert features[0].names() == features[1].names()
    np.testing.assert_allclose(*(next(iter(one.chunks())) for one in features), rtol=0, atol=1e-5)
    assert features[0].about["sha256"] != features[1].about["sha256"]


def test_a_compiled_program_is_used_until_the_model_changes(photographs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("onnxruntime")
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    model = save_tiny(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def answer(*arguments) -> tuple[str, bool]:
        """Return what is printed, and whether the program was used."""
        assert run(*arguments) == 0
        printed = capsys.readouterr()
        return printed.out, "using the program" in printed.err

    expected = answer("predict", model, photographs)
    assert not expected[1]
    answer("compile", model)
    assert answer("predict", model, photographs) == (expected[0], True)
    assert answer("predict", "model", photographs) == (expected[0], True)  # the same folder
    assert answer("predict", model, photographs, "--backend", "eager") == expected
    assert not answer("predict", model, photographs, "--image-size", "40x72")[1]
    assert answer("embed", model, photographs, "--output", "compiled.npz")[1]
    assert not answer("embed", model, photographs, "--output", "eager.npz", "--backend", "eager")[1]
    compiled, eager = Features(tmp_path / "compiled.npz"), Features(tmp_path / "eager.npz")
    assert compiled.about == eager.about
    np.testing.assert_allclose(next(compiled.chunks()), next(eager.chunks()), rtol=0, atol=1e-5)
    os.utime(model / "model.safetensors", (0, 0))
    assert answer("predict", model, photographs) == expected
    answer("compile", model)
    assert answer("predict", model, photographs) == (expected[0], True)


def test_many_images_share_the_cores_by_batches(exported, tmp_path, run_command):
    images = tmp_path / "many"
    rng = np.random.default_rng(1)
    images.mkdir()
    for number in range(70):
        Image.fromarray(rng.integers(0, 255, (20, 36, 3), np.uint8)).save(images / f"{number:02}.png")
    assert len({run_command(["predict", folder, images, "--batch-size", 4]) for folder in exported}) == 1


def test_another_model_is_refused(model, photographs, tmp_path, run_command):
    features, query = tmp_path / "features.npz", photographs / "a.png"
    other = save_tiny(tmp_path / "other", seed=1, representation_size=9)
    run_command(["embed", model, photographs, "--output", features])
    assert str(model) in run_command(["search", features, query, "--model", other], status=2)
    run_command(["embed", other, photographs, "--output", features, "--overwrite"])
    other.rename(tmp_path / "moved")
    assert str(other) in run_command(["search", features, query], status=2)
    run_command(["search", features, query, "--model", tmp_path / "moved"])
    (tmp_path / "cut.npz").write_bytes(features.read_bytes()[:500])
    assert "cut.npz" in run_command(["search", tmp_path / "cut.npz", query], status=2)


def test_a_better_model_in_best_is_named(model, photographs, tmp_path, capsys):
    out = shutil.copytree(model, tmp_path / "out")
    shutil.copytree(model, out / "best")
    for metrics, is_better in (
        ({"accuracy": 0.8, "best": 0.9, "best_metric": "accuracy"}, True),
        ({"loss": 0.5, "best": 0.4, "best_metric": "loss"}, True),
        ({"loss": 0.4, "best": 0.4, "best_metric": "loss"}, False),
        ({"accuracy": 0.8, "best": None, "best_metric": None}, False),
    ):
        (out / "metrics.json").write_text(json.dumps(metrics))
        assert run("predict", out, photographs / "c.png") == 0
        assert (str(out / "best") in capsys.readouterr().err) is is_better, metrics
