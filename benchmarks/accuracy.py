"""Top-1 and top-5 of a classifier for every preset and several resolutions, on a folder of labeled photographs.

    python benchmarks/accuracy.py FOLDER_OF_THE_MODEL IMAGES LABELS.csv

LABELS.csv has the columns file_name and label (the index of the class). The position embeddings are resampled when the
model is loaded.
"""

import argparse
import csv
import json
from pathlib import Path

import torch
from transformers.utils import logging

import hf_vit

_PRESETS = ("vit_jax", "augreg", "big_vision", "timm", "transformers", "native")
SIZES = ((224, 224), (288, 288), (384, 384), (224, 320))  # (height, width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("images", type=Path)
    parser.add_argument("labels", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    paths, labels = _read_labels(arguments.images, arguments.labels)
    print(f"{len(paths)} images; top-1 / top-5 in %\n\n| preset | {' | '.join(f'{h} x {w}' for h, w in SIZES)} |")
    print("| --- |" + " --- |" * len(SIZES))
    table = {}
    for preset in _PRESETS:
        table[preset] = [measure(arguments.model, paths, labels, preset, size) for size in SIZES]
        print(f"| {preset} | " + " | ".join(f"{top1:.1f} / {top5:.1f}" for top1, top5 in table[preset]) + " |")
    print(json.dumps(table))


def _read_labels(images: Path, labels: Path) -> tuple[list[str], torch.Tensor]:
    found = {path.name: str(path) for path in images.rglob("*") if path.is_file()}
    with open(labels, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [found[row["file_name"]] for row in rows], torch.tensor([int(row["label"]) for row in rows])


@torch.inference_mode()
def measure(
    folder: Path, paths: list[str], labels: torch.Tensor, preset: str, size: tuple[int, int]
) -> tuple[float, float]:
    """Return (top-1, top-5) in percent."""
    model, processor = hf_vit.load(folder, image_size=size, preset=preset)
    ranked = []
    for start in range(0, len(paths), 8):
        batch = processor(paths[start : start + 8], return_tensors="pt")
        ranked.append(model(**batch).logits.topk(5).indices)
    right = torch.cat(ranked) == labels[:, None]
    return 100 * right[:, 0].double().mean().item(), 100 * right.any(dim=1).double().mean().item()


if __name__ == "__main__":
    main()
