"""Classify images: from logits, with a model and its image processor, or with a saved folder."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .loading import load


class Prediction(NamedTuple):
    label: str
    score: float  # softmax probability


def predict(
    folder: str | Path, images: Sequence[str | Path], top_k: int = 5, batch_size: int = 16
) -> Iterator[list[Prediction]]:
    """The `top_k` most likely classes of every image, most likely first.

    Args:
        folder: a folder of `save_pretrained`, or a name on the Hub.
        images: paths of image files.

    Raises:
        ValueError: an image cannot be read; the message names it.
        ValueError: the folder holds no classifier.
    """
    model, processor = load(folder)
    for start in range(0, len(images), batch_size):
        yield from classify(model, processor, [str(image) for image in images[start : start + batch_size]], top_k)


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
    if not hasattr(model, "classifier"):
        raise ValueError(f"{type(model).__name__} has no classification head; load a folder of a classifier")
    batch = processor(images, return_tensors="pt").to(model.device)
    logits = model(**batch).logits
    if logits.ndim != 2:
        raise ValueError(f"the model classifies tokens, not images: its pooling is {model.config.pooling!r}")
    return most_likely(logits, model.config.id2label, top_k)


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
