"""Source of transformers' `vit` (PyTorch and Flax), `vit_mae`, `vit-hybrid`, `bit` and `siglip_vision_model`.

A folder that is written for transformers is read by its own classes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.nn.functional import pad
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from ..files.manifest import check_manifest
from ..files.output import write_json
from ..files.reading import read_image_processor
from ..files.readme import write_readme
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_processing_hf_vit import HfViTImageProcessor, add_jpeg_dct, record_of_original
from ..models.modeling_masked_patch_prediction import HfViTForMaskedPatchPrediction
from ..models.pretrained import CONVERSION_RECORD
from ..models.sizes import as_pair
from .checkpoint import Checkpoint, read_shards
from .image_processors import OWN_FIELD, beyond_pillow, nearest_processor, translate_processor
from .reading_back import read_transformers_back
from .source import (
    MODELS,
    PAPER_DEFAULTS,
    UNKNOWN_IMAGE_SIZE,
    ConvertOptions,
    Fields,
    Inferred,
    KeyMapping,
    Model,
    Source,
    build_config,
    has_head,
    record_of,
    unsupported_fields,
    with_reason,
)
from .tables import (
    IMAGENET,
    TIMM_NUMBERS,
    ConversionError,
    Rule,
    as_is,
    channels_first,
    check_arrays,
    check_values,
    transpose,
)

logger = logging.get_logger(__name__)

Weights = dict[str, torch.Tensor]

_POSITIONS = "embeddings.position_embeddings"
_PREFIX = re.compile(r"^(vit|bit)\.")
_SENTENCES = "sentence_transformers"
_DESCRIBES_FILES = ("_name_or_path", "architectures", "dtype", "model_type", "transformers_version")


def _shared(config_class: type[PreTrainedConfig], names: str) -> dict[str, Any]:
    """Return the settings of a model of transformers that have the same name here, with their defaults."""
    defaults = config_class()
    return {name: getattr(defaults, name) for name in names.split()}


_SIZES = "image_size patch_size num_channels"
_ENCODER = "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act"
VIT_SETTINGS = _shared(
    transformers.ViTConfig,
    f"{_ENCODER} hidden_dropout_prob attention_probs_dropout_prob initializer_range layer_norm_eps {_SIZES} qkv_bias",
)
SIGLIP_SETTINGS = _shared(transformers.SiglipVisionConfig, f"{_ENCODER} layer_norm_eps {_SIZES}")
BIT_SETTINGS = _shared(transformers.BitConfig, "num_channels embedding_size depths layer_type")
# AutoModel gives every ViT a pooler, with random weights if there are none. One with the identity as its weight and
# this activation returns the class token.
NO_POOLER: dict[str, Any] = {"pooler_act": "linear"}
# Settings of BiT of which only transformers' default is supported.
_FIXED_SETTINGS: dict[str, Any] = {"hidden_act": "relu", "num_groups": 32, "output_stride": 32, "drop_path_rate": 0.0}
BIT_NUMBERS: dict[str, Any] = {**TIMM_NUMBERS, "pool_padding": "zero"}  # BitMaxPool2d of modeling_bit.py
_PADDINGS: dict[str, dict[str, Any]] = {  # by our `padding`
    "same": {"global_padding": "SAME", "embedding_dynamic_padding": True},
    "fixed": {"global_padding": "NONE", "embedding_dynamic_padding": False},
}
# BitConfig of a hybrid: the values with which its backbone equals the original's stem.
_STEM_SETTINGS = {"layer_type": "bottleneck", "num_groups": 32, "width_factor": 1, "output_stride": 32}

# Names in files of transformers -> ours, as regular expressions. transformers 5 writes the names of version 4.
_STEM = r"embeddings\.patch_embeddings\.backbone\.bit\."
_VIT_NAMES = {
    r"encoder\.layer\.(\d+)\.": r"layers.\1.",
    r"(layers\.\d+)\.attention\.attention\.query\.": r"\1.attention.q_proj.",
    r"(layers\.\d+)\.attention\.attention\.key\.": r"\1.attention.k_proj.",
    r"(layers\.\d+)\.attention\.attention\.value\.": r"\1.attention.v_proj.",
    r"(layers\.\d+)\.attention\.output\.dense\.": r"\1.attention.o_proj.",
    r"(layers\.\d+)\.intermediate\.dense\.": r"\1.mlp.fc1.",
    r"(layers\.\d+)\.output\.dense\.": r"\1.mlp.fc2.",
    _STEM + r"embedder\.": r"embeddings.stem.",
    _STEM + r"encoder\.stages\.": r"embeddings.stem.stages.",
}
_BIT_NAMES = {
    r"embedder\.": r"resnet.",
    r"encoder\.stages\.": r"resnet.stages.",
    r"classifier\.1\.": r"classifier.",
}
_SIGLIP_NAMES = {
    r"^vision_model\.": "",
    r"^embeddings\.patch_embedding\.": "embeddings.patch_embeddings.projection.",
    r"^embeddings\.position_embedding\.weight": "embeddings.position_embeddings",
    r"^encoder\.layers\.": "layers.",
    r"\.layer_norm1\.": ".layernorm_before.",
    r"\.layer_norm2\.": ".layernorm_after.",
    r"\.self_attn\.out_proj\.": ".attention.o_proj.",
    r"\.self_attn\.": ".attention.",
    r"^post_layernorm\.": "layernorm.",
    r"^head\.attention\.out_proj\.": "pooler.map.o_proj.",
    r"^head\.attention\.in_proj_": "pooler.map.qkv_proj.",  # q, k and v are one array
    r"^head\.": "pooler.map.",
}


class TheirModel(NamedTuple):
    """A model of transformers.

    settings: its settings that have the same name here, with its defaults.
    names: their names of parameters -> ours.
    preprocessing: arguments of `HfViTImageProcessor` for a folder without image processor.
    """

    settings: dict[str, Any]
    names: dict[str, str]
    preprocessing: dict[str, Any]


# Parts of a checkpoint that the model of its config.json may lack, by our names: a classification head, a pooler, and
# what pre-training by masked patches adds.
_UNUSED = re.compile(r"^classifier\.|^(vit\.)?pooler\.|embeddings\.mask_token$|^decoder\.")
# By `model_type`. `vit` and `vit_mae` are models of transformers 5, `vit-hybrid` of transformers 4.57. Preprocessing is
# that of the preprocessor_config.json of the published google/vit-*, facebook/vit-mae-* and google/vit-hybrid-*; for
# bit, that of timm's evaluation of the same weights (2 is bilinear, 3 bicubic).
_CROPPED = {"preset": "timm", "crop_pct": 1.0}
THEIR_MODELS = {
    "vit": TheirModel(VIT_SETTINGS, _VIT_NAMES, {"preset": "transformers"}),
    "vit_mae": TheirModel(VIT_SETTINGS, _VIT_NAMES, {"preset": "transformers", **IMAGENET}),
    "vit-hybrid": TheirModel({**VIT_SETTINGS, "patch_size": 1}, _VIT_NAMES, _CROPPED),
    "bit": TheirModel(BIT_SETTINGS, _BIT_NAMES, {**_CROPPED, "resample": 2}),
    "siglip_vision_model": TheirModel(SIGLIP_SETTINGS, _SIGLIP_NAMES, {"preset": "transformers", "resample": 3}),
}


def is_classifier(settings: Mapping[str, Any]) -> bool:
    """Return whether a config.json of transformers is of a model with a classification head."""
    return any(name.endswith("ForImageClassification") for name in settings.get("architectures") or [])


def our_name(name: str, model_type: str) -> str:
    """Return our name of a parameter."""
    for pattern, ours in THEIR_MODELS[model_type].names.items():
        name = re.sub(pattern, ours, name)
    return name


def translate_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate a config.json into fields of our configuration.

    Raises:
        ValueError: a setting describes an architecture that hf_vit does not have.
    """
    general = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype", "num_labels", "quantization_config"}
    ours = {name: value for name, value in settings.items() if name in general and name != "architectures"}
    if "id2label" in settings:
        ours |= _translate_labels(settings)
    shared = THEIR_MODELS[settings["model_type"]].settings
    ours |= {name: settings.get(name, default) for name, default in shared.items()}
    own = (settings.get(OWN_FIELD) or {}).get("config", {})
    if settings["model_type"] == "bit":
        return {**ours, **_translate_bit(settings, ours), **BIT_NUMBERS, **own}
    ours |= {"pooling": "cls", "position_interpolation": "bicubic_aliased"}
    if settings["model_type"] == "siglip_vision_model":
        ours |= {"pooling": "map", "attention_probs_dropout_prob": settings.get("attention_dropout", 0.0)}
    if settings.get("architectures") == ["ViTModel"]:
        if settings.get("pooler_act", "tanh") not in ("tanh", NO_POOLER["pooler_act"]):
            raise ValueError(f"cannot read this ViT: pooler_act is {settings['pooler_act']!r} (expected 'tanh')")
        ours["representation_size"] = settings.get("pooler_output_size") or ours["hidden_size"]
    if settings["model_type"] == "vit-hybrid":
        ours |= _translate_stem(settings.get("backbone_config") or {})
    return {**ours, **own}


