"""Predictions for many images: classes, features, and search for similar images."""

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

from .files.predictions import Prediction, lowest_scores, most_likely
from .loading import load
from .models.configuration_hf_vit import HfViTConfig
from .models.image_reading import ImageReadingError

_BATCH_SIZE = 8
_WORKERS = 4
_FEW_IMAGES = 64  # are read sooner than processes start
ROWS_AT_ONCE = 8192  # rows of features that are compared at once


class Batch(NamedTuple):
    """Outputs for some of the images."""

    numbers: list[int]  # their indices among all images
    outputs: Any  # one for each of them
    unreadable: dict[int, ImageReadingError | OSError]  # skipped images, by index


Source = str | Path | tuple[Any, Any]  # a folder or a name on the Hub, or (model, processor) as of `hf_vit.load`


def predict(
    model: Source,
    images: Iterable[Any],
    top_k: int = 5,
    batch_size: int = _BATCH_SIZE,
    backend: str | None = None,
    threshold: float | Literal["auto"] | None = None,
    coverage: float | None = None,
    reject: bool = False,
) -> Iterator[list[Prediction]]:
    """Predict the `top_k` most likely classes of every image, most likely first.

    Args:
        model: a folder of `save_pretrained`, a name on the Hub, or (model, processor) as of `hf_vit.load`.
        images: paths of image files, or any other input of the processor.
        batch_size: most images of a forward.
        backend: as in `hf_vit.load`, for a folder or a name.
        threshold: instead of `top_k`, predict all classes with at least this score; "auto": with at least their own
            thresholds, which training chose for images with several labels.
        coverage: instead of `top_k`, predict sets of classes that hold the right one with this frequency: 0.8, 0.9,
            0.95 or 0.99, of a model that `hf_vit.calibrate` wrote.
        reject: predict no class for an image that is unlike those of all classes, of a model that `hf_vit.calibrate`
            wrote.

    Returns:
        For each image, in their order, its classes as `Prediction`, (label, score). They are computed batch by batch
        while the result is iterated.

    Raises:
        ValueError: an image cannot be read (the message names it), or the model is not a classifier.

    Example:
        >>> import hf_vit
        >>> for image in hf_vit.predict("folder", ["photo.png"], top_k=3):
        ...     labels = [prediction.label for prediction in image]
    """
    loaded, processor = model if isinstance(model, tuple) else load(model, backend=backend)
    named = [str(image) if isinstance(image, Path) else image for image in images]
    lowest = lowest_scores(loaded.config, threshold, coverage)
    for batch in classify_batches(loaded, processor, named, top_k, batch_size, lowest=lowest, reject=reject):
        yield from batch.outputs


def classify_batches(
    model: Any,
    processor: Any,
    images: Iterable[Any],
    top_k: int = 5,
    batch_size: int = _BATCH_SIZE,
    skip_unreadable: bool = False,
    lowest: list[float] | None = None,
    reject: bool = False,
) -> Iterator[Batch]:
    """Predict the `top_k` most likely classes of many images, most likely first, batch by batch.

    Args:
        model, processor, images, batch_size: as in `predict_batches`.
        skip_unreadable: skip images that cannot be read.
        lowest, reject: as in `most_likely`.

    Returns:
        Batches whose `outputs` are lists of `Prediction`, one list for each image.

    Raises:
        ValueError: the model is not an image classifier, or a logit is NaN or infinite.
        ImageReadingError: an image cannot be read, without `skip_unreadable`.
    """
    if not (hasattr(model, "classifier") or getattr(model, "is_classifier", False)):
        raise ValueError(f"cannot classify: {type(model).__name__} has no classification head; load a classifier")
    for batch in _compute(model, model, processor, images, batch_size, None, skip_unreadable):
        classes: list[list[Prediction]] = []
        if batch.numbers:
            logits = batch.outputs.logits
            if logits.ndim != 2 or not logits.isfinite().all():
                problem = "NaN or infinite logits" if logits.ndim == 2 else "logits of every token (pooling 'none')"
                raise ValueError(f"cannot classify images: the model computes {problem}")
            classes = most_likely(logits, model.config, top_k, lowest, reject)
        yield batch._replace(outputs=classes)


def embed(
    model: Source,
    images: Iterable[Any],
    batch_size: int = _BATCH_SIZE,
    workers: int | None = None,
    normalize: bool = False,
) -> np.ndarray:
    """Compute the features of many images: the input of a classifier's head (`pooler_output`).

    Args:
        model: as in `predict`; of any class, with a head or without.
        images, batch_size, workers: as in `predict_batches`.
        normalize: divide each feature vector by its length (L2).

    Returns:
        (images, features) float32

    Raises:
        ValueError: there are no images, the model does not pool, or a feature is NaN or infinite.
        ImageReadingError: an image cannot be read; the message names its file.

    Example:
        >>> import hf_vit
        >>> from hf_vit.prediction import search
        >>> features = hf_vit.embed("folder", ["photo.png"], normalize=True)
        >>> rows, cosines = search(features, features[:1], top_k=1)
        >>> rows.tolist()
        [[0]]
    """
    loaded, processor = model if isinstance(model, tuple) else load(model)
    batches = embed_batches(loaded, processor, images, batch_size, workers, normalize)
    return np.concatenate([batch.outputs for batch in batches])


