"""Conversion of our model to transformers' own `vit`, `bit` or `siglip_vision_model`, in a folder for all readers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from ...files.output import write_json
from ...models.configuration_hf_bit import HfBiTConfig
from ...models.configuration_hf_vision import as_pair
from ...models.image_processing_hf_vit import HfViTImageProcessor
from ...models.image_reading import read_image
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...models.pretrained import CONVERSION_RECORD, HfVisionPreTrainedModel
from ..source import build_config, has_head, record_of
from .names import (
    BIT_SETTINGS,
    NO_POOLER,
    SIGLIP_SETTINGS,
    SURPLUS,
    VIT_SETTINGS,
    nearest_processor,
    our_name,
    surplus_of,
    translate_settings,
)

_SENTENCES = "sentence_transformers"
_DESCRIBES_FILES = ("_name_or_path", "architectures", "dtype", "model_type", "transformers_version")


def save_for_transformers(
    model: HfVisionPreTrainedModel, processor: Any, folder: Path, images: Iterable[Any] = ()
) -> None:
    """Write a model for every reader of transformers' own classes, into an existing folder.

    What these classes do not have (our settings, the exact preprocessing, the source) stands in a field that they keep
    and ignore, so that `hf_vit.load` gives the same model and image processor back.

    Args:
        images: images to measure on what transformers' preprocessing costs, in any form that our processor takes.
    """
    theirs, record = their_model(model), record_of(model)
    restored = build_config(translate_settings(theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}))
    ours, again = model.config.to_dict(), restored.to_dict()
    surplus: dict[str, Any] = {
        "config": {
            name: value
            for name, value in ours.items()
            if name not in _DESCRIBES_FILES and again.get(name) != value and not hasattr(theirs.config, name)
        },
        "source": {name: record[name] for name in ("source", "sha256", "fingerprint") if name in record},
    }
    if isinstance(processor, HfViTImageProcessor):
        own = processor.to_dict()
        nearest = nearest_processor(processor.settings())
        write_json(folder / "preprocessor_config.json", {**nearest, SURPLUS: own})
        surplus["preprocessing"] = preprocessing_cost(theirs, processor, _load_nearest(folder), images)
    elif processor is not None:
        processor.save_pretrained(folder)
    setattr(theirs.config, SURPLUS, surplus)
    theirs.save_pretrained(folder)
    if record:
        write_json(folder / CONVERSION_RECORD, record)
    if not isinstance(model.config, HfBiTConfig) and not isinstance(model, HfViTForMaskedPatchPrediction):
        _write_sentence_transformers(folder, has_head(model), model.config.hidden_size)


def _write_sentence_transformers(folder: Path, classifies: bool, width: int) -> None:
    """Write the files by which `SentenceTransformer(folder)` (version 6) pools images as the model does.

    An encoder has its own pooler; a classifier's encoder is loaded without one, so that the class token is taken.
    """
    output = "last_hidden_state" if classifies else "pooler_output"
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{_SENTENCES}.base.modules.transformer.Transformer"}]
    if classifies:
        pooling = f"{_SENTENCES}.sentence_transformer.modules.pooling.Pooling"
        modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": pooling})
        (folder / "1_Pooling").mkdir()
        settings = {"embedding_dimension": width, "pooling_mode": "cls", "include_prompt": True}
        write_json(folder / "1_Pooling" / "config.json", settings)
    write_json(folder / "modules.json", modules)
    reading = {
        "transformer_task": "feature-extraction",
        "modality_config": {"image": {"method": "forward", "method_output_name": output}},
        "module_output_name": "token_embeddings" if classifies else "sentence_embedding",
    }
    write_json(folder / "sentence_bert_config.json", reading)


def _load_nearest(folder: Path) -> Any:
    """Load the image processor of a folder as a reader without torchvision does."""
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    return getattr(transformers, f"{settings['image_processor_type']}Pil").from_dict(settings)


def describe_cost(settings: Mapping[str, Any]) -> str:
    """Describe what the image processor of a folder for transformers costs, from its config.json; "" if it has none."""
    surplus = surplus_of(settings)
    if "preprocessing" not in surplus:
        return ""
    cost = surplus["preprocessing"]
    if not cost:
        return "how far its preprocessing for transformers is from the exact one was not measured"
    text = (
        f"its preprocessing for transformers differs from the exact one by {cost['mean_levels']:.2f} of 255 levels on "
        f"average and {cost['max_levels']:.0f} at most, on {cost['images']} image{'s' * (cost['images'] != 1)}"
    )
    if "changed_predictions" in cost:
        return f"{text}; {cost['changed_predictions']} of {cost['images']} predictions change"
    return f"{text}; the lowest cosine similarity of the embeddings is {cost['min_similarity']:.4f}"


def preprocessing_cost(theirs: Any, processor: Any, nearest: Any, images: Iterable[Any]) -> dict[str, Any]:
    """Measure how transformers' image processor differs from ours: in levels from 0 to 255, and in predictions."""
    levels, changed, similarities = [], 0, []
    levels_of_one = np.reshape(processor.image_std, (-1, 1, 1)) / processor.rescale_factor
    with torch.no_grad():
        for image in images:
            pixels = read_image(image, processor.num_channels or 3, processor.background).byte()
            image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())
            pair = [np.asarray(one(image).pixel_values[0], dtype=np.float32) for one in (processor, nearest)]
            levels.append(np.abs(pair[0] - pair[1]) * levels_of_one)
            output = theirs(torch.from_numpy(np.stack(pair)))
            if (logits := getattr(output, "logits", None)) is not None:
                changed += int(logits[0].argmax() != logits[1].argmax())
            elif (pooled := getattr(output, "pooler_output", None)) is not None:
                similarities.append(torch.cosine_similarity(*pooled.flatten(1), dim=0).item())
    if not levels:
        return {}
    found = {"images": len(levels), "mean_levels": float(np.mean([one.mean() for one in levels]))}
    found["max_levels"] = float(max(one.max() for one in levels))
    return found | ({"min_similarity": min(similarities)} if similarities else {"changed_predictions": changed})


