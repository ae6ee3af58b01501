"""Classify images: from logits, with a model and its image processor, or with a saved folder; compute features of many,
and find the nearest of them.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..images.image_reading import ImageReadingError
from .configuration_hf_vit import HfViTConfig
from .loading import load

_BATCH_SIZE = 8
_MOST_WORKERS = 8  # by default, of those that compute
_READERS = 4  # by default, of those that only read
_CHUNK = 8192  # rows of features that are compared at once


class Prediction(NamedTuple):
    label: str
    score: float  # softmax probability


class Batch(NamedTuple):
    """What was computed for some images."""

    numbers: list[int]  # their places among all images
    outputs: Any  # one for each of them
    unreadable: dict[int, ImageReadingError]  # by place: the images between that were skipped


def predict(
    folder: str | Path,
    images: Sequence[str | Path],
    top_k: int = 5,
    batch_size: int = _BATCH_SIZE,
    backend: str | None = None,
) -> Iterator[list[Prediction]]:
    """The `top_k` most likely classes of every image, most likely first.

    Args:
        folder: a folder of `save_pretrained`, or a name on the Hub.
        images: paths of image files.
        batch_size: images of a forward, at most.
        backend: as in `hf_vit.load`.

    Raises:
        ValueError: an image cannot be read; the message names it.
        ValueError: the folder holds no classifier.
    """
    model, processor = load(folder, backend=backend)
    for batch in classify_batches(model, processor, [str(image) for image in images], top_k, batch_size):
        yield from batch.outputs


def classify_batches(
    model: Any,
    processor: Any,
    images: Iterable[Any],
    top_k: int = 5,
    batch_size: int = _BATCH_SIZE,
    skip_unreadable: bool = False,
) -> Iterator[Batch]:
    """The `top_k` most likely classes of many images, most likely first: `outputs` are lists of `Prediction`.

    Args:
        model, processor, images, batch_size: as in `predict_batches`.
        skip_unreadable: leave out images that cannot be read, and go on.

    Raises:
        ValueError: the model is no classifier of images.
        ImageReadingError: as in `predict_batches`, unless they are skipped.
    """
    _check_classifier(model)
    with closing(_compute(model, model, processor, images, batch_size, None, skip_unreadable)) as batches:
        for batch in batches:
            yield batch._replace(outputs=_classes_of(model, batch.outputs, top_k) if batch.numbers else [])


def embed(
    model: Any,
    processor: Any,
    images: Iterable[Any],
    batch_size: int = _BATCH_SIZE,
    workers: int | None = None,
    normalize: bool = False,
) -> np.ndarray:
    """Features of many images, (images, features) float32: what a classifier's head sees (`pooler_output`).

    Args:
        model: of any class, in evaluation mode; others as in `predict_batches`.
        normalize: divide each by its length (L2).

    Raises:
        ValueError: there are no images, the model does not pool, or a feature is NaN or infinite.
        ImageReadingError: an image cannot be read; the message names its file.
    """
    found = [batch.outputs for batch in embed_batches(model, processor, images, batch_size, workers, normalize)]
    if not found:
        raise ValueError("there are no images to embed")
    return np.concatenate(found)


def embed_batches(
    model: Any,
    processor: Any,
    images: Iterable[Any],
    batch_size: int = _BATCH_SIZE,
    workers: int | None = None,
    normalize: bool = False,
    skip_unreadable: bool = False,
) -> Iterator[Batch]:
    """The same batch after batch: `outputs` are (images, features); others as in `embed` and `classify_batches`."""
    if getattr(model.config, "pooling", "cls") == "none":
        raise ValueError("the model does not pool, so that an image has no features of its own: its pooling is 'none'")
    encoder = model.base_model
    forward = partial(encoder, only_pooled=True) if isinstance(model.config, HfViTConfig) else encoder
    with closing(_compute(encoder, forward, processor, images, batch_size, workers, skip_unreadable)) as batches:
        for batch in batches:
            features = batch.outputs.pooler_output.float().cpu().numpy() if batch.numbers else np.empty((0, 0))
            if not (finite := np.isfinite(features).all(axis=1)).all():
                first = batch.numbers[int(finite.argmin())]
                raise ValueError(f"the model computes features that are NaN or infinite, of image {first} first")
            yield batch._replace(outputs=_unit(features) if normalize else features)


def search(
    features: np.ndarray | Iterable[np.ndarray], queries: np.ndarray, top_k: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are most similar to each query, exactly: by cosine, computed in float64, most similar first.

    Args:
        features: (images, features), or such arrays one after the other, of which one at a time is in memory.
        queries: (queries, features), or one of them.
        top_k: how many rows, or all if there are fewer.

    Returns:
        Row numbers and cosines, (queries, top_k) each; of equal ones the first row comes first.

    Raises:
        ValueError: `top_k` is less than 1, or the numbers of features differ.
    """
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1")
    queries = _unit(np.atleast_2d(queries).astype(np.float64))
    chunks = features
    if isinstance(features, np.ndarray):
        chunks = (features[start : start + _CHUNK] for start in range(0, len(features), _CHUNK))
    rows, cosines, seen = np.empty((len(queries), 0), np.int64), np.empty((len(queries), 0)), 0
    for chunk in chunks:
        if chunk.shape[1] != queries.shape[1]:
            raise ValueError(f"the images have {chunk.shape[1]} features and the queries {queries.shape[1]}")
        found = queries @ _unit(chunk.astype(np.float64)).T  # (queries, rows of the chunk)
        numbers = np.broadcast_to(np.arange(seen, seen + len(chunk)), found.shape)
        rows, cosines = np.hstack([rows, numbers]), np.hstack([cosines, found])
        best = np.argsort(-cosines, axis=1, kind="stable")[:, :top_k]
        rows, cosines = np.take_along_axis(rows, best, 1), np.take_along_axis(cosines, best, 1)
        seen += len(chunk)
    return rows, cosines


