"""Saving and loading folders: a model, and the image processor that goes with it."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, logging
from transformers.utils.hub import cached_file

from ..files.output import new_folder, write_json
from ..files.reading import read_json_object
from ..images.image_presets import PRESETS, check_choices, override_settings
from ..images.image_processing_hf_vit import HfViTImageProcessor
from .auto import AUTO_MODELS, CONFIGURATIONS
from .configuration_hf_bit import HfBiTConfig, is_upstream_bit
from .configuration_hf_vision import HfVisionConfig, Size, as_pair, read_settings, wrong_types_refused
from .configuration_hf_vit import HfViTConfig
from .pretrained import CONVERSION_RECORD, WHERE, HfVisionPreTrainedModel
from .upstream import is_of_transformers, model_class_for

logger = logging.get_logger(__name__)

_CLASSES = {model_class.__name__: model_class for _, model_class in AUTO_MODELS}
_QUANTIZATION_RECORD, _INT8_PROGRAM = "quantization.json", ("program.xml", "program.bin")
_MODEL_TYPES = [config_class.model_type for config_class in CONFIGURATIONS]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
# What turns levels into pixel values, which the weights know; a preset for other resizing leaves it as it is.
_NORMALIZATION = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")
# How transformers' own models were evaluated, where their folder does not say: the preprocessor_config.json of the
# published google/vit-*, facebook/vit-mae-* and google/vit-hybrid-*; for bit timm's evaluation of the same weights.
_UPSTREAM_PRESETS: dict[str, dict[str, Any]] = {
    "vit": {"preset": "transformers"},
    "vit_mae": {"preset": "transformers", **IMAGENET},
    "vit-hybrid": {"preset": "timm", "crop_pct": 1.0},
    "bit": {"preset": "timm", "resample": 2, "crop_pct": 1.0},  # bilinear
}


def load(
    name: str | os.PathLike,
    image_size: Size | None = None,
    preset: str | None = None,
    patch_size: Size | None = None,
    backend: str | None = None,
    **settings: Any,
) -> tuple[HfVisionPreTrainedModel, Any]:
    """Load a model and its image processor, which makes images of the model's size.

    Where a folder holds a pair that does not agree, the processor follows the model, with a warning; only the size of
    transformers' `bit`, whose config.json states none, follows the processor. A processor of the preset "native" makes
    images of many sizes and stays as it is. Where there is no processor one is made, with a warning that says which.

    Args:
        name, settings: see `load_model`; what says where a file is (`revision`, `token`, `cache_dir`, `subfolder`, ...)
            holds for both.
        image_size: the model's and the processor's, an int or (height, width) in pixels; by default the stored one.
        preset: whose resizing and cropping the processor follows, one of `HfViTImageProcessor`'s; by default the stored
            one. Mean and deviation stay, which the weights know.
        patch_size: as in `set_patch_size`, an int or (height, width); by default the stored one.
        backend: as in `optimize_for_inference`, which is called with it; by default it is not, and the int8 program of
            a folder of `hf-vit quantize` computes.

    Returns:
        The model, in evaluation mode, and the processor.

    Raises:
        ValueError: the folder holds a model of another package, or one that cannot have this size or preset.
        OSError: a file cannot be read or fetched.
    """
    if preset is not None:
        check_choices({"preset": preset})
    where = {key: settings[key] for key in WHERE if key in settings}
    stored = read_settings(name, **where)
    model = _class_for(stored, name).from_pretrained(name, **settings)
    if backend is None:
        _use_int8_program(model, name, where)
    processor = load_processor(name, **where) or _make_processor(name, stored, model.config, where)
    if image_size is None and is_upstream_bit(stored) and "image_size" not in stored:
        image_size = size_of(processor)
    if patch_size is not None:
        model.set_patch_size(patch_size, image_size, processor_follows=True)
        model.config.grid_of(*as_pair(model.config.image_size))  # refuses a size that the patches do not divide
        if getattr(processor, "preset", None) == "native":
            processor.update(patch_size=_patch_pixels(model.config))
    elif image_size is not None:
        model.set_image_size(image_size, processor_follows=True)
    if preset is not None:
        processor = with_resizing_of(_as_ours(processor, model.config), preset, model.config)
    let_agree(model, processor, name, asked=image_size is not None or preset is not None)
    if backend is not None:
        model.optimize_for_inference(backend=backend)
    return model, processor


def _use_int8_program(model: Any, name: str | os.PathLike, where: dict[str, Any]) -> None:
    """Let the program that `hf-vit quantize` saved beside a model compute it, where there is one."""
    if (record := _find(name, _QUANTIZATION_RECORD, where)) is not None:
        files = {file: _find(name, file, where) for file in _INT8_PROGRAM}
        sys.modules[__name__.split(".")[0]].use_quantized(model, {_QUANTIZATION_RECORD: record, **files})


def load_model(
    folder: str | os.PathLike, *, image_size: Size | None = None, **settings: Any
) -> HfVisionPreTrainedModel:
    """Load a model as the class that it was saved as, which the Auto classes cannot know.

    Args:
        folder: of `save_pretrained`, or a name on the Hub; also one of transformers' own `vit`, `vit_mae`, `bit` or
            `vit-hybrid`.
        image_size: as in `from_pretrained`, an int or (height, width) in pixels.
        settings: more arguments of `from_pretrained`.

    Raises:
        ValueError: the folder holds a model of another package.
    """
    stored = read_settings(folder, **{key: settings[key] for key in WHERE if key in settings})
    size = {} if image_size is None else {"image_size": image_size}
    return _class_for(stored, folder).from_pretrained(folder, **size, **settings)


def _class_for(stored: dict[str, Any], folder: str | os.PathLike) -> type[HfVisionPreTrainedModel]:
    """The class that takes the weights of a folder with this config.json.

    Raises:
        ValueError: it is a model of another package.
    """
    if is_of_transformers(stored):
        return model_class_for(stored)
    name = (stored.get("architectures") or ["nothing"])[0]
    if name not in _CLASSES:
        raise ValueError(f"{folder} holds {name}, which is not a model of hf_vit")
    return _CLASSES[name]


def load_processor(folder: str | os.PathLike, **where: Any) -> Any:
    """Load the image processor of a folder or a name on the Hub, whoever's it is; None where there is none.

    Args:
        where: arguments of `from_pretrained` that say where a file is, such as `revision`.

    Raises:
        ValueError: its preprocessor_config.json is damaged, or has values of a wrong type.
        OSError: the Hub cannot be asked whether there is one.
    """
    file = _find(folder, IMAGE_PROCESSOR_NAME, where)
    if file is None and _find(folder, PROCESSOR_NAME, where) is None:
        return None
    stored = {} if file is None else read_json_object(file)
    with wrong_types_refused(f"the {IMAGE_PROCESSOR_NAME} of {folder}"):
        if _is_of_hybrid(stored):  # which transformers 5 does not know any more
            return HfViTImageProcessor(**in_our_settings(stored))
        return AutoImageProcessor.from_pretrained(folder, **where)


def _find(folder: str | os.PathLike, name: str, where: dict[str, Any]) -> str | None:
    """The path of a file of a folder or of a name on the Hub; None where there is none."""
    return cached_file(str(folder), name, _raise_exceptions_for_missing_entries=False, **where)


def _is_of_hybrid(stored: Mapping[str, Any]) -> bool:
    return "Hybrid" in str(stored.get("image_processor_type") or stored.get("feature_extractor_type"))


def in_our_settings(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A preprocessor_config.json of transformers' own models as arguments of `HfViTImageProcessor`."""
    if _is_of_hybrid(stored):
        # the defaults of transformers 4.57's ViTHybridImageProcessor, where they differ from ViT's
        stored = {"resample": 3, "do_center_crop": True, "crop_size": 224, **stored}
    known = HfViTImageProcessor.valid_kwargs.__annotations__
    found = {name: value for name, value in stored.items() if name in known and value is not None}
    if not found.get("do_center_crop"):
        found.pop("crop_size", None)
    return {"preset": "transformers", **found}


