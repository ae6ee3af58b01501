"""Accuracy and size of a saved classifier before and after quantisation with torchao (pip install torchao==0.18.0).

    python benchmarks/quantisation.py FOLDER IMAGES.zip LABELS.csv

LABELS.csv has the columns file_name and label (the index of the class). Then the speed of ViT-B/16 in int8, compiled,
beside the same model in bfloat16 after `optimize_for_inference`: 8 images, medians of forwards that take turns.
"""

import csv
import io
import statistics
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from common import take_turns
from PIL import Image
from torch._inductor import config as inductor
from torchao.quantization import (  # pyright: ignore[reportMissingImports] - a peer
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import TorchAoConfig

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTImageProcessor

CONFIGS = {
    "float32": None,
    "int8 weight-only": Int8WeightOnlyConfig(),
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    "float8 weight-only": Float8WeightOnlyConfig(),
}
_COMPILED = "int8 dynamic, compiled"
_BATCH_SIZE = 8


def main(folder: str, images: str, labels: str) -> None:
    inductor.freezing = True  # weights become constants of the compiled program, which may lay them out anew
    pixel_values, expected = _read_images(HfViTImageProcessor.from_pretrained(folder), images, labels)
    for name, config in {**CONFIGS, _COMPILED: CONFIGS["int8 dynamic"]}.items():
        how: dict[str, Any] = {} if config is None else {"quantization_config": TorchAoConfig(config)}
        model: Any = HfViTForImageClassification.from_pretrained(folder, **how)
        size = _saved_size(model.eval())
        if name == _COMPILED:
            model.compile()
        with torch.no_grad():
            answers = torch.cat([model(batch).logits.argmax(dim=1) for batch in pixel_values.split(26)])
        top1 = (answers == expected).double().mean()
        print(f"{name:24} {top1:6.1%} of {len(expected)}, {size / 1e6:.1f} MB")
    _compare_speed()


@torch.no_grad()
def _compare_speed() -> None:
    config = HfViTConfig.from_variant("B/16", num_labels=1000)
    plain, quantised = (HfViTForImageClassification(config).eval() for _ in range(2))
    plain.bfloat16().optimize_for_inference(batch_size=_BATCH_SIZE)
    quantize_(quantised, CONFIGS["int8 dynamic"])
    quantised.compile()
    images = torch.rand(_BATCH_SIZE, 3, 224, 224)
    turns = {_COMPILED: lambda: quantised(images), "bfloat16, optimised": lambda: plain(images.bfloat16())}
    medians = {name: statistics.median(times) for name, times in take_turns(turns, seconds=20, least=7).items()}
    for name, seconds in medians.items():
        print(f"ViT-B/16, {_BATCH_SIZE} images: {name:24} {1000 * seconds:.0f} ms")
    print(f"int8 is {medians['bfloat16, optimised'] / medians[_COMPILED]:.2f} times as fast")


def _read_images(processor, images: str, labels: str) -> tuple[torch.Tensor, torch.Tensor]:
    with open(labels, encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with zipfile.ZipFile(images) as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        opened = [Image.open(io.BytesIO(archive.read(members[row["file_name"]]))) for row in rows]
        pixel_values = processor(opened, return_tensors="pt").pixel_values
    return pixel_values, torch.tensor([int(row["label"]) for row in rows])


def _saved_size(model) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
