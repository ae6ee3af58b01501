"""Source of transformers' `vit` (PyTorch and Flax), `vit_mae`, `vit-hybrid`, `bit` and `siglip_vision_model`.

The tables of settings and names are in `names`. A folder that is written for transformers is read by its own classes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.utils import logging

from ...files.output import new_folder, write_json
from ...files.reading import read_json_object
from ...models.configuration_hf_bit import HfBiTConfig
from ...models.configuration_hf_vit import HfViTConfig, as_pair
from ...models.image_processing_hf_vit import HfViTImageProcessor
from ...models.image_reading import read_image
from ...models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ...models.pretrained import CONVERSION_RECORD
from ...models.utils import check_manifest
from ..checkpoint import Checkpoint, read_shards
from ..source import (
    MODELS,
    PLAIN,
    UNKNOWN_IMAGE_SIZE,
    Fields,
    Inferred,
    Model,
    Naming,
    Request,
    Source,
    build_config,
    has_head,
    lacking,
    record_of,
    with_reason,
)
from ..tables import ConversionError, channels_first, check_values
from .names import (
    BIT_NUMBERS,
    BIT_SETTINGS,
    NO_POOLER,
    OWN_FIELD,
    SIGLIP_SETTINGS,
    THEIR_MODELS,
    VIT_SETTINGS,
    is_classifier,
    nearest_processor,
    our_name,
    translate_processor,
    translate_settings,
)

logger = logging.get_logger(__name__)

_MASKED_IMAGE_MODEL = "ViTForMaskedImageModeling"
_POSITIONS = "embeddings.position_embeddings"
_SENTENCES = "sentence_transformers"
_DESCRIBES_FILES = ("_name_or_path", "architectures", "dtype", "model_type", "transformers_version")


class Transformers(Source):
    """transformers' models; the config.json holds GELU and epsilons, so logits are equal in both directions."""

    format = "transformers"
    models = (*MODELS[HfViTConfig], HfViTForMaskedPatchPrediction, *MODELS[HfBiTConfig])

    def naming(self, checkpoint: Checkpoint, request: Request) -> Naming | None:
        model_type = checkpoint.settings.get("model_type")
        if model_type not in THEIR_MODELS:
            return None
        flax = {"framework": "flax"} if checkpoint.shapes else {}
        return Naming({"names": "transformers", "model_type": model_type, **flax})

    def read(self, checkpoint: Checkpoint, naming: Naming, request: Request) -> tuple[Model, Fields, dict[str, Any]]:
        settings = checkpoint.settings
        fields = translate_settings(settings)
        check_manifest(checkpoint.path.parent, {})
        weights = _read_weights(checkpoint)
        if not any("pooler.dense." in name for name in weights):  # the config.json does not tell
            fields.pop("representation_size", None)
        # MAE's decoder is a Transformer; this one, a 1 x 1 convolution and PixelShuffle, is our linear layer
        is_simple = settings.get("architectures") == [_MASKED_IMAGE_MODEL] and "decoder.0.weight" in weights
        predicts = is_simple and settings.get("patch_size", 16) == settings.get("encoder_stride", 16)
        if predicts:
            fields["patch_target"] = "pixels"
            weights["mask_token"] = weights.pop("vit.embeddings.mask_token")
            weights["predictor.weight"] = weights.pop("decoder.0.weight").flatten(1)
            weights["predictor.bias"] = weights.pop("decoder.0.bias")
        skipped = {name for name in weights if name.endswith("embeddings.mask_token") or name.startswith("decoder.")}
        config = build_config({**fields, **request.overrides})
        model_class = HfViTForMaskedPatchPrediction if predicts else MODELS[type(config)][is_classifier(settings)]
        model, info = model_class.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            None,
            config=config,
            state_dict={name: array for name, array in weights.items() if name not in skipped},
            output_loading_info=True,
            dtype=torch.float32,
            **({"device_map": "meta"} if request.without_weights else {}),
        )
        if info["missing_keys"] or info["mismatched_keys"]:
            raise ConversionError("its weights lack the head that its config.json describes")
        arrays = {} if model.device.type == "meta" else model.state_dict()
        if problems := [text for name, array in arrays.items() for text in check_values(name, array)]:
            raise ConversionError("; ".join(problems))
        found = with_reason(fields, "stated in config.json")
        if settings["model_type"] == "bit":
            found = {"image_size": UNKNOWN_IMAGE_SIZE, **found}
        record = {
            "dialect": naming.dialect,
            "dtypes": [str(settings.get("dtype") or settings.get("torch_dtype") or "float32")],
            "inferred": fields,
            "overrides": request.overrides,
            "left_out": {},
            "beside": sorted({*skipped, *info["unexpected_keys"]}),
        }
        return model.eval(), found, record

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        folder = checkpoint.path.parent
        file = folder / "preprocessor_config.json"
        if file.is_file():
            return Inferred(translate_processor(read_json_object(file)), "stated in preprocessor_config.json")
        usual = THEIR_MODELS[checkpoint.settings["model_type"]].preprocessing
        logger.warning(
            f"{folder} holds no image processor. One was made with the preset {usual['preset']!r}, that of the "
            "published models of this type. If the weights were trained with other values, set them on the processor."
        )
        reason = "there is no preprocessor_config.json; that of the published models"
        return Inferred(usual, reason, is_assumed=True)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        supported: dict[str, Any] = PLAIN | {"model_type": (HfViTConfig.model_type,), "projection_dim": (None,)}
        supported |= {"norm_after_pooling": (False,), "position_embedding_type": ("learned",)}
        if isinstance(config, HfBiTConfig):
            paddings = ("fixed", "same") if config.layer_type == "preactivation" else ("same",)
            supported = {name: (value,) for name, value in BIT_NUMBERS.items()} | {"padding": paddings}
            supported["spatial_mixing"] = ("convolution",)
        elif config.pooling == "map" and not has_head(model):  # a SigLIP tower, of square images
            supported |= {"use_cls_token": (False,), "representation_size": (None,), "qkv_bias": (True,)}
            supported |= {name: (as_pair(getattr(config, name))[0],) for name in ("image_size", "patch_size")}
            supported["hidden_dropout_prob"] = (0,)
        else:
            supported |= {"pooling": ("cls",), "use_cls_token": (True,)}
            if has_head(model):
                supported["representation_size"] = (None,)
            if isinstance(model, HfViTForMaskedPatchPrediction):  # which predicts the pixels of square grids
                supported |= {"patch_target": ("pixels",), "patch_size": (as_pair(config.patch_size)[0],)}
                supported["grid_size"] = (config.grid_size[:1] * 2,)
        return lacking(config, supported)

    def write(self, model: Model, path: Path, dialect: str, overwrite: bool, processor: Any, images: Any) -> Any:
        with new_folder(path, overwrite) as folder:
            save_for_transformers(model, processor, folder, images)
        return {}


