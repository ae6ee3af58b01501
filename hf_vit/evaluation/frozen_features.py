"""Protocols on frozen features: few-shot least squares, a linear probe, and nearest neighbors.

* Few-shot: regularized least squares from features to {-1, 1}, in closed form. Section 4.1 of arXiv 2010.11929, with
  the details of big_vision's evaluators/fewshot_lsr.py, in float64.
* Linear probe: multinomial logistic regression, with regularization chosen on held-out images.
* Nearest neighbors by cosine similarity, with the weighted vote of DINO (arXiv 2104.14294).
"""

import statistics
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from ..settings.fields import EvaluateSettings
from .features import Extractor, open_train_and_test
from .predictions import TOP_K, cross_entropy, make_targets, score

BIAS = 100.0  # a constant feature, so large that its weight is almost not regularized
EPSILON = 1e-5  # added to a feature's standard deviation
_TOLERANCE = 1e-6  # of the gradient's largest entry
_QUERIES = 256  # compared with all training images at once


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
        targets = 2 * F.one_hot(labels, num_classes).double() - 1
        if len(inputs) >= inputs.shape[1]:  # (X^T X + l2)^-1 X^T Y
            self.eigenvalues, self.left = torch.linalg.eigh(inputs.T @ inputs)
            self.right = self.left.T @ (inputs.T @ targets)
        else:  # X^T (X X^T + l2)^-1 Y, the same with the smaller matrix
            self.eigenvalues, vectors = torch.linalg.eigh(inputs @ inputs.T)
            self.left, self.right = inputs.T @ vectors, vectors.T @ targets

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """Scale the features and append the constant: (images, features) -> (images, features + 1) in float64"""
        whitened = (features.double() - self.mean) / self.std
        return F.pad(whitened, (0, 1), value=BIAS)

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


