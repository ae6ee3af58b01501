"""Loading and saving of folders: a model and its image processor."""

import copy
import hashlib
import os
import shutil
import warnings
from collections.abc import Mapping
from itertools import cycle, islice
from pathlib import Path, PurePosixPath
from typing import Any

from filelock import FileLock
from huggingface_hub import cached_assets_path
from transformers import AutoImageProcessor
from transformers.utils import IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, logging
from transformers.utils.peft_utils import find_adapter_config_file

from .catalog import address_of
from .files.download import sha256_at
from .files.output import new_folder, own_file
from .files.reading import read_json_object
from .files.versions import require, versions_of
from .models.configuration_hf_bit import HfBiTConfig
from .models.configuration_hf_vit import read_settings, saved_class
from .models.image_processing_hf_vit import PRESETS, HfViTImageProcessor, output_size, sync_processor_size
from .models.pretrained import CONVERSION_RECORD, QUANTIZATION_RECORD, HfVisionPreTrainedModel, HfViTHead
from .models.utils import HUB_NAME, LOCATION_ARGUMENTS, Size, as_pair, check_choice, find_file
from .registration import CONFIGURATIONS, MODEL_CLASSES

# Of a training run or a calibration, for the card of a model.
REPORTS = ("metrics.json", "card_data.json", "learning_curve.png", "confusion_matrix.png", "recipe.yaml")
REPORTS += ("calibration.json",)

logger = logging.get_logger(__name__)

_RELEASED = ("augreg:", "gs://")  # names of released files
# Settings of the pixel values, to which the weights are trained; another resizing preset keeps them.
_NORMALIZATION = ("do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std")


def load(
    name: str | os.PathLike,
    image_size: Size | None = None,
    preset: str | None = None,
    patch_size: Size | None = None,
    backend: str | None = None,
    num_channels: int | None = None,
    **settings: Any,
) -> tuple[HfVisionPreTrainedModel, Any]:
    """Load a model and its image processor, which makes images of the model's size.

    If the stored sizes of the two differ, the processor takes the model's, with a warning; a processor with the preset
    "native" makes images of different sizes and is not changed. A missing processor is made from what is known of the
    weights, with a warning.

    Args:
        name: a folder of `save_pretrained`, or a name on the Hub. Anything else that `hf_vit.conversion.convert` reads
            is converted in memory: `google/vit-base-patch16-224`, `timm/...`, an .npz, ... A released file,
            `augreg:Ti/16` or `gs://...`, is converted once into the cache. A PEFT adapter is merged into the base
            model that it names.
        image_size: of the model and the processor, an int or (height, width) in pixels; None: the stored one.
        preset: resizing and cropping of the processor, a preset of `HfViTImageProcessor`; None: the stored one. Mean
            and standard deviation are kept, since the weights depend on them.
        patch_size: as in `set_patch_size`, an int or (height, width); None: the stored one.
        backend: see `hf_vit.use_backend`. None: "int8" if `hf-vit quantize` wrote the folder, otherwise "eager".
        num_channels: of the images, as in `set_num_channels`; None: the stored number.
        settings: more arguments of `from_pretrained`. Those that locate files (`revision`, `token`, `cache_dir`,
            `subfolder`, ...) hold for the processor too.

    Returns:
        The model, in evaluation mode, and the processor.

    Raises:
        ValueError: the model is of an unknown architecture, or cannot have this size or preset; or a file is damaged.
        OSError: a file cannot be read or downloaded.
        ImportError: it is an adapter, and PEFT is not installed.

    Example:
        >>> import hf_vit
        >>> model, processor = hf_vit.load("folder", image_size=(384, 512))
        >>> processor("photo.png", return_tensors="pt").pixel_values.shape
        torch.Size([1, 3, 384, 512])
    """
    if preset is not None:
        check_choice("preset", preset, PRESETS)
    if settings.pop("output_loading_info", False):
        raise ValueError("hf_vit.load has no output_loading_info; pass it to from_pretrained")
    where = {key: settings[key] for key in LOCATION_ARGUMENTS if key in settings}
    if str(name).startswith(_RELEASED):
        name = local_model(name)
    try:
        model, processor = _load_or_convert(name, settings)
    except OSError:  # the folder of an adapter has no config.json
        if (adapter := find_adapter(name, **where)) is None:
            raise
        model, processor = _load_adapted(name, adapter, where, settings)
    if processor is None:
        trusted = settings.get("trust_remote_code", False)
        processor = load_processor(name, trusted, **where) or make_processor(name, model.config, where)
        if backend is None and find_file(name, QUANTIZATION_RECORD, where) is not None:
            backend = "int8"
    if patch_size is not None:
        model.set_patch_size(patch_size, image_size)
        model.config.grid_of(*as_pair(model.config.image_size))  # raises if the patches do not divide it
        if getattr(processor, "preset", None) == "native":
            processor.update(patch_size=[size * model.config.stride for size in as_pair(patch_size)])
    elif image_size is not None:
        model.set_image_size(image_size)
    if num_channels is not None:
        processor = with_channels(model, processor, num_channels)
    processor = with_preset(processor, preset, model.config)
    sync_processor_size(model, processor, name, is_requested=image_size is not None or preset is not None)
    if backend is not None:
        from .backends.choosing import use_backend  # imports torch's exporters

        model = use_backend(model, backend, **where)
    return model, processor


