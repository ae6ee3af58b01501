"""Results of `gpu.py`: a file of JSON lines, one for each measured row, and its tables."""

import json
import os
from pathlib import Path
from typing import Any

from common import table
from gpu_rows import BASE, GOALS, INFERENCE_GOAL, REFERENCE

_MEASURED_FOR_GOOD = ("done", "left out", "failed", "timed out")  # not repeated by a resumed run
_OWN_PEAK = {"float32": "float32", "tf32": "tf32"}  # the other precisions are compared with the peak of bfloat16


class Results:
    """Rows by name, in the order of measurement; the last one of a name counts.

    An incomplete last line, which a killed process may leave, is removed.
    """

    def __init__(self, path: Path):
        self.path, self.rows = path, {}
        if path.exists():
            whole = path.read_bytes().rpartition(b"\n")[0]
            self.rows = {row["name"]: row for row in map(json.loads, whole.splitlines())}
            with path.open("r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write it to disk."""
        self.rows[row["name"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def has(self, name: str) -> bool:
        """Tell whether a row is measured or cannot be measured."""
        return self.rows.get(name, {}).get("status") in _MEASURED_FOR_GOOD

    def result(self, name: str) -> dict[str, Any]:
        return self.rows.get(name, {}).get("result") or {}

    def best_batch(self, kind: str, variant: str) -> int | None:
        """Return the batch size of the eager model's best throughput."""
        base = {"train": BASE, "infer": "pure bf16"}[kind]
        return self.result(f"{kind} {variant} {base}").get("batch")

    def flops_per_image(self, kind: str, variant: str) -> int | None:
        """Return the operations of an image, which one row of this kind counts for all others."""
        alike = (row for row in self.rows.values() if (row["kind"], row.get("variant")) == (kind, variant))
        return next((row["result"]["flops_per_image"] for row in alike if "flops_per_image" in row["result"]), None)


def as_markdown(results: Results) -> str:
    """Return all tables, and the list of omitted rows."""
    sections = [_machine(results), _peaks(results), _runs(results)]
    for kind, title in (("train", "Training step"), ("infer", "Inference")):
        rows = [row for row in results.rows.values() if row["kind"] == kind]
        if measured := [row for row in rows if row["result"]]:
            sections.append(f"**{title}**\n\n{_speed_table(results, kind, measured)}")
    sections += [_images(results), _paper(results), _notes(results)]
    return "\n\n".join(filter(None, sections))


def _machine(results: Results) -> str:
    setup = results.result("setup")
    if not setup:
        return ""
    versions = ", ".join(f"{name} {version}" for name, version in setup["versions"].items())
    how = " Toy sizes: the figures mean nothing." if setup["toy"] else ""
    return f"Measured {results.rows['setup']['date']} on {setup['device']}; {versions}.{how}"


def _peaks(results: Results) -> str:
    peaks = results.result("peak").get("peaks", {})
    rates = ", ".join(f"{name} {rate / 1e12:,.3g}" for name, rate in peaks.items())
    return f"Best matrix products, TFLOP/s: {rates}." if rates else ""


def _runs(results: Results) -> str:
    rows = [row for row in results.rows.values() if row["kind"] == "run" and row["result"]]
    if not rows:
        return ""
    lines = []
    for row in rows:
        found = row["result"]
        cells = [_number(found.get("images_per_second"), ",.0f"), _number(found.get("data_wait"), ".1%")]
        cells += [_number(found.get("share_of_peak"), ".1%"), _number(found.get("memory_gib"), ".1f")]
        said = {"equal_bits": "the same bits" if found.get("equal_bits") else "other bits"}
        said |= {"largest_difference": f"weights differ by {found.get('largest_difference', 0):.1e} of the largest"}
        said |= {"losses": f"loss {found.get('losses', [0])[-1]:.3f}"}
        outcome = next((text for name, text in said.items() if name in found), "")
        lines.append([f"{row['variant']} {row['run']}", *cells, outcome, f"{row['seconds']:.0f} of {row['limit']}"])
    return "**Training runs from files**\n\n" + table(
        ["", "images/s", "data wait", "of peak", "GiB", "outcome", "seconds, limit"], lines
    )


def share_of_peak(results: Results, row: dict[str, Any]) -> float | None:
    """Return a row's share of the measured peak of bfloat16 (also for fp8), float32 or TF32."""
    peaks = results.result("peak").get("peaks", {})
    peak = peaks.get(_OWN_PEAK.get(row["setting"]["precision"], "bfloat16"))
    rate = row["result"].get("images_per_second")
    return rate * row["result"]["flops_per_image"] / peak if peak and rate else None


def _speed_table(results: Results, kind: str, rows: list[dict]) -> str:
    lines = []
    for row in rows:
        result, share = row["result"], share_of_peak(results, row)
        goal = INFERENCE_GOAL if kind == "infer" else GOALS.get((kind, row["variant"]))
        cells = [
            f"{row['variant']} {row['setting']['name']}",
            _number(result.get("batch"), "d"),
            _number(result.get("images_per_second"), ",.0f"),
            _number(share, ".1%"),
            _number(goal, ".0%"),
            _number(result.get("memory_gib"), ".1f"),
        ]
        last = _loss_cell(results, row) if kind == "train" else _number(result.get("milliseconds_of_one"), ".2f")
        lines.append([*cells, last, "" if row["status"] == "done" else row["status"]])
    last = "loss (float32's, its spread)" if kind == "train" else "ms at batch 1"
    return table(["", "batch", "images/s", "of peak", "goal", "GiB", last, ""], lines)


def _loss_cell(results: Results, row: dict) -> str:
    """Return the loss and that of float32 after the same steps; "!" if they differ by more than seeds do."""
    loss = row["result"].get("loss")
    reference = results.result(f"train {row['variant']} {REFERENCE}").get("losses")
    if loss is None or not reference:
        return _number(loss, ".3f")
    spread = max(reference) - min(reference)
    mark = "" if abs(loss - reference[0]) <= spread else " !"
    return f"{loss:.3f} ({reference[0]:.3f}, {spread:.3f}){mark}"


def _images(results: Results) -> str:
    rates = results.result("images").get("images_per_second", {})
    if not rates:
        return ""
    return "**Images**\n\n" + table(["", "images/s"], [[name, f"{rate:,.0f}"] for name, rate in rates.items()])


def _paper(results: Results) -> str:
    row = results.rows.get("paper", {})
    found = row.get("result") or {}
    if "accuracy" not in found:
        return ""
    steps = f"{found['steps']} steps of {found['batch_size']} at {found['image_size']} pixels"
    return (
        f"**Fine-tuning** of {found['model']} on {found['dataset']}, {steps}: accuracy {found['accuracy']:.2%} of "
        f"{found['samples']} images, {found['seconds']:.0f} s. The original's short schedule has 98.59 % "
        "(B/16 from ImageNet-21k, CIFAR-10)."
    )


def _notes(results: Results) -> str:
    """Return the rows that lack results, with reasons."""
    notes = [f"* {row['name']}: {row['status']}, {row['reason']}" for row in results.rows.values() if row["reason"]]
    notes += [f"* {name}: {why}" for name, why in results.result("images").get("left_out", {}).items()]
    return "\n".join(notes)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
