"""Model cards: the README of a repository, rendered from a folder and from the catalog, and checked before a push.

Our part of a card is between two marks and is rendered again at every push. The user's own text around it is kept.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.resources import files
from pathlib import Path, PureWindowsPath
from typing import Any

import jinja2
import torch
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCardData, constants, eval_result_entries_to_yaml

from ..catalog import Released, find_released, released_facts
from ..conversion.image_processors import translate_processor
from ..conversion.source import MODELS, build_config
from ..conversion.transformers import THEIR_MODELS, is_classifier, translate_settings
from ..files.addresses import redact_secrets
from ..files.messages import shorten
from ..files.model_files import HUB_NAME, check_model_path
from ..files.reading import parse_json, parse_yaml, read_text
from ..files.readme import BEGIN, END
from ..files.removed_names import with_new_keys
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.registry import MODEL_CLASSES

_JAX = ("vit_jax", "flax", "big_vision", "big_transfer", "bit_paper", "bit")  # dialects of the original files
_MARKUP = re.compile(r"[\\`*\[\]<>|~$&]")
_FIGURES = {  # figures of a training run: their alternative texts
    "confusion_matrix.png": "Confusion matrix: held-out images by label (rows) and prediction (columns)",
    "scatter.png": "Predicted and true values of the held-out images",
    "learning_curve.png": "Learning curve: loss, accuracy and learning rate by optimizer step",
}
# Settings of a training run that do not change its result, and those in other parts of the card.
_NOT_LISTED = ("dataset", "model")  # settings that the card names elsewhere
_METRICS = {"samples": "images", "skipped": "images skipped"}  # display names of metrics
_BOOKKEEPING = ("best", "best_step")  # about the best step; the card is about the last
_PREPROCESSING = (
    *("preset", "jpeg_dct", "size", "crop_size", "resample", "antialias", "image_mean", "image_std"),
    "max_num_patches",
)
# Preset -> largest difference of a logit from the original code's, with the preset's decoder and with Pillow's; from
# benchmarks/results/error_budget.json.
_FROM_FILES = {"vit_jax": ("2.2e-5", "1.1"), "augreg": ("1.8e-5", "0.70")}
COCO_CATS = "http://images.cocodataset.org/val2017/000000039769.jpg"
_OURS = ("library_name", "pipeline_tag", "model-index")  # the README's own values of other fields are kept
_ACCURACIES = ("accuracy", "top1", "top_1", "eval_accuracy")  # its names in training and in Trainer
CARD_SOURCES = ("config.json", "preprocessor_config.json", "conversion.json", "card_data.json", "calibration.json")
CARD_SOURCES += ("README.md",)
_SPACE_LINK = re.compile(r"\(https://huggingface\.co/spaces/([\w.-]+/[\w.-]+)\)")
_FRONT_MATTER = re.compile(r"\A\s*---[ \t]*\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)
# Sentences of the card that transformers writes by default; it is not the user's own text.
_NOBODYS_TEXT = ("This model card has been automatically generated.", "[More Information Needed]")
# Empty sections of Trainer's card.
_EMPTY_SECTION = re.compile(r"^#+ [^\n]*\n+more information needed[ \t]*(?:\n+|\Z)", re.IGNORECASE | re.MULTILINE)
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")


class Sources:
    """Content of a folder's small files, with the catalog's entry of the checkpoint that it was converted from.

    Args:
        texts: texts of config.json and, if they exist, preprocessor_config.json, conversion.json (written by
            `convert`), card_data.json (written by training), calibration.json (written by `calibrate`) and README.md.

    Raises:
        ValueError: a file is not JSON, or config.json is of a model of another package.
    """

    def __init__(self, texts: Mapping[str, str]):
        contents = {name: parse_json(texts.get(name, "{}"), name) for name in CARD_SOURCES[:-1]}
        for name, content in contents.items():
            if not isinstance(content, dict):
                raise ValueError(f"{name} holds a {type(content).__name__} (expected an object with names and values)")
        self.config, self.processor, conversion, training, self.calibration = contents.values()
        self.conversion = with_new_keys(conversion)
        self.training = without_folders(training)
        self.is_of_transformers = self.config.get("model_type") in THEIR_MODELS
        if self.is_of_transformers:
            config = build_config(translate_settings(self.config))
            model_class = MODELS[type(config)][is_classifier(self.config)]
            self.config = config.to_dict() | {"architectures": [model_class.__name__]}
            if self.processor:
                self.processor = HfViTImageProcessor(**translate_processor(self.processor)).to_dict()
        named = (self.config.get("architectures") or ["no model"])[0]
        if named not in MODEL_CLASSES:
            raise ValueError(
                f"cannot write a card: config.json names {named} (expected an hf_vit model); convert it first with "
                "`hf-vit convert`"
            )
        self.readme = texts.get("README.md", "")
        source = conversion.get("source")
        self.released: Released | None = None if source is None else find_released(source)
        self.facts: dict[str, Any] = {} if self.released is None else self.released.facts
        self.classifies = "ForImageClassification" in named
        self.is_bit = self.config.get("model_type") == "hf_bit"
        # Datasets that the model was trained on: keys of released.yaml, and that of our training.
        self.datasets: list[str] = list(self.facts.get("datasets", ()))
        if self.training.get("dataset"):
            self.datasets.append(self.training["dataset"])
        # The Hub shows this library's code snippet; transformers alone cannot load our folders without their code.
        self.library_name = "hf_vit"
        if self.is_of_transformers or "auto_map" in self.config:
            self.library_name = "transformers"


def without_folders(content: Any, key: str = "") -> Any:
    """Return the content of a file with the last part alone of every absolute path: readers do not have the folder.

    Args:
        key: name of the content in its object; the words of a "command" may be paths.
    """
    if isinstance(content, dict):
        return {name: without_folders(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [without_folders(value) for value in content]
    if key == "command":
        return shlex.join(_without_folder(word) for word in shlex.split(content))
    return _without_folder(content) if isinstance(content, str) else content


def _without_folder(word: str) -> str:
    option, equals, value = word.rpartition("=") if word.startswith("--") else ("", "", word)
    path = PureWindowsPath(value)  # also splits at the slashes of other systems
    is_absolute = value.startswith(("/", "~")) or path.is_absolute()
    return f"{option}{equals}{path.name}" if is_absolute else word


def render_card(
    texts: Mapping[str, str],
    name: str,
    *,
    license: str | None = None,
    tags: Sequence[str] = (),
    space: str | None = None,
) -> str:
    """Render the card of a folder.

    Args:
        texts: contents of the folder's small files, see `Sources`; the user's own text in README.md is kept.
        name: name of the repository or folder, for the title and the example.
        license: such as "apache-2.0"; None: that of the README, or of the known source.
        tags: more tags.
        space: name of a Space with the model's page; None: that of the README, if any.

    Raises:
        ValueError: a file cannot be read, or has a value of the wrong type.
    """
    try:
        return _render(texts, name, license, tags, space)
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(
            f"cannot render the card of {name}: one of {', '.join(texts)} has a value of the wrong type "
            f"({type(error).__name__}: {error})"
        ) from error


def _render(texts: Mapping[str, str], name: str, license: str | None, tags: Sequence[str], space: str | None) -> str:
    sources = Sources(texts)
    if space is None and (link := _SPACE_LINK.search(sources.readme)):
        space = link[1]
    own_metadata, before, after = split_readme(sources.readme)
    metadata = render_metadata(sources, name, own_metadata, license, tags)
    sections = render_sections(sources, name, metadata.get("license"), has_title=not before, space=space)
    part = f"{BEGIN}\n{redact_secrets(sections)}{END}"
    front_matter = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=120)
    return f"---\n{front_matter}---\n" + "\n\n".join(text for text in (before, part, after) if text) + "\n"


def render_folder_card(folder: str | Path, *, name: str | None = None, license: str | None = None) -> str:
    """Render the card of a folder of `save_pretrained`; see `render_card`.

    Raises:
        OSError: the folder holds no model.
    """
    folder = Path(folder)
    check_model_path(folder)
    texts = {name: read_source(folder / name) for name in CARD_SOURCES if (folder / name).is_file()}
    return render_card(texts, name or folder.resolve().name, license=license)


def read_source(path: str | Path) -> str:
    """Read a small file of a folder, with the line ends and the byte order mark of any system."""
    return read_text(path).replace("\r\n", "\n")


def split_readme(text: str) -> tuple[dict[str, Any], str, str]:
    """Split a README into its front matter and the user's own text before and after our part.

    Raises:
        ValueError: the front matter is not YAML, or its tags or datasets are not lists.
    """
    match = _FRONT_MATTER.match(text)
    metadata = (parse_yaml(match[1], "the front matter of README.md") if match else None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(metadata.get(field) or [], str | list) for field in ("tags", "datasets")
    ):
        raise ValueError(f"the front matter of README.md is {shorten(metadata)} (expected fields, with lists of names)")
    body = text[match.end() :] if match else text
    if BEGIN in body and END in body:
        before, rest = body.split(BEGIN, 1)
        return metadata, before.strip(), rest.split(END, 1)[1].strip()
    if all(sign in body for sign in _NOBODYS_TEXT):
        return metadata, "", ""
    return metadata, _EMPTY_SECTION.sub("", body).strip(), ""


def render_sections(sources: Sources, name: str, license: str | None, has_title: bool, space: str | None) -> str:
    """Render our part of a card.

    Args:
        name: name of the repository or folder.
        license: the one in the front matter.
        has_title: begin with a heading; False if the user's own text is above.
        space: name of a Space with the model's page.
    """
    released = released_facts()
    output, shape = _features(sources)
    cited = sources.facts.get("papers", ["bit" if sources.is_bit else "vit"])
    return _template().render(
        **vars(sources),
        papers=released["papers"],
        known_datasets=released["datasets"],
        has_title=has_title,
        name=name,
        space=space,
        license=license,
        parameters=_count_parameters(sources.config) if sources.config["image_size"] else None,
        saw_imagenet=any(key.startswith("imagenet") for key in sources.datasets),
        image=COCO_CATS,
        output=output,
        shape=shape,
        preprocessing={
            name: sources.processor[name] for name in _PREPROCESSING if sources.processor.get(name) is not None
        },
        from_files=None if sources.released is None else _FROM_FILES.get(sources.processor.get("preset", "")),
        hyper_parameters=sources.facts.get("hyper_parameters") or _training_settings(sources.training),
        measured=_measured(sources.training),
        figures=_FIGURES,
        is_of_jax=sources.conversion.get("dialect", {}).get("names", "vit_jax") in _JAX,
        convert_command=_convert_command(sources, name),
        citations="\n".join(released["papers"][key]["bibtex"] for key in cited).strip(),
    )


@cache
def _template() -> jinja2.Template:
    text = files("hf_vit.hub").joinpath("card_template.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"plain": _plain, "size": _size, "setting": _setting}
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


def _setting(value: Any) -> Any:
    """Return a setting of an image processor for reading, such as "height 224, width 224" of a size."""
    return ", ".join(f"{name} {number}" for name, number in value.items()) if isinstance(value, dict) else value


def _features(sources: Sources) -> tuple[str, tuple[Any, ...]]:
    """Return the output of an encoder that its example prints, and its shape for one image."""
    config = sources.config
    if (width := config.get("projection_dim")) is not None:
        return "image_embeds", (1, "patches", width) if config["pooling"] == "none" else (1, width)
    width = config.get("representation_size") or config.get("hidden_size")
    if sources.is_bit:
        width = 4 * config["embedding_size"] * 2 ** (len(config["depths"]) - 1)
    return "pooler_output", (1, width)


def _training_settings(training: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of the run that are neither off nor zero."""
    settings = training.get("settings") or {}
    unused = []
    if settings.get("optimizer") == "sgd":
        unused.append("adam_")
    if settings.get("lora_rank") is None:
        unused.append("lora_")
    listed = {}
    for name, value in settings.items():
        is_off = name != "seed" and value in (None, 0, "", "none", [], {})
        if not is_off and name not in _NOT_LISTED and not name.startswith(tuple(unused)):
            listed[name.replace("_", " ")] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return listed


