"""The catalog of released checkpoints: what a file name means, which files there are, which is the best."""

import csv
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

AUGREG = "gs://vit_models/augreg"
INDEX = f"{AUGREG}/index.csv"
# The architectures of "How to train your ViT?", as its file names and as its tables call them.
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
# Token of the file name: (its name in arXiv 2106.10270, RandAugment layers, magnitude, mixup alpha). The files say
# light0 and light1 where the paper says light1 and light2; that they are the same in this order is an inference from
# the recommended files and from the defaults of big_vision.
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
# Data set of the file name: its key in released.yaml
ADAPTED_TO = {
    "imagenet2012": "imagenet-1k",
    "cifar100": "cifar100",
    "kitti": "kitti",
    "oxford_iiit_pet": "oxford-iiit-pet",
    "resisc45": "resisc45",
}
# Token of the file name: (steps, steps of warm-up); arXiv 2106.10270, section 3.4
STEPS = {"0k": (500, 100), "2k": (2_500, 200), "10k": (10_000, 500), "20k": (20_000, 500)}

GRAMMAR = re.compile(
    rf"(?P<model>{'|'.join(AUGREG_MODELS)})-(?P<data>i1k|i21k)-(?P<epochs>300|30)ep-lr_(?P<learning_rate>[0-9.]+)"
    rf"-aug_(?P<augmentation>{'|'.join(AUGMENTATION)})-wd_(?P<weight_decay>0\.1|0\.03)"
    r"-do_(?P<dropout>0\.0|0\.1)-sd_(?P<stochastic_depth>0\.0|0\.1)"
    rf"(?:--(?P<adapted_to>{'|'.join(ADAPTED_TO)})-steps_(?P<steps>{'|'.join(STEPS)})"
    r"-lr_(?P<adapted_learning_rate>[0-9.]+)-res_(?P<resolution>224|384))?"
)
COLUMNS = ("name", "ds", "final_val", "adapt_ds", "adapt_resolution", "adapt_final_val", "adapt_final_test",
           "filename", "adapt_filename")  # fmt: skip


class AugRegName(NamedTuple):
    """What the name of an AugReg file says; the last four fields are None for a model that was only pre-trained."""

    model: str
    data: str
    epochs: str
    learning_rate: str
    augmentation: str
    weight_decay: str
    dropout: str
    stochastic_depth: str
    adapted_to: str | None
    steps: str | None
    adapted_learning_rate: str | None
    resolution: str | None


class Released(NamedTuple):
    """A checkpoint of released.yaml: its family there, and its entry with the family's defaults filled in."""

    family: str
    name: str
    variant: str
    facts: dict[str, Any]

    @property
    def location(self) -> str:
        return f"{self.facts['location']}/{self.name}.npz"


class Found(NamedTuple):
    """An answer of `search`: a file, and what is known of it in words."""

    location: str
    about: str


@cache
def released_facts() -> dict[str, Any]:
    """The content of released.yaml."""
    import yaml

    return yaml.safe_load((files(__package__) / "released.yaml").read_text())


@cache
def released() -> tuple[Released, ...]:
    """Every checkpoint that has a card: all of the small buckets, and the recommended ones of AugReg."""
    families = released_facts()["families"].items()
    return tuple(_released(family, entry) for family, facts in families for entry in facts["checkpoints"])


def _released(family: str, entry: dict[str, Any]) -> Released:
    facts = {name: value for name, value in released_facts()["families"][family].items() if name != "checkpoints"}
    if family == "augreg" and (parsed := parse_augreg(entry["name"])):
        facts |= augreg_facts(parsed)
    return Released(family, entry["name"], entry["variant"], facts | entry)


def find_released(location: str) -> Released | None:
    """The checkpoint at an address; for any other path, the one of that file name if only one is called so."""
    bucket_and_name = "/".join(_bare(location).split("/")[-2:])
    for entry in released():
        if bucket_and_name == f"{entry.family}/{entry.name}":
            return entry
    name = PurePosixPath(bucket_and_name).name
    namesakes = [entry for entry in released() if entry.name == name]
    if len(namesakes) == 1:
        return namesakes[0]
    if (parsed := parse_augreg(name)) is not None:
        return Released("augreg", name, AUGREG_MODELS[parsed.model], _augreg_entry(parsed))
    return None


def _augreg_entry(parsed: AugRegName) -> dict[str, Any]:
    family = {name: value for name, value in released_facts()["families"]["augreg"].items() if name != "checkpoints"}
    trained = "It is one of the 52,268 files that were released with the paper."
    return family | augreg_facts(parsed) | {"trained": trained}


def _bare(name: str) -> str:
    """`gs://vit_models/sam/ViT-B_16.npz` -> `gs://vit_models/sam/ViT-B_16`; `augreg:NAME` -> NAME."""
    return name.removeprefix("augreg:").removesuffix(".npz")


