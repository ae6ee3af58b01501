"""Conversion of a checkpoint from any known source to a model and its image processor."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..catalog import address_of
from ..files.download import Fetched, public_name, sha256_at
from ..files.output import new_folder, write_text
from ..files.readme import render_readme
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vision import wrong_types_refused
from ..models.configuration_hf_vit import HfViTConfig, Size, as_pair
from ..models.image_processing_hf_vit import HfViTImageProcessor, output_size, sync_processor_size
from ..models.pretrained import HfVisionPreTrainedModel
from .building import has_head, one_or_pair
from .checkpoint import Checkpoint, fetch_any, open_checkpoint
from .inferred import Fields, Inferred, as_configured, assumed_of
from .labels import labels_of, set_labels
from .record import package_versions
from .rules import ConversionError
from .source import Naming, Request, Source
from .sources import recognise


def convert(
    source: str | Path,
    *,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    patch_size: Size | None = None,
    position_grid: Size | None = None,
    preset: str | None = None,
    weights: Path | None = None,
    **overrides: Any,
) -> tuple[HfVisionPreTrainedModel, HfViTImageProcessor]:
    """Convert a checkpoint of the original family, or of one of its ports.

    The source is recognised from the content:

    - the original's arrays (vit_jax, big_vision, big_transfer) in an .npz, a .msgpack of flax, an Orbax folder, or a
      TensorStore folder of big_vision's trainer;
    - .safetensors, .pth, .pt or .bin of timm (ViT, hybrids and BiT), torchvision, DeiT, MAE or DINO;
    - a folder of timm, or of transformers' `vit` (PyTorch or Flax), `vit_mae`, `vit-hybrid` or `bit`.

    The model keeps the source's own GELU and epsilons. If a file has two towers (SigLIP, LiT, CLIPPO, PaliGemma), the
    image tower is converted. The record's `beside` names the rest, which `export_jax(beside=...)` copies from the file.

    Args:
        source: a path, `https://...` or `gs://bucket/path` of a file; a folder that holds one (also
            `gs://bucket/folder/`); a name on the Hub; `augreg:NAME`; or `augreg:best:B/16`, the choice of the original
            code among the files of "How to train your ViT?".
        labels: class names: "imagenet1k", a file (one name per line, or JSON) or a list; by default the names stored in
            a folder of transformers or timm.
        image_size: resample the position embeddings to this image size, an int or (height, width) in pixels.
        patch_size: compute with this patch size, an int or (height, width), instead of the stored kernel's. The model
            is flexible: kernel and positions stay as stored, and `set_patch_size` may be called again; `make_fixed`
            resizes them permanently. Files named `flexivit_*`, and FlexiViT's two baselines, have a patch size by
            their name.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
        preset: preset of the image processor; by default the preset of the checkpoint's evaluation.
        weights: a .safetensors file to stream the weights of an .npz into; the model then stays on the meta device,
            without weights. See `convert_to_folder`.
        overrides: configuration fields that no array shows, such as `pooling="none"`; for timm's and torchvision's
            files `num_attention_heads` (if heads do not have 64 channels) and `hidden_act`.

    Returns:
        The model in evaluation mode, and the image processor of the source's evaluation. The model is a classifier; or
        the bare encoder, if the file has no trained head, with a projection (`image_embeds`) if an image tower has one.
        `model.conversion_record` describes what was read and assumed; `save_pretrained` writes it to `conversion.json`.
        `check` reports all reasons.

    Raises:
        ValueError: the checkpoint cannot be converted; the message says why.
        OSError: it cannot be found or downloaded.
    """
    grid = None if position_grid is None else as_pair(position_grid)
    request = Request(grid, weights, overrides, patch_size)
    model, processor, _ = convert_request(source, request, labels, image_size, preset)
    return model, processor


def convert_request(
    source: str | Path,
    request: Request,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    preset: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> tuple[HfVisionPreTrainedModel, HfViTImageProcessor, Fields]:
    """Convert; return model, image processor, and all inferred fields (also preset and labels) with their reasons."""
    if not isinstance(source, str | Path):
        what = type(source).__name__
        raise ConversionError(f"source is a {what} (expected a path, an address, or a name on the Hub); give its file")
    fetched = fetch_any(address_of(str(source)), where)
    with open_checkpoint(fetched) as checkpoint, ThreadPoolExecutor(1) as executor:
        identity = executor.submit(_identity, fetched, checkpoint, request)  # in parallel with reading
        its_source, naming = recognise(checkpoint, request)
        model, fields, record = its_source.read(checkpoint, naming, request)
        record = {"source": public_name(fetched), "file": checkpoint.path.name, **identity.result(), **record}
    sizes = _take_sizes(model, request, image_size)
    its_labels = _take_labels(model, its_source, checkpoint, labels)
    preprocessing = _preprocessing(its_source, checkpoint, naming, preset)
    processor = HfViTImageProcessor.for_model(model.config, **preprocessing.value)
    has_own_size = "image_size" in sizes or not isinstance(model.config, HfBiTConfig)  # BiT's arrays show no size
    if not has_own_size and "size" in preprocessing.value:
        model.set_image_size(output_size(processor) or model.config.image_size, processor_follows=True)
        fields["image_size"] = preprocessing
    sync_processor_size(
        model, processor, source, asked="image_size" in sizes or fields.get("image_size") is preprocessing
    )
    used = preprocessing.value["preset"]
    fields |= {"preset": preprocessing._replace(value=used), "labels": its_labels}
    found = as_configured(fields, model.config, _stated(request, image_size))
    record |= {**sizes, "assumed": assumed_of(found), "preset": used, "versions": package_versions()}
    model.conversion_record = record
    return model, processor, found


def _identity(fetched: Fetched, checkpoint: Checkpoint, request: Request) -> dict[str, str]:
    """Return the sha256 of the file or folder (`sha256_at`); an empty dictionary if no weights are read."""
    if request.without_weights:
        return {}
    return {"sha256": fetched.sha256 or sha256_at(checkpoint.path)}


def _take_sizes(model: Any, request: Request, image_size: Size | None) -> dict[str, Any]:
    """Give a model the sizes that the caller states; return their entries for `conversion.json`."""
    said: dict[str, Any] = {}
    if request.patch_size is not None:
        image_size = _set_patch_size(model, request.patch_size, image_size, request.overrides)
        said["patch_size"] = request.patch_size
    elif image_size is not None:
        model.set_image_size(image_size, processor_follows=True)
    if image_size is not None:
        said["image_size"] = image_size
    if getattr(model.config, "is_flexible", False):
        said["flexible"] = "FlexiViT (arXiv 2212.08013): every forward resizes the stored kernel and positions"
    return said


def _take_labels(
    model: HfVisionPreTrainedModel, source: Source, checkpoint: Checkpoint, labels: str | Path | list[str] | None
) -> Inferred:
    """Name the classes of a model, by the caller's names or else the source's."""
    names = labels
    if names is None and has_head(model):
        with wrong_types_refused(f"the config.json beside {checkpoint.path.name}"):
            names = source.labels(checkpoint, model.config.num_labels or 0)
    if names is not None:
        set_labels(model, names)
    return labels_of(model, labels is not None)


def _preprocessing(source: Source, checkpoint: Checkpoint, naming: Naming, preset: str | None) -> Inferred:
    """Return the arguments of the image processor, from the caller or else from the source."""
    if preset:
        return Inferred({"preset": preset}, "stated")
    with wrong_types_refused(f"the preprocessing beside {checkpoint.path.name}"):
        return source.preprocessing(checkpoint, naming.dialect)


def _stated(request: Request, image_size: Size | None) -> set[str]:
    """Return the names of the fields that the caller states."""
    sizes = {"patch_size": request.patch_size, "image_size": image_size}
    return request.overrides.keys() | {name for name, size in sizes.items() if size is not None}


def _set_patch_size(model: Any, patch_size: Size, image_size: Size | None, overrides: dict[str, Any]) -> Size | None:
    """Make a model flexible, with this patch size.

    Returns:
        The image size: the caller's; or None (the model's own) if the patches divide it; or that of the stored grid.
    """
    config = model.config
    if not isinstance(config, HfViTConfig):
        raise ConversionError(f"{type(model).__name__} has no patches; omit patch_size={patch_size}")
    model.make_flexible()
    if "position_interpolation" in overrides:
        config.position_interpolation = overrides["position_interpolation"]
    model.set_patch_size(patch_size)
    pixels = [size * config.stride for size in as_pair(patch_size)]
    if image_size is None and any(np.mod(as_pair(config.image_size), pixels)):
        image_size = one_or_pair(*(count * size for count, size in zip(config.stored_grid, pixels, strict=True)))
    if image_size is not None:
        config.grid_of(*as_pair(image_size))  # raises if the patches do not divide the size
        model.set_image_size(image_size, processor_follows=True)
    return image_size


def convert_to_folder(
    source: str | Path, output: str | Path, *, image_size: Size | None = None, overwrite: bool = False, **options: Any
) -> HfVisionPreTrainedModel:
    """Convert a checkpoint and save it; the weights of an .npz are streamed, a few arrays at a time.

    Args:
        source: as in `convert`.
        output: the folder; it appears when it is complete.
        image_size: as in `convert`.
        overwrite: replace an existing folder.
        options: other arguments of `convert`.

    Returns:
        The model; if its weights were streamed, it is on the meta device, without weights.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        ValueError, OSError: as in `convert`; or the folder cannot be written.
    """
    with new_folder(output, overwrite) as folder:
        needs_memory = image_size is not None and options.get("patch_size") is None  # for resampling
        weights = None if needs_memory else folder / "model.safetensors"
        model, processor = convert(source, image_size=image_size, weights=weights, **options)
        if model.device.type == "meta":
            model.save_description(folder)
        else:
            model.save_pretrained(folder)
        processor.save_pretrained(folder)
        write_text(folder / "README.md", render_readme(model.config.model_type, type(model).__name__))
    return model