def their_model(model: HfVisionPreTrainedModel) -> transformers.PreTrainedModel:
    """Build the model of transformers that computes the same."""
    weights = model.state_dict()
    if isinstance(model.config, HfBiTConfig):
        theirs = _their_bit(model, model.config)
        weights = {name: weights[our_name(name, "bit")] for name in theirs.state_dict()}
    elif model.config.pooling == "map":
        theirs = _their_siglip(model)
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"pooler.map.{name}_proj.{kind}") for name in "qkv"]
            weights[f"pooler.map.qkv_proj.{kind}"] = torch.cat(parts)
        positions = "embeddings.position_embeddings"
        weights[positions] = weights[positions][0]
        weights = {name: weights[our_name(name, theirs.config.model_type)] for name in theirs.state_dict()}
    elif isinstance(model, HfViTForMaskedPatchPrediction):
        theirs = transformers.ViTForMaskedImageModeling(_their_config(model, encoder_stride=model.config.patch_size))
        weights["vit.embeddings.mask_token"] = weights.pop("mask_token")
        weights["decoder.0.weight"] = weights.pop("predictor.weight")[:, :, None, None]
        weights["decoder.0.bias"] = weights.pop("predictor.bias")
    elif has_head(model):
        theirs = transformers.ViTForImageClassification(_their_config(model))
    else:
        size = model.config.representation_size
        pooler = {"pooler_output_size": size} if size is not None else NO_POOLER
        theirs = transformers.ViTModel(_their_config(model, **pooler))
        if size is None:
            width = model.config.hidden_size
            weights["pooler.dense.weight"] = torch.eye(width, dtype=model.dtype)
            weights["pooler.dense.bias"] = torch.zeros(width, dtype=model.dtype)
    theirs.load_state_dict(weights, assign=True)
    return theirs


def _their_config(model: HfVisionPreTrainedModel, **settings: Any) -> transformers.ViTConfig:
    return transformers.ViTConfig(
        **{name: getattr(model.config, name) for name in VIT_SETTINGS},
        **settings,
        id2label=model.config.id2label,
        label2id=model.config.label2id,
        dtype=model.dtype,
    )


def _their_siglip(model: HfVisionPreTrainedModel) -> transformers.SiglipVisionModel:
    config = model.config
    sizes: dict[str, Any] = {name: as_pair(getattr(config, name))[0] for name in ("image_size", "patch_size")}
    return transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(
            **{name: getattr(config, name) for name in SIGLIP_SETTINGS} | sizes,
            attention_dropout=config.attention_probs_dropout_prob,
            dtype=model.dtype,
        )
    )


def _their_bit(model: HfVisionPreTrainedModel, config: HfBiTConfig) -> transformers.PreTrainedModel:
    """Build transformers' BiT; width_factor stays 1, because in transformers it widens only the stages."""
    is_same = config.padding == "same"
    return (transformers.BitForImageClassification if has_head(model) else transformers.BitModel)(
        transformers.BitConfig(
            **{name: getattr(config, name) for name in BIT_SETTINGS},
            hidden_sizes=config.hidden_sizes,
            global_padding="SAME" if is_same else None,
            embedding_dynamic_padding=is_same,
            id2label=config.id2label,
            label2id=config.label2id,
            dtype=model.dtype,
        )
    )
