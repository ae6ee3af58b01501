"""Conversion of a checkpoint from any known source to a model and its image processor."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from logging import ERROR
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.utils import logging

from ..catalog import address_of, built_in_class_names, layers_missing_in, released_with
from ..files.download import Fetched, public_name, sha256_at
from ..files.image_sizes import output_size, sync_processor_size
from ..files.manifest import write_manifest
from ..files.messages import check_choice
from ..files.output import new_folder, refuse_inputs
from ..files.reading import read_json, read_json_object, read_text
from ..files.readme import write_readme
from ..files.removed_names import check_removed_arguments
from ..files.versions import versions_of
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vit import HfViTConfig
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.pretrained import HfVisionPreTrainedModel
from ..models.sizes import Size, as_pair
from .checkpoint import Checkpoint, checkpoint_in, fetch_any, open_checkpoint, read_shards
from .exporting import export
from .jax.checkpoints import JaxSource
from .jax.tables import fingerprint_of, original_arrays
from .recognition import recognize
from .source import (
    CONFIGURATIONS,
    ConvertOptions,
    Fields,
    Inferred,
    apply_overrides,
    format_value,
    has_head,
    one_or_pair,
)
from .tables import ConversionError, UnknownGridError, name_checkpoint

# Part of the key of cached conversions: raise it with every change by which a checkpoint gives another folder.
CONVERSION_VERSION = 5
logger = logging.get_logger(__name__)
FOLDER_FORMATS = ("hf_vit", "transformers")
_PACKAGES = ("hf_vit", "transformers", "torch", "safetensors", "numpy")  # whose versions are recorded
_OF_ANY_MODEL = {field.name for field in fields(PreTrainedConfig)} | {"torch_dtype"}


@dataclass(frozen=True, eq=False)
class Conversion:
    """A converted checkpoint; it unpacks as `model, processor`.

    Attributes:
        model: in evaluation mode. A classifier; or the bare encoder, if the file has no trained head, with a projection
            (`image_embeds`) if an image tower has one. Without its weights, it is on the meta device.
        processor: the image processor of the source's evaluation.
        fields: all inferred configuration fields, also preset and labels, with their reasons.
        record: what was read and assumed, the content of `conversion.json`. Its `other_parts` names the parts of the
            file that were not converted, which `export(original=...)` copies.
    """

    model: HfVisionPreTrainedModel
    processor: HfViTImageProcessor
    fields: Fields
    record: dict[str, Any]
    _fetched: Fetched = field(repr=False)
    _options: ConvertOptions = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.processor))

    def __getitem__(self, index: int) -> Any:
        return (self.model, self.processor)[index]

    def report(self) -> str:
        """Describe the model: each field with its reason, assumptions, and omitted parts, in lines of text."""
        dialect = [f"{name} {value}" for name, value in self.record["dialect"].items() if value]
        file = f"{self.record['file']}: {', '.join([*dialect, *self.record['dtypes']])}"
        kind = f"{type(self.model).__name__}, {self.model.num_parameters():,} parameters"
        rows = [
            (name, format_value(value), f"assumed: {reason}" if is_assumed else reason)
            for name, (value, reason, is_assumed) in self.fields.items()
            if name not in _OF_ANY_MODEL
        ]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        table = [f"  {name:{widths[0]}}  {value:{widths[1]}}  {reason}" for name, value, reason in rows]
        return "\n".join([file, kind, *table, *describe_skipped(self.record)])

    def save(self, folder: str | Path, overwrite: bool = False, save_for: str = "hf_vit") -> "Conversion":
        """Save model and image processor in a folder, which appears when it is complete.

        Without its weights (`convert(..., read_weights=False)`), those of an .npz are streamed from the source into the
        folder, a few arrays at a time; those of other containers are read first.

        Args:
            overwrite: replace an existing folder.
            save_for: "hf_vit"; or "transformers", a folder of transformers' own classes, which `hf_vit.load` reads too.

        Returns:
            The conversion that was saved. If its weights were streamed, its model has none.

        Raises:
            FileExistsError: `folder` exists and may not be overwritten.
            ValueError, OSError: as in `convert`; or the folder cannot be written.
        """
        check_choice("format of a folder", save_for, FOLDER_FORMATS)
        refuse_inputs(folder, self._fetched.path)
        has_weights = self.model.device.type != "meta"
        if save_for == "transformers":
            saved = self if has_weights else self._read_weights()
            export(saved.model, folder, "transformers", processor=saved.processor, overwrite=overwrite)
            return saved
        with new_folder(folder, overwrite) as draft:
            saved = self if has_weights else self._read_weights(draft / "model.safetensors")
            if saved.model.device.type == "meta":
                saved.model.save_without_weights(draft)
            else:
                saved.model.save_pretrained(draft)
            saved.processor.save_pretrained(draft)
            write_readme(draft, saved.model.config.model_type, type(saved.model).__name__)
            write_manifest(draft)
        return saved

    def _read_weights(self, file: Path | None = None) -> "Conversion":
        """Convert again, with the weights; stream them into a .safetensors file, unless they have to be resampled."""
        if self._options.image_size is not None and self._options.patch_size is None:
            file = None
        options = replace(self._options, weights=file, without_weights=False)
        with _without_warnings():  # the first reading gave them
            return _convert(self._fetched, options)


def convert(
    source: str | Path,
    *,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    position_grid: Size | None = None,
    preset: str | None = None,
    weights: str | None = None,
    head: str | None = None,
    variant: str | None = None,
    read_weights: bool = True,
    where: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Conversion:
    """Convert a checkpoint of the original family, or of one of its ports.

    The source is recognized from the content:

    - the original's arrays (vit_jax, big_vision, big_transfer) in an .npz, a .msgpack of flax, an Orbax folder, or a
      TensorStore folder of big_vision's trainer;
    - .safetensors, .pth, .pt or .bin of timm (ViT, hybrids and BiT), torchvision, DeiT, MAE or DINO;
    - a folder of timm, or of transformers' `vit` (PyTorch or Flax), `vit_mae`, `vit-hybrid`, `bit` or
      `siglip_vision_model`.

    The model keeps the source's own GELU and epsilons. If a file has two towers (SigLIP, LiT, CLIPPO, PaliGemma), the
    image tower is converted.

    Args:
        source: a path, `https://...` or `gs://bucket/path` of a file; a folder that holds one (also
            `gs://bucket/folder/`); a name on the Hub; `augreg:Ti/16` or `augreg:Ti/16-384`, a file of "How to train
            your ViT?" by architecture and image size; `augreg:NAME`; or `augreg:best:B/16`, the choice of the original
            code among its pre-trained files. If a bucket does not give a file, a copy on the Hub is read as the
            original, with its definitions; `HF_VIT_SOURCES` names places to look in first.
        labels: class names: "imagenet1k", a file (one name per line, or JSON) or a list; by default the names stored in
            a folder of transformers or timm, and ImageNet's for a released file of its 1,000 classes.
        image_size: resample the position embeddings to this image size, an int or (height, width) in pixels.
        patch_size: compute with this patch size, an int or (height, width), instead of the stored kernel's. The model
            is flexible: kernel and positions stay as stored, and `set_patch_size` may be called again; `make_fixed`
            resizes them permanently. Files named `flexivit_*`, and FlexiViT's two baselines, have a patch size by
            their name.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
        preset: preset of the image processor; by default the preset of the checkpoint's evaluation.
        weights: which of several sets of weights in a file to read, by its key or prefix, such as "ema"; by default the
            only one, or the averaged one (EMA, teacher).
        head: for a file of PyTorch, the name of the layer that is the head, such as "fc"; by default the source's own
            name, or the only layer whose shapes fit.
        variant: for a folder of transformers or timm, the variant of its weights, such as "fp16" for
            `model.fp16.safetensors`.
        read_weights: False: read only the arrays that show what the model is; values are not checked. `report` then
            describes the model, and `save` streams the weights.
        where: arguments of `snapshot_download`, such as `revision`, for a name on the Hub.
        overrides: configuration fields that no array shows, such as `pooling="none"`; for timm's and torchvision's
            files `num_attention_heads` (for a width that no published model has) and `hidden_act`.

    Raises:
        ValueError: the checkpoint cannot be converted; the message says why.
        OSError: it cannot be found or downloaded.

    Example:
        >>> from hf_vit.conversion import convert
        >>> model, processor = convert("Ti_16-....npz")
        >>> saved = convert("Ti_16-....npz", labels="imagenet1k", read_weights=False).save("folder")
    """
    check_removed_arguments("convert", overrides)
    if not isinstance(source, str | Path):
        raise ConversionError(f"source is a {type(source).__name__} (expected a path, a URL, or a name on the Hub)")
    options = ConvertOptions(
        position_grid=None if position_grid is None else as_pair(position_grid),
        overrides=overrides,
        labels=labels,
        image_size=image_size,
        patch_size=patch_size,
        preset=preset,
        without_weights=not read_weights,
        weight_set=weights,
        head=head,
        variant=variant,
    )
    return _convert(fetch_any(address_of(str(source)), where), options)


def _convert(fetched: Fetched, options: ConvertOptions) -> Conversion:
    """Convert a file or folder on this machine."""
    name = public_name(fetched)
    record: dict[str, Any] = {"source": name}
    with open_checkpoint(fetched, options.weight_set, options.variant) as checkpoint, name_checkpoint(name):
        if fetched.copy is not None:
            checkpoint = read_as_original(checkpoint, fetched.location)
            record["copy"] = {"name": fetched.copy, "without": layers_missing_in(fetched.copy)}
        source, naming = recognize(checkpoint, options)
        model, fields, read = source.read(checkpoint, naming, options)
        record |= {"file": checkpoint.path.name, **read}
        if not options.without_weights:
            record["sha256"] = fetched.sha256 or sha256_at(checkpoint.path)
            record["fingerprint"] = _fingerprint(model, options.weights)
            address = released_with(record["fingerprint"])
            if address is not None and isinstance(source, JaxSource) and checkpoint.location != address:
                logger.warning(f"{name} has the weights of {address}, whose preset and class names are used")
                checkpoint = replace(checkpoint, location=address)
        preprocessing = Inferred({"preset": options.preset}, "stated")
        if not options.preset:
            preprocessing = source.preprocessing(checkpoint, naming.dialect)
        labels = options.labels
        if labels is None and has_head(model):
            labels = source.labels(checkpoint, model.config.num_labels or 0)
    sizes = _set_sizes(model, options)
    if labels is not None:
        set_labels(model, labels)
    processor = _make_processor(model, preprocessing, name, fields, is_stated="image_size" in sizes)
    fields |= {"preset": preprocessing._replace(value=processor.preset), "labels": _describe_labels(model)}
    fields = apply_overrides(fields, model.config, options.overrides.keys() | sizes.keys())
    if getattr(model.config, "is_flexible", False):
        sizes["flexible"] = "FlexiViT (arXiv 2212.08013): every forward pass resizes the stored kernel and positions"
    record |= sizes
    record["assumed"] = [
        f"{field} {format_value(value)}: {reason}"
        for field, (value, reason, is_assumed) in fields.items()
        if is_assumed
    ]
    record |= {"preset": processor.preset, "versions": versions_of(_PACKAGES)}
    model.conversion_record = record
    return Conversion(model, processor, fields, record, fetched, options)


def _make_processor(
    model: Any, preprocessing: Inferred, name: str, fields: Fields, is_stated: bool
) -> HfViTImageProcessor:
    """Make an image processor of the model's image size.

    The arrays of a BiT show no image size. If the caller states none (`is_stated`), the model and `fields` get the size
    of the preprocessing.
    """
    processor = HfViTImageProcessor.for_model(model.config, **preprocessing.value)
    if isinstance(model.config, HfBiTConfig) and not is_stated and "size" in preprocessing.value:
        model.set_image_size(output_size(processor) or model.config.image_size)
        fields["image_size"] = preprocessing
        is_stated = True
    sync_processor_size(model, processor, name, is_requested=is_stated)
    return processor


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence this room, except what this module says of the weights."""
    room = logging.get_logger(__package__)
    room_level = room.level
    own_level = logger.level
    logger.setLevel(room.getEffectiveLevel())
    room.setLevel(ERROR)
    try:
        yield
    finally:
        room.setLevel(room_level)
        logger.setLevel(own_level)


