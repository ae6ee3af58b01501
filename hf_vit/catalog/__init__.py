"""The catalog of released checkpoints: the entries of released.yaml, facts read from file names, and the search.

No array shows how a file is evaluated: preprocessing, and the image size of a ResNet, are read from its name.
"""

import csv
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from io import StringIO
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..files.download import fetch
from ..files.messages import check_choice
from ..files.model_files import HUB_NAME
from ..files.reading import read_text
from ..models.configuration_hf_bit import VARIANTS as BIT_VARIANTS

AUGREG = "gs://vit_models/augreg"
INDEX = f"{AUGREG}/index.csv"
# Architectures: name in file names -> name in the paper's tables
AUGREG_MODELS = {
    "Ti_16": "Ti/16",
    "S_32": "S/32",
    "S_16": "S/16",
    "B_32": "B/32",
    "B_16": "B/16",
    "B_8": "B/8",
    "L_16": "L/16",
    "R_Ti_16": "R+Ti/16",
    "R26_S_32": "R26+S/32",
    "R50_L_32": "R50+L/32",
}
# Token of the file name -> (name in arXiv 2106.10270, RandAugment layers, magnitude, mixup alpha). The files say light0
# and light1, the paper says light1 and light2. This correspondence is inferred from the recommended files and from
# big_vision's defaults.
AUGMENTATION = {
    "none": ("none", 0, 0, 0.0),
    "light0": ("light1", 2, 0, 0.0),
    "light1": ("light2", 2, 10, 0.2),
    "medium1": ("medium1", 2, 15, 0.2),
    "medium2": ("medium2", 2, 15, 0.5),
    "strong1": ("strong1", 2, 20, 0.5),
    "strong2": ("strong2", 2, 20, 0.8),
}
PRETRAINED_ON = {"i1k": "imagenet-1k", "i21k": "imagenet-21k"}
# Dataset in the file name -> its key in released.yaml
ADAPTED_TO = {
    "imagenet2012": "imagenet-1k",
    "cifar100": "cifar100",
    "kitti": "kitti",
    "oxford_iiit_pet": "oxford-iiit-pet",
    "resisc45": "resisc45",
}
# Token of the file name -> (steps, steps of warm-up); arXiv 2106.10270, section 3.4
_STEPS = {"0k": (500, 100), "2k": (2_500, 200), "10k": (10_000, 500), "20k": (20_000, 500)}
_GRAMMAR = re.compile(
    rf"(?P<model>{'|'.join(AUGREG_MODELS)})-(?P<data>i1k|i21k)-(?P<epochs>300|30)ep-lr_(?P<learning_rate>[0-9.]+)"
    rf"-aug_(?P<augmentation>{'|'.join(AUGMENTATION)})-wd_(?P<weight_decay>0\.1|0\.03)"
    r"-do_(?P<dropout>0\.0|0\.1)-sd_(?P<stochastic_depth>0\.0|0\.1)"
    rf"(?:--(?P<adapted_to>{'|'.join(ADAPTED_TO)})-steps_(?P<steps>{'|'.join(_STEPS)})"
    r"-lr_(?P<adapted_learning_rate>[0-9.]+)-res_(?P<resolution>224|384))?"
)
# Pattern of the end of a file's address -> how its model is evaluated: arguments of its processor ("processor"),
# image size and patch size in pixels; a group of the pattern is one of these sizes.
_EVALUATIONS: dict[str, dict[str, Any]] = {
    # FlexiViT (configs/proj/flexivit of big_vision): resize(272)|central_crop(240) of the distilled models, and
    # resize_small(272)|central_crop(240) of the others. They have no patch size of their own: 16 is that of the model
    # that they are compared with. The two baselines have a fixed patch size, although they are stored like FlexiViTs.
    r"/flexivit_[^/]*": {
        "processor": {"preset": "lit", "size": 272, "do_center_crop": True, "crop_size": 240},
        "image_size": 240,
        "patch_size": 16,
    },
    r"/vit_b(?P<patch_size>16|30)_i21k_300ep": {
        "processor": {"preset": "big_vision", "crop_pct": 240 / 272},
        "image_size": 240,
    },
    # Students and teachers of "Knowledge distillation: A good teacher is patient and consistent" (configs/proj/distill
    # of big_vision): resize_small(160)|central_crop(128) for all datasets except ImageNet.
    r"/R\d+x\d(_T)?_(flowers|food|pet|sun)(?P<image_size>\d+)": {
        "processor": {"preset": "big_vision", "crop_pct": 128 / 160}
    },
    r"/R\d+x\d(_T)?_(?P<image_size>\d+)": {"processor": {"preset": "big_vision"}},
    # BiT-HyperRule (bit_hyperrule.py of big_transfer): 128 for datasets of VTAB with images smaller than 96 x 96.
    r"-run\d-(cifar100|svhn|eurosat|dsprites-orientation|dsprites-xpos)": {"image_size": 128},
    r"-run\d-[^/]+|-ILSVRC2012": {"image_size": 480},
    # AugReg: only address or name identify its files.
    r"vit_models/augreg/[^/]*|-aug_[a-z]+\d?-wd_[^/]*": {"processor": {"preset": "augreg"}},
}
_MAX_REWORDED = 50  # names of 1000 that may have another wording


