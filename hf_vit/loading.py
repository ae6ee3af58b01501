"""The one door to a model: find it, convert it once if needed, load it with its image processor; and save both."""

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModel, AutoModelForImageClassification
from transformers.initialization import no_init_weights
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file

from .catalog import address_of
from .files.image_sizes import sync_processor_size
from .files.limits import check_limit
from .files.manifest import check_manifest
from .files.messages import check_choice
from .files.model_files import HUB_NAME, LOCATION_ARGUMENTS, find_file, read_config, saved_class
from .files.output import new_folder, restore_interrupted
from .files.reading import read_image_processor, read_json_object
from .files.readme import write_readme
from .files.removed_names import check_removed, check_removed_arguments, describe_removed
from .files.versions import require
from .models.configuration_hf_bit import HfBiTConfig
from .models.configuration_hf_vit import HfViTConfig
from .models.image_processing_hf_vit import (
    AFTER_CONVERSION,
    PRESETS,
    HfViTImageProcessor,
    add_jpeg_dct,
    original_jpeg_dct,
    stored_class,
)
from .models.pretrained import CONVERSION_RECORD, QUANTIZATION_RECORD, HfVisionPreTrainedModel, HfViTHead
from .models.registry import AUTO_MODELS, CONFIGURATIONS, MODEL_CLASSES
from .models.sizes import Size, as_pair
from .runtimes.runner import is_deployed

logger = logging.get_logger(__name__)

