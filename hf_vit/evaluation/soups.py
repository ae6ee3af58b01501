"""One model out of several fine-tuned ones, by averaging their weights ("Model soups", arXiv 2203.05482)."""

import copy
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ..data.fingerprint import image_digests
from ..data.labels import match_to_model, names_of
from ..files.messages import check_choice
from ..files.output import refuse_existing, refuse_inputs, write_json
from ..inference.predictions import EvaluationBatches, evaluate_classifier
from ..inference.result_page import wilson_interval
from ..loading import check_classifier, check_name, load, save_folder
from ..models.scores import score_function
from ..settings.fields import EvaluateSettings
from ..settings.recipes import build_settings
from ..training.launch import start_accelerator
from .classification import open_default_split
from .training_images import read_record, training_digests

logger = logging.getLogger(__name__)
Method = Literal["greedy", "uniform"]
Weights = dict[str, torch.Tensor]
_COMMON = ("base_model", "dataset", "train_split", "eval_split", "fingerprint")


def soup(
    models: Sequence[str | os.PathLike[str]],
    dataset: str | os.PathLike[str] | None,
    output_dir: str | os.PathLike[str],
    method: Method = "greedy",
    split: str | None = None,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Average the weights of several fine-tuned models, and save the result as a model.

    The models must have been fine-tuned from the same weights. Each weight of the soup is the mean in float64, rounded
    once. The greedy soup takes the models by falling accuracy on held-out images, and keeps each one with which the
    accuracy of the mean does not fall.

    Args:
        models: folders or names on the Hub, two or more.
        dataset, split, settings: held-out images, as in `hf_vit.evaluate`; None: a uniform soup is not measured.
        output_dir: folder of the soup, with soup.json.
        method: "greedy", or "uniform" for the mean of all models.

    Returns:
        As in soup.json: the "method"; the "members" with their "model", whether each is "used", and their metrics; and
        the metrics of the "soup": "accuracy" with "accuracy_interval" (95%, Wilson's score), or
        "mean_average_precision" where images have several labels. Without measurement, there are no metrics.

    Raises:
        ValueError: the models differ in architecture or classes; or the soup is greedy, and a model was trained on the
            held-out images, or it is not known what it was trained on.
        FileExistsError: `output_dir` exists, and `overwrite` is False.

    Example:
        >>> hf_vit.soup(["runs/1", "runs/2", "runs/3"], "photographs", "soup")["soup"]["accuracy"]
    """
    check_choice("method", method, get_args(Method))
    for one in models:
        check_name(one)
    names = list(map(str, models))
    if len(set(names)) < max(len(names), 2):
        raise ValueError(f"a soup needs two different models or more, but the models are {', '.join(names)}")
    if dataset is None and method == "greedy":
        raise ValueError("a greedy soup needs held-out images: set dataset, or the method to uniform")
    refuse_inputs(output_dir, dataset, *names)
    refuse_existing(output_dir, overwrite)
    model, processor = load(names[0], backend="eager")
    check_classifier(model, names[0])
    model.config.clear_calibration()  # which belongs to the weights of one model
    weights = {name: read_weights(name, model, names[0]) for name in names}
    measure: Any = None
    if dataset is not None:
        settings |= {"model": names[0], "dataset": str(dataset), "split": split}
        measure = open_measurement(names, method, settings, model, processor)
    members: list[dict[str, Any]] = [{"model": name, "used": True} for name in names]
    if measure is not None:
        for member in members:
            member |= measure(weights[member["model"]])
    if method == "greedy":
        assert measure is not None
        mean, result = greedy_soup(members, weights, measure, model)
    else:
        mean = uniform_soup(weights, model)
        result = {} if measure is None else measure(mean)
    model.load_state_dict(mean)
    record: dict[str, Any] = {"method": method}
    if measure is not None:
        record |= {"dataset": str(dataset), "split": measure.name}
    record |= {"members": members, "soup": result}
    if measure is None or measure.accelerator.is_main_process:
        save_folder(output_dir, model, processor, overwrite)
        write_json(Path(output_dir) / "soup.json", record)
        write_json(Path(output_dir) / "card_data.json", {**common_record(names), "soup": record})
    return record


def open_measurement(
    names: Sequence[str], method: Method, settings: dict[str, Any], model: Any, processor: Any
) -> "Measurement | None":
    """Open the held-out images; None for a uniform soup, with a warning, if a model was trained on them.

    Raises:
        ValueError: the models predict numbers; or the soup is greedy, and a model may have been trained on them.
    """
    if score_function(model.config) == "none":
        raise ValueError("the soup of a regression is not measured: leave the dataset out, with the method uniform")
    measure = Measurement(build_settings(EvaluateSettings, settings), model, processor)
    reason = measure.find_trained_on(names)
    if reason is None:
        return measure
    if method == "greedy":
        raise ValueError(f"a greedy soup needs images that no model was trained on: {reason}")
    logger.warning("the soup is not measured: %s", reason)
    return None


def uniform_soup(weights: Mapping[str, Weights], model: Any) -> Weights:
    """Return the mean of the weights of all members."""
    total: Weights = {}
    for own in weights.values():
        total = add_weights(total, own)
    return mean_weights(total, len(weights), model)


def greedy_soup(
    members: Sequence[dict[str, Any]], weights: Mapping[str, Weights], measure: "Measurement", model: Any
) -> tuple[Weights, dict[str, Any]]:
    """Return the greedy soup and its metrics; set `used` of each member.

    The members join by falling quality, each one with which the quality of the mean does not fall (GreedySoup of arXiv
    2203.05482).
    """
    total: Weights = {}
    count = 0
    soup: Weights = {}
    metrics: dict[str, Any] = {}
    for member in sorted(members, key=quality, reverse=True):
        candidate = add_weights(total, weights[member["model"]])
        mean = mean_weights(candidate, count + 1, model)
        found = measure(mean)
        member["used"] = quality(found) >= quality(metrics)
        if member["used"]:
            total = candidate
            count += 1
            soup = mean
            metrics = found
    return soup, metrics


class Measurement:
    """Metrics of weights on held-out images.

    Args:
        model: the architecture, with the classes; measured multi-label models get its thresholds.
    """

    def __init__(self, settings: EvaluateSettings, model: Any, processor: Any):
        self.accelerator = start_accelerator(settings)
        split, self.name = open_default_split(settings)
        self.split = match_to_model(split, model.config, str(settings.model), settings.label_map)
        self.config = model.config
        self.model = self.accelerator.prepare_model(copy.deepcopy(model), evaluation_mode=True)
        self.batches = EvaluationBatches(settings, self.split, processor, self.config, self.accelerator)
        self.loss = "sigmoid" if score_function(self.config) == "sigmoid" else "softmax"

    def find_trained_on(self, names: Sequence[str]) -> str | None:
        """Return why the images are not held out of the training of every model; None if they are."""
        if self.split.is_sharded:
            return "they are in shards, whose images cannot be compared"
        own = set(image_digests(self.split))
        for name in names:
            try:
                trained = training_digests(name)
            except ValueError as error:
                return str(error)
            if shared := len(own & trained):
                return f"{name} was trained on {shared} of the {len(self.split)} images of {self.name}"
        return None

    def __call__(self, weights: Weights) -> dict[str, Any]:
        """Return the metrics of weights."""
        self.accelerator.unwrap_model(self.model).load_state_dict(weights)
        predictions, metrics = evaluate_classifier(self.accelerator, self.model, self.batches, self.loss, self.config)
        if self.split.multi_label:
            return {"mean_average_precision": metrics["mean_average_precision"], "images": metrics["samples"]}
        right = int((predictions["ranked"][:, 0] == predictions["label"]).sum())
        images = len(predictions["label"])
        interval = wilson_interval(right, images)
        return {"accuracy": right / images, "accuracy_interval": list(interval), "images": images}


def quality(metrics: Mapping[str, Any]) -> float:
    """Return the number by which models are compared; -inf without metrics."""
    return metrics.get("accuracy", metrics.get("mean_average_precision", -math.inf))


def read_weights(name: str, model: Any, first: str) -> Weights:
    """Load the weights of a model on the CPU.

    Raises:
        ValueError: its weights or classes are not those of `model`, which is called `first`.
    """
    other, _ = load(name, backend="eager")
    if not hasattr(other, "classifier") or names_of(other.config) != names_of(model.config):
        raise ValueError(f"the classes of {name} are not those of {first}: only models of the same classes have a mean")
    weights = other.state_dict()
    own = {key: tensor.shape for key, tensor in model.state_dict().items()}
    if {key: tensor.shape for key, tensor in weights.items()} != own:
        raise ValueError(f"{name} is of another architecture or image size than {first}")
    return weights


def add_weights(total: Weights, weights: Weights) -> Weights:
    """Return the sum of weights in float64; an empty total is 0."""
    if not total:
        return {name: tensor.double() for name, tensor in weights.items()}
    return {name: tensor + weights[name] for name, tensor in total.items()}


def mean_weights(total: Weights, count: int, model: Any) -> Weights:
    """Return the mean of `count` models from their sum, rounded to the data types of a model."""
    return {name: (total[name] / count).to(tensor.dtype) for name, tensor in model.state_dict().items()}


def common_record(names: Sequence[str]) -> dict[str, Any]:
    """Return what the card_data.json of all models have in common: where they came from, and what they held out."""
    records = [read_record(name) or {} for name in names]
    first, *others = records
    common = {key: first[key] for key in _COMMON if key in first and all(one.get(key) == first[key] for one in others)}
    settings = [one.get("settings") or {} for one in records]
    same = {key: value for key, value in settings[0].items() if all(one.get(key, value) == value for one in settings)}
    return {**common, "settings": same}
