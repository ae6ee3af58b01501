"""Model cards: from what a folder says to the README of a repository.

A card has a part that is ours, between two marks, and is rendered anew at every push; what stands around it is
somebody's own text and stays.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, constants, eval_result_entries_to_yaml

from ..catalog import Released, find_released, released_facts

BEGIN = "<!-- hf_vit: from here on rendered by `hf-vit card`; write above or below, it stays -->"
END = "<!-- hf_vit: end -->"
FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
# What transformers writes where there is no card: nobody's own text.
NOBODYS_TEXT = ("This model card has been automatically generated.", "[More Information Needed]")
# And what Trainer's card has where somebody might write something.
EMPTY_SECTION = re.compile(r"^#+ [^\n]*\n+more information needed[ \t]*(?:\n+|\Z)", re.IGNORECASE | re.MULTILINE)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OURS = ("library_name", "pipeline_tag", "model-index")  # of the front matter; in the rest the README's own word counts
ACCURACIES = ("accuracy", "top1", "top_1", "eval_accuracy")  # what training and Trainer call it
JAX = ("vit_jax", "flax", "big_vision", "big_transfer", "bit_paper", "bit")  # dialects of the original's files
COCO_CATS = "http://images.cocodataset.org/val2017/000000039769.jpg"

CLASSIFY = """\
import hf_vit
from transformers import pipeline

classify = pipeline("image-classification", model="{name}")
print(classify("{image}"))"""
EXTRACT = """\
import hf_vit
from transformers import AutoImageProcessor, AutoModel
from transformers.image_utils import load_image

processor = AutoImageProcessor.from_pretrained("{name}")
model = AutoModel.from_pretrained("{name}")
inputs = processor(load_image("{image}"), return_tensors="pt")
print(model(**inputs).pooler_output.shape)  # (1, {width})"""


CARD_SOURCES = ("config.json", "preprocessor_config.json", "conversion.json", "card_data.json", "README.md")


class Sources:
    """What the small files of a folder say, with the catalog's entry of the checkpoint it was converted from.

    Args:
        texts: of config.json, and where there are any of preprocessor_config.json, conversion.json (written by
            `convert`), card_data.json (written by training) and README.md.
    """

    def __init__(self, texts: Mapping[str, str]):
        self.config: dict[str, Any] = json.loads(texts["config.json"])
        self.processor, self.conversion, self.training = (
            json.loads(texts.get(name, "{}"))
            for name in ("preprocessor_config.json", "conversion.json", "card_data.json")
        )
        self.readme = texts.get("README.md", "")
        source = self.conversion.get("source")
        self.released: Released | None = None if source is None else find_released(source)
        self.facts: dict[str, Any] = {} if self.released is None else self.released.facts

    @property
    def classifies(self) -> bool:
        return "ForImageClassification" in (self.config.get("architectures") or [""])[0]

    @property
    def is_bit(self) -> bool:
        """Whether it is a ResNet and not a Vision Transformer."""
        return self.config.get("model_type") == "hf_bit"

    @property
    def data_sets(self) -> list[str]:
        """Keys of released.yaml, or what training was given."""
        trained_on = self.training.get("dataset")
        return [*self.facts.get("datasets", ()), *([trained_on] if trained_on else ())]


def render_card(texts: Mapping[str, str], name: str, *, license: str | None = None, tags: Sequence[str] = ()) -> str:
    """Render the card of a folder.

    Args:
        texts: contents of the folder's small files, see `Sources`; a README.md's own text is kept.
        name: of the repository or folder, for the title and the example.
        license: such as "apache-2.0"; by default the README's, or the one of the known source.
        tags: more tags.
    """
    sources = Sources(texts)
    own_metadata, before, after = split_readme(sources.readme)
    metadata = render_metadata(sources, name, own_metadata, license, tags)
    part = render_part(sources, name, metadata, has_own_text=bool(before))
    return f"---\n{metadata_yaml(metadata)}---\n" + "\n\n".join(text for text in (before, part, after) if text) + "\n"


def render_folder_card(folder: str | Path, *, name: str | None = None, license: str | None = None) -> str:
    """Render the card of a folder of `save_pretrained`; see `render_card`.

    Raises:
        ValueError: it holds no config.json.
    """
    folder = Path(folder)
    texts = {name: (folder / name).read_text() for name in CARD_SOURCES if (folder / name).is_file()}
    if "config.json" not in texts:
        raise ValueError(
            f"{folder} holds no config.json; give a folder that save_pretrained, convert or training wrote"
        )
    return render_card(texts, name or folder.resolve().name, license=license)


