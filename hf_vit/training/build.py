"""Build the parts of a run from its settings: model and image processor, batches, objective, optimizer."""

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    PreTrainedModel,
)

from ..data.augmentation import ArrayTransform, TrainTransform
from ..data.device_augmentation import CropTransform
from ..data.devices import can_augment, can_compile, has_fused_optimizers, has_static_shapes
from ..data.fingerprint import fingerprint_data, fingerprint_model
from ..data.labels import distinguish, names_of
from ..data.loaders import TrainDataset, channel_statistics, train_loader
from ..data.native_resolution import NativeDataset, NativeTransform, collate_patches
from ..data.samplers import BatchLayout, BucketBatchSampler, StepBatchSampler
from ..data.splits import Split
from ..files.messages import did_you_mean, join_names
from ..files.readme import write_adapter_readme
from ..files.removed_names import check_removed_arguments
from ..inference.predictions import TOP_K
from ..inference.regression import METRICS, TargetScale
from ..loading import ModelFiles, find_model, load, set_class_names, set_preset
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ..models.flexible_sizes import check_mixed_sizes
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.pretrained import HfViTHead
from ..models.registry import config_of_variant
from ..models.sizes import as_pair
from ..settings.fields import AUTO, REGRESSION_LOSSES, FinetuneSettings, PretrainSettings, TrainingSettings
from .launch import (
    compile_options,
    is_sharded,
    shard_by_layers,
)
from .objectives import (
    Classification,
    Distillation,
    MaskedPatches,
    Normalizer,
    Objective,
    Regression,
    Teacher,
    balanced_weights,
)
from .optimization import build_optimizer, freeze_parameters

logger = logging.getLogger(__name__)

_DROPOUT_FIELDS = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "drop_path": "drop_path_rate",
}
FEATURES_FILE = "closed_form.safetensors"  # beside a head in closed form; not among the files that are pushed
_GRAPHS_PER_PATCH_SIZE = 8  # torch.compile's default limit for one function
_MIN_STEPS_TO_COMPILE = 1_000  # in a shorter run, compilation takes longer than it saves


def load_for_finetuning(settings: FinetuneSettings, split: Split) -> tuple[PreTrainedModel, Any]:
    """Load a pretrained model and its image processor; the model gets a new linear head, or keeps its own (`head`).

    A new head is initialized to zeros. It also replaces the pre-logits layer (section 3.2 of the paper), unless
    `keep_pre_logits`. Adapters and frozen parameters follow the settings.

    Raises:
        ValueError: weights other than the head's are missing, hf_vit or `save_for` does not know the architecture, or
            the head that is kept has other classes.
    """
    assert settings.model
    files = find_model(settings.model)
    is_resnet = files.config.get("model_type") == HfBiTConfig.model_type
    names = class_names_of(split)
    head: dict[str, Any] = {"head": "new", "labels": names, "keep_pre_logits": settings.keep_pre_logits}
    if _keeps_head(settings, files, names):
        head = {"head": "keep", "backend": "eager"}
    model, processor = load(
        settings.model,
        **head,
        image_size=settings.image_size,
        preset=settings.preset,
        num_channels=settings.num_channels,
        **_dropout_rates(settings, is_resnet),
    )
    model.config.name_or_path = model.name_or_path = str(settings.model)
    if head["head"] == "keep":
        set_class_names(model.config, names)  # removes what calibration wrote, which training changes
        model.conversion_record = None
    _set_problem_type(model.config, settings.loss)
    if split.targets and head["head"] == "new":
        _scale_head(model, split)
    measure_channels(processor, split)
    if settings.save_for == "transformers":
        from ..conversion.exporting import find_writer  # slow to import

        find_writer(cast(Any, model), "transformers")  # raises if its own classes do not support the model
    if settings.lora_rank:
        model = _add_adapters(model, settings)
    patterns = settings.freeze
    if settings.linear_probe:
        patterns = [*patterns, r"^(?!classifier)"]
    frozen = freeze_parameters(model, patterns)
    if settings.lora_rank and {name for name, _ in model.named_parameters() if ".lora_" in name} <= set(frozen):
        raise ValueError(f"--freeze {settings.freeze} freezes all adapters of --lora-rank {settings.lora_rank}")
    return model, processor


