"""`finetune` and `pretrain` from beginning to end: the page behind `training/*.py` and `hf-vit train`."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils.memory import should_reduce_batch_size
from transformers import PreTrainedModel

from ..files.messages import ends_in_one_sentence
from ..files.output import write_json
from ..files.progress import silence_progress_bars
from . import models
from .assembly import (
    checkpoints_of,
    evaluator,
    open_splits,
    output_of,
    prepare_output,
    prepare_run,
    saver,
    start,
    train_transform,
    write_recipe,
)
from .batches import Shares
from .data import Split, train_loader
from .identity import identify_run
from .loop import train
from .optimization import freeze_parameters
from .patch_sizes import prepare_patch_sizes
from .preemption import PREEMPTED, Preempted
from .recipes import dump, parse_settings
from .reporting import card_data, write_curve
from .resuming import resume, saved_per_device
from .run import TrainingStopped
from .settings import DataSettings, FinetuneSettings, PretrainSettings, TrainingSettings
from .stalls import named_when_missing


def finetune(argv: list[str] | None = None) -> dict[str, Any]:
    """Fine-tune a pretrained model; return the metrics that are written to `output_dir`."""
    settings = parse_settings(FinetuneSettings, argv)
    if settings.print_config:
        return show(settings)
    accelerator = start(settings)
    split, eval_split = open_splits(settings)
    metrics = finetune_on(settings, accelerator, split, eval_split)
    accelerator.end_training()
    return metrics


def finetune_on(
    settings: FinetuneSettings, accelerator: Accelerator, split: Split, eval_split: Split | None
) -> dict[str, Any]:
    """Fine-tune on data that are open already; return the metrics."""
    model, processor = models.load_for_finetuning(settings, split)
    if settings.lora_rank:
        model = models.add_adapters(model, settings)
    freeze_parameters(model, settings.freeze + ([r"^(?!classifier)"] if settings.linear_probe else []))
    return run(settings, accelerator, model, processor, split, eval_split)


def pretrain(argv: list[str] | None = None) -> dict[str, Any]:
    """Train from random weights; return the metrics that are written to `output_dir`."""
    settings = parse_settings(PretrainSettings, argv)
    if settings.print_config:
        return show(settings)
    accelerator = start(settings)
    split, eval_split = open_splits(settings, needs_labels=settings.objective == "supervised")
    model, processor = models.build_for_pretraining(settings, split)
    freeze_parameters(model, settings.freeze)
    metrics = run(settings, accelerator, model, processor, split, eval_split)
    accelerator.end_training()
    return metrics


def run(
    settings: TrainingSettings,
    accelerator: Accelerator,
    model: PreTrainedModel,
    processor: Any,
    split: Split,
    eval_split: Split | None,
) -> dict[str, Any]:
    """Train a model and save it, with half the images per forward while they do not fit; return the metrics."""
    models.set_head_bias(model, settings)
    prepare_patch_sizes(model, [*settings.patch_sizes, *settings.eval_patch_sizes])
    if settings.gradient_checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    prepare_output(settings, accelerator)
    per_device = settings.per_device_batch_size or max(settings.batch_size // accelerator.num_processes, 1)
    if settings.resume and (settings.find_batch_size or settings.per_device_batch_size is None):
        per_device = saved_per_device(checkpoints_of(settings)) or per_device
    while True:
        try:
            return _train_and_save(settings, accelerator, model, processor, split, eval_split, per_device)
        except RuntimeError as error:
            if not settings.find_batch_size or per_device == 1 or not should_reduce_batch_size(error):
                raise
            accelerator.print(f"{per_device} images per forward do not fit into memory; trying {per_device // 2}.")
            per_device //= 2
            accelerator.free_memory()


def _train_and_save(
    settings: TrainingSettings,
    accelerator: Accelerator,
    model: PreTrainedModel,
    processor: Any,
    split: Split,
    eval_split: Split | None,
    per_device: int,
) -> dict[str, Any]:
    """Train with `per_device` images per forward; save the model and what is known of the run; return the metrics."""
    output = output_of(settings)
    shares = Shares(settings.batch_size, per_device, accelerator.num_processes, accelerator.process_index)
    accelerator.gradient_accumulation_steps = shares.accumulation
    state = prepare_run(settings, accelerator, model, processor, split, shares)
    state.identity = identify_run(settings, split)
    if settings.resume and resume(state) and accelerator.is_main_process:
        write_recipe(settings)
    steps = range(state.step, state.num_steps)
    transform = train_transform(settings, model.config)
    loader = train_loader(split, transform, settings.seed, shares, steps, settings.num_workers)
    evaluate = evaluator(settings, accelerator, state, eval_split, processor, model.config)
    keep_best = saver(accelerator, state.model, processor, output / "best")
    with named_when_missing(state.place, shares.rank, shares.processes, settings.stall_timeout):
        report = train(state, iter(loader), evaluate, keep_best)
    if state.average is not None:
        state.average.swap(state.parameters)
    metrics = {**(state.metrics or evaluate()), **report.totals(state.skipped), "best": state.best}
    saver(accelerator, state.model, processor, output)()
    if accelerator.is_main_process:
        write_json(output / "metrics.json", metrics)
        write_json(output / "card_data.json", card_data(settings, metrics, accelerator))
        write_curve(state.history, output / "learning_curve.png")
    accelerator.wait_for_everyone()
    return metrics


def show(settings: DataSettings) -> dict[str, Any]:
    """Print the resolved settings as a recipe; there are no metrics."""
    print(dump(settings), end="")
    return {}


def main(command: Callable[[list[str] | None], dict[str, Any]], argv: list[str] | None = None) -> None:
    """Run a command; an error that the user can mend is one sentence and exit status 2, Ctrl+C one and 130.

    The exit status of a run that was told to end by SIGTERM or SIGUSR1, and saved, is 75.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    silence_progress_bars()
    with ends_in_one_sentence("error", TrainingStopped):
        try:
            command(argv)
        except Preempted as preempted:
            processes = PartialState()
            if processes.is_main_process:
                print(preempted, file=sys.stderr)
            processes.destroy_process_group()
            raise SystemExit(PREEMPTED) from None