def build_processor(config: HfVisionConfig, **settings: Any) -> HfViTImageProcessor:
    """The image processor of a model: its size, channels and patches, and a preset's way of getting there."""
    height, width = as_pair(config.image_size)
    own: dict[str, Any] = {"size": {"height": height, "width": width}, "num_channels": config.num_channels}
    if isinstance(config, HfViTConfig):
        own["patch_size"] = _patch_pixels(config)
    return HfViTImageProcessor(**{**own, **settings})


def _patch_pixels(config: HfViTConfig) -> list[int]:
    """Height and width of a patch in pixels of the image."""
    return [size * config.stride for size in as_pair(config.patch_size)]


def _make_processor(
    name: str | os.PathLike, stored: dict[str, Any], config: HfVisionConfig, where: dict[str, Any]
) -> HfViTImageProcessor:
    """An image processor for a folder without, by what is known of the weights; and say so."""
    settings = dict(_UPSTREAM_PRESETS.get(str(stored.get("model_type")), {}))
    if not settings:
        settings = {"preset": "bit" if isinstance(config, HfBiTConfig) else "vit_jax"}
        record = _find(name, CONVERSION_RECORD, where)
        recorded = {} if record is None else read_json_object(record)
        if recorded.get("preset") in PRESETS:
            settings = {"preset": recorded["preset"]}
    processor: Any = build_processor(config, **settings)
    logger.warning(
        f"{name} holds no image processor: one was made for its model, with the preset {processor.preset!r}, "
        f"image_mean {processor.image_mean} and image_std {processor.image_std}; if the weights were trained with "
        "others, set these, and save the processor beside the model."
    )
    return processor


