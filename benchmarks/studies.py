"""Small versions of the paper's studies, each with one command, a table and pictures.

    python benchmarks/studies.py figure3 --output_dir out       # weight decay, dropout, label smoothing
    python benchmarks/studies.py figure4 --output_dir out       # number of pre-training images, few-shot transfer
    python benchmarks/studies.py figure5 --output_dir out       # accuracy against compute, ViT and hybrids
    python benchmarks/studies.py figure8 --output_dir out       # depth, width, MLP width, patch size
    python benchmarks/studies.py table7 --output_dir out        # SGD and Adam for a ResNet
    python benchmarks/studies.py positions --output_dir out     # Table 8: position embeddings
    python benchmarks/studies.py heads --output_dir out         # Figure 9: class token and mean pooling
    python benchmarks/studies.py axial_resnet --output_dir out  # Figure 13: axial attention in a ViT and in a ResNet
    python benchmarks/studies.py speed --output_dir out         # Figure 12: images per second and largest batch
    python benchmarks/studies.py axial --output_dir out         # multiply-adds of Axial-ViT and ViT

The images are the digits of scikit-learn. Other data: `--dataset mnist --data FOLDER` (t10k-*.gz, split into 8,000 and
2,000) and `--dataset cifar10 --data FOLDER` (train.parquet, test.parquet). The same command continues a stopped study.
The results are runs.csv, study.md and one or two figures. OMP_NUM_THREADS=1 limits it to one core.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import studies_cost
import yaml
from studies_runs import IMAGES, RECIPE, Measure, Row, Setup, Trial, as_markdown, means, run_trials, write_rows

from hf_vit.analysis.compute import Run
from hf_vit.analysis.figures import plot_compute_accuracy, plot_levels, plot_lines
from hf_vit.cli.training import run_training

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCURACY = "held-out accuracy [%]"
SUBSETS = {"digits": (45, 90, 360, 1437), "mnist": (125, 500, 2000, 8000), "cifar10": (250, 1000, 5000)}
SHOTS = 5
NAMES = {"vit": "ViT", "resnet": "ResNet", "adam": "Adam", "sgd": "SGD", "class_token": "class token", "mean": "mean"}


class Study(NamedTuple):
    """Study: levels of the recipe `small`, and the function that draws its results.

    select: levels that all of its models have.
    groups: groups of the recipe's options, whose levels are combined.
    measured: columns of `measure` -> their headings in the table.
    """

    select: Mapping[str, str]
    groups: tuple[str, ...]
    draw: Callable[[Sequence[Row]], "Mapping[str, Figure]"]
    measure: Measure | None = None
    measured: Mapping[str, str] = {}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[*STUDIES, *studies_cost.TABLES])
    parser.add_argument("--dataset", choices=IMAGES, default="digits")
    parser.add_argument("--data", help="folder of mnist or cifar10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="LEVEL", help="trials with one of these levels")
    parser.add_argument("--settings", nargs="+", default=[], metavar="NAME=VALUE", help="training settings: steps=50")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args(argv)
    if (options.data is None) != (options.dataset == "digits"):
        parser.error(f"{options.dataset} needs {'no ' if options.data else ''}--data")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.study in studies_cost.TABLES:
        text, figures = studies_cost.TABLES[options.study]()
        _save(text, figures, options.output_dir)
    else:
        settings = [text for item in options.settings for text in ("--" + item.split("=", 1)[0], item.split("=", 1)[1])]
        setup = Setup(options.output_dir, options.dataset, options.data, options.seeds, settings)
        _run(options.study, setup, options.only)
    print((options.output_dir / "study.md").read_text(encoding="utf-8"))


def _run(name: str, setup: Setup, only: Sequence[str]) -> None:
    """Train the models of a study; after each run, write the table and the pictures of the runs so far."""
    study, rows = STUDIES[name], []
    trials = trials_of(name, setup.dataset)
    if only:
        known = {str(level) for trial in trials for level in trial.columns.values()}
        if unknown := sorted(set(only) - known):
            raise SystemExit(f"{name} has no level {', '.join(unknown)} (expected {', '.join(sorted(known))})")
        trials = [trial for trial in trials if set(map(str, trial.columns.values())) & set(only)]
    for row in run_trials(trials, setup, study.measure):
        rows.append(row)
        write_rows(rows, setup.output / "runs.csv")
        _save(as_markdown(rows, study.measured), study.draw(rows), setup.output)


def _save(text: str, figures: "Mapping[str, Figure]", output: Path) -> None:
    (output / "study.md").write_text(text + "\n", encoding="utf-8")
    for name, figure in figures.items():
        figure.savefig(output / f"{name}.png")


def trials_of(name: str, dataset: str) -> list[Trial]:
    """Return every combination of a study's levels; for Figure 4, with every number of images."""
    study = STUDIES[name]
    levels = [levels_of(group) for group in study.groups]
    selections = [dict(zip(study.groups, combination, strict=True)) for combination in product(*levels)]
    if name != "figure4":
        return [Trial({**select}, {**study.select, **select}) for select in selections]
    split = "test" if dataset == "mnist" else "train"  # for MNIST only the test file is used; see small.yaml
    return [
        Trial({**select, "images": images}, {**study.select, **select}, ["--train_split", f"{split}[:{images}]"])
        for select in selections
        for images in SUBSETS[dataset]
    ]


