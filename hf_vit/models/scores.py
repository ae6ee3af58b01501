"""From logits to scores, and the limits of predictions that a configuration holds."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # a program's configuration needs neither
    import torch
    from transformers.configuration_utils import PreTrainedConfig


def score_function(config: "PreTrainedConfig") -> Literal["softmax", "sigmoid", "none"]:
    """Return the function that converts logits to scores, as in transformers' ImageClassificationPipeline.

    Returns:
        "sigmoid" for multi-label classification and for a single label, "none" for regression, otherwise "softmax".
    """
    if config.problem_type == "regression":
        return "none"
    is_sigmoid = config.problem_type == "multi_label_classification" or config.num_labels == 1
    return "sigmoid" if is_sigmoid else "softmax"


def scores_of(logits: "torch.Tensor", config: "PreTrainedConfig") -> "torch.Tensor":
    """Convert logits (..., num_labels) to scores of the same shape, in float32; see `score_function`."""
    logits = logits.float()
    function = score_function(config)
    if function == "sigmoid":
        return logits.sigmoid()
    return logits.softmax(dim=-1) if function == "softmax" else logits


def thresholds_of(config: "PreTrainedConfig") -> list[float]:
    """Return the lowest score at which a multi-label classifier predicts each class."""
    stored = getattr(config, "label_thresholds", None) or []
    classes = len(config.id2label or ())
    return stored if len(stored) == classes else [0.5] * classes


def stored_thresholds(config: Any) -> dict[str, Any]:
    """Return the limits of a model's predictions.

    "auto": the lowest score of a predicted class, for each class or for all; "coverage": the same for each coverage;
    "rejection": for each class the logit below which an image is rejected, None without `hf_vit.calibrate`.
    """
    thresholds = thresholds_of(config)
    return {
        "auto": thresholds if len(set(thresholds)) > 1 else thresholds[0],
        "coverage": getattr(config, "coverage_thresholds", None) or {},
        "rejection": getattr(config, "rejection_thresholds", None),
    }