def parse_augreg(name: str) -> SimpleNamespace | None:
    """Parse the name of an AugReg file, without `.npz`; return None for any other name.

    Attributes of the result are the groups of the grammar, as text; the last four are None without fine-tuning.
    """
    match = _GRAMMAR.fullmatch(name)
    return None if match is None else SimpleNamespace(**match.groupdict())


def augreg_hyper_parameters(name: SimpleNamespace) -> dict[str, str]:
    """Return the settings of the training run, under the names that a model card uses."""
    paper, layers, magnitude, alpha = AUGMENTATION[name.augmentation]
    rows = {
        "optimizer": "Adam, beta1 0.9, beta2 0.999, gradients clipped at global norm 1",
        "batch size": "4096",
        "epochs": name.epochs,
        "learning rate": f"{name.learning_rate}, warm-up over 10,000 steps, then cosine decay",
        "weight decay": f"{name.weight_decay}, decoupled and multiplied by the learning rate",
        "dropout": "none" if name.dropout == "0.0" else name.dropout,
        "stochastic depth": "none"
        if name.stochastic_depth == "0.0"
        else f"{name.stochastic_depth} in the last layer, growing linearly from 0 in the first",
        "augmentation": f"inception crop, flip, and `aug_{name.augmentation}`: RandAugment with {layers} layers of "
        f"magnitude {magnitude}, mixup {alpha:g} ({paper} in the paper; this match of names is inferred)",
    }
    if name.adapted_to is not None and name.steps is not None:
        steps, warm_up = _STEPS[name.steps]
        rows["fine-tuning"] = (
            f"SGD, momentum 0.9, batch size 512, learning rate {name.adapted_learning_rate}, {steps:,} steps "
            f"(`steps_{name.steps}` in the file's name) with {warm_up} of warm-up, cosine decay, "
            f"{name.resolution} x {name.resolution} pixels"
        )
    return rows | {"source": "the file's name, and arXiv 2106.10270, section 3"}


class Released(NamedTuple):
    """A checkpoint of released.yaml: its family, and its entry completed by the family's defaults."""

    family: str
    name: str
    variant: str
    facts: dict[str, Any]

    @property
    def location(self) -> str:
        """The address, `gs://...`; the file name where there is no address."""
        file = f"{self.facts.get('path', self.name)}.npz"
        return f"{self.facts['location']}/{file}" if "://" in self.facts["location"] else file

    @property
    def preset(self) -> str:
        """The preset of `HfViTImageProcessor` that the checkpoint was evaluated with."""
        usual = "bit" if self.variant in BIT_VARIANTS else "vit_jax"
        return self.facts.get("preset") or evaluation_of(self.location)["processor"].get("preset", usual)


@cache
def released_facts() -> dict[str, Any]:
    """Return the content of released.yaml."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, if PyYAML was built with it, is 7 times as fast
    return yaml.load((files("hf_vit.catalog") / "released.yaml").read_text(encoding="utf-8"), loader)


@cache
def released() -> tuple[Released, ...]:
    """Return every checkpoint that has an entry: all files of the small buckets, and AugReg's recommended files."""
    families = released_facts()["families"].items()
    return tuple(_released(family, entry) for family, facts in families for entry in facts["checkpoints"])


@cache
def with_cards() -> tuple[Released, ...]:
    """Return every checkpoint that has a card: those with an entry, and examples of each name pattern."""
    patterns = released_facts()["patterns"].values()
    examples = [_of_pattern(card["name"]) for facts in patterns for card in facts["cards"]]
    return (*released(), *filter(None, examples))