def class_names_of(split: Split) -> list[str]:
    """Return the class names of a split, which are made from the numbers where it has none."""
    return split.label_names or [f"LABEL_{number}" for number in range(split.num_labels)]


def _keeps_head(settings: FinetuneSettings, files: ModelFiles, names: list[str]) -> bool:
    """Return whether fine-tuning starts from the model's own head, as `head` says.

    Raises:
        ValueError: `head` is "keep", and the head has other classes than `names`.
    """
    stored = files.config.get("id2label") or {}
    own = [stored[number] for number in sorted(stored, key=int)]
    if settings.head == "keep" and own != names:
        raise ValueError(
            f"head is keep, but {settings.model} has the classes {join_names(own, 3)}, not those of the data"
        )
    is_solved = settings.head == AUTO and own == names and files.find(FEATURES_FILE) is not None
    if is_solved and not settings.closed_form:
        logger.warning("head: that of %s, which was solved for these classes in closed form", settings.model)
    return settings.head == "keep" or (is_solved and not settings.closed_form)


def _dropout_rates(settings: TrainingSettings, is_resnet: bool) -> dict[str, Any]:
    """Return the dropout rates that the settings give, by the name of their field in a configuration.

    Raises:
        ValueError: a rate is set for a ResNet.
    """
    rates = {field: getattr(settings, setting) for setting, field in _DROPOUT_FIELDS.items()}
    if is_resnet and any(rates.values()):
        raise ValueError("BiT has no dropout: omit --dropout, --attention-dropout and --drop-path")
    return {field: rate for field, rate in rates.items() if rate is not None and not is_resnet}


def _set_problem_type(config: Any, loss: str) -> None:
    """Set the problem type of a configuration, which selects sigmoid, softmax, or values as they are."""
    types = {"sigmoid": "multi_label_classification", **dict.fromkeys(REGRESSION_LOSSES, "regression")}
    config.problem_type = types.get(loss, "single_label_classification")


def _scale_head(model: Any, split: Split) -> None:
    """Change a new head, made for standardized targets, to the units of the training images' targets."""
    scale = TargetScale(split.target_values(), split.targets)
    scale.set_heads(model, scale.fold)


def build_for_pretraining(settings: PretrainSettings, split: Split) -> tuple[PreTrainedModel, Any]:
    """Build a model with random weights, and its image processor.

    Raises:
        ValueError: the settings contradict each other.
    """
    config = build_config(settings)
    torch.manual_seed(settings.seed)
    if settings.objective == "masked_patch_prediction":
        config.patch_target = settings.target
        model = AutoModelForMaskedImageModeling.from_config(config)
    else:
        set_class_names(config, class_names_of(split))
        _set_problem_type(config, settings.loss)
        model = AutoModelForImageClassification.from_config(config)
        if split.targets:
            _scale_head(model, split)
    freeze_parameters(model, settings.freeze)
    height, width = as_pair(config.image_size)
    processor = HfViTImageProcessor(size={"height": height, "width": width}, num_channels=config.num_channels)
    if settings.preset is not None:
        set_preset(processor, settings.preset, config)
    measure_channels(processor, split)
    return model, processor


def measure_channels(processor: Any, split: Split) -> None:
    """Set mean and standard deviation to those of the training images, unless these are grayscale or RGB."""
    if processor.num_channels not in (1, 3):
        mean, std = channel_statistics(split, processor.num_channels)
        processor.update(image_mean=mean.tolist(), image_std=std.tolist())


def build_config(settings: PretrainSettings) -> HfViTConfig | HfBiTConfig:
    """Return the configuration of `variant`, changed by `config`; or of `config` alone.

    Without a variant, `stem_depths` makes a hybrid, `depths` a BiT ResNet, and any other fields a ViT.

    Raises:
        ValueError: dropout or head mlp is set for a ResNet.
    """
    fields: dict[str, Any] = dict(settings.config)
    check_removed_arguments("config", fields)
    if settings.image_size is not None:
        fields["image_size"] = settings.image_size
    if settings.variant:
        config = config_of_variant(settings.variant, **fields)
    else:
        kind = HfViTHybridConfig if "stem_depths" in fields else HfBiTConfig if "depths" in fields else HfViTConfig
        config = kind(**fields)
    for field, rate in _dropout_rates(settings, isinstance(config, HfBiTConfig)).items():
        setattr(config, field, rate)
    if settings.head == "mlp":
        if isinstance(config, HfBiTConfig):
            raise ValueError(
                f"head is mlp, but {settings.variant or 'a BiT ResNet'} has a linear head: set head to linear"
            )
        config.representation_size = config.hidden_size
    return config


