"""Images of a dataset: training and evaluation decode alike, within limits, and unreadable ones are listed by name."""

import os
import struct
from itertools import islice
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, features

from hf_vit.data.augmentation import TrainTransform
from hf_vit.data.fingerprint import fingerprint_data
from hf_vit.data.loaders import TrainDataset
from hf_vit.data.native_resolution import NativeDataset, NativeTransform
from hf_vit.data.sources import load_split
from hf_vit.data.splits import SKIPPED_IMAGES, Split, open_named, open_split
from hf_vit.files.pictures import read_size
from hf_vit.inference.batches import ImageReader, Read
from hf_vit.inference.predictions import EvaluationBatches, SplitImages
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.image_reading import ImageReadingError
from hf_vit.settings.fields import EvaluateSettings, FinetuneSettings
from hf_vit.training.build import train_transform

from ..photographs import encode, png_of, table_of

HEIGHT, WIDTH = 8, 12
RNG = np.random.default_rng(3)
COLOR = Image.fromarray(RNG.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))
GRAY = Image.fromarray(RNG.integers(0, 256, (HEIGHT, WIDTH), np.uint8))
ALPHA = Image.fromarray(RNG.integers(0, 256, (HEIGHT, WIDTH), np.uint8))
DEEP = RNG.integers(0, 65536, (HEIGHT, WIDTH), np.uint16)
RGBA = Image.merge("RGBA", (*COLOR.split(), ALPHA))
PALETTE = COLOR.quantize(8)


def rotated() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(COLOR.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif)


FILES = {
    "RGB PNG": encode(COLOR),
    "RGB JPEG": encode(COLOR, "JPEG"),
    "L JPEG": encode(GRAY, "JPEG"),
    "CMYK JPEG": encode(COLOR.convert("CMYK"), "JPEG"),
    "EXIF-rotated JPEG": rotated(),
    "RGBA PNG": encode(RGBA),
    "LA PNG": encode(Image.merge("LA", (GRAY, ALPHA))),
    "P PNG": encode(PALETTE),
    "P PNG, one transparent color": encode(PALETTE, transparency=3),
    "P PNG, alpha of each color": encode(PALETTE, transparency=bytes(range(0, 240, 30))),
    "RGB PNG, a transparent color": encode(COLOR, transparency=COLOR.getpixel((2, 3))),
    "L PNG, a transparent level": encode(GRAY, transparency=GRAY.getpixel((2, 3))),
    "1 PNG": encode(GRAY.convert("1")),
    "I;16 PNG": encode(Image.fromarray(DEEP)),
    "I;16 TIFF": encode(Image.fromarray(DEEP), "TIFF"),
    "I;16B TIFF": encode(Image.frombytes("I;16B", (WIDTH, HEIGHT), DEEP.astype(">u2").tobytes()), "TIFF"),
    "I TIFF": encode(Image.fromarray(DEEP.astype(np.int32) >> 8), "TIFF"),
    "F TIFF": encode(Image.fromarray((DEEP / 65535).astype(np.float32)), "TIFF"),
    "PA TIFF": encode(PALETTE.convert("PA"), "TIFF"),
    "RGBA TIFF": encode(RGBA, "TIFF"),
    "GIF": encode(PALETTE, "GIF"),
    "GIF, a transparent color": encode(PALETTE, "GIF", transparency=3),
    "BMP": encode(COLOR, "BMP"),
    "PPM": encode(COLOR, "PPM"),
    "RGBA WebP": encode(RGBA, "WEBP", lossless=True),
    **({"RGBA AVIF": encode(RGBA, "AVIF")} if features.check("avif") else {}),
}
DEEP_FILES = {name for name in FILES if name.startswith(("I", "F"))}
UNCHANGED = TrainTransform((HEIGHT, WIDTH), "none", flip=False)
NATIVE = NativeTransform(**vars(UNCHANGED), patch_size=(4, 4), max_num_patches=6)


def split_of(*contents: bytes | None, paths=None) -> Split:
    rows = [{"bytes": content, "path": path} for content, path in zip(contents, paths or [None] * 99, strict=False)]
    return open_split(table_of(rows, [0] * len(rows), ["a", "b"]))


def evaluated(split: Split) -> Read:
    """Read all images of a split for an evaluation."""
    reader = ImageReader(HfViTImageProcessor(size={"height": 6, "width": 6}))
    return SplitImages(split, reader).__getitems__(list(range(len(split))))[0]


@pytest.mark.parametrize("name", FILES)
def test_training_decodes_like_the_image_processor(name):
    """Training has 8 bits, so that deeper images are rounded."""
    split, processor = split_of(FILES[name]), HfViTImageProcessor()
    levels: Any = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    expected = processor(FILES[name], do_resize=False, **levels)["pixel_values"][0]
    trained = TrainDataset(split, UNCHANGED, 0)[0]
    assert trained["skipped"] == 0
    tolerance = 0.5 if name in DEEP_FILES else 0
    assert np.abs(trained["image"] - expected.transpose(1, 2, 0)).max() <= tolerance
    samples = NativeDataset(split, NATIVE, 0)
    processor = HfViTImageProcessor(preset="native", patch_size=4, max_num_patches=6, jpeg_dct=NATIVE.jpeg_dct)
    expected = processor(FILES[name], **levels)
    assert samples.count_patches(0) == 6
    assert samples[0]["spatial_shapes"].tolist() == expected["spatial_shapes"][0].tolist() == [2, 3]
    assert np.abs(samples[0]["image"] - expected["pixel_values"][0]).max() <= tolerance