def _released(family: str, entry: dict[str, Any]) -> Released:
    facts = {name: value for name, value in released_facts()["families"][family].items() if name != "checkpoints"}
    if family == "augreg" and (parsed := parse_augreg(entry["name"])):
        facts |= _augreg_facts(parsed)
    return Released(family, entry["name"], entry["variant"], facts | entry)


def find_released(location: str) -> Released | None:
    """Return the checkpoint at an address; for any other path, the only checkpoint with that file name; else None."""
    bucket_and_name = "/".join(bare_name(location).split("/")[-2:])
    for entry in released():
        if bucket_and_name == "/".join(bare_name(entry.location).split("/")[-2:]):
            return entry
    name = PurePosixPath(bucket_and_name).name
    namesakes = [entry for entry in released() if entry.name == name]
    if len(namesakes) == 1:
        return namesakes[0]
    if (parsed := parse_augreg(name)) is not None:
        trained = "It is one of the 52,268 files that were released with the paper."
        return _released("augreg", {"name": name, "variant": AUGREG_MODELS[parsed.model], "trained": trained})
    return _of_pattern(name)


def _of_pattern(name: str) -> Released | None:
    """Return the checkpoint of a family that is described by a name pattern."""
    for family, facts in released_facts()["patterns"].items():
        if match := re.fullmatch(facts["pattern"], name):
            own = next((card for card in facts["cards"] if card["name"] == name), {})
            variant = match.groupdict().get("variant") or facts["variants"][0]
            return Released(family, name, variant, {**facts, **own, "cards": []})
    return None


def refused(location: str) -> str | None:
    """Return the kind of a released file that hf_vit does not convert, by its address or name; None for any other."""
    for entry in released_facts()["refused"]:
        files = entry["files"] if "://" in location else f"*/{PurePosixPath(entry['files']).name}"
        if fnmatchcase(location if "://" in location else f"/{location}", files):
            return entry["what"]
    return None


def copies_of(location: str) -> list[str]:
    """Return the repositories of the Hub with the numbers of a released file, the best first, by its address."""
    return released_facts()["copies"].get(bare_name(location).removeprefix("gs://"), [])


def layers_missing_in(copy: str) -> list[str]:
    """Return the layers of the original that a copy of `copies_of` lacks."""
    return released_facts()["lost_by_copies"].get(copy, [])


def released_with(fingerprint: str) -> str | None:
    """Return the address of the released file with these weights; None if the catalog does not have the fingerprint."""
    paths = [path for path, known in released_facts()["fingerprints"].items() if known == fingerprint]
    return f"gs://{paths[0]}.npz" if paths else None


def original_of(copy: str) -> str | None:
    """Return the address of the released file that a repository of the Hub is a copy of; None for any other name."""
    paths = [path for path, copies in released_facts()["copies"].items() if copy in copies]
    return f"gs://{paths[0]}.npz" if paths else None


def bare_name(name: str) -> str:
    """Remove `augreg:` and `.npz`: `gs://vit_models/sam/ViT-B_16.npz` -> `gs://vit_models/sam/ViT-B_16`."""
    return name.removeprefix("augreg:").removesuffix(".npz")


def _augreg_facts(name: SimpleNamespace) -> dict[str, Any]:
    """Return the facts in the name of an AugReg file, under the keys of released.yaml."""
    datasets = [PRETRAINED_ON[name.data]]
    facts: dict[str, Any] = {"title": f"pre-trained on {dataset_name(datasets[0])}", "resolution": 224}
    if name.adapted_to is not None:
        facts["title"] += f" and fine-tuned on {dataset_name(ADAPTED_TO[name.adapted_to])}"
        facts["resolution"] = int(name.resolution or 0)
        datasets.append(ADAPTED_TO[name.adapted_to])
    classes_of = name.adapted_to or {"i1k": "imagenet2012"}.get(name.data)
    if classes_of == "imagenet2012":
        facts["labels"] = "imagenet1k"
    return facts | {"datasets": list(dict.fromkeys(datasets)), "hyper_parameters": augreg_hyper_parameters(name)}


def dataset_name(key: str) -> str:
    """Return the display name of a dataset, given its key in released.yaml."""
    return released_facts()["datasets"][key]["name"]