def prepare_for_training(model: Any, settings: TrainingSettings) -> None:
    """Apply the settings to a model: head bias, patch sizes, gradient checkpointing.

    Raises:
        ValueError: the model does not support these patch sizes.
    """
    set_head_bias(model, settings)
    prepare_patch_sizes(model, [*settings.patch_sizes, *settings.eval_patch_sizes])
    if settings.gradient_checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()


def prepare_patch_sizes(model: Any, patch_sizes: Sequence[int]) -> None:
    """Prepare a model for several patch sizes, as FlexiViT does (`make_flexible`).

    Raises:
        ValueError: the model does not support other patch sizes, or a size does not divide its image size.
    """
    if not patch_sizes:
        return
    config, plain = model.config, model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(config, HfViTConfig):
        raise ValueError(f"cannot set the patch size of {type(plain).__name__}: it has no patches")
    if not config.is_flexible:
        plain.make_flexible()
        config.position_interpolation = "bilinear"
    for patch_size in patch_sizes:
        config.grid_of(*as_pair(config.image_size), patch_size)


def set_head_bias(model: PreTrainedModel, settings: TrainingSettings) -> None:
    """Fill the bias of the head with `head_bias`, if it is set.

    With a sigmoid loss over 21,843 classes, -10 makes the initial probability of every class small (big_vision).
    """
    if settings.head_bias is None:
        return
    for module in model.modules():
        if isinstance(module, HfViTHead):  # with PEFT there are two: the original head and the trainable copy
            nn.init.constant_(module.bias, settings.head_bias)


def _add_adapters(model: PreTrainedModel, settings: FinetuneSettings) -> Any:
    """Wrap the model with PEFT's low-rank adapters; the head is trained in full.

    Raises:
        ImportError: PEFT is not installed.
        ValueError: the model has no module of a name in `lora_target_modules`.
    """
    from peft import LoraConfig, get_peft_model

    targets: Any = list(settings.lora_target_modules)
    modules = {name: type(module) for name, module in model.named_modules()}
    for target in targets:
        if target != "all-linear" and not any(f".{name}".endswith(f".{target}") for name in modules):
            known = {
                name.rpartition(".")[2] for name, kind in modules.items() if issubclass(kind, nn.Linear | nn.Conv2d)
            }
            raise ValueError(
                f"no module is called {target}{did_you_mean(target, known)}; lora_target_modules takes "
                f"{', '.join(sorted(known - {'classifier'}))}, or all-linear alone"
            )
    if targets == ["all-linear"]:
        targets = "all-linear"  # PEFT's word, which it does not take in a list
    torch.manual_seed(settings.seed)  # the same initial adapters on all processes
    lora = LoraConfig(
        r=settings.lora_rank or 0,
        lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType] - PEFT accepts a float
        target_modules=targets,
        modules_to_save=["classifier"],
    )
    adapted = get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = _base_of_adapter(model, settings)
    return adapted


def _base_of_adapter(model: PreTrainedModel, settings: FinetuneSettings) -> str | None:
    """Return the name of the base that the adapter fits; None if the model was changed after it was loaded."""
    files = find_model(str(settings.model))
    if files.adapter is not None:
        return None
    stored = type(model.config).from_dict(files.config)
    before, now = (
        (
            as_pair(config.image_size),
            as_pair(getattr(config, "patch_size", 0)),  # a ResNet has none
            config.num_channels,
            getattr(config, "representation_size", None),
        )
        for config in (stored, model.config)
    )
    if before == now:
        return str(settings.model)
    logger.warning(
        "the adapter is only merged, not written to adapter/: it does not fit %s, whose image size, patches, channels "
        "or pre-logits layer were changed",
        settings.model,
    )
    return None


