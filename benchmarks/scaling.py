"""Accuracy against the compute of training, for a ladder of ViT and hybrid sizes: the paper's Figure 5 on a laptop.

    python benchmarks/scaling.py --output_dir out                                  # scikit-learn's digits
    python benchmarks/scaling.py --dataset cifar10 --data FOLDER --output_dir out  # train.parquet and test.parquet
    python benchmarks/scaling.py --dataset mnist --data FOLDER --output_dir out    # t10k-*.gz, cut into 8,000 and 2,000

Every rung is trained from random weights with the same settings, each in a folder of its own; the same command goes on
where it was stopped. The result is runs.csv, which `hf_vit.analysis.read_runs` reads, scaling.md and scaling.png.
"""

import argparse
import csv
import json
from pathlib import Path
from typing import NamedTuple

from hf_vit.analysis.compute import count_multiply_adds
from hf_vit.analysis.figures import plot_compute_accuracy
from hf_vit.analysis.training_runs import Run, training_exaflops
from hf_vit.models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from hf_vit.training.commands import pretrain

RECIPES = Path(__file__).parents[1] / "training" / "recipes"


class _Data(NamedTuple):
    """A data set, and how long a rung is trained on it."""

    images: int  # of an epoch
    image_size: int
    epochs: int
    settings: dict[str, str]


_HELD_OUT = {"train_split": "test[:8000]", "eval_split": "test[8000:]"}
DATA = {
    "digits": _Data(1437, 16, 20, {"recipe": str(RECIPES / "digits.yaml"), "dataset": "digits"}),
    "mnist": _Data(8000, 28, 10, {"recipe": str(RECIPES / "mnist.yaml"), **_HELD_OUT}),
    "cifar10": _Data(5000, 32, 20, {"recipe": str(RECIPES / "digits.yaml"), "flip": "true", "crop_area": "[0.4, 1]"}),
}
_LADDER = ((16, 1), (32, 2), (64, 4), (96, 6))  # width, layers
_HYBRIDS = _LADDER[:3]
BATCH = 64  # of all the recipes
PATCH = 4  # pixels, which is also what the stem's root leaves of them: both kinds see the same grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", choices=DATA, default="digits")
    parser.add_argument("--data", help="the folder of mnist or cifar10")
    parser.add_argument("--epochs", type=float, nargs="+", help="one run per rung and number; by default one")
    parser.add_argument("--rungs", nargs="+", help=f"some of {', '.join(rungs(DATA['digits']))}")
    parser.add_argument("--num_workers", default="0")
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    data, ladder = DATA[options.dataset], rungs(DATA[options.dataset])
    if (options.data is None) != ("dataset" in data.settings):
        parser.error(f"{options.dataset} needs {'no ' if options.data else ''}--data")
    if unknown := set(options.rungs or []) - ladder.keys():
        parser.error(f"there is no rung {', '.join(sorted(unknown))}; there are {', '.join(ladder)}")
    settings = {**data.settings, **({"dataset": options.data} if options.data else {})}
    settings |= {"num_workers": options.num_workers}
    rows = []
    for epochs in options.epochs or [data.epochs]:
        for name in options.rungs or ladder:
            folder = options.output_dir / f"{name.replace('/', '-')}-{epochs:g}-epochs"
            warmup = {"warmup_steps": str(min(100, int(0.1 * epochs * data.images / BATCH)))}
            metrics = train(ladder[name], settings | warmup, epochs, folder)
            rows.append(_row_of(name, ladder[name], data, epochs, metrics))
            report(rows, options.output_dir)
    print((options.output_dir / "scaling.md").read_text(encoding="utf-8"))


def rungs(data: _Data) -> dict[str, dict]:
    """Name of a rung -> fields of its configuration: width x layers / patch; R+ has a ResNet's root before it."""
    fields = {}
    for width, layers in _LADDER:
        sizes = {
            "image_size": data.image_size,
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 16,
            "intermediate_size": 2 * width,
        }
        fields[f"{width}x{layers}/{PATCH}"] = {**sizes, "patch_size": PATCH}
        if (width, layers) in _HYBRIDS:
            fields[f"R+{width}x{layers}/1"] = {**sizes, "patch_size": 1, "stem_depths": [], "stem_width": 32}
    return fields


def train(fields: dict, settings: dict[str, str], epochs: float, folder: Path) -> dict:
    """Metrics of a run: those of an earlier one, of one that goes on, or of a new one."""
    if (folder / "metrics.json").exists():
        return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    settings = {**settings, "config": json.dumps(fields), "epochs": str(epochs), "report_to": "none"}
    settings |= {"output_dir": str(folder), "save_every": "200", "eval_every": str(10**9)}
    settings |= {"resume" if (folder / "checkpoints").is_dir() else "overwrite": "true"}
    return pretrain([text for name, value in settings.items() for text in (f"--{name}", value)])


def _row_of(name: str, fields: dict, data: _Data, epochs: float, metrics: dict) -> dict:
    config = (HfViTHybridConfig if "stem_depths" in fields else HfViTConfig)(**{**fields, "num_labels": 10})
    multiply_adds = count_multiply_adds(config)
    return {
        "name": name,
        "family": "Hybrid" if name.startswith("R+") else "ViT",
        "epochs": epochs,
        "multiply_adds": multiply_adds,
        "exaflops": training_exaflops(multiply_adds, epochs, data.images),
        "accuracy": 100 * metrics["accuracy"],
        "seconds": metrics["train_seconds"],
    }


def report(rows: list[dict], output: Path) -> None:
    """Write the table and the picture of the runs so far."""
    with (output / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = ["| model | epochs | multiply-adds an image | training compute, gigaFLOPs | accuracy, % | seconds |"]
    lines.append("| --- |" + " --: |" * 5)
    for row in sorted(rows, key=lambda row: row["exaflops"]):
        million, billion = row["multiply_adds"] / 1e6, row["exaflops"] * 1e9
        cells = f"{million:.2f} million | {billion:,.1f} | {row['accuracy']:.2f} | {row['seconds']:.0f} |"
        lines.append(f"| {row['name']} | {row['epochs']:g} | {cells}")
    (output / "scaling.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    runs = [Run(row["name"], row["family"], row["exaflops"], row["accuracy"]) for row in rows]
    plot_compute_accuracy(runs).savefig(output / "scaling.png", dpi=150)


if __name__ == "__main__":
    main()
