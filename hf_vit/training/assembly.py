"""Build the parts of a run from its settings."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, is_torch_xla_available
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from ..data.augmentation import TrainTransform
from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.labels import distinguish, match_to_split, names_of, refuse_unlabelled, state_classes
from ..data.loaders import EvalDataset, eval_loader, train_loader
from ..data.native_resolution import native_loader
from ..data.samplers import BatchLayout
from ..data.sources import load_split
from ..data.splits import SKIPPED_IMAGES, Split, find_eval_split, open_split, split_off_holdout
from ..data.workers import start_server
from ..files.messages import did_you_mean
from ..files.output import new_model_files, write_json
from ..models.configuration_hf_vit import HfViTConfig, as_pair
from ..models.flexible_sizes import refuse_mixed_sizes
from . import checkpoints
from .allocation import keep_freed_memory
from .checkpoints import Checkpoints
from .devices import is_xla, keep_float32_weights, make_states
from .fsdp import is_sharded, shard_by_layers
from .losses import balanced_weights
from .measuring import TOP_K, empty_batch, predict, score, score_classes
from .models import save_plain
from .objectives import Classification, MaskedPatches, Normalizer, Objective
from .optimization import MovingAverage, build_optimizer
from .output_folder import checkpoints_of
from .patch_sizes import compile_model, over_patch_sizes
from .recipes import SettingsError
from .reporting import choose_trackers
from .run import Run
from .schedules import build_schedule
from .settings import AUTO, DataSettings, PretrainSettings, TrainingSettings
from .stalls import Watched


def start(settings: DataSettings) -> Accelerator:
    """Start the accelerator.

    Raises:
        SettingsError: the number of processes is not `num_processes` or not the launcher's, or the device lacks the
            precision or the sharding of the launch.
    """
    keep_freed_memory()
    trackers = choose_trackers(settings.report_to) if isinstance(settings, TrainingSettings) else []
    project = ProjectConfiguration(project_dir=str(settings.output_dir)) if trackers else None
    accelerator = Accelerator(
        cpu=_started_on_cpus(),
        mixed_precision=settings.mixed_precision,
        log_with=[*trackers] or None,
        project_config=project,
    )
    keep_float32_weights(accelerator)
    _check_launch(accelerator)
    if settings.num_processes not in (None, accelerator.num_processes):
        raise SettingsError(
            f"--num-processes is {settings.num_processes}, but {accelerator.num_processes} run. "
            "`accelerate launch --cpu` always starts one; for several on CPUs use the launch template multi_cpu"
        )
    start_server(settings.num_workers)
    return accelerator


def _started_processes() -> int:
    """Number of processes that the launcher started, by its own variable; 1 without one."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def _started_on_cpus() -> bool:
    """Tell whether a launcher started several processes on a machine that only has CPUs.

    Accelerate joins them only if it is told so; otherwise each process would train alone.
    """
    return _started_processes() > 1 and not torch.accelerator.is_available() and not is_torch_xla_available()


def _check_launch(accelerator: Accelerator) -> None:
    """Raise SettingsError if the accelerator silently differs from the launch."""
    if accelerator.num_processes == 1 and (started := _started_processes()) > 1:
        raise SettingsError(
            f"WORLD_SIZE is {started}, but this process would train alone (RANK or LOCAL_RANK is not set): start the "
            "processes with accelerate launch or torchrun"
        )
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "fp16":
        raise SettingsError("mixed precision fp16 needs a GPU (the device is a CPU): use bf16 or no")
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not is_sharded(accelerator):
        raise SettingsError(
            f"the launch asks for FSDP, which Accelerate does not have on {accelerator.device.type} with "
            f"{accelerator.num_processes} processes: use another launch template (hf-vit launch-configs)"
        )


def open_splits(settings: TrainingSettings, needs_labels: bool = True) -> tuple[Split, Split | None]:
    """The training split and the evaluation split, with labels that mean the same.

    Where the evaluation split is "auto" and the data have such a split, the setting becomes its name; where the loss is
    "auto", it becomes the one of the labels.

    Raises:
        ValueError: they do not, or images have no labels.
    """
    split = open_named(settings, settings.train_split, needs_labels)
    refuse_unlabelled(split, settings.train_split)
    if settings.loss == AUTO:
        settings.loss = "sigmoid" if split.multi_label else "softmax"
    if settings.eval_split == AUTO:
        names = str(settings.dataset), settings.dataset_config, settings.train_split
        settings.eval_split = find_eval_split(*names)
    if settings.eval_split is None:
        return split, None
    if settings.eval_split == AUTO:
        return split_off_holdout(split)
    eval_split = open_named(settings, settings.eval_split, needs_labels)
    refuse_unlabelled(eval_split, settings.eval_split)
    return split, match_to_split(split, eval_split, settings.train_split, settings.eval_split)


