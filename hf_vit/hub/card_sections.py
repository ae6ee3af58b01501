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
from ..registration import AUTO_MODELS
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
_UNCALIBRATED = "Its scores are not calibrated probabilities."
_FILTERS = {2: "bilinear", 3: "bicubic", "area": "area"}  # `resample`: its name
COCO_CATS = "http://images.cocodataset.org/val2017/000000039769.jpg"

_CLASSIFY = """\
import hf_vit  # registers the model types
from transformers import pipeline

classify = pipeline("image-classification", model="{name}")
print(classify("{image}"))"""
_EXTRACT = """\
import hf_vit  # registers the model types
from transformers import AutoImageProcessor, AutoModel
from transformers.image_utils import load_image

processor = AutoImageProcessor.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}")
inputs = processor(load_image("{image}"), return_tensors="pt")
print(model(**inputs).{output}.shape)  # ({shape})"""


def render_sections(sources: Sources, name: str, license: str | None, has_title: bool, space: str | None) -> str:
    """Render our part of a card.

    Args:
        name: name of the repository or folder.
        license: the one in the front matter.
        has_title: begin with a heading; False if the user's own text stands above.
        space: name of a Space with the model's page.
    """
    return _template().render(
        has_title=has_title,
        title=name.split("/")[-1],
        summary=_summary(sources),
        about=[*([sources.facts["trained"]] if "trained" in sources.facts else []), *_try_it(space)],
        architecture=_architecture_of_bit(sources) if sources.is_bit else _architecture(sources),
        limits=_limits(sources),
        usage=_usage(sources, name),
        has_code="auto_map" in sources.config,
        is_of_transformers=sources.is_of_transformers,
        name=name,
        cost=sources.cost,
        preprocessing=_preprocessing(sources),
        hyper_parameters=sources.facts.get("hyper_parameters") or _training_settings(sources),
        is_released=sources.released is not None,
        reported=_reported(sources),
        measured=_measured(sources),
        measured_on=" ".join(("Measured", *_circumstances(sources))),
        command=sources.training.get("command"),
        by_class=_by_class(sources),
        mistaken=[[_plain(str(cell)) for cell in row] for row in sources.training.get("mistaken", ())],
        figures=[
            {"file": file, "text": text}
            for file, text in _FIGURES.items()
            if file in sources.training.get("figures", ())
        ],
        calibration=_calibration(sources),
        conversion=_conversion(sources, name),
        compute=_compute(sources),
        license=_describe_license(sources, license),
        citations=_citations(sources),
    )


def _try_it(space: str | None) -> list[str]:
    if space is None:
        return []
    return [f"[Try it in your browser](https://huggingface.co/spaces/{space}): it computes there and uploads nothing."]