def levels_of(group: str) -> list[str]:
    """Return the levels of one group of the recipe's options."""
    return list(map(str, yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["options"][group]))


def few_shot(folder: Path, setup: Setup) -> dict[str, float]:
    """Return the 5-shot accuracy of the frozen features in percent, on the digits for MNIST, else on the same data."""
    dataset = "digits" if setup.dataset in ("digits", "mnist") else str(setup.data)
    arguments = ["--model", str(folder), "--protocol", "few_shot", "--dataset", dataset, "--shots", str(SHOTS)]
    with redirect_stdout(sys.stderr):
        result = run_training("evaluate", [*arguments, "--seeds", "5", "--num_workers", "0"])
    return {"few_shot": 100 * result["few_shot"][0]["accuracy"]}


# Pictures


def lines_of(
    rows: Sequence[Row], line: Callable[[Row], str], x: Callable[[Row], float], y: str = "accuracy"
) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line by x, as means over seeds."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for (name, place), value in means(rows, lambda row: (line(row), x(row)), y).items():
        lines.setdefault(name, []).append((place, value))
    return {name: sorted(points) for name, points in lines.items()}


def draw_regularization(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    lines = lines_of(
        rows,
        lambda row: f"dropout {row['dropout']}, label smoothing {row['label_smoothing']}",
        lambda row: float(row["weight_decay"]),
    )
    return {"figure3": plot_lines(lines, "weight decay", ACCURACY, "Regularization on few images")}


def draw_subsets(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    def of(column: str) -> dict[str, list[tuple[float, float]]]:
        return lines_of(rows, lambda row: NAMES[row["architecture"]], lambda row: row["images"], column)

    x, title = "images of pre-training", "Images of pre-training, for as many steps"
    return {
        "figure4": plot_lines(of("few_shot"), x, f"linear {SHOTS}-shot accuracy [%]", title),
        "figure4-held-out": plot_lines(of("accuracy"), x, ACCURACY, title),
    }


def draw_optimizers(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    def training(row: Row) -> tuple[str, float]:
        optimizer, rate = row["training"].split("-")
        return NAMES[optimizer], float(rate)

    lines = lines_of(rows, lambda row: training(row)[0], lambda row: training(row)[1])
    return {"table7": plot_lines(lines, "learning rate", ACCURACY, "Adam and SGD for a ResNet")}


def draw_dimensions(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    """Draw the lines of all dimensions; they all go through the base model."""
    base = [row for row in rows if row["change"] == "none"]
    changed = [row for row in rows if row["change"] != "none"]
    if not base:
        return {}
    dimensions = list(dict.fromkeys(row["change"].split("-")[0] for row in changed)) or ["base"]
    named = [(row["change"].split("-")[0], row) for row in changed] + [
        (name, row) for name in dimensions for row in base
    ]
    lines = lines_of(
        [{**row, "dimension": name} for name, row in named],
        lambda row: row["dimension"],
        lambda row: row["multiply_adds"] / base[0]["multiply_adds"],
    )
    return {"figure8": plot_lines(lines, "compute, relative to the base", ACCURACY, "One dimension at a time")}


def draw_heads(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    lines = lines_of(rows, lambda row: NAMES[row["head"]], lambda row: float(row["rate"]))
    return {"heads": plot_lines(lines, "learning rate", ACCURACY, "Class token and mean pooling")}


def draw_positions(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    levels: dict[str, list[float]] = {}
    for row in rows:
        levels.setdefault(row["positions"], []).append(row["accuracy"])
    return {"positions": plot_levels(levels, ACCURACY, "Position embeddings")}


def draw_compute(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    """Draw accuracy against compute, with a point for each seed; a size named R+... is a hybrid."""
    runs = [
        Run(name, "Hybrid" if name.startswith("R+") else "ViT", row["exaflops"], row["accuracy"])
        for row in rows
        for name in [row["size"]]
    ]
    return {"figure5": plot_compute_accuracy(runs, ACCURACY)}


def draw_axial(rows: Sequence[Row]) -> "Mapping[str, Figure]":
    runs = [Run(row["model"], row["model"], row["exaflops"], row["accuracy"]) for row in rows]
    speed = lines_of(rows, lambda row: row["model"], lambda row: row["images_per_second"])
    return {
        "axial_resnet": plot_compute_accuracy(runs, ACCURACY),
        "axial_resnet-speed": plot_lines(speed, "images a second", ACCURACY, "Accuracy against speed"),
    }


STUDIES = {
    "figure3": Study(
        {"length": "short", "images": "360"}, ("weight_decay", "dropout", "label_smoothing"), draw_regularization
    ),
    "figure4": Study(
        {"length": "short", "label_smoothing": "0"},
        ("architecture",),
        draw_subsets,
        few_shot,
        {"few_shot": f"linear {SHOTS}-shot, %"},
    ),
    "figure5": Study({}, ("size",), draw_compute),
    "figure8": Study({"length": "short"}, ("change",), draw_dimensions),
    "table7": Study({"length": "short", "architecture": "resnet"}, ("training",), draw_optimizers),
    "positions": Study({}, ("positions",), draw_positions),
    "heads": Study({}, ("head", "rate"), draw_heads),
    "axial_resnet": Study(
        {"length": "short"},
        ("model",),
        draw_axial,
        studies_cost.images_per_second_of,
        {"images_per_second": "images a second"},
    ),
}


if __name__ == "__main__":
    main()