def variants() -> list[str]:
    """Return the architectures that have released checkpoints."""
    return list(dict.fromkeys([*AUGREG_MODELS.values(), *(entry.variant for entry in released())]))


def families() -> list[str]:
    """Return the families of released.yaml."""
    return [*released_facts()["families"], *released_facts()["patterns"]]


def evaluation_of(location: str) -> dict[str, Any]:
    """Return how the model of a released file is evaluated, by its address or name; see `_EVALUATIONS`.

    Returns:
        "processor", empty if the name does not tell; and, if known, "image_size" and "patch_size" (of FlexiViTs).
    """
    path = PurePosixPath(location)
    for pattern, known in _EVALUATIONS.items():
        if match := re.search(f"(?:{pattern})$", f"{path.parent}/{path.stem}"):
            return {"processor": {}, **known, **{name: int(size) for name, size in match.groupdict().items()}}
    return {"processor": {}}


def imagenet_numbers(names: Sequence[str]) -> list[int] | None:
    """Return each name's class index among ImageNet's 1000 classes; None if the classes are not ImageNet's.

    Two forms are recognized: wnids (n01440764) of any number of classes in any order, and 1000 names in words in
    ImageNet's order. The comparison of words ignores case, synonyms after a comma and notes in brackets. Up to 50 names
    may have a wording that ImageNet does not have; a name of another ImageNet class means another order, hence None.
    """
    by_wnid = {wnid: number for number, wnid in enumerate(built_in_class_names("imagenet1k_wnids"))}
    if names and all(name in by_wnid for name in names):
        return [by_wnid[name] for name in names]
    if len(names) != len(by_wnid):
        return None
    known = [_first_word(name) for name in built_in_class_names("imagenet1k")]
    others = [word for word, expected in zip(map(_first_word, names), known, strict=True) if word != expected]
    if len(others) > _MAX_REWORDED or not set(known).isdisjoint(others):
        return None
    return list(range(len(names)))


def _first_word(name: str) -> str:
    return re.split(r"[,(]", name)[0].strip().casefold().replace("_", " ")


def built_in_class_names(name: str) -> list[str]:
    """Return the class names of a list, such as "imagenet1k", in the order of the head's outputs."""
    return (files("hf_vit.catalog") / "labels" / f"{name}.txt").read_text(encoding="utf-8").splitlines()


# Search, in this list or in AugReg's index of 51,509 fine-tuned files; description of a file

# Columns of the index
_NUMBERS = ("final_val", "adapt_resolution", "adapt_final_val", "adapt_final_test")
_FILE = re.compile(r"[\w.+-]*")  # a file name in the index, without folders; empty for a model without fine-tuning
_TEXTS = ("name", "ds", "filename", "adapt_ds", "adapt_filename")


class Found(NamedTuple):
    """A result of `search`: the address of a file, and a description in words."""

    location: str
    about: str


def search(
    variant: str,
    adapted_to: str | None = None,
    resolution: int | None = None,
    index: str | os.PathLike | None = None,
    limit: int = 10,
) -> list[Found]:
    """Find checkpoints of an architecture; with an index, those with the best validation accuracy first.

    Args:
        variant: architecture, such as "B/16" or "R50+L/32".
        adapted_to: dataset of fine-tuning, under its name in file names: "imagenet2012", "cifar100", "kitti",
            "oxford_iiit_pet" or "resisc45". None means all; with an index and no `resolution`, it means models without
            fine-tuning.
        resolution: image size of fine-tuning, in pixels.
        index: path or URL of index.csv, which lists AugReg's 51,509 fine-tuned files. Without it, the built-in list
            (recommended AugReg files and the other buckets) is searched.
        limit: maximum number of results.

    Raises:
        ValueError: the architecture or dataset is unknown, or the index lacks a column.
    """
    check_choice("architecture", variant, variants())
    if adapted_to is not None:
        check_choice("dataset", adapted_to, ADAPTED_TO)
    if index is None:
        return _search_list(variant, adapted_to, resolution)[:limit]
    return _search_index(index, variant, adapted_to, resolution)[:limit]