def parse_augreg(name: str) -> AugRegName | None:
    """Read the name of an AugReg file, without `.npz`; None for any other name."""
    match = GRAMMAR.fullmatch(name)
    return None if match is None else AugRegName(**match.groupdict())


def augreg_facts(name: AugRegName) -> dict[str, Any]:
    """What the name of an AugReg file says, in the terms of released.yaml."""
    datasets = [PRETRAINED_ON[name.data]]
    facts: dict[str, Any] = {"title": f"pre-trained on {_data_set(datasets[0])}", "resolution": 224}
    if name.adapted_to is not None:
        facts["title"] += f" and fine-tuned on {_data_set(ADAPTED_TO[name.adapted_to])}"
        facts["resolution"] = int(name.resolution or 0)
        datasets.append(ADAPTED_TO[name.adapted_to])
    classes_of = name.adapted_to or {"i1k": "imagenet2012"}.get(name.data)
    if classes_of == "imagenet2012":
        facts["labels"] = "imagenet1k"
    return facts | {"datasets": list(dict.fromkeys(datasets)), "hyper_parameters": augreg_hyper_parameters(name)}


def augreg_hyper_parameters(name: AugRegName) -> dict[str, str]:
    paper, layers, magnitude, alpha = AUGMENTATION[name.augmentation]
    rows = {
        "optimiser": "Adam, beta1 0.9, beta2 0.999, gradients clipped at global norm 1",
        "batch size": "4096",
        "epochs": name.epochs,
        "learning rate": f"{name.learning_rate}, warm-up over 10,000 steps, then cosine decay",
        "weight decay": f"{name.weight_decay}, decoupled and multiplied by the learning rate",
        "dropout": "none" if name.dropout == "0.0" else name.dropout,
        "stochastic depth": "none"
        if name.stochastic_depth == "0.0"
        else f"{name.stochastic_depth} in the last layer, growing linearly from 0 in the first",
        "augmentation": f"inception crop, flip, and `aug_{name.augmentation}`: RandAugment with {layers} layers of "
        f"magnitude {magnitude}, mixup {alpha:g} (the paper's {paper}; which token is which level is inferred)",
    }
    if name.adapted_to is not None and name.steps is not None:
        steps, warm_up = STEPS[name.steps]
        rows["fine-tuning"] = (
            f"SGD, momentum 0.9, batch size 512, learning rate {name.adapted_learning_rate}, {steps:,} steps "
            f"(`steps_{name.steps}` in the file's name) with {warm_up} of warm-up, cosine decay, "
            f"{name.resolution} x {name.resolution} pixels"
        )
    return rows | {"source": "the file's name, and arXiv 2106.10270, section 3"}


def _data_set(key: str) -> str:
    return released_facts()["datasets"][key]["name"]


def explain(name: str) -> str:
    """What a file is, in words.

    Args:
        name: of a file, with or without its address and `.npz`: an AugReg name, `sam/ViT-B_16`, ...

    Raises:
        ValueError: no released file is called that.
    """
    bare = _bare(name)
    entry = find_released(name)
    namesakes = [other for other in released() if other.name == bare]
    if entry is None and not namesakes:
        raise ValueError(f"{name!r} is no released file, and no architecture: {', '.join(variants())}")
    return "\n\n".join(_in_words(entry) for entry in ([entry] if entry else namesakes))


def _in_words(entry: Released) -> str:
    facts = entry.facts
    resolution = facts.get("resolution")
    architecture = f"{'BiT' if entry.family.startswith('bit') else 'ViT'}-{entry.variant.removesuffix('-gap-norep')}"
    lines = [
        entry.location,
        f"{architecture}, {facts['title']}"
        + (f"; {resolution} x {resolution} pixels" if resolution else "; its resolution is read from the file"),
    ]
    lines += [f"  {label}: {text}" for label, text in facts["hyper_parameters"].items()]
    for result in facts.get("results", ()):
        of = f" of {result['of']}" if "of" in result else ""
        lines.append(
            f"  {_data_set(result['dataset'])} {result['metric']}{of}: {result['value']} % "
            f"({result['source']['name']}, {result['table']})"
        )
    if entry.variant == "B/8" and entry.family == "augreg":
        lines.append("  note: B/8 was released at 224 x 224 pixels alone")
    return "\n".join(lines)


def variants() -> list[str]:
    """The architectures that have released checkpoints."""
    return list(dict.fromkeys([*AUGREG_MODELS.values(), *(entry.variant for entry in released())]))


