"""The living table: cost, speed on this machine and published accuracy of each kind of released model.

    python benchmarks/models.py --write [--kinds "S/16 224"] [--most 20]

A kind is a named architecture at an image size of `hf_vit/catalog/released.yaml`, with 1000 classes. Parameters and
multiply-adds are computed for all. Images a second, of one image at a time with random weights, are measured for each
kind of at most `--most` billion multiply-adds, in a process of its own, in which the backends take turns. A kind that
was measured before is measured again only where `--kinds` names it.

`--write` keeps `models.csv`, the tables of models.md and of the README, and the picture docs/models.svg.
"""

import argparse
import csv
import json
import statistics
import tempfile
from typing import Any, NamedTuple

import common
from common import HERE, Failed, report_progress

_PAGE, _TABLE, _KEPT = HERE / "models.md", HERE / "models.csv", HERE / "results" / "models.json"
_README, _PICTURE = HERE.parent / "README.md", HERE.parent / "docs" / "models.svg"
_PLACES = [  # of a label next to its point: offset in points, alignment
    ((6, 4), ("left", "bottom")),
    ((6, -4), ("left", "top")),
    ((-6, 4), ("right", "bottom")),
    ((-6, -4), ("right", "top")),
    ((0, 7), ("center", "bottom")),
    ((0, -7), ("center", "top")),
    ((8, 14), ("left", "bottom")),
    ((8, -14), ("left", "top")),
    ((-8, 14), ("right", "bottom")),
    ((-8, -14), ("right", "top")),
]
BACKENDS = {  # name in the table: dtype and backend of `use_backend`
    "torch": ("float32", "torch"),
    "torch bf16": ("bfloat16", "torch"),
    "OpenVINO": ("float32", "openvino"),
    "ONNX Runtime": ("float32", "onnxruntime"),
}
# AugReg files fine-tuned on ImageNet at 224 pixels, whose authors publish 384 alone: timm's name and top-1 [%].
_TIMM = "results-imagenet.csv of huggingface/pytorch-image-models, with timm's preprocessing"
_MEASURED_BY_TIMM = {
    "Ti/16": ("vit_tiny_patch16_224", 75.452),
    "S/32": ("vit_small_patch32_224", 76.010),
    "S/16": ("vit_small_patch16_224", 81.402),
    "B/32": ("vit_base_patch32_224", 80.732),
    "B/16": ("vit_base_patch16_224", 84.534),
    "B/8": ("vit_base_patch8_224", 85.838),
    "L/16": ("vit_large_patch16_224", 85.856),
    "R+Ti/16": ("vit_tiny_r_s16_p8_224", 71.800),
    "R26+S/32": ("vit_small_r26_s32_224", 81.856),
    "R50+L/32": ("vit_large_r50_s32_224", 84.434),
}


class Kind(NamedTuple):
    """An architecture at an image size, and the best published accuracy of a checkpoint of it."""

    variant: str
    image_size: int
    accuracy: float | None = None  # top-1 on ImageNet's validation set, in %
    checkpoint: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        return f"{self.variant} {self.image_size}"

    @property
    def family(self) -> str:
        if "x" in self.variant:
            return "BiT"
        return "hybrid" if self.variant.startswith("R") else "ViT"


