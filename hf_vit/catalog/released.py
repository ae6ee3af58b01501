"""The released checkpoints: the entries of released.yaml, and facts read from the names of files.

No array shows how a file is evaluated: preprocessing, and the image size of a ResNet, are read from its name.
"""

import re
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ..models.configuration_hf_bit import VARIANTS as BIT_VARIANTS
from .augreg import ADAPTED_TO, AUGREG_MODELS, PRETRAINED_ON, AugRegName, augreg_hyper_parameters, parse_augreg

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
    # of big_vision): resize_small(160)|central_crop(128) for all data sets except ImageNet.
    r"/R\d+x\d(_T)?_(flowers|food|pet|sun)(?P<image_size>\d+)": {
        "processor": {"preset": "big_vision", "crop_pct": 128 / 160}
    },
    r"/R\d+x\d(_T)?_(?P<image_size>\d+)": {"processor": {"preset": "big_vision"}},
    # BiT-HyperRule (bit_hyperrule.py of big_transfer): 128 for data sets of VTAB with images smaller than 96 x 96.
    r"-run\d-(cifar100|svhn|eurosat|dsprites-orientation|dsprites-xpos)": {"image_size": 128},
    r"-run\d-[^/]+|-ILSVRC2012": {"image_size": 480},
    # AugReg: only address or name identify its files.
    r"vit_models/augreg/[^/]*|-aug_[a-z]+\d?-wd_[^/]*": {"processor": {"preset": "augreg"}},
}


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


def _augreg_facts(name: AugRegName) -> dict[str, Any]:
    """Return the facts in the name of an AugReg file, under the keys of released.yaml."""
    datasets = [PRETRAINED_ON[name.data]]
    facts: dict[str, Any] = {"title": f"pre-trained on {data_set_name(datasets[0])}", "resolution": 224}
    if name.adapted_to is not None:
        facts["title"] += f" and fine-tuned on {data_set_name(ADAPTED_TO[name.adapted_to])}"
        facts["resolution"] = int(name.resolution or 0)
        datasets.append(ADAPTED_TO[name.adapted_to])
    classes_of = name.adapted_to or {"i1k": "imagenet2012"}.get(name.data)
    if classes_of == "imagenet2012":
        facts["labels"] = "imagenet1k"
    return facts | {"datasets": list(dict.fromkeys(datasets)), "hyper_parameters": augreg_hyper_parameters(name)}


def data_set_name(key: str) -> str:
    """Return the display name of a data set, given its key in released.yaml."""
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