HEADS = ("keep", "none", "new")
# Limit on parameters that a config.json describes but the weight files do not have, such as a new head. An ImageNet-21k
# head of ViT-g/14 has 31 million parameters.
_MAX_NEW_PARAMETERS = 2**27
# Settings of the pixel values, to which the weights are trained; another resizing preset keeps them.
_NORMALIZATION = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def load(
    name: str | os.PathLike,
    head: Literal["keep", "none", "new"] = "keep",
    image_size: Size | None = None,
    preset: str | None = None,
    patch_size: Size | None = None,
    backend: str | None = None,
    num_channels: int | None = None,
    labels: int | Sequence[str] | None = None,
    keep_pre_logits: bool = False,
    weights: str | None = None,
    head_name: str | None = None,
    position_grid: Size | None = None,
    **settings: Any,
) -> tuple[Any, HfViTImageProcessor]:
    """Load a model and its image processor, which makes images of the model's size.

    If the stored sizes of the two differ, the processor takes the model's, with a warning; a processor with the preset
    "native" makes images of different sizes and is not changed. A missing processor is made from what is known of the
    weights, with a warning. One of another class is translated into ours.

    Args:
        name: a folder of `save_pretrained`, or a name on the Hub, also `me/vit@revision`. Anything else that
            `hf_vit.conversion.convert` reads is converted once into the cache, see `find_model`:
            `google/vit-base-patch16-224`, `timm/...`, an .npz, `augreg:Ti/16`, `gs://...`. A PEFT adapter is merged
            into the base model that it names. A folder of `hf-vit export --to onnx` or `openvino` is a `ProgramModel`,
            whose processor makes its levels.
        head: "keep" loads the class that was saved, with its head if it has one; "none" the encoder without a head;
            "new" a classifier of `labels`, with a linear head of zeros, as fine-tuning in the paper begins, or random
            weights with `head_init="normal"`.
        image_size: of the model and the processor, an int or (height, width) in pixels; None: the stored one.
        preset: resizing and cropping of the processor, a preset of `HfViTImageProcessor`; None: the stored one. Mean
            and standard deviation are kept, since the weights depend on them.
        patch_size: as in `set_patch_size`, an int or (height, width); None: the stored one.
        backend: see `hf_vit.use_backend`. None: "int8" if `hf-vit quantize` wrote the folder, otherwise "eager".
        num_channels: of the images, as in `set_num_channels`; None: the stored number.
        labels: for a new head, the names of the classes, or their number.
        keep_pre_logits: for a new head, keep the pre-logits layer (`representation_size`), which the paper removes.
        weights, head_name: of another library's checkpoint, which set of weights to read, such as "ema", and the name
            of the layer that is the head; `weights` and `head` of `hf_vit.conversion.convert`.
        position_grid: of another library's checkpoint, (rows, columns) of its position embeddings; by default a square.
        settings: more arguments of `from_pretrained`. Those that locate files (`revision`, `token`, `cache_dir`,
            `subfolder`, ...) hold for the processor too. `dtype="auto"` is the dtype of the file.

    Returns:
        The model, in evaluation mode, and the processor.

    Raises:
        ValueError: the model is of an unknown architecture, or cannot have this size or preset; weights are missing; a
            file is damaged, or does not match the manifest.json of its folder.
        OSError: a file cannot be read or downloaded, or a conversion cannot be cached.
        ImportError: it is an adapter, and PEFT is not installed.

    Example:
        >>> import hf_vit
        >>> model, processor = hf_vit.load("folder", image_size=(384, 512))
        >>> processor("photo.png", return_tensors="pt").pixel_values.shape
        torch.Size([1, 3, 384, 512])
    """
    check_name(name)
    _check_arguments(head, preset, labels, settings)
    of_conversion: dict[str, Any] = {"weights": weights, "head": head_name, "variant": settings.get("variant")}
    of_conversion["position_grid"] = position_grid
    where = {key: settings.pop(key) for key in LOCATION_ARGUMENTS if key in settings}
    if is_deployed(name):
        from .runtimes.deployed import load_deployed

        given = {"head": head, "image_size": image_size, "preset": preset, "patch_size": patch_size}
        given |= {"backend": backend, "num_channels": num_channels, "labels": labels}
        given |= {"weights": weights, "head_name": head_name, "position_grid": position_grid}
        return load_deployed(name, {**given, **settings})
    files = find_model(name, of_conversion, **where)
    if files.adapter is None:
        model = _load_weights(files, _choose_class(files, head), settings, needs_head=head == "keep")
        processor = _find_processor(model.config, files)
    else:
        model, processor = _load_adapted(files, settings)
    check_manifest(files.name, files.where)
    if head == "none":
        model = model.base_model
    elif head == "new":
        _replace_head(model, labels, keep_pre_logits)
    _set_sizes(model, processor, image_size, patch_size, num_channels)
    if preset is not None:
        set_preset(processor, preset, model.config)
    sync_processor_size(model, processor, name, is_requested=image_size is not None or preset is not None)
    if backend is None:
        is_quantized = head == "keep" and files.find(QUANTIZATION_RECORD) is not None
        backend = "int8" if is_quantized else "eager"
    return use_backend(model, backend, **files.where), processor


