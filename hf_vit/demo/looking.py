"""Models of the page of `hf-vit demo`: classes of a picture, and the attention of a model."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..analysis import attention_maps, attention_rollout
from ..analysis.inspection import visible_image
from ..analysis.observing import as_images
from ..loading import load
from ..models.configuration_hf_vision import score_function, scores_of
from ..prediction import Batch, classify_batches

TOP_K = 5
_SHOWN_SIZE = 448  # smallest number of pixels of the shorter side, approximately
_DARKEST = 0.15  # share of the brightness at the least attention


class Demo:
    """Classifier and its image processor.

    Args:
        folder: a folder of `save_pretrained`, or a name on the Hub.

    Raises:
        ValueError: the model is not a classifier, is a ResNet, classifies every patch, or is a regression.
    """

    def __init__(self, folder: str | Path):
        self.model, self._processor = load(folder, backend="eager")
        if not hasattr(self.model, "classifier"):
            raise ValueError(f"{folder} holds {type(self.model).__name__} (expected a classifier)")
        if not hasattr(self.model.config, "pooling"):
            raise ValueError(f"{folder} holds a ResNet, which has no attention to show (expected a ViT)")
        if self.model.config.pooling == "none":
            raise ValueError(f"{folder} classifies every patch (pooling 'none'); the demo needs one class per picture")
        if score_function(self.model.config) == "none":
            raise ValueError(f"{folder} holds a regression, whose values are no probabilities; use `hf-vit predict`")
        self.name = re.sub(r".*/", "", Path(folder).as_posix()) or str(Path(folder).resolve().name)
        self.num_layers: int = self.model.config.num_hidden_layers
        self.num_heads: int = self.model.config.num_attention_heads
        self.labels: list[str] = list((self.model.config.id2label or {}).values())

    def look(
        self, picture: str | Path, layer: int | None = None, head: int | None = None
    ) -> tuple[dict[str, float], Image.Image]:
        """Return the most likely classes with their probabilities, and the picture of `show`."""
        pixel_values = self._read(picture)
        with torch.inference_mode():
            logits = self.model(pixel_values, interpolate_pos_encoding=True).logits
        return self._top_classes(logits), self._show(pixel_values, layer, head)

    def show(self, picture: str | Path, layer: int | None = None, head: int | None = None) -> Image.Image:
        """Return the picture at the model's resolution, bright where the attention is high.

        Args:
            picture: an image file.
            layer: layer number from 0; None for the rollout of all layers.
            head: head number from 0 in that layer; None for the mean of all heads.
        """
        return self._show(self._read(picture), layer, head)

    def classify_all(self, pictures: Sequence[str]) -> Iterator[Batch]:
        """Yield the most likely classes of many pictures in batches; see `classify_batches`."""
        return classify_batches(self.model, self._processor, pictures, TOP_K, skip_unreadable=True)

    def _read(self, picture: str | Path) -> torch.Tensor:
        return as_images(self._processor(str(picture), return_tensors="pt"), self.model.config)

    def _show(self, pixel_values: torch.Tensor, layer: int | None, head: int | None) -> Image.Image:
        if layer is None:
            attention = attention_rollout(self.model, pixel_values)[0]
        else:
            heads = attention_maps(self.model, pixel_values)[0, layer]  # (heads, rows, columns)
            attention = heads.mean(axis=0) if head is None else heads[head]
        return highlight(visible_image(pixel_values[0], self._processor), attention)

    def _top_classes(self, logits: torch.Tensor) -> dict[str, float]:
        """Most likely labels of logits (1, num_labels), in order; the class number is appended to a repeated label."""
        scores, indices = scores_of(logits, self.model.config)[0].topk(min(TOP_K, logits.shape[-1]))
        found: dict[str, float] = {}
        for index, score in zip(indices.tolist(), scores.tolist(), strict=True):
            label = self.model.config.id2label[index]
            found[f"{label} (class {index})" if label in found else label] = score
        return found


def highlight(seen: np.ndarray, attention: np.ndarray) -> Image.Image:
    """Darken a picture where the attention is low.

    Args:
        seen: the picture, (height, width, 3) or (height, width), in [0, 1].
        attention: (rows, columns); the patch with the least attention is darkest, that with the most is unchanged.
            Between them brightness grows with the square root: the last layers put most attention on few patches, and
            on a linear scale all others are black.
    """
    height, width = seen.shape[:2]
    least, most = attention.min(), attention.max()
    attention = (attention - least) / (most - least) if most > least else np.ones_like(attention)
    factor = max(1, round(_SHOWN_SIZE / min(height, width)))
    size = (width * factor, height * factor)
    picture = Image.fromarray((seen * 255).round().astype(np.uint8)).convert("RGB").resize(size)
    light = Image.fromarray(attention.astype(np.float32)).resize(size, Image.Resampling.BICUBIC)
    brightness = _DARKEST + (1 - _DARKEST) * np.sqrt(np.asarray(light).clip(0, 1))[..., None]
    return Image.fromarray((np.asarray(picture) * brightness).round().astype(np.uint8))