def _translate_labels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `id2label` and `label2id` with indices from 0 and text, as transformers reads nearly any; {} for null."""
    stored = settings["id2label"]
    if stored is None:
        return {"id2label": None, "label2id": None}
    indices = sorted(stored, key=int)
    names = {}
    for index, key in enumerate(indices):
        name = stored[key]
        names[index] = f"LABEL_{index}" if name is None else str(name)
    if names == {int(key): stored[key] for key in indices}:
        return {"id2label": names, "label2id": settings.get("label2id")}
    logger.warning(
        f"id2label of config.json was read as {dict(list(names.items())[:3])}, ...: indices from 0, and text"
    )
    return {"id2label": names, "label2id": {name: index for index, name in names.items()}}


def _translate_stem(bit: dict[str, Any]) -> dict[str, Any]:
    bit = {**BIT_SETTINGS, **bit}
    _refuse_others({**bit, **_padding_of(bit)}, {**_STEM_SETTINGS, **_PADDINGS["same"]})
    stages = [f"stage{number}" for number in range(1, len(bit["depths"]) + 1)]
    last = (bit.get("out_features") or stages[-1:])[-1]
    return {
        "stem_depths": bit["depths"][: stages.index(last) + 1],
        "stem_width": bit["embedding_size"],
        **TIMM_NUMBERS,
    }


def _translate_bit(settings: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    stated = _padding_of(settings)
    is_fixed = stated["global_padding"] == "NONE" and ours["layer_type"] == "preactivation"
    padding = "fixed" if is_fixed else "same"
    widened = [size * settings.get("width_factor", 1) for size in settings.get("hidden_sizes", [256, 512, 1024, 2048])]
    sizes = [4 * ours["embedding_size"] * 2**stage for stage in range(len(ours["depths"]))]
    stated = {**settings, **stated, "hidden_sizes * width_factor": widened}
    _refuse_others(stated, {**_FIXED_SETTINGS, **_PADDINGS[padding], "hidden_sizes * width_factor": sizes})
    return {"padding": padding}


def _padding_of(bit: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "global_padding": str(bit.get("global_padding")).upper(),
        "embedding_dynamic_padding": bool(bit.get("embedding_dynamic_padding")),
    }


def _refuse_others(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that has another value than the only supported one."""
    for name, value in expected.items():
        if settings.get(name, value) != value:
            raise ValueError(f"cannot read this model: {name} is {settings[name]!r} (expected {value!r})")