def _check_arguments(head: Any, preset: str | None, labels: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `load` that are unknown, or need each other."""
    check_removed_arguments("load", settings)
    if not isinstance(head, str):  # the second argument was the image size once
        raise ValueError(describe_removed("load(name, image_size)"))
    check_choice("head", head, HEADS)
    if preset is not None:
        check_choice("preset", preset, PRESETS)
    if (labels is not None) != (head == "new"):
        raise ValueError(f'head is {head!r} and labels is {labels!r}: head="new" needs labels, and labels need it')
    if settings.get("output_loading_info"):
        raise ValueError("hf_vit.load has no output_loading_info; pass it to from_pretrained")


def use_backend(model: Any, backend: str, batch_size: int = 1, **where: Any) -> Any:
    """Return a model that computes the same through a backend.

    Args:
        model: an encoder or classifier of this package; it is not changed.
        backend: "eager" (the model itself), "torch" (`optimize_for_inference`), "openvino" (`OpenVINOModel`),
            "onnxruntime" (`ONNXRuntimeModel`), "int8" (`Int8Model`, of the folder that the model was loaded from), or
            "auto" for the fastest of torch and the installed ones in the model's own precision.
        batch_size: usual number of images of a forward.
        where: arguments of `from_pretrained` that locate files, such as `revision`, for "int8".

    Raises:
        ImportError: the backend's extra is not installed.
        ValueError: the backend is unknown, or cannot compute this model.

    Example:
        >>> import hf_vit
        >>> model, processor = hf_vit.load("folder")
        >>> model = hf_vit.use_backend(model, "torch")
    """
    if backend == "eager":
        return model
    from .runtimes.choosing import make_backend  # programs and their exporters: only when one is asked for

    return make_backend(model, backend, batch_size, **where)


def model_and_processor(model: Any, backend: str | None = None, **settings: Any) -> tuple[Any, Any]:
    """Return a model and its image processor, given by name or as the pair itself.

    Args:
        model: a name as in `load`, or (model, processor) as returned by `load`.
        backend, settings: more arguments of `load`, for a name.

    Raises:
        ValueError: it is neither; or as in `load`.
        OSError, ImportError: as in `load`.
    """
    if isinstance(model, str | os.PathLike):
        return load(model, backend=backend, **settings)
    if not _is_model_and_processor(model):
        raise ValueError(
            f"model is {_describe(model)}; expected a folder, a name on the Hub, or the pair (model, processor) of "
            "hf_vit.load"
        )
    if backend is not None:
        raise ValueError(f"backend is {backend!r}, but the model is loaded: use hf_vit.use_backend")
    return model


def _is_model_and_processor(model: Any) -> bool:
    if not isinstance(model, tuple) or len(model) != 2:
        return False
    first, second = model
    return isinstance(first, nn.Module) and callable(second) and not isinstance(second, nn.Module)


def check_name(model: Any) -> None:
    """Raise ValueError unless a model is given as a name or path."""
    if not isinstance(model, str | os.PathLike):
        raise ValueError(
            f"model is {_describe(model)}; expected a folder or a name on the Hub (save objects with save_pretrained)"
        )


def check_classifier(model: Any, name: str | os.PathLike | None = None) -> None:
    """Raise ValueError if a model, loaded from `name`, has no classification head."""
    if not (hasattr(model, "classifier") or getattr(model, "is_classifier", False)):
        found = type(model).__name__ if name is None else f"{name}, an {type(model).__name__},"
        raise ValueError(f"cannot classify: {found} has no classification head; load a classifier")


def _describe(model: Any) -> str:
    if isinstance(model, tuple):
        return f"the tuple ({', '.join(type(part).__name__ for part in model)})"
    return f"of type {type(model).__name__}"


# Where a model is.


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model of this package, or of a PEFT adapter for one.

    Attributes:
        name: a folder, or a name on the Hub.
        where: arguments of `from_pretrained` that locate its files, such as `revision`.
        config: content of its config.json; empty for an adapter.
        adapter: path of its adapter_config.json; None for a model.
        origin: name of the checkpoint, if it was converted into the cache; None for any other model.
        origin_where: arguments that locate its files.
    """

    name: str | os.PathLike
    where: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    origin: str | None = None
    origin_where: dict[str, Any] = field(default_factory=dict)

    def find(self, file: str, needs_hub: bool = True) -> str | None:
        """Return the local path of one of the files; None if there is no such file, see `find_file`."""
        return find_file(self.name, file, self.where, needs_hub)

    def find_report(self, file: str) -> str | None:
        """Return the local path of a file beside the model as it was named, or else beside its conversion.

        A folder for transformers has the record of its training; its conversion in the cache does not.
        """
        if self.origin is not None and (os.path.isdir(self.origin) or HUB_NAME.fullmatch(self.origin)):
            report = find_file(self.origin, file, self.origin_where, needs_hub=False)
            if report is not None:
                return report
        return find_file(self.name, file, self.where, needs_hub=False)


def resolve_model(name: str | os.PathLike) -> str | os.PathLike:
    """Return the folder of a model, or its name on the Hub; that of its conversion, for another library's model."""
    if is_deployed(name):
        return name
    return find_model(name).name


def find_model(name: str | os.PathLike, of_conversion: Mapping[str, Any] | None = None, **where: Any) -> ModelFiles:
    """Find a model; a checkpoint of another library is converted into the cache, at its first use.

    Args:
        of_conversion: arguments of `convert` for another library's checkpoint; those that are None are not stated.
        where: arguments of `from_pretrained` that locate files, such as `revision`.

    Raises:
        ValueError: it is of an unknown architecture, a file is damaged, its config.json has a field that was removed,
            or `of_conversion` does not fit.
        OSError: it cannot be found or downloaded, or the cache cannot be written.
    """
    check_name(name)
    location = address_of(str(name))
    restore_interrupted(location)
    options = {key: value for key, value in (of_conversion or {}).items() if value is not None}
    try:
        config = _find_config(location, where)
    except OSError:  # the folder of an adapter has no config.json
        adapter = _find_adapter(location, where)
        if adapter is None:
            raise
        return ModelFiles(location, where, adapter=adapter)
    if config.get("model_type") in CONFIGURATIONS:
        for field_name in config:
            check_removed("configuration field", field_name)
        if options.keys() - {"variant"}:  # which `from_pretrained` knows
            raise ValueError(
                f"{name} is a model of hf_vit, with one set of weights; omit weights, head_name and position_grid"
            )
        return ModelFiles(location, where, config)
    from .conversion.cache import convert_into_cache  # slow to import

    folder = convert_into_cache(location, where, config.get("model_type"), options)
    config = read_json_object(folder / "config.json")
    return ModelFiles(folder, {}, config, origin=str(name), origin_where=where)


def _find_config(location: str, where: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder or of a name on the Hub; empty for a file, an address, or other folders.

    Raises:
        OSError: it does not exist, or cannot be downloaded.
        ValueError: the config.json is damaged.
    """
    path = Path(location, where.get("subfolder") or "").expanduser()
    has_config = any((path / file).exists() for file in ("config.json", "adapter_config.json"))
    is_checkpoint = path.exists() or "://" in location
    if is_checkpoint and not has_config:
        return {}
    return read_config(location, **where)


def _find_adapter(location: str, where: Mapping[str, Any]) -> str | None:
    """Return the path of the adapter_config.json of a PEFT adapter, a folder or a name on the Hub; else None."""
    if not (os.path.isdir(location) or HUB_NAME.fullmatch(location)):
        return None
    try:
        return find_adapter_config_file(location, **where)
    except (OSError, ValueError):  # neither a folder nor on the Hub
        return None


# Weights.


def _load_weights(files: ModelFiles, model_class: Any, settings: Mapping[str, Any], needs_head: bool) -> Any:
    """Load a model of this package.

    Args:
        settings: arguments of `from_pretrained`, without those that locate files.
        needs_head: the weights must have the head, unless other labels are asked for.

    Raises:
        ValueError: the weights lack the head.
    """
    if files.origin is not None:
        settings = _of_converted(files, settings)
    _check_weights(files, model_class, settings.get("variant"))
    try:
        model, info = model_class.from_pretrained(files.name, output_loading_info=True, **files.where, **settings)
    except (ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file can raise any
        if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
            raise  # it names the file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot load {files.name}: {reason[:1000]}") from error
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    absent_head = sorted(key for key in absent if key.startswith("classifier."))
    has_other_labels = "num_labels" in settings or "id2label" in settings
    if absent_head and needs_head and not has_other_labels:
        raise ValueError(
            f"{files.name} lacks the weights of its classification head ({', '.join(absent_head)}); "
            'hf_vit.load(..., head="new", labels=...) makes a new one'
        )
    if files.origin is not None:
        model.conversion_record = read_json_object(str(files.find(CONVERSION_RECORD)))
        model.name_or_path = model.config.name_or_path = files.origin
    if _has_padded_class_position(model.config, files):
        model.drop_class_position()
    return model


def _check_weights(files: ModelFiles, model_class: Any, variant: str | None) -> None:
    """Check the files of weights before memory is taken for the model that a config.json describes.

    Raises:
        ValueError: the configuration or the index of the weights is damaged, the index lists a file outside the
            folder, or the configuration describes many more parameters than the files can contain.
    """
    stored = _weight_files(files, variant)
    try:
        with torch.device("meta"), no_init_weights():
            model = model_class(model_class.config_class.from_dict(files.config))
    except Exception as error:  # a value of a wrong type can raise any
        raise ValueError(f"cannot read the config.json of {files.name}: {error!s:.1000}") from error
    described = sum(parameter.numel() for parameter in model.parameters())
    size = sum(os.path.getsize(file) for file in stored)
    what = f"the config.json of {files.name} describes {described:,} parameters for {size:,} bytes"
    check_limit(what, described, 2 * size + _MAX_NEW_PARAMETERS)  # at least 4 bits per parameter


def _weight_files(files: ModelFiles, variant: str | None) -> list[str]:
    """Return the local paths of the weights that transformers will read; an empty list if there are none."""
    suffix = "" if variant is None else f".{variant}"
    for stem, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        file = files.find(f"{stem}{suffix}{ending}", needs_hub=False)
        if file is not None:
            return [file]
        index = files.find(f"{stem}{ending}.index{suffix}.json", needs_hub=False)
        if index is not None:
            found = (files.find(name, needs_hub=False) for name in _listed_files(index))
            return [file for file in found if file is not None]
    return []


def _listed_files(index: str) -> list[str]:
    """Return the names of the files that an index of weights lists."""
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{index} has no table of files, weight_map")
    names = sorted(set(listed.values()))
    for name in names:
        if os.path.basename(name) != name:
            raise ValueError(f"{index} lists a file outside the folder: {name}")
    return names


def _of_converted(files: ModelFiles, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a folder that was converted from a checkpoint.

    The folder has no variants, and is in float32: `dtype="auto"` is the dtype of the checkpoint.
    """
    kept = {key: value for key, value in settings.items() if key != "variant"}
    for key in ("dtype", "torch_dtype"):
        if kept.get(key) == "auto":
            stored = read_json_object(str(files.find(CONVERSION_RECORD)))["dtypes"]
            kept[key] = stored[0] if stored in (["bfloat16"], ["float16"]) else "float32"
    return kept


def _has_padded_class_position(config: Any, files: ModelFiles) -> bool:
    """Return whether an older version converted a model of big_vision, and gave its class token a position of zeros."""
    has_position = isinstance(config, HfViTConfig) and config.use_cls_token and config.adds_positions_to_input
    if not has_position or config.position_embedding_type != "learned" or "no_embed_class" in files.config:
        return False
    record = files.find(CONVERSION_RECORD)
    return record is not None and read_json_object(record).get("dialect", {}).get("names") == "big_vision"


def _choose_class(files: ModelFiles, head: str) -> Any:
    """Return the class of a model with a head as in `load`."""
    saved = saved_class(files.config)
    if saved not in MODEL_CLASSES:
        found = saved or "no class"
        raise ValueError(f"cannot load {files.name}: its config.json names {found} (expected an hf_vit class)")
    if head == "keep":
        return MODEL_CLASSES[saved]
    auto_class = AutoModel if head == "none" else AutoModelForImageClassification
    config_class = CONFIGURATIONS[files.config["model_type"]]
    return next(one for auto, one in AUTO_MODELS if auto is auto_class and one.config_class is config_class)


def _load_adapted(files: ModelFiles, settings: Mapping[str, Any]) -> tuple[Any, HfViTImageProcessor]:
    """Load the base model that a PEFT adapter names, with the adapter merged into its weights.

    A head that the adapter stores replaces that of the base; if it has other classes, they are called LABEL_0 and so
    on, since an adapter has no class names.

    Returns:
        The model, and an image processor: of the adapter's folder, or else of the base.
    """
    about = read_json_object(str(files.adapter))
    base = about.get("base_model_name_or_path")
    if not base or not isinstance(base, str):
        file = os.path.basename(str(files.adapter))
        raise ValueError(f"{files.name} is a PEFT adapter without base_model_name_or_path in its {file}")
    require("peft")

    where = {key: value for key, value in files.where.items() if key not in ("revision", "subfolder")}
    if about.get("revision"):
        where["revision"] = about["revision"]
    base_files = find_model(base, {"variant": settings.get("variant")}, **where)
    model_class = MODEL_CLASSES.get(_adapted_class(about)) or _choose_class(base_files, "keep")
    model = _load_weights(base_files, model_class, settings, needs_head=False)  # the adapter may have one
    model = _merge_adapter(model, files, base)
    processor = _find_processor(model.config, files, base_files)
    check_manifest(base_files.name, base_files.where)
    return model, processor


def _adapted_class(about: Mapping[str, Any]) -> str:
    """Return the name of the class that an adapter was made for; "" if its adapter_config.json does not say it."""
    mapping = about.get("auto_mapping")
    return str(mapping.get("base_model_class")) if isinstance(mapping, dict) else ""


def _merge_adapter(model: Any, files: ModelFiles, base: str) -> Any:
    """Merge a PEFT adapter into a model, whose name is `base`.

    Raises:
        ValueError: the adapter is damaged, or has other arrays than the model.
    """
    import peft

    name = str(files.name)
    try:
        weights = peft.load_peft_weights(name, device="cpu", **files.where)
        heads = [weight for key, weight in weights.items() if key.endswith(".classifier.weight")]
        if heads and len(heads[0]) != model.config.num_labels:
            num_labels, num_features = heads[0].shape
            model.config.num_labels = num_labels
            model.classifier = HfViTHead(num_features, num_labels, dtype=model.dtype)
        with warnings.catch_warnings():  # of keys, which are compared below, and of what PEFT asks of transformers
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(model, name, **files.where)
        different = weights.keys() ^ peft.get_peft_model_state_dict(adapted).keys()
    except Exception as error:
        raise ValueError(f"cannot load {name}, a PEFT adapter for {base}: {error!s:.300}") from error
    if different:
        raise ValueError(f"the adapter {name} does not fit {base}: only one has {', '.join(sorted(different)[:3])}")
    return adapted.merge_and_unload()


def _replace_head(model: Any, labels: int | Sequence[str] | None, keep_pre_logits: bool) -> None:
    """Give a classifier a new linear head for other classes: zeros, or as the configuration's `head_init` says.

    The pre-logits layer is removed, as in the paper's fine-tuning (section 3.2 of arXiv 2010.11929), unless
    `keep_pre_logits` is set. What belongs to the old head (thresholds, temperature, the record of the weights' source)
    is removed too.
    """
    names = [f"LABEL_{index}" for index in range(labels)] if isinstance(labels, int) else list(labels or ())
    config = model.config
    features = model.classifier.in_features
    if isinstance(config, HfViTConfig) and config.representation_size and not keep_pre_logits:
        model.vit.pooler.dense = None
        config.representation_size = None
        features = config.hidden_size
    model.classifier = HfViTHead(features, len(names), config.initial_head_std, dtype=model.classifier.weight.dtype)
    model.classifier.initialize()
    nn.init.zeros_(model.classifier.bias)
    set_class_names(config, names)
    model.conversion_record = None


def set_class_names(config: Any, names: Sequence[str]) -> None:
    """Set the class names of a configuration, and remove thresholds and temperature, which belong to other classes."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in config.id2label.items()}
    config.clear_calibration()


# Image processors.


def _find_processor(config: Any, *places: ModelFiles) -> HfViTImageProcessor:
    """Load the image processor of the first place that has one; make one for the weights of the last if none has."""
    for files in places:
        processor = load_processor(files.name, config, **files.where)
        if processor is not None:
            return processor
    return _make_processor(config, places[-1])


def load_processor(folder: str | os.PathLike, config: Any, **where: Any) -> HfViTImageProcessor | None:
    """Load the image processor of a folder or a name on the Hub; one of another class is translated.

    Args:
        config: configuration of the model, whose sizes a translated processor has where its file states none.
        where: arguments of `from_pretrained` that locate files, such as `revision`.

    Returns:
        The processor; None if there is none.

    Raises:
        ValueError: its preprocessor_config.json is damaged, has values of a wrong type, or names code in the folder.
        OSError: the Hub cannot be reached, to find out whether there is one.
    """
    stored = read_image_processor(folder, **where)
    if stored is None:
        return None
    record = find_file(folder, CONVERSION_RECORD, where, needs_hub=False)
    if record is not None and any(find_file(folder, file, where, needs_hub=False) for file in AFTER_CONVERSION):
        record = None
    try:
        if stored_class(stored) in (None, HfViTImageProcessor.__name__):
            return HfViTImageProcessor.from_dict(add_jpeg_dct(stored, record))
        from .conversion.image_processors import translate_processor  # slow to import

        translated = translate_processor(stored)
        return HfViTImageProcessor.for_model(config, **add_jpeg_dct(translated, record))
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"cannot read the preprocessor_config.json of {folder}: {error}") from error


def _make_processor(config: Any, files: ModelFiles) -> HfViTImageProcessor:
    """Make an image processor for a folder that has none, from what is known of the weights; with a warning."""
    preset = "bit" if isinstance(config, HfBiTConfig) else "vit_jax"
    record = files.find(CONVERSION_RECORD)
    recorded = None if record is None else read_json_object(record).get("preset")
    if isinstance(recorded, str) and recorded in PRESETS:
        preset = recorded
    processor = HfViTImageProcessor.for_model(config, preset=preset, jpeg_dct=original_jpeg_dct(preset, record))
    made = processor.settings()
    logger.warning(
        f"{files.name} holds no image processor. One was made with the preset {preset!r}, image_mean "
        f"{made['image_mean']} and image_std {made['image_std']}; set others if the weights were trained with them."
    )
    return processor


# Changes that the caller asks for.


def _set_sizes(
    model: Any,
    processor: HfViTImageProcessor,
    image_size: Size | None,
    patch_size: Size | None,
    num_channels: int | None,
) -> None:
    """Set the sizes of a model that are not None; the processor's size follows in `sync_processor_size`.

    With other channels, mean and standard deviation repeat in their order, like the kernels of the model.
    """
    if patch_size is not None:
        model.set_patch_size(patch_size, image_size)
        model.config.grid_of(*as_pair(model.config.image_size))  # raises if the patches do not divide it
        if processor.preset == "native":
            processor.update(patch_size=[size * model.config.stride for size in as_pair(patch_size)])
    elif image_size is not None:
        model.set_image_size(image_size)
    if num_channels is not None:
        model.set_num_channels(num_channels)
        repeated = {}
        for name in ("image_mean", "image_std"):
            values = getattr(processor, name)
            if isinstance(values, list | tuple):
                repeated[name] = list(islice(cycle(values), num_channels))
        processor.update(num_channels=num_channels, **repeated)


def set_preset(processor: HfViTImageProcessor, preset: str, config: Any) -> None:
    """Set another preset of a processor, at the same size, with its mean and standard deviation.

    Raises:
        ValueError: the model cannot take the preset's output.
    """
    check_choice("preset", preset, PRESETS)
    if preset == "native" and getattr(config, "stride", 1) != 1:
        raise ValueError("cannot set preset native: it cuts images into patches, and a ResNet needs whole images")
    kept = {name: getattr(processor, name) for name in _NORMALIZATION}
    if preset == "native":  # of both, TensorFlow's NaFlex and transformers' SigLIP 2
        kept["jpeg_dct"] = processor.jpeg_dct
        kept["patch_size"] = list(as_pair(config.patch_size))
    processor.update(preset=preset, **kept)


def save_folder(
    output: str | os.PathLike, model: HfVisionPreTrainedModel, processor: Any, overwrite: bool = False
) -> None:
    """Save a model and its image processor into one folder, completely or not at all.

    The processor is saved with the model's size, with a warning if it had another.

    Args:
        output: path of the folder.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: `output` exists, and `overwrite` is False.
        OSError: the folder cannot be written (no space, no permission); `output` is unchanged.
    """
    processor = copy.deepcopy(processor)
    sync_processor_size(model, processor, output, is_requested=False)
    with new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        write_readme(folder, model.config.model_type, type(model).__name__)