def _set_sizes(model: Any, options: ConvertOptions) -> dict[str, Any]:
    """Give a model the sizes that the caller states; return its changed sizes.

    With a patch size, the model becomes flexible. If its patches do not divide the model's image size, and none is
    stated, the model gets the image size of the stored grid.
    """
    config = model.config
    image_size = options.image_size
    sizes: dict[str, Any] = {}
    if options.patch_size is not None:
        if not isinstance(config, HfViTConfig):
            raise ConversionError(f"{type(model).__name__} has no patches; omit patch_size={options.patch_size}")
        model.make_flexible()
        if "position_interpolation" in options.overrides:
            config.position_interpolation = options.overrides["position_interpolation"]
        model.set_patch_size(options.patch_size)
        sizes["patch_size"] = options.patch_size
        pixels = [size * config.stride for size in as_pair(options.patch_size)]
        if image_size is None and any(np.mod(as_pair(config.image_size), pixels)):
            rows, columns = config.stored_grid
            image_size = one_or_pair(rows * pixels[0], columns * pixels[1])
        if image_size is not None:
            config.grid_of(*as_pair(image_size))  # raises if the patches do not divide the size
    if image_size is not None:
        model.set_image_size(image_size)
        sizes["image_size"] = image_size
    return sizes


def _describe_labels(model: HfVisionPreTrainedModel) -> Inferred:
    if not hasattr(model, "classifier"):
        return Inferred(None, "there is no trained head")
    names = list((model.config.id2label or {}).values())
    if all(name == f"LABEL_{index}" for index, name in enumerate(names)):
        return Inferred(None, "no names are stored")
    return Inferred(len(names), ", ".join(names[:3]) + ", ..." * (len(names) > 3))