@pytest.mark.parametrize(("preset", "dtype"), [("vit_jax", "float32"), ("augreg", "uint8"), ("timm", "uint8")])
def test_evaluation_batches_have_the_pixels_of_the_image_processor(preset, dtype):
    """To the bit, whether they are normalized by the processor or on the device; the last batch is padded."""
    own = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.25]}
    processor: Any = HfViTImageProcessor(preset=preset, size=[6, 10], **own)
    settings = EvaluateSettings(eval_batch_size=4, num_workers=0)
    config = SimpleNamespace(image_size=(6, 10), num_channels=3)
    accelerator = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    batches = EvaluationBatches(settings, split_of(*FILES.values()), processor, config, accelerator)
    shown = []
    for batch in islice(batches, len(batches.loader)):
        assert str(batch["image"].dtype) == f"torch.{dtype}"
        assert len(batch["image"]) == 4
        shown.append(batches.on_device(batch)["image"])
    expected = processor(list(FILES.values()), return_tensors="pt")["pixel_values"]
    assert torch.equal(torch.cat(shown)[: len(FILES)], expected)


def test_transparent_parts_show_the_background_of_the_model():
    processor = HfViTImageProcessor(background=[200, 100, 50])
    settings = FinetuneSettings(model="m", dataset="d", output_dir="o", crop="none", flip=False)
    config = type("Config", (), {"image_size": (HEIGHT, WIDTH), "num_channels": 3})
    trained = TrainDataset(split_of(FILES["RGBA PNG"]), train_transform(settings, processor, config), 0)[0]["image"]
    color, alpha = np.asarray(COLOR, np.float64), np.asarray(ALPHA, np.float64)[..., None] / 255
    assert np.abs(trained - (color * alpha + np.array([200, 100, 50]) * (1 - alpha))).max() <= 0.5 + 1e-9


# Limits


QOI = b"qoif" + struct.pack(">IIBB", 1, 1, 3, 0) + b"\xfe\x01\x02\x03" + bytes(7) + b"\x01"


@pytest.mark.parametrize("content", [png_of(13_300, 13_300), encode(COLOR, "EPS"), QOI, b"", b"nothing"], ids=range(5))
def test_what_no_command_decodes_is_an_unreadable_image(content, caplog):
    """Too many pixels; PostScript, for which Pillow starts a program; a format that is not on the list; no image."""
    split = split_of(content, FILES["RGB PNG"], paths=["bad.jpg", "good.png"])
    assert TrainDataset(split, UNCHANGED, 0)[0]["label"] == 0
    assert evaluated(split).numbers == [1]
    with pytest.raises(ImageReadingError):
        read_size(content)
    samples = NativeDataset(split, NATIVE, 0)
    assert sorted(samples.count_patches(position) for position in range(2)) == [0, 6]
    assert caplog.text.count("bad.jpg") == 1


# Paths in the rows of a table


def write_table(file, *paths: str) -> None:
    """Write a table whose last row has its bytes and whose other rows have paths alone."""
    rows = [{"bytes": None, "path": path} for path in paths] + [{"bytes": FILES["RGB PNG"], "path": "/etc/passwd"}]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    columns = {"image": rows, "label": [0] * len(rows)}
    pq.write_table(pa.table(columns, schema=kinds.arrow_schema), file)


@pytest.mark.parametrize("path", ["/dev/zero", "outside.png", "data/../outside.png", "https://example.com/a.png"])
def test_a_table_names_no_file_outside_of_its_folder(tmp_path, path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "outside.png").write_bytes(FILES["RGB PNG"])
    write_table(tmp_path / "data" / "train.parquet", path)
    for name in ("data", "data/train.parquet"):
        with pytest.raises(ValueError, match=path):
            load_split(name, "train")
    streamed = open_split(load_split("data", "train", streaming=True))
    with pytest.raises(ValueError, match=path):
        evaluated(streamed)


def test_a_table_names_regular_files_of_its_folder(tmp_path):
    (tmp_path / "inside.png").write_bytes(FILES["RGB PNG"])
    os.mkfifo(tmp_path / "pipe.png")
    write_table(tmp_path / "train.parquet", str(tmp_path / "inside.png"), str(tmp_path / "pipe.png"))
    split = open_split(load_split(str(tmp_path), "train"))
    assert fingerprint_data(split)["images"] == 3  # reading the pipe would wait forever
    assert evaluated(split).numbers == [0, 2]


# Unreadable images are listed


def test_unreadable_images_are_listed_once_in_the_output_folder(tmp_path, caplog):
    for label in ("cat", "dog"):
        folder = tmp_path / "data" / "train" / label
        folder.mkdir(parents=True)
        for number in range(12):
            (folder / f"{number}.jpg").write_bytes(FILES["RGB JPEG"] if number % 2 else b"broken")
        (folder / "phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    settings = EvaluateSettings(model="m", dataset=str(tmp_path / "data"), output_dir=str(tmp_path / "out"))
    for _ in range(2):
        split = open_named(settings, "train")
        read = evaluated(split)
        assert len(read.numbers) == 12
        for error in read.unreadable.values():
            split.log_unreadable(error)
        trained = TrainDataset(split, UNCHANGED, 0)
        assert sum(trained[position]["skipped"] > 0 for position in range(26)) > 0
    lines = (tmp_path / "out" / SKIPPED_IMAGES).read_text().splitlines()
    names = [f"{number}.jpg" for number in range(0, 12, 2)] + ["phone.HEIC"]
    assert len(lines) == 14
    assert [sum(f"{label}/{name}" in line for line in lines) for label in ("cat", "dog") for name in names] == [1] * 14
    assert len(caplog.records) == 10  # the others are only in the file


def test_a_folder_without_a_readable_image_says_why():
    with pytest.raises(ValueError, match=r"bad\.jpg"):
        TrainDataset(split_of(b"", b"", paths=["bad.jpg", "bad.jpg"]), UNCHANGED, 0)[0]
