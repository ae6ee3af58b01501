"""From any source that we recognise to a model and its image processor."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..catalog import address_of
from ..files.download import public_name, sha256_of
from ..files.output import new_folder
from ..images.image_processing_hf_vit import HfViTImageProcessor
from ..models.configuration_hf_bit import HfBiTConfig
from ..models.configuration_hf_vision import wrong_types_refused
from ..models.configuration_hf_vit import HfViTConfig, Size, as_pair
from ..models.loading import build_processor, let_agree, size_of
from ..models.pretrained import HfVisionPreTrainedModel
from .building import has_head, one_or_pair
from .checkpoint import fetch_any, open_checkpoint
from .inferred import Fields, Inferred, as_configured, assumed_of
from .labels import labels_of, set_labels
from .record import package_versions
from .rules import ConversionError
from .source import Request
from .sources import recognise

# What another image size replaces in the preprocessing of a source.


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

    What it is, is seen from its content: the original's arrays (vit_jax, big_vision, big_transfer) in an .npz, a
    .msgpack of flax, an Orbax folder or a TensorStore folder of big_vision's trainer; .safetensors, .pth, .pt or .bin
    of timm (ViT, hybrids and BiT), torchvision, DeiT, MAE or DINO; a folder of timm, or of transformers' `vit` (of
    PyTorch or Flax), `vit_mae`, `vit-hybrid` or `bit`. The model computes with the numbers that the source computes
    with (GELU, epsilons). Of a file with two towers (SigLIP, LiT, CLIPPO, PaliGemma) the image tower is converted; the
    record's `beside` names the rest, which `export_jax(beside=...)` takes from the file again.

    Args:
        source: a path, `https://...` or `gs://bucket/path` of a file, a folder that holds one (`gs://bucket/folder/`
            too), or a name on the Hub; or `augreg:best:B/16`, what the original code chooses of "How to train your
            ViT?", or `augreg:NAME`.
        labels: names of the classes: "imagenet1k", a file (a name per line, or JSON) or a list; by default those that
            a folder of transformers or timm has itself.
        image_size: resample the position embeddings to another size, an int or (height, width) in pixels.
        patch_size: compute with patches of another size than the stored kernel's, an int or (height, width). The model
            is flexible: kernel and positions stay as stored, whatever the source, so that nothing is lost and
            `set_patch_size` may be called again; `make_fixed` resizes them for good. Files named `flexivit_*`, and the
            two baselines of FlexiViT, have a patch size from their name.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
        preset: of the image processor; by default what the checkpoint was evaluated with.
        weights: a .safetensors file that the weights of an .npz are streamed into; the model then stays on the meta
            device, without any. See `convert_to_folder`.
        overrides: fields of the configuration that no array shows, such as `pooling="none"`; for files of timm and
            torchvision `num_attention_heads`, where the heads are not of 64 channels, and `hidden_act`.

    Returns:
        The model in evaluation mode: a classifier, or the bare encoder where the file has no trained head, with a
        projection (`image_embeds`) where the head of an image tower is one. And the image processor that does what the
        source did at evaluation. `model.conversion_record` says what was read and what was assumed; `save_pretrained`
        writes it to `conversion.json`. `check` reports all reasons.

    Raises:
        ValueError: the file is not a checkpoint that we can convert; one sentence says why.
        OSError: it cannot be fetched.
    """
    grid = None if position_grid is None else as_pair(position_grid)
    request = Request(grid, weights, overrides, patch_size)
    model, processor, _ = convert_request(source, request, labels, image_size, preset)
    return model, processor


