"""Studies without training: images per second and the largest batch by input size (D.5), compute of Axial-ViT (D.6)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from common import report_progress, table, take_turns
from transformers import AutoModelForImageClassification

from hf_vit import HfViTConfig
from hf_vit.analysis.figures import plot_lines
from hf_vit.models.compute import Compute, count_compute
from hf_vit.models.registry import config_of_variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("S/16", "B/32", "R50x1")  # similar numbers of multiply-adds at 224 pixels
SIZES = (64, 128, 224, 384)
BATCH = 2
MEMORY = 16 * 2**30  # bytes of a TPUv3 core, the paper's device
BYTES_PER_PARAMETER = 16  # training with Adam in float32: weight, gradient, two moments
GRIDS = ((14, 14), (14, 28), (28, 28), (28, 56), (56, 56))
Result = tuple[str, "Mapping[str, Figure]"]


def speed_and_batch(models: Sequence[str] = MODELS, sizes: Sequence[int] = SIZES, rounds: int = 7) -> Result:
    """Measure images per second of inference on this machine, and compute the largest training batch in 16 GiB.

    Models take turns; the fastest round counts, so that other load on the machine matters little.
    """
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    batches: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    rows = []
    for size in sizes:
        report_progress(f"{size} pixels")
        configs = {name: config_of_variant(name, num_labels=1000, image_size=size) for name in models}
        turns = take_turns({name: forward_of(config, size) for name, config in configs.items()}, 0, rounds, rounds, 1)
        for name, config in configs.items():
            speed, compute = BATCH / min(turns[name]), count_compute(config)
            batch = largest_batch(compute, MEMORY)
            speeds[name].append((size, speed))
            batches[name].append((size, batch))
            cells = (f"{compute.multiply_adds / 1e9:.2f}", f"{speed:.1f}", f"{compute.activation_bytes / 2**20:.1f}")
            rows.append([f"{name}, {size}", *cells, f"{batch:,}"])
    heads = ["model, pixels", "billion multiply-adds", "images a second", "MiB kept for an image", "largest batch"]
    return table(heads, rows), {
        "speed": plot_lines(speeds, "image size [pixels]", "images a second", "Inference on this machine", "xy"),
        "largest-batch": plot_lines(
            batches, "image size [pixels]", "largest batch", "Training with Adam in 16 GiB, on paper", "xy"
        ),
    }


def largest_batch(compute: Compute, memory: float) -> int:
    """Return the largest batch of a training step in the bytes that remain after the weights and Adam's state."""
    return max(int((memory - BYTES_PER_PARAMETER * compute.parameters) // compute.activation_bytes), 0)


def forward_of(config: Any, size: int) -> Callable[[], object]:
    """Return a forward of `BATCH` images without gradients, of a model with random weights."""
    model = AutoModelForImageClassification.from_config(config).eval()
    pixels = torch.randn(BATCH, config.num_channels, size, size)

    @torch.inference_mode()
    def forward() -> object:
        return model(pixels)

    return forward


def images_per_second_of(folder: Path, _: object) -> dict[str, float]:
    """Measure inference with the model in a folder, with 64 images at a time; the fastest of 30 times counts."""
    model: Any = AutoModelForImageClassification.from_pretrained(folder).eval()
    pixels = torch.randn(64, 3, model.config.image_size, model.config.image_size)

    @torch.inference_mode()
    def forward() -> object:
        return model(pixels)

    return {"images_per_second": len(pixels) / min(take_turns({"model": forward}, 0, 30, 30)["model"])}


def axial_compute() -> Result:
    """Return billions of multiply-adds of a block of width 768: one layer of full attention, or two axial layers."""
    rows, lines = [], {"ViT": [], "Axial-ViT": []}
    for grid in GRIDS:
        plain, axial = multiply_adds(grid, "all", 1), multiply_adds(grid, "axial", 2)
        counts = (plain["attention"], axial["attention"], plain["block"], axial["block"])
        rows.append([f"{grid[0]} x {grid[1]}", *(f"{count / 1e9:.3f}" for count in counts)])
        for name, part in (("ViT", plain), ("Axial-ViT", axial)):
            lines[name].append((grid[0] * grid[1], part["block"] / 1e9))
    heads = ["patches", "ViT: attention", "Axial-ViT: attention", "ViT: block", "Axial-ViT: block"]
    title = "One block of width 768"
    return table(heads, rows), {"axial": plot_lines(lines, "patches", "billion multiply-adds", title, "xy")}


def multiply_adds(grid: tuple[int, int], attention_axes: Literal["all", "axial"], layers: int) -> dict[str, int]:
    """Count the multiply-adds of the attention products ("attention") and of whole layers ("block")."""
    size = [16 * length for length in grid]
    config = HfViTConfig(attention_axes=attention_axes, num_hidden_layers=layers, pooling="mean", image_size=size)
    parts = {part.name: part.multiply_adds for part in count_compute(config).parts}
    attention = parts["attention: between tokens"]
    return {"attention": attention, "block": attention + parts["attention: projections"] + parts["MLP"]}


TABLES: dict[str, Callable[[], Result]] = {"speed": speed_and_batch, "axial": axial_compute}
