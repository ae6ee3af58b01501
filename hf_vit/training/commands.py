"""`finetune`, `pretrain` and `evaluate` from beginning to end; the scripts and `hf-vit` call these."""

import copy
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from accelerate.utils.memory import should_reduce_batch_size

from ..configuration_hf_vit import as_pair
from . import models
from .augmentation import TrainTransform
from .checkpoints import Checkpoints
from .data import EvalSamples, Shares, Split, eval_loader, open_split, train_loader
from .evaluation import empty_batch, predict, score
from .loop import Run, TrainingStopped, resume, train
from .objectives import Classification, MaskedPatches, Normalizer
from .optimization import MovingAverage, build_optimizer, freeze_parameters
from .recipes import SettingsError, dump, parse_settings
from .reporting import card_data, choose_trackers, write_curve, write_json
from .schedules import learning_rate_schedule
from .settings import EvaluateSettings, FinetuneSettings, PretrainSettings, TrainingSettings
from .sources import load_split

logger = logging.getLogger(__name__)


def finetune(argv: list[str] | None = None) -> dict:
    """Fine-tune a pretrained model; returns the metrics that it writes."""
    settings = parse_settings(FinetuneSettings, argv)
    if settings.print_config:
        return show(settings)
    accelerator = start(settings)
    split, eval_split = open_splits(settings)
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
    return run(settings, accelerator, model, processor, split, eval_split)


def run(settings, accelerator: Accelerator, model, processor, split: Split, eval_split: Split | None) -> dict:
    """Train a model, again with half the images per forward while they do not fit, and save all there is to it."""
    models.set_head_bias(model, settings)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable()
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
    accelerator.end_training()
    return metrics


def prepare_run(settings, accelerator, model, processor, split, shares: Shares, output: Path) -> Run:
    """Hand model and optimiser to the accelerator; what is random or scheduled stays a function of the step."""
    num_steps = count_steps(settings, split)
    schedule = learning_rate_schedule(
        settings.schedule, settings.learning_rate, num_steps, settings.warmup_steps, settings.final_learning_rate
    )
    if settings.compile:
        model.compile()
    prepared = accelerator.prepare(model)
    optimizer = accelerator.prepare(build_optimizer(settings, accelerator.unwrap_model(prepared)))
    normalizer = Normalizer(processor.image_mean, processor.image_std, accelerator.device)
    objective = make_objective(settings, normalizer, model.config)
    checkpoints = Checkpoints(output / "checkpoints", settings.keep_checkpoints)
    state = Run(settings, accelerator, prepared, optimizer, schedule, num_steps, shares, objective, checkpoints)
    if settings.ema_decay is not None:
        state.average = MovingAverage(state.parameters, settings.ema_decay)
    return state


def make_objective(settings, normalizer: Normalizer, config):
    if getattr(settings, "objective", "supervised") == "masked_patch_prediction":
        return MaskedPatches(settings, normalizer)
    return Classification(settings, normalizer, config.num_labels)


def start(settings) -> Accelerator:
    """The accelerator, after checking that there are as many processes as were asked for."""
    trackers = choose_trackers(getattr(settings, "report_to", "none"))
    accelerator = Accelerator(
        mixed_precision=settings.mixed_precision,
        log_with=trackers or None,
        project_config=ProjectConfiguration(project_dir=settings.output_dir) if trackers else None,
    )
    if settings.num_processes not in (None, accelerator.num_processes):
        raise SettingsError(
            f"num_processes is {settings.num_processes}, and {accelerator.num_processes} run; "
            "`accelerate launch --cpu` starts one whatever it is told; "
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu does not"
        )
    return accelerator


def open_splits(settings: TrainingSettings, needs_labels: bool = True) -> tuple[Split, Split | None]:
    assert settings.dataset
    columns = (settings.image_column, settings.label_column, needs_labels)
    split = open_split(
        load_split(settings.dataset, settings.train_split, settings.dataset_config, settings.streaming), *columns
    )
    if settings.eval_split is None:
        return split, None
    return split, open_split(
        load_split(settings.dataset, settings.eval_split, settings.dataset_config, settings.streaming), *columns
    )


