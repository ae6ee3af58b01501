"""Output of `hf-vit compute`: the compute of one model, and the paper's tables next to our numbers."""

from collections.abc import Sequence
from typing import Any

from ..models.configuration_hf_vit import Size
from .compute import FLOPS_PER_MULTIPLY_ADD, count_compute, load_config
from .training_runs import UTILIZATION, accelerator_days, published, training_exaflops

_NOTE_2 = f"""\
exaFLOPs: compute of pre-training, computed here.
days here: TPUv3-core-days, computed here for {UTILIZATION:.0%} of the peak, the mean of the paper's three ViTs (32, 43
and 39%).
Other columns: as printed in the paper."""
_NOTE_6 = """\
computed: torch's count, for 3 forwards per image, 2 operations per multiply-add and 303 M images per epoch.
no padding: the same without multiplications by padding, which the paper seems to omit.
R50+L/16: the paper prints 859 for 7 epochs and 1668 for 14; half of the latter is 834."""


def estimate(
    model: str,
    image_size: Size | None = None,
    epochs: float = 1.0,
    dataset_size: float | None = None,
    accelerator: str = "tpu-v3-core",
    utilization: float | None = None,
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
    utilization = UTILIZATION if utilization is None else utilization
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
        f"{result['activation_bytes'] / 2**20:,.1f} MiB of activations stored for training, in float32 without dropout",
    ]
    if result["logits_multiply_adds"] < result["multiply_adds"]:
        needed = _millions(result["logits_multiply_adds"])
        lines.insert(3, f"{needed} multiply-adds for the logits alone: the last layer computes only the class token")
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
    second = ("pre-trained on", "dataset") if number_of_table == 2 else ("epochs", "epochs")
    head = ["model", second[0], *columns]
    lines = [[row["model"], str(row[second[1]]), *(_number(row[name]) for name in columns)] for row in rows]
    if number_of_table == 2:
        head += ["exaFLOPs", "days here", "source"]
        for line, row in zip(lines, rows, strict=True):
            computed = row["computed"]
            line += [_number(computed), _number(computed and accelerator_days(computed)), row["source"]]
        return f"{align([head, *lines], left=(0, 1, len(head) - 1))}\n{_NOTE_2}"
    head += ["exaFLOPs", "computed", "", "no padding", ""]
    for line, row in zip(lines, rows, strict=True):
        line.append(f"{row['exaFLOPs']:,}")
        for computed in (row["computed"], row["computed_without_padding"]):
            line += [_number(computed), f"{computed / row['exaFLOPs'] - 1:+.1%}" if computed else "-"]
    return f"{align([head, *lines])}\n{_NOTE_6}"


def align(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Align columns of text; those in `left` to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = (
        (cell.ljust(width) if column in left else cell.rjust(width))
        for row in rows
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "\n".join("  ".join(next(cells) for _ in widths).rstrip() for _ in rows)


def _millions(multiply_adds: int) -> str:
    return f"{multiply_adds / 1e6:,.1f} M"


def _number(value: float | None) -> str:
    """Format a number with three digits or so; None is a dash."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"
