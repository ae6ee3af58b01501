"""From a model to a folder that transformers loads as its own `vit` or `bit`, without this package."""

import os

import transformers

from ...files.output import new_folder
from ...models.configuration_hf_bit import HfBiTConfig
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig, as_pair
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel, numbers_of
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel, HfViTPreTrainedModel
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...models.upstream_bit import BEGINNINGS
from ...models.upstream_bit import SHARED_SETTINGS as BIT_SETTINGS
from ...models.upstream_vit import SHARED_SETTINGS
from ..building import variants_of_the_paper
from ..rules import ConversionError
from ..timm.writing import BIT_NUMBERS


def export_transformers(
    model: HfViTPreTrainedModel, folder: str | os.PathLike, processor=None, overwrite: bool = False
) -> None:
    """Write a model as transformers' `ViTForImageClassification`, or `ViTModel` where it has no head; BiT as `Bit...`.

    Masked patch prediction of pixels is its `ViTForMaskedImageModeling`.

    Its GELU and epsilon are in the config.json, so that the logits are the same.

    Args:
        model: with a class token and learned position embeddings; a hybrid has no counterpart in transformers 5.
        folder: to write; it appears when it is complete.
        processor: an `HfViTImageProcessor`, of which size, mean and deviation are written too. The pixels of
            transformers' own processor differ from it by what is between two ways of resizing.
        overwrite: whether `folder` may be replaced.

    Raises:
        ConversionError: transformers has no such model.
        FileExistsError: `folder` exists and may not be overwritten.
    """
    has_head = model.base_model is not model
    if isinstance(model, HfBiTModel | HfBiTForImageClassification):
        theirs = _their_bit(model, has_head)
    elif isinstance(model, HfViTModel | HfViTForImageClassification):
        _check_expressible(model.config, has_head)
        theirs = _their_model(model, has_head)
        theirs.load_state_dict(model.state_dict(), assign=True)
    elif isinstance(model, HfViTForMaskedPatchPrediction):
        _check_expressible(model.config, has_head)
        theirs = _their_masked_image_model(model)
    else:
        raise ConversionError(f"{type(model).__name__} has no counterpart in transformers; convert its encoder")
    with new_folder(folder, overwrite) as temporary:
        theirs.save_pretrained(temporary)
        if processor is not None:
            _their_processor(model.config, processor).save_pretrained(temporary)


def _check_expressible(config: HfViTConfig, has_head: bool) -> None:
    problems = variants_of_the_paper(config)
    if isinstance(config, HfViTHybridConfig):
        problems.append("ViT behind a ResNet")
    if config.pooling != "cls" or not config.use_cls_token or config.norm_after_pooling:
        problems.append(f"pooling {config.pooling!r}, or ViT without a class token")
    if config.position_embedding_type in ("sincos2d", "none"):
        problems.append(f"position embeddings of type {config.position_embedding_type}")
    if has_head and config.representation_size is not None:
        problems.append("pre-logits layer in front of a classifier")
    if problems:
        raise ConversionError(f"transformers has no {', no '.join(problems)}")


def _their_model(model: HfViTPreTrainedModel, has_head: bool) -> transformers.PreTrainedModel:
    config = _their_config(model, pooler_output_size=model.config.representation_size)
    if has_head:
        return transformers.ViTForImageClassification(config)
    return transformers.ViTModel(config, add_pooling_layer=model.config.representation_size is not None)


def _their_masked_image_model(model: HfViTForMaskedPatchPrediction) -> transformers.PreTrainedModel:
    """Weights included; see `transformers_reading` for the decoder."""
    target, patch_size, (rows, columns) = model.config.patch_target, model.config.patch_size, model.config.grid_size
    if target != "pixels":
        raise ConversionError(f"transformers' masked image model predicts pixels, not patch_target {target!r}")
    if rows != columns or not isinstance(patch_size, int):
        raise ConversionError(f"transformers' masked image model has square grids, not {rows} x {columns} patches")
    theirs = transformers.ViTForMaskedImageModeling(_their_config(model, encoder_stride=patch_size))
    weights = model.state_dict()
    weights["vit.embeddings.mask_token"] = weights.pop("mask_token")
    weights["decoder.0.weight"] = weights.pop("predictor.weight")[:, :, None, None]
    weights["decoder.0.bias"] = weights.pop("predictor.bias")
    theirs.load_state_dict(weights, assign=True)
    return theirs


def _their_config(model: HfViTPreTrainedModel, **settings) -> transformers.ViTConfig:
    return transformers.ViTConfig(
        **{name: getattr(model.config, name) for name in SHARED_SETTINGS},
        **settings,
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        dtype=model.dtype,
    )


def _their_bit(model: HfViTPreTrainedModel, has_head: bool) -> transformers.PreTrainedModel:
    """Weights included; width_factor stays 1, since transformers widens with it the stages alone."""
    config: HfBiTConfig = model.config  # pyright: ignore[reportAssignmentType]
    is_same = config.padding == "same"
    has_padding = is_same or config.layer_type == "preactivation"
    if not has_padding or numbers_of(config)._replace(padding="fixed") != BIT_NUMBERS:
        raise ConversionError(f"transformers has no {config.layer_type} ResNet with {numbers_of(config)}")
    settings = {name: getattr(config, name) for name in BIT_SETTINGS}
    theirs = (transformers.BitForImageClassification if has_head else transformers.BitModel)(
        transformers.BitConfig(
            **settings,
            hidden_sizes=config.hidden_sizes,
            global_padding="SAME" if is_same else None,
            embedding_dynamic_padding=is_same,
            id2label=config.id2label,
            label2id=config.label2id,
            dtype=model.dtype,
        )
    )
    theirs.load_state_dict({_their_bit_name(name): array for name, array in model.state_dict().items()}, assign=True)
    return theirs


def _their_bit_name(name: str) -> str:
    prefix = "bit." if name.startswith("bit.") else ""
    own = name.removeprefix(prefix)
    beginning = next((ours for ours in BEGINNINGS if own.startswith(ours)), "")
    return prefix + BEGINNINGS.get(beginning, "") + own.removeprefix(beginning)


def _their_processor(config: HfViTConfig | HfBiTConfig, processor) -> transformers.ViTImageProcessorPil:
    height, width = as_pair(config.image_size)
    return transformers.ViTImageProcessorPil(  # the one that needs no torchvision; it is saved as ViTImageProcessor
        size={"height": height, "width": width},
        resample=2,
        rescale_factor=processor.rescale_factor,
        image_mean=processor.image_mean,
        image_std=processor.image_std,
    )