def set_labels(model: HfVisionPreTrainedModel, labels: str | Path | list[str]) -> None:
    """Name the classes of a model.

    Args:
        model: the model; its configuration is changed.
        labels: "imagenet1k"; a file with one name per line, or JSON (a list, or an object from index to name); a list.

    Raises:
        ConversionError: the model has no head or another number of classes, or these are no names.
    """
    if not hasattr(model, "classifier"):
        raise ConversionError("cannot name the classes: the checkpoint has no trained head; omit labels")
    try:
        names = _read_labels(labels) if isinstance(labels, str | Path) else labels
        if not all(name.strip() for name in names) or len(names) != model.config.num_labels:
            raise ValueError(f"they are {len(names)} names, for {model.config.num_labels} classes")
    except Exception as error:  # no such file, no text, a number without a name
        kinds = "imagenet1k, a file with one name per line, or a .json with a list"
        raise ConversionError(
            f"cannot name the classes by {labels!r:.99} (expected {kinds}): {error!s:.300}"
        ) from error
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}


def _read_labels(source: str | Path) -> list[str]:
    """Read class names, in the order of the head's outputs."""
    if str(source) == "imagenet1k":
        return built_in_class_names("imagenet1k")
    if Path(source).suffix != ".json":
        return [line.strip() for line in read_text(source).splitlines() if line.strip()]
    content = read_json(source)
    return [content[str(index)] for index in range(len(content))] if isinstance(content, dict) else content


