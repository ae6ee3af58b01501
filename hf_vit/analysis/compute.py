"""Compute of a training run (exaFLOPs, days), beside the tables of the paper."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from ..files.messages import check_choice
from ..files.model_files import check_model_path, explain_missing_folder
from ..files.reading import read_csv
from ..models.compute import FLOPS_PER_MULTIPLY_ADD, count_compute, count_with_padding
from ..models.registry import VARIANTS, config_of_variant
from ..models.sizes import Size

# A step costs a forward and a backward of twice its cost. This reproduces the paper's exaFLOPs.
_FORWARDS_PER_STEP = 3
# Mean share of the peak in the paper's Table 2: 32, 43 and 39% for its three ViTs, from their TPUv3-core-days.
UTILIZATION = 0.38
_SECONDS_PER_DAY = 86_400
_COLUMNS = "expected columns name, exaflops, accuracy and, optionally, family"
_NOTES = {
    2: f"""\
exaFLOPs: compute of pre-training, computed here.
days here: TPUv3-core-days, computed here for {UTILIZATION:.0%} of the peak, the mean of the paper's three ViTs (32, 43
and 39%).
Other columns: as printed in the paper.""",
    6: """\
computed: torch's count, for 3 forwards per image, 2 operations per multiply-add and 303 M images per epoch.
no padding: the same without multiplications by padding, which the paper seems to omit.
R50+L/16: the paper prints 859 for 7 epochs and 1668 for 14; half of the latter is 834.""",
}


def load_config(name: str) -> PreTrainedConfig:
    """Load the configuration of a variant such as "B/16" (with 1,000 classes), a folder, or a name on the Hub.

    Raises:
        OSError: the name is none of these, or the folder holds no model.
        ValueError: the config.json is damaged.
    """
    if name in VARIANTS:
        return config_of_variant(name, num_labels=1000)
    check_model_path(name)
    with explain_missing_folder(name):
        try:
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
        except OSError:
            raise
        except Exception as error:  # a value of a wrong type can raise any
            raise ValueError(f"cannot read the config.json of {name}: {error!s:.1000}") from error


class Run(NamedTuple):
    """A trained model, as a point of `plot_compute_accuracy`."""

    name: str
    family: str  # "ViT", "Hybrid", "ResNet", ...
    exaflops: float
    accuracy: float  # percent


@cache
def published() -> dict[str, Any]:
    """Read published.yaml: the paper's tables, datasets and accelerators."""
    return yaml.safe_load(files("hf_vit.analysis").joinpath("published.yaml").read_text(encoding="utf-8"))


def training_exaflops(multiply_adds: float, epochs: float, dataset_size: float) -> float:
    """Return the compute of a training run in exaFLOPs (1e18 floating-point operations), as counted in the paper.

    Args:
        multiply_adds: multiply-adds of a forward of one image.
        epochs: number of passes over the dataset.
        dataset_size: images per epoch.

    Raises:
        ValueError: `epochs` or `dataset_size` is negative or infinite.

    Example:
        >>> from hf_vit.analysis import training_exaflops
        >>> f"{training_exaflops(17.6e9, epochs=7, dataset_size=303e6):.0f}"
        '224'
    """
    for name, value in {"epochs": epochs, "dataset_size": dataset_size}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value} (expected 0 or more)")
    return _FORWARDS_PER_STEP * FLOPS_PER_MULTIPLY_ADD * multiply_adds * epochs * dataset_size / 1e18


def accelerator_days(exaflops: float, accelerator: str = "tpu-v3-core", utilization: float = UTILIZATION) -> float:
    """Return the days that one accelerator needs.

    Args:
        exaflops: compute in 1e18 floating-point operations.
        accelerator: "tpu-v3-core", "a100" or "h100" (`published()["accelerators"]`).
        utilization: share of its peak that is reached, in (0, 1].

    Raises:
        ValueError: an unknown accelerator, or a utilization out of range.
    """
    known = published()["accelerators"]
    check_choice("accelerator", accelerator, known)
    if not 0 < utilization <= 1:
        raise ValueError(f"utilization is {utilization} (expected a share above 0, up to 1)")
    return exaflops * 1e18 / (float(known[accelerator]["flops"]) * utilization * _SECONDS_PER_DAY)


