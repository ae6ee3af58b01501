"""Training with several patch sizes, FlexiViT (arXiv 2212.08013): one is drawn for each optimiser step.

The sequence is that of big_vision (trainers/proj/flexi/train.py and common.py). Each step has its own generator, seeded
with the numbers of the experiment, the work unit and the step, counted from 1. Outside of Google the first two are 0;
here the first is the seed, 0 by default. The patch size of a step is therefore the same on all processes and after a
resume.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from ..models.configuration_hf_vit import HfViTConfig, Size, as_pair
from .settings import TrainingSettings

_GRAPHS = 8  # allowed graphs per patch size: torch.compile's default for a function


def draw_sizes(settings: TrainingSettings, step: int) -> dict[str, int]:
    """Return the patch size of an optimiser step (from 0) as an argument of the forward; {} for a fixed patch size."""
    if not settings.patch_sizes:
        return {}
    weights = np.array(settings.patch_size_weights or [1] * len(settings.patch_sizes))
    generator = np.random.default_rng((settings.seed, 0, step + 1))
    return {"patch_size": int(generator.choice(settings.patch_sizes, p=weights / weights.sum()))}


def prepare_patch_sizes(model: Any, patch_sizes: Sequence[int]) -> None:
    """Make a model flexible for several patch sizes, with FlexiViT's resampling of position embeddings.

    Raises:
        ValueError: the model has no patches, or a size does not divide its image size.
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
    """Compile the forward; each patch size has its own graphs (training, evaluation, a last batch).

    By default torch.compile stops after 8 graphs of a function, with a warning. Here the limit is 8 per patch size.
    """
    model.compile()
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _GRAPHS * len(patch_sizes))


def set_patch_size(model: Any, patch_size: Size | None, image_size: Size | None) -> None:
    """Set the patch size of an evaluation; None leaves the model unchanged.

    Raises:
        ValueError: the model has no patches, or they do not divide its image size.
    """
    if patch_size is not None:
        _check_model(model, patch_size)
        model.set_patch_size(patch_size, image_size)
        model.config.grid_of(*as_pair(model.config.image_size))


def _check_model(model: Any, patch_sizes: Any) -> None:
    if not isinstance(model.config, HfViTConfig):
        raise ValueError(
            f"cannot set the patch size of {type(model).__name__} to {patch_sizes}: expected a ViT of hf_vit"
        )


def over_patch_sizes(patch_sizes: Sequence[int], evaluate: Callable[..., dict[str, float]]) -> dict[str, float]:
    """Return mean metrics over patch sizes, and `accuracy_at_patch_8` etc.; without sizes those of `evaluate`.

    Args:
        evaluate: a function of `patch_size`, or of nothing for the model's own.
    """
    if not patch_sizes:
        return evaluate()
    at = {size: evaluate(patch_size=size) for size in patch_sizes}
    first = next(iter(at.values()))
    metrics = {name: float(np.mean([metrics[name] for metrics in at.values()])) for name in first}
    metrics |= {name: first[name] for name in ("samples", "skipped")}
    return {**metrics, **{f"accuracy_at_patch_{size}": metrics["accuracy"] for size, metrics in at.items()}}