def search(
    variant: str,
    adapted_to: str | None = None,
    resolution: int | None = None,
    index: str | os.PathLike | None = None,
    limit: int = 10,
) -> list[Found]:
    """Find checkpoints of an architecture, the best on validation images first where an index is given.

    Args:
        variant: such as "B/16" or "R50+L/32".
        adapted_to: a data set of fine-tuning, as file names call it: "imagenet2012", "cifar100", "kitti",
            "oxford_iiit_pet" or "resisc45"; None for all, and with an index for models that were only pre-trained.
        resolution: of fine-tuning, in pixels.
        index: the index.csv of AugReg's 51,509 fine-tuned files: a path or an address. Without it, the built-in list
            of recommended files and of the other buckets is searched.

    Raises:
        ValueError: an unknown architecture or data set, or an index without the columns.
    """
    if variant not in variants():
        raise ValueError(f"unknown architecture {variant!r}; known: {', '.join(variants())}")
    if adapted_to is not None and adapted_to not in ADAPTED_TO:
        raise ValueError(f"no file was adapted to {adapted_to!r}; data sets: {', '.join(ADAPTED_TO)}")
    if index is None:
        found = [entry for entry in released() if _fits(entry, variant, adapted_to, resolution)]
        return [Found(entry.location, entry.facts["title"]) for entry in found][:limit]
    rows = (row for row in read_index(index) if row["name"] == variant)
    if adapted_to is None and resolution is None:
        best = sorted({(float(row["final_val"]), row["filename"], row["ds"]) for row in rows}, reverse=True)
        return [Found(f"{AUGREG}/{file}.npz", f"pre-trained on {ds}: {value:.4f}") for value, file, ds in best[:limit]]
    chosen = [
        row for row in rows
        if adapted_to in (None, row["adapt_ds"]) and resolution in (None, int(float(row["adapt_resolution"])))
    ]  # fmt: skip
    chosen.sort(key=lambda row: float(row["adapt_final_val"]), reverse=True)
    return [
        Found(
            f"{AUGREG}/{row['adapt_filename']}.npz",
            f"{row['adapt_ds']}: validation {float(row['adapt_final_val']):.4f}, "
            f"test {float(row['adapt_final_test']):.4f}",
        )
        for row in chosen[:limit]
    ]


def _fits(entry: Released, variant: str, adapted_to: str | None, resolution: int | None) -> bool:
    data = ADAPTED_TO.get(adapted_to or "")
    return (
        entry.variant.removesuffix("-gap-norep") == variant.removesuffix("-gap-norep")
        and (data is None or (entry.facts["datasets"][-1] == data and len(entry.facts["datasets"]) > 1))
        and resolution in (None, entry.facts.get("resolution"))
    )


def read_index(index: str | os.PathLike) -> Iterator[dict[str, str]]:
    """The rows of AugReg's index.csv: a path, or an address that is downloaded once.

    Raises:
        ValueError: it lacks a column.
    """
    path = Path(index)
    if "://" in str(index):
        from ..files.download import fetch

        path = fetch(str(index)).path
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
            raise ValueError(f"{index} is not the index of AugReg; it lacks {', '.join(missing)}")
        yield from reader


def best_augreg(variant: str, index: str | os.PathLike | None = None) -> str:
    """The pre-trained AugReg file that the original code chooses for an architecture.

    It is the one with the highest `final_val` among those pre-trained on ImageNet-21k for 300 epochs
    (google-research/vision_transformer, vit_jax/train.py); nine are recommended in its README and need no index.

    Args:
        variant: "B/16" or "B_16".
        index: AugReg's index.csv, a path or an address; the built-in list by default, and the published index where
            that does not have the architecture.
    """
    variant = AUGREG_MODELS.get(variant, variant)
    if variant not in AUGREG_MODELS.values():
        raise ValueError(f"AugReg has no {variant!r}; it has {', '.join(AUGREG_MODELS.values())}")
    if index is None:
        for entry in released():
            if entry.family == "augreg" and entry.variant == variant and "--" not in entry.name:
                return entry.name
    rows = [row for row in read_index(index or INDEX) if row["name"] == variant and row["ds"] == "i21k"]
    if not rows:
        raise ValueError(f"{index or INDEX} has no {variant} that was pre-trained on i21k")
    return max(rows, key=lambda row: float(row["final_val"]))["filename"]


def address_of(source: str, index: str | os.PathLike | None = None) -> str:
    """`augreg:best:B/16` or `augreg:NAME` as an address; anything else as it is."""
    if not source.startswith("augreg:"):
        return source
    name = source.removeprefix("augreg:")
    if name.startswith("best:"):
        name = best_augreg(name.removeprefix("best:"), index)
    elif parse_augreg(name.removesuffix(".npz")) is None:
        raise ValueError(f"{name!r} is not the name of an AugReg file; `augreg:best:B/16` chooses one")
    return f"{AUGREG}/{name.removesuffix('.npz')}.npz"