def table_rows(number: int) -> list[dict[str, Any]]:
    """Return the rows of Table 2 or 6 of the paper, with our numbers.

    Returns:
        For each row `model`, `dataset`, `epochs`, `source`, the columns of the table, and in exaFLOPs `computed` and
        `computed_without_padding` (see `count_with_padding`). The last two are None for a model that this package does
        not have, or that was trained in another way.
    """
    return [{**row, **_computed(row)} for row in _printed_rows(number)]


def _printed_rows(number: int) -> list[dict[str, Any]]:
    table, rows = published()[f"table_{number}"], []
    for row in table["rows"]:
        row = {"dataset": table.get("dataset"), "epochs": None, "source": table["source"], **row}
        printed = dict(zip(table["columns"], row.pop("printed"), strict=True))
        rows.append({**row, **printed})
    return rows


@cache
def _count_variant(name: str, num_labels: int) -> tuple[int, int]:
    """Count as `count_with_padding`, once for all rows of a variant."""
    return count_with_padding(config_of_variant(name, num_labels=num_labels))


def _computed(row: Mapping[str, Any]) -> dict[str, float | None]:
    dataset = published()["datasets"].get(row["dataset"])
    if dataset is None or row["epochs"] is None or row["model"] not in VARIANTS:
        return {"computed": None, "computed_without_padding": None}
    multiply_adds, on_padding = _count_variant(row["model"], dataset["classes"])
    counts = {"computed": multiply_adds, "computed_without_padding": multiply_adds - on_padding}
    images = float(dataset["images"])
    return {name: training_exaflops(count, row["epochs"], images) for name, count in counts.items()}


def published_runs(metric: str = "ImageNet") -> list[Run]:
    """Return the runs of Figure 5, from Table 6 of the paper, named by model and epochs: "L/16, 14 ep".

    Args:
        metric: a column of the table, such as "ImageNet" or "CIFAR-10".
    """
    return [
        Run(f"{row['model']}, {row['epochs']} ep", _family_of(row["model"]), row["exaFLOPs"], row[metric])
        for row in _printed_rows(6)
    ]


def _family_of(model: str) -> str:
    """Return the family of a name: "R50+B/16" is a hybrid, "R50x1" a ResNet, "B/16" a ViT."""
    if "+" in model:
        return "Hybrid"
    return "ViT" if "/" in model else "ResNet"


def read_runs(path: str | os.PathLike) -> list[Run]:
    """Read runs from a CSV file with the columns `name`, `exaflops`, `accuracy` (percent) and, optionally, `family`.

    Raises:
        ValueError: there is no run, a column is missing, or a value is not a number above 0.
    """
    runs = []
    _, rows = read_csv(path)
    for row in rows:
        try:
            family = row.get("family") or _family_of(row["name"])
            runs.append(Run(row["name"], family, float(row["exaflops"]), float(row["accuracy"])))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {type(error).__name__}: {error!s:.200}; {_COLUMNS}") from error
    if not all(0 < value < math.inf for run in runs for value in (run.exaflops, run.accuracy)) or not runs:
        raise ValueError(f"{path} has no runs, or values that are not above 0; {_COLUMNS}")
    return runs


