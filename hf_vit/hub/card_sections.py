"""Sections of a model card, rendered from the files of the folder and from the catalog."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import torch

from ..catalog import released_facts
from ..registration import MODEL_CLASSES
from .card_sources import Sources

_JAX = ("vit_jax", "flax", "big_vision", "big_transfer", "bit_paper", "bit")  # dialects of the original files
_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]")
_FIGURES = {  # figures of a training run: their alternative texts
    "confusion_matrix.png": "Confusion matrix: held-out images by label (rows) and prediction (columns)",
    "learning_curve.png": "Learning curve: loss, accuracy and learning rate by optimizer step",
}
# Settings of a training run that do not change its result, and those in other parts of the card.
_NOT_LISTED = ("dataset", "model", "eval_batch_size", "eval_every", "keep_checkpoints", "log_every", "num_processes")
_NOT_LISTED += ("num_workers", "overwrite", "print_config", "profile", "report_to", "resume", "save_every")
_NOT_LISTED += ("stall_timeout", "prefetch_factor", "augment_on")
_METRICS = {"samples": "images", "skipped": "images skipped"}  # display names of metrics
_BOOKKEEPING = ("best", "best_step")  # about the best step; the card is about the last
_FILTERS = {2: "bilinear", 3: "bicubic", "area": "area"}  # `resample`: its name
COCO_CATS = "http://images.cocodataset.org/val2017/000000039769.jpg"


def render_sections(sources: Sources, name: str, license: str | None, has_title: bool, space: str | None) -> str:
    """Render our part of a card.

    Args:
        name: name of the repository or folder.
        license: the one in the front matter.
        has_title: begin with a heading; False if the user's own text is above.
        space: name of a Space with the model's page.
    """
    training, released = sources.training, released_facts()
    output, shape = _features(sources)
    cited = sources.facts.get("papers", ["bit" if sources.is_bit else "vit"])
    return _template().render(
        sources=sources,
        released=sources.released,
        **{field: getattr(sources, field) for field in ("facts", "config", "training", "conversion", "calibration")},
        papers=released["papers"],
        data_sets=released["datasets"],
        has_title=has_title,
        title=name.split("/")[-1],
        name=name,
        space=space,
        license=license,
        parameters=_count_parameters(sources.config) if sources.config["image_size"] else None,
        saw_imagenet=any(key.startswith("imagenet") for key in sources.data_sets),
        image=COCO_CATS,
        output=output,
        shape=shape,
        preprocessing=_preprocessing(sources),
        hyper_parameters=sources.facts.get("hyper_parameters") or _training_settings(sources),
        measured=_measured(sources),
        circumstances=_circumstances(training),
        figures=_FIGURES,
        is_of_jax=sources.conversion.get("dialect", {}).get("names", "vit_jax") in _JAX,
        convert_command=_convert_command(sources, name),
        citations="\n".join(released["papers"][key]["bibtex"] for key in cited).strip(),
    )


@cache
def _template() -> jinja2.Template:
    text = files("hf_vit.hub").joinpath("card_template.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": _plain, "size": _size}
    return environment.from_string(text)


def _count_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of the model of a config.json, without an encoder's untrained pooler."""
    model_class = MODEL_CLASSES[config["architectures"][0]]
    config_class = model_class.config_class
    fields = {name: value for name, value in config.items() if name in config_class.argument_names()}
    with torch.device("meta"):
        model = model_class(config_class(**fields))  # not `from_dict`, which formats every label for its log
    pooler = getattr(model, "pooler", None)
    if pooler is None or config.get("pooling") == "map":
        return model.num_parameters()
    return model.num_parameters() - sum(weight.numel() for weight in pooler.parameters())


def _size(size: int | Sequence[int]) -> str:
    height, width = (size, size) if isinstance(size, int) else size
    return f"{height} x {width}"


def _features(sources: Sources) -> tuple[str, tuple[Any, ...]]:
    """Return the output of an encoder that its example prints, and its shape for one image."""
    config = sources.config
    if (width := config.get("projection_dim")) is not None:
        return "image_embeds", (1, "patches", width) if config["pooling"] == "none" else (1, width)
    width = config.get("representation_size") or config.get("hidden_size")
    if sources.is_bit:
        width = 4 * config["embedding_size"] * 2 ** (len(config["depths"]) - 1)
    return "pooler_output", (1, width)


