"""Features of images, computed once per image and cached on disk if there is an output folder, and their protocols.

`output_dir/features/<digest>/` contains them in pieces. An interrupted run resumes from the pieces, and another
protocol on the same model and images reuses them.

* Few-shot: regularized least squares from features to {-1, 1}, in closed form. Section 4.1 of arXiv 2010.11929, with
  the details of big_vision's evaluators/fewshot_lsr.py, in float64.
* Linear probe: multinomial logistic regression, with regularization chosen on held-out images.
* Nearest neighbors by cosine similarity, with the weighted vote of DINO (arXiv 2104.14294).
"""

import hashlib
import json
import logging
import os
import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.labels import match_to_split, require_labels
from ..data.splits import Split, open_named
from ..files.output import own_file, write_text
from ..inference.least_squares import LeastSquares, class_targets
from ..inference.parts import stored_features
from ..inference.predictions import TOP_K, EvaluationBatches, collect, model_inputs, score
from ..inference.predictor import Predictor
from ..loading import resolve_model
from ..settings.fields import EvaluateSettings
from .models import load_evaluated

logger = logging.getLogger(__name__)
_PIECE = 8192  # images per stored piece
_TOLERANCE = 1e-6  # of the gradient's largest entry
_QUERIES = 256  # compared with all training images at once


