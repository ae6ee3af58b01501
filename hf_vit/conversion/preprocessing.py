"""The image processor that goes with a checkpoint: a preset of `HfViTImageProcessor`, and what its folder says."""

import json
from pathlib import Path
from typing import Any

from ..configuration_hf_vit import HfViTConfig, as_pair
from ..image_processing_hf_vit import HfViTImageProcessor

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
BILINEAR, BICUBIC = 2, 3  # PIL.Image.Resampling
# torchvision's references and ViT_..._Weights.transforms(): Resize(256), CenterCrop(224), bilinear
TORCHVISION = {"resample": BILINEAR, "crop_pct": 224 / 256, **IMAGENET}
# DeiT, MAE and DINO: Resize(256, bicubic), CenterCrop(224)
FACEBOOK = {"crop_pct": 224 / 256, **IMAGENET}
PREPROCESSOR_CONFIG = "preprocessor_config.json"


def processor_for(
    config: HfViTConfig, dialect: dict[str, Any], folder: Path, settings: dict[str, Any]
) -> HfViTImageProcessor:
    """The processor that does what the source did at evaluation, as far as it is known.

    Args:
        dialect: what the record of the conversion says of the source.
        folder: of the checkpoint; a preprocessor_config.json in one of transformers is followed.
        settings: the config.json of that folder, if there is one; timm keeps the preprocessing there.
    """
    height, width = as_pair(config.image_size)
    size = {"height": height, "width": width}
    if dialect["names"] == "transformers":
        if (folder / PREPROCESSOR_CONFIG).is_file():
            return _of_transformers(json.loads((folder / PREPROCESSOR_CONFIG).read_text()))
        return HfViTImageProcessor(preset="transformers", size=size)
    if dialect["names"] == "torchvision":
        return HfViTImageProcessor(preset="timm", size=size, **TORCHVISION)
    if dialect["names"] == "timm":
        own = settings.get("pretrained_cfg") or settings
        found = FACEBOOK if dialect["container"] in ("model", "teacher", "student") else _of_timm(own)
        return HfViTImageProcessor(preset="timm", size=size, **found)
    return HfViTImageProcessor(preset="vit_jax", size=size)


def _of_timm(pretrained_cfg: dict[str, Any]) -> dict[str, Any]:
    found = {"crop_pct": pretrained_cfg.get("crop_pct")}
    found |= {"image_mean": pretrained_cfg.get("mean"), "image_std": pretrained_cfg.get("std")}
    found["resample"] = {"bilinear": BILINEAR, "bicubic": BICUBIC}.get(pretrained_cfg.get("interpolation", ""))
    return {name: value for name, value in found.items() if value is not None}


def _of_transformers(stored: dict[str, Any]) -> HfViTImageProcessor:
    if "Hybrid" in stored.get("image_processor_type", stored.get("feature_extractor_type", "")):
        # the defaults of transformers 4.57's ViTHybridImageProcessor, where they differ from ViT's
        stored = {"resample": BICUBIC, "do_center_crop": True, "crop_size": 224, **stored}
    known = HfViTImageProcessor.valid_kwargs.__annotations__
    found = {name: value for name, value in stored.items() if name in known and value is not None}
    if not found.get("do_center_crop"):
        found.pop("crop_size", None)
    return HfViTImageProcessor(preset="transformers", **found)