def _preprocessing(sources: Sources) -> str:
    settings = sources.processor
    if not settings:
        return "This repository has no image processor. Scale pixel values to [-1, 1]."
    steps = [_describe_resize(settings)] if settings.get("do_resize", True) else []
    if settings.get("do_center_crop") and (crop := settings.get("crop_size")):
        steps.append(f"The image is center-cropped to {crop['height']} x {crop['width']} pixels.")
    if settings.get("do_rescale", True) and settings.get("do_normalize", True):
        mean, std = (settings.get(name, 0.5) for name in ("image_mean", "image_std"))
        is_half = all(value in (0.5, [0.5], [0.5] * 3) for value in (mean, std))
        scaled = "scaled to [-1, 1]" if is_half else f"normalized with mean {mean} and standard deviation {std}"
        steps.append(f"Pixel values are {scaled}.")
    steps.append(f"The image processor does this; its preset is `{settings.get('preset', 'vit_jax')}`.")
    return " ".join(steps)


def _describe_resize(settings: Mapping[str, Any]) -> str:
    size = settings.get("size") or {}
    if settings.get("preset") == "native":
        count, patch_size = settings.get("max_num_patches"), settings.get("patch_size", 16)
        return f"Images keep their aspect ratio. They become at most {count} patches of {_size(patch_size)} pixels."
    how = _FILTERS.get(resample := settings.get("resample", 2), f"filter {resample}")
    if how != "area":
        how += f" with{'' if settings.get('antialias') else 'out'} antialiasing"
    if "shortest_edge" in size:
        return f"The short side is resized to {size['shortest_edge']} pixels ({how})."
    target = f"{size['height']} x {size['width']} pixels" if "height" in size else "the image size of the model"
    return f"Images are resized to {target} ({how}). The aspect ratio is not kept."


def _training_settings(sources: Sources) -> dict[str, str]:
    """Return the settings of the run that can change its result and are neither off nor zero."""
    settings = sources.training.get("settings") or {}
    unused = [*_NOT_LISTED]
    unused += [name for name in settings if name.startswith("adam_") and settings.get("optimizer") == "sgd"]
    unused += [name for name in settings if name.startswith("lora_") and settings.get("lora_rank") is None]
    return {
        name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for name, value in settings.items()
        if name == "seed" or (name not in unused and value not in (None, 0, "", "none", [], {}))
    }


def _measured(sources: Sources) -> list[tuple[str, str, str, str]]:
    """Return the metrics of the training run; the source is empty if the run has no command, date or version."""
    training = sources.training
    source = "the command below" if "command" in training else _circumstances(training)
    data = " ".join(str(training[key]) for key in ("dataset", "eval_split") if training.get(key))
    return [
        (data, _METRICS.get(name) or name.replace("_", " "), _value(name, value), source)
        for name, value in (training.get("metrics") or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _BOOKKEEPING and not (name.endswith("skipped") and value == 0)
    ]


def _circumstances(training: Mapping[str, Any]) -> str:
    """Return the date and the version of the training run, if recorded."""
    about = {"on": training.get("date"), "with hf_vit": training.get("versions", {}).get("hf_vit")}
    return " ".join(f"{word} {value}" for word, value in about.items() if value is not None)


def _value(metric: str, value: float) -> str:
    if metric.endswith("accuracy"):
        return f"{100 * value:.2f}%"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _plain(text: object) -> str:
    """Escape the markup in a name for a cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(str(text).split()))


def _convert_command(sources: Sources, name: str) -> str:
    command = ["hf-vit", "convert", sources.conversion.get("source", ""), name.split("/")[-1]]
    if "labels" in sources.facts and sources.classifies:
        command += ["--labels", sources.facts["labels"]]
    if "image_size" in sources.conversion:
        command += ["--image-size", _size(sources.conversion["image_size"]).replace(" ", "")]
    return shlex.join(command)
