"""Models to train, with their image processors: loaded with a new head, or built from a configuration."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    PreTrainedModel,
)

from ..data.splits import Split
from ..loading import find_adapter, load, with_resizing_of
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vision import HfVisionConfig, check_attention
from ..models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, Size, as_pair
from ..models.image_processing_hf_vit import HfViTImageProcessor, sync_processor_size
from ..models.modeling_hf_vit import HfViTModel
from ..models.pretrained import HfViTHead
from ..models.utils import absence_explained, check_place
from ..variants import config_of_variant
from .optimization import freeze_parameters
from .patch_sizes import prepare_patch_sizes
from .settings import FinetuneSettings, PretrainSettings, TrainingSettings

_DROPOUT_FIELDS = {
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "drop_path": "drop_path_rate",
}


def load_for_finetuning(settings: FinetuneSettings, split: Split) -> tuple[PreTrainedModel, Any]:
    """Load a pretrained model with a new head, a linear layer of zeros, and its image processor.

    The new head also replaces the pre-logits layer (section 3.2 of the paper), unless `keep_pre_logits`. Adapters and
    frozen parameters follow the settings.

    Raises:
        ValueError: weights other than the head's are missing.
    """
    assert settings.model
    config = _config_of(settings.model)
    for field, rate in _dropout_fields(settings, type(config)).items():
        setattr(config, field, rate)
    model, processor, info = _load(AutoModelForImageClassification, settings.model, settings.image_size, config=config)
    _refuse_random_weights(info, settings.model)
    _replace_head(model, split, settings.keep_pre_logits)
    _name_labels(model.config, split, settings.loss)
    processor = with_resizing_of(processor, settings.preset, model.config)
    if settings.lora_rank:
        model = _add_adapters(model, settings)
    frozen = freeze_parameters(model, settings.freeze + ([r"^(?!classifier)"] if settings.linear_probe else []))
    if settings.lora_rank and {name for name, _ in model.named_parameters() if ".lora_" in name} <= set(frozen):
        raise ValueError(f"freeze {settings.freeze} freezes the adapters of lora_rank ({settings.lora_rank})")
    return model, processor


def _config_of(name: str) -> Any:
    check_place(name)
    with absence_explained(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    check_attention(config._attn_implementation)
    return config


def _load(
    auto_class: Any, name: str, image_size: Size | None, **settings: Any
) -> tuple[PreTrainedModel, Any, dict[str, Any]]:
    """Load a model, its image processor at the model's size, and the loading info of `from_pretrained`."""
    if find_adapter(name) is not None:
        adapted, processor = load(name, image_size)
        model: Any = adapted if auto_class is AutoModelForImageClassification else adapted.base_model
        return model, processor, {"missing_keys": [], "mismatched_keys": []}
    config = settings.get("config") or _config_of(name)
    if auto_class is AutoModelForImageClassification and type(config) not in auto_class._model_mapping:
        raise ValueError(f"{name} has a model of type {config.model_type}, which cannot classify images")
    is_ours = auto_class is HfViTModel or isinstance(config, HfVisionConfig)
    size = {} if image_size is None or is_ours else {"image_size": image_size}
    pair: Any = auto_class.from_pretrained(name, output_loading_info=True, trust_remote_code=False, **size, **settings)
    model, info = pair
    if image_size is not None and is_ours:
        model.set_image_size(image_size, processor_follows=True)
    processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    sync_processor_size(model, processor, name, asked=image_size is not None)
    return model, processor, info


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
        raise ValueError(f"{option} is {getattr(settings, wrong[0])}, but a BiT ResNet has no dropout")
    return {}


def _refuse_random_weights(info: dict[str, Any], name: str) -> None:
    """Raise ValueError if weights other than the head's are missing or have another shape."""
    wrong = [str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]) if "classifier" not in str(key)]
    if wrong:
        raise ValueError(f"{name} has weights that are missing or have another shape: {', '.join(wrong)}")


def _replace_head(model: PreTrainedModel, split: Split, keep_pre_logits: bool = False) -> None:
    """Replace the head by a linear layer of zeros; drop the pre-logits layer unless it is kept."""
    classifier: Any = model.classifier
    features = classifier.in_features
    pooler = None if keep_pre_logits else getattr(getattr(model, "vit", None), "pooler", None)
    if isinstance(model.config, HfViTConfig) and model.config.representation_size and pooler is not None:
        pooler.dense, model.config.representation_size = None, None
        features = model.config.hidden_size
    model.classifier = head = HfViTHead(features, split.num_labels, dtype=classifier.weight.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)


