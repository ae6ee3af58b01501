"""timm's folders: weights, and a config.json with architecture and evaluation settings."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...files.contents import MARK
from ...files.output import new_file, new_folder, write_json
from ...models.configuration_hf_vision import HfVisionConfig, as_pair
from ...models.image_resizing import BICUBIC, BILINEAR
from ..inferred import Inferred

_RESAMPLING = {"bilinear": BILINEAR, "bicubic": BICUBIC}


def preprocessing_of(pretrained_cfg: dict[str, Any]) -> Inferred:
    """Return the evaluation settings of a config.json, as arguments of `HfViTImageProcessor`; else timm's defaults."""
    found = {
        "crop_pct": pretrained_cfg.get("crop_pct"),
        "image_mean": pretrained_cfg.get("mean"),
        "image_std": pretrained_cfg.get("std"),
        "resample": _RESAMPLING.get(pretrained_cfg.get("interpolation", "")),
    }
    stated = {name: value for name, value in found.items() if value is not None}
    missing = ", ".join(name for name in found if name not in stated)
    because = f"no config.json states {missing}; timm's default" if missing else "stated in config.json"
    return Inferred({"preset": "timm"} | stated, because, is_assumed=bool(missing))


def description(
    config: HfVisionConfig, architecture: str, arguments: dict[str, Any], interpolation: str, crop_pct: float
) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        config: our configuration.
        architecture: timm's name of the architecture.
        arguments: arguments of `timm.create_model`.
        interpolation, crop_pct: evaluation settings below 384 pixels.
    """
    (height, width), num_classes = as_pair(config.image_size), arguments["num_classes"]
    labels: Any = config.id2label
    names = [labels[index] for index in range(num_classes)]
    has_names = any(name != f"LABEL_{index}" for index, name in enumerate(names))
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        **({"label_names": names} if has_names else {}),
        "num_features": config.hidden_size,
        "pretrained_cfg": {
            "input_size": [config.num_channels, height, width],
            "interpolation": interpolation,
            "crop_pct": crop_pct if max(height, width) < 384 else 1.0,
            "mean": [0.5] * config.num_channels,
            "std": [0.5] * config.num_channels,
            "num_classes": num_classes,
        },
        **({"global_pool": arguments["global_pool"]} if "global_pool" in arguments else {}),
        "model_args": arguments,
    }


def write(
    path: str | os.PathLike, arrays: dict[str, torch.Tensor], description: dict[str, Any], overwrite: bool
) -> dict[str, Any]:
    """Write the weights to a .safetensors file, or to a folder with a config.json.

    Args:
        path: the file or folder.
        arrays: name -> weight.
        description: content of the config.json.
        overwrite: replace what exists at `path`.

    Returns:
        The arguments of `timm.create_model`.
    """
    if Path(path).suffix == ".safetensors":
        with new_file(path, overwrite) as file:
            save_file(arrays, file, metadata={"format": "pt"})
    else:
        with new_folder(path, overwrite) as folder:
            save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
            write_json(folder / "config.json", description)
            (folder / MARK).touch()
    return description["model_args"]