class Transformers(Source):
    """transformers' models; the config.json holds GELU and epsilons, so logits are equal in both directions."""

    format = "transformers"
    models = (*MODELS[HfViTConfig], HfViTForMaskedPatchPrediction, *MODELS[HfBiTConfig])

    def naming(self, checkpoint: Checkpoint, options: ConvertOptions) -> KeyMapping | None:
        model_type = checkpoint.settings.get("model_type")
        if model_type not in THEIR_MODELS:
            return None
        flax = {"framework": "flax"} if checkpoint.shapes else {}
        return KeyMapping({"names": "transformers", "model_type": model_type, **flax})

    def read(
        self, checkpoint: Checkpoint, naming: KeyMapping, options: ConvertOptions
    ) -> tuple[Model, Fields, dict[str, Any]]:
        settings = checkpoint.settings
        check_manifest(checkpoint.path.parent, {})
        weights = _read_weights(checkpoint)
        fields = translate_settings(settings)
        if not any("pooler.dense." in name for name in weights):  # the config.json does not tell
            fields.pop("representation_size", None)
        predicts_pixels = _predicts_pixels(settings, weights)
        if predicts_pixels:
            fields["patch_target"] = "pixels"
            _read_pixel_decoder(weights)
        config = build_config({**fields, **options.overrides})
        model_class = MODELS[type(config)][is_classifier(settings)]
        if predicts_pixels:
            model_class = HfViTForMaskedPatchPrediction
        lacks_class_position = getattr(config, "no_embed_class", False) and config.use_cls_token
        if lacks_class_position:
            config.no_embed_class = False  # until the position that transformers' model has is added to the token
        with torch.device("meta"):
            model: Any = model_class(config)
        unused = _load(model, weights, is_empty=options.without_weights)
        if lacks_class_position:
            model.drop_class_position()
        found = with_reason(fields, "stated in config.json")
        if settings["model_type"] == "bit":
            found = {"image_size": UNKNOWN_IMAGE_SIZE, **found}
        record = {
            "dialect": naming.dialect,
            "dtypes": [str(settings.get("dtype") or settings.get("torch_dtype") or "float32")],
            "inferred": fields,
            "overrides": options.overrides,
            "dropped": {},
            "other_parts": unused,
        }
        return model.eval(), found, record

    def preprocessing(self, checkpoint: Checkpoint, dialect: dict[str, Any]) -> Inferred:
        folder = checkpoint.path.parent
        stored = read_image_processor(folder)
        if stored is not None:
            settings = add_jpeg_dct(translate_processor(stored), record_of_original(folder))
            return Inferred(settings, "stated in preprocessor_config.json")
        usual = THEIR_MODELS[checkpoint.settings["model_type"]].preprocessing
        logger.warning(
            f"{folder} holds no image processor. One was made with the preset {usual['preset']!r}, that of the "
            "published models of this type. If the weights were trained with other values, set them on the processor."
        )
        reason = "there is no preprocessor_config.json; that of the published models"
        return Inferred(usual, reason, is_assumed=True)

    def unsupported(self, model: Model, dialect: str) -> list[str]:
        config: Any = model.config
        if isinstance(config, HfBiTConfig):
            paddings = ("fixed", "same") if config.layer_type == "preactivation" else ("same",)
            return unsupported_fields(config, {"padding": paddings}, BIT_NUMBERS | {"spatial_mixing": "convolution"})
        fixed = PAPER_DEFAULTS | {"model_type": HfViTConfig.model_type, "projection_dim": None}
        fixed |= {"norm_after_pooling": False, "position_embedding_type": "learned"}
        if config.pooling == "map" and not has_head(model):  # a SigLIP tower, of square images
            fixed |= {"use_cls_token": False, "representation_size": None, "qkv_bias": True, "hidden_dropout_prob": 0}
            fixed |= _squares(config, "image_size", "patch_size")
            return unsupported_fields(config, {}, fixed)
        fixed |= {"pooling": "cls", "use_cls_token": True}
        if has_head(model):
            fixed["representation_size"] = None
        if isinstance(model, HfViTForMaskedPatchPrediction):  # which predicts the pixels of square grids
            fixed |= {"patch_target": "pixels", **_squares(config, "patch_size")}
            fixed["grid_size"] = config.grid_size[:1] * 2
        return unsupported_fields(config, {}, fixed)

    def write(self, model: Model, path: Path, dialect: str, processor: Any) -> Any:
        save_for_transformers(model, processor, path)


