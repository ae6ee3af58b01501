"""From any source that we recognise to a model and its image processor."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..catalog import address_of
from ..configuration_hf_vit import Size, as_pair
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
    **overrides: Any,
) -> tuple[HfViTPreTrainedModel, HfViTImageProcessor]:
    """Convert a checkpoint of the original family.

    Args:
        source: a path, `https://...` or `gs://bucket/path` of an .npz, or a folder that holds one; or
            `augreg:best:B/16`, what the original code chooses of "How to train your ViT?", or `augreg:NAME`.
        labels: names of the classes: "imagenet1k", a file (a name per line, or JSON) or a list.
        image_size: resample the position embeddings to another size, an int or (height, width) in pixels.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
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
    model.conversion_record = {**record, "versions": package_versions()}
    height, width = as_pair(model.config.image_size)
    return model, HfViTImageProcessor(preset="vit_jax", size={"height": height, "width": width})


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