def split_readme(text: str) -> tuple[dict[str, Any], str, str]:
    """Front matter, and somebody's own text before and after our part."""
    match = FRONT_MATTER.match(text)
    metadata = (yaml.safe_load(match[1]) if match else None) or {}
    body = text[match.end() :] if match else text
    if BEGIN in body and END in body:
        before, rest = body.split(BEGIN, 1)
        return metadata, before.strip(), rest.split(END, 1)[1].strip()
    if all(sign in body for sign in NOBODYS_TEXT):
        return metadata, "", ""
    return metadata, EMPTY_SECTION.sub("", body).strip(), ""


def render_metadata(
    sources: Sources, name: str, own: Mapping[str, Any], license: str | None, tags: Sequence[str]
) -> dict[str, Any]:
    """The front matter; what the README already says stays, but for the fields that only the model can know."""
    names = released_facts()["datasets"]
    data_sets = [names[key]["hub"] if key in names else key for key in sources.data_sets]
    base_model = sources.training.get("base_model") or ""
    ours = ModelCardData(
        license=license or own.get("license") or sources.facts.get("license"),
        library_name="transformers",
        pipeline_tag="image-classification" if sources.classifies else "image-feature-extraction",
        tags=_union(own.get("tags"), ["hf_vit", "bit" if sources.is_bit else "vit", "vision", *tags]),
        datasets=_union(own.get("datasets"), filter(None, data_sets)) or None,
        base_model=base_model if HUB_NAME.fullmatch(base_model) and not Path(base_model).exists() else None,
        model_name=name.split("/")[-1],
        eval_results=eval_results(sources, name) or None,
    ).to_dict()
    kept = {field: value for field, value in own.items() if field not in (*OURS, *ours) or field == "base_model"}
    return {**ours, **kept}


def _union(own: Any, ours: Any) -> list[str]:
    return list(dict.fromkeys([*([own] if isinstance(own, str) else own or []), *ours]))


def metadata_yaml(metadata: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True, width=120)


def eval_results(sources: Sources, name: str) -> list[EvalResult]:
    """Accuracies of this very model, for `model-index`: the authors', a data set each, and those of our own run."""
    results = {}
    for row in sources.facts.get("results", ()):
        data = released_facts()["datasets"][row["dataset"]]
        if "of" not in row and sources.classifies:
            results.setdefault(
                row["dataset"],
                EvalResult(
                    task_type="image-classification",
                    dataset_type=data["hub"] or row["dataset"],
                    dataset_name=data["name"],
                    metric_type=row["metric"],
                    metric_value=row["value"],
                    metric_name=f"{row['metric']} (%)",
                    source_name=f"{row['source']['name']}, {row['table']}",
                    source_url=row["source"]["url"],
                ),
            )
    return [*results.values(), *_own_results(sources, name)]


def _own_results(sources: Sources, name: str) -> list[EvalResult]:
    data = sources.training.get("dataset")
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=data,
            dataset_name=data.split("/")[-1],
            dataset_split=sources.training.get("eval_split"),
            metric_type="accuracy",
            metric_value=value,
            metric_name="accuracy",
            source_name="measured by hf_vit after training",
            source_url=f"{constants.ENDPOINT}/{name}",
        )
        for metric, value in (sources.training.get("metrics") or {}).items()
        if metric in ACCURACIES and data
    ]


def eval_results_file(texts: Mapping[str, str], name: str) -> str | None:
    """`.eval_results/hf_vit.yaml`, which the Hub reads; None where no data set with a name on the Hub was scored."""
    entries = [
        EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id="default",
            value=result.metric_value,
            source_url=result.source_url,
            source_name=result.source_name,
            notes=result.metric_name,
        )
        for result in eval_results(Sources(texts), name)
        if HUB_NAME.fullmatch(result.dataset_type)
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False) if entries else None


