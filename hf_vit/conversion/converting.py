"""From any source that we recognise to a model and its image processor."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..catalog import address_of
from ..configuration_hf_vit import HfViTConfig, Size, as_pair
from ..image_processing_hf_vit import HfViTImageProcessor
from ..modeling_hf_vit import HfViTPreTrainedModel
from .jax_reading import read_jax
from .labels import read_labels
from .record import package_versions
from .rules import ConversionError
from .sources import fetch, sha256_of


def convert(
    source: str | Path,
    *,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    position_grid: Size | None = None,
    preset: str | None = None,
    **overrides: Any,
) -> tuple[HfViTPreTrainedModel, HfViTImageProcessor]:
    """Convert a checkpoint of the original family.

    Args:
        source: a path, `https://...` or `gs://bucket/path` of an .npz, or a folder that holds one; or
            `augreg:best:B/16`, what the original code chooses of "How to train your ViT?", or `augreg:NAME`.
        labels: names of the classes: "imagenet1k", a file (a name per line, or JSON) or a list.
        image_size: resample the position embeddings to another size, an int or (height, width) in pixels.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
        preset: of the image processor; by default the one that the checkpoint was evaluated with.
        overrides: fields of the configuration that no array shows, such as `pooling="none"`.

    Returns:
        The model in evaluation mode: a classifier, or the bare encoder where the file has no trained head. And the
        image processor that does what the original did at evaluation. `model.conversion_record` says what was read;
        `save_pretrained` writes it to `conversion.json`.

    Raises:
        ValueError: the file is not a checkpoint that we can convert; one sentence says why.
        OSError: it cannot be fetched.
    """
    fetched = fetch(address_of(str(source)))
    path = _checkpoint_in(fetched.path)
    with ThreadPoolExecutor(1) as executor:
        sha256 = executor.submit(sha256_of, path)  # hashing runs beside the reading
        model, record = read_jax(path, None if position_grid is None else as_pair(position_grid), **overrides)
        record = {"source": fetched.location, "file": path.name, "sha256": sha256.result(), **record}
    if image_size is not None:
        model.set_image_size(image_size)
        record["image_size"] = image_size
    if labels is not None:
        _set_labels(model, labels)
    preset = preset or choose_preset(record["dialect"], fetched.location)
    model.conversion_record = {**record, "preset": preset, "versions": package_versions()}
    return model, build_processor(model.config, preset)


def choose_preset(dialect: dict[str, Any], location: str) -> str:
    """The evaluation of those who trained the checkpoint: by its dialect and, for AugReg, by where it comes from.

    No array tells an AugReg file from one of the first release; its address or name does.
    """
    if dialect["prefix"].endswith("img/"):
        return "lit"
    if dialect["names"] == "big_vision":
        return "big_vision"
    is_augreg = "vit_models/augreg/" in location or re.search(r"-aug_[a-z]+\d?-wd_", Path(location).name)
    return "augreg" if is_augreg else "vit_jax"


def build_processor(config: HfViTConfig, preset: str) -> HfViTImageProcessor:
    """The image processor of a model: its size, channels and patches, and a preset's way of getting there."""
    height, width = as_pair(config.image_size)
    patch_height, patch_width = (size * config.stride for size in as_pair(config.patch_size))
    return HfViTImageProcessor(
        preset=preset,
        size={"height": height, "width": width},
        patch_size=[patch_height, patch_width],
        num_channels=config.num_channels,
    )


def _checkpoint_in(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = sorted(path.glob("*.npz"))
    if len(candidates) != 1:
        found = ", ".join(candidate.name for candidate in candidates) or "none"
        raise ConversionError(f"{path} must hold one .npz checkpoint; it holds {found}")
    return candidates[0]


def _set_labels(model: HfViTPreTrainedModel, labels: str | Path | list[str]) -> None:
    if model.base_model is model:
        raise ConversionError("the checkpoint has no trained head, so labels cannot be given to its classes")
    names = labels if isinstance(labels, list) else read_labels(labels)
    if len(names) != model.config.num_labels:
        raise ConversionError(f"{len(names)} labels are given, but the head has {model.config.num_labels} classes")
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