def open_named(settings: DataSettings, name: str, needs_labels: bool = True) -> Split:
    """The split of the settings' data set that has this name."""
    assert settings.dataset
    samples = load_split(settings.dataset, name, settings.dataset_config, settings.streaming)
    are_stated = settings.num_labels is not None or settings.label_names is not None
    together = settings.shuffle_buffer if isinstance(settings, TrainingSettings) else None
    columns = settings.image_column, settings.label_column
    split = open_split(samples, *columns, needs_labels, not are_stated, together)
    split.skipped_file = None if settings.output_dir is None else Path(settings.output_dir) / SKIPPED_IMAGES
    return state_classes(split, settings.num_labels, settings.label_names) if are_stated else split


def prepare_run(
    settings: TrainingSettings,
    accelerator: Accelerator,
    model: PreTrainedModel,
    processor: Any,
    split: Split,
    shares: BatchLayout,
) -> Run:
    """Prepare model and optimiser with the accelerator and collect the parts of the run.

    Random numbers and learning rates do not come from Accelerate: they are functions of the step.
    """
    num_steps = count_steps(settings, split)
    schedule = build_schedule(settings, num_steps)
    if settings.compile and is_xla(accelerator):
        raise SettingsError("compile is true, but XLA always compiles: set compile to false")
    if settings.optimizer == "muon" and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise SettingsError("optimizer is muon, but DeepSpeed flattens the matrices that it needs: use adamw")
    if settings.compile:
        compile_model(model, {*settings.patch_sizes, *settings.eval_patch_sizes})
    shard_by_layers(accelerator, model)
    fused = accelerator.device.type in ("cpu", "cuda") and not is_sharded(accelerator)  # some kernels take no DTensors
    optimizer = build_optimizer(settings, model, fused)
    prepared, optimizer = accelerator.prepare(model, optimizer)  # in one call: sharding replaces the parameters in both
    make_states(accelerator, optimizer.optimizer)
    normalizer = Normalizer(processor.image_mean, processor.image_std, accelerator.device)
    objective = _make_objective(settings, normalizer, model.config, split)
    saved = Checkpoints(checkpoints_of(settings), settings.keep_checkpoints)
    state = Run(settings, accelerator, prepared, optimizer, schedule, num_steps, shares, objective, saved)
    if settings.ema_decay is not None:
        state.average = MovingAverage(state.parameters, settings.ema_decay)
    return state


def _make_objective(settings: TrainingSettings, normalizer: Normalizer, config: Any, split: Split) -> Objective:
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        return MaskedPatches(settings, normalizer)
    if settings.class_weights == "none":
        return Classification(settings, normalizer, config.num_labels)
    labels = split.class_numbers(f"--class-weights is {settings.class_weights}")
    weights = balanced_weights(labels, config.num_labels)
    return Classification(settings, normalizer, config.num_labels, weights.to(normalizer.scale.device))


def count_steps(settings: TrainingSettings, split: Split) -> int:
    """Number of optimiser steps of the run."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    return max(round(settings.epochs * len(split) / settings.batch_size), 1)


def train_transform(settings: TrainingSettings, processor: Any, config: Any) -> TrainTransform:
    """Return the training augmentation for a model's image size and number of channels."""
    low, high = settings.crop_area
    return TrainTransform(
        as_pair(config.image_size),
        settings.crop,
        (low, high),
        None if settings.resize is None else as_pair(settings.resize),
        settings.flip,
        settings.randaugment_layers,
        settings.randaugment_magnitude,
        settings.antialias,
        mode={1: "L", 3: "RGB"}[config.num_channels],
        background=tuple(getattr(processor, "background", TrainTransform.background)),  # transformers' have none
        reduced_decoding=settings.reduced_decoding,
    )


