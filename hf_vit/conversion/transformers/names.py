"""transformers' own `vit`, `vit_mae`, `vit-hybrid`, `bit` and `siglip_vision_model`: settings and names in ours."""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import transformers
from transformers.configuration_utils import PreTrainedConfig

from ...models.image_processing_hf_vit import HfViTImageProcessor
from ..tables import IMAGENET, TIMM_NUMBERS


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
# Field of config.json and preprocessor_config.json that transformers keeps and ignores. In a config.json: fields of our
# configuration ("config"), the "source" of the weights, and what the nearest preprocessing costs ("preprocessing").
OWN_FIELD = "hf_vit"
# AutoModel gives every ViT a pooler, with random weights if there are none. One with the identity as its weight and
# this activation returns the class token.
NO_POOLER = {"pooler_act": "linear"}
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


def describe_cost(settings: Mapping[str, Any]) -> str:
    """Describe what the image processor of a folder for transformers costs, from its config.json; "" if it has none."""
    own = settings.get(OWN_FIELD) or {}
    if "preprocessing" not in own:
        return ""
    cost = own["preprocessing"]
    if not cost:
        return "the difference between its preprocessing for transformers and the exact one was not measured"
    text = (
        f"its preprocessing for transformers differs from the exact one by {cost['mean_levels']:.2f} of 255 levels on "
        f"average and {cost['max_levels']:.0f} at most, on {cost['images']} image{'s' * (cost['images'] != 1)}"
    )
    if "changed_predictions" in cost:
        return f"{text}; {cost['changed_predictions']} of {cost['images']} predictions change"
    return f"{text}; the lowest cosine similarity of the embeddings is {cost['min_similarity']:.4f}"


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
    padding, is_dynamic = str(bit.get("global_padding")).upper(), bool(bit.get("embedding_dynamic_padding"))
    return {"global_padding": padding, "embedding_dynamic_padding": is_dynamic}


def _refuse_others(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that has another value than the only supported one."""
    for name, value in expected.items():
        if settings.get(name, value) != value:
            raise ValueError(f"cannot read this model: {name} is {settings[name]!r} (expected {value!r})")


def nearest_processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessor_config.json of transformers' image processor that is nearest to ours.

    It is a ViTImageProcessor, which squashes images; or, where ours crops, a BitImageProcessor, because
    ViTImageProcessor has no crop before transformers 5. Both resize with Pillow's filters, with antialiasing, and
    round to integers.

    Args:
        settings: settings of an `HfViTImageProcessor`.
    """
    crops = settings["do_center_crop"]
    return {
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_resize": settings["do_resize"],
        "size": settings["size"],
        "resample": settings["resample"] if isinstance(settings["resample"], int) else 2,  # area is near to bilinear
        **({"do_center_crop": True, "crop_size": settings["crop_size"]} if crops else {}),
        "do_rescale": settings["do_rescale"],
        "rescale_factor": settings["rescale_factor"],
        "do_normalize": settings["do_normalize"],
        "image_mean": settings["image_mean"],
        "image_std": settings["image_std"],
        "do_convert_rgb": settings["do_convert_rgb"] and settings["num_channels"] in (None, 3),
    }


def translate_processor(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a preprocessor_config.json of transformers' own models into arguments of `HfViTImageProcessor`."""
    own = stored.get(OWN_FIELD)  # all settings of our image processor
    if own and all(stored.get(name) == value for name, value in nearest_processor(own).items()):
        return own  # else transformers' settings were changed later
    if "Hybrid" in str(stored.get("image_processor_type") or stored.get("feature_extractor_type")):
        # the defaults of transformers 4.57's ViTHybridImageProcessor, where they differ from ViT's
        stored = {"resample": 3, "do_center_crop": True, "crop_size": 224, **stored}
    known = HfViTImageProcessor.valid_kwargs.__annotations__
    found = {name: value for name, value in stored.items() if name in known and value is not None}
    if not found.get("do_center_crop"):
        found.pop("crop_size", None)
    return {"preset": "transformers", **found}
