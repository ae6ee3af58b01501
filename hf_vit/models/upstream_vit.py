"""What the ViTs of transformers call their settings and weights, on disk, and what we call them.

`vit` and `vit_mae` are models of transformers 5; `vit-hybrid` was one of transformers 4.
"""

from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

# The settings that have the same name here, with their defaults there (transformers 5.23, ViTConfig).
SHARED_SETTINGS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
HYBRID_SETTINGS = {**SHARED_SETTINGS, "patch_size": 1}  # transformers 4.57, ViTHybridConfig
MODEL_TYPES = {"vit": SHARED_SETTINGS, "vit_mae": SHARED_SETTINGS, "vit-hybrid": HYBRID_SETTINGS}

# BitConfig of a hybrid: the only values with which the backbone is the stem of the original.
BIT_SETTINGS = {"layer_type": "bottleneck", "num_groups": 32, "width_factor": 1, "output_stride": 32}
BIT_DEFAULTS = {"layer_type": "preactivation", "embedding_size": 64, "depths": [3, 4, 6, 3]}

# Names in files -> ours, as regular expressions. transformers 5 still writes the names of version 4.
_STEM = r"embeddings\.patch_embeddings\.backbone\.bit\."
WEIGHT_NAMES = {
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
# What these models have besides an encoder and a head: parts that rebuild masked pixels.
REBUILDS_PIXELS = r"^(vit\.)?embeddings\.mask_token$|^decoder\."


def is_upstream(settings: dict[str, Any]) -> bool:
    """Whether a config.json is one of transformers' own ViTs."""
    return settings.get("model_type") in MODEL_TYPES


def translate_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The config.json of one of transformers' ViTs as the fields of `HfViTConfig` or `HfViTHybridConfig`.

    Raises:
        ValueError: a setting that makes it another architecture than ours.
    """
    general = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype", "num_labels", "quantization_config"}
    ours = {name: value for name, value in settings.items() if name in general and name != "architectures"}
    defaults = MODEL_TYPES[settings["model_type"]]
    ours |= {name: settings.get(name, default) for name, default in defaults.items()}
    ours |= {"pooling": "cls", "position_interpolation": "bicubic_aliased"}
    if settings.get("architectures") == ["ViTModel"]:
        if settings.get("pooler_act", "tanh") != "tanh":
            raise ValueError(f"pooler_act is {settings['pooler_act']!r}; the pre-logits layer of hf_vit has tanh")
        ours["representation_size"] = settings.get("pooler_output_size") or ours["hidden_size"]
    if settings["model_type"] == "vit-hybrid":
        ours |= _translate_stem(settings.get("backbone_config") or {})
    return ours


def _translate_stem(bit: dict[str, Any]) -> dict[str, Any]:
    bit = {**BIT_DEFAULTS, **bit}
    wrong = {name: bit[name] for name, value in BIT_SETTINGS.items() if bit.get(name, value) != value}
    if str(bit.get("global_padding")).upper() != "SAME":
        wrong["global_padding"] = bit.get("global_padding")
    if not bit.get("embedding_dynamic_padding"):
        wrong["embedding_dynamic_padding"] = bit.get("embedding_dynamic_padding")
    if wrong:
        text = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise ValueError(f"the backbone of the hybrid has {text}, which the ResNet stem of hf_vit has not")
    stages = [f"stage{number}" for number in range(1, len(bit["depths"]) + 1)]
    last = (bit.get("out_features") or stages[-1:])[-1]
    return {
        "stem_depths": bit["depths"][: stages.index(last) + 1],
        "stem_width": bit["embedding_size"],
        # BitGroupNormActivation and WeightStandardizedConv2d of modeling_bit.py
        "group_norm_eps": 1e-5,
        "weight_standardization_eps": 1e-8,
        "weight_standardization_form": "variance",
    }
