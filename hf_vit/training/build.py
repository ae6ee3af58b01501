"""Build the parts of a run from its settings: data sets and batches, objective, optimizer."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from ..data.augmentation import TrainTransform
from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.labels import distinguish, match_to_split, names_of, refuse_unlabelled
from ..data.loaders import train_loader
from ..data.native_resolution import native_loader
from ..data.samplers import BatchLayout
from ..data.splits import Split, find_eval_split, split_off_holdout
from ..evaluation.predictions import TOP_K, open_named
from ..files.messages import did_you_mean
from ..models.configuration_hf_vit import HfViTConfig, as_pair
from ..models.flexible_sizes import refuse_mixed_sizes
from .launch import is_sharded, is_xla, make_states, shard_by_layers
from .losses import balanced_weights
from .objectives import Classification, MaskedPatches, Normalizer, Objective
from .optimization import build_optimizer
from .patch_sizes import compile_model
from .recipes import SettingsError
from .settings import AUTO, PretrainSettings, TrainingSettings


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


def prepare(settings: TrainingSettings, accelerator: Accelerator, model: PreTrainedModel) -> tuple[nn.Module, Any]:
    """Compile and shard the model as the settings and the launch say, and build its optimizer.

    Random numbers and learning rates do not come from Accelerate: they are functions of the step.
    """
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
    return prepared, optimizer


def build_objective(
    settings: TrainingSettings, processor: Any, config: Any, split: Split, device: torch.device
) -> Objective:
    """Return what a step minimizes."""
    normalizer = Normalizer(processor.image_mean, processor.image_std, device)
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        return MaskedPatches(settings, normalizer)
    if settings.class_weights == "none":
        return Classification(settings, normalizer, config.num_labels)
    labels = split.class_numbers(f"--class-weights is {settings.class_weights}")
    weights = balanced_weights(labels, config.num_labels)
    return Classification(settings, normalizer, config.num_labels, weights.to(device))


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


def check_evaluation(settings: TrainingSettings, split: Split | None, config: Any) -> None:
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