def _measured(training: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (data, metric, value) of the metrics of the training run."""
    data = " ".join(str(training[key]) for key in ("dataset", "eval_split") if training.get(key))
    rows = []
    for name, value in (training.get("metrics") or {}).items():
        is_empty = name.endswith("skipped") and value == 0
        if isinstance(value, int | float) and name not in _BOOKKEEPING and not is_empty:
            rows.append((data, _METRICS.get(name) or name.replace("_", " "), _value(name, value)))
    return rows


def _value(metric: str, value: float) -> str:
    if metric.endswith("accuracy"):
        return f"{100 * value:.2f}%"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


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


def render_metadata(
    sources: Sources, name: str, own: Mapping[str, Any], license: str | None, tags: Sequence[str]
) -> dict[str, Any]:
    """Return the front matter; fields of the README are kept, except those that follow from the model."""
    known = released_facts()["datasets"]
    datasets = []
    for key in sources.datasets:
        if key in known:
            datasets.append(known[key]["hub"])  # None: it is not on the Hub
        elif _on_hub(key):
            datasets.append(key)
    base_model = sources.training.get("base_model") or ""
    ours = ModelCardData(
        license=license or own.get("license") or sources.facts.get("license"),
        library_name=sources.library_name,
        pipeline_tag="image-classification" if sources.classifies else "image-feature-extraction",
        tags=_union(own.get("tags"), ["hf_vit", "bit" if sources.is_bit else "vit", "vision", *tags]),
        datasets=_union(own.get("datasets"), filter(None, datasets)) or None,
        base_model=base_model if _on_hub(base_model) else None,
        model_name=name.split("/")[-1],
        eval_results=[*_eval_results(sources, name)] or None,
    ).to_dict()
    replaced = {*_OURS, *ours} - {"base_model"}
    kept = {field: value for field, value in own.items() if field not in replaced}
    return {**ours, **kept}


def _on_hub(name: str) -> bool:
    """Return whether a name can be a name on the Hub: it has the form owner/name, and is not a local folder."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _union(own: str | Sequence[str] | None, ours: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*([own] if isinstance(own, str) else own or []), *ours]))


def _eval_results(sources: Sources, name: str) -> Iterator[EvalResult]:
    """Yield the accuracies of the model for `model-index`: the authors' first one of each dataset, and our run's."""
    result = partial(EvalResult, task_type="image-classification")
    reported = set()
    for row in sources.facts.get("results", ()) if sources.classifies else ():
        if "of" in row or row["dataset"] in reported:  # of another model, or another protocol
            continue
        reported.add(row["dataset"])
        known = released_facts()["datasets"][row["dataset"]]
        yield result(
            dataset_type=known["hub"] or row["dataset"],
            dataset_name=known["name"],
            metric_type=row["metric"],
            metric_value=row["value"],
            metric_name=f"{row['metric']} (%)",
            source_name=f"{row['source']['name']}, {row['table']}",
            source_url=row["source"]["url"],
        )
    trained_on, metrics = sources.training.get("dataset"), sources.training.get("metrics") or {}
    source: dict[str, Any] = {}
    if HUB_NAME.fullmatch(name):  # a folder has no address yet
        source = {"source_name": "measured by hf_vit after training", "source_url": f"{constants.ENDPOINT}/{name}"}
    for metric in metrics if trained_on else ():
        if metric in _ACCURACIES:
            yield result(
                dataset_type=trained_on if _on_hub(trained_on) else Path(trained_on).name,
                dataset_name=Path(trained_on).name,
                dataset_split=sources.training.get("eval_split"),
                metric_type="accuracy",
                metric_value=metrics[metric],
                metric_name="accuracy",
                **source,
            )


def eval_results_file(texts: Mapping[str, str], name: str, task_of: Callable[[str], str | None]) -> str | None:
    """Return the text of `.eval_results/hf_vit.yaml` for the Hub; None without a result on one of its benchmarks.

    Args:
        task_of: function of a dataset's name that returns its task, or None if it is not a benchmark.
    """
    entries = [
        EvalResultEntry(
            dataset_id=result.dataset_type,
            task_id=task,
            value=result.metric_value,
            source_url=result.source_url,
            source_name=result.source_name,
            notes=result.metric_name,
        )
        for result in _eval_results(Sources(texts), name)
        if HUB_NAME.fullmatch(result.dataset_type) and (task := task_of(result.dataset_type)) is not None
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False) if entries else None


def check_card(card: str) -> list[str]:
    """Return the problems of a card, a sentence each; none for a good card."""
    license = split_readme(card)[0].get("license") or ""
    problems = []
    licenses = license if isinstance(license, list) else [license]
    if not all(_LICENSE.fullmatch(str(name)) for name in licenses):
        problems.append(
            f"the license is {license or 'missing'} (expected an identifier of the Hub, such as apache-2.0 or mit); "
            "give license= (--license), or add `license:` to the front matter"
        )
    if "more information needed" in card.lower():
        problems.append("it has the placeholder 'More Information Needed'; replace it, or delete the line")
    return problems
