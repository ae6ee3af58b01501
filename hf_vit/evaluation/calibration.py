"""Calibrated probabilities, prediction sets with a guaranteed coverage, and rejection of images of no class.

* Temperature scaling: Guo et al., "On calibration of modern neural networks", arXiv 1706.04599.
* Prediction sets: split conformal prediction with the label's probability as its score, Angelopoulos and Bates, arXiv
  2107.07511, section 1.
* Rejection: the score is the largest logit, as in Vaze et al., "Open-set recognition: a good closed-set classifier is
  all you need", arXiv 2110.06207. An image is rejected if it is too far below the logits of the class's own images.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.labels import match_to_model
from ..files.output import refuse_existing, refuse_inputs, write_json
from ..files.runs import copy_reports
from ..inference.parts import stored_features
from ..inference.predictions import EvaluationBatches, collect, model_inputs
from ..inference.predictor import Predictor
from ..inference.result_page import reliability
from ..loading import check_name, find_model, save_folder
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.scores import score_function
from ..settings.fields import EvaluateSettings
from ..settings.recipes import build_settings
from ..training.launch import start_accelerator
from .classification import open_default_split
from .features import split_names
from .models import load_evaluated

COVERAGES = (0.8, 0.9, 0.95, 0.99)
REJECTED = 0.05  # share of the images of known classes that may be rejected
_MIN_IMAGES = 20  # images; with fewer, coverage cannot be guaranteed
_STEPS = 50  # of Newton's method, which needs about 5


def calibrate(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    split: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Calibrate a classifier on images that it was not trained on, and save it.

    The head's weights and biases are divided by the temperature, so that every program that loads or exports the model
    has calibrated probabilities. The configuration has the temperature (`temperature`), the smallest probability of a
    class in a prediction set for each coverage (`coverage_thresholds`), and the smallest logit of an image that is not
    rejected for each class (`rejection_thresholds`).

    Args:
        model: name on the Hub, or a folder.
        dataset, split, settings: as in `hf_vit.evaluate`.
        output_dir: folder of the calibrated model, with calibration.json.

    Returns:
        "temperature"; "expected_calibration_error" "before" and "after"; "coverage": for each coverage the "threshold",
        the share of images whose set contains the label ("measured"), and the mean number of "classes" in a set;
        "rejection": the requested share of wrongly rejected images ("asked") and the "measured" one.
        Errors and shares are measured on half of the images, with values fitted on the other half. The saved values are
        fitted on all images.

    Raises:
        ValueError: images have several labels or none, there are fewer than 20, or logits are not finite.
        FileExistsError: `output_dir` exists.

    Example:
        >>> hf_vit.calibrate("out", "photographs", "calibrated")["temperature"]
    """
    check_name(model)
    refuse_inputs(output_dir, model, dataset)
    refuse_existing(output_dir, bool(settings.get("overwrite")))
    own = {"model": str(model), "dataset": str(dataset), "split": split}
    resolved = build_settings(EvaluateSettings, {**settings, **own})
    accelerator = start_accelerator(resolved)
    classifier, processor = load_evaluated(resolved, accelerator, needs_head=True)
    plain: Any = accelerator.unwrap_model(classifier)
    if not isinstance(plain, HfVisionPreTrainedModel) or score_function(plain.config) != "softmax":
        raise ValueError(f"cannot calibrate {model}: expected an hf_vit classifier with one label per image")
    images, name = open_default_split(resolved)
    images = match_to_model(images, plain.config, str(model), resolved.label_map)
    if resolved.embeddings is not None:
        predictor = Predictor((plain, processor), "embed")
        names = split_names(images, str(dataset), name)
        numbers, features = stored_features(resolved.embeddings, names, predictor)
        head: Any = plain.classifier
        with torch.inference_mode():
            found = {"logits": head(torch.from_numpy(features).to(plain.device)).float().cpu().numpy()}
        found["label"] = images.class_numbers("a calibration")[numbers]
    else:
        batches = EvaluationBatches(resolved, images, processor, plain.config, accelerator)
        found = collect(
            accelerator, classifier, batches, lambda batch: {"logits": classifier(**model_inputs(batch)).logits.float()}
        )
    logits, labels = found["logits"].astype(np.float64), found["label"]
    if labels.ndim != 1 or (labels < 0).any() or len(labels) < _MIN_IMAGES:
        raise ValueError(
            f"{name} of {dataset} has {len(labels)} images (expected {_MIN_IMAGES} or more, with one label each)"
        )
    if not np.isfinite(logits).all():
        raise ValueError(f"cannot calibrate {model}: its logits are NaN or infinite")
    results = {"split": name, "images": len(labels), **measure(logits, labels)}
    if accelerator.is_main_process:
        temperature, plain.config.coverage_thresholds, limits = fit(logits, labels)
        plain.config.rejection_thresholds = limits.tolist()
        scale_head(plain, temperature)
        save_folder(output_dir, plain, processor, resolved.overwrite)
        copy_reports(find_model(model).find_report, output_dir)
        write_json(Path(output_dir) / "calibration.json", results)
    accelerator.wait_for_everyone()
    return results


