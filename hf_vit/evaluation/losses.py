"""Cross-entropies of the original recipes, per sample, for training and evaluation.

Tested against values and gradients of big_vision's `softmax_xent` and `sigmoid_xent` and of `optax.smooth_labels`
(tests/goldens/training/losses.npz). No original smooths sigmoid targets.
"""

import torch
from torch.nn import functional as F


def make_targets(
    labels: torch.Tensor, num_labels: int, label_smoothing: float = 0.0, kind: str = "softmax"
) -> torch.Tensor:
    """Convert class numbers (batch,), or indicators of several labels (batch, num_labels), to float targets.

    Smoothing mixes a softmax target with the uniform distribution, and moves each sigmoid target towards 1/2.

    Returns:
        (batch, num_labels)
    """
    targets = F.one_hot(labels, num_labels) if labels.ndim == 1 else labels
    rest = 0.5 if kind == "sigmoid" else 1 / num_labels
    return targets.float() * (1 - label_smoothing) + label_smoothing * rest


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, kind: str = "softmax", weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the loss of each sample, in float32.

    Args:
        logits, targets: (batch, num_labels)
        kind: "softmax", or "sigmoid": binary cross-entropies summed over the labels, as `sigmoid_xent` of big_vision.
        weights: (num_labels,), the weight of each label's term; None: all 1.

    Returns:
        (batch,)
    """
    logits = logits.float()
    if kind == "sigmoid":
        terms = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    else:
        terms = -targets * F.log_softmax(logits, dim=-1)
    return (terms if weights is None else terms * weights).sum(dim=-1)