def _as_ours(processor: Any, config: HfVisionConfig) -> HfViTImageProcessor:
    """An `HfViTImageProcessor`, with the mean and deviation of another's."""
    if isinstance(processor, HfViTImageProcessor):
        return processor
    found = {name: getattr(processor, name, None) for name in _NORMALIZATION}
    size = size_of(processor) or as_pair(config.image_size)
    return build_processor(config, **found, size=dict(zip(("height", "width"), size, strict=True)))


def with_preset(processor: Any, preset: str | None, config: Any) -> Any:
    """Give the processor another of our presets, at the size it has; None keeps its own.

    Raises:
        ValueError: it is not one of ours, or the model of this configuration cannot take what the preset makes.
    """
    if preset is None:
        return processor
    if not isinstance(processor, HfViTImageProcessor):
        raise ValueError(f"preset is {preset}, which {type(processor).__name__} does not have")
    if preset == "native" and getattr(config, "stride", 1) != 1:
        raise ValueError("preset native cuts images into patches, and a ResNet takes whole images")
    patches = {"patch_size": list(as_pair(config.patch_size))} if preset == "native" else {}
    processor.update(preset=preset, **patches)
    return processor


def with_resizing_of(processor: Any, preset: str | None, config: Any) -> Any:
    """Give the processor the resizing and cropping of a preset; mean and deviation stay, which the weights know."""
    if preset is None:
        return processor
    normalization = {name: getattr(processor, name) for name in _NORMALIZATION}
    with_preset(processor, preset, config).update(**normalization)
    return processor


def let_agree(model: Any, processor: Any, name: str | os.PathLike, asked: bool) -> None:
    """Let an image processor make images of the model's size.

    Args:
        name: whence both are, for the message.
        asked: the size or the preset was asked for; otherwise a processor that makes others is said, and one that
            makes images of many sizes stays.
    """
    own, wanted = size_of(processor), as_pair(model.config.image_size)
    if not asked and own != wanted:
        if getattr(processor, "preset", None) == "native" or (own is None and not processor.do_resize):
            return
        made = "images of many sizes" if own is None else f"{own[0]} x {own[1]}"
        logger.warning(
            f"The model of {name} takes images of {wanted[0]} x {wanted[1]} pixels, and its image processor makes "
            f"{made}: the processor follows the model. Save both to settle it, or ask for another size with "
            f"hf_vit.load({str(name)!r}, image_size=...)."
        )
    set_processor_size(processor, model.config.image_size)


def size_of(processor: Any) -> tuple[int, int] | None:
    """(height, width) in pixels of the images that an image processor makes; None where they have many sizes.

    Args:
        processor: ours, another's, or the content of a preprocessor_config.json.
    """
    settings = processor if isinstance(processor, Mapping) else _sizing_of(processor)
    if settings.get("preset") == "native":
        return None
    crops = settings.get("do_center_crop")
    if not crops and settings.get("do_resize") is False:
        return None
    size = settings.get("crop_size" if crops else "size")
    if isinstance(size, int):
        return size, size
    sides = dict(size or {})
    return (sides["height"], sides["width"]) if sides.keys() >= {"height", "width"} else None


