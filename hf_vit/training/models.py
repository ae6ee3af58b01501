"""Models to train, with their image processors: loaded with a new head, or built from a configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    PreTrainedModel,
)

from ..data.loaders import channel_statistics
from ..data.splits import Split
from ..evaluation.models import check_no_random_weights, check_supports_patch_sizes, load_pretrained, read_config
from ..loading import local_model, with_channels, with_preset
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vision import HfVisionConfig
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.pretrained import HfViTHead
from ..settings.fields import FinetuneSettings, PretrainSettings, TrainingSettings
from ..variants import config_of_variant
from .optimization import freeze_parameters

_DROPOUT_FIELDS = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "drop_path": "drop_path_rate",
}


def load_for_finetuning(settings: FinetuneSettings, split: Split) -> tuple[PreTrainedModel, Any]:
    """Load a pretrained model and its image processor; the model gets a new linear head, initialized to zeros.

    The new head also replaces the pre-logits layer (section 3.2 of the paper), unless `keep_pre_logits`. Adapters and
    frozen parameters follow the settings.

    Raises:
        ValueError: weights other than the head's are missing, or the architecture is unknown.
    """
    assert settings.model
    name = str(local_model(settings.model))
    config = read_config(name)
    if not isinstance(config, HfVisionConfig):
        raise ValueError(f"{name} has a model of type {config.model_type}, which hf_vit cannot fine-tune")
    for field, rate in _dropout_fields(settings, type(config)).items():
        setattr(config, field, rate)
    model, processor, info = load_pretrained(AutoModelForImageClassification, name, settings.image_size, config=config)
    model.config.name_or_path = model.name_or_path = str(settings.model)
    check_no_random_weights(info, name)
    if settings.num_channels is not None:
        processor = with_channels(model, processor, settings.num_channels)
    _replace_head(model, split, settings.keep_pre_logits)
    _set_labels(model.config, split, settings.loss)
    processor = with_preset(processor, settings.preset, model.config, keeps_normalization=True)
    measure_channels(processor, split)
    if settings.lora_rank:
        model = _add_adapters(model, settings)
    frozen = freeze_parameters(model, settings.freeze + ([r"^(?!classifier)"] if settings.linear_probe else []))
    if settings.lora_rank and {name for name, _ in model.named_parameters() if ".lora_" in name} <= set(frozen):
        raise ValueError(f"--freeze {settings.freeze} freezes all adapters of --lora-rank {settings.lora_rank}")
    return model, processor


def _dropout_fields(settings: TrainingSettings, config_class: type) -> dict[str, float]:
    """Return the dropout rates that are set, as fields of a configuration.

    Raises:
        ValueError: a rate is set for a ResNet.
    """
    rates = {field: getattr(settings, setting) for setting, field in _DROPOUT_FIELDS.items()}
    if config_class is not HfBiTConfig:
        return {field: rate for field, rate in rates.items() if rate is not None}
    if wrong := [setting for setting in _DROPOUT_FIELDS if getattr(settings, setting)]:
        option = f"--{wrong[0].replace('_', '-')}"
        value = getattr(settings, wrong[0])
        raise ValueError(f"{option} is {value}, but BiT has neither dropout nor stochastic depth: omit {option}")
    return {}


def _replace_head(model: PreTrainedModel, split: Split, keep_pre_logits: bool = False) -> None:
    """Replace the head with a linear layer of zeros; remove the pre-logits layer unless `keep_pre_logits` is set."""
    classifier: Any = model.classifier
    features = classifier.in_features
    pooler = None if keep_pre_logits else getattr(getattr(model, "vit", None), "pooler", None)
    if isinstance(model.config, HfViTConfig) and model.config.representation_size and pooler is not None:
        pooler.dense, model.config.representation_size = None, None
        features = model.config.hidden_size
    model.classifier = head = HfViTHead(features, split.num_labels, dtype=classifier.weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)


def _set_labels(config: Any, split: Split, loss: str) -> None:
    """Set the label names of a configuration, and its problem type, which selects sigmoid or softmax."""
    names = split.label_names or [f"LABEL_{number}" for number in range(split.num_labels)]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in config.id2label.items()}
    for name in ("label_thresholds", "temperature", "coverage_thresholds", "rejection_thresholds"):
        setattr(config, name, None)  # they belong to the old head
    config.problem_type = "multi_label_classification" if loss == "sigmoid" else "single_label_classification"


def build_for_pretraining(settings: PretrainSettings, split: Split) -> tuple[PreTrainedModel, Any]:
    """Build a model with random weights, and its image processor.

    Raises:
        ValueError: the settings contradict each other.
    """
    config = build_config(settings)
    torch.manual_seed(settings.seed)
    if settings.objective == "masked_patch_prediction":
        if isinstance(config, HfBiTConfig):
            raise ValueError(f"masked_patch_prediction needs patches, but {settings.variant or 'a ResNet'} has none")
        config.patch_target = settings.target
        model = AutoModelForMaskedImageModeling.from_config(config)
    else:
        _set_labels(config, split, settings.loss)
        model = AutoModelForImageClassification.from_config(config)
    freeze_parameters(model, settings.freeze)
    height, width = as_pair(config.image_size)
    processor = HfViTImageProcessor(size={"height": height, "width": width}, num_channels=config.num_channels)
    processor = with_preset(processor, settings.preset, config, keeps_normalization=True)
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
    if settings.image_size is not None:
        fields["image_size"] = settings.image_size
    if settings.variant:
        rates = _dropout_fields(settings, type(config_of_variant(settings.variant)))
        config = config_of_variant(settings.variant, **{**fields, **rates})
    else:
        kind = HfViTHybridConfig if "stem_depths" in fields else HfBiTConfig if "depths" in fields else HfViTConfig
        config = kind(**{**fields, **_dropout_fields(settings, kind)})
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
    check_supports_patch_sizes(plain, list(patch_sizes))
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
        ValueError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(f"--lora-rank is {settings.lora_rank}, but PEFT is not installed: pip install peft") from None
    torch.manual_seed(settings.seed)  # the same initial adapters on all processes
    lora = LoraConfig(
        r=settings.lora_rank or 0,
        lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType] - PEFT accepts a float
        target_modules=list(settings.lora_target_modules),
        modules_to_save=["classifier"],
    )
    return get_peft_model(model, lora)


def save_merged(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Save a model, with PEFT's adapters merged into the weights.

    Args:
        tensors: the full state dict; the model's own weights may be sharded.
    """
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(folder, state_dict=tensors)
        return
    from peft import get_peft_model

    base = AutoModelForImageClassification.from_config(model.get_base_model().config)
    whole = get_peft_model(base, model.peft_config["default"])
    whole.load_state_dict(tensors)
    whole.merge_and_unload().save_pretrained(folder)