def save_merged(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> PreTrainedModel:
    """Save a model, with PEFT's adapters merged into the weights; the adapter alone is in the subfolder adapter/.

    Args:
        tensors: the full state dict; the model's own weights may be sharded.

    Returns:
        The saved model.
    """
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(folder, state_dict=tensors)
        return model
    from peft import get_peft_model

    base = AutoModelForImageClassification.from_config(model.get_base_model().config)
    name = model.peft_config["default"].base_model_name_or_path
    whole = get_peft_model(base, model.peft_config["default"])
    whole.load_state_dict(tensors)
    model.peft_config["default"].base_model_name_or_path = name  # get_peft_model writes that of its own base
    if name is not None:
        whole.save_pretrained(folder / "adapter")
        write_adapter_readme(folder / "adapter")  # instead of PEFT's form of a card, with nothing filled in
    merged = whole.merge_and_unload()
    merged.save_pretrained(folder)
    return merged


def prepare(
    settings: TrainingSettings, accelerator: Accelerator, model: PreTrainedModel, num_steps: int
) -> tuple[nn.Module, Any]:
    """Compile, shard and wrap the model for the settings and the launcher, and build its optimizer.

    If `settings.compile` is "auto", it is replaced with true or false. The learning rate schedule and the random number
    generators are not prepared by accelerate, because they are functions of the step.
    """
    if settings.compile == AUTO:
        has_one_size = settings.preset != "native"
        is_long = num_steps >= _MIN_STEPS_TO_COMPILE or has_static_shapes(accelerator.device)
        is_worthwhile = is_long and can_compile(accelerator.device)
        settings.compile = is_worthwhile and has_one_size and not is_sharded(accelerator)
    if settings.compile:
        options = {"mode": settings.compile_mode} | compile_options()
        compile_model(model, {*settings.patch_sizes, *settings.eval_patch_sizes}, **options)
    shard_by_layers(accelerator, model)
    if not is_sharded(accelerator):
        model.to(accelerator.device)  # before the optimizer is built: some devices replace the parameters
    is_fused = not is_sharded(accelerator) and has_fused_optimizers(accelerator.device)  # SGD's kernel takes no DTensor
    optimizer = build_optimizer(settings, model, is_fused)
    prepared, optimizer = accelerator.prepare(model, optimizer)  # together: sharding replaces the parameters in both
    return prepared, optimizer


def compile_model(model: Any, patch_sizes: Collection[int], **options: Any) -> None:
    """Compile the forward; each patch size has its own graphs (training, evaluation, a smaller last batch).

    By default, torch.compile warns after 8 graphs of a function and compiles no more. Here, the limit is 8 per patch
    size.

    Args:
        options: arguments of `torch.compile`.
    """
    model.compile(**options)
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _GRAPHS_PER_PATCH_SIZE * len(patch_sizes))


def build_objective(
    settings: TrainingSettings, processor: Any, config: Any, split: Split, device: torch.device
) -> Objective:
    """Return the training objective that the settings select."""
    normalizer = Normalizer(processor, device)
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        return MaskedPatches(settings, normalizer)
    if split.targets:
        return Regression(settings, normalizer, TargetScale(split.target_values(), split.targets))
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
    """Return whether augmentation runs on the device; "auto": where it saves time, unless preset is native."""
    if settings.augment_on == AUTO:
        return can_augment(device) and settings.preset != "native"
    return settings.augment_on == "device"


def train_transform(settings: TrainingSettings, processor: Any, config: Any, on_device: bool = False) -> TrainTransform:
    """Return the training augmentation for a model's image size and number of channels.

    Args:
        on_device: only crop in the data workers; `DeviceAugmentation` does the rest.
    """
    same = ("crop", "flip", "antialias", "randaugment_layers", "randaugment_magnitude", "reduced_decoding")
    low, high = settings.crop_area
    common: dict[str, Any] = {
        **{name: getattr(settings, name) for name in same},
        "size": as_pair(config.image_size),
        "crop_area": (low, high),
        "resize": None if settings.resize is None else as_pair(settings.resize),
        "jpeg_dct": processor.jpeg_dct,
        "background": tuple(processor.background),
    }
    if (channels := config.num_channels) not in (1, 3):
        wrong = [name for name in ("randaugment_layers", "reduced_decoding") if getattr(settings, name)]
        wrong += ["preset"] if settings.preset == "native" else []
        wrong += ["augment_on"] if settings.augment_on == "device" else []
        if wrong:
            raise ValueError(f"{', '.join(wrong)} needs 1 or 3 channels, but the images have {channels}")
        return ArrayTransform(**common, num_channels=channels)
    common["mode"] = "L" if channels == 1 else "RGB"
    if settings.preset == "native":
        common |= {"patch_size": as_pair(processor.patch_size), "max_num_patches": processor.max_num_patches}
        return NativeTransform(**common, token_drop=settings.token_drop)
    if on_device:
        return CropTransform(**common)
    return TrainTransform(**common)


