"""Image rows of `gpu.py`: decoding JPEGs, and augmentation and normalization as tensor operations."""

import io
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpu_steps
import numpy as np
import torch
from gpu_process import LeftOut
from PIL import Image
from torch.nn import functional as F

from hf_vit.data.augmentation import sample_inception_box
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.training.objectives import Normalizer


def measure(message: dict, report: Callable[[dict], None]) -> dict:
    """Measure the images per second of every step from a JPEG to pixel values."""
    plan, device = gpu_steps.Plan(message["toy"]), torch.device(message["device"])
    count, size = (4, 16) if plan.toy else (256, 224)
    height, width = (24, 32) if plan.toy else (375, 500)
    jpegs = make_jpegs(min(count, 32), height, width)
    images = torch.from_numpy(np.stack([_decode_one(jpeg) for jpeg in jpegs]))
    images = images[torch.arange(count) % len(images)]  # (count, height, width, 3) uint8
    rates: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, prepare in _steps(jpegs, images, size, device).items():
        try:
            work, number = prepare()
            rates[name] = number / statistics.median(gpu_steps._time(work, device, plan))
        except LeftOut as reason:
            left_out[name] = str(reason)
        report({"images_per_second": rates, "left_out": left_out})
    return {"images_per_second": rates, "left_out": left_out}


def make_jpegs(count: int, height: int, width: int) -> list[bytes]:
    """Make JPEGs that decode as slowly as photographs; 500 x 375 is ImageNet's mean size."""
    generator, jpegs = np.random.default_rng(0), []
    for _ in range(count):
        coarse = generator.integers(0, 256, (max(height // 8, 2), max(width // 8, 2), 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        jpegs.append(buffer.getvalue())
    return jpegs


def _steps(jpegs: list[bytes], images: torch.Tensor, size: int, device: torch.device) -> dict[str, Any]:
    """Return name -> a function that returns the work to time and its number of images."""
    normalizer = Normalizer([0.5] * 3, [0.5] * 3, device)
    processor = HfViTImageProcessor(size=size)
    generator, rng = torch.Generator(device).manual_seed(0), np.random.default_rng(0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = ThreadPoolExecutor(cores)
    there = images.to(device)
    pinned = images.pin_memory() if device.type == "cuda" else images

    def augment(batch: torch.Tensor) -> torch.Tensor:
        boxes = sample_boxes(len(batch), batch.shape[1], batch.shape[2], generator)
        return crop_flip_normalize(batch, boxes, size, normalizer, generator)

    def evaluate() -> Any:
        return processor(list(there.permute(0, 3, 1, 2)), return_tensors="pt")

    def boxes_in_python() -> Any:
        return [sample_inception_box(images.shape[1], images.shape[2], rng=rng) for _ in images]

    return {
        f"decode with PIL, {cores} threads": lambda: (lambda: list(pool.map(_decode_one, jpegs)), len(jpegs)),
        "decode on the device (nvjpeg)": lambda: (_device_decoder(jpegs, device), len(jpegs)),
        "crop, flip, normalize on the device": lambda: (lambda: augment(there), len(images)),
        "the same from the host's memory": lambda: (
            lambda: augment(pinned.to(device, non_blocking=True)),
            len(images),
        ),
        "boxes of the training loader, in Python": lambda: (boxes_in_python, len(images)),
        "the image processor, tensors on the device": lambda: (evaluate, len(images)),
    }


def _decode_one(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def _device_decoder(jpegs: list[bytes], device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        raise LeftOut(f"nvjpeg needs CUDA, and this is {device.type}")
    try:
        from torchvision.io import decode_jpeg  # pyright: ignore[reportMissingImports] - a peer
    except (ImportError, RuntimeError) as error:
        raise LeftOut(f"torchvision is not installed ({error})") from error
    files = [torch.frombuffer(bytearray(jpeg), dtype=torch.uint8) for jpeg in jpegs]
    try:
        decode_jpeg(files, device=device)
    except RuntimeError as error:
        raise LeftOut(f"this torchvision cannot decode on the device ({str(error).splitlines()[0]})") from error
    return lambda: decode_jpeg(files, device=device)


def sample_boxes(
    count: int,
    height: int,
    width: int,
    generator: torch.Generator,
    area: tuple[float, float] = (0.05, 1.0),
    ratio: tuple[float, float] = (0.75, 1.33),
) -> torch.Tensor:
    """Draw random crops on the generator's device: (count, 4) of top, left, height, width in pixels.

    Like `hf_vit.data.augmentation.sample_inception_box`: a uniform aspect ratio, then a uniform height among those
    that fit; but without rounding to whole pixels, and without second attempts.
    """
    draws = torch.rand(4, count, generator=generator, device=generator.device)
    shape = ratio[0] + (ratio[1] - ratio[0]) * draws[0]  # width / height
    most = torch.clamp((area[1] * height * width / shape).sqrt(), max=torch.clamp(width / shape, max=height))
    least = torch.minimum((area[0] * height * width / shape).sqrt(), most)
    tall = least + (most - least) * draws[1]
    wide = tall * shape
    return torch.stack([(height - tall) * draws[2], (width - wide) * draws[3], tall, wide], dim=1)


def crop_flip_normalize(
    images: torch.Tensor, boxes: torch.Tensor, size: int, normalizer: Normalizer, generator: torch.Generator | None
) -> torch.Tensor:
    """Crop, resize (bilinear, no antialiasing) and flip half of the images in one gather; then normalize.

    Args:
        images: (batch, height, width, channels) uint8
        boxes: (batch, 4) of top, left, height, width in pixels.
        generator: generator of the flips; None for no flips.

    Returns:
        (batch, channels, size, size) float32
    """
    height, width = images.shape[1:3]
    top, left, tall, wide = boxes.to(images.device).T
    flip = torch.ones_like(top)
    if generator is not None:
        flip = torch.where(torch.rand(len(images), generator=generator, device=images.device) < 0.5, -1.0, 1.0)
    zero = torch.zeros_like(top)
    across = torch.stack([flip * wide / width, zero, (2 * left + wide) / width - 1], dim=1)
    down = torch.stack([zero, tall / height, (2 * top + tall) / height - 1], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), [len(images), 3, size, size], align_corners=False)
    pixels = images.permute(0, 3, 1, 2).float()
    cut = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return normalizer(cut.permute(0, 2, 3, 1))
