"""Build the parts of a run from its settings: data sets and batches, objective, optimizer."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from ..data.augmentation import ArrayTransform, TrainTransform
from ..data.device_augmentation import CropTransform
from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.labels import distinguish, names_of
from ..data.loaders import TrainDataset, train_loader
from ..data.native_resolution import NativeDataset, collate_patches
from ..data.samplers import BatchLayout, BucketBatchSampler, StepBatchSampler
from ..data.splits import Split
from ..devices import (
    can_compile,
    has_fused_optimizers,
    is_sharded,
    is_xla,
    make_states,
    mark_step,
    shard_by_layers,
)
from ..evaluation.predictions import TOP_K
from ..files.messages import did_you_mean
from ..loading import local_model
from ..models.configuration_hf_vit import HfViTConfig, as_pair
from ..models.flexible_sizes import check_mixed_sizes
from ..settings.fields import AUTO, PretrainSettings, TrainingSettings
from ..settings.reader import SettingsError
from .distillation import Distillation, Teacher
from .objectives import Classification, MaskedPatches, Normalizer, Objective, balanced_weights
from .optimization import build_optimizer

_GRAPHS_PER_PATCH_SIZE = 8  # torch.compile's default limit for one function
_MIN_STEPS_TO_COMPILE = 1_000  # in a shorter run, compilation takes longer than it saves


def prepare(
    settings: TrainingSettings, accelerator: Accelerator, model: PreTrainedModel, num_steps: int
) -> tuple[nn.Module, Any]:
    """Compile, shard and wrap the model for the settings and the launcher, and build its optimizer.

    If `settings.compile` is "auto", it is replaced with true or false. The learning rate schedule and the random number
    generators are not prepared by accelerate, because they are functions of the step.
    """
    if settings.compile == AUTO:
        has_one_size = settings.preset != "native"
        settings.compile = can_compile(accelerator) and has_one_size and num_steps >= _MIN_STEPS_TO_COMPILE
    if settings.compile and is_xla(accelerator):
        raise SettingsError("compile is true, but XLA always compiles: set compile to false")
    if settings.optimizer == "muon" and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise SettingsError("optimizer is muon, but DeepSpeed flattens the matrices that it needs: use adamw")
    if settings.compile:
        compile_model(model, {*settings.patch_sizes, *settings.eval_patch_sizes}, settings.compile_mode)
    shard_by_layers(accelerator, model)
    if not is_sharded(accelerator):
        model.to(accelerator.device)  # before the optimizer is built: some devices replace the parameters
    optimizer = build_optimizer(settings, model, has_fused_optimizers(accelerator))
    prepared, optimizer = accelerator.prepare(model, optimizer)  # together: sharding replaces the parameters in both
    if is_xla(accelerator):
        make_states(optimizer.optimizer)  # gives the first step the same graph as the others
        mark_step(accelerator)
    return prepared, optimizer


def compile_model(model: Any, patch_sizes: Collection[int], mode: str = "default") -> None:
    """Compile the forward; each patch size has its own graphs (training, evaluation, a smaller last batch).

    By default, torch.compile warns after 8 graphs of a function and compiles no more. Here, the limit is 8 per patch
    size.
    """
    model.compile(mode=mode)
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _GRAPHS_PER_PATCH_SIZE * len(patch_sizes))


def build_objective(
    settings: TrainingSettings, processor: Any, config: Any, split: Split, device: torch.device
) -> Objective:
    """Return the training objective that the settings select."""
    normalizer = Normalizer(processor.image_mean, processor.image_std, device)
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        return MaskedPatches(settings, normalizer)
    if settings.teacher is not None:
        teacher = Teacher(settings.teacher, config, normalizer, device)
        num_images = 0 if split.is_sharded else len(split)
        return Distillation(settings, normalizer, config.num_labels, teacher, num_images)
    if settings.class_weights == "none":
        return Classification(settings, normalizer, config.num_labels)
    labels = split.class_numbers(f"--class-weights is {settings.class_weights}")
    weights = balanced_weights(labels, config.num_labels)
    return Classification(settings, normalizer, config.num_labels, weights.to(device))


def count_steps(settings: TrainingSettings, split: Split) -> int:
    """Return the number of optimizer steps of the run."""
    if settings.steps is not None:
        return settings.steps
    assert settings.epochs is not None
    return max(round(settings.epochs * len(split) / settings.batch_size), 1)


def augments_on_device(settings: TrainingSettings, device: torch.device) -> bool:
    """Return whether augmentation runs on the device; "auto": on a GPU (not MPS), unless preset is native."""
    if settings.augment_on == "device" and device.type == "xla":
        raise SettingsError("augment_on is device, which XLA would compile for every batch: set augment_on to cpu")
    is_gpu = device.type not in ("cpu", "xla", "mps")
    return settings.augment_on == "device" or (settings.augment_on == AUTO and is_gpu and settings.preset != "native")


def train_transform(settings: TrainingSettings, processor: Any, config: Any, on_device: bool = False) -> TrainTransform:
    """Return the training augmentation for a model's image size and number of channels.

    Args:
        on_device: only crop in the data workers; `DeviceAugmentation` does the rest.
    """
    low, high = settings.crop_area
    common: dict[str, Any] = {
        "size": as_pair(config.image_size),
        "crop": settings.crop,
        "crop_area": (low, high),
        "resize": None if settings.resize is None else as_pair(settings.resize),
        "flip": settings.flip,
        "antialias": settings.antialias,
        # Missing in processors of transformers
        "background": tuple(getattr(processor, "background", TrainTransform.background)),
    }
    if (channels := config.num_channels) not in (1, 3):
        wrong = [name for name in ("randaugment_layers", "reduced_decoding") if getattr(settings, name)]
        wrong += ["preset"] if settings.preset == "native" else []
        wrong += [name for name in ("augment_on", "decode_on") if getattr(settings, name) == "device"]
        if wrong:
            value = getattr(settings, wrong[0])
            raise ValueError(f"{wrong[0]} is {value}, which needs 1 or 3 channels, but the images have {channels}")
        return ArrayTransform(**common, num_channels=channels)
    if on_device:
        common["decodes_on_device"] = settings.decode_on == "device"
    elif settings.decode_on == "device":
        raise SettingsError("decode_on is device, but images are augmented on the CPU: set augment_on to device")
    return (CropTransform if on_device else TrainTransform)(
        **common,
        randaugment_layers=settings.randaugment_layers,
        randaugment_magnitude=settings.randaugment_magnitude,
        mode="L" if channels == 1 else "RGB",
        reduced_decoding=settings.reduced_decoding,
    )


def training_batches(
    settings: TrainingSettings,
    split: Split,
    processor: Any,
    transform: TrainTransform,
    layout: BatchLayout,
    steps: range,
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process for a range of steps, one per forward."""
    loading = settings.num_workers, settings.prefetch_factor
    if settings.preset == "native":
        patches = as_pair(processor.patch_size), processor.max_num_patches, settings.token_drop
        dataset = NativeDataset(split, transform, settings.seed, settings.class_sampling, *patches)
        batches = BucketBatchSampler(layout, steps, dataset.count_patches, settings.seed)
        return train_loader(dataset, batches, *loading, collate_patches)
    dataset = TrainDataset(split, transform, settings.seed, settings.class_sampling)
    return train_loader(dataset, StepBatchSampler(layout, steps, split.in_blocks), *loading)