def render_part(sources: Sources, name: str, metadata: Mapping[str, Any], has_own_text: bool) -> str:
    """Our part of the card, marks included."""
    return (
        template()
        .render(
            begin=BEGIN,
            end=END,
            has_own_text=has_own_text,
            title=name.split("/")[-1],
            summary=summary(sources),
            about=[sources.facts["trained"]] if "trained" in sources.facts else [],
            architecture=architecture(sources),
            limits=limits(sources),
            usage=usage(sources, name),
            has_code="auto_map" in sources.config,
            preprocessing=preprocessing(sources),
            hyper_parameters=sources.facts.get("hyper_parameters") or training_settings(sources),
            reported=reported(sources),
            measured=measured(sources),
            conversion=conversion(sources, name),
            compute=compute(sources),
            licence=licence_in_words(sources, metadata.get("license")),
            citations=citations(sources),
        )
        .strip()
    )


@cache
def template():
    from jinja2 import Environment, StrictUndefined

    text = (files(__package__) / "card_template.md.jinja").read_text()
    return Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined).from_string(text)


def summary(sources: Sources) -> str:
    kind = "image classifier" if sources.classifies else "image encoder"
    what, short, arxiv = (
        ("ResNet", "BiT", "1912.11370") if sources.is_bit else ("Vision Transformer", "ViT", "2010.11929")
    )
    if sources.released is not None:
        paper = released_facts()["papers"][sources.facts["papers"][0]]
        return (
            f"A {what} {kind}, {short}-{sources.released.variant.removesuffix('-gap-norep')} "
            f'{sources.facts["title"]}, of the paper "[{paper["title"]}](https://arxiv.org/abs/{paper["arxiv"]})". '
            "The authors released it as a JAX checkpoint; this is a conversion that computes the same numbers in "
            "PyTorch. This card was not written by the authors."
        )
    text = f"A {what} {kind} ([arXiv {arxiv}](https://arxiv.org/abs/{arxiv}))"
    if (base := sources.training.get("base_model")) is not None:
        text += f", fine-tuned from `{base}`"
    if (data := sources.training.get("dataset")) is not None:
        text += f", trained on `{data}`"
    return f"{text}, with [hf_vit](https://pypi.org/project/hf_vit) and Transformers."


def architecture(sources: Sources) -> dict[str, str]:
    config = sources.config
    if sources.is_bit:
        return architecture_of_bit(config, sources.classifies)
    rows = {
        "layers, width, MLP, heads": ", ".join(
            str(config[name])
            for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        ),
        "image size": "as the position embeddings in the file say",
    }
    if config["image_size"] is not None:
        counted = "parameters" if sources.classifies else "parameters of the encoder"
        rows = {counted: f"{count_parameters(config):,}", **rows}
        rows["image size"] = f"{_size(config['image_size'])} pixels; other sizes resample the position embeddings"
    if "stem_depths" in config:
        units = ", ".join(map(str, config["stem_depths"])) or "none, the root alone"
        rows["ResNet stem"] = f"units per stage: {units}; patches of {_size(config['patch_size'])} on its map"
    else:
        rows["patches"] = f"{_size(config['patch_size'])} pixels"
    rows["the head sees"] = {
        "cls": "the class token",
        "mean": "the mean of the tokens",
        "map": "attention pooling",
        "none": "every token",
    }[config["pooling"]]
    if sources.classifies:
        rows["classes"] = str(len(config.get("id2label") or (0, 1)))
    return rows


def architecture_of_bit(config: Mapping[str, Any], classifies: bool) -> dict[str, str]:
    form = {"preactivation": "pre-activation (ResNet-v2)", "bottleneck": "post-activation (ResNet-v1)"}
    width = config["embedding_size"]
    rows = {
        "parameters": f"{count_parameters(config):,}",
        "units per stage": f"{', '.join(map(str, config['depths']))}, {form[config['layer_type']]}",
        "width": f"{width} channels after the root, {width / 64:g} times a ResNet-50's",
        "normalisation": "GroupNorm with 32 groups, standardised weights",
        "image size": f"{_size(config['image_size'])} pixels; any other works too",
        "the head sees": "the mean of the last map",
    }
    return {**rows, "classes": str(len(config.get("id2label") or (0, 1)))} if classifies else rows


def count_parameters(config: Mapping[str, Any]) -> int:
    """Of the model that a config.json describes; of an encoder, what comes before the pooling."""
    import torch

    model_class = getattr(import_module("hf_vit"), config["architectures"][0])
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(config)))
    pooler = getattr(model, "pooler", None)
    return model.num_parameters() - (0 if pooler is None else sum(weight.numel() for weight in pooler.parameters()))