def _squares(config: Any, *names: str) -> dict[str, Any]:
    """Return the only value that a format without rectangles can store, for each size of a configuration."""
    values = {}
    for name in names:
        height, width = as_pair(getattr(config, name))
        values[name] = getattr(config, name) if height == width else height
    return values


def _read_weights(checkpoint: Checkpoint) -> Weights:
    """Read the weights of a folder under our names."""
    model_type = checkpoint.settings["model_type"]
    stored = _read_flax(checkpoint) if checkpoint.shapes else read_shards(checkpoint.path)
    weights = {our_name(name, model_type): array for name, array in stored.items()}
    if model_type == "siglip_vision_model":
        _read_siglip(weights)
    if checkpoint.settings.get("pooler_act") == NO_POOLER["pooler_act"]:
        weight = weights.pop("pooler.dense.weight")
        bias = weights.pop("pooler.dense.bias")
        if bias.any() or not torch.equal(weight, torch.eye(*weight.shape, dtype=weight.dtype)):
            raise ValueError(f"cannot read this ViT: pooler_act is {NO_POOLER['pooler_act']!r} (expected 'tanh')")
    return weights


def _read_flax(checkpoint: Checkpoint) -> Weights:
    """Read weights of Flax (modeling_flax_vit.py, transformers 4.44) in PyTorch's names and layout."""
    weights = {}
    for stored_name in checkpoint.shapes:
        array = checkpoint.read(stored_name)
        name = stored_name.replace("/", ".").replace(".scale", ".weight")
        if name.endswith(".kernel"):
            layout = transpose if array.ndim == 2 else channels_first
            array = layout.to_ours(array)
        weights[name.replace(".kernel", ".weight")] = array.contiguous()
    return weights