def _read_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read the weights of a folder under our names; Flax's (modeling_flax_vit.py, transformers 4.44) in our layout."""
    if checkpoint.shapes:
        theirs = {}
        for name in checkpoint.shapes:
            array, name = checkpoint.read(name), name.replace("/", ".").replace(".scale", ".weight")
            if name.endswith(".kernel"):
                array = array.T if array.ndim == 2 else channels_first.to_ours(array)
            theirs[name.replace(".kernel", ".weight")] = array.contiguous()
    else:
        theirs = read_shards(checkpoint.path)
    model_type = checkpoint.settings["model_type"]
    weights = {our_name(name, model_type): array for name, array in theirs.items()}
    if model_type == "siglip_vision_model":
        weights[_POSITIONS] = weights[_POSITIONS][None]  # (1, patches, hidden_size)
        for kind in ("weight", "bias"):
            arrays = weights.pop(f"pooler.map.qkv_proj.{kind}").chunk(3)
            weights |= {f"pooler.map.{name}_proj.{kind}": array for name, array in zip("qkv", arrays, strict=True)}
    if checkpoint.settings.get("pooler_act") == NO_POOLER["pooler_act"]:
        weight, bias = weights.pop("pooler.dense.weight"), weights.pop("pooler.dense.bias")
        if bias.any() or not torch.equal(weight, torch.eye(*weight.shape, dtype=weight.dtype)):
            raise ValueError(f"cannot read this ViT: pooler_act is {NO_POOLER['pooler_act']!r} (expected 'tanh')")
    return weights