def count_steps(settings: TrainingSettings, split: Split) -> int:
    """Optimiser steps of the run."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    if settings.streaming:
        raise SettingsError(f"epochs is {settings.epochs}, and a stream has no length: set steps")
    return max(round(settings.epochs * len(split) / settings.batch_size), 1)


def train_transform(settings: TrainingSettings, config) -> TrainTransform:
    low, high = settings.crop_area
    return TrainTransform(
        as_pair(config.image_size),
        settings.crop,
        (low, high),
        settings.resize,
        settings.flip,
        settings.randaugment_layers,
        settings.randaugment_magnitude,
        settings.antialias,
        mode={1: "L", 3: "RGB"}[config.num_channels],
    )


def evaluator(settings, accelerator, state: Run, split: Split | None, processor, config) -> Callable[[], dict]:
    """A function that evaluates the model as it then is."""
    if split is None:
        return dict
    samples = EvalSamples(split, processor, as_pair(config.image_size), config.num_channels)
    empty = empty_batch(samples.padding(), settings.eval_batch_size)
    supervised = getattr(settings, "objective", "supervised") == "supervised"

    def evaluate() -> dict:
        loader = eval_loader(
            samples,
            settings.eval_batch_size,
            accelerator.num_processes,
            accelerator.process_index,
            settings.num_workers,
        )
        if not supervised:
            return state.objective.evaluate(accelerator, state.model, loader, empty)  # pyright: ignore
        return score(predict(accelerator, state.model, loader, empty, settings.loss))

    return evaluate


def saver(accelerator: Accelerator, model, processor, folder: Path) -> Callable[[], None]:
    """A function that saves the model as it then is, whole, under another name first."""

    def save():
        tensors = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            draft = folder.with_name(f".{folder.name}.draft")
            plain = accelerator.unwrap_model(model)
            if hasattr(plain, "merge_and_unload"):  # PEFT: the adapters become part of the weights
                copy.deepcopy(plain).merge_and_unload().save_pretrained(draft)
            else:
                plain.save_pretrained(draft, state_dict=tensors)
            processor.save_pretrained(draft)
            folder.mkdir(parents=True, exist_ok=True)
            for file in draft.iterdir():
                file.replace(folder / file.name)
            draft.rmdir()
        accelerator.wait_for_everyone()

    return save


def prepare_output(settings, accelerator: Accelerator, output: Path):
    """Refuse to mix two runs in one folder."""
    if accelerator.is_main_process:
        if output.exists() and any(output.iterdir()) and not settings.resume:
            if not settings.overwrite:
                raise SettingsError(f"{output} is not empty: continue it with --resume, or delete it with --overwrite")
            shutil.rmtree(output)
        output.mkdir(parents=True, exist_ok=True)
        if not settings.resume:
            (output / "recipe.yaml").write_text(dump(settings))
    accelerator.wait_for_everyone()


def evaluate(argv: list[str] | None = None) -> dict:
    """Metrics of a saved classifier on a split."""
    settings = parse_settings(EvaluateSettings, argv)
    if settings.print_config:
        return show(settings)
    assert settings.model
    assert settings.dataset
    accelerator = start(settings)
    model, processor = models.load_for_evaluation(settings.model, settings.image_size)
    raw = load_split(settings.dataset, settings.split, settings.dataset_config, settings.streaming)
    split = open_split(raw, settings.image_column, settings.label_column)
    samples = EvalSamples(split, processor, as_pair(model.config.image_size), model.config.num_channels)
    loader = eval_loader(
        samples, settings.eval_batch_size, accelerator.num_processes, accelerator.process_index, settings.num_workers
    )
    if settings.compile:
        model.compile()
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    real = json.loads(Path(settings.real_labels).read_text()) if settings.real_labels else None
    metrics = score(
        predict(accelerator, prepared, loader, empty_batch(samples.padding(), settings.eval_batch_size)), real
    )
    if accelerator.is_main_process and settings.output_dir:
        Path(settings.output_dir).mkdir(parents=True, exist_ok=True)
        write_json(Path(settings.output_dir) / "metrics.json", metrics)
    accelerator.print(json.dumps(metrics, indent=2))
    accelerator.end_training()
    return metrics


def show(settings) -> dict:
    print(dump(settings), end="")
    return {}


def main(command: Callable[[list[str] | None], dict], argv: list[str] | None = None):
    """Run a command; what a user can mend is one sentence and exit status 2."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        command(argv)
    except (SettingsError, ValueError, TrainingStopped, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