@cache
def _template() -> jinja2.Template:
    text = files("hf_vit.hub").joinpath("card_template.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text)


def _summary(sources: Sources) -> str:
    kind = "image classifier" if sources.classifies else "image encoder"
    what, short, arxiv = (
        ("ResNet", "BiT", "1912.11370") if sources.is_bit else ("Vision Transformer", "ViT", "2010.11929")
    )
    if sources.released is not None:
        paper = released_facts()["papers"][sources.facts["papers"][0]]
        variant = sources.released.variant.removesuffix("-gap-norep")
        return (
            f"A {what} {kind}: {short}-{variant}, {sources.facts['title']}. "
            f'Paper: "[{paper["title"]}](https://arxiv.org/abs/{paper["arxiv"]})". '
            "It was converted from a JAX checkpoint, and computes the same outputs in PyTorch. "
            "This card was not written by the paper's authors."
        )
    text = f"A {what} {kind} ([arXiv {arxiv}](https://arxiv.org/abs/{arxiv})) for hf_vit and transformers."
    base, data = (sources.training.get(name) for name in ("base_model", "dataset"))
    if base is not None:
        text += f" It was fine-tuned from `{base}`" + (f" on `{data}`." if data is not None else ".")
    elif data is not None:
        text += f" It was trained on `{data}`."
    return text


def _architecture(sources: Sources) -> dict[str, str]:
    config = sources.config
    rows = {
        "layers, width, MLP, heads": ", ".join(
            str(config[name])
            for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        ),
        "image size": "set by the position embeddings in the file",
    }
    if config["image_size"] is not None:
        counted = "parameters" if sources.classifies else "parameters of the encoder"
        rows = {counted: f"{_count_parameters(config):,}", **rows}
        rows["image size"] = f"{_size(config['image_size'])} pixels; for other sizes, position embeddings are resampled"
    if "stem_depths" in config:
        units = ", ".join(map(str, config["stem_depths"])) or "none (the root only)"
        rows["ResNet stem"] = f"units per stage: {units}; patches of {_size(config['patch_size'])} on its feature map"
    else:
        rows["patches"] = f"{_size(config['patch_size'])} pixels"
        if (stored := config.get("stored_patch_size")) is not None:
            rows["patches"] += f", resized from {_size(stored)} in the file; `set_patch_size` sets another size"
    rows["pooling"] = {
        "cls": "class token",
        "mean": "mean of the tokens",
        "map": "attention pooling",
        "none": "none (one output for each patch)",
    }[config["pooling"]]
    if config.get("projection_dim") is not None:
        rows["embedding (`image_embeds`)"] = f"{config['projection_dim']} numbers, not normalized"
    if sources.classifies:
        rows["classes"] = _count_classes(config)
    return rows


def _architecture_of_bit(sources: Sources) -> dict[str, str]:
    config = sources.config
    form = {"preactivation": "pre-activation (ResNet-v2)", "bottleneck": "post-activation (ResNet-v1)"}
    width = config["embedding_size"]
    rows = {
        "parameters": f"{_count_parameters(config):,}",
        "units per stage": f"{', '.join(map(str, config['depths']))}, {form[config['layer_type']]}",
        "width": f"{width} channels after the root convolution (width factor {width / 64:g})",
        "normalization": "GroupNorm with 32 groups, standardized weights",
        "image size": f"{_size(config['image_size'])} pixels; other sizes work too",
        "pooling": "mean of the last feature map",
    }
    return {**rows, "classes": _count_classes(config)} if sources.classifies else rows


def _count_classes(config: Mapping[str, Any]) -> str:
    return f"{len(config.get('id2label') or (0, 1)):,}"


def _count_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of the model of a config.json, without an encoder's untrained pooler."""
    model_class: Any = {model.__name__: model for _, model in AUTO_MODELS}[config["architectures"][0]]
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


def _limits(sources: Sources) -> list[str]:
    use = "Use it to turn images into features, or fine-tune it. It has no classification head."
    if sources.classifies:
        predicts = "It predicts one of its classes for every image, even if the image shows none of them. "
        if sources.config.get("problem_type") == "multi_label_classification":
            predicts = "It scores each class independently (sigmoid): an image may show several of them, or none. "
        use = f"Use it to classify images into its classes, or fine-tune it. {predicts}" + (
            "Its scores are calibrated on held-out images." if sources.calibration else _UNCALIBRATED
        )
    paragraphs = [
        use,
        "Accuracy depends on the preprocessing and the resolution. A result holds only for the image size and the crop "
        "that it was measured with.",
    ]
    if any(key.startswith("imagenet") for key in sources.data_sets):
        paragraphs.append(
            "ImageNet's images come from the web, mostly from North America and Europe. Its classes were chosen for "
            "a competition. People, places and things of other regions are recognized less well. The features contain "
            "the biases of these images. Do not use the model to judge people."
        )
    elif sources.data_sets:
        key = sources.data_sets[-1]
        names = released_facts()["datasets"]
        name = names[key]["name"] if key in names else f"`{key}`"
        paragraphs.append(f"It was trained on {name}. Test it on your own images before you rely on it.")
    return paragraphs


def _usage(sources: Sources, name: str) -> str:
    text = _example(sources, name)
    return text.replace("import hf_vit  # registers the model types\n", "") if sources.is_of_transformers else text


def _example(sources: Sources, name: str) -> str:
    if sources.classifies:
        return _CLASSIFY.format(name=name, image=COCO_CATS)
    if (width := sources.config.get("projection_dim")) is not None:
        shape = f"1, patches, {width}" if sources.config["pooling"] == "none" else f"1, {width}"
        return _EXTRACT.format(name=name, image=COCO_CATS, output="image_embeds", shape=shape)
    width = sources.config.get("representation_size") or sources.config.get("hidden_size")
    if sources.is_bit:
        width = 4 * sources.config["embedding_size"] * 2 ** (len(sources.config["depths"]) - 1)
    return _EXTRACT.format(name=name, image=COCO_CATS, output="pooler_output", shape=f"1, {width}")


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


def _reported(sources: Sources) -> list[dict[str, str]]:
    return [
        {
            "data": released_facts()["datasets"][row["dataset"]]["name"],
            "metric": row["metric"],
            "value": str(row["value"]),
            "of": row.get("of", "this model"),
            "source": f"[{row['source']['name']}]({row['source']['url']}), {row['table']}",
        }
        for row in sources.facts.get("results", ())
    ]


def _measured(sources: Sources) -> list[dict[str, str]]:
    """Return the metrics of the training run; `source` is empty if the run has no command, date or version."""
    training = sources.training
    source = "the command below" if "command" in training else " ".join(_circumstances(sources))
    data = " ".join(str(training[key]) for key in ("dataset", "eval_split") if training.get(key))
    return [
        {
            "data": data,
            "metric": _METRICS.get(name) or name.replace("_", " "),
            "value": _value(name, value),
            "source": source,
        }
        for name, value in (training.get("metrics") or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _BOOKKEEPING and not (name.endswith("skipped") and value == 0)
    ]


def _circumstances(sources: Sources) -> list[str]:
    """Return the date and the version of the training run, if recorded."""
    training = sources.training
    when = [f"on {training['date']}"] if "date" in training else []
    version = training.get("versions", {}).get("hf_vit")
    return when if version is None else [*when, f"with hf_vit {version}"]


def _value(metric: str, value: float) -> str:
    if metric.endswith("accuracy"):
        return f"{100 * value:.2f} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _by_class(sources: Sources) -> dict[str, Any]:
    """Return the accuracy of each class, or of the least accurate ones if there are many."""
    classes, count = sources.training.get("classes", ()), sources.training.get("num_classes", 0)
    rows = [
        {
            "name": _plain(one["name"]),
            "images": f"{one['images']:,}",
            "accuracy": f"{100 * one['right'] / one['images']:.1f} %",
        }
        for one in classes
    ]
    return {"rows": rows, "count": f"{count:,}", "left_out": len(rows) < count} if rows else {}


def _calibration(sources: Sources) -> dict[str, Any]:
    """Return what a calibration measured on held-out images; empty without one."""
    found = sources.calibration
    if not found:
        return {}
    errors, rejection = found["expected_calibration_error"], found.get("rejection", {})
    return {
        "images": f"{found['images']:,}",
        "temperature": f"{found['temperature']:.3g}",
        "before": f"{errors['before']:.2%}",
        "after": f"{errors['after']:.2%}",
        "rows": [
            (f"{float(asked):.0%}", f"{one['measured']:.1%}", f"{one['classes']:.2f}")
            for asked, one in found["coverage"].items()
        ],
        "rejected": f"{rejection['measured']:.1%}" if rejection else "",
    }


def _plain(text: str) -> str:
    """Escape the markup in a name for a cell of a table."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _conversion(sources: Sources, name: str) -> dict[str, Any]:
    record = sources.conversion
    if not record:
        return {}
    source = record["source"]
    command = ["hf-vit", "convert", source, name.split("/")[-1]]
    if "labels" in sources.facts and sources.classifies:
        command += ["--labels", sources.facts["labels"]]
    if "image_size" in record:
        command += ["--image-size", _size(record["image_size"]).replace(" ", "")]
    rows = {"source": f"`{source}`"}
    if "sha256" in record:
        rows["sha256 of the source"] = f"`{record['sha256']}`"
    if "dialect" in record:
        rows["format of the source"] = f"{record['dialect']['names']}, {', '.join(record.get('dtypes', ()))}"
    if record.get("left_out"):
        rows["omitted"] = "the head (all zero in the source)"
    if "difference" in record:
        rows["largest difference from the original"] = str(record["difference"])
    if "versions" in record:
        rows["versions"] = ", ".join(f"{package} {its}" for package, its in record["versions"].items())
    text = "The arrays were rearranged. No value was changed."
    if record.get("dialect", {}).get("names", "vit_jax") in _JAX:
        is_beside = sources.facts.get("beside") or record.get("beside")
        option = " --beside SOURCE.npz" if is_beside else ""
        text += f" `hf-vit export --to jax{option}` writes the original file again."
    if "image_size" in record and not sources.is_bit:
        text = "The arrays were rearranged. The position embeddings were resampled to the image size above."
    return {"text": text, "command": shlex.join(command), "rows": rows}


def _compute(sources: Sources) -> str:
    training = sources.training
    if training:
        return f"Trained on {training.get('processes', 1)} x {training.get('device', 'unknown')}."
    if sources.released is None:
        return "The cost of training this model is not known."
    text = sources.facts.get("compute")
    text = f"Pre-training took {text}." if text else "The authors do not state the cost of training this model."
    if "images_per_second" in sources.facts:
        text += (
            f" Inference at this resolution: {sources.facts['images_per_second']} images/s on one V100 with timm "
            "(reported by the authors in the README of google-research/vision_transformer)."
        )
    return text


def _describe_license(sources: Sources, license: str | None) -> str:
    if license is None:
        return "The uploader did not state a license."
    return f"`{license}`" + (
        ", the license of the released weights." if sources.facts.get("license") == license else "."
    )


def _citations(sources: Sources) -> str:
    papers = released_facts()["papers"]
    return "\n".join(
        papers[key]["bibtex"] for key in sources.facts.get("papers", ["bit" if sources.is_bit else "vit"])
    ).strip()