def fit(logits: np.ndarray, labels: np.ndarray) -> tuple[float, dict[str, float], np.ndarray]:
    """Return the temperature, the threshold of each coverage, and the rejection limit of each class, (classes,).

    Args:
        logits: (images, classes)
        labels: (images,)
    """
    temperature = fit_temperature(logits, labels)
    own = own_values(softmax(logits / temperature), labels)
    thresholds = {str(coverage): coverage_threshold(own, coverage) for coverage in COVERAGES}
    return temperature, thresholds, rejection_limits(logits / temperature, labels)


def measure(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Return the results of `calibrate` for logits (images, classes) and labels (images,)."""
    half = np.random.default_rng(0).permutation(len(labels)) < len(labels) // 2
    temperature, final, _ = fit(logits, labels)
    fitted, thresholds, limits = fit(logits[half], labels[half])
    rest, its_labels = logits[~half], labels[~half]
    scaled, probabilities = rest / fitted, softmax(rest / fitted)
    own = own_values(probabilities, its_labels)
    coverage = {}
    for share, threshold in thresholds.items():
        measured, classes = (own >= threshold).mean(), (probabilities >= threshold).sum(axis=1).mean()
        coverage[share] = {"threshold": final[share], "measured": float(measured), "classes": float(classes)}
    errors = {"before": calibration_error(softmax(rest), its_labels)}
    errors["after"] = calibration_error(probabilities, its_labels)
    is_rejected = scaled.max(axis=1) < limits[scaled.argmax(axis=1)]
    return {
        "temperature": temperature,
        "expected_calibration_error": errors,
        "coverage": coverage,
        "rejection": {"asked": REJECTED, "measured": float(is_rejected.mean())},
    }


def rejection_limits(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return for each class the lowest logit of an image that is not rejected, (classes,).

    It is the same distance below the mean of each class's own logits, chosen so that 5% of the images are rejected. A
    class without images uses the mean over all images.

    Args:
        logits: (images, classes), calibrated.
        labels: (images,)
    """
    own, predicted = own_values(logits, labels), logits.argmax(axis=1)
    counts = np.bincount(labels, minlength=logits.shape[1])
    sums = np.bincount(labels, weights=own, minlength=logits.shape[1])
    means = np.where(counts > 0, sums / np.maximum(counts, 1), own.mean())
    closeness = logits.max(axis=1) - means[predicted]
    rank = int(np.floor((len(labels) + 1) * REJECTED + 1e-9))  # as in `coverage_threshold`
    return means + (np.sort(closeness)[rank - 1] if rank else closeness.min())


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature with the lowest cross-entropy, 0.05 to 20, by Newton's method on its inverse."""
    own, inverse = own_values(logits, labels), 1.0
    for _ in range(_STEPS):
        probabilities = softmax(logits * inverse)
        mean = (probabilities * logits).sum(axis=1)
        slope, curvature = (mean - own).mean(), ((probabilities * logits**2).sum(axis=1) - mean**2).mean()
        step = slope / max(curvature, 1e-12)
        inverse = float(np.clip(inverse - step, max(inverse / 2, 0.05), min(inverse * 2, 20)))
        if abs(step) < 1e-10:
            break
    return 1 / inverse


def softmax(logits: np.ndarray) -> np.ndarray:
    """(images, classes) -> (images, classes)"""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def own_values(values: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the value of each image's own label: (images, classes) -> (images,)"""
    return values[np.arange(len(labels)), labels]


def calibration_error(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """Return the expected calibration error of the predicted classes, in 15 bins."""
    return reliability(probabilities.max(axis=1), probabilities.argmax(axis=1) == labels)[1]


def coverage_threshold(own: np.ndarray, coverage: float) -> float:
    """Return the smallest probability of a class in a prediction set, for sets that contain the label at this coverage.

    Args:
        own: (images,) the probability of each image's own label.
    """
    rank = int(np.floor((len(own) + 1) * (1 - coverage) + 1e-9))  # probabilities that may be below the threshold
    return float(np.sort(own)[rank - 1]) if rank else 0.0


@torch.no_grad()
def scale_head(model: Any, temperature: float) -> None:
    """Divide the head's parameters by a temperature; the configuration has the product of all temperatures."""
    for parameter in model.classifier.parameters():
        parameter.div_(temperature)
    model.config.temperature = (model.config.temperature or 1.0) * temperature
