"""Regression from a table to predictions, in closed form and by gradient, against scikit-learn and NumPy."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import spearmanr
from sklearn.linear_model import Ridge
from sklearn.metrics import mean_absolute_error, r2_score

import hf_vit
from hf_vit.cli import main
from hf_vit.conversion import export
from hf_vit.inference.least_squares import BIAS, EPSILON

QUIET = {"num_workers": 0, "eval_batch_size": 16}
IN_STEPS = {
    "batch_size": 16,
    "report_to": "none",
    "label_column": "redness,light",
    "crop": "none",
    "flip": False,
    **QUIET,
}


def write_pictures(folder: Path, count: int = 48) -> np.ndarray:
    """Write pictures whose lower part is red, and a table with the share (in percent) and the brightness."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    targets = np.stack([rng.uniform(5, 95, count), 1000 + 50 * rng.random(count)], axis=1)
    rows = ["file_name,redness,light"]
    for number, (redness, light) in enumerate(targets):
        pixels = np.full((20, 36, 3), (light - 1000) * 4)
        pixels[round(20 * (1 - redness / 100)) :, :, 0] = 255
        Image.fromarray((pixels + rng.integers(0, 20, pixels.shape)).clip(0, 255).astype(np.uint8)).save(
            folder / f"{number:02}.png"
        )
        rows.append(f"{number:02}.png,{redness},{light}")
    (folder / "metadata.csv").write_text("\n".join(rows))
    return targets


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("regression") / "pictures"
    write_pictures(folder)
    return folder


