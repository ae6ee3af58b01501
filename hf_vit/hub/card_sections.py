"""The sections of a card: what it says about the model, from the folder and the catalog."""

import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import torch

from ..catalog import released_facts
from ..models.auto import AUTO_MODELS
from .card_sources import Sources

_JAX = ("vit_jax", "flax", "big_vision", "big_transfer", "bit_paper", "bit")  # dialects of the original's files
_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]")
_FIGURES = {  # that a training run draws, with what they show
    "confusion_matrix.png": "Confusion matrix: held-out images by label (rows) and prediction (columns)",
    "learning_curve.png": "Learning curve: loss, accuracy and learning rate by optimiser step",
}
COCO_CATS = "http://images.cocodataset.org/val2017/000000039769.jpg"

_CLASSIFY = """\
import hf_vit
from transformers import pipeline

classify = pipeline("image-classification", model="{name}")
print(classify("{image}"))"""
_EXTRACT = """\
import hf_vit
from transformers import AutoImageProcessor, AutoModel
from transformers.image_utils import load_image

processor = AutoImageProcessor.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}")
inputs = processor(load_image("{image}"), return_tensors="pt")
print(model(**inputs).{output}.shape)  # ({shape})"""


def render_sections(sources: Sources, name: str, licence: str | None, has_title: bool) -> str:
    """Render our part of a card.

    Args:
        name: of the repository or folder.
        licence: what the front matter says.
        has_title: whether it begins with a heading; somebody's own text has one of its own.
    """
    return _template().render(
        has_title=has_title,
        title=name.split("/")[-1],
        summary=_summary(sources),
        about=[sources.facts["trained"]] if "trained" in sources.facts else [],
        architecture=_architecture_of_bit(sources) if sources.is_bit else _architecture(sources),
        limits=_limits(sources),
        usage=_usage(sources, name),
        has_code="auto_map" in sources.config,
        preprocessing=_preprocessing(sources),
        hyper_parameters=sources.facts.get("hyper_parameters") or _training_settings(sources),
        reported=_reported(sources),
        measured=_measured(sources),
        by_class=_by_class(sources),
        mistaken=[[_plain(str(cell)) for cell in row] for row in sources.training.get("mistaken", ())],
        figures=[
            {"file": file, "text": text}
            for file, text in _FIGURES.items()
            if file in sources.training.get("figures", ())
        ],
        conversion=_conversion(sources, name),
        compute=_compute(sources),
        licence=_licence_in_words(sources, licence),
        citations=_citations(sources),
    )


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
        return (
            f"A {what} {kind}: {short}-{sources.released.variant.removesuffix('-gap-norep')} {sources.facts['title']}. "
            f'Paper: "[{paper["title"]}](https://arxiv.org/abs/{paper["arxiv"]})". '
            "The authors released a JAX checkpoint. This conversion computes the same numbers in PyTorch. "
            "The authors did not write this card."
        )
    text = f"A {what} {kind} ([arXiv {arxiv}](https://arxiv.org/abs/{arxiv}))"
    if (base := sources.training.get("base_model")) is not None:
        text += f", fine-tuned from `{base}`"
    if (data := sources.training.get("dataset")) is not None:
        text += f", trained on `{data}`"
    return f"{text}, with hf_vit and Transformers."


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
        "none": "none: every token",
    }[config["pooling"]]
    if config.get("projection_dim") is not None:
        rows["embedding (`image_embeds`)"] = f"{config['projection_dim']} numbers, not normalised"
    if sources.classifies:
        rows["classes"] = str(len(config.get("id2label") or (0, 1)))
    return rows


def _architecture_of_bit(sources: Sources) -> dict[str, str]:
    config = sources.config
    form = {"preactivation": "pre-activation (ResNet-v2)", "bottleneck": "post-activation (ResNet-v1)"}
    width = config["embedding_size"]
    rows = {
        "parameters": f"{_count_parameters(config):,}",
        "units per stage": f"{', '.join(map(str, config['depths']))}, {form[config['layer_type']]}",
        "width": f"{width} channels after the root ({width / 64:g} times a ResNet-50)",
        "normalisation": "GroupNorm with 32 groups, standardised weights",
        "image size": f"{_size(config['image_size'])} pixels; other sizes work too",
        "pooling": "mean of the last feature map",
    }
    return {**rows, "classes": str(len(config.get("id2label") or (0, 1)))} if sources.classifies else rows