def local_model(name: str | os.PathLike) -> str | os.PathLike:
    """Return a model that the Auto classes load: any checkpoint that is not of hf_vit is converted once into the cache.

    The folder is `hf_vit/converted/...` in the assets cache of Hugging Face. Models of hf_vit, PEFT adapters, and
    models of transformers that `hf_vit.conversion.convert` does not read are returned unchanged.

    Raises:
        ValueError, OSError: as in `hf_vit.conversion.convert`.
    """
    location = address_of(str(name))
    try:
        model_type = _stored_settings(location, {}).get("model_type")
    except OSError:  # an adapter, or not found
        return name
    from .conversion.transformers import THEIR_MODELS  # slow to import

    if model_type not in (None, "timm_wrapper", *THEIR_MODELS):  # transformers' name of any folder of timm
        return name
    from .conversion.checkpoint import fetch_any
    from .conversion.converting import convert

    content = "" if location.startswith("gs://") else sha256_at(fetch_any(location).path)
    path = Path(location).expanduser()
    origin = path.resolve() if path.exists() else location
    key = hashlib.sha256(f"{origin} {content} {versions_of(('hf_vit',))}".encode()).hexdigest()
    folder = cached_assets_path("hf_vit", "converted", key) / PurePosixPath(location.rstrip("/")).name
    with FileLock(f"{folder}.lock"):  # another process may convert the same file
        if not folder.exists():
            convert(location, read_weights=False).save(folder)
    return folder


