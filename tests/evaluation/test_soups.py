"""Averages of fine-tuned models, against NumPy's mean; the greedy choice, against the paper's algorithm 1 in NumPy."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from scipy.stats import binomtest

import hf_vit
from hf_vit.cli import main
from hf_vit.hub.cards import render_folder_card
from hf_vit.loading import save_folder

from ..photographs import write_colors
from ..tiny_models import save_tiny

QUIET = {"num_workers": 0, "eval_batch_size": 9}


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of classes without splits, of which a share is held out."""
    return write_colors(tmp_path_factory.mktemp("photographs"), train=30) / "train"


@pytest.fixture(scope="module")
def runs(tiny, photographs, tmp_path_factory):
    """A run, and others that differ from it by noise, with its record; the last one is the worst."""
    root = tmp_path_factory.mktemp("runs")
    first = root / "0"
    hf_vit.finetune(tiny, photographs, first, recipe="instant", eval_fraction=0.3, **QUIET)
    generator = torch.Generator().manual_seed(0)
    for number, noise in enumerate((0.1, 0.4, 2.0), start=1):
        model, processor = hf_vit.load(first)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
        save_folder(root / str(number), model, processor)
        shutil.copy(first / "card_data.json", root / str(number))
    return [root / str(number) for number in range(4)]


def numpy_mean(folders):
    """NumPy's mean in float64, rounded once."""
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    return {
        name: np.mean([one[name].astype(np.float64) for one in weights], axis=0).astype(np.float32)
        for name in weights[0]
    }


def assert_equal_bits(folder, expected):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        np.testing.assert_array_equal(weight.view(np.uint32), expected[name].view(np.uint32), err_msg=name)


def test_a_uniform_soup_is_the_mean(runs, tmp_path):
    record = hf_vit.soup(runs, None, tmp_path / "soup", method="uniform")
    assert_equal_bits(tmp_path / "soup", numpy_mean(runs))
    assert record["soup"] == {}


def test_a_greedy_soup_is_that_of_the_paper(runs, photographs, tmp_path):
    """Algorithm 1 of arXiv 2203.05482, with accuracies on the images of predictions.csv."""

    with open(runs[0] / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    model, processor = hf_vit.load(runs[0])
    inputs = processor([photographs / row["file"] for row in rows], return_tensors="pt")
    labels = [row["label"] for row in rows]

    def accuracy_of_mean(folders):
        model.load_state_dict({name: torch.from_numpy(one) for name, one in numpy_mean(folders).items()})
        with torch.inference_mode():
            predicted = model(**inputs).logits.argmax(dim=1).tolist()
        return np.mean(
            [model.config.id2label[number] == label for number, label in zip(predicted, labels, strict=True)]
        )

    singles = {run: accuracy_of_mean([run]) for run in runs}
    chosen, best = [], -1.0
    for run in sorted(runs, key=lambda run: -singles[run]):
        found = accuracy_of_mean([*chosen, run])
        if found >= best:
            chosen, best = [*chosen, run], found
    assert 1 < len(chosen) < len(runs)

    record = hf_vit.soup(runs, photographs, tmp_path / "soup", **QUIET)
    assert {one["model"] for one in record["members"] if one["used"]} == set(map(str, chosen))
    assert_equal_bits(tmp_path / "soup", numpy_mean(chosen))
    assert record["soup"]["accuracy"] == best
    for member in record["members"]:
        assert member["accuracy"] == singles[type(runs[0])(member["model"])]
        images = member["images"]
        interval = binomtest(round(member["accuracy"] * images), images).proportion_ci(method="wilson")
        assert member["accuracy_interval"] == pytest.approx([interval.low, interval.high], abs=1e-4)
    assert json.loads((tmp_path / "soup" / "soup.json").read_text()) == record
    card = render_folder_card(tmp_path / "soup", license="mit")
    assert f"{best:.2%}" in card
    assert "2203.05482" in card


def test_the_command_names_the_best_single_model(runs, photographs, tmp_path, capsys):
    pair = [str(runs[0]), str(runs[3])]
    assert main(["soup", *pair, "--dataset", str(photographs), "--output", str(tmp_path / "soup")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert pair[0] in last
    assert "best single" in last
    assert_equal_bits(tmp_path / "soup", load_file(runs[0] / "model.safetensors"))


def test_soups_of_folds_are_uniform(tiny, photographs, tmp_path):
    hf_vit.finetune(tiny, photographs, tmp_path / "folds", recipe="instant", folds=2, **QUIET)
    folds = [tmp_path / "folds" / f"fold_{number}" for number in (1, 2)]
    stored = json.loads((folds[1] / "metrics.json").read_text())  # by default, a model is evaluated on its own fold
    assert hf_vit.evaluate(folds[1], photographs, **QUIET)["loss"] == pytest.approx(stored["loss"])
    with pytest.raises(ValueError, match="45 of the 45"):
        hf_vit.soup(folds, photographs, tmp_path / "soup", **QUIET)
    assert hf_vit.soup(folds, photographs, tmp_path / "soup", "uniform", **QUIET)["soup"] == {}
    assert_equal_bits(tmp_path / "soup", numpy_mean(folds))
    others = write_colors(tmp_path / "others", suffix="jpg", test=4)  # no file of which is among those of the folds
    measured = hf_vit.soup(folds, others, tmp_path / "measured", **QUIET)
    assert measured["soup"]["images"] == 12


@pytest.mark.parametrize("case", ["no record", "changed data", "same model", "other classes", "other size", "trained"])
def test_refusals(case, runs, photographs, tiny, tmp_path):
    members, data, settings, named = [runs[0], runs[1]], photographs, {}, "1"
    if case == "no record":
        members[1] = shutil.copytree(runs[1], tmp_path / "1", ignore=shutil.ignore_patterns("card_data.json"))
        named = "card_data.json"
    elif case == "changed data":
        data = shutil.copytree(photographs, tmp_path / "photographs")
        record = json.loads((runs[1] / "card_data.json").read_text())
        record["settings"]["dataset"] = str(data)
        members[1] = shutil.copytree(runs[1], tmp_path / "1")
        (members[1] / "card_data.json").write_text(json.dumps(record))
        (data / "red" / "0.png").unlink()
        data, named = photographs, "changed"
    elif case == "same model":
        members, named = [runs[0], runs[0]], "two different"
    elif case == "other classes":
        members[1], named = tiny, "classes"
    elif case == "other size":
        members[1] = save_tiny(tmp_path / "other", num_labels=3, hidden_size=16)
        model, processor = hf_vit.load(members[1], head="new", labels=["blue", "green", "red"])
        save_folder(members[1], model, processor, overwrite=True)
        named = "architecture"
    else:
        settings, named = {"split": "train"}, "63 of the 90"
    with pytest.raises(ValueError, match=named):
        hf_vit.soup(members, data, tmp_path / "soup", **settings, **QUIET)
    assert not (tmp_path / "soup").exists()
