"""From any source that we recognise to a model and its image processor."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..catalog import address_of
from ..catalog.evaluation import image_size_of_bit
from ..files.download import public_name, sha256_of
from ..files.output import new_folder
from ..images.image_processing_hf_vit import HfViTImageProcessor
from ..models.configuration_hf_vit import Size, as_pair
from ..models.pretrained import HfViTPreTrainedModel
from .labels import labels_of_timm, read_labels
from .preprocessing import build_processor, processor_settings
from .recognising import fetch_any, read_settings, recognise_source
from .record import package_versions
from .rules import ConversionError


def convert(
    source: str | Path,
    *,
    labels: str | Path | list[str] | None = None,
    image_size: Size | None = None,
    position_grid: Size | None = None,
    preset: str | None = None,
    weights: Path | None = None,
    **overrides: Any,
) -> tuple[HfViTPreTrainedModel, HfViTImageProcessor]:
    """Convert a checkpoint of the original family, or of one of its ports.

    What it is, is seen from its content: the original's .npz (vit_jax, big_vision, big_transfer); .safetensors, .pth,
    .pt or .bin of timm (ViT, hybrids and BiT), torchvision, DeiT, MAE or DINO; a folder of timm or of transformers'
    `vit`, `vit_mae`, `vit-hybrid` or `bit`. The model computes with the numbers that the source computes with (GELU,
    epsilons).

    Args:
        source: a path, `https://...` or `gs://bucket/path` of a file, a folder that holds one, or a name on the Hub; or
            `augreg:best:B/16`, what the original code chooses of "How to train your ViT?", or `augreg:NAME`.
        labels: names of the classes: "imagenet1k", a file (a name per line, or JSON) or a list; by default those that
            a folder of transformers or timm has itself.
        image_size: resample the position embeddings to another size, an int or (height, width) in pixels.
        position_grid: (rows, columns) of the table of positions in the file; a square by default.
        preset: of the image processor; by default what the checkpoint was evaluated with.
        weights: a .safetensors file that the weights of an .npz are streamed into; the model then stays on the meta
            device, without any. See `convert_to_folder`.
        overrides: fields of the configuration that no array shows, such as `pooling="none"`; for files of timm and
            torchvision `num_attention_heads`, where the heads are not of 64 channels, and `hidden_act`.

    Returns:
        The model in evaluation mode: a classifier, or the bare encoder where the file has no trained head. And the
        image processor that does what the source did at evaluation. `model.conversion_record` says what was read;
        `save_pretrained` writes it to `conversion.json`.

    Raises:
        ValueError: the file is not a checkpoint that we can convert; one sentence says why.
        OSError: it cannot be fetched.
    """
    fetched = fetch_any(address_of(str(source)))
    settings = read_settings(fetched.path)
    path, read = recognise_source(fetched.path, settings, None if position_grid is None else as_pair(position_grid))
    if weights is not None and path.suffix == ".npz":
        overrides["weights"] = weights
    with ThreadPoolExecutor(1) as executor:
        sha256 = executor.submit(sha256_of, path)  # hashing runs beside the reading
        model, record = read(**overrides)
        record = {"source": public_name(fetched), "file": path.name, "sha256": sha256.result(), **record}
    if record["dialect"]["names"] == "big_transfer":
        model.set_image_size(overrides.get("image_size", image_size_of_bit(fetched.location)))
    preprocessing = processor_settings(record["dialect"], fetched.location, path.parent, settings)
    if preset is not None:
        preprocessing = {"preset": preset}
    if image_size is not None:
        model.set_image_size(image_size)
        record["image_size"] = image_size
        preprocessing = {name: value for name, value in preprocessing.items() if name not in ("size", "crop_size")}
    if labels is None and record["dialect"]["names"] == "timm" and model.base_model is not model:
        labels = labels_of_timm(settings, model.config.num_labels)
    if labels is not None:
        _set_labels(model, labels)
    model.conversion_record = {**record, "preset": preprocessing["preset"], "versions": package_versions()}
    return model, build_processor(model.config, **preprocessing)


def convert_to_folder(
    source: str | Path, output: str | Path, *, image_size: Size | None = None, overwrite: bool = False, **options: Any
) -> HfViTPreTrainedModel:
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
        weights = folder / "model.safetensors" if image_size is None else None  # resampling needs them in memory
        model, processor = convert(source, image_size=image_size, weights=weights, **options)
        if model.device.type == "meta":
            model.save_description(folder)
        else:
            model.save_pretrained(folder)
        processor.save_pretrained(folder)
    return model


def _set_labels(model: HfViTPreTrainedModel, labels: str | Path | list[str]) -> None:
    if not hasattr(model, "classifier"):
        raise ConversionError("the checkpoint has no trained head, so labels cannot be given to its classes")
    names = labels if isinstance(labels, list) else read_labels(labels)
    if len(names) != model.config.num_labels:
        raise ConversionError(f"{len(names)} labels are given, but the head has {model.config.num_labels} classes")
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}
