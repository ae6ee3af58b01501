"""Small checkpoints, folders, images and datasets with the names that the pages and notebooks use."""

import csv
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from hf_vit.conversion import convert, export

from .tiny_models import SIZES, tiny, tiny_bit

# Settings that make any training short.
FEW_STEPS = "--epochs null --steps 2 --warmup_steps 0 --batch_size 4 --num_workers 0 --report_to none"


def write_documents_folder(root: Path) -> None:
    """Write `root`/folder, in which the commands of the pages run, and the files of `root` that replace downloads."""
    folder = root / "folder"
    folder.mkdir()
    for name in ("cat.jpg", "dog.jpg"):
        noise(64, 48).save(folder / name)
    write_data_set(folder / "FOLDER")
    (folder / "MORE" / "axolotl").mkdir(parents=True)
    for number in range(3):
        Image.new("RGB", (40, 36 + number), (240, 180, 190)).save(folder / "MORE" / "axolotl" / f"{number}.png")
    (folder / "photographs").mkdir()
    for number in range(16):
        noise(40 + number, 36).save(folder / "photographs" / f"{number}.png")
    write_task(folder / "VTAB_FOLDER" / "caltech101")
    (folder / "real.json").write_text(json.dumps([[0]] * 6))
    with torch.random.fork_rng():
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "image_size": 224, "patch_size": 16}
        export(tiny(**sizes, num_labels=1000), folder / "Ti_16-....npz", "jax")
        save_mae(folder / "mae_pretrain_vit_base.pth")
        export(tiny_bit(depths=[1, 1], num_labels=1000), root / "bit.npz", "jax")
        theirs = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, image_size=32))
        theirs.save_pretrained(root / "theirs")
    name = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"
    write_index(root / "index.csv", [(name, 0.5, 384, 0.9)])
    convert(folder / "Ti_16-....npz", labels="imagenet1k", read_weights=False).save(folder / "ti16")
    shutil.copytree(folder / "ti16", folder / "l16")
    convert(root / "bit.npz", labels="imagenet1k", read_weights=False).save(folder / "bit-r50x1")


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8))


def write_data_set(folder: Path) -> None:
    for split in ("train", "test"):
        for kind, color in (("tench", (200, 20, 20)), ("goldfish", (20, 20, 200))):  # of ImageNet, as the model has
            (folder / split / kind).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (40 + number, 36), color).save(folder / split / kind / f"{number}.png")


def write_task(folder: Path) -> None:
    """One of VTAB-1k, as its lists."""
    folder.mkdir(parents=True)
    noise(40, 36).save(folder / "0.png")
    for name, count in (("train800", 800), ("val200", 200), ("test", 5)):
        (folder / f"{name}.txt").write_text("".join(f"0.png {number % 102}\n" for number in range(count)))


def save_mae(path: Path) -> None:
    """As its authors keep the weights, whose names are those of timm."""
    model = tiny(hidden_size=192, num_attention_heads=3, image_size=32, patch_size=16, hidden_act="gelu")
    export(model.vit, path.with_suffix(".safetensors"), "timm")
    torch.save({"model": load_file(path.with_suffix(".safetensors"))}, path)


def write_index(path: Path, rows: Iterable[tuple[str, float, int, float]]) -> None:
    """AugReg's index: names of files, their accuracy, and resolution and accuracy after adapting to Oxford-IIIT Pet."""
    columns = "name ds final_val adapt_ds adapt_resolution adapt_final_val adapt_final_test filename adapt_filename"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns.split())
        for name, accuracy, resolution, adapted in rows:
            model, data, epochs, *_ = name.split("-")
            model, data = model.replace("_", "/"), "i21k_30" if epochs == "30ep" else data
            numbers = [resolution, adapted + accuracy / 100, adapted]
            adapted_name = f"{name}--oxford_iiit_pet-steps_0k-lr_0.01-res_{resolution}"
            writer.writerow([model, data, accuracy, "oxford_iiit_pet", *numbers, name, adapted_name])