def _stored_settings(name: str | os.PathLike, where: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a folder or of a name on the Hub; empty for a file, an address, or other folders.

    Raises:
        OSError: it does not exist, or cannot be downloaded.
        ValueError: the config.json is damaged.
    """
    path = Path(name, where.get("subfolder") or "").expanduser()
    has_config = any((path / file).exists() for file in ("config.json", "adapter_config.json"))
    is_other = path.exists() or "://" in str(name) or str(name).startswith("augreg:")
    return {} if is_other and not has_config else read_settings(name, **where)


def _load_or_convert(name: str | os.PathLike, settings: Mapping[str, Any], model_class: Any = None) -> tuple[Any, Any]:
    """Load a model of hf_vit, without a processor, or convert one of another library, with its processor.

    Args:
        settings: arguments of `from_pretrained`.
        model_class: None: the class that the model was saved as, which an Auto class cannot choose.
    """
    where = {key: settings[key] for key in LOCATION_ARGUMENTS if key in settings}
    stored = _stored_settings(name, where)
    if stored.get("model_type") not in CONFIGURATIONS:
        return _convert(name, where, settings)
    saved = saved_class(stored)
    if saved not in MODEL_CLASSES:
        raise ValueError(f"cannot load {name}: its config.json names {saved or 'no class'} (expected an hf_vit class)")
    return (model_class or MODEL_CLASSES[saved]).from_pretrained(name, **settings), None


def _convert(name: str | os.PathLike, where: dict[str, Any], settings: Mapping[str, Any]) -> tuple[Any, Any]:
    """Convert a model of another library in memory; arguments as in `_load_adapted`."""
    from .conversion.converting import convert  # slow to import

    subfolder = where.pop("subfolder", None) or ""
    source = Path(name, subfolder) if Path(name).exists() else str(name)
    model, processor = convert(source, where=where)
    record: Any = model.conversion_record
    if record["dialect"]["names"] == "transformers":  # hf_vit may have written the folder
        file = find_file(source, CONVERSION_RECORD, where, needs_hub=False)
        earlier = {} if file is None else read_json_object(file)
        if earlier.get("fingerprint") == record["fingerprint"]:
            record = earlier
    ignored = (*LOCATION_ARGUMENTS, "trust_remote_code", "verify")
    if own := {key: value for key, value in settings.items() if key not in ignored}:
        config, rest = type(model.config).from_dict(model.config.to_dict(), return_unused_kwargs=True, **own)
        model = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), **rest)
    model.conversion_record = record
    return model, processor


def find_adapter(name: str | os.PathLike, **where: Any) -> str | None:
    """Return the path of the adapter_config.json of a PEFT adapter, a folder or a name on the Hub; else None."""
    is_model = os.path.isfile(os.path.join(name, "config.json"))
    if is_model or not (os.path.isdir(name) or HUB_NAME.fullmatch(os.fspath(name))):
        return None
    try:
        return find_adapter_config_file(str(name), **where)
    except (OSError, ValueError):  # neither a folder nor on the Hub
        return None


def _load_adapted(name: str | os.PathLike, adapter: str, where: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Load the base model that a PEFT adapter names, with the adapter merged into its weights.

    A head that the adapter stores replaces that of the base; if it has other classes, they are called LABEL_0 and so
    on, since an adapter has no class names.

    Args:
        adapter: path of its adapter_config.json.
        where, settings: arguments of `from_pretrained`; `where` those that locate the adapter.

    Returns:
        The model, and an image processor: of the adapter's folder, or else of the base.
    """
    about = read_json_object(adapter)
    base, made_for = about.get("base_model_name_or_path"), about.get("auto_mapping")
    if not base or not isinstance(base, str):
        raise ValueError(f"{name} is a PEFT adapter without base_model_name_or_path in its {os.path.basename(adapter)}")
    require("peft")
    import peft

    settings = {key: value for key, value in settings.items() if key not in ("revision", "subfolder")}
    model_class = MODEL_CLASSES.get(str(made_for.get("base_model_class"))) if isinstance(made_for, dict) else None
    model, base_processor = _load_or_convert(base, settings, model_class)
    try:
        weights = peft.load_peft_weights(str(name), device="cpu", **where)
        head = next((weight for key, weight in weights.items() if key.endswith(".classifier.weight")), None)
        if head is not None and len(head) != model.config.num_labels:
            model.config.num_labels = len(head)
            model.classifier = HfViTHead(head.shape[1], len(head), dtype=model.dtype)
        with warnings.catch_warnings():  # of keys, which are compared below, and of what PEFT asks of transformers
            warnings.simplefilter("ignore")
            adapted = peft.PeftModel.from_pretrained(model, str(name), **where)
        different = weights.keys() ^ peft.get_peft_model_state_dict(adapted).keys()
    except Exception as error:
        raise ValueError(f"cannot load {name}, a PEFT adapter for {base}: {error!s:.300}") from error
    if different:
        raise ValueError(f"the adapter {name} does not fit {base}: only one has {', '.join(sorted(different)[:3])}")
    trusted = settings.get("trust_remote_code", False)
    processor = load_processor(name, trusted, **where) or base_processor or load_processor(base, trusted)
    return adapted.merge_and_unload(), processor or make_processor(base, model.config, {})


def load_processor(folder: str | os.PathLike, trust_remote_code: bool = False, **where: Any) -> Any:
    """Load the image processor of a folder or a name on the Hub, of any class; None if there is none.

    Args:
        trust_remote_code: run code of the folder, if the processor's class is in it; False: raise ValueError.
        where: arguments of `from_pretrained` that locate files, such as `revision`.

    Raises:
        ValueError: its preprocessor_config.json is damaged, or has values of a wrong type; or its class is unknown.
        OSError: the Hub cannot be reached, to find out whether there is one.
    """
    files = [find_file(folder, name, where) for name in (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME)]
    if files == [None, None]:
        return None
    try:
        for file in filter(None, files):
            read_json_object(file)  # limits its size
        return AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code, **where)
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"cannot read the {IMAGE_PROCESSOR_NAME} of {folder}: {error}") from error


