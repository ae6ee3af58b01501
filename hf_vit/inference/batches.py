"""Images in batches, for prediction and evaluation: read and preprocessed ahead of the model, in their order."""

import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ..data.workers import worker_options
from ..files.download import fetch_image
from ..files.image_files import images_below
from ..files.predictions import Batch
from ..models.image_decoding import ImageReadingError
from ..models.image_processing_hf_vit import HfViTImageProcessor, Normalize
from .columns import list_of_values

_WORKERS = 4
_FEW_IMAGES = 64  # are read sooner than processes start


def list_of_images(images: Any) -> Iterable[Any]:
    """Return what a caller gives as images as an iterable of single images.

    Args:
        images: a folder, which stands for the image files in it and in its subfolders, sorted; or one image: another
            path, a URL, bytes, an open file, a PIL image, {"bytes", "path"}, an array or tensor of 2 or 3 dimensions;
            or images: an array or tensor of 4 dimensions, a list, a column of `datasets` or Arrow, a generator.

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
    if hasattr(images, "to_pylist"):  # a column of Arrow
        images = list_of_values(images)
    if not isinstance(images, Iterable):
        raise ValueError(f"images is of type {type(images).__name__}; expected an image, a folder or a list of images")
    if isinstance(images, Sized) and len(images) == 0:
        raise ValueError("there are no images: the list is empty")
    return images


def choose_workers(workers: int | None, images: Iterable[Any]) -> int:
    """Return the number of reading processes; None: 0 for up to 64 images, else 4, but no more than processors."""
    if workers is not None:
        return workers
    are_few = isinstance(images, Sized) and len(images) <= _FEW_IMAGES
    return 0 if are_few else min(_WORKERS, os.cpu_count() or 1)


def number_batches(images: Iterable[Any], batch_size: int) -> Iterable[list[tuple[int, Any]]]:
    """Return batches of (number, image); an iterator of images is read once, in this process."""
    return cast("Any", BatchSampler(cast("Any", enumerate(images)), batch_size, drop_last=False))


def compute_batches(
    forward: Callable[..., Any],
    device: torch.device,
    processor: Any,
    batches: Iterable[Sequence[tuple[int, Any]]],
    workers: int = 0,
    skip_unreadable: bool = False,
    fetch: Callable[[Any], Any] = fetch_image,
    rows: int | None = None,
    needs_spawn: bool = False,
) -> Iterator[Batch]:
    """Compute a function of preprocessed images, batch by batch in their order.

    Args:
        forward: function of the processor's outputs on `device`, such as a model in evaluation mode.
        processor: an image processor.
        batches: batches of (number, image). An iterator is read ahead by at most two batches for each worker.
        workers: number of processes that read and preprocess ahead; 0: this process reads.
        skip_unreadable: skip images that cannot be read.
        fetch: function of an image that returns an input of the processor; it runs in the workers.
        rows: compute every batch with this number of rows: of a smaller one, the last image fills it, and the outputs
            have more rows than `numbers`. The outputs of an image then do not depend on the number of others.
        needs_spawn: as in `worker_options`.

    Raises:
        ImageReadingError: an image cannot be read, without `skip_unreadable`; the message names its file. Earlier
            batches are returned first.
    """
    reader = ImageReader(processor, fetch=fetch)
    loader = DataLoader(
        _Batches(reader), batch_sampler=cast("Any", batches), collate_fn=as_read, **worker_options(workers, needs_spawn)
    )
    for read in loader:
        if read.unreadable and not skip_unreadable:
            raise next(iter(read.unreadable.values()))
        outputs = None
        if read.numbers:
            inputs = reader.finish(read.inputs, device)
            if rows is not None:
                inputs = {name: _fill(tensor, rows) for name, tensor in inputs.items()}
            with torch.inference_mode():
                outputs = forward(**inputs)
        yield Batch(read.numbers, outputs, read.unreadable)


def _fill(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Repeat the last row until there are `rows`."""
    missing = rows - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(missing, *tensor.shape[1:])]) if missing > 0 else tensor


class Read(NamedTuple):
    """A batch of images as a worker returns it."""

    numbers: list[int]  # of the readable images
    inputs: dict[str, torch.Tensor]  # outputs of the image processor for them, see `ImageReader`
    unreadable: dict[int, ImageReadingError]  # by number


class ImageReader:
    """An image processor in two parts: what workers do, and what is left to the device of the model.

    If the processor rounds its resize, workers return uint8, a quarter of the bytes, and the device normalizes. The
    result equals the processor's to the bit.

    Args:
        processor: an image processor, or any function of images that returns a dictionary of tensors.
        fetch: function of an image that returns an input of the processor.
        options: more arguments of its call.
    """

    def __init__(self, processor: Any, fetch: Callable[[Any], Any] = fetch_image, **options: Any):
        self.processor = processor
        self.fetch = fetch
        self.options = options
        settings = processor.settings() if isinstance(processor, HfViTImageProcessor) else {}
        does_all = all(settings.get(step) for step in ("do_resize", "do_rescale", "do_normalize"))
        self.returns_levels = does_all and settings["resize_output"] != "float" and settings["preset"] != "native"
        if self.returns_levels:
            self.options |= {"rescale_factor": 1.0, "do_normalize": False}

    def __call__(self, batch: Sequence[tuple[int, Any]]) -> Read:
        """Read and preprocess images, given as (number, image)."""
        try:
            return Read([number for number, _ in batch], self._preprocess(batch), {})
        except ImageReadingError:
            unreadable = {}
        for one in batch:
            try:
                self._preprocess([one])
            except ImageReadingError as error:
                unreadable[one[0]] = error
        readable = [one for one in batch if one[0] not in unreadable]
        inputs = self._preprocess(readable) if readable else {}
        return Read([number for number, _ in readable], inputs, unreadable)

    def _preprocess(self, batch: Sequence[tuple[int, Any]]) -> dict[str, torch.Tensor]:
        images = [str(image) if isinstance(image, Path) else self.fetch(image) for _, image in batch]
        inputs = dict(self.processor(images, return_tensors="pt", **self.options))
        if len(inputs["pixel_values"]) != len(batch):
            raise ValueError(
                f"images {batch[0][0]} to {batch[-1][0]} have a list or a batch among them: give its images"
            )
        if self.returns_levels:
            inputs["pixel_values"] = inputs["pixel_values"].to(torch.uint8)
        return inputs

    def finish(self, inputs: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Return the processor's outputs on a device, from what was read."""
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        if self.returns_levels:
            inputs["pixel_values"] = self.normalize(inputs["pixel_values"])
        return inputs

    def normalize(self, levels: torch.Tensor) -> torch.Tensor:
        """Normalize images (..., channels, height, width) of uint8 as the processor does."""
        scale, offset = Normalize.of(self.processor).scale_and_offset(levels.device)
        return levels.float().mul_(scale).add_(offset)


def as_read(batch: Any) -> Any:
    """Return a batch as the dataset returned it: the `collate_fn` of datasets that read whole batches."""
    return batch


class _Batches(Dataset):
    """Dataset in which a batch of (number, image) is its own index."""

    def __init__(self, reader: ImageReader):
        self.reader = reader

    def __getitems__(self, batch: list[tuple[int, Any]]) -> Read:
        return self.reader(batch)
