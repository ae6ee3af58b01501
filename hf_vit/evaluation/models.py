"""Preparation of a model that is evaluated."""

from typing import Any

from accelerate import Accelerator

from ..loading import check_classifier, load, use_backend
from ..settings.fields import EvaluateSettings


def load_evaluated(settings: EvaluateSettings, accelerator: Accelerator, needs_head: bool) -> tuple[Any, Any]:
    """Load the model of the settings onto its device, with its head or without, and its image processor.

    Raises:
        ValueError: weights are missing, it is no classifier and the head is needed, or it cannot have these sizes.
    """
    model, processor = load(
        str(settings.model),
        head="keep" if needs_head else "none",
        image_size=settings.image_size,
        preset=settings.preset,
        patch_size=settings.patch_size,
        backend="eager",
    )
    if needs_head:
        check_classifier(model, settings.model)
    if settings.compile is True:  # auto: not worth it
        model.compile(mode=settings.compile_mode)
    model = use_backend(model, settings.backend, settings.eval_batch_size)
    return accelerator.prepare_model(model, evaluation_mode=True), processor