def _unit(features: np.ndarray) -> np.ndarray:
    """Rows of length 1; those of length 0 stay."""
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths == 0, 1, lengths)


def predict_batches(
    model: Any, processor: Any, images: Iterable[Any], batch_size: int = _BATCH_SIZE, workers: int | None = None
) -> Iterator[Any]:
    """A model's outputs for many images, batch after batch in their order; images are read while the model computes.

    On a CPU every worker reads a batch and computes it, with its share of PyTorch's threads: threads that each have
    images of their own wait less than threads that share one (times in benchmarks/RESULTS.md). A compiled model, one
    with hooks and one on another device compute in the caller's thread, and the workers read ahead.

    Leaving the loop early, or an error, ends the workers once they are through with their batches.

    Args:
        model: in evaluation mode.
        processor: its image processor.
        images: whatever the processor takes, each alone; of an iterator no more is taken than is needed for twice as
            many batches as there are workers.
        batch_size: images of a forward, at most; fewer where the workers' shares would be unequal.
        workers: threads; by default PyTorch's number of them and at most 8, or 4 where they only read.

    Raises:
        ImageReadingError: an image cannot be read; the message names its file. The batches before come first.
        ValueError: `batch_size` or `workers` is less than 1.
    """
    with closing(_compute(model, model, processor, images, batch_size, workers, False)) as batches:
        for batch in batches:
            yield batch.outputs