def save_for_transformers(model: Model, processor: Any, folder: Path, images: Iterable[Any] = ()) -> None:
    """Write a model for every reader of transformers' own classes, into an existing folder.

    Settings that these classes do not have (ours, the exact preprocessing, the source) are in a field that they keep
    and ignore, so that `hf_vit.load` gives the same model and image processor back.

    Args:
        images: images to measure on what transformers' preprocessing costs, in any form that our processor takes.
    """
    theirs, record = _their_model(model), record_of(model)
    restored = build_config(translate_settings(theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}))
    ours, again = model.config.to_dict(), restored.to_dict()
    own: dict[str, Any] = {
        "config": {
            name: value
            for name, value in ours.items()
            if name not in _DESCRIBES_FILES and again.get(name) != value and not hasattr(theirs.config, name)
        },
        "source": {name: record[name] for name in ("source", "sha256", "fingerprint") if name in record},
    }
    if isinstance(processor, HfViTImageProcessor):
        nearest = nearest_processor(processor.settings())
        write_json(folder / "preprocessor_config.json", {**nearest, OWN_FIELD: processor.to_dict()})
        without_torchvision = getattr(transformers, f"{nearest['image_processor_type']}Pil").from_dict(nearest)
        own["preprocessing"] = _preprocessing_cost(theirs, processor, without_torchvision, images)
    elif processor is not None:
        processor.save_pretrained(folder)
    setattr(theirs.config, OWN_FIELD, own)
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


def _preprocessing_cost(theirs: Any, processor: Any, nearest: Any, images: Iterable[Any]) -> dict[str, Any]:
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


def _their_model(model: Model) -> transformers.PreTrainedModel:
    """Build the model of transformers that computes the same."""
    config: Any = model.config
    weights, is_bare = model.state_dict(), not has_head(model)
    shared: dict[str, Any] = {"id2label": config.id2label, "label2id": config.label2id, "dtype": model.dtype}
    if isinstance(config, HfBiTConfig):
        is_same = config.padding == "same"
        their_config = transformers.BitConfig(  # width_factor stays 1: in transformers it widens only the stages
            **{name: getattr(config, name) for name in BIT_SETTINGS},
            **shared,
            hidden_sizes=config.hidden_sizes,
            global_padding="SAME" if is_same else None,
            embedding_dynamic_padding=is_same,
        )
        theirs = (transformers.BitModel if is_bare else transformers.BitForImageClassification)(their_config)
    elif config.pooling == "map":
        shared = {"dtype": model.dtype} | {name: getattr(config, name) for name in SIGLIP_SETTINGS}
        shared |= {name: as_pair(shared[name])[0] for name in ("image_size", "patch_size")}
        dropout = config.attention_probs_dropout_prob
        theirs = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**shared, attention_dropout=dropout))
        for kind in ("weight", "bias"):
            parts = [weights.pop(f"pooler.map.{name}_proj.{kind}") for name in "qkv"]
            weights[f"pooler.map.qkv_proj.{kind}"] = torch.cat(parts)
        weights[_POSITIONS] = weights[_POSITIONS][0]
    else:
        shared |= {name: getattr(config, name) for name in VIT_SETTINGS}
        their_class: Any = transformers.ViTForImageClassification
        if isinstance(model, HfViTForMaskedPatchPrediction):
            their_class, shared["encoder_stride"] = transformers.ViTForMaskedImageModeling, config.patch_size
            weights["vit.embeddings.mask_token"] = weights.pop("mask_token")
            weights["decoder.0.weight"] = weights.pop("predictor.weight")[:, :, None, None]
            weights["decoder.0.bias"] = weights.pop("predictor.bias")
        elif is_bare and config.representation_size is None:
            their_class, shared = transformers.ViTModel, shared | NO_POOLER
            weights["pooler.dense.weight"] = torch.eye(config.hidden_size, dtype=model.dtype)
            weights["pooler.dense.bias"] = torch.zeros(config.hidden_size, dtype=model.dtype)
        elif is_bare:
            their_class, shared["pooler_output_size"] = transformers.ViTModel, config.representation_size
        theirs = their_class(transformers.ViTConfig(**shared))
    model_type = theirs.config.model_type
    theirs.load_state_dict({name: weights[our_name(name, model_type)] for name in theirs.state_dict()}, assign=True)
    return theirs
