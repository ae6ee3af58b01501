"""Images in batches: read and preprocessed ahead of the model, in their order."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ..files.image_files import images_below
from ..models.image_reading import ImageReadingError

_WORKERS = 4
_FEW_IMAGES = 64  # are read sooner than processes start


class Batch(NamedTuple):
    """Outputs for some of the images."""

    numbers: list[int]  # their indices among all images
    outputs: Any  # one for each of them
    unreadable: dict[int, ImageReadingError | OSError]  # skipped images, by index


def list_of_images(images: Any) -> Iterable[Any]:
    """Return what a caller gives as images as an iterable of single images.

    Args:
        images: a folder, which stands for the image files in it and in its subfolders, sorted; or one image: another
            path, a URL, bytes, an open file, a PIL image, {"bytes", "path"}, an array or tensor of 2 or 3 dimensions;
            or images: an array or tensor of 4 dimensions, a list, a column of `datasets`, a generator.

    Raises:
        ValueError: there are no images, or it is none of these.
    """
    if isinstance(images, str | os.PathLike):
        folder = Path(images).expanduser()
        return [str(file) for file in images_below(folder)] if folder.is_dir() else [str(images)]
    if isinstance(images, bytes | bytearray | memoryview | dict | Image.Image | io.IOBase) or hasattr(images, "read"):
        return [images]
    if isinstance(images, np.ndarray | torch.Tensor):
        if images.ndim in (2, 3):
            return [images]
        if images.ndim != 4:
            raise ValueError(f"images has the shape {tuple(images.shape)}; expected 2 or 3 dimensions, or 4 of a batch")
    if not isinstance(images, Iterable):
        raise ValueError(f"images is of type {type(images).__name__}; expected an image, a folder or a list of images")
    if isinstance(images, Sized) and len(images) == 0:
        raise ValueError("there are no images: the list is empty")
    return images


def compute_batches(
    forward: Callable[..., Any],
    device: torch.device,
    processor: Any,
    images: Iterable[Any],
    batch_size: int,
    workers: int | None = None,
    skip_unreadable: bool = False,
) -> Iterator[Batch]:
    """Compute a function of preprocessed images, batch by batch in their order.

    Args:
        forward: function of the processor's outputs on `device`, such as a model in evaluation mode.
        processor: an image processor.
        images: any inputs of the processor. An iterator is read ahead by at most two batches for each worker.
        batch_size: maximum number of images in a forward pass.
        workers: number of processes that read and preprocess ahead; 0: this process reads. None: 0 for up to 64
            images, else 4, but no more than there are processors.
        skip_unreadable: skip images that cannot be read. A batch with such images is divided.

    Raises:
        ImageReadingError: an image cannot be read, without `skip_unreadable`; the message names its file. Earlier
            batches are returned first.
    """
    if workers is None:
        are_few = isinstance(images, Sized) and len(images) <= _FEW_IMAGES
        workers = 0 if are_few else min(_WORKERS, os.cpu_count() or 1)
    # The sampler yields the images themselves, so that a generator is read once, in this process.
    loader = DataLoader(
        _Identity(),
        batch_sampler=cast("Any", BatchSampler(cast("Any", enumerate(images)), batch_size, drop_last=False)),
        collate_fn=partial(_read, processor),
        num_workers=workers,
    )
    for batch in chain.from_iterable(loader):
        if batch.unreadable and not skip_unreadable:
            raise next(iter(batch.unreadable.values()))
        if batch.numbers:
            with torch.inference_mode():
                batch = batch._replace(outputs=forward(**batch.outputs.to(device)))
        yield batch


class _Identity(Dataset):
    """Dataset in which an image is its own index."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _read(processor: Any, batch: list[tuple[int, Any]]) -> list[Batch]:
    """Return the inputs of a batch of (number, image); if an image cannot be read, those of its halves."""
    numbers = [number for number, _ in batch]
    items = [str(image) if isinstance(image, Path) else image for _, image in batch]
    try:
        inputs = processor(items, return_tensors="pt")
    except (ImageReadingError, OSError) as error:  # OSError: an image processor of transformers
        if len(batch) == 1:
            return [Batch([], None, {numbers[0]: error})]
        half = len(batch) // 2
        return _read(processor, batch[:half]) + _read(processor, batch[half:])
    if len(inputs["pixel_values"]) != len(batch):
        raise ValueError(f"images {numbers[0]} to {numbers[-1]} have a list or a batch among them: give its images")
    return [Batch(numbers, inputs, {})]