def fingerprint(source: str | Path, **options: Any) -> str:
    """Return the fingerprint of a model's content: one SHA-256, equal for the same numbers in any container.

    It covers names, shapes, dtypes and bytes of all arrays, in the layout of the original's files and in float32. An
    .npz, our folder, timm's .safetensors and transformers' folder of the same numbers have one fingerprint. An
    untrained head (all zero) is not part of it, since every conversion drops it. Settings (GELU, preprocessing) are no
    content.

    Args:
        source: as in `convert`, or a folder of hf_vit, here or on the Hub.
        options: as in `convert`, for a file that does not show its grid or heads.

    Raises:
        ValueError, OSError: as in `convert`.
    """
    location = address_of(str(source))
    folder = fetch_any(location).path
    settings = {}
    if (folder / "config.json").is_file():
        settings = read_json_object(folder / "config.json")
    config_class = CONFIGURATIONS.get(str(settings.get("model_type")))
    if config_class is None:
        try:
            return convert(source, **options).record["fingerprint"]
        except ConversionError as error:
            if not isinstance(error.__cause__, UnknownGridError) or "position_grid" in options:
                raise
            any_grid = (error.__cause__.num_patches, 1)  # which is no content
        return convert(source, **options, position_grid=any_grid).record["fingerprint"]
    weights = read_shards(checkpoint_in(folder, settings))
    return fingerprint_of(config_class.from_dict(settings), weights, weights.__getitem__)


def _fingerprint(model: HfVisionPreTrainedModel, weights: Path | None) -> str:
    """Return the content fingerprint of a model as it was read; of the streamed weights if it is empty."""
    parameters = model.state_dict()
    if weights is None or model.device.type != "meta":
        return fingerprint_of(model.config, parameters, parameters.__getitem__)
    with safe_open(weights, "pt") as streamed:
        return fingerprint_of(model.config, parameters, streamed.get_tensor)


def read_as_original(copy: Checkpoint, location: str) -> Checkpoint:
    """Return the original's file, rebuilt from an open copy in another format; arrays that the copy lacks stay absent.

    Reading it gives the original's definitions (GELU, epsilons, preprocessing), which a copy's format changes.

    Args:
        copy: the open copy.
        location: address of the original.
    """
    source, naming = recognize(copy, ConvertOptions())
    model, _, _ = source.read(copy, naming, ConvertOptions())
    parameters = model.state_dict()
    arrays = dict(original_arrays(model.config, parameters, parameters.__getitem__))
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    return Checkpoint(location, copy.path, {}, shapes, dict.fromkeys(arrays, "float32"), "", arrays.__getitem__)


def describe_skipped(record: dict[str, Any]) -> list[str]:
    """List the parts of a checkpoint that were not converted, one sentence each.

    Args:
        record: the content of `conversion.json`.
    """
    lines = []
    copy = record.get("copy")
    if copy and copy["without"]:
        missing = ", ".join(copy["without"])
        lines.append(f"read from {copy['name']}, a copy with the same weights; the copy lacks the original's {missing}")
    elif copy:
        lines.append(f"read from {copy['name']}, a copy with the same weights")
    if record["dropped"]:
        lines.append("the head of the checkpoint is all zeros and was dropped: the result is an encoder without a head")
    if record["other_parts"]:
        lines.append(f"not converted, other parts of the file: {', '.join(record['other_parts'])}")
    return lines
