"""Few-shot linear evaluation: regularized least squares from frozen features to {-1, 1}, in closed form.

Section 4.1 of arXiv 2010.11929, with the details of big_vision's evaluators/fewshot_lsr.py, in float64.
"""

import statistics
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from ..settings.fields import EvaluateSettings
from .features import Extractor, open_train_and_test

BIAS = 100.0  # a constant feature, so large that its weight is almost not regularized
EPSILON = 1e-5  # added to a feature's standard deviation


class LeastSquares:
    """Solution of argmin |X W - Y|^2 + l2 |W|^2 for any l2 > 0, from one eigendecomposition.

    X has the features, scaled to mean 0 and standard deviation 1, and a constant column of 100. Y is 1 in the column of
    an image's class and -1 elsewhere.

    Args:
        features: (images, features)
        labels: (images,) class numbers
        num_classes: number of classes.
    """

    def __init__(self, features: torch.Tensor, labels: torch.Tensor, num_classes: int):
        features = features.double()
        self.mean = features.mean(dim=0)
        self.std = features.std(dim=0, correction=0) + EPSILON
        inputs = self.prepare(features)
        targets = 2 * torch.nn.functional.one_hot(labels, num_classes).double() - 1
        if len(inputs) >= inputs.shape[1]:  # (X^T X + l2)^-1 X^T Y
            self.eigenvalues, self.left = torch.linalg.eigh(inputs.T @ inputs)
            self.right = self.left.T @ (inputs.T @ targets)
        else:  # X^T (X X^T + l2)^-1 Y, the same with the smaller matrix
            self.eigenvalues, vectors = torch.linalg.eigh(inputs @ inputs.T)
            self.left, self.right = inputs.T @ vectors, vectors.T @ targets

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """Scale the features and append the constant: (images, features) -> (images, features + 1) in float64"""
        whitened = (features.double() - self.mean) / self.std
        return torch.nn.functional.pad(whitened, (0, 1), value=BIAS)

    def weights(self, l2: float) -> torch.Tensor:
        """Return the weights W for one l2: (features + 1, classes)."""
        return (self.left / (self.eigenvalues + l2)) @ self.right

    def accuracy(self, features: torch.Tensor, labels: torch.Tensor, l2: float) -> float:
        """Return the share of images with the highest output for their class."""
        predictions = (self.prepare(features) @ self.weights(l2)).argmax(dim=1)
        return (predictions == labels).double().mean().item()


def draw(labels: np.ndarray, num_classes: int, seed: int) -> list[np.ndarray]:
    """Shuffle the indices of each class's images, as big_vision does; n shots are the first n of each class."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(np.where(labels == number)[0]) for number in range(num_classes)]


def evaluate(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure the accuracy for each number of shots and each `l2_reg`, over several draws.

    The model computes only images that a draw needs.

    Raises:
        ValueError: a class has fewer images than shots.
    """
    train, test = open_train_and_test(settings)
    labels = train.class_numbers("--protocol is few_shot")
    counts = np.bincount(labels, minlength=train.num_labels)
    if counts.min() < (shots := max(settings.shots)):
        number = int(counts.argmin())
        name = train.label_names[number] if train.label_names else f"class {number}"
        raise ValueError(
            f"{shots} shots need {shots} images of each class, but {name} has {counts.min()}; reduce --shots"
        )
    draws = [draw(labels, train.num_labels, seed) for seed in range(settings.seeds)]
    needed = np.concatenate([numbers[: max(settings.shots)] for one_draw in draws for numbers in one_draw])
    extractor = Extractor(settings, accelerator)
    known = extractor.extract(train, settings.train_split, needed)
    unknown = extractor.extract(test, settings.split or "test")
    rows = []
    for shots in settings.shots:
        accuracies: dict[float, list[float]] = {l2: [] for l2 in settings.l2_reg}
        for one_draw in draws:
            values, classes = known.at(np.concatenate([numbers[:shots] for numbers in one_draw]))
            solver = LeastSquares(values, classes, train.num_labels)
            for l2, its_accuracies in accuracies.items():
                its_accuracies.append(solver.accuracy(unknown.values, unknown.labels, l2))
        for l2, its_accuracies in accuracies.items():
            mean, spread = statistics.mean(its_accuracies), [min(its_accuracies), max(its_accuracies)]
            row = {"shots": shots, "l2_reg": l2, "accuracy": mean, "spread": spread}
            rows.append({**row, "accuracy_of_seeds": its_accuracies})
    return {"few_shot": rows, "samples": len(unknown), "skipped": known.skipped + unknown.skipped}
