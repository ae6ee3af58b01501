"""Quantization of a ViT to int8 (`hf-vit quantize`): accuracy, agreement with float32, and speed against bfloat16.

    python benchmarks/quantization.py FOLDER CALIBRATION_IMAGES IMAGES.zip LABELS.csv

FOLDER holds a classifier and its processor. CALIBRATION_IMAGES holds images that are not in the zip. LABELS.csv has the
columns file_name and label (the index of the class). Speed is measured with a ViT-B/16 of random weights and 1 and 8
images, as the median of forwards in turn. int8 is measured with all layers, and with outliers in eight layers, which
then stay in float32; a real ViT-Ti/16 has as many. `--speed` measures only the speed, and needs no other argument.
"""

import argparse
import csv
import statistics
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine_as_markdown, stamp, take_turns
from PIL import Image

import hf_vit
from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor
from hf_vit.loading import save_folder

_OUTLIERS = (0, 4, 5, 6, 7, 8, 9, 10)  # layers with outliers, of 12
_SECONDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("calibration", nargs="?")
    parser.add_argument("images", nargs="?")
    parser.add_argument("labels", nargs="?")
    parser.add_argument("--speed", action="store_true", help="measure only the speed")
    parser.add_argument("--prepared", type=Path, help="folder that keeps the B/16 for other runs (default: none)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if not arguments.speed:
            compare_answers(arguments, Path(place))
        compare_speed(arguments.prepared or Path(place))
    print(machine_as_markdown({"": stamp()}))


def compare_answers(arguments: argparse.Namespace, place: Path) -> None:
    """Print top-1 accuracy, agreement and the largest difference of logits."""
    output = place / "int8"
    record = hf_vit.quantize(arguments.folder, output, [arguments.calibration], min_agreement=0)
    images, labels = _read(arguments.images, arguments.labels)
    logits = {}
    for name, backend in (("int8", None), ("float32", "torch")):
        model, processor = hf_vit.load(output, backend=backend)
        with torch.inference_mode():
            batches = [
                processor(images[start : start + 13], return_tensors="pt") for start in range(0, len(images), 13)
            ]
            logits[name] = torch.cat([model(**batch).logits for batch in batches])
        print(f"{name:8} top-1 {(logits[name].argmax(dim=1) == labels).sum()} of {len(labels)}")
    agree = (logits["int8"].argmax(dim=1) == logits["float32"].argmax(dim=1)).double().mean()
    difference = (logits["int8"] - logits["float32"]).abs().max()
    print(f"agreement {agree:.1%}, largest difference of logits {difference:.2f}")
    print(f"in float32: {', '.join(record['in_float32'])}")


def compare_speed(place: Path) -> None:
    """Print the times of a B/16 in int8 and in bfloat16."""
    folders = {f"int8, outliers in {count} layers": place / f"int8-{count}" for count in (0, len(_OUTLIERS))}
    for (name, folder), outliers in zip(folders.items(), ((), _OUTLIERS), strict=True):
        if not folder.exists():
            print(f"preparing {name}")
            _prepare(folder, outliers)
    for batch_size in (1, 8):
        images = torch.rand(batch_size, 3, 224, 224)
        turns: dict[str, Any] = {}
        for name, dtype in (("ours bf16", torch.bfloat16), ("ours float32", torch.float32)):
            model = HfViTForImageClassification.from_pretrained(folders["int8, outliers in 0 layers"], dtype=dtype)
            turns[name] = partial(model.optimize_for_inference(batch_size=batch_size), images.to(dtype))
        for name, folder in folders.items():
            turns[name] = partial(hf_vit.load(folder)[0], images)
        with torch.inference_mode():
            taken = take_turns(turns, seconds=_SECONDS, least=5)
        medians = {name: statistics.median(times) for name, times in taken.items()}
        for name, seconds in medians.items():
            ratio = medians["ours bf16"] / seconds
            print(f"B/16 x{batch_size} {name:26} {1000 * seconds:6.1f} ms, {ratio:.2f} times as fast as bf16")


def _prepare(folder: Path, outliers: tuple[int, ...]) -> None:
    """Quantize a B/16 with random weights and outliers in the inputs of some layers' second product."""
    torch.manual_seed(0)
    model = HfViTForImageClassification(HfViTConfig.from_variant("B/16", num_labels=1000)).eval()
    with torch.no_grad():
        for number in outliers:
            model.get_parameter(f"vit.layers.{number}.mlp.fc1.bias")[0] = 100
            model.get_parameter(f"vit.layers.{number}.mlp.fc2.weight")[:, 0] = 0
    with tempfile.TemporaryDirectory() as place:
        save_folder(Path(place, "b16"), model, HfViTImageProcessor())
        generator = np.random.default_rng(0)
        for number in range(16):
            Image.fromarray(generator.integers(0, 255, (224, 224, 3), np.uint8)).save(Path(place, f"{number}.png"))
        hf_vit.quantize(Path(place, "b16"), folder, list(Path(place).glob("*.png")), min_agreement=0)


def _read(images: str, labels: str) -> tuple[list[Any], torch.Tensor]:
    with open(labels, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with zipfile.ZipFile(images) as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        opened = [archive.read(members[row["file_name"]]) for row in rows]
    return opened, torch.tensor([int(row["label"]) for row in rows])


if __name__ == "__main__":
    main()