def _search_list(variant: str, adapted_to: str | None, resolution: int | None) -> list[Found]:
    """Search the built-in list."""
    found = []
    for entry in released():
        if _plain(entry.variant) != _plain(variant) or resolution not in (None, entry.facts.get("resolution")):
            continue
        fine_tuned_on = entry.facts["datasets"][1:][-1:]  # none, or the last
        if adapted_to is None or fine_tuned_on == [ADAPTED_TO[adapted_to]]:
            found.append(Found(entry.location, entry.facts["title"]))
    if adapted_to is None and resolution is None:
        for family, facts in released_facts()["patterns"].items():
            if variant in facts["variants"]:
                found += files_of(family)
    return found


def _search_index(
    index: str | os.PathLike, variant: str, adapted_to: str | None, resolution: int | None
) -> list[Found]:
    """Search AugReg's index: fine-tuned files, or the pre-trained ones if no fine-tuning is asked for."""
    rows = [row for row in _read_index(index) if row["name"] == variant]
    if adapted_to is None and resolution is None:
        best = sorted({(row["final_val"], row["filename"], row["ds"]) for row in rows}, reverse=True)
        return [Found(f"{AUGREG}/{file}.npz", f"pre-trained on {ds}: {value:.4f}") for value, file, ds in best]
    found = []
    for row in sorted(rows, key=lambda row: row["adapt_final_val"], reverse=True):
        if adapted_to in (None, row["adapt_ds"]) and resolution in (None, row["adapt_resolution"]):
            accuracies = f"validation {row['adapt_final_val']:.4f}, test {row['adapt_final_test']:.4f}"
            found.append(Found(f"{AUGREG}/{row['adapt_filename']}.npz", f"{row['adapt_ds']}: {accuracies}"))
    return found


def _plain(variant: str) -> str:
    """Return the architecture without its variation, mean pooling without a pre-logits layer."""
    return variant.removesuffix("-gap-norep")


def files_of(family: str) -> list[Found]:
    """Return every file of a family of released.yaml; for a family with very many files, only their name pattern.

    Raises:
        ValueError: no family has this name.
    """
    check_choice("family", family, families())
    if facts := released_facts()["patterns"].get(family):
        return [Found(f"{facts['location']}/{facts['file']}.npz", facts["title"])]
    return [Found(entry.location, entry.facts["title"]) for entry in released() if entry.family == family]


def _read_index(index: str | os.PathLike) -> list[dict[str, Any]]:
    """Return the rows of AugReg's index.csv, given as a path or as a URL (downloaded once).

    Raises:
        ValueError: it lacks a column, or has an invalid row; the message names the line.
    """
    text = read_text(fetch(str(index)).path if "://" in str(index) else index)
    reader, rows = csv.DictReader(StringIO(text, newline=""), strict=True), []
    try:
        for row in reader:
            texts = {column: row[column] for column in _TEXTS}
            if not all(_FILE.fullmatch(texts[column]) for column in ("filename", "adapt_filename")):
                raise ValueError("a file name is not AugReg's")  # it decides what is downloaded
            rows.append({**texts, **{column: float(row[column]) for column in _NUMBERS}})
    except (csv.Error, KeyError, TypeError, ValueError) as error:
        where = f"{index}, line {reader.line_num}"
        raise ValueError(f"cannot read {where}: {error!r} (expected AugReg's index.csv)") from error
    return rows


def best_augreg(variant: str, index: str | os.PathLike | None = None) -> str:
    """Return the name of the pre-trained AugReg file that the original code chooses for an architecture.

    The choice is the highest `final_val` among files pre-trained on ImageNet-21k for 300 epochs
    (google-research/vision_transformer, vit_jax/train.py). The nine files that its README recommends need no index.

    Args:
        variant: architecture, "B/16" or "B_16".
        index: path or URL of AugReg's index.csv. Default: the built-in list, then the published index for an
            architecture that is not in the list.

    Raises:
        ValueError: AugReg has no such architecture, or the index has no such file.
    """
    variant = AUGREG_MODELS.get(variant, variant)
    check_choice("architecture of AugReg", variant, AUGREG_MODELS.values())
    if index is None:
        for entry in released():
            if entry.family == "augreg" and entry.variant == variant and "--" not in entry.name:
                return entry.name
    rows = [row for row in _read_index(index or INDEX) if row["name"] == variant and row["ds"] == "i21k"]
    if not rows:
        raise ValueError(f"{index or INDEX} has no {variant} pre-trained on i21k")
    return max(rows, key=lambda row: row["final_val"])["filename"]


