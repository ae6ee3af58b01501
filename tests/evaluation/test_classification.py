"""ReaL labels and ObjectNet: labels of each image, and correct predictions."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit import HfViTForImageClassification, HfViTImageProcessor
from hf_vit.evaluation import classification
from hf_vit.evaluation.classification import read_objectnet_classes

from ..commands import evaluate, finetune
from ..comparing import change_json
from ..photographs import draw_picture, table_of
from ..processes import arguments
from ..tiny_models import save_tiny


def prediction(folder, file, crop=0, preset=None) -> list[int]:
    """Return the classes of an image file, best first, without the code of the evaluation."""
    model = HfViTForImageClassification.from_pretrained(folder).eval()
    processor = HfViTImageProcessor(size={"height": 20, "width": 36}, preset=preset or "vit_jax")
    image = Image.open(file)
    image = image.crop((crop, crop, image.width - crop, image.height - crop))
    with torch.inference_mode():
        return model(**processor(image, return_tensors="pt")).logits[0].argsort(descending=True).tolist()


@pytest.fixture(scope="module")
def validation(tmp_path_factory, tiny):
    """Seven of ImageNet's validation files in folders by class, not in the order of their numbers."""
    root, rng = tmp_path_factory.mktemp("imagenet"), np.random.default_rng(1)
    for number, name in zip((5, 2, 7, 1, 3, 6, 4), "aabbccc", strict=True):
        folder = root / "validation" / name
        folder.mkdir(parents=True, exist_ok=True)
        draw_picture(rng.integers(0, 255, 3), rng).save(folder / f"ILSVRC2012_val_{number:08d}.png")
    return root


def labels_by_number(tiny, root) -> list[list[int]]:
    """Return labels: right for images 1, 2, 3 and 5 (the second of two labels), none for 4, wrong for 6 and 7."""
    files = sorted(root.rglob("*.png"), key=lambda file: file.name)
    ranked = [prediction(tiny, file) for file in files]
    right = [row[:1] for row in ranked]
    return [right[0], right[1], [ranked[2][5], ranked[2][0]], [], right[4], ranked[5][1:4], ranked[6][2:3]]


def test_real_labels_are_matched_by_file_name_or_position(tiny, validation, tmp_path):
    real, file = labels_by_number(tiny, validation), tmp_path / "real.json"
    images = sorted(validation.rglob("*.png"), key=lambda file: file.name)
    rows = [{"bytes": image.read_bytes(), "path": None} for image in images]
    table_of(rows, [0] * 7, ["a", "b"]).to_parquet(tmp_path / "validation.parquet")
    settings = {"model": tiny, "num_workers": 0, "eval_batch_size": 3, "protocol": "real", "real_labels": file}
    file.write_text(json.dumps(real))
    for dataset in (validation, tmp_path):
        results = evaluate(arguments(**settings, dataset=dataset))
        assert (results["real_accuracy"], results["real_images"]) == (pytest.approx(4 / 6), 6)
        assert results["samples"] == 7
    for content, named in ((json.dumps(real[:5]), "ReaL"), ("[1, 2]", r"real\.json")):
        file.write_text(content)
        with pytest.raises(ValueError, match=named):
            evaluate(arguments(**settings, dataset=tmp_path))


def test_real_labels_are_downloaded(serve, tiny, validation, monkeypatch):
    real = json.dumps(labels_by_number(tiny, validation)).encode()
    server = serve(lambda request: request.send(real) if "real" in request.path else request.send_error(404))
    monkeypatch.setattr(classification, "_REAL_LABELS", f"{server.url}/real.json")
    results = evaluate(arguments(model=tiny, dataset=validation, num_workers=0, protocol="real"))
    assert results["real_images"] == 6
    with pytest.raises(OSError, match=r"nothing\.json"):
        classification.read_real_labels(f"{server.url}/nothing.json")


@pytest.mark.parametrize("preset", ["timm", "transformers"])
def test_accuracy_with_another_preset(tiny, validation, preset):
    files = sorted(validation.rglob("*.png"))
    expected = np.mean([prediction(tiny, file, preset=preset)[0] == "abc".index(file.parent.name) for file in files])
    settings = {"model": tiny, "dataset": validation, "split": "validation", "num_workers": 0, "preset": preset}
    assert evaluate(arguments(**settings))["accuracy"] == pytest.approx(expected)


def test_accuracy_with_the_native_preset(tiny, colors):
    """Aspect ratios are kept, and a broken image is skipped."""
    results = evaluate(arguments(model=tiny, dataset=colors, num_workers=0, preset="native", eval_batch_size=4))
    assert (results["samples"], results["skipped"]) == (14, 1)


@pytest.mark.parametrize("entry", ["3", [1.0], [True], [-1], [10**400], [[1]], None])
def test_class_files_with_other_values_than_numbers_are_refused(tmp_path, entry):
    (tmp_path / "real.json").write_text(json.dumps([[0, 1], [], entry]))
    with pytest.raises(ValueError, match=r"real\.json"):
        classification.read_real_labels(str(tmp_path / "real.json"))
    (tmp_path / "classes.json").write_text(json.dumps({"cat": [0, 1], "dog": entry}))
    with pytest.raises(ValueError, match=r"classes\.json"):
        read_objectnet_classes(str(tmp_path / "classes.json"))


