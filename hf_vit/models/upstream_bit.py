"""What the `bit` of transformers 5 calls its settings and weights, on disk, and what we call them."""

from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

# The settings that have the same name here, with their defaults there (transformers 5.23, BitConfig).
SHARED_SETTINGS: dict[str, Any] = {
    "num_channels": 3,
    "embedding_size": 64,
    "depths": [3, 4, 6, 3],
    "layer_type": "preactivation",
}
# What is computed in one way here, with the defaults there.
FIXED_SETTINGS: dict[str, Any] = {"hidden_act": "relu", "num_groups": 32, "output_stride": 32, "drop_path_rate": 0.0}
HIDDEN_SIZES = [256, 512, 1024, 2048]
# Names in files -> ours, as regular expressions.
BIT_WEIGHT_NAMES = {
    r"embedder\.": r"resnet.",
    r"encoder\.stages\.": r"resnet.stages.",
    r"classifier\.1\.": r"classifier.",
}
# Our names -> those of its classes in memory, by their beginnings.
BEGINNINGS = {
    "resnet.stages.": "encoder.stages.",
    "resnet.": "embedder.",
    "classifier.": "classifier.1.",
}


def is_upstream_bit(settings: dict[str, Any]) -> bool:
    """Whether a config.json is one of transformers' own BiT."""
    return settings.get("model_type") == "bit"


def translate_bit_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The config.json of transformers' BiT as the fields of `HfBiTConfig`.

    Raises:
        ValueError: a setting that makes it another architecture than ours.
    """
    general = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype", "num_labels", "quantization_config"}
    ours = {name: value for name, value in settings.items() if name in general and name != "architectures"}
    ours |= {name: settings.get(name, default) for name, default in SHARED_SETTINGS.items()}
    wrong = {name: settings[name] for name, value in FIXED_SETTINGS.items() if settings.get(name, value) != value}
    factor = settings.get("width_factor", 1)
    sizes = [size * factor for size in settings.get("hidden_sizes", HIDDEN_SIZES)]
    if sizes != [4 * ours["embedding_size"] * 2**stage for stage in range(len(ours["depths"]))]:
        wrong |= {"embedding_size": ours["embedding_size"], "hidden_sizes": sizes}
    padding = (str(settings.get("global_padding")).upper(), bool(settings.get("embedding_dynamic_padding")))
    if padding == ("SAME", True):
        ours["padding"] = "same"
    elif padding == ("NONE", False) and ours["layer_type"] == "preactivation":
        ours["padding"] = "fixed"
    else:
        wrong |= {"global_padding": settings.get("global_padding"), "embedding_dynamic_padding": padding[1]}
        wrong["layer_type"] = ours["layer_type"]
    if wrong:
        text = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        raise ValueError(f"the BiT of transformers has {text}, which that of hf_vit has not")
    # BitGroupNormActivation, WeightStandardizedConv2d and BitMaxPool2d of modeling_bit.py
    return {
        **ours,
        "group_norm_eps": 1e-5,
        "weight_standardization_eps": 1e-8,
        "weight_standardization_form": "variance",
        "pool_padding": "zero",
    }