def _recommended(variant: str, resolution: int) -> str:
    """Return the name of the file to use for an architecture, fine-tuned on ImageNet-1k.

    At 384 pixels it is the one that the README of the original code recommends. It recommends none at 224 pixels: there
    it is the file that timm publishes too, chosen by accuracy.

    Raises:
        ValueError: there is none.
    """
    copied = (location.rpartition("/")[2] for location in released_facts()["copies"])
    names = [entry.name for entry in released() if entry.family == "augreg"] if resolution == 384 else copied
    wanted = (variant, "i21k", "imagenet2012", str(resolution))
    for name in names:
        parsed = parse_augreg(name)
        if parsed and (AUGREG_MODELS[parsed.model], parsed.data, parsed.adapted_to, parsed.resolution) == wanted:
            return name
    known = ", ".join(AUGREG_MODELS.values())
    raise ValueError(f"there is no augreg:{variant}-{resolution} (expected {known}, also with -384 except for B/8)")


def address_of(source: str, index: str | os.PathLike | None = None) -> str:
    """Return what `augreg:...` or a revision on the Hub stands for; any other `source` is returned as it is.

    `owner/name@revision` (a branch, tag or commit) stands for its folder in the Hub's cache, into which it is
    downloaded. `augreg:Ti/16` and `augreg:Ti/16-384` are files fine-tuned on ImageNet-1k, at 224 and 384 pixels;
    `augreg:best:B/16` is a pre-trained file; `augreg:NAME` the file of that name.

    Raises:
        ValueError: NAME is not the name of an AugReg file, or AugReg has no such architecture.
        OSError: the revision cannot be downloaded.
    """
    name, _, revision = source.partition("@")
    if revision and HUB_NAME.fullmatch(name) and not Path(source).exists():
        from huggingface_hub import snapshot_download  # slow to import

        return snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.yaml", "*.md"])
    if not source.startswith("augreg:"):
        return source
    name = source.removeprefix("augreg:")
    if name.startswith("best:"):
        name = best_augreg(name.removeprefix("best:"), index)
    elif (match := re.fullmatch(r"(.*/\d+)(?:-(\d+))?", name)) is not None:
        name = _recommended(match[1], int(match[2] or 224))
    elif parse_augreg(name.removesuffix(".npz")) is None:
        raise ValueError(f"{name!r} is not the name of an AugReg file; give `augreg:best:B/16` to choose one")
    return f"{AUGREG}/{name.removesuffix('.npz')}.npz"


def explain(name: str) -> str:
    """Describe a released file in words.

    Args:
        name: name of a file, with or without its address and `.npz`: an AugReg name, `augreg:Ti/16`, `sam/ViT-B_16`,
            ... Where several files have the name, all of them are described.

    Raises:
        ValueError: no released file has this name.
    """
    name = address_of(name)
    entry = find_released(name)
    entries = [entry] if entry else [other for other in released() if other.name == bare_name(name)]
    if not entries:
        if (what := refused(name)) is not None:
            return f"{name}\nnot converted by hf_vit: {what}"
        raise ValueError(
            f"{name!r} is not a released file, an architecture ({', '.join(variants())}) "
            f"or a family ({', '.join(families())})"
        )
    return "\n\n".join(map(_describe, entries))


def _describe(entry: Released) -> str:
    facts = entry.facts
    resolution = facts.get("resolution")
    architecture = f"{'BiT' if entry.family.startswith('bit') else 'ViT'}-{_plain(entry.variant)}"
    lines = [
        entry.location if "://" in facts["location"] else f"{entry.location} ({facts['location']})",
        f"{architecture}, {facts['title']}"
        + (f"; {resolution} x {resolution} pixels" if resolution else "; its resolution is read from the file"),
    ]
    if "beside" in facts:
        lines.append(f"  also in the file, not converted: {', '.join(facts['beside'])}")
    lines += [f"  {label}: {text}" for label, text in facts["hyper_parameters"].items()]
    for result in facts.get("results", ()):
        of = f" of {result['of']}" if "of" in result else ""
        lines.append(
            f"  {dataset_name(result['dataset'])} {result['metric']}{of}: {result['value']}% "
            f"({result['source']['name']}, {result['table']})"
        )
    if copies := copies_of(entry.location):
        lines.append(f"  copies with the same weights: {', '.join(copies)}")
    if fingerprint := released_facts()["fingerprints"].get(bare_name(entry.location).removeprefix("gs://")):
        lines.append(f"  fingerprint: {fingerprint}")
    return "\n".join(lines)