def test_objectnet_classes_are_those_of_imagenet(shared):
    """The class names of ObjectNet's authors, against ImageNet's by number."""
    classes = read_objectnet_classes(None)
    assert len(classes) == 113
    assert len({number for numbers in classes.values() for number in numbers}) == 125
    names = (shared / "data" / "labels" / "imagenet1k_classes.csv").read_text().splitlines()[1:]
    for folder, number, name in (
        ("alarm_clock", 409, "analog clock"),
        ("tie", 906, "Windsor tie"),
        ("winter_glove", 658, "mitten"),
        ("full_sized_towel", 434, "bath towel"),
        ("weight_scale", 778, "scale"),
    ):
        assert number in classes[folder]
        assert names[number].split(",", 2)[2].strip('"').startswith(name)


def test_accuracy_on_objectnet(tmp_path):
    """Images with a red border, and a folder that ImageNet does not have."""
    model = save_tiny(tmp_path / "model", num_labels=1000)
    rng, files = np.random.default_rng(2), {}
    for folder in ("banana", "blouse", "tv"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(3):
            framed = Image.new("RGB", (19, 16), "red")
            framed.paste(draw_picture(rng.integers(0, 255, 3), rng).resize((15, 12)), (2, 2))
            framed.save(tmp_path / "images" / folder / f"{number}.png")
        files[folder] = sorted((tmp_path / "images" / folder).iterdir())
    ranked = {folder: [prediction(model, file, crop=2)[:5] for file in files[folder]] for folder in ("banana", "tv")}
    classes = {"banana": [ranked["banana"][0][0], ranked["banana"][1][3]], "tv": [ranked["tv"][2][4]]}
    (tmp_path / "classes.json").write_text(json.dumps(classes))
    settings = {"model": model, "dataset": tmp_path / "images", "num_workers": 0, "protocol": "objectnet"}
    results = evaluate(arguments(**settings, objectnet_classes=tmp_path / "classes.json"))
    hits = [
        [not set(classes[name]).isdisjoint(row[:k]) for k in (1, 5)] for name, rows in ranked.items() for row in rows
    ]
    top1, top5 = np.mean(hits, axis=0)
    assert (results["accuracy"], results["top5_accuracy"]) == (pytest.approx(top1), pytest.approx(top5))
    assert (results["samples"], results["skipped"]) == (6, 0)
    assert 0 < top1 < top5


def test_objectnet_refuses_other_classes(tiny, colors, tmp_path):
    """Of the model, and of the folders."""
    for model in (tiny, save_tiny(tmp_path / "model", num_labels=1000)):
        with pytest.raises(ValueError, match="ImageNet"):
            evaluate(arguments(model=model, dataset=colors, num_workers=0, protocol="objectnet"))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tiny, colors):
    """A folder of images without splits, a model that was fine-tuned on it, and the metrics of that run."""
    root = tmp_path_factory.mktemp("tuned")
    shutil.copytree(colors / "train", root / "images")
    settings = {"model": tiny, "dataset": root / "images", "output_dir": root / "out", "num_workers": 0}
    return root, finetune(arguments(**settings, steps=4, batch_size=8, eval_every=1, report_to="none"))


def test_evaluation_takes_the_images_that_training_held_out(tuned, tmp_path, capsys):
    """Of the last model and of the best one; the images may have moved."""
    root, metrics = tuned
    moved = shutil.copytree(root / "images", tmp_path / "elsewhere")
    capsys.readouterr()
    again = evaluate(arguments(model=root / "out", dataset=moved, num_workers=0, output_dir=tmp_path / "again"))
    assert again == pytest.approx({name: metrics[name] for name in again})
    assert again["samples"] == 3
    said = capsys.readouterr()
    assert json.loads(said.out) == again
    assert f"{again['accuracy']:.2%}" in said.err
    files = [(folder / "predictions.csv").read_text() for folder in (root / "out", tmp_path / "again")]
    assert files[0] == files[1]
    best = evaluate(arguments(model=root / "out" / "best", dataset=root / "images", num_workers=0))
    assert best["accuracy"] == metrics["best"]
    assert json.loads((root / "out" / "best" / "card_data.json").read_text())["metrics"]["loss"] == best["loss"]


def test_images_that_training_saw_are_not_taken_for_held_out_ones(tuned, tmp_path):
    root, _ = tuned
    changed = shutil.copytree(root, tmp_path / "changed")
    change_json(changed / "out" / "card_data.json", dataset=str(changed / "images"))
    (changed / "images" / "blue" / "0.png").rename(changed / "images" / "red" / "new.png")
    settings = {"model": changed / "out", "dataset": changed / "images", "num_workers": 0}
    with pytest.raises(ValueError, match="--split train"):
        evaluate(arguments(**settings))
    assert evaluate(arguments(**settings, split="train"))["samples"] == 24


@pytest.mark.parametrize(("splits", "samples"), [(["val", "test"], 4), (["train", "val"], 2), (["train"], 14)])
def test_the_split_of_other_data(tuned, colors, tmp_path, splits, samples):
    """Test before a held-out split of another name, and all images where there is one split only."""
    for split, count in (("val", 1), ("test", 2), ("train", 7)):
        for kind in ("red", "blue") if split in splits else ():
            (tmp_path / split / kind).mkdir(parents=True)
            for number in range(count):
                shutil.copy(colors / "train" / kind / f"{number}.png", tmp_path / split / kind)
    root, _ = tuned
    assert evaluate(arguments(model=root / "out", dataset=tmp_path, num_workers=0))["samples"] == samples
