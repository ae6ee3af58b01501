"""Regularized least squares from features to targets, in closed form: the head of few-shot evaluation and `instant`.

Section 4.1 of arXiv 2010.11929, with the details of big_vision's evaluators/fewshot_lsr.py, in float64.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

BIAS = 100.0  # a constant feature, so large that its weight is almost not regularized
EPSILON = 1e-5  # added to a feature's standard deviation
L2_GRID = tuple(2.0**power for power in range(-6, 21))  # to choose from by leave-one-out


def class_targets(labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return 1 for the classes of an image and -1 for all others: (images, num_classes) float64.

    Args:
        labels: class indices (images,), or indicators of several labels (images, num_classes).
    """
    indicators = F.one_hot(labels, num_classes) if labels.ndim == 1 else labels
    return 2 * indicators.double() - 1


class LeastSquares:
    """Solution of argmin |X W - Y|^2 + l2 |W|^2 for any l2 > 0, from one eigendecomposition.

    X has the features, scaled to mean 0 and standard deviation 1, and a constant column of 100.

    Args:
        features: (images, features)
        targets: Y, (images, outputs), such as `class_targets`.
        views: number of consecutive rows that belong to one image.
    """

    def __init__(self, features: torch.Tensor, targets: torch.Tensor, views: int = 1):
        self.views = views
        features = features.double()
        self.mean = features.mean(dim=0)
        self.std = features.std(dim=0, correction=0) + EPSILON
        self.targets = targets.double()
        inputs = self.prepare(features)
        if len(inputs) >= inputs.shape[1]:  # (X^T X + l2)^-1 X^T Y
            self.eigenvalues, self.left = torch.linalg.eigh(inputs.T @ inputs)
            self.rows = inputs @ self.left
        else:  # X^T (X X^T + l2)^-1 Y, the same with the smaller matrix
            self.eigenvalues, self.rows = torch.linalg.eigh(inputs @ inputs.T)
            self.left = inputs.T @ self.rows
        self.right = self.rows.T @ self.targets
        self.inputs_left = inputs @ self.left  # (images, eigenvalues)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """Scale the features and append the constant: (images, features) -> (images, features + 1) in float64"""
        whitened = (features.double() - self.mean) / self.std
        return F.pad(whitened, (0, 1), value=BIAS)

    def weights(self, l2: float) -> torch.Tensor:
        """Return the weights W for one l2: (features + 1, outputs)."""
        return (self.left / (self.eigenvalues + l2)) @ self.right

    def scores(self, features: torch.Tensor, l2: float) -> torch.Tensor:
        """Return X W of other images: (images, features) -> (images, outputs) in float64"""
        return self.prepare(features) @ self.weights(l2)

    def linear(self, l2: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weight (outputs, features) and bias (outputs,) of the linear layer that computes the scores."""
        weights = self.weights(l2)
        weight = (weights[:-1] / self.std[:, None]).T
        return weight, BIAS * weights[-1] - weight @ self.mean

    def leave_one_out(self, l2: float) -> torch.Tensor:
        """Return the scores of each image by the solution for all others, (images, outputs).

        With the hat matrix H = X (X^T X + l2)^-1 X^T, the errors of an image's views are multiplied by the inverse of
        1 - H, of which only their own rows and columns count. Mean and standard deviation of the features stay those of
        all images.
        """
        hat = self.inputs_left / (self.eigenvalues + l2)  # times rows^T: the hat matrix
        errors = self.targets - hat @ self.right
        if self.views == 1:
            own = (hat * self.rows).sum(dim=1, keepdim=True)
            return self.targets - errors / (1 - own)
        own = hat.unflatten(0, (-1, self.views)) @ self.rows.unflatten(0, (-1, self.views)).mT
        identity = torch.eye(self.views, dtype=own.dtype)
        return self.targets - torch.linalg.solve(identity - own, errors.unflatten(0, (-1, self.views))).flatten(0, 1)

    def choose_l2(self, grid: Sequence[float] = L2_GRID) -> float:
        """Return the l2 with the smallest mean squared error of `leave_one_out`, of equal ones the largest."""
        errors = {l2: (self.leave_one_out(l2) - self.targets).square().mean().item() for l2 in grid}
        return min(errors, key=lambda l2: (errors[l2], -l2))