@dataclass
class Features:
    """Features of the readable images, in the order of the dataset."""

    values: torch.Tensor  # (images, features) float32
    labels: torch.Tensor  # (images,) class indices
    index: np.ndarray  # (images,) indices in the split
    skipped: int = 0  # number of unreadable images

    def __len__(self) -> int:
        return len(self.labels)

    def at(self, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and labels of the readable images with these indices in the split."""
        positions = np.searchsorted(self.index, np.intersect1d(index, self.index))
        return self.values[positions], self.labels[positions]


class Extractor:
    """Frozen model that computes features of images."""

    def __init__(self, settings: EvaluateSettings, accelerator: Accelerator):
        assert settings.model
        self.settings, self.accelerator = settings, accelerator
        self.model, self.processor = load_evaluated(settings, accelerator, needs_head=False)
        self.config = self.model.config
        self.model_fingerprint = fingerprint_model(str(resolve_model(settings.model))) if settings.output_dir else {}
        has_tokens = hasattr(self.config, "num_hidden_layers")
        available = {
            "pre_logits": getattr(self.config, "pooling", "cls") != "none",
            "class_token": has_tokens and getattr(self.config, "num_prefix_tokens", 1) > 0,
            "patch_mean": has_tokens,
        }
        if not available[settings.features]:
            others = " or ".join(name for name, has in available.items() if has)
            raise ValueError(f"{settings.model} has no {settings.features}; choose --features {others}")
        if (settings.feature_layer or 0) > (layers := getattr(self.config, "num_hidden_layers", 0)):
            raise ValueError(f"--feature-layer is {settings.feature_layer}, but {settings.model} has {layers} layers")

    def extract(self, split: Split, name: str, wanted: np.ndarray | None = None) -> Features:
        """Compute the features of a split, or load them if they are stored.

        Args:
            split: the images.
            name: name of the split.
            wanted: indices of images; None for all.

        Raises:
            ValueError: features are not finite, or no image can be read.
        """
        wanted = np.arange(len(split)) if wanted is None else np.unique(wanted)
        if not len(wanted):
            raise ValueError(f"split {name} is empty")
        pieces = []
        folder = None
        if self.settings.embeddings is None:
            folder = self._folder_of(split, name)
        else:
            pieces = self._read_embeddings(split, name)
        if folder is not None and not self.settings.overwrite:
            pieces = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
        self.accelerator.wait_for_everyone()  # before the main process writes more pieces
        missing = np.setdiff1d(wanted, [number for piece in pieces for number in piece["index"].tolist()])
        for start in range(0, len(missing), _PIECE):
            piece = self.compute(split, missing[start : start + _PIECE])
            pieces.append(piece)
            if folder is not None and self.accelerator.is_main_process:
                with own_file(folder / f"{piece['index'].min():09}-{len(list(folder.glob('*')))}.safetensors") as file:
                    save_file(piece, file)
        table = {column: torch.cat([piece[column] for piece in pieces]) for column in pieces[0]}
        is_wanted = torch.isin(table["index"], torch.from_numpy(wanted)) & ~table["features"][:, 0].isnan()
        order = table["index"].argsort()
        order = order[is_wanted[order]]
        if not len(order):
            raise ValueError(f"none of {len(wanted)} images of split {name} can be read")
        index = table["index"][order].numpy()
        return Features(table["features"][order], table["label"][order], index, len(wanted) - len(order))

    def _read_embeddings(self, split: Split, name: str) -> list[dict[str, torch.Tensor]]:
        """Return what the folder of `embeddings` holds of a split, as a piece."""
        if self.settings.features != "pre_logits" or self.settings.feature_layer is not None:
            raise ValueError("--embeddings holds pre_logits of the last layer; remove --features and --feature-layer")
        predictor = Predictor((self.accelerator.unwrap_model(self.model), self.processor), "embed")
        names = split_names(split, str(self.settings.dataset), name)
        numbers, features = stored_features(str(self.settings.embeddings), names, predictor)
        if not len(numbers):
            logger.warning("%s holds no image of %s", self.settings.embeddings, name)
            return []
        labels = split.class_numbers("--embeddings is given")[numbers]
        values = {"features": features, "label": labels, "index": numbers}
        return [{column: torch.from_numpy(np.ascontiguousarray(value)) for column, value in values.items()}]

    def _folder_of(self, split: Split, name: str) -> Path | None:
        """Return the folder of the features of a split, named by a hash of everything that they depend on."""
        if not self.settings.output_dir:
            return None
        chosen = ["dataset", "dataset_config", "image_column", "label_column", "image_size", "mixed_precision"]
        chosen += ["features", "feature_layer", "patch_size", "backend"]
        about = {
            "model": self.model_fingerprint,
            "data": fingerprint_data(split),
            "processor": self.processor.to_dict(),
            "split": name,
            **{setting: getattr(self.settings, setting) for setting in chosen},
        }
        text = json.dumps(about, sort_keys=True, default=str)
        folder = Path(self.settings.output_dir) / "features" / hashlib.sha256(text.encode()).hexdigest()[:16]
        if self.accelerator.is_main_process:
            if self.settings.overwrite:
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "about.json", text + "\n")
        return folder

    def compute(self, split: Split, numbers: np.ndarray) -> dict[str, torch.Tensor]:
        """Compute the features of the images with these indices; those of unreadable images are NaN."""
        part = replace(split, samples=split.samples.select(numbers))
        batches = EvaluationBatches(self.settings, part, self.processor, self.config, self.accelerator)
        columns = collect(
            self.accelerator, self.model, batches, lambda batch: {"features": self.forward(model_inputs(batch)).float()}
        )
        is_finite = np.isfinite(columns["features"]).all(axis=1)
        if not is_finite.all():
            first = numbers[columns["index"][~is_finite][0]]
            raise ValueError(f"features of {self.settings.model} are NaN or infinite, first for image {first}")
        features = torch.full((len(numbers), columns["features"].shape[1]), torch.nan)
        features[columns["index"]] = torch.from_numpy(columns["features"])
        labels = torch.full((len(numbers),), -1)
        labels[columns["index"]] = torch.from_numpy(columns["label"])
        return {"features": features, "label": labels, "index": torch.from_numpy(numbers)}

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Compute the features that the settings name, (batch, features), from the arguments of the model's forward."""
        which, layer, model = self.settings.features, self.settings.feature_layer, self.model
        outputs = model(**inputs, output_hidden_states=layer is not None)
        if which == "pre_logits" and layer is None:
            return outputs.pooler_output.flatten(1)
        tokens = outputs.last_hidden_state if layer is None else outputs.hidden_states[layer]
        mask, prefix = inputs.get("pixel_attention_mask"), getattr(self.config, "num_prefix_tokens", 1)
        if which == "pre_logits":  # of the tokens after `layer` layers
            mask = None if mask is None else F.pad(mask, (prefix, 0), value=1)
            if self.config.norm_after_pooling:
                return model.pooler(tokens, mask, model.layernorm)
            return model.pooler(model.layernorm(tokens), mask)
        tokens = tokens if layer is None else model.layernorm(tokens)
        if which == "class_token":
            return tokens[:, 0]
        patches = tokens[:, prefix:]
        weights = patches.new_ones(patches.shape[:2]) if mask is None else mask.to(patches.dtype)
        return (patches * weights.unsqueeze(-1)).sum(dim=1) / weights.sum(dim=1, keepdim=True)


def split_names(split: Split, dataset: str, name: str) -> dict[str, int]:
    """Return the images of a split as `stored_features` expects them."""
    names = {}
    for row, (path, is_file) in enumerate(split.paths()):
        names[os.path.normpath(os.path.abspath(path)) if is_file and path else f"{dataset}:{name}:{row}"] = row
    return names


def open_train_and_test(settings: EvaluateSettings) -> tuple[Split, Split]:
    """Open the training split and the test split, with one label per image and the same classes.

    Raises:
        ValueError: images have no label or several, or the classes differ.
    """
    names = settings.train_split, settings.split or "test"
    train, test = (open_named(settings, name) for name in names)
    for split, name in zip((train, test), names, strict=True):
        require_labels(split, name)
        split.class_numbers(f"--protocol is {settings.protocol}")
    if train.label_names is None and test.label_names is None:
        train.num_labels = test.num_labels = max(train.num_labels, test.num_labels)
    return train, match_to_split(train, test, settings.train_split, settings.split or "test")


def extract_train_and_test(
    settings: EvaluateSettings, accelerator: Accelerator, train: Split, test: Split, wanted: np.ndarray | None = None
) -> tuple[Features, Features]:
    """Compute the features of both splits; of the training images only those in `wanted`."""
    extractor = Extractor(settings, accelerator)
    known = extractor.extract(train, settings.train_split, wanted)
    return known, extractor.extract(test, settings.split or "test")


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
    most = max(settings.shots)
    if counts.min() < most:
        number = int(counts.argmin())
        name = train.label_names[number] if train.label_names else f"class {number}"
        raise ValueError(f"--shots is {most}, but {name} has {counts.min()} images")
    draws = [draw(labels, train.num_labels, seed) for seed in range(settings.seeds)]
    needed = np.concatenate([numbers[:most] for one_draw in draws for numbers in one_draw])
    known, unknown = extract_train_and_test(settings, accelerator, train, test, needed)
    rows = []
    for shots in settings.shots:
        solvers = []
        for one_draw in draws:
            values, classes = known.at(np.concatenate([numbers[:shots] for numbers in one_draw]))
            solvers.append(LeastSquares(values, class_targets(classes, train.num_labels)))
        for l2 in settings.l2_reg:
            predictions = [solver.scores(unknown.values, l2).argmax(dim=1) for solver in solvers]
            accuracies = [(predicted == unknown.labels).double().mean().item() for predicted in predictions]
            row = {"shots": shots, "l2_reg": l2, "accuracy": statistics.mean(accuracies)}
            row |= {"spread": [min(accuracies), max(accuracies)], "accuracy_of_seeds": accuracies}
            rows.append(row)
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
    known, unknown = extract_train_and_test(settings, accelerator, train, test)
    values, labels = known.values.to(accelerator.device), known.labels.to(accelerator.device)
    held_out = hold_out(len(known), settings.held_out, settings.seed).to(accelerator.device)
    accuracies = choose(values, labels, held_out, settings.probe_l2, train.num_labels)
    best = max(accuracies, key=lambda l2: (accuracies[l2], l2))  # of equal ones the largest
    regression = LogisticRegression(values, train.num_labels)
    regression.fit(values, labels, best)
    logits = regression.logits(unknown.values.to(accelerator.device)).cpu()
    predictions = {
        "ranked": logits.topk(min(TOP_K, train.num_labels)).indices.numpy(),
        "loss": F.cross_entropy(logits, unknown.labels, reduction="none").numpy(),
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
    if (most := max(settings.neighbors)) > len(train):
        raise ValueError(f"--neighbors is {most}, but {settings.train_split} has only {len(train)} images")
    known, unknown = extract_train_and_test(settings, accelerator, train, test)
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
        labels: (keys,) class indices

    Returns:
        (queries, classes)
    """
    similarities, nearest = (queries @ keys.T).topk(min(count, len(keys)))  # (queries, count)
    votes = queries.new_zeros(len(queries), num_classes)
    return votes.scatter_add_(1, labels[nearest], ((similarities - 1) / temperature).exp())  # - 1: no overflow