def training_batches(
    settings: TrainingSettings,
    split: Split,
    transform: TrainTransform,
    layout: BatchLayout,
    steps: range,
) -> Iterable[dict[str, torch.Tensor]]:
    """Return the training batches of this process for a range of steps, one per forward."""
    loading = settings.num_workers, settings.prefetch_factor, settings.stall_timeout
    if isinstance(transform, NativeTransform):
        dataset = NativeDataset(split, transform, settings.seed, settings.class_sampling)
        batches = BucketBatchSampler(layout, steps, dataset.count_patches, settings.seed)
        return train_loader(dataset, batches, *loading, collate_patches)
    dataset = TrainDataset(split, transform, settings.seed, settings.class_sampling)
    return train_loader(dataset, StepBatchSampler(layout, steps, split.in_blocks), *loading)


def choose_best_metric(settings: TrainingSettings, split: Split | None, config: Any) -> str:
    """Return the metric that chooses the best model.

    Args:
        split: the images for evaluation, if there are any.

    Raises:
        ValueError: there is no evaluation, or it does not compute the metric `best_metric`.
    """
    name = settings.best_metric
    if split is None:
        if settings.early_stopping or name != AUTO:
            raise ValueError("early_stopping and best_metric need held-out images: set --eval-split")
        return name
    known = _computed_metrics(settings, split, config)
    known += [f"accuracy_at_patch_{size}" for size in settings.eval_patch_sizes or settings.patch_sizes]
    if name != AUTO and name not in known:
        raise ValueError(f"best_metric is {name!r}; it must be {join_names(known, 6)}{did_you_mean(name, known)}")
    return known[0] if name == AUTO else name


def _computed_metrics(settings: TrainingSettings, split: Split, config: Any) -> list[str]:
    """Return the metrics that the evaluation computes, the one that chooses the best model by default first."""
    if isinstance(settings, PretrainSettings) and settings.objective == "masked_patch_prediction":
        return ["loss", "patch_accuracy"]
    if split.targets:
        ends = [f"/{name}" for name in split.targets] if len(split.targets) > 1 else [""]
        return ["loss", *[metric + end for metric in METRICS for end in ends]]
    classes = distinguish(names_of(config))
    if split.multi_label:
        names = ["mean_average_precision", "loss", "accuracy", "micro_f1", "macro_f1"]
        return names + [f"average_precision/{one}" for one in classes]
    names = ["accuracy", "loss", "mean_per_class_accuracy"]
    if config.num_labels >= TOP_K:
        names.append("top5_accuracy")
    return names + [f"accuracy/{one}" for one in classes]


def check_support(
    settings: TrainingSettings, accelerator: Accelerator, model: Any, processor: Any, split: Split
) -> None:
    """Raise ValueError if the model, the data or the device does not support a setting.

    If only the model's own processor has the preset "native", print a hint that training and evaluation differ.
    """
    if settings.preset != "native":
        if processor.preset == "native":
            accelerator.print(
                "The model is evaluated at native aspect ratios but trained at one size; set --preset native for both."
            )
        return
    if not isinstance(model.config, HfViTConfig) or split.is_sharded:
        raise ValueError("preset native needs an hf_vit ViT, and a dataset that is not in shards")
    check_mixed_sizes(model.config)


def fingerprint_run(settings: TrainingSettings, split: Split) -> dict[str, Any]:
    """Return fingerprints of the "data", the initial "model" and the "teacher"; a resumed run must have the same."""
    fingerprint = {"data": fingerprint_data(split)}
    for role in ("model", "teacher"):
        if (model := getattr(settings, role, None)) is not None:
            whole = fingerprint_model(str(find_model(model).name))
            fingerprint[role] = {name: value for name, value in whole.items() if name != "code"}
    return fingerprint
