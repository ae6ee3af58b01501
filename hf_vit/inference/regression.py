"""Regression: targets in standard deviations for training, in their units everywhere else; losses and metrics."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from ..models.pretrained import HfViTHead
from .predictions import EvaluationBatches, collect, model_inputs

_RESAMPLES = 1000  # of the images, for an interval


class TargetScale:
    """Mean and standard deviation of each target over the training images.

    A head is trained for standardized targets. `fold` gives the head for the targets in their units.

    Args:
        values: (images, targets)
        names: of the targets.

    Raises:
        ValueError: a target is the same for all images.
    """

    def __init__(self, values: np.ndarray, names: Sequence[str]):
        self.mean = torch.from_numpy(values.mean(axis=0))
        self.std = torch.from_numpy(values.std(axis=0))
        for name, column in zip(names, values.T, strict=True):
            if column.min() == column.max():
                raise ValueError(f"the target {name} is {column[0]:g} for all {len(column)} training images")

    def standardize(self, values: torch.Tensor) -> torch.Tensor:
        """(..., targets) in their units -> in standard deviations from the mean, of the same type"""
        return (values - self.mean.to(values)) / self.std.to(values)

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        """Return the inverse of `standardize`."""
        return values * self.std.to(values) + self.mean.to(values)

    def fold(self, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parameters of a linear layer for targets in their units, from those for standardized ones.

        Args:
            weight, bias: (targets, features) and (targets,)
        """
        return weight * self.std[:, None].to(weight), self.restore(bias)

    def unfold(self, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inverse of `fold`."""
        return weight / self.std[:, None].to(weight), self.standardize(bias)

    @torch.no_grad()
    def set_heads(self, model: nn.Module, change: Any) -> None:
        """Change the parameters of each head of a model in place, by `fold` or `unfold`; adapters have two heads."""
        for module in model.modules():
            if isinstance(module, HfViTHead):
                weight, bias = change(module.weight, module.bias)
                module.weight.copy_(weight)
                module.bias.copy_(bias)

    def fold_state(self, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state dict of a model with its heads for targets in their units."""
        folded = dict(tensors)
        for name, module in model.named_modules():
            if isinstance(module, HfViTHead) and f"{name}.weight" in tensors:
                keys = f"{name}.weight", f"{name}.bias"
                folded |= zip(keys, self.fold(tensors[keys[0]], tensors[keys[1]]), strict=True)
        return folded


def regression_loss(values: torch.Tensor, targets: torch.Tensor, kind: str = "mse", delta: float = 1.0) -> torch.Tensor:
    """Return the loss of each image, its mean over the targets, in float32: (batch,).

    Args:
        values, targets: (batch, targets), standardized.
        kind: "mse" for the squared error, or "huber" for half of it up to `delta`, and linear beyond.
    """
    values = values.float()
    if kind == "huber":
        return F.huber_loss(values, targets, reduction="none", delta=delta).mean(dim=1)
    return F.mse_loss(values, targets, reduction="none").mean(dim=1)


def evaluate_regression(
    accelerator: Accelerator,
    model: nn.Module,
    batches: EvaluationBatches,
    names: Sequence[str],
    scale: TargetScale | None = None,
    loss: str = "mse",
    delta: float = 1.0,
    **sizes: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the predictions of a model for all images of a split, and their metrics.

    Args:
        names: of the targets.
        scale: that of a model whose head is for standardized targets; None: they are in their units.
        loss, delta: as in `regression_loss`, for the metric "loss", which needs a scale.
        sizes: additional arguments of the forward, such as `patch_size`.

    Returns:
        Of the images with a readable file, in the order of the dataset: "values" and "label" (images, targets) and
        "index"; and "skipped", the number of other images. And the metrics, see `measure`.

    Raises:
        ValueError: no image can be read, or a prediction is not finite.
    """

    def compute(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        values = model(**model_inputs(batch), **sizes).logits.float()
        if scale is None:
            return {"values": values}
        losses = regression_loss(values, scale.standardize(batch["label"]), loss, delta)
        return {"values": scale.restore(values), "loss": losses}

    predictions = collect(accelerator, model, batches, compute)
    count = len(predictions["index"])
    if not count:
        raise ValueError(f"none of the {predictions['skipped']} images can be read")
    if not np.isfinite(predictions["values"]).all():
        raise ValueError("predictions are NaN or infinite")
    metrics: dict[str, Any] = {}
    if scale is not None:
        metrics["loss"] = float(predictions["loss"].mean())
    metrics |= measure(predictions["values"], predictions["label"], names)
    return predictions, metrics | {"samples": count, "skipped": predictions["skipped"]}


def measure(values: np.ndarray, targets: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return mean absolute error, coefficient of determination and rank correlation, each with a 95% interval.

    They are "mae", "r2" and "spearman" with "mae_interval" and so on, of several targets "mae/NAME" and
    "mae_interval/NAME". An interval is that of the bootstrap over images (percentiles 2.5 and 97.5), with a fixed seed.
    A correlation with a constant is left out.

    Args:
        values, targets: (images, targets)
    """
    found: dict[str, Any] = {}
    for name, predicted, true in zip(names, values.T.astype(float), targets.T.astype(float), strict=True):
        end = f"/{name}" if len(names) > 1 else ""
        rng = np.random.default_rng(0)
        draws = [rng.integers(0, len(true), len(true)) for _ in range(_RESAMPLES)]
        for metric, compute in METRICS.items():
            value = compute(predicted, true)
            if value is None:
                continue
            drawn = [compute(predicted[rows], true[rows]) for rows in draws]
            interval = np.percentile([one for one in drawn if one is not None], (2.5, 97.5))
            found[metric + end] = value
            found[f"{metric}_interval{end}"] = interval.tolist()
    return found


def mean_absolute_error(predicted: np.ndarray, true: np.ndarray) -> float:
    """(images,), (images,) -> mean of the absolute differences"""
    return float(np.abs(predicted - true).mean())


def r2_score(predicted: np.ndarray, true: np.ndarray) -> float:
    """Return the coefficient of determination; of a constant target 1 if all are right, else 0 (as scikit-learn)."""
    errors = float(((true - predicted) ** 2).sum())
    total = float(((true - true.mean()) ** 2).sum())
    if not total:
        return float(not errors)
    return 1 - errors / total


def spearman(predicted: np.ndarray, true: np.ndarray) -> float | None:
    """Return the correlation of the ranks, of which equal values share the mean; None if one side is constant."""
    predicted_ranks = _ranks(predicted)
    true_ranks = _ranks(true)
    if not np.ptp(predicted_ranks) or not np.ptp(true_ranks):
        return None
    return float(np.corrcoef(predicted_ranks, true_ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[inverse]


METRICS = {"mae": mean_absolute_error, "r2": r2_score, "spearman": spearman}
