"""Classify image files with a saved folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from .auto import register_auto_classes


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
    """
    register_auto_classes()
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    top_k = min(top_k, model.config.num_labels)
    for start in range(0, len(images), batch_size):
        batch = processor([str(image) for image in images[start : start + batch_size]], return_tensors="pt")
        with torch.inference_mode():
            scores, indices = model(**batch).logits.softmax(dim=-1).topk(top_k)
        for its_scores, its_indices in zip(scores.tolist(), indices.tolist(), strict=True):
            labels = [model.config.id2label[index] for index in its_indices]
            yield [Prediction(label, score) for label, score in zip(labels, its_scores, strict=True)]
