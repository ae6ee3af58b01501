"""The result page of a run: scikit-learn and NumPy recompute its numbers from predictions.csv."""

import base64
import csv
import json
import re
from importlib.resources import files

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from hf_vit.data.sources import load_split
from hf_vit.data.splits import open_split
from hf_vit.inference.result_page import Explanation, HeldOut, write_card_results, write_results
from hf_vit.loading import load, save_folder
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.relevance import class_relevance
from hf_vit.training.reports import write_curve

from ..commands import evaluate, finetune
from ..html_pages import Page
from ..processes import arguments, history
from ..tiny_models import save_tiny, tiny_bit

COLORS = {"<script>": (40, 180, 60), "blue": (40, 60, 190), "red": (190, 40, 50)}
SWAPPED = {"blue/red-1.png", "red/blue-0.png", "red/blue-2.png"}


def sheets(page: Page) -> list[list[str]]:
    """The file names of the pictures of each contact sheet."""
    found = []
    for tag, attrs in page.elements:
        if attrs.get("class") == "sheet":
            found.append([])
        elif tag == "img" and found and not attrs["alt"].startswith("relevance for"):
            found[-1].append(attrs.get("alt"))
    return found


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    """Folders of one color each; in "test" three files lie in the folder of another color, under their own name."""
    root, rng = tmp_path_factory.mktemp("colors"), np.random.default_rng(3)
    for split, count in (("train", 12), ("test", 7)):
        for name, color in COLORS.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(np.array(color) + rng.integers(-60, 60, (20, 36, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{name.strip('<>')}-{number}.png")
    for file in SWAPPED:
        name = file.split("/")[1]
        (root / "test" / name.split("-")[0] / name).rename(root / "test" / file)
    return root


@pytest.fixture(scope="module")
def run(colors, tmp_path_factory):
    """A model fine-tuned on the colors: its folder and its metrics."""
    output = tmp_path_factory.mktemp("runs") / "out"
    model = save_tiny(tmp_path_factory.mktemp("pretrained") / "tiny")
    settings = {"model": model, "dataset": colors, "eval_split": "test", "output_dir": output, "steps": 40}
    settings |= {"batch_size": 9, "learning_rate": 0.02, "crop_area": "0.8,1", "num_workers": 0, "report_to": "none"}
    return output, finetune(arguments(**settings))


def read_predictions(folder) -> list[dict[str, str]]:
    with open(folder / "predictions.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f}%"


def test_swapped_labels_are_the_most_confident_mistakes(run):
    output, metrics = run
    html = (output / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    mistakes, least_sure = sheets(page)
    assert {f"test/{file}" for file in SWAPPED} == set(mistakes[:3])
    rows = sorted(read_predictions(output), key=lambda row: float(row["probability"]))
    assert least_sure == [row["file"] for row in rows]
    assert f"{percent(metrics['accuracy'], 2)}" in page.texts
    assert re.search(r"\b18\D+21\b", html)
    assert "script" not in page.tags
    assert any("<script>" in text for text in page.texts)
    assert len(html) < 1_000_000
    assert not re.search(r"""(src|href)=["'](?!data:)""", html)
    curve = base64.b64encode((output / "learning_curve.png").read_bytes()).decode()
    assert next(attrs["src"] for tag, attrs in page.elements if tag == "img") == f"data:image/png;base64,{curve}"


def test_numbers_are_those_of_scikit_learn(run):
    output, metrics = run
    rows, page = read_predictions(output), Page((output / "report.html").read_text(encoding="utf-8"))
    labels, predicted = ([row[name] for row in rows] for name in ("label", "prediction"))
    names = sorted(COLORS)
    matrix = confusion_matrix(labels, predicted, labels=names)
    shown = page.table("", *names)
    assert [[int(cell.replace("·", "0")) for cell in row[1:]] for row in shown] == matrix.tolist()
    assert [row[0] for row in shown] == names
    precision, recall, _, counts = map(np.asarray, precision_recall_fscore_support(labels, predicted, labels=names))
    by_class = {row[0]: row[1:] for row in page.table("class", "images")}
    evaluated = [entry for entry in history(output) if "eval_loss" in entry]
    for place in (metrics, {name.removeprefix("eval_"): value for name, value in evaluated[-1].items()}):
        assert [place[f"accuracy/{name}"] for name in names] == pytest.approx(recall)
    for number, name in enumerate(names):
        images, right = str(counts[number]), str(matrix[number, number])
        expected = [images, right, str(predicted.count(name)), percent(recall[number]), percent(precision[number])]
        assert by_class[name] == expected
    probability, right = np.array([float(row["probability"]) for row in rows]), np.array(labels) == np.array(predicted)
    bins = np.ceil(probability * 15).clip(1)  # (low, high], Guo et al., equation 3
    error = sum(abs(right[bins == one].sum() - probability[bins == one].sum()) for one in set(bins)) / len(rows)
    assert percent(error, 2) in "".join(page.texts)
    assert sum(int(row[1]) for row in page.table("probability", "images")) == len(rows) == metrics["samples"]


def test_evaluation_writes_the_same_page(run, colors, tmp_path):
    output, metrics = run
    settings = {"model": output, "dataset": colors, "num_workers": 0, "eval_batch_size": 5}
    again = evaluate(arguments(**settings, split="test", output_dir=tmp_path / "results"))
    assert again["accuracy"] == metrics["accuracy"]
    for mine, theirs in zip(read_predictions(tmp_path / "results"), read_predictions(output), strict=True):
        assert float(mine.pop("probability")) == pytest.approx(float(theirs.pop("probability")), abs=1e-5)
        for name in ("row", "file", "label", "prediction"):
            assert mine[name] == theirs[name]
    mine, theirs = (sheets(Page((folder / "report.html").read_text()))[0] for folder in (tmp_path / "results", output))
    assert mine == theirs


def test_many_classes_and_two_of_one_name(colors, tmp_path):
    split = open_split(load_split(str(colors), "test"))
    names = ["crane", "crane", *map(str, range(2, 16))]
    ranked = np.arange(16)[:, None].repeat(2, 1)
    labels = np.where(np.arange(16) < 3, -1, ranked[:, 0])
    labels[5] = 0
    found = {"ranked": ranked, "probabilities": np.full((16, 2), 0.5), "label": labels}
    found |= {"index": np.arange(16), "skipped": 1}
    write_results(tmp_path, HeldOut(found, split, names, colors), "many", {}, "")
    page = Page((tmp_path / "report.html").read_text())
    assert page.table("label", "predicted as") == [["crane (0)", "5", "1"]]
    assert [row[0] for row in page.table("class")][:2] == ["crane (0)", "3"]
    assert [row["label"] for row in read_predictions(tmp_path)][:4] == ["", "", "", "3"]


@pytest.fixture
def drawn(monkeypatch):
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    keep = lambda figure, *at, **how: drawn.append(figure) or save(figure, *at, **how)  # noqa: E731
    monkeypatch.setattr(figures.Figure, "savefig", keep)
    return drawn


def test_the_curve_has_the_colors_of_the_page(tmp_path, drawn):
    write_curve([{"step": 5, "loss": 2.0}, {"step": 9, "loss": 1.0, "eval_loss": 1.5}], tmp_path / "curve.png")
    training, held_out = drawn[0].axes[0].lines
    light = files("hf_vit.files").joinpath("page.css").read_text().splitlines()[0]
    assert f"--soft: {training.get_color()};" in light
    assert f"--bar: {held_out.get_color()};" in light
    assert training.get_xydata().tolist() == [[5, 2], [9, 1]]
    assert drawn[0].axes[0].get_ylim()[0] == 0


def test_what_a_run_leaves_for_its_card(run, tmp_path, drawn):
    """scikit-learn judges the numbers of a few classes; of many there is no picture, but the worst and the mistakes."""
    output, _ = run
    data = json.loads((output / "card_data.json").read_text())
    assert data["figures"] == ["confusion_matrix.png", "learning_curve.png"]
    for name in data["figures"]:
        with Image.open(output / name) as picture:
            assert picture.format == "PNG"
        assert (output / name).stat().st_size < 200_000
    names, rows = sorted(COLORS), read_predictions(output)
    labels, predicted = (np.array([names.index(row[name]) for row in rows]) for name in ("label", "prediction"))
    matrix = confusion_matrix(labels, predicted)

    def leave(labels, predicted, names):
        found = {"label": np.array(labels), "ranked": np.array(predicted)[:, None]}
        return write_card_results(tmp_path, HeldOut(found, None, names, tmp_path))

    expected = [[name, row.sum(), row[number]] for number, (name, row) in enumerate(zip(names, matrix, strict=True))]
    assert [list(one.values()) for one in data["classes"]] == expected
    leave([*labels, 1], [*predicted, 1], [names[0], "蘭", "$red$"])  # letters that the font lacks, and no formula
    axes = drawn[-1].axes[0]
    leave([0, 2, 2], [0, 2, 2], [names[0], "never seen", "蘭"])
    assert [label.get_text() for label in drawn[-1].axes[0].get_yticklabels()] == ["<script>", "class 2"]
    matrix[1, 1] += 1
    assert [int(text.get_text().replace("·", "0")) for text in axes.texts] == matrix.ravel().tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["<script>", "class 1", "$red$"]
    (tmp_path / "confusion_matrix.png").unlink()
    many = leave([*range(40), 3, 3, 7], [*range(40), 5, 5, 8], [f"kind {number}" for number in range(40)])
    assert not (tmp_path / "confusion_matrix.png").exists()
    assert (many["num_classes"], len(many["classes"])) == (40, 10)
    assert many["classes"][:2] == [
        {"name": "kind 3", "images": 3, "right": 1},
        {"name": "kind 7", "images": 2, "right": 1},
    ]
    assert many["mistaken"] == [["kind 3", "kind 5", 2], ["kind 7", "kind 8", 1]]


def test_each_mistake_shows_what_speaks_for_the_label_and_for_the_prediction(run, colors):
    """The picture is the model's input, with the brightness of the relevance."""
    output, _ = run
    page = Page((output / "report.html").read_text())
    maps = [attrs for tag, attrs in page.elements if tag == "img" and attrs["alt"].startswith("relevance for")]
    assert len(maps) == 2 * len(SWAPPED)
    assert {one["alt"] for one in maps} <= {f"relevance for {name}" for name in COLORS}
    assert len({one["src"] for one in maps}) > len(SWAPPED)
    model, processor = load(output)
    file = str(colors / "test" / "blue" / "red-1.png")
    pictures = Explanation(model, processor)({"bytes": None, "path": file}, [0, 2])
    pixel_values = processor(file, return_tensors="pt").pixel_values
    for picture, target in zip(pictures, (0, 2), strict=True):
        [relevance] = class_relevance(model, pixel_values, torch.tensor([target]))
        row, column = divmod(int(relevance.argmax()), relevance.shape[1])
        height, width = (size // count for size, count in zip(picture.shape, relevance.shape, strict=False))
        center = (row * height + height // 2, column * width + width // 2)
        visible = np.asarray(Image.open(file).resize(picture.shape[1::-1], Image.Resampling.BILINEAR), float)
        shares = picture / np.maximum(visible, 1)
        assert shares[center].mean() > 0.85
        assert shares.min() < 0.75


def test_models_without_attention_have_a_page_without_maps(colors, tmp_path):
    save_folder(
        tmp_path / "model", tiny_bit(image_size=(20, 36)), HfViTImageProcessor(size={"height": 20, "width": 36})
    )
    finetune(
        arguments(
            model=tmp_path / "model",
            dataset=colors,
            eval_split="test",
            output_dir=tmp_path / "out",
            steps=1,
            batch_size=4,
            num_workers=0,
            report_to="none",
        )
    )
    assert "relevance for" not in (tmp_path / "out" / "report.html").read_text()