def _sizing_of(processor: Any) -> dict[str, Any]:
    """The settings that decide the size of images."""
    names = ("preset", "do_resize", "do_center_crop", "size", "crop_size")
    return {name: getattr(processor, name, None) for name in names}


def set_processor_size(processor: Any, image_size: Size) -> None:
    """Let an image processor, ours or another's, make images of this size, an int or (height, width) in pixels.

    One that crops goes on resizing to as many times the crop as before, or as its preset has it at the new size.
    """
    if size_of(processor) == as_pair(image_size):
        return
    sizing = _sizing_of(processor)
    sizes = _sizes_at(sizing, as_pair(image_size))
    if not isinstance(processor, HfViTImageProcessor):
        for name, size in sizes.items():
            setattr(processor, name, size)
    elif _follows_preset(processor):
        height, width = as_pair(image_size)
        processor.update(size={"height": height, "width": width})
    else:
        processor.update(**sizes, do_center_crop=sizing["do_center_crop"])


def _follows_preset(processor: Any) -> bool:
    """Whether sizes before and after the crop, or the number of patches, are those of the preset."""
    if processor.preset == "native":
        return True
    if not processor.do_center_crop or "crop_pct" not in PRESETS[processor.preset]:
        return False
    of_preset = override_settings(processor.settings(), {"size": processor.crop_size})
    return of_preset["size"] == processor.size


def _sizes_at(settings: Mapping[str, Any], image_size: tuple[int, int]) -> dict[str, dict[str, int]]:
    """The `size`, and `crop_size` of a processor that crops, with which it makes images of another size."""
    height, width = image_size
    wanted = {"height": height, "width": width}
    if not settings.get("do_center_crop"):
        return {"size": wanted}
    size, crop = (settings[name] for name in ("size", "crop_size"))
    size = {"shortest_edge": size} if isinstance(size, int) else dict(size)
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else dict(crop)
    if "shortest_edge" in size:
        resized = {"shortest_edge": round(size["shortest_edge"] * max(height, width) / max(crop.values()))}
    else:
        resized = {side: round(size[side] * wanted[side] / crop[side]) for side in ("height", "width")}
    return {"size": resized, "crop_size": wanted}


def agreeing_settings(config: Any, stored: Any) -> dict[str, Any] | None:
    """A preprocessor_config.json that makes images of the size in the config.json beside it; None where it does.

    None too where the model is not of this package, the processor makes images of many sizes, or one is damaged, which
    is said by whoever loads it.
    """
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        return _agreeing_settings(config, stored)
    return None


def _agreeing_settings(config: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any] | None:
    if config.get("model_type") not in _MODEL_TYPES or "image_size" not in config:
        return None
    wanted, own = as_pair(config["image_size"]), size_of(stored)
    if own in (None, wanted) or {type(side) for side in wanted} != {int}:
        return None
    logger.warning_once(
        f"The model takes images of {wanted[0]} x {wanted[1]} pixels, and its image processor made {own[0]} x {own[1]}"
        f": the processor is saved with the model's size."
    )
    if stored.get("image_processor_type") != HfViTImageProcessor.__name__:
        return {**stored, **_sizes_at(stored, wanted)}
    processor = HfViTImageProcessor.from_dict(dict(stored))
    set_processor_size(processor, wanted)
    return {**stored, "size": processor.size, "crop_size": processor.crop_size}


def settle_processor(folder: str | os.PathLike) -> None:
    """Let the image processor saved in a folder agree with the model saved there; and say so, where it did not."""
    files = [Path(folder) / name for name in ("config.json", IMAGE_PROCESSOR_NAME)]
    if all(file.is_file() for file in files):
        with suppress(ValueError):  # damaged: whoever loads them is told
            if (agreeing := agreeing_settings(*map(read_json_object, files))) is not None:
                write_json(files[1], agreeing, sort_keys=True)


def save_folder(
    output: str | os.PathLike, model: HfVisionPreTrainedModel, processor: Any, overwrite: bool = False
) -> None:
    """Save a model and its image processor into one folder: complete, or not at all.

    The processor is saved with the model's size, with a warning where it had another.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        OSError: the disk is full, or nothing may be written there; `output` is as it was.
    """
    with new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        settle_processor(folder)
