"""Training with many patch sizes, FlexiViT (arXiv 2212.08013): one is drawn for each optimiser step.

The sequence is that of big_vision (trainers/proj/flexi/train.py and common.py): a generator of its own for each step,
from the numbers of the experiment, the work unit and the step, counted from 1. Outside of Google the first two are 0;
here the first is the seed, which is 0 by default. So the patch size of a step is the same on all processes, and after a
resume.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from ..models.configuration_hf_vit import HfViTConfig, Size, as_pair
from .settings import TrainingSettings

_GRAPHS = 8  # of one patch size; torch.compile's own default for a function


def draw_sizes(settings: TrainingSettings, step: int) -> dict[str, int]:
    """The patch size of an optimiser step (from 0) as an argument of the forward; nothing for a model with one."""
    if not settings.patch_sizes:
        return {}
    weights = np.array(settings.patch_size_weights or [1] * len(settings.patch_sizes))
    generator = np.random.default_rng((settings.seed, 0, step + 1))
    return {"patch_size": int(generator.choice(settings.patch_sizes, p=weights / weights.sum()))}


def prepare_patch_sizes(model: Any, patch_sizes: Sequence[int]) -> None:
    """Make a model flexible, with positions that follow as FlexiViT's do, where it is to have several patch sizes.

    Raises:
        ValueError: it has no patches, or a size does not divide its images.
    """
    if not patch_sizes:
        return
    config, plain = model.config, model.get_base_model() if hasattr(model, "get_base_model") else model
    _check_model(plain, list(patch_sizes))
    if not config.is_flexible:
        plain.make_flexible()
        config.position_interpolation = "bilinear"
    for patch_size in patch_sizes:
        config.grid_of(*as_pair(config.image_size), patch_size)


def compile_model(model: Any, patch_sizes: Collection[int]) -> None:
    """Compile the forward: with several patch sizes, each has graphs of its own (training, evaluation, a last batch).

    torch.compile makes 8 graphs of a function, then computes without them, which only a warning says; so it is allowed
    as many for each size.
    """
    model.compile()
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _GRAPHS * len(patch_sizes))


def set_patch_size(model: Any, patch_size: Size | None, image_size: Size | None) -> None:
    """Set the patch size that an evaluation asks for; None leaves the model as it is.

    Raises:
        ValueError: the model has no patches, or they do not divide its images.
    """
    if patch_size is not None:
        _check_model(model, patch_size)
        model.set_patch_size(patch_size, image_size)
        model.config.grid_of(*as_pair(model.config.image_size))


def _check_model(model: Any, patch_sizes: Any) -> None:
    if not isinstance(model.config, HfViTConfig):
        raise ValueError(f"the patch size is to be {patch_sizes}, and {type(model).__name__} is no ViT of hf_vit")


def over_patch_sizes(patch_sizes: Sequence[int], evaluate: Callable[..., dict[str, float]]) -> dict[str, float]:
    """Mean metrics over patch sizes, and `accuracy_at_patch_8` and so on; without sizes those of `evaluate`.

    Args:
        evaluate: takes a `patch_size`, or nothing for the model's own.
    """
    if not patch_sizes:
        return evaluate()
    at = {size: evaluate(patch_size=size) for size in patch_sizes}
    first = next(iter(at.values()))
    metrics = {name: float(np.mean([metrics[name] for metrics in at.values()])) for name in first}
    metrics |= {name: first[name] for name in ("samples", "skipped")}
    return {**metrics, **{f"accuracy_at_patch_{size}": metrics["accuracy"] for size, metrics in at.items()}}