def kinds() -> list[Kind]:
    """All kinds of the catalog whose architecture has a name and whose size is one."""
    from hf_vit.catalog import released
    from hf_vit.models.registry import VARIANTS

    best = {
        (variant, 224): Kind(variant, 224, accuracy, f"{name}.augreg_in21k_ft_in1k", _TIMM)
        for variant, (name, accuracy) in _MEASURED_BY_TIMM.items()
    }
    for one in released():
        size = one.facts.get("resolution")
        if one.variant not in VARIANTS or not isinstance(size, int):
            continue
        key = one.variant, size
        best.setdefault(key, Kind(*key))
        for result in one.facts.get("results", ()):
            is_its_own = "of" not in result and (result["dataset"], result["metric"]) == ("imagenet-1k", "accuracy")
            if is_its_own and result["value"] > (best[key].accuracy or 0):
                best[key] = Kind(*key, result["value"], one.name, result["source"]["name"])
    return sorted(best.values(), key=lambda kind: (("ViT", "hybrid", "BiT").index(kind.family), *kind[:2]))


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    common.use_threads(options.threads)
    if options.apart:
        print(json.dumps(measure(options)))
        return
    costs = {kind: cost_of(kind) for kind in kinds()}
    kept = json.loads(_KEPT.read_text(encoding="utf-8")) if _KEPT.exists() else {}
    for kind, cost in costs.items():
        is_wanted = kind.name in options.kinds if options.kinds else kind.name not in kept
        if is_wanted and cost["multiply_adds"] <= options.most * 1e9:
            report_progress(kind.name)
            limits = ["--threads", options.threads, "--seconds", options.seconds]
            try:
                result = {kind.name: common.run_apart(__file__, "--apart", kind.name, *limits)}
            except Failed as error:
                report_progress(f"{kind.name} failed: {error}")
            else:
                kept = common.keep(_KEPT, result) if options.write else kept | result
    rows = [row_of(kind, cost, kept.get(kind.name)) for kind, cost in costs.items()]
    print(as_markdown(rows, kept))
    if options.write:
        write(rows, kept)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", metavar="KIND", default=[], help="default: those not measured yet")
    parser.add_argument("--most", type=float, default=20, help="billions of multiply-adds to measure (default 20)")
    parser.add_argument("--seconds", type=float, default=4, help="for a kind, without loading (default 4)")
    parser.add_argument("--apart", metavar="KIND", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    known = [kind.name for kind in kinds()]
    if unknown := set(options.kinds) - set(known):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    return options


def cost_of(kind: Kind) -> dict:
    """Parameters and multiply-adds of one image, without weights."""
    import torch

    from hf_vit.models.compute import count_multiply_adds

    with torch.device("meta"):
        model = build(kind)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "multiply_adds": count_multiply_adds(model.config)}


def build(kind: Kind) -> Any:
    """A classifier of 1000 classes with random weights, those of the head too: a new head is zero."""
    import torch
    from transformers import AutoModelForImageClassification

    import hf_vit  # noqa: F401 - registers the Auto classes
    from hf_vit.models.registry import config_of_variant

    config = config_of_variant(kind.variant, image_size=kind.image_size, num_labels=1000)
    model = AutoModelForImageClassification.from_config(config).eval()
    torch.nn.init.normal_(model.classifier.weight, std=0.02)
    return model


def measure(options: argparse.Namespace) -> dict:
    """Images a second of each backend, and the largest difference of its logits from those of torch."""
    import torch

    import hf_vit

    [kind] = (kind for kind in kinds() if kind.name == options.apart)
    torch.manual_seed(0)
    model = build(kind)
    pixels = torch.rand(1, 3, kind.image_size, kind.image_size) * 2 - 1
    forwards, differences = {}, {}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        expected = model(pixels).logits
        model.save_pretrained(folder)
        for name, (dtype, backend) in BACKENDS.items():
            one = type(model).from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
            try:
                one = hf_vit.use_backend(one, backend)
            except (ImportError, ValueError) as error:
                report_progress(f"{kind.name}: {name} takes no part: {error}")
                continue
            images = pixels.to(one.dtype)
            differences[name] = float((one(images).logits.float() - expected).abs().max())
            forwards[name] = lambda one=one, images=images: one(images)
        turns = common.take_turns(forwards, options.seconds, least=5, pause=0.05)
    rates = {name: 1 / statistics.median(seconds) for name, seconds in turns.items()}
    return {"images_per_second": rates, "differences": differences, **common.stamp()}


def row_of(kind: Kind, cost: dict, measured: dict | None) -> dict[str, str]:
    """A row of the table; what is not known is empty."""
    rates = measured["images_per_second"] if measured else {}
    return {
        "model": kind.variant,
        "image size": str(kind.image_size),
        "family": kind.family,
        "parameters [M]": f"{cost['parameters'] / 1e6:.2f}",
        "multiply-adds [G]": f"{cost['multiply_adds'] / 1e9:.2f}",
        "float32 weights [MiB]": f"{4 * cost['parameters'] / 2**20:.0f}",
        **{f"{name} [images/s]": f"{rates[name]:.3g}" if name in rates else "" for name in BACKENDS},
        "ImageNet top-1 [%]": "" if kind.accuracy is None else f"{kind.accuracy:.2f}",
        "checkpoint": kind.checkpoint,
        "source of the accuracy": kind.source,
    }


