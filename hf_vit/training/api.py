"""`hf_vit.finetune` and `hf_vit.pretrain`: training runs from Python, by the path of the scripts."""

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from accelerate import PartialState

from ..files.messages import ends_in_one_sentence
from ..files.progress import silence_progress_bars
from .build import open_splits
from .console import announce, conclude
from .launch import keep_freed_memory, start_accelerator
from .models import build_for_pretraining, load_for_finetuning
from .preemption import Preempted
from .recipes import build_settings
from .settings import FinetuneSettings, PretrainSettings
from .trainer import Trainer, TrainingStopped

Place = str | os.PathLike[str]


def finetune(
    model: Place, dataset: Place, output_dir: Place, recipe: Place | None = None, **settings: Any
) -> dict[str, Any]:
    """Fine-tune a model for image classification, as `hf-vit finetune` does.

    Args:
        model: name on the Hub, or a folder.
        dataset: a folder with a folder of images for each class, a name on the Hub, or parquet or tar files.
        output_dir: folder of the result: the model, its metrics and reports, `best/` and the checkpoints.
        recipe: recipe to start from, such as "finetune_small"; see `hf-vit recipes`.
        settings: fields of `FinetuneSettings`, which override the recipe: `epochs=5`, `learning_rate=0.01`,
            `image_size=384`. `hf-vit finetune --help` explains each. Without a recipe, `epochs` or `steps` is needed.

    Returns:
        The metrics on the held-out images, as in metrics.json: "accuracy", "loss" and "samples", "best" with
        "best_metric" and "best_step", "train_seconds", ... Only the last three groups if nothing is held out.

    Raises:
        ValueError: a setting is unknown or wrong, or does not fit model or data.
        TrainingStopped: the loss is not finite, or memory ran out.

    Example:
        >>> metrics = hf_vit.finetune("ti16", "photographs", "out", recipe="finetune_small", epochs=2)
        >>> metrics["accuracy"]
    """
    own = {"model": str(model), "dataset": str(dataset), "output_dir": str(output_dir)}
    return run_finetuning(build_settings(FinetuneSettings, {**settings, **own}, recipe))


def pretrain(dataset: Place, output_dir: Place, recipe: Place | None = None, **settings: Any) -> dict[str, Any]:
    """Train a model from random weights, with labels or by masked patch prediction, as `hf-vit pretrain` does.

    Args:
        dataset, output_dir, recipe: as in `finetune`; "digits" is a data set that needs no download.
        settings: fields of `PretrainSettings`, among them `variant="S/16"` or `config={...}`.

    Returns:
        The metrics, as those of `finetune`; for masked patch prediction "loss" and "patch_accuracy".

    Raises:
        ValueError, TrainingStopped: as `finetune`.

    Example:
        >>> metrics = hf_vit.pretrain("digits", "out", recipe="digits", steps=20, warmup_steps=2)
    """
    own = {"dataset": str(dataset), "output_dir": str(output_dir)}
    return run_pretraining(build_settings(PretrainSettings, {**settings, **own}, recipe))


def run_finetuning(settings: FinetuneSettings) -> dict[str, Any]:
    """Fine-tune a model; return the metrics, which are also saved in `output_dir`."""
    accelerator = start_accelerator(settings)  # processes, device and precision of `accelerate launch`
    split, eval_split = open_splits(settings)  # with the same class numbers in both
    model, processor = load_for_finetuning(settings, split)  # stored weights and a new head of zeros
    return _fit(Trainer(settings, accelerator, model, processor, split, eval_split))


def run_pretraining(settings: PretrainSettings) -> dict[str, Any]:
    """Train a model; return the metrics, which are also saved in `output_dir`."""
    accelerator = start_accelerator(settings)
    split, eval_split = open_splits(settings, needs_labels=settings.objective == "supervised")
    model, processor = build_for_pretraining(settings, split)  # `variant` and `config`, with random weights
    return _fit(Trainer(settings, accelerator, model, processor, split, eval_split))


def _fit(trainer: Trainer) -> dict[str, Any]:
    announce(trainer)
    metrics = trainer.fit()
    conclude(trainer, metrics)
    trainer.accelerator.end_training()
    return metrics


def run_script(main: Callable[[list[str] | None], dict[str, Any]], argv: list[str] | None = None) -> None:
    """Run a script of `training/`, with one sentence for each error.

    The exit status is 2 for an error of the user, 130 after Ctrl-C, and 75 for a run that saved and ended after SIGTERM
    or SIGUSR1.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    keep_freed_memory()
    silence_progress_bars()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # class names that the terminal lacks end no run
    with ends_in_one_sentence("error", TrainingStopped):
        try:
            main(argv)
        except Preempted as preempted:
            processes = PartialState()
            if processes.is_main_process:
                print(preempted, file=sys.stderr)
            processes.destroy_process_group()
            raise SystemExit(preempted.status) from None
