"""Runs of a study: the recipe `small` at levels of its options and several seeds, each in its own folder.

A finished run is read, a stopped run is continued, and a run with other settings is repeated.
"""

import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

from hf_vit.analysis.compute import training_exaflops
from hf_vit.cli.training import run_training
from hf_vit.data.sources import load_split
from hf_vit.files.output import write_json
from hf_vit.models.compute import count_multiply_adds
from hf_vit.settings.fields import PretrainSettings
from hf_vit.settings.options import parse_settings
from hf_vit.settings.recipes import dump
from hf_vit.training.build import build_config

RECIPE = Path(__file__).parents[1] / "training" / "recipes" / "small.yaml"
IMAGES = {"digits": 1437, "mnist": 8000, "cifar10": 5000}  # training images, as small.yaml splits them

Row = dict[str, Any]
Measure = Callable[[Path, "Setup"], Mapping[str, float]]


class Setup(NamedTuple):
    """Options of the user for any study."""

    output: Path
    dataset: str = "digits"
    data: str | None = None  # folder of mnist or cifar10
    seeds: Sequence[int] = (0,)
    settings: Sequence[str] = ()  # settings of training that override the recipe's: ["--steps", "2"]

    def arguments(self) -> list[str]:
        """Return the settings of training for the data."""
        return [*(["--dataset", self.data] if self.data else []), "--num_workers", "0", *self.settings]


class Trial(NamedTuple):
    """One model of a study.

    columns: columns of its row in the table.
    select: levels of the recipe's options.
    settings: settings of training that override the recipe's.
    """

    columns: dict[str, str | float]
    select: dict[str, str]
    settings: Sequence[str] = ()


def run_trials(trials: Sequence[Trial], setup: Setup, measure: Measure | None = None) -> Iterator[Row]:
    """Train each trial with every seed; yield the row of each finished run.

    A row has the columns of its trial, `seed`, `accuracy` (percent), `multiply_adds` (of an image), `exaflops` (of the
    training), `cpu_seconds` (of the training), and the columns that `measure` returns for the folder of the model.
    """
    for trial in trials:
        for seed in setup.seeds:
            name = "-".join(str(value).replace("/", "-") for value in (*trial.columns.values(), "seed", seed))
            folder = setup.output / "runs" / name
            select = [f"{group}={level}" for group, level in ({"data": setup.dataset} | trial.select).items()]
            arguments = ["--recipe", str(RECIPE), "--select", *select, "--seed", str(seed)]
            arguments += ["--report_to", "none", "--eval_every", str(10**9), "--save_every", "200"]
            arguments += ["--loss", "softmax", "--compile", "false"]  # as a run writes them in place of auto
            arguments += [*setup.arguments(), *trial.settings, "--output_dir", str(folder)]
            file = setup.output / "results" / f"{name}.json"
            result = _train(arguments, folder, file)
            if measure is not None and "measured" not in result:
                result["measured"] = dict(measure(folder, setup))
                write_json(file, result)
            yield {**trial.columns, "seed": seed, **_numbers(arguments, result), **result.get("measured", {})}


def _train(arguments: Sequence[str], folder: Path, file: Path) -> dict[str, Any]:
    """Return the result of an earlier, continued or new run with these settings, and save it to `file`."""
    settings, recipe = parse_settings(PretrainSettings, list(arguments)), folder / "recipe.yaml"
    is_same = recipe.exists() and recipe.read_text(encoding="utf-8") == dump(settings)
    if is_same and file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    goes_on = is_same and (folder / "checkpoints").is_dir()
    start = time.process_time()
    with redirect_stdout(sys.stderr):
        metrics = run_training("pretrain", [*arguments, "--resume" if goes_on else "--overwrite"])
    measured = {"accuracy": metrics["accuracy"], "cpu_seconds": time.process_time() - start}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, measured)
    return measured


def _numbers(arguments: Sequence[str], result: Mapping[str, Any]) -> dict[str, float]:
    settings = parse_settings(PretrainSettings, list(arguments))
    multiply_adds, images = count_multiply_adds(build_config(settings)), settings.batch_size * (settings.steps or 0)
    if settings.epochs:
        assert settings.dataset
        images = settings.epochs * len(load_split(settings.dataset, settings.train_split))
    return {
        "accuracy": 100 * result["accuracy"],
        "multiply_adds": multiply_adds,
        "exaflops": training_exaflops(multiply_adds, 1, images),
        "cpu_seconds": result["cpu_seconds"],
    }


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write all rows to a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def means(rows: Sequence[Row], key: Callable[[Row], Any], value: str) -> dict[Any, float]:
    """Return the mean of a column over the rows of each key, in the order of the rows."""
    groups: dict[Any, list[float]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(float(row[value]))
    return {name: statistics.mean(values) for name, values in groups.items()}


def as_markdown(rows: Sequence[Row], measured: Mapping[str, str]) -> str:
    """Return a table with a line per trial: its columns, accuracy of every seed and their mean, then the cost.

    Args:
        measured: columns of the rows that `run_trials` does not have -> their headings.
    """
    columns = list(rows[0])[: list(rows[0]).index("seed")]
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    heads = [*columns, *(f"seed {seed}, %" for seed in seeds), *(["mean, %"] if len(seeds) > 1 else [])]
    heads += [*measured.values(), "million multiply-adds", "CPU seconds a run"]
    lines = [heads, ["---"] * len(columns) + ["--:"] * (len(heads) - len(columns))]
    trials: dict[tuple, list[Row]] = {}
    for row in rows:
        trials.setdefault(tuple(row[column] for column in columns), []).append(row)
    for levels, its_rows in trials.items():
        accuracies = {row["seed"]: row["accuracy"] for row in its_rows}
        cells = [f"{accuracies[seed]:.2f}" if seed in accuracies else "" for seed in seeds]
        cells += [f"{statistics.mean(accuracies.values()):.2f}"] if len(seeds) > 1 else []
        cells += [f"{statistics.mean(row[column] for row in its_rows):.2f}" for column in measured]
        seconds = statistics.mean(row["cpu_seconds"] for row in its_rows)
        cells += [f"{its_rows[0]['multiply_adds'] / 1e6:.2f}", f"{seconds:.0f}"]
        lines.append([*(f"{level:,}" if isinstance(level, int) else str(level) for level in levels), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
