"""`finetune`, `pretrain` and `evaluate` from beginning to end; the scripts and `hf-vit` call these."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size

from ..evaluation import classification, few_shot, linear_probe, nearest_neighbors, vtab
from ..files.progress import silence_progress_bars
from . import models
from .assembly import (
    evaluator,
    open_splits,
    prepare_output,
    prepare_run,
    saver,
    start,
    train_transform,
)
from .data import Shares, Split, train_loader
from .loop import TrainingStopped, resume, train
from .optimization import freeze_parameters
from .recipes import SettingsError, dump, parse_settings
from .reporting import card_data, write_curve, write_json
from .settings import EvaluateSettings, FinetuneSettings, PretrainSettings

PROTOCOLS = {
    "accuracy": classification.evaluate,
    "real": classification.evaluate_real,
    "objectnet": classification.evaluate_objectnet,
    "few_shot": few_shot.evaluate,
    "linear_probe": linear_probe.evaluate,
    "knn": nearest_neighbors.evaluate,
}


def finetune(argv: list[str] | None = None) -> dict:
    """Fine-tune a pretrained model; returns the metrics that it writes."""
    settings = parse_settings(FinetuneSettings, argv)
    if settings.print_config:
        return show(settings)
    accelerator = start(settings)
    metrics = finetune_on(settings, accelerator, *open_splits(settings))
    accelerator.end_training()
    return metrics


def finetune_on(settings: FinetuneSettings, accelerator: Accelerator, split: Split, eval_split: Split | None) -> dict:
    model, processor = models.load_for_finetuning(settings, split)
    if settings.lora_rank:
        model = models.add_adapters(model, settings)
    freeze_parameters(model, settings.freeze + ([r"^(?!classifier)"] if settings.linear_probe else []))
    return run(settings, accelerator, model, processor, split, eval_split)


def pretrain(argv: list[str] | None = None) -> dict:
    """Train from random weights; returns the metrics that it writes."""
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


def run(settings, accelerator: Accelerator, model, processor, split: Split, eval_split: Split | None) -> dict:
    """Train a model, again with half the images per forward while they do not fit, and save all there is to it."""
    models.set_head_bias(model, settings)
    if settings.gradient_checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    output = Path(settings.output_dir)
    prepare_output(settings, accelerator, output)
    per_device = settings.per_device_batch_size or max(settings.batch_size // accelerator.num_processes, 1)
    while True:
        try:
            return train_and_save(settings, accelerator, model, processor, split, eval_split, per_device)
        except RuntimeError as error:
            if not settings.find_batch_size or per_device == 1 or not should_reduce_batch_size(error):
                raise
            accelerator.print(f"{per_device} images per forward do not fit into memory; trying {per_device // 2}.")
            per_device //= 2
            accelerator.free_memory()


def train_and_save(settings, accelerator, model, processor, split, eval_split, per_device: int) -> dict:
    output = Path(settings.output_dir)
    shares = Shares(settings.batch_size, per_device, accelerator.num_processes, accelerator.process_index)
    accelerator.gradient_accumulation_steps = shares.accumulation
    state = prepare_run(settings, accelerator, model, processor, split, shares, output)
    if settings.resume:
        resume(state)
    steps = range(state.step, state.num_steps)
    loader = train_loader(
        split, train_transform(settings, model.config), settings.seed, shares, steps, settings.num_workers
    )
    evaluate = evaluator(settings, accelerator, state, eval_split, processor, model.config)
    keep_best = saver(accelerator, state.model, processor, output / "best")
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


def evaluate(argv: list[str] | None = None) -> dict:
    """Metrics of a saved model, by the protocol that the settings name."""
    settings = parse_settings(EvaluateSettings, argv)
    if settings.print_config:
        return show(settings)
    accelerator = start(settings)
    if settings.protocol == "vtab":
        metrics = vtab.evaluate(settings, accelerator, finetune_on)
    else:
        metrics = PROTOCOLS[settings.protocol](settings, accelerator)
    if accelerator.is_main_process and settings.output_dir:
        Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
        name = "metrics" if settings.protocol == "accuracy" else settings.protocol
        write_json(Path(settings.output_dir) / f"{name}.json", metrics)
    accelerator.print(json.dumps(metrics, indent=2))
    accelerator.end_training()
    return metrics


def show(settings) -> dict:
    print(dump(settings), end="")
    return {}


def main(command: Callable[[list[str] | None], dict], argv: list[str] | None = None):
    """Run a command; what a user can mend is one sentence and exit status 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    silence_progress_bars()
    try:
        command(argv)
    except (SettingsError, ValueError, TrainingStopped, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