def _load(model: Model, weights: Weights, is_empty: bool) -> list[str]:
    """Load weights into a model on the meta device; return the names of those that it does not have.

    Args:
        model: the model.
        weights: under our names, with or without the prefix of the encoder.
        is_empty: check names and shapes only; the model stays on the meta device.

    Raises:
        ConversionError: weights are missing, unknown, of the wrong shape or not finite.
    """
    parameters = model.state_dict()
    names = {_PREFIX.sub("", name): name for name in parameters}
    weights = {names.get(_PREFIX.sub("", name), name): array for name, array in weights.items()}
    unused = sorted(name for name in weights.keys() - parameters if _UNUSED.search(name))
    for name in unused:
        del weights[name]
    head = weights.get("classifier.weight")
    if head is not None and len(head) != model.config.num_labels:
        raise ConversionError(f"its head has {len(head)} classes, and its config.json names {model.config.num_labels}")
    shapes = {name: tuple(array.shape) for name, array in weights.items()}
    check_arrays([Rule(name, name, as_is) for name in parameters], shapes, parameters)
    if is_empty:
        return unused
    problems = [problem for name, array in weights.items() for problem in check_values(name, array)]
    if problems:
        raise ConversionError("; ".join(problems))
    model.load_state_dict({name: array.float() for name, array in weights.items()}, assign=True)
    return unused


# Arrays that have another form in transformers, in both directions; each function changes the weights, which have our
# names.


def _read_siglip(weights: Weights) -> None:
    """Split the pooling head's queries, keys and values, which are one array; give positions a batch axis."""
    weights[_POSITIONS] = weights[_POSITIONS][None]  # (1, patches, hidden_size)
    for kind in ("weight", "bias"):
        arrays = weights.pop(f"pooler.map.qkv_proj.{kind}").chunk(3)
        for name, array in zip("qkv", arrays, strict=True):
            weights[f"pooler.map.{name}_proj.{kind}"] = array


def _write_siglip(weights: Weights) -> None:
    weights[_POSITIONS] = weights[_POSITIONS][0]
    for kind in ("weight", "bias"):
        arrays = [weights.pop(f"pooler.map.{name}_proj.{kind}") for name in "qkv"]
        weights[f"pooler.map.qkv_proj.{kind}"] = torch.cat(arrays)


def _predicts_pixels(settings: Mapping[str, Any], weights: Weights) -> bool:
    """Return whether the decoder, a 1 x 1 convolution and PixelShuffle, is our linear layer; MAE's is a Transformer."""
    return (
        settings.get("architectures") == ["ViTForMaskedImageModeling"]
        and "decoder.0.weight" in weights
        and settings.get("patch_size", 16) == settings.get("encoder_stride", 16)
    )


def _read_pixel_decoder(weights: Weights) -> None:
    weights["mask_token"] = weights.pop("vit.embeddings.mask_token")
    weights["predictor.weight"] = weights.pop("decoder.0.weight").flatten(1)
    weights["predictor.bias"] = weights.pop("decoder.0.bias")


def _write_pixel_decoder(weights: Weights) -> None:
    weights["vit.embeddings.mask_token"] = weights.pop("mask_token")
    weights["decoder.0.weight"] = weights.pop("predictor.weight")[:, :, None, None]
    weights["decoder.0.bias"] = weights.pop("predictor.bias")