def read_predictions(folder: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The files of predictions.csv, the targets and the predictions."""
    with open(folder / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in ("row", "file") and not name.startswith("predicted ")]
    true = np.array([[float(row[name]) for name in names] for row in rows])
    return (
        [row["file"] for row in rows],
        true,
        np.array([[float(row[f"predicted {name}"]) for name in names] for row in rows]),
    )


def test_a_head_in_closed_form_is_ridge(tiny, pictures, tmp_path):
    """The fit is scikit-learn's on big_vision's inputs; metrics are scikit-learn's and scipy's."""
    settings = {"recipe": "instant", "l2_reg": 4.0, "eval_fraction": 0.25, "label_column": "redness,light"}
    metrics = hf_vit.finetune(tiny, pictures, tmp_path / "out", **settings, **QUIET)
    files, true, predicted = read_predictions(tmp_path / "out")
    with open(pictures / "metadata.csv") as table:
        rows = list(csv.DictReader(table))
    train = [row for row in rows if row["file_name"] not in files]
    targets = np.array([[float(row["redness"]), float(row["light"])] for row in train])
    features = [
        hf_vit.embed(tiny, [pictures / name for name in names]).astype(np.float64)
        for names in ([row["file_name"] for row in train], files)
    ]
    mean, deviation = features[0].mean(axis=0), features[0].std(axis=0) + EPSILON
    inputs = [np.pad((one - mean) / deviation, ((0, 0), (0, 1)), constant_values=BIAS) for one in features]
    ridge = Ridge(alpha=4.0, fit_intercept=False, solver="svd").fit(
        inputs[0], (targets - targets.mean(0)) / targets.std(0)
    )
    expected = ridge.predict(inputs[1]) * targets.std(0) + targets.mean(0)
    np.testing.assert_allclose(predicted, expected, rtol=1e-5)
    for column, name in enumerate(("redness", "light")):
        pair = true[:, column], predicted[:, column]
        assert metrics[f"mae/{name}"] == pytest.approx(mean_absolute_error(*pair), rel=1e-5)
        assert metrics[f"r2/{name}"] == pytest.approx(r2_score(*pair), abs=1e-5)
        assert metrics[f"spearman/{name}"] == pytest.approx(spearmanr(*pair).statistic, abs=1e-6)
        low, high = metrics[f"r2_interval/{name}"]
        assert low < metrics[f"r2/{name}"] < high
    assert metrics["r2/light"] > 0.9


def test_one_folder_through_every_door(tiny, pictures, tmp_path, capsys):
    """`auto` finds the only column of fractions; predict and evaluate give the same values."""
    table = (pictures / "metadata.csv").read_text().splitlines()
    data = shutil.copytree(pictures, tmp_path / "data")
    (data / "metadata.csv").write_text("\n".join(line.rpartition(",")[0] for line in table))
    out = tmp_path / "out"
    metrics = hf_vit.finetune(tiny, data, out, recipe="instant", **QUIET)
    assert json.loads((out / "config.json").read_text())["problem_type"] == "regression"
    assert {"report.html", "scatter.png", "predictions.csv"} <= {file.name for file in out.iterdir()}
    evaluated = hf_vit.evaluate(out, data, **QUIET)
    assert [evaluated[name] for name in ("mae", "r2", "samples")] == [
        metrics[name] for name in ("mae", "r2", "samples")
    ]
    files, _, predicted = read_predictions(out)
    [[value]] = hf_vit.predict(out, data / files[0])
    assert value == ("redness", pytest.approx(predicted[0, 0], rel=1e-5))
    capsys.readouterr()
    assert main(["predict", str(out), str(data / files[0]), "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["predictions"] == [{"label": "redness", "value": pytest.approx(predicted[0, 0], rel=1e-5)}]
    assert main(["predict", str(out), str(data / files[0]), "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "image,label,value"
    with pytest.raises(ValueError, match="threshold"):
        hf_vit.predict(out, data / files[0], threshold=0.5)
    with pytest.raises(ValueError, match="calibrate"):
        hf_vit.calibrate(out, data, tmp_path / "calibrated")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["onnx", "openvino"])
def test_an_exported_folder_gives_the_same_values(tiny, pictures, tmp_path, capsys, program):
    hf_vit.finetune(tiny, pictures, tmp_path / "out", recipe="instant", label_column="redness,light", **QUIET)
    model, processor = hf_vit.load(tmp_path / "out")
    export(model, tmp_path / "exported", to=program, processor=processor)
    capsys.readouterr()
    files, _, predicted = read_predictions(tmp_path / "out")
    assert main(["predict", str(tmp_path / "exported"), str(pictures / files[0]), "--json"]) == 0
    values = [entry["value"] for entry in json.loads(capsys.readouterr().out)["predictions"]]
    assert values == pytest.approx(predicted[0].tolist(), rel=1e-4)


def test_training_in_steps(tiny, pictures, tmp_path):
    """The head is in the targets' units; a run that goes on from the one in closed form begins with its predictions."""
    solved = hf_vit.finetune(
        tiny, pictures, tmp_path / "solved", recipe="instant", label_column="redness,light", **QUIET
    )
    for loss in ("mse", "huber"):
        same = {"steps": 1, "learning_rate": 1e-12, "loss": loss}
        metrics = hf_vit.finetune(tmp_path / "solved", pictures, tmp_path / f"same_{loss}", **same, **IN_STEPS)
        assert metrics["mae/light"] == pytest.approx(solved["mae/light"], rel=1e-4)
    new = hf_vit.finetune(tiny, pictures, tmp_path / "new", steps=1, learning_rate=1e-12, head="new", **IN_STEPS)
    assert new["mae/light"] < 20  # the mean of about 1025; a head of zeros would be 1000 away


@pytest.mark.slow
def test_a_model_is_trained_by_gradient(tiny, pictures, tmp_path):
    trained = hf_vit.finetune(
        tiny,
        pictures,
        tmp_path / "trained",
        steps=60,
        learning_rate=3e-3,
        optimizer="adamw",
        early_stopping=50,
        **IN_STEPS,
    )
    assert trained["r2/light"] > 0.5
    assert trained["best_metric"] == "loss"
    assert trained["best"] <= trained["loss"]
    [values] = hf_vit.predict(tmp_path / "trained", pictures / read_predictions(tmp_path / "trained")[0][0])
    assert [one.value for one in values] == pytest.approx(read_predictions(tmp_path / "trained")[2][0], rel=1e-4)


@pytest.mark.parametrize(
    ("cell", "settings", "named"),
    [
        ("", {}, "metadata.csv, line 4"),
        ("inf", {}, "metadata.csv, line 4"),
        ("nan", {}, "metadata.csv, line 4"),
        ("many", {"task": "regression"}, "metadata.csv, line 4"),
        ("1.5", {"mixup_alpha": 0.2}, "mixup_alpha"),
        ("1.5", {"loss": "softmax"}, "softmax"),
        ("1.5", {"label_column": "weight"}, "weight"),
        ("1.5", {"task": "multi-label"}, "redness"),
    ],
    ids=str,
)
def test_values_and_settings_that_are_refused(cell, settings, named, tiny, pictures, tmp_path):
    data = shutil.copytree(pictures, tmp_path / "data")
    lines = [line.rpartition(",")[0] for line in (pictures / "metadata.csv").read_text().splitlines()]
    lines[3] = f"02.png,{cell}"
    (data / "metadata.csv").write_text("\n".join(lines))
    settings = {"steps": 1, "batch_size": 4, "label_column": "redness", "report_to": "none", **settings}
    with pytest.raises(ValueError, match=named):
        hf_vit.finetune(tiny, data, tmp_path / "out", **settings, **QUIET)


def test_constants_and_whole_numbers(tiny, pictures, tmp_path):
    """A constant is refused; integers are classes, and a regression where the task says so."""
    data = shutil.copytree(pictures, tmp_path / "data")
    names = sorted(file.name for file in data.glob("*.png"))
    (data / "metadata.csv").write_text("\n".join(["file_name,target", *(f"{name},2.5" for name in names)]))
    with pytest.raises(ValueError, match="target is 2"):
        hf_vit.finetune(tiny, data, tmp_path / "out", recipe="instant", **QUIET)
    rows = [f"{name},{number % 3}" for number, name in enumerate(names)]
    (data / "metadata.csv").write_text("\n".join(["file_name,target", *rows]))
    assert "accuracy" in hf_vit.finetune(tiny, data, tmp_path / "classes", recipe="instant", **QUIET)
    assert "r2" in hf_vit.finetune(tiny, data, tmp_path / "numbers", recipe="instant", task="regression", **QUIET)
