"""Models to evaluate, with their image processors."""

from typing import Any

from accelerate import Accelerator
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from ..backends.choosing import use_backend
from ..loading import find_adapter, load, load_processor, local_model, make_processor, with_preset
from ..models.configuration_hf_vit import HfVisionConfig, HfViTConfig, Size, as_pair, check_attention
from ..models.image_processing_hf_vit import sync_processor_size
from ..models.utils import check_model_path, explain_missing_folder
from ..settings.fields import EvaluateSettings


def load_evaluated(settings: EvaluateSettings, accelerator: Accelerator, needs_head: bool) -> tuple[Any, Any]:
    """Load the model of the settings onto its device, with its head or without, and its image processor.

    Raises:
        ValueError: weights are missing, or the model has no patches, or they do not divide its image size.
    """
    name = str(local_model(str(settings.model)))
    auto_class = AutoModelForImageClassification if needs_head else AutoModel
    model, processor = load_pretrained(auto_class, name, settings.image_size, needs_head)
    if settings.patch_size is not None:
        check_supports_patch_sizes(model, settings.patch_size)
        model.set_patch_size(settings.patch_size, settings.image_size)
        model.config.grid_of(*as_pair(model.config.image_size))
    processor = with_preset(processor, settings.preset, model.config)
    if settings.compile is True:  # auto: not worth it
        model.compile(mode=settings.compile_mode)
    model = use_backend(model, settings.backend, settings.eval_batch_size)
    return accelerator.prepare_model(model, evaluation_mode=True), processor


def load_pretrained(
    auto_class: Any, name: str, image_size: Size | None, needs_head: bool = False, **settings: Any
) -> tuple[Any, Any]:
    """Load a model, and its image processor at the model's size.

    Args:
        needs_head: the model must have a trained classification head.
        settings: more arguments of `from_pretrained`.

    Raises:
        ValueError: weights are missing or have another shape; those of the head only if it is needed.
    """
    if find_adapter(name) is not None:
        model, processor = load(name, image_size)
        return (model if auto_class is AutoModelForImageClassification else model.base_model), processor
    config: Any = settings.get("config") or read_config(name)
    is_ours = isinstance(config, HfVisionConfig)
    headless = [saved for saved in config.architectures or () if not saved.endswith("ForImageClassification")]
    if needs_head and is_ours and headless:
        raise ValueError(f"{name} has no classification head: it is an {headless[0]}")
    size = {} if image_size is None or is_ours else {"image_size": image_size}
    pair: Any = auto_class.from_pretrained(name, output_loading_info=True, trust_remote_code=False, **size, **settings)
    model, info = pair
    keys = [str(key) for key in (*info["missing_keys"], *info["mismatched_keys"])]
    if wrong := [key for key in keys if needs_head or "classifier" not in key]:
        raise ValueError(f"{name} has weights that are missing or have another shape: {', '.join(wrong)}")
    if image_size is not None and is_ours:
        model.set_image_size(image_size)
    processor = load_processor(name)
    if processor is None and not is_ours:
        raise ValueError(f"{name} has no image processor (preprocessor_config.json)")
    processor = processor or make_processor(name, model.config, {})
    sync_processor_size(model, processor, name, is_requested=image_size is not None)
    return model, processor


def read_config(name: str) -> Any:
    check_model_path(name)
    with explain_missing_folder(name):
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    check_attention(config._attn_implementation)
    return config


def check_supports_patch_sizes(model: Any, patch_sizes: Any) -> None:
    """Raise ValueError if a model does not support other patch sizes."""
    if not isinstance(model.config, HfViTConfig):
        raise ValueError(
            f"cannot set the patch size of {type(model).__name__} to {patch_sizes}: expected an hf_vit ViT"
        )