def save_for_transformers(model: Model, processor: Any, folder: Path) -> None:
    """Write a model for every reader of transformers' own classes, into an existing folder.

    Settings that these classes do not have (ours, the exact preprocessing, the source) are in a field that they keep
    and ignore, so that `hf_vit.load` gives the same model and image processor back.
    """
    theirs = _their_model(model)
    record = record_of(model)
    written = {**theirs.config.to_dict(), "architectures": [type(theirs).__name__]}
    restored = build_config(translate_settings(written)).to_dict()
    lost = {}
    for name, value in model.config.to_dict().items():
        if name not in _DESCRIBES_FILES and restored.get(name) != value and not hasattr(theirs.config, name):
            lost[name] = value
    source = {name: record[name] for name in ("source", "sha256", "fingerprint") if name in record}
    setattr(theirs.config, OWN_FIELD, {"config": lost, "source": source})
    if isinstance(processor, HfViTImageProcessor):
        nearest = nearest_processor(processor.settings())
        differences = beyond_pillow(processor.settings(), rounds_half=False)
        if differences:
            named = "; ".join(differences)
            logger.warning(
                f"Pixel values of transformers will differ, because it lacks {named}; docs/hub.md has the cost for "
                "each preset, and hf_vit.load the exact preprocessing"
            )
        write_json(folder / "preprocessor_config.json", {**nearest, OWN_FIELD: processor.to_dict()})
    elif processor is not None:
        processor.save_pretrained(folder)
    theirs.save_pretrained(folder)
    write_readme(folder, theirs.config.model_type, type(theirs).__name__)
    if record:
        write_json(folder / CONVERSION_RECORD, record)
    if not isinstance(model.config, HfBiTConfig) and not isinstance(model, HfViTForMaskedPatchPrediction):
        _write_sentence_transformers(folder, has_head(model), model.config.hidden_size)
    read_transformers_back(folder, model)


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


def _their_model(model: Model) -> transformers.PreTrainedModel:
    """Build the model of transformers that computes the same."""
    config: Any = model.config
    weights = dict(model.state_dict())
    if getattr(config, "no_embed_class", False) and config.use_cls_token:
        logger.warning("transformers trains a position of the class token, of which this model has none; it is zero")
        positions = next(name for name in weights if name.endswith(_POSITIONS))
        weights[positions] = pad(weights[positions], (0, 0, 1, 0))  # (1, 1 + patches, hidden_size)
    if isinstance(config, HfBiTConfig):
        theirs = _their_bit(model)
    elif config.pooling == "map":
        theirs = _their_siglip(model)
        _write_siglip(weights)
    else:
        theirs = _their_vit(model, weights)
    model_type = theirs.config.model_type
    theirs.load_state_dict({name: weights[our_name(name, model_type)] for name in theirs.state_dict()}, assign=True)
    return theirs


def _common_settings(model: Model, names: Iterable[str]) -> dict[str, Any]:
    """Return settings with one name and meaning in both configurations: those of `names`, the classes, the dtype."""
    settings = {name: getattr(model.config, name) for name in (*names, "id2label", "label2id")}
    settings["problem_type"] = model.config.problem_type  # decides between softmax and sigmoid
    settings["dtype"] = model.dtype
    return settings


def _their_bit(model: Model) -> transformers.PreTrainedModel:
    config: Any = model.config
    is_same = config.padding == "same"
    their_config = transformers.BitConfig(  # width_factor stays 1: in transformers it widens only the stages
        **_common_settings(model, BIT_SETTINGS),
        hidden_sizes=config.hidden_sizes,
        global_padding="SAME" if is_same else None,
        embedding_dynamic_padding=is_same,
    )
    if has_head(model):
        return transformers.BitForImageClassification(their_config)
    return transformers.BitModel(their_config)


def _their_siglip(model: Model) -> transformers.PreTrainedModel:
    config: Any = model.config
    settings = {name: getattr(config, name) for name in SIGLIP_SETTINGS}
    settings["image_size"] = as_pair(config.image_size)[0]
    settings["patch_size"] = as_pair(config.patch_size)[0]
    settings["attention_dropout"] = config.attention_probs_dropout_prob
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**settings, dtype=model.dtype))


def _their_vit(model: Model, weights: Weights) -> transformers.PreTrainedModel:
    config: Any = model.config
    settings = _common_settings(model, VIT_SETTINGS)
    if isinstance(model, HfViTForMaskedPatchPrediction):
        _write_pixel_decoder(weights)
        stride = as_pair(config.patch_size)[0]
        return transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**settings, encoder_stride=stride))
    if has_head(model):
        return transformers.ViTForImageClassification(transformers.ViTConfig(**settings))
    if config.representation_size is not None:
        width = config.representation_size
        return transformers.ViTModel(transformers.ViTConfig(**settings, pooler_output_size=width))
    weights["pooler.dense.weight"] = torch.eye(config.hidden_size, dtype=model.dtype)
    weights["pooler.dense.bias"] = torch.zeros(config.hidden_size, dtype=model.dtype)
    return transformers.ViTModel(transformers.ViTConfig(**settings, **NO_POOLER))
