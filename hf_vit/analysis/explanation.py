"""Relevance of patches for a class, and how faithful a map is: the probability of the class without its patches."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..files.messages import did_you_mean
from ..models.relevance import NoRelevance, class_relevance
from ..models.scores import scores_of
from .attention import Images, UnsupportedModel, attention_rollout, batches, check_finite, encoder_of

_FRACTIONS = np.linspace(0, 1, 15)  # of the patches that are deleted or inserted
_AT_ONCE = 32  # images of a forward


def relevance(
    model: nn.Module,
    pixel_values: Images,
    target: int | str | Sequence[int | str] | None = None,
    *,
    batch_size: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Compute the relevance of each patch for a class, by gradient-weighted attention (arXiv 2103.15679).

    In each layer, the attention is multiplied by the gradient of the class's logit, negative products count as 0, and
    their mean over the heads is multiplied through the layers, with the identity for the residual connection. Unlike
    `attention_rollout`, the map depends on the class. It begins at the head's input: the class token, the mean of the
    pooled tokens, or the tokens with the gradient-weighted attention of the attention pooling.

    Args:
        model: a classifier of this package with attention over all tokens, hybrids included.
        pixel_values, batch_size, progress: as in `attention_distance`; all images of one size.
        target: a class, by name or index, for all images or one for each; None: the predicted class of each.

    Returns:
        (images, rows, columns), at least 0. Maps of different images or classes have different scales.

    Raises:
        ValueError: as in `attention_distance`; the model is no classifier, its attention is axial, or there is no such
            class.

    Example:
        >>> import hf_vit
        >>> from hf_vit.analysis import relevance
        >>> model, processor = hf_vit.load("folder")
        >>> maps = relevance(model, processor("photo.png", return_tensors="pt").pixel_values, target=3)
        >>> maps.shape[1:] == model.config.grid_size
        True
    """
    found = []
    seen = 0
    for images in batches(encoder_of(model), pixel_values, batch_size, progress):
        if target is None:
            chosen = predicted_classes(model, images)
        elif isinstance(target, str | int):
            chosen = torch.full((len(images),), class_index(model.config, target))
        else:
            chosen = torch.tensor([class_index(model.config, one) for one in target[seen : seen + len(images)]])
        seen += len(images)
        try:
            found.append(class_relevance(model, images, chosen).cpu().numpy())
        except NoRelevance as error:
            raise UnsupportedModel(str(error)) from None
    return check_finite(model, np.concatenate(found))


def class_index(config: Any, target: int | str) -> int:
    """Return the index of a class, given by its index or its name.

    Raises:
        ValueError: there is no such class.
    """
    names = config.id2label or {}
    if isinstance(target, str):
        found = [number for number, name in names.items() if name == target]
        if not found:
            raise ValueError(f"the model has no class called {target}{did_you_mean(target, names.values())}")
        return int(found[0])
    if not 0 <= target < config.num_labels:
        raise ValueError(f"target is {target}, but the model has the classes 0 to {config.num_labels - 1}")
    return target


@torch.inference_mode()
def predicted_classes(model: Any, images: torch.Tensor) -> torch.Tensor:
    """Return the indices of the most likely classes, (images,)."""
    if not hasattr(model, "classifier"):
        raise UnsupportedModel(f"{type(model).__name__} has no classes")
    return model.eval()(images, interpolate_pos_encoding=True).logits.argmax(dim=-1).cpu().clone()


def faithfulness(
    model: nn.Module, pixel_values: torch.Tensor, target: int | str | None = None, seed: int = 0
) -> dict[str, dict[str, np.ndarray]]:
    """Measure whether maps show what a model uses: areas under the curves of deletion and insertion.

    Deletion replaces patches by the mean color, those of the highest value first; insertion begins without patches. A
    curve has the probability of the class by the share of the replaced patches, at 15 shares (Petsiuk et al., arXiv
    1806.07421). A faithful map has a small area of deletion and a large one of insertion.

    Args:
        pixel_values: (images, channels, height, width)
        target: as in `relevance`, one for all images.
        seed: of the random order of patches.

    Returns:
        For the maps "relevance", "rollout" and "random", the areas of "deletion" and "insertion", (images,) each.
    """
    if target is None:
        chosen = predicted_classes(model, pixel_values)
    else:
        chosen = torch.full((len(pixel_values),), class_index(model.config, target))
    maps = {
        "relevance": relevance(model, pixel_values, chosen.tolist()),
        "rollout": attention_rollout(model, pixel_values),
    }
    maps["random"] = np.random.default_rng(seed).random(maps["rollout"].shape)
    return {name: _areas(model, pixel_values, chosen, values) for name, values in maps.items()}


@torch.inference_mode()
def _areas(model: Any, pixel_values: torch.Tensor, targets: torch.Tensor, maps: np.ndarray) -> dict[str, np.ndarray]:
    curves = {"deletion": [], "insertion": []}
    for image, target, values in zip(pixel_values, targets.tolist(), maps, strict=True):
        for kind, found in curves.items():
            changed = torch.cat([*_without_patches(image, values, kind == "insertion")])
            logits = [
                model(some.to(model.device), interpolate_pos_encoding=True).logits for some in changed.split(_AT_ONCE)
            ]
            probabilities = scores_of(torch.cat(logits), model.config)[:, target].cpu().numpy()
            found.append(np.trapezoid(probabilities, _FRACTIONS))
    return {kind: np.array(found) for kind, found in curves.items()}


def _without_patches(image: torch.Tensor, values: np.ndarray, inserts: bool) -> Iterator[torch.Tensor]:
    """Yield an image (1, channels, height, width) for each share of patches, which are replaced, or kept."""
    ranks = np.argsort(np.argsort(-values, axis=None, kind="stable")).reshape(values.shape)
    for fraction in _FRACTIONS:
        first = torch.from_numpy(ranks < round(fraction * ranks.size))
        kept = first if inserts else ~first
        rows = torch.arange(image.shape[1]) * values.shape[0] // image.shape[1]
        columns = torch.arange(image.shape[2]) * values.shape[1] // image.shape[2]
        yield (image * kept[rows][:, columns])[None]  # normalized pixels of the mean color are 0