def estimate(
    model: str,
    image_size: Size | None = None,
    epochs: float = 1.0,
    dataset_size: float | None = None,
    accelerator: str = "tpu-v3-core",
    utilization: float = UTILIZATION,
) -> dict[str, Any]:
    """Compute a model's parameters, operations and memory, and with `dataset_size` those of its training.

    Args:
        model: a variant such as "B/16", a folder, or a name on the Hub.
        image_size: an int or (height, width) in pixels; None: the model's own.
        epochs, dataset_size: as in `training_exaflops`.
        accelerator, utilization: as in `accelerator_days`.

    Returns:
        The fields of `Compute` as values of JSON, and "training".

    Raises:
        ValueError: an unknown model or accelerator, or a number out of range.
    """
    accelerator_days(0, accelerator, utilization)  # checks the arguments before the work
    compute = count_compute(load_config(model), image_size)
    result = {
        "model": model,
        **compute._asdict(),
        "parts": [part._asdict() for part in compute.parts],
        "parameters": compute.parameters,
        "multiply_adds": compute.multiply_adds,
    }
    if dataset_size is not None:
        exaflops = training_exaflops(compute.multiply_adds, epochs, dataset_size)
        result["training"] = {
            "epochs": epochs,
            "dataset_size": dataset_size,
            "exaflops": exaflops,
            "accelerator": accelerator,
            "utilization": utilization,
            "accelerator_days": accelerator_days(exaflops, accelerator, utilization),
        }
    return result


def as_text(result: dict[str, Any]) -> str:
    """Format the result of `estimate` for reading."""
    parts = [[part["name"], f"{part['parameters']:,}", _millions(part["multiply_adds"])] for part in result["parts"]]
    total = ["all", f"{result['parameters']:,}", _millions(result["multiply_adds"])]
    size = " x ".join(map(str, result["image_size"]))
    flops = FLOPS_PER_MULTIPLY_ADD * result["multiply_adds"] / 1e9
    lines = [
        f"{result['model']}, one image of {size} pixels",
        align([["part", "parameters", "multiply-adds"], *parts, total]),
        f"{flops:,.2f} GFLOPs, at 2 per multiply-add",
        f"{_millions(result['logits_multiply_adds'])} multiply-adds for the logits alone",
        f"{result['activation_bytes'] / 2**20:,.1f} MiB of activations stored for training, in float32 without dropout",
    ]
    if training := result.get("training"):
        lines.append(
            f"{training['epochs']:g} epochs of {training['dataset_size']:,.0f} images: {_number(training['exaflops'])} "
            f"exaFLOPs, {_number(training['accelerator_days'])} days of one {training['accelerator']} at "
            f"{training['utilization']:.0%} of its peak"
        )
    return "\n".join(lines)


def table_as_text(number_of_table: int, rows: Sequence[dict[str, Any]]) -> str:
    """Format rows of `table_rows` for reading."""
    columns = [column for column in published()[f"table_{number_of_table}"]["columns"] if column != "exaFLOPs"]
    lines = []
    for row in rows:
        computed, unpadded, printed = row["computed"], row["computed_without_padding"], row.get("exaFLOPs")
        line = {"model": row["model"], "pre-trained on": row["dataset"], "epochs": str(row["epochs"] or "-")}
        line |= {name: _number(row[name]) for name in columns}
        if number_of_table == 2:
            days = computed and accelerator_days(computed)
            line |= {"exaFLOPs": _number(computed), "days here": _number(days), "source": row["source"]}
        else:
            counts = {"computed": computed, "no padding": unpadded}
            line["exaFLOPs"] = f"{printed:,}"
            line |= {name: f"{_number(count)} ({count / printed - 1:+.1%})" for name, count in counts.items()}
        lines.append(line)
    return f"{align([list(lines[0]), *(line.values() for line in lines)])}\n{_NOTES[number_of_table]}"


def align(rows: Iterable[Iterable[str]]) -> str:
    """Align columns of text; the first one to the left, all others to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    names = [name.ljust(widths[0]) for name in columns[0]]
    others = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return "\n".join(map("  ".join, zip(names, *others, strict=True)))


def _millions(multiply_adds: int) -> str:
    return f"{multiply_adds / 1e6:,.1f} M"


def _number(value: float | None) -> str:
    """Format a number with three digits or so; None is a dash."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