def check_evaluation(settings: TrainingSettings, split: Split | None, config: Any) -> None:
    """Raise ValueError if `best_metric` or `early_stopping` does not fit the evaluation."""
    name = settings.best_metric
    if split is None:
        if settings.early_stopping or name != "auto":
            what = "early_stopping" if settings.early_stopping else "best_metric"
            raise ValueError(f"{what} ({getattr(settings, what)}) needs held-out images: set --eval-split")
        return
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        known = ["loss", "patch_accuracy"]
    elif split.multi_label:
        known = ["loss", "accuracy", "mean_average_precision", "micro_f1", "macro_f1"]
        known += [f"average_precision/{one}" for one in distinguish(names_of(config))]
    else:
        top5 = ["top5_accuracy"] if config.num_labels >= TOP_K else []
        known = ["loss", "accuracy", *top5, "mean_per_class_accuracy"]
        known += [f"accuracy/{one}" for one in distinguish(names_of(config))]
    known += [f"accuracy_at_patch_{size}" for size in settings.eval_patch_sizes or settings.patch_sizes]
    if name != "auto" and name not in known:
        listed = [metric for metric in known if "/" not in metric]
        per_class = "average_precision/CLASS" if split.multi_label else "accuracy/CLASS"
        listed += [per_class] if len(listed) < len(known) else []
        raise ValueError(f"best_metric is {name!r}; it must be {', '.join(listed)}{did_you_mean(name, known)}")


def check_native(
    settings: TrainingSettings, accelerator: Accelerator, model: Any, processor: Any, split: Split
) -> None:
    """Raise ValueError if preset is "native" but the model, the data or the device does not support it.

    If only the model's own processor is native, print a hint that training and evaluation differ.
    """
    if settings.preset != "native":
        if getattr(processor, "preset", None) == "native":
            accelerator.print(
                "The model is evaluated at native aspect ratios but trained at one size; set --preset native for both."
            )
        return
    if not isinstance(model.config, HfViTConfig):
        raise ValueError(
            f"preset is native, but {type(model).__name__} takes images of one size (expected an hf_vit ViT)"
        )
    check_mixed_sizes(model.config)
    if split.is_sharded:
        raise ValueError("preset is native, which does not work with shards: it needs all image sizes in advance")
    if is_xla(accelerator):
        raise ValueError("preset is native, which does not work on XLA: it would compile every shape of a batch")


def fingerprint_run(settings: TrainingSettings, split: Split) -> dict[str, Any]:
    """Return fingerprints of the "data", the initial "model" and the "teacher"; a resumed run must have the same."""
    fingerprint = {"data": fingerprint_data(split)}
    for role in ("model", "teacher"):
        if (model := getattr(settings, role, None)) is not None:
            whole = fingerprint_model(str(local_model(model)))
            fingerprint[role] = {name: value for name, value in whole.items() if name != "code"}
    return fingerprint
