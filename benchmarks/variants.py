"""The paper's comparisons of models in small: position embeddings, heads, axial attention.

    python benchmarks/variants.py positions [--seeds 0 1]   # Table 8 on handwritten digits
    python benchmarks/variants.py heads [--seeds 0 1]       # Figure 9 on handwritten digits
    python benchmarks/variants.py axial                     # multiply-adds of Axial-ViT beside ViT

Prints tables in Markdown. Training is that of the recipes `table8_digits.yaml` and `figure9_digits.yaml`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Literal

import yaml

from hf_vit import HfViTConfig
from hf_vit.analysis import count_compute
from hf_vit.training import commands

RECIPES = Path(__file__).parents[1] / "training" / "recipes"
_GRIDS = ((14, 14), (14, 28), (28, 28), (28, 56), (56, 56))


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["positions", "heads", "axial"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args(argv)
    if options.what == "axial":
        _print_axial()
    else:
        {"positions": _print_positions, "heads": _print_heads}[options.what](options.seeds)


def _print_positions(seeds: Sequence[int]) -> None:
    print(f"| position embeddings | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | CPU seconds a run |")
    print("| --- " * (len(seeds) + 3) + "|")
    for row in levels("table8_digits.yaml", "positions"):
        measured, seconds = _accuracies("table8_digits.yaml", seeds, positions=row)
        cells = [row, *map(percent, measured), percent(statistics.mean(measured)), f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _print_heads(seeds: Sequence[int]) -> None:
    rates = levels("figure9_digits.yaml", "rate")
    print(f"| head | {' | '.join(f'learning rate {rate}' for rate in rates)} |")
    print("| --- " * (len(rates) + 1) + "|")
    for head in levels("figure9_digits.yaml", "head"):
        cells = []
        for rate in rates:
            measured, _ = _accuracies("figure9_digits.yaml", seeds, head=head, rate=rate)
            cells.append(f"{percent(statistics.mean(measured))} ({', '.join(map(percent, measured))})")
        print(f"| {head} | {' | '.join(cells)} |", flush=True)


def levels(recipe: str, group: str) -> list[str]:
    return list(map(str, yaml.safe_load((RECIPES / recipe).read_text(encoding="utf-8"))["options"][group]))


def _accuracies(recipe: str, seeds: Sequence[int], **select: str) -> tuple[list[float], float]:
    """On the held-out digits, one for each seed; and the CPU seconds of a run."""
    measured, start = [], time.process_time()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            chosen = [f"{group}={level}" for group, level in select.items()]
            arguments = ["--recipe", str(RECIPES / recipe), "--select", *chosen, "--seed", str(seed)]
            arguments += ["--num_workers", "0", "--report_to", "none", "--eval_every", "1000000"]
            measured.append(commands.pretrain([*arguments, "--output_dir", f"{folder}/out"])["accuracy"])
    return measured, (time.process_time() - start) / len(seeds)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def _print_axial() -> None:
    """One block of each at width 768: of plain attention a layer, of axial attention two."""
    print("| patches | ViT: attention | Axial-ViT: attention | ViT: block | Axial-ViT: block |")
    print("| --- | --- | --- | --- | --- |")
    for grid in _GRIDS:
        plain, axial = multiply_adds(grid, "all", 1), multiply_adds(grid, "axial", 2)
        cells = [plain["attention"], axial["attention"], plain["block"], axial["block"]]
        print(f"| {grid[0]} x {grid[1]} | {' | '.join(f'{count / 1e9:.3f}' for count in cells)} |")


def multiply_adds(grid: tuple[int, int], attention_axes: Literal["all", "axial"], layers: int) -> dict[str, int]:
    """Of queries with keys and probabilities with values ("attention"), and of everything in the layers ("block")."""
    size = [16 * length for length in grid]
    config = HfViTConfig(attention_axes=attention_axes, num_hidden_layers=layers, pooling="mean", image_size=size)
    parts = {part.name: part.multiply_adds for part in count_compute(config).parts}
    attention = parts["attention: between tokens"]
    return {"attention": attention, "block": attention + parts["attention: projections"] + parts["MLP"]}


if __name__ == "__main__":
    main()