def as_markdown(rows: list[dict[str, str]], kept: dict) -> str:
    """The table, without the two long columns, below what it was measured on."""
    shown = [name for name in rows[0] if name not in ("family", "checkpoint", "source of the accuracy")]
    table = common.table(shown, [[row[name] for name in shown] for row in rows])
    return f"{common.machine_as_markdown(kept)}\n\n{table}" if kept else table


def readme_table(rows: list[dict[str, str]]) -> str:
    """Return the table of the models with a short name, a copy on the Hub, a published accuracy and a measured time."""
    from hf_vit.catalog import AUGREG_MODELS, address_of, copies_of

    shown = []
    for row in rows:
        if row["model"] in AUGREG_MODELS.values() and row["ImageNet top-1 [%]"] and row["torch [images/s]"]:
            name = f"augreg:{row['model']}{'-384' if row['image size'] == '384' else ''}"
            milliseconds = [f"{1000 / float(row[f'{backend} [images/s]']):.0f}" for backend in ("torch", "OpenVINO")]
            facts = [row["parameters [M]"], row["image size"], row["ImageNet top-1 [%]"], *milliseconds]
            shown += [[f"[`{name}`](https://huggingface.co/{copy})", *facts] for copy in copies_of(address_of(name))]
    shown.sort(key=lambda cells: float(cells[3]))
    return common.table(
        ["name", "parameters (M)", "image size", "ImageNet top-1 (%)", "PyTorch (ms)", "OpenVINO (ms)"], shown
    )


def write(rows: list[dict[str, str]], kept: dict) -> None:
    """Write the file, the pages and the picture."""
    with _TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    common.update_section(_PAGE, "models", as_markdown(rows, kept))
    common.update_section(_README, "models", readme_table(rows))
    draw(rows)


def draw(rows: list[dict[str, str]]) -> None:
    """Draw accuracy against the images a second of the fastest float32 backend."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "models"  # the same picture from the same figures
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    labels: dict[str, tuple[float, float]] = {}
    exact = [f"{name} [images/s]" for name, (dtype, _) in BACKENDS.items() if dtype == "float32"]
    for family, color, marker in (("ViT", "#3b6fb6", "o"), ("hybrid", "#d9822b", "s"), ("BiT", "#4a9a62", "^")):
        points = {
            f"{row['model']} {row['image size']}": (
                max(float(row[name]) for name in exact if row[name]),
                float(row["ImageNet top-1 [%]"]),
            )
            for row in rows
            if row["family"] == family and row["ImageNet top-1 [%]"] and any(row[name] for name in exact)
        }
        if points:
            axes.plot(*zip(*points.values(), strict=True), marker, color=color, ms=7, label=family)
        labels |= points
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200], labels=["1", "2", "5", "10", "20", "50", "100", "200"])
    axes.minorticks_off()
    axes.set_xlabel("images a second, one at a time, fastest float32 backend")
    axes.set_ylabel("published ImageNet top-1 [%]")
    axes.margins(y=0.1)
    if labels:
        rates = [rate for rate, _ in labels.values()]
        axes.set_xlim(min(rates) / 2.2, max(rates) * 2)  # room for the names
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower left")
    write_labels(axes, labels)
    figure.savefig(_PICTURE, metadata={"Date": None})


def write_labels(axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Write the names of points next to them, where they cover no marker and no other name."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()
    places = axes.transData.transform(list(points.values()))  # pixels
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in places]
    for label, point in points.items():
        for offset, sides in _PLACES:
            text = axes.annotate(
                label, point, xytext=offset, textcoords="offset points", fontsize=8, ha=sides[0], va=sides[1]
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                break
            text.remove()
        else:
            continue  # the table has it
        taken.append(box)


if __name__ == "__main__":
    main()