def _name_labels(config: Any, split: Split, loss: str) -> None:
    """Set the label names of a configuration, and its problem type, by which predictions are sigmoid or softmax."""
    names = split.label_names or [f"LABEL_{number}" for number in range(split.num_labels)]
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "multi_label_classification" if loss == "sigmoid" else "single_label_classification"


def build_for_pretraining(settings: PretrainSettings, split: Split) -> tuple[PreTrainedModel, Any]:
    """Build a model with random weights, and the image processor of the original.

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
        _name_labels(config, split, settings.loss)
        model = AutoModelForImageClassification.from_config(config)
    freeze_parameters(model, settings.freeze)
    return model, _new_processor(config, settings.preset)


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
            raise ValueError(f"head is mlp, but {settings.variant or 'a BiT ResNet'} has a linear one: set head linear")
        config.representation_size = config.hidden_size
    return config


def _new_processor(config: HfViTConfig | HfBiTConfig, preset: str | None = None) -> HfViTImageProcessor:
    height, width = as_pair(config.image_size)
    processor = HfViTImageProcessor(size={"height": height, "width": width}, num_channels=config.num_channels)
    return with_resizing_of(processor, preset, config)


def load_for_evaluation(name: str, image_size: Size | None = None) -> tuple[PreTrainedModel, Any]:
    """Load a trained classifier and its image processor.

    Raises:
        ValueError: weights are missing, e.g. those of the head.
    """
    model, processor, info = _load(AutoModelForImageClassification, name, image_size)
    if info["missing_keys"]:
        raise ValueError(f"{name} is not a trained classifier: it lacks {', '.join(map(str, info['missing_keys']))}")
    return model, processor


def load_encoder(name: str, image_size: Size | None = None) -> tuple[PreTrainedModel, Any]:
    """Load a model without its head, and its image processor.

    Raises:
        ValueError: weights are missing.
    """
    is_adapter = find_adapter(name) is not None
    theirs = not is_adapter and _config_of(name).model_type in ("vit", "vit_mae")  # AutoModel would drop their pooler
    model, processor, info = _load(HfViTModel if theirs else AutoModel, name, image_size)
    _refuse_random_weights(info, name)
    return model, processor


def prepare_for_training(model: Any, settings: TrainingSettings) -> None:
    """Set what the settings say of a model's training: head bias, patch sizes, gradient checkpointing.

    Raises:
        ValueError: the model has no patches of other sizes.
    """
    set_head_bias(model, settings)
    prepare_patch_sizes(model, [*settings.patch_sizes, *settings.eval_patch_sizes])
    if settings.gradient_checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()


def set_head_bias(model: PreTrainedModel, settings: TrainingSettings) -> None:
    """Fill the bias of the head with `head_bias`, if it is set.

    With a sigmoid loss over 21,843 classes, -10 makes the initial probability of every class small (big_vision).
    """
    if settings.head_bias is None:
        return
    for module in model.modules():
        if isinstance(module, HfViTHead):  # PEFT keeps two: the original one and the one that trains
            nn.init.constant_(module.bias, settings.head_bias)


def _add_adapters(model: PreTrainedModel, settings: FinetuneSettings) -> Any:
    """Wrap the model with PEFT's low-rank adapters; the head is trained whole.

    Raises:
        ValueError: PEFT is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(f"--lora-rank is {settings.lora_rank}, but PEFT is not installed: pip install peft") from None
    torch.manual_seed(settings.seed)  # the same adapters on all processes
    lora = LoraConfig(
        r=settings.lora_rank or 0,
        lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType] - a float works too
        target_modules=list(settings.lora_target_modules),
        modules_to_save=["classifier"],
    )
    return get_peft_model(model, lora)


def save_plain(model: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Save a model, with PEFT's adapters merged into the weights.

    Args:
        tensors: the whole state dict; the model's own weights may be sharded.
    """
    if not hasattr(model, "merge_and_unload"):
        model.save_pretrained(folder, state_dict=tensors)
        return
    from peft import get_peft_model

    base = AutoModelForImageClassification.from_config(model.get_base_model().config)
    whole = get_peft_model(base, model.peft_config["default"])
    whole.load_state_dict(tensors)
    whole.merge_and_unload().save_pretrained(folder)