def _compute(
    model: Any,
    forward: Callable[..., Any],
    processor: Any,
    images: Iterable[Any],
    batch_size: int,
    workers: int | None,
    skip_unreadable: bool,
) -> Generator[Batch, None, None]:
    """Do what `predict_batches` says, with what is called as the model; a batch is empty where an image is skipped."""
    computes = _computes_in_workers(model)
    threads = torch.get_num_threads()
    if workers is None:
        workers = min(threads, _MOST_WORKERS) if computes else _READERS
    if batch_size < 1 or workers < 1:
        raise ValueError(f"batch_size is {batch_size} and workers is {workers}; both must be at least 1")
    if computes and isinstance(images, Sized):
        turns = -(-len(images) // (workers * batch_size))  # of every worker, in batches as equal as can be
        batch_size = max(1, -(-len(images) // (workers * max(turns, 1))))

    def read(batch: list[tuple[int, Any]]) -> list[Batch]:
        """The inputs of a batch; of one with an image that cannot be read, those of its halves."""
        numbers, items = map(list, zip(*batch, strict=True))
        try:
            return [Batch(numbers, processor(items, return_tensors="pt").to(model.device), {})]
        except ImageReadingError as error:
            if not skip_unreadable:
                raise
            if len(batch) == 1:
                return [Batch([], None, {numbers[0]: error})]
        half = len(batch) // 2
        return read(batch[:half]) + read(batch[half:])

    @torch.inference_mode()
    def compute(parts: list[Batch]) -> list[Batch]:
        return [part._replace(outputs=forward(**part.outputs)) if part.numbers else part for part in parts]

    batches = _batches_of(enumerate(images), batch_size)
    first, second = next(batches, None), next(batches, None)
    if first is None:
        return
    if second is None:
        yield from compute(read(first))
        return
    batches = chain((first, second), batches)
    if computes:
        with closing(_in_order(lambda batch: compute(read(batch)), batches, workers, threads // workers)) as outputs:
            yield from chain.from_iterable(outputs)
    else:
        with closing(_in_order(read, batches, workers, 1)) as inputs:
            yield from chain.from_iterable(map(compute, inputs))


def _computes_in_workers(model: Any) -> bool:
    """Whether several threads can compute with a model at once, and are the faster for it."""
    is_compiled = hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
    if model.device.type != "cpu" or is_compiled or "forward" in vars(model):  # a backend has threads of its own
        return False
    return not any(
        module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook") for module in model.modules()
    )


def _batches_of(images: Iterable[Any], batch_size: int) -> Iterator[list[Any]]:
    left = iter(images)
    while batch := list(islice(left, batch_size)):
        yield batch


def _in_order(
    function: Callable[[Any], Any], items: Iterable[Any], workers: int, torch_threads: int
) -> Generator[Any, None, None]:
    """Results of a function for some items, in their order, computed by threads that are ahead by two items each.

    Args:
        torch_threads: of PyTorch, in each of them.
    """
    own_threads, pending = torch.get_num_threads(), deque[Future[Any]]()
    pool = ThreadPoolExecutor(workers, "hf_vit", torch.set_num_threads, (max(torch_threads, 1),))
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) == 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(own_threads)  # new threads begin with the number that any thread has set last


@torch.inference_mode()
def classify(model: Any, processor: Any, images: Any, top_k: int = 5) -> list[list[Prediction]]:
    """Classify a batch of images.

    Args:
        model: a classifier, in evaluation mode.
        processor: its image processor.
        images: whatever the processor takes.
        top_k: how many classes to name, most likely first.

    Raises:
        ValueError: the model has no head, or the processor cannot read an image.
    """
    _check_classifier(model)
    return _classes_of(model, model(**processor(images, return_tensors="pt").to(model.device)), top_k)


def _check_classifier(model: Any) -> None:
    if not hasattr(model, "classifier"):
        raise ValueError(f"{type(model).__name__} has no classification head; load a folder of a classifier")


def _classes_of(model: Any, outputs: Any, top_k: int) -> list[list[Prediction]]:
    if outputs.logits.ndim != 2:
        raise ValueError(f"the model classifies tokens, not images: its pooling is {model.config.pooling!r}")
    return most_likely(outputs.logits, model.config.id2label, top_k)


def most_likely(logits: torch.Tensor, id2label: Mapping[int, str], top_k: int = 5) -> list[list[Prediction]]:
    """Name the `top_k` most likely classes, most likely first.

    Args:
        logits: (batch, num_labels)
        id2label: names of the classes, as in a configuration.
    """
    scores, indices = logits.float().softmax(dim=-1).topk(min(top_k, logits.shape[-1]))
    return [
        [Prediction(id2label[index], score) for index, score in zip(its_indices, its_scores, strict=True)]
        for its_indices, its_scores in zip(indices.tolist(), scores.tolist(), strict=True)
    ]
