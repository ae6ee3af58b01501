"""The image processor that goes with a checkpoint: a preset of `HfViTImageProcessor`, and what its folder says."""

import json
from pathlib import Path
from typing import Any

from ..catalog.evaluation import preset_of_bit, preset_of_vit
from ..images.image_processing_hf_vit import HfViTImageProcessor
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig, as_pair

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
BILINEAR, BICUBIC = 2, 3  # PIL.Image.Resampling
# ViT_..._Weights.transforms() of torchvision: resize 256, centre crop 224
TORCHVISION = {"preset": "timm", "resample": BILINEAR, "crop_pct": 224 / 256, **IMAGENET}
# the evaluations of DeiT, MAE and DINO: resize 256, centre crop 224
FACEBOOK = {"preset": "timm", "resample": BICUBIC, "crop_pct": 224 / 256, **IMAGENET}
PREPROCESSOR_CONFIG = "preprocessor_config.json"


def processor_settings(dialect: dict[str, Any], location: str, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """How the source preprocessed images at evaluation, as far as it is known: arguments of `HfViTImageProcessor`.

    Args:
        dialect: what the record of the conversion says of the source.
        location: where it came from.
        folder: of the checkpoint; a preprocessor_config.json in one of transformers is followed.
        config: the config.json of that folder, if there is one; timm keeps the preprocessing there.
    """
    names = dialect["names"]
    if names == "transformers":
        file = folder / PREPROCESSOR_CONFIG
        return _of_transformers(json.loads(file.read_text()) if file.is_file() else {})
    if names == "torchvision":
        return TORCHVISION
    if names == "timm_bit":
        return _of_timm(config.get("pretrained_cfg") or {"crop_pct": 0.875, "interpolation": "bilinear"})
    if names == "timm":
        # their scripts keep the weights under these names, and timm under others
        is_facebook = dialect["container"] in ("model", "teacher", "student")
        return FACEBOOK if is_facebook else _of_timm(config.get("pretrained_cfg") or config)
    return {"preset": _preset_of_jax(dialect, location)}


def build_processor(config: HfViTConfig | HfBiTConfig, **settings: Any) -> HfViTImageProcessor:
    """The image processor of a model: its size, channels and patches, and a preset's way of getting there."""
    height, width = as_pair(config.image_size)
    own: dict[str, Any] = {"size": {"height": height, "width": width}, "num_channels": config.num_channels}
    if isinstance(config, HfViTConfig):
        own["patch_size"] = [size * config.stride for size in as_pair(config.patch_size)]
    return HfViTImageProcessor(**{**own, **settings})


def _preset_of_jax(dialect: dict[str, Any], location: str) -> str:
    """The evaluation of those who trained the checkpoint: by its dialect and by where it comes from."""
    if dialect["prefix"].endswith("img/"):
        return "lit"
    if dialect["names"] == "big_transfer":
        return preset_of_bit(location)
    if dialect["names"] in ("big_vision", "bit_paper", "bit"):
        return "big_vision"
    return preset_of_vit(location)


def _of_timm(pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
    found = {
        "crop_pct": pretrained_cfg.get("crop_pct"),
        "image_mean": pretrained_cfg.get("mean"),
        "image_std": pretrained_cfg.get("std"),
        "resample": {"bilinear": BILINEAR, "bicubic": BICUBIC}.get(pretrained_cfg.get("interpolation", "")),
    }
    return {"preset": "timm"} | {name: value for name, value in found.items() if value is not None}


def _of_transformers(stored: dict[str, Any]) -> dict[str, Any]:
    if "Hybrid" in stored.get("image_processor_type", stored.get("feature_extractor_type", "")):
        # the defaults of transformers 4.57's ViTHybridImageProcessor, where they differ from ViT's
        stored = {"resample": BICUBIC, "do_center_crop": True, "crop_size": 224, **stored}
    known = HfViTImageProcessor.valid_kwargs.__annotations__
    found = {name: value for name, value in stored.items() if name in known and value is not None}
    if not found.get("do_center_crop"):
        found.pop("crop_size", None)
    return {"preset": "transformers", **found}