def evaluate_few_shot(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
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
        chosen = (known.at(np.concatenate([numbers[:shots] for numbers in one_draw])) for one_draw in draws)
        solvers = [LeastSquares(values, classes, train.num_labels) for values, classes in chosen]
        for l2 in settings.l2_reg:
            accuracies = [solver.accuracy(unknown.values, unknown.labels, l2) for solver in solvers]
            mean, spread = statistics.mean(accuracies), [min(accuracies), max(accuracies)]
            row = {"shots": shots, "l2_reg": l2, "accuracy": mean, "spread": spread}
            rows.append({**row, "accuracy_of_seeds": accuracies})
    return {"few_shot": rows, "samples": len(unknown), "skipped": known.skipped + unknown.skipped}


class LogisticRegression:
    """Minimum of mean cross-entropy + l2 / 2 |W|^2 over weights W and biases, which are not regularized.

    It equals scikit-learn's `LogisticRegression(C=1 / (images * l2))` on features of mean 0 and standard deviation 1.
    """

    def __init__(self, features: torch.Tensor, num_classes: int):
        self.mean, self.std = features.mean(dim=0), features.std(dim=0, correction=0).clamp(min=1e-8)
        self.weights = features.new_zeros(features.shape[1], num_classes)
        self.biases = features.new_zeros(num_classes)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """(images, features) -> (images, classes)"""
        return (features - self.mean) / self.std @ self.weights + self.biases

    def fit(self, features: torch.Tensor, labels: torch.Tensor, l2: float, max_steps: int = 1000) -> None:
        """Move from the current weights to the optimum, which is unique, since the problem is convex."""
        parameters = [self.weights.requires_grad_(), self.biases.requires_grad_()]
        optimizer = torch.optim.LBFGS(
            parameters,
            max_iter=max_steps,
            tolerance_grad=_TOLERANCE,
            tolerance_change=0.0,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def objective() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(self.logits(features), labels) + l2 / 2 * self.weights.square().sum()
            loss.backward()
            return loss

        optimizer.step(objective)
        self.weights, self.biases = (parameter.detach() for parameter in parameters)


def evaluate_linear_probe(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure the test split after fitting on the whole training split; also return the choice of `l2`."""
    train, test = open_train_and_test(settings)
    extractor = Extractor(settings, accelerator)
    known = extractor.extract(train, settings.train_split)
    values, labels = known.values.to(accelerator.device), known.labels.to(accelerator.device)
    held_out = hold_out(len(known), settings.held_out, settings.seed).to(accelerator.device)
    accuracies = choose(values, labels, held_out, settings.probe_l2, train.num_labels)
    best = max(accuracies, key=lambda l2: (accuracies[l2], l2))  # of equal ones the largest
    regression = LogisticRegression(values, train.num_labels)
    regression.fit(values, labels, best)
    unknown = extractor.extract(test, settings.split or "test")
    logits = regression.logits(unknown.values.to(accelerator.device)).cpu()
    predictions = {
        "ranked": logits.topk(min(TOP_K, train.num_labels)).indices.numpy(),
        "loss": cross_entropy(logits, make_targets(unknown.labels, train.num_labels)).numpy(),
        "label": unknown.labels.numpy(),
        "index": unknown.index,
        "skipped": unknown.skipped,
    }
    return {**score(predictions), "l2": best, "held_out_accuracy": {str(l2): value for l2, value in accuracies.items()}}


def hold_out(count: int, share: float, seed: int) -> torch.Tensor:
    """Choose a random `share` of the images to hold out: (count,) bool; both parts have at least one image.

    Raises:
        ValueError: there are fewer than 2 images.
    """
    if count < 2:
        raise ValueError(f"a linear probe needs at least 2 training images, but the split has {count}")
    size = min(max(round(count * share), 1), count - 1)
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[torch.from_numpy(np.random.default_rng(seed).permutation(count)[:size])] = True
    return chosen


def choose(
    values: torch.Tensor, labels: torch.Tensor, held_out: torch.Tensor, grid: list[float], num_classes: int
) -> dict[float, float]:
    """Return the held-out accuracy for each l2, in decreasing order; each fit starts from the previous solution."""
    regression = LogisticRegression(values[~held_out], num_classes)
    accuracies = {}
    for l2 in sorted(grid, reverse=True):
        regression.fit(values[~held_out], labels[~held_out], l2)
        right = regression.logits(values[held_out]).argmax(dim=1) == labels[held_out]
        accuracies[l2] = right.double().mean().item()
    return accuracies


def evaluate_nearest_neighbors(settings: EvaluateSettings, accelerator: Accelerator) -> dict[str, Any]:
    """Measure top-1 and top-5 accuracy for each number of neighbors.

    Raises:
        ValueError: there are fewer training images than neighbors.
    """
    train, test = open_train_and_test(settings)
    if max(settings.neighbors) > len(train):
        raise ValueError(
            f"--neighbors is {max(settings.neighbors)}, but {settings.train_split} has only {len(train)} images"
        )
    extractor = Extractor(settings, accelerator)
    known = extractor.extract(train, settings.train_split)
    unknown = extractor.extract(test, settings.split or "test")
    keys, labels = F.normalize(known.values).to(accelerator.device), known.labels.to(accelerator.device)
    rows = []
    for count in settings.neighbors:
        ranked = []
        for queries in F.normalize(unknown.values).to(accelerator.device).split(_QUERIES):
            votes = vote(queries, keys, labels, train.num_labels, count, settings.temperature)
            ranked.append(votes.topk(min(5, votes.shape[1])).indices.cpu())
        hits = torch.cat(ranked) == unknown.labels[:, None]
        top1, top5 = (found.double().mean().item() for found in (hits[:, 0], hits.any(dim=1)))
        rows.append({"neighbors": count, "accuracy": top1, "top5_accuracy": top5})
    return {"knn": rows, "samples": len(unknown), "skipped": known.skipped + unknown.skipped}


def vote(
    queries: torch.Tensor, keys: torch.Tensor, labels: torch.Tensor, num_classes: int, count: int, temperature: float
) -> torch.Tensor:
    """Sum the votes of the `count` nearest keys for their classes, each exp(cosine / temperature).

    Args:
        queries, keys: (queries, features) and (keys, features), of length 1
        labels: (keys,) class numbers

    Returns:
        (queries, classes)
    """
    similarities, nearest = (queries @ keys.T).topk(min(count, len(keys)))  # (queries, count)
    votes = queries.new_zeros(len(queries), num_classes)
    return votes.scatter_add_(1, labels[nearest], ((similarities - 1) / temperature).exp())  # - 1: no overflow