def _count_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of the model that a config.json describes; an encoder's untrained pooler is left out."""
    model_class: Any = {model.__name__: model for _, model in AUTO_MODELS}[config["architectures"][0]]
    config_class = model_class.config_class
    fields = {name: value for name, value in config.items() if name in config_class.argument_names()}
    with torch.device("meta"):
        model = model_class(config_class(**fields))  # `from_dict` is slow: it prints every label for its log
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
        use = (
            "Use it to sort images into its classes, or fine-tune it. It always answers with one of its classes, "
            "whatever the picture shows. Its scores are not calibrated probabilities."
        )
    paragraphs = [
        use,
        "Accuracy depends on the preprocessing and the resolution. A figure holds only for the image size and the crop "
        "of its measurement.",
    ]
    if any(key.startswith("imagenet") for key in sources.data_sets):
        paragraphs.append(
            "ImageNet's pictures come from the web, mostly from North America and Europe. Its classes were chosen for "
            "a competition. People, places and things of other regions are recognised less well. The features contain "
            "the associations in these pictures. Do not use the model to judge people."
        )
    elif sources.data_sets:
        paragraphs.append(f"It was trained on `{sources.data_sets[-1]}` and was not tested on other pictures.")
    return paragraphs


def _usage(sources: Sources, name: str) -> str:
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
    if not sources.processor:
        return "This repository has no image processor. Scale pixels to [-1, 1]."
    size = sources.processor.get("crop_size") if sources.processor.get("do_center_crop") else None
    size = size or sources.processor.get("size") or {}
    pixels = f" to {size['height']} x {size['width']} pixels" if "height" in size else ""
    return f"Preset `{sources.processor.get('preset', 'vit_jax')}` of hf_vit's image processor{pixels}."


def _training_settings(sources: Sources) -> dict[str, str]:
    settings = sources.training.get("settings") or {}
    return {name.replace("_", " "): str(value) for name, value in settings.items() if value not in (None, "", [], {})}


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
    """The numbers of the training run, with its command and date where it states them."""
    training = sources.training
    how = [f"`{training['command']}`"] if "command" in training else []
    how += [str(training["date"])] if "date" in training else []
    how += [f"hf_vit {training['versions']['hf_vit']}"] if "hf_vit" in training.get("versions", {}) else []
    data = " ".join(str(training[key]) for key in ("dataset", "eval_split") if training.get(key))
    return [
        {"data": data, "metric": name, "value": f"{value:.4g}", "source": ", ".join(how)}
        for name, value in (training.get("metrics") or {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def _by_class(sources: Sources) -> dict[str, Any]:
    """The accuracy of each class, or of the worst where there are many, as training found it."""
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


def _plain(text: str) -> str:
    """A name for a cell of a table: nothing in it is markup."""
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
        rows["read as"] = f"{record['dialect']['names']}, {', '.join(record.get('dtypes', ()))}"
    if record.get("left_out"):
        rows["left out"] = "the head (all zero in the source)"
    if "difference" in record:
        rows["largest difference from the original"] = str(record["difference"])
    if "versions" in record:
        rows["versions"] = ", ".join(f"{package} {its}" for package, its in record["versions"].items())
    text = "The arrays were rearranged. No value was changed."
    if record.get("dialect", {}).get("names", "vit_jax") in _JAX:
        is_beside = sources.facts.get("beside") or record.get("beside")
        option = " --beside SOURCE.npz" if is_beside else ""
        text += f" `hf-vit export --to jax{option}` writes the source again."
    if "image_size" in record and not sources.is_bit:
        text = "The arrays were rearranged. The position embeddings were resampled to the image size."
    return {"text": text, "command": shlex.join(command), "rows": rows}


def _compute(sources: Sources) -> str:
    training = sources.training
    if training:
        return f"Trained on {training.get('processes', 1)} x {training.get('device', 'unknown')}."
    text = sources.facts.get("compute")
    text = f"Pre-training took {text}." if text else "The authors do not state the cost of training this model."
    if "images_per_second" in sources.facts:
        text += (
            f" Inference at this resolution: {sources.facts['images_per_second']} images/s on one V100 with timm "
            "(reported by the authors in the README of google-research/vision_transformer)."
        )
    return text


def _licence_in_words(sources: Sources, licence: str | None) -> str:
    if licence is None:
        return "The uploader states no licence."
    return f"`{licence}`" + (
        ", the licence of the released weights." if sources.facts.get("license") == licence else "."
    )


def _citations(sources: Sources) -> str:
    papers = released_facts()["papers"]
    return "\n".join(
        papers[key]["bibtex"] for key in sources.facts.get("papers", ["bit" if sources.is_bit else "vit"])
    ).strip()