def make_processor(name: str | os.PathLike, config: Any, where: dict[str, Any]) -> HfViTImageProcessor:
    """Make an image processor for a folder that has none, from what is known of the weights; with a warning."""
    preset = "bit" if isinstance(config, HfBiTConfig) else "vit_jax"
    if (record := find_file(name, CONVERSION_RECORD, where)) is not None:
        recorded = read_json_object(record).get("preset")
        preset = recorded if isinstance(recorded, str) and recorded in PRESETS else preset
    processor: Any = HfViTImageProcessor.for_model(config, preset=preset)
    logger.warning(
        f"{name} holds no image processor. One was made with the preset {preset!r}, image_mean {processor.image_mean} "
        f"and image_std {processor.image_std}; set other values if the weights were trained with them."
    )
    return processor


def _as_ours(processor: Any, config: Any) -> HfViTImageProcessor:
    """Return an `HfViTImageProcessor` with the size, mean and standard deviation of any processor."""
    if isinstance(processor, HfViTImageProcessor):
        return processor
    found = {name: getattr(processor, name, None) for name in _NORMALIZATION}
    size = output_size(processor) or as_pair(config.image_size)
    return HfViTImageProcessor.for_model(config, **found, size=size)


def with_preset(processor: Any, preset: str | None, config: Any) -> Any:
    """Return the processor with another preset, at the same size; None changes nothing.

    Mean and standard deviation are kept, since the weights depend on them.

    Raises:
        ValueError: the model cannot take the preset's output.
    """
    if preset is None:
        return processor
    check_choice("preset", preset, PRESETS)
    if preset == "native" and getattr(config, "stride", 1) != 1:
        raise ValueError("cannot set preset native: it cuts images into patches, and a ResNet needs whole images")
    processor = _as_ours(processor, config)
    kept = {name: getattr(processor, name) for name in _NORMALIZATION}
    patches = {"patch_size": list(as_pair(config.patch_size))} if preset == "native" else {}
    processor.update(preset=preset, **patches, **kept)
    return processor


def with_channels(model: Any, processor: Any, num_channels: int) -> HfViTImageProcessor:
    """Set a model's number of channels, and return its processor with as many.

    Mean and standard deviation repeat in their order, like the kernels of the model.
    """
    processor, repeated = _as_ours(processor, model.config), {}
    model.set_num_channels(num_channels)
    for name in ("image_mean", "image_std"):
        values = getattr(processor, name)
        if isinstance(values, list | tuple):
            repeated[name] = list(islice(cycle(values), num_channels))
    processor.update(num_channels=num_channels, **repeated)
    return processor


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


def copy_reports(name: str | os.PathLike, output: str | os.PathLike, *more: str) -> None:
    """Copy the reports of a folder or a name on the Hub to a folder made from it, for its card.

    Args:
        more: names of further files.
    """
    for report in (*REPORTS, *more):
        if file := find_file(name, report, {}, needs_hub=False):
            with own_file(Path(output, report)) as draft:
                shutil.copyfile(file, draft)


def best_checkpoint_dir(folder: str | os.PathLike) -> Path | None:
    """Return the folder best/ of a training run, if its model was better than that of the last step; None otherwise."""
    best = Path(folder, "best")
    file = Path(folder, "metrics.json")
    metrics = read_json_object(file) if file.is_file() and (best / "config.json").is_file() else {}
    name = str(metrics.get("best_metric"))
    reached, last = metrics.get("best"), metrics.get(name)
    if not isinstance(reached, float) or not isinstance(last, float):
        return None
    return best if (reached < last if name == "loss" else reached > last) else None