def training_batches(
    settings: TrainingSettings, split: Split, processor: Any, config: Any, shares: BatchLayout, steps: range
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process for the steps in `steps`, one per forward."""
    transform = train_transform(settings, processor, config)
    if settings.preset == "native":
        where = settings.seed, shares, steps, settings.num_workers, settings.class_sampling
        return native_loader(split, transform, processor, *where, settings.token_drop)
    return train_loader(split, transform, settings.seed, shares, steps, settings.num_workers, settings.class_sampling)


def evaluator(
    settings: TrainingSettings, accelerator: Accelerator, state: Run, split: Split | None, processor: Any, config: Any
) -> Callable[[], dict[str, float]]:
    """Return a function that evaluates the current model; without a split it returns no metrics.

    Raises:
        ValueError: the evaluation will not have the metric of `best_metric`, or `early_stopping` has no evaluation.
    """
    _check_evaluation(settings, split, config)
    if split is None:
        return dict
    samples = EvalDataset(split, processor, as_pair(config.image_size), config.num_channels)
    batches, empty = evaluation_batches(settings, accelerator, samples)
    loader, names = Watched(batches, state.place), distinguish(names_of(config))

    def evaluate() -> dict[str, float]:
        if isinstance(state.objective, MaskedPatches):
            return state.objective.evaluate(accelerator, state.model, loader, empty)
        return over_patch_sizes(settings.eval_patch_sizes or settings.patch_sizes, measure)

    def measure(**sizes: int) -> dict[str, float]:
        state.predictions = predict(accelerator, state.model, loader, empty, settings.loss, **sizes)
        return score(state.predictions) | score_classes(state.predictions, names)

    return evaluate


def _check_evaluation(settings: TrainingSettings, split: Split | None, config: Any) -> None:
    """Raise ValueError for settings that need another evaluation, before any step."""
    name = settings.best_metric
    if split is None:
        if settings.early_stopping or name != "auto":
            what = "early_stopping" if settings.early_stopping else "best_metric"
            raise ValueError(f"{what} ({getattr(settings, what)}) needs held-out images: set --eval-split")
        return
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        known = ["loss", "patch_accuracy"]
    elif split.multi_label:
        known = ["loss", "accuracy"]
    else:
        top5 = ["top5_accuracy"] if config.num_labels >= TOP_K else []
        known = ["loss", "accuracy", *top5, "mean_per_class_accuracy"]
        known += [f"accuracy/{one}" for one in distinguish(names_of(config))]
    known += [f"accuracy_at_patch_{size}" for size in settings.eval_patch_sizes or settings.patch_sizes]
    if name != "auto" and name not in known:
        listed = [metric for metric in known if "/" not in metric]
        listed += ["accuracy/CLASS"] if len(listed) < len(known) else []
        raise ValueError(f"best_metric is {name!r}; it must be {', '.join(listed)}{did_you_mean(name, known)}")


def evaluation_batches(
    settings: DataSettings, accelerator: Accelerator, samples: EvalDataset
) -> tuple[DataLoader, dict[str, torch.Tensor]]:
    """Return the evaluation batches of this process, and one batch of padding."""
    size, workers = settings.eval_batch_size, settings.num_workers
    loader = eval_loader(samples, size, accelerator.num_processes, accelerator.process_index, workers)
    return loader, empty_batch(samples.padding(), size)


def saver(
    accelerator: Accelerator,
    model: nn.Module,
    processor: Any,
    folder: Path,
    facts: Callable[[], dict[str, Any]] | None = None,
) -> Callable[[], None]:
    """Return a function that saves the current model; every process must call it.

    It raises OSError if the model cannot be written; an older model in the folder is then unchanged.

    Args:
        facts: returns the content of card_data.json.
    """

    def save() -> None:
        plain = accelerator.unwrap_model(model)
        tensors = checkpoints.whole_model(plain, keep=accelerator.is_main_process)
        if accelerator.is_main_process:
            with new_model_files(folder) as draft:
                save_plain(plain, tensors, draft)
                processor.save_pretrained(draft)
                if facts is not None:
                    write_json(draft / "card_data.json", facts())
        accelerator.wait_for_everyone()

    return save


def check_native(
    settings: TrainingSettings, accelerator: Accelerator, model: Any, processor: Any, split: Split
) -> None:
    """Raise ValueError if preset is "native" but model, data or device do not support it.

    If only the model's own processor is native, a message says that training differs from the evaluation.
    """
    if settings.preset != "native":
        if getattr(processor, "preset", None) == "native":
            accelerator.print("The model is evaluated at native aspect ratios; to train it so, set --preset native.")
        return
    if not isinstance(model.config, HfViTConfig):
        raise ValueError(
            f"preset is native, but {type(model).__name__} takes images of one size (expected a ViT of hf_vit)"
        )
    refuse_mixed_sizes(model.config)
    if split.is_sharded:
        raise ValueError("preset is native, which does not work with shards: it needs all image sizes in advance")
    if accelerator.device.type == "xla":
        raise ValueError("preset is native, which does not work on XLA: it would compile every shape of a batch")


def fingerprint_run(settings: TrainingSettings, split: Split) -> dict[str, Any]:
    """Return the fingerprint of a run's data and initial model, without versions; a resumed run must have the same."""
    fingerprint = {"data": fingerprint_data(split)}
    if (model := getattr(settings, "model", None)) is not None:
        of_model = fingerprint_model(str(model))
        fingerprint["model"] = {name: value for name, value in of_model.items() if name != "code"}
    return fingerprint
