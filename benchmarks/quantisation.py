"""Accuracy and size of a saved classifier before and after quantisation with torchao (pip install torchao==0.18.0).

    python benchmarks/quantisation.py FOLDER IMAGES.zip LABELS.csv

LABELS.csv has the columns file_name and label (the index of the class).
"""

import csv
import io
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from PIL import Image
from torchao.quantization import Float8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

from hf_vit import HfViTForImageClassification, HfViTImageProcessor

CONFIGS = {
    "float32": None,
    "int8 weight-only": Int8WeightOnlyConfig(),
    "int8 dynamic": Int8DynamicActivationInt8WeightConfig(),
    "float8 weight-only": Float8WeightOnlyConfig(),
}


def main(folder: str, images: str, labels: str) -> None:
    pixel_values, expected = read_images(HfViTImageProcessor.from_pretrained(folder), images, labels)
    for name, config in CONFIGS.items():
        how = {} if config is None else {"quantization_config": TorchAoConfig(config)}
        model = HfViTForImageClassification.from_pretrained(folder, **how).eval()
        with torch.inference_mode():
            answers = torch.cat([model(batch).logits.argmax(dim=1) for batch in pixel_values.split(26)])
        top1 = (answers == expected).double().mean()
        print(f"{name:20} {top1:6.1%} of {len(expected)}, {saved_size(model) / 1e6:.1f} MB")


def read_images(processor, images: str, labels: str) -> tuple[torch.Tensor, torch.Tensor]:
    with open(labels) as file:
        rows = list(csv.DictReader(file))
    with zipfile.ZipFile(images) as archive:
        members = {Path(name).name: name for name in archive.namelist()}
        opened = [Image.open(io.BytesIO(archive.read(members[row["file_name"]]))) for row in rows]
        pixel_values = processor(opened, return_tensors="pt").pixel_values
    return pixel_values, torch.tensor([int(row["label"]) for row in rows])


def saved_size(model) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


if __name__ == "__main__":
    main(*sys.argv[1:])
