"""Augmentation on a GPU, or of CPU tensors without one: as on the CPU, which test_augmentation.py judges."""

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit.data import device_augmentation
from hf_vit.data.augmentation import TrainTransform, sample_generator
from hf_vit.data.device_augmentation import CropTransform, DeviceAugmentation
from hf_vit.data.loaders import collate_fn
from hf_vit.data.randaugment import NAMES, Operation, apply
from hf_vit.data.samplers import BatchLayout
from hf_vit.data.sources import load_digits, load_split
from hf_vit.data.splits import open_split

from ..commands import pretrain
from ..processes import ONE_STEP, arguments, weights
from .test_loaders import make_loader

SIZE = (20, 36)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Waves with noise: smooth enough for weights of the interpolation to matter, with levels of the whole range."""
    y, x = np.mgrid[:height, :width]
    waves = [128 + 120 * np.sin(x / 7 + y / 11), 128 + 90 * np.cos(x / 5), 40 + x * y % 150]
    noise = np.random.default_rng(height * width).normal(0, 8, (height, width, 3))
    return Image.fromarray(np.clip(np.stack(waves, axis=-1) + noise, 0, 255).astype(np.uint8)).convert(mode)


# Smaller and larger than the result, of its size, and so large that a worker resizes their crops
SIZES = [(31, 47), (200, 300), (9, 7), (64, 33), (1, 1), SIZE, (19, 90)] * 3


def both(pictures: list[Image.Image], **options) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of the path on the CPU, and those of the path on the device."""
    plain = TrainTransform(SIZE, **options)
    expected = np.stack([plain(image, sample_generator(5, 1, n)) for n, image in enumerate(pictures)])
    return torch.from_numpy(expected), DeviceAugmentation(plain, DEVICE)(cropped(pictures, **options))["image"].cpu()


def cropped(pictures: list[Image.Image], **options) -> dict[str, torch.Tensor]:
    transform = CropTransform(SIZE, **options)
    return collate_fn([transform.sample(image, sample_generator(5, 1, n)) for n, image in enumerate(pictures)])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    "crop",
    [
        {"crop": "inception"},
        {"crop": "none"},
        {"crop": "inception", "antialias": True},
        {"crop": "random", "resize": (40, 70)},
        {"crop": "resmall", "resize": (66, 66)},
    ],
)
def test_batches_equal_those_of_the_path_on_the_cpu(monkeypatch, crop, mode):
    """To the bit, with float64; and images are computed in several parts."""
    monkeypatch.setattr(device_augmentation, "_PIXELS", 5 * SIZE[0] * SIZE[1])
    pictures = [picture(height, width, mode) for height, width in SIZES]
    for layers, magnitude in ((0, 0), (2, 10), (3, 15)):
        expected, found = both(pictures, mode=mode, randaugment_layers=layers, randaugment_magnitude=magnitude, **crop)
        assert found.equal(expected)
        assert found.dtype == torch.uint8


def test_without_float64_levels_differ_by_at_most_one():
    pictures = [picture(*size) for size in SIZES]
    augmentation = DeviceAugmentation(TrainTransform(SIZE), DEVICE)
    augmentation.has_float64 = False
    difference = (augmentation(cropped(pictures))["image"].cpu().int() - both(pictures)[0]).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.02


def test_large_crops_do_not_travel_at_their_full_resolution():
    batch = cropped([picture(400, 500)] * 4, crop="none")
    assert len(batch["pixels"]) == 4 * SIZE[0] * SIZE[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_operations_equal_those_of_the_path_on_the_cpu(name, mode):
    """Each image of a batch has other random numbers; a gray one has one level, which leaves nothing to stretch."""
    pictures = [picture(*SIZE, mode), picture(*SIZE[::-1], mode).rotate(90, expand=True), Image.new(mode, SIZE[::-1])]
    drawn = [Operation(NAMES.index(name), bool(n % 2), 7 * n, 9 * n) for n in range(3)]
    images = torch.from_numpy(np.stack([np.asarray(image).reshape(*SIZE, -1) for image in pictures]))
    for magnitude in (0, 1, 4.5, 9, 10, 15, 30):
        transform = TrainTransform(SIZE, randaugment_layers=1, randaugment_magnitude=magnitude)
        fields = torch.tensor(drawn, dtype=torch.long)[:, None]
        found = DeviceAugmentation(transform, DEVICE).apply(images.to(DEVICE, copy=True), fields.to(DEVICE), fields)
        for image, operation, ours in zip(pictures, drawn, found, strict=True):
            expected = np.asarray(apply(image, operation, magnitude / 10)).reshape(*SIZE, -1)
            assert np.array_equal(ours.cpu(), expected), magnitude


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The digits in three parquet files with many blocks."""
    folder = tmp_path_factory.mktemp("shards")
    for number, rows in enumerate(np.array_split(np.arange(1437), 3)):
        load_digits()["train"].select(rows).to_parquet(folder / f"train-{number}.parquet", batch_size=10)
    return folder


@pytest.mark.parametrize("workers", [0, 2])
def test_parts_of_several_workers_are_joined(shards, workers):
    """In a thread; every sample has its own pixels, whatever the worker."""
    split = open_split(load_split(str(shards), "train", streaming=True))
    options = {"size": (12, 10), "mode": "L", "randaugment_layers": 1, "randaugment_magnitude": 9}
    plain, for_device = (
        list(make_loader(split, transform(**options), 3, BatchLayout(60, 60), range(4), number))
        for transform, number in ((TrainTransform, 0), (CropTransform, workers))
    )
    augmentation = DeviceAugmentation(TrainTransform(**options), DEVICE)
    found = [{name: value.cpu() for name, value in augmentation(batch).items()} for batch in for_device]
    torch.testing.assert_close(found, plain, rtol=0, atol=0)


RUN = {**ONE_STEP, "steps": 6, "save_every": 3, "eval_every": 100}
RUN |= {"randaugment_layers": 2, "randaugment_magnitude": 12, "mixup_alpha": 0.2, "cutmix_alpha": 1.0, "flip": "true"}


def train(folder, **changes) -> dict[str, torch.Tensor]:
    pretrain(arguments(**{**RUN, "output_dir": folder, **changes}))
    return weights(folder)


@pytest.mark.usefixtures("fresh_accelerator", "blank_figures")
def test_a_run_ends_with_the_same_weights(tmp_path, shards):
    """And one that begins on the CPU goes on on the device; as does one that reads shards with two workers."""
    expected = train(tmp_path / "cpu", augment_on="cpu")
    found = train(tmp_path / "device", augment_on="device")
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    train(tmp_path / "moved", augment_on="cpu", steps=3, schedule="constant")
    moved = train(tmp_path / "moved", augment_on="device", schedule="constant", resume="true")
    expected = train(tmp_path / "straight", augment_on="cpu", schedule="constant")
    torch.testing.assert_close(moved, expected, rtol=0, atol=0)
    where = {"dataset": shards, "streaming": "true", "eval_split": "none"}
    expected = train(tmp_path / "shards", augment_on="cpu", **where)
    found = train(tmp_path / "shards_device", augment_on="device", num_workers=2, **where)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