def embed_batches(
    model: Any,
    processor: Any,
    images: Iterable[Any],
    batch_size: int = _BATCH_SIZE,
    workers: int | None = None,
    normalize: bool = False,
    skip_unreadable: bool = False,
) -> Iterator[Batch]:
    """Compute the features of many images, batch by batch.

    Args:
        model, processor, images, batch_size, workers: as in `predict_batches`.
        normalize: as in `embed`.
        skip_unreadable: skip images that cannot be read.

    Returns:
        Batches whose `outputs` are (images, features).

    Raises:
        ValueError: the model does not pool, or a feature is NaN or infinite.
        ImageReadingError: an image cannot be read, without `skip_unreadable`.
    """
    if getattr(model.config, "pooling", "cls") == "none":
        raise ValueError("cannot embed images: the model's pooling is 'none' (expected 'cls', 'mean' or 'map')")
    encoder = model.base_model
    forward = partial(encoder, only_pooled=True) if isinstance(model.config, HfViTConfig) else encoder
    for batch in _compute(encoder, forward, processor, images, batch_size, workers, skip_unreadable):
        features = batch.outputs.pooler_output.float().cpu().numpy() if batch.numbers else np.empty((0, 0))
        if not (finite := np.isfinite(features).all(axis=1)).all():
            first = batch.numbers[int(finite.argmin())]
            raise ValueError(f"the model computes NaN or infinite features, first for image {first}")
        yield batch._replace(outputs=_unit(features) if normalize else features)


def search(
    features: np.ndarray | Iterable[np.ndarray], queries: np.ndarray, top_k: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows that are most similar to each query, by exact cosine similarity in float64.

    Args:
        features: (images, features), or an iterable of such arrays, of which one at a time is in memory.
        queries: (queries, features), or (features,) for one query.
        top_k: number of rows to return; all if there are fewer.

    Returns:
        Row numbers and cosines, (queries, top_k) each, most similar first; equal ones in the order of rows.

    Raises:
        ValueError: `top_k` is less than 1, or the numbers of features differ.
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    queries = _unit(np.atleast_2d(queries).astype(np.float64))
    chunks = features
    if isinstance(features, np.ndarray):
        chunks = (features[start : start + ROWS_AT_ONCE] for start in range(0, len(features), ROWS_AT_ONCE))
    rows, cosines, seen = np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0)), 0
    for chunk in chunks:
        found = queries @ _unit(chunk.astype(np.float64)).T  # (queries, rows of the chunk)
        numbers = np.broadcast_to(np.arange(seen, seen + len(chunk)), found.shape)
        rows, cosines = np.hstack([rows, numbers]), np.hstack([cosines, found])
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :top_k]
        rows, cosines = np.take_along_axis(rows, best, 1), np.take_along_axis(cosines, best, 1)
        seen += len(chunk)
    return rows, cosines


def _unit(features: np.ndarray) -> np.ndarray:
    """Scale rows to length 1, except rows of zeros."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths == 0, 1, lengths)


def predict_batches(
    model: Any, processor: Any, images: Iterable[Any], batch_size: int = _BATCH_SIZE, workers: int | None = None
) -> Iterator[Any]:
    """Compute a model's outputs for many images, batch by batch in their order.

    Args:
        model: a model in evaluation mode.
        processor: its image processor.
        images: any inputs of the processor. An iterator is read ahead by at most two batches for each
            worker.
        batch_size: most images of a forward.
        workers: number of processes that read and preprocess ahead, as `num_workers` of a `DataLoader`; 0: this process
            reads. None: 0 for up to 64 images, else 4, but no more than there are processors.

    Raises:
        ImageReadingError: an image cannot be read; the message names its file. Earlier batches are returned first.
        ValueError: `batch_size` is less than 1, or `workers` negative.

    Example:
        >>> import hf_vit
        >>> from hf_vit.prediction import predict_batches
        >>> model, processor = hf_vit.load("folder")
        >>> for outputs in predict_batches(model, processor, ["photo.png"] * 3, batch_size=2):
        ...     classes = outputs.logits.argmax(dim=-1)
    """
    for batch in _compute(model, model, processor, images, batch_size, workers, False):
        yield batch.outputs


def _compute(
    model: Any,
    forward: Callable[..., Any],
    processor: Any,
    images: Iterable[Any],
    batch_size: int,
    workers: int | None,
    skip_unreadable: bool,
) -> Iterator[Batch]:
    """Implement `predict_batches`, with `forward` instead of the model; a skipped image is an empty batch."""
    if isinstance(images, str | os.PathLike):
        raise ValueError(f"images is {str(images)!r}; it must be a list of images, such as [{str(images)!r}]")
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
                batch = batch._replace(outputs=forward(**batch.outputs.to(model.device)))
        yield batch


class _Identity(Dataset):
    """Data set in which an image is its own index."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _read(processor: Any, batch: list[tuple[int, Any]]) -> list[Batch]:
    """Return the inputs of a batch of (number, image); if an image cannot be read, those of its halves."""
    numbers, items = map(list, zip(*batch, strict=True))
    try:
        return [Batch(numbers, processor(items, return_tensors="pt"), {})]
    except (ImageReadingError, OSError) as error:  # OSError: an image processor of transformers
        if len(batch) == 1:
            return [Batch([], None, {numbers[0]: error})]
    half = len(batch) // 2
    return _read(processor, batch[:half]) + _read(processor, batch[half:])


def classify(model: Any, processor: Any, images: Any, top_k: int = 5) -> list[list[Prediction]]:
    """Return the `top_k` most likely classes of each of some images, as `predict` does."""
    return list(predict((model, processor), images, top_k))