def convert_request(
    source: str | Path,
    request: Request,
    labels: str | Path | list[str] | None,
    image_size: Size | None,
    preset: str | None,
) -> tuple[HfVisionPreTrainedModel, HfViTImageProcessor, Fields]:
    """What `convert` does, and every field of the configuration, the preset and the labels with their reasons."""
    patch_size, overrides = request.patch_size, request.overrides
    fetched = fetch_any(address_of(str(source)))
    with open_checkpoint(fetched) as checkpoint, ThreadPoolExecutor(1) as executor:
        is_file = checkpoint.path.is_file() and not request.without_weights
        sha256 = executor.submit(lambda: fetched.sha256 or sha256_of(checkpoint.path)) if is_file else None  # meanwhile
        its_source, naming = recognise(checkpoint, request)
        model, fields, record = its_source.read(checkpoint, naming, request)
        identity = {"sha256": sha256.result()} if sha256 else {}
        record = {"source": public_name(fetched), "file": checkpoint.path.name, **identity, **record}
    with wrong_types_refused(f"the preprocessing beside {checkpoint.path.name}"):
        chosen = Inferred({"preset": preset}, "stated")
        if not preset:
            chosen = its_source.preprocessing(checkpoint, naming.dialect)
    preprocessing = chosen.value
    sizes = {"patch_size": patch_size, "image_size": image_size}
    stated = overrides.keys() | {name for name, size in sizes.items() if size is not None}
    if patch_size is not None:
        image_size = _set_patch_size(model, patch_size, image_size, overrides)
        record["patch_size"] = patch_size
    elif image_size is not None:
        model.set_image_size(image_size, processor_follows=True)
    if image_size is not None:
        record["image_size"] = image_size
    if getattr(model.config, "is_flexible", False):
        record["flexible"] = "FlexiViT (arXiv 2212.08013): every forward resizes the stored kernel and positions"
    its_labels = labels
    if labels is None and has_head(model):
        with wrong_types_refused(f"the config.json beside {checkpoint.path.name}"):
            its_labels = its_source.labels(checkpoint, model.config.num_labels or 0)
    if its_labels is not None:
        set_labels(model, its_labels)
    processor = build_processor(model.config, **preprocessing)
    if image_size is None and "size" in preprocessing and isinstance(model.config, HfBiTConfig):
        image_size = size_of(processor) or model.config.image_size  # which the folder of a BiT states nowhere else
        model.set_image_size(image_size, processor_follows=True)
        fields["image_size"] = chosen
    fields |= {"preset": chosen._replace(value=preprocessing["preset"]), "labels": labels_of(model, labels is not None)}
    found = as_configured(fields, model.config, stated)
    record |= {"assumed": assumed_of(found), "preset": preprocessing["preset"]}
    model.conversion_record = {**record, "versions": package_versions()}
    let_agree(model, processor, source, asked=image_size is not None)
    return model, processor, found


def _set_patch_size(model: Any, patch_size: Size, image_size: Size | None, overrides: dict[str, Any]) -> Size | None:
    """Make a model flexible, with this patch size.

    Returns:
        The image size: what the caller states; or the model's own, if the patches divide it; or that of its grid.
    """
    config = model.config
    if not isinstance(config, HfViTConfig):
        raise ConversionError(f"{type(model).__name__} has no patches; leave out patch_size={patch_size}")
    model.make_flexible()
    if config.position_interpolation == "jax" and "position_interpolation" not in overrides:
        config.position_interpolation = "bilinear"  # as FlexiViT's code does it
    model.set_patch_size(patch_size)
    pixels = [size * config.stride for size in as_pair(patch_size)]
    if image_size is None and any(np.mod(as_pair(config.image_size), pixels)):
        image_size = one_or_pair(*(count * size for count, size in zip(config.stored_grid, pixels, strict=True)))
    if image_size is not None:
        config.grid_of(*as_pair(image_size))  # refuses a size that the patches do not divide
        model.set_image_size(image_size, processor_follows=True)
    return image_size


def convert_to_folder(
    source: str | Path, output: str | Path, *, image_size: Size | None = None, overwrite: bool = False, **options: Any
) -> HfVisionPreTrainedModel:
    """`convert` and save: the weights of an .npz go from file to file, a few arrays at a time.

    Args:
        output: the folder; it appears when it is complete.
        options: those of `convert`.

    Returns:
        The model; without weights, on the meta device, where they were streamed.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        ValueError, OSError: as `convert`; and where the folder cannot be written.
    """
    with new_folder(output, overwrite) as folder:
        needs_memory = image_size is not None and options.get("patch_size") is None  # resampling does
        weights = None if needs_memory else folder / "model.safetensors"
        model, processor = convert(source, image_size=image_size, weights=weights, **options)
        if model.device.type == "meta":
            model.save_description(folder)
        else:
            model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return model
