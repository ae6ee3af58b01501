"""Classify images: from logits, with a model and its image processor, or with a saved folder; and compute many."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .loading import load

_BATCH_SIZE = 8
_MOST_WORKERS = 8  # by default, of those that compute
_READERS = 4  # by default, of those that only read


class Prediction(NamedTuple):
    label: str
    score: float  # softmax probability


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
    _check_classifier(model)
    for outputs in predict_batches(model, processor, [str(image) for image in images], batch_size):
        yield from _classes_of(model, outputs, top_k)


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
    computes = _computes_in_workers(model)
    threads = torch.get_num_threads()
    if workers is None:
        workers = min(threads, _MOST_WORKERS) if computes else _READERS
    if batch_size < 1 or workers < 1:
        raise ValueError(f"batch_size is {batch_size} and workers is {workers}; both must be at least 1")
    if computes and isinstance(images, Sized):
        turns = -(-len(images) // (workers * batch_size))  # of every worker, in batches as equal as can be
        batch_size = max(1, -(-len(images) // (workers * max(turns, 1))))

    def read(batch: list[Any]) -> Any:
        return processor(batch, return_tensors="pt").to(model.device)

    @torch.inference_mode()
    def compute(inputs: Any) -> Any:
        return model(**inputs)

    batches = _batches_of(images, batch_size)
    first, second = next(batches, None), next(batches, None)
    if first is None:
        return
    if second is None:
        yield compute(read(first))
        return
    batches = chain((first, second), batches)
    if computes:
        with closing(_in_order(lambda batch: compute(read(batch)), batches, workers, threads // workers)) as outputs:
            yield from outputs
    else:
        with closing(_in_order(read, batches, workers, 1)) as inputs:
            yield from map(compute, inputs)


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