def _size(size: int | Sequence[int]) -> str:
    height, width = (size, size) if isinstance(size, int) else size
    return f"{height} x {width}"


def limits(sources: Sources) -> list[str]:
    use = "It is meant to turn images into features, and to be fine-tuned: it has no head."
    if sources.classifies:
        use = (
            "It is meant to sort images into its classes, or to be fine-tuned. It always answers with one of its "
            "classes, whatever the picture shows, and its scores are not calibrated probabilities."
        )
    paragraphs = [
        use,
        "Accuracy depends on the preprocessing and on the resolution: a figure holds for the image size and the crop "
        "that it was measured with.",
    ]
    if any(key.startswith("imagenet") for key in sources.data_sets):
        paragraphs.append(
            "ImageNet's pictures were collected on the web, mostly from North America and Europe, and its classes were "
            "chosen for a competition: people, places and things of elsewhere are recognised less well, and features "
            "carry what pictures of the time associated with each other. Do not use it to judge people."
        )
    elif sources.data_sets:
        paragraphs.append(f"It knows what `{sources.data_sets[-1]}` shows; other pictures were not looked at.")
    return paragraphs


def usage(sources: Sources, name: str) -> str:
    if sources.classifies:
        return CLASSIFY.format(name=name, image=COCO_CATS)
    width = sources.config.get("representation_size") or sources.config.get("hidden_size")
    if sources.is_bit:
        width = 4 * sources.config["embedding_size"] * 2 ** (len(sources.config["depths"]) - 1)
    return EXTRACT.format(name=name, image=COCO_CATS, width=width)


def preprocessing(sources: Sources) -> str:
    if not sources.processor:
        return "This repository has no image processor; pixels must be in [-1, 1]."
    size = sources.processor.get("crop_size") if sources.processor.get("do_center_crop") else None
    size = size or sources.processor.get("size") or {}
    pixels = f" to {size['height']} x {size['width']} pixels" if "height" in size else ""
    return f"Preset `{sources.processor.get('preset', 'vit_jax')}` of hf_vit's image processor{pixels}."


def training_settings(sources: Sources) -> dict[str, str]:
    settings = sources.training.get("settings") or {}
    return {name.replace("_", " "): str(value) for name, value in settings.items() if value not in (None, "", [], {})}


def reported(sources: Sources) -> list[dict[str, str]]:
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


def measured(sources: Sources) -> list[dict[str, str]]:
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


def conversion(sources: Sources, name: str) -> dict[str, Any]:
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
        rows["left out"] = "the head, which is all zero in the source"
    if "difference" in record:
        rows["largest difference to the original"] = str(record["difference"])
    if "versions" in record:
        rows["versions"] = ", ".join(f"{package} {its}" for package, its in record["versions"].items())
    text = "Every array was read once and rearranged, none was changed."
    if record.get("dialect", {}).get("names", "vit_jax") in JAX:
        text += " `hf-vit export --to jax` gives the source back."
    if "image_size" in record and not sources.is_bit:
        text = "Every array was read once and rearranged; the position embeddings were resampled to the image size."
    return {"text": text, "command": shlex.join(command), "rows": rows}


def compute(sources: Sources) -> str:
    training = sources.training
    if training:
        return f"Trained on {training.get('processes', 1)} x {training.get('device', 'unknown')}."
    text = sources.facts.get("compute")
    text = f"Pre-training took {text}." if text else "The authors state no cost of training for this model."
    if "images_per_second" in sources.facts:
        text += (
            f" Inference at this resolution: {sources.facts['images_per_second']} images/s on one V100 with timm's "
            "implementation, as the authors report (README of google-research/vision_transformer)."
        )
    return text


def licence_in_words(sources: Sources, licence: str | None) -> str:
    if licence is None:
        return "None is stated by whoever uploaded this model."
    return f"`{licence}`" + (
        ", as the authors released the weights." if sources.facts.get("license") == licence else "."
    )


def citations(sources: Sources) -> str:
    papers = released_facts()["papers"]
    return "\n".join(
        papers[key]["bibtex"] for key in sources.facts.get("papers", ["bit" if sources.is_bit else "vit"])
    ).strip()
