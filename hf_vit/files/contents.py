"""Known contents of the folders that this package writes; no other file in them is replaced, deleted or pushed.

A folder counts as ours if it holds evidence: a config.json of one of our models, the recipe of a training run, a
report, or the mark of an export. Other files of ours are recognised by their names.
"""

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from .readme import is_ours_alone

MARK = ".hf_vit"  # an empty file that marks our folders in the formats of other packages
LOCK = ".lock"  # an empty file that a training run locks
_WEIGHTS = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
_DESCRIPTIONS = ("config.json", "preprocessor_config.json", "conversion.json")
# Of a training run.
_RESULTS = ("metrics.json", "card_data.json", "learning_curve.png", "confusion_matrix.png", "recipe.yaml")

CODE = tuple(file.name for file in (Path(__file__).parents[1] / "models").glob("[a-z]*.py"))

_QUANTIZED = ("program.xml", "program.bin", "quantization.json")

_SAVED = (*_WEIGHTS, *_DESCRIPTIONS, *_QUANTIZED)
# The only files of a folder that are pushed to the Hub.
PUSHED = (*_SAVED, *_RESULTS, *CODE, "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "*.onnx", "*.onnx.data")
_RUN = (
    *_RESULTS,
    "train_batch.png",
    *(f"best/{name}" for name in (*_SAVED, "card_data.json")),
    *(f"checkpoints/step_????????/{name}" for name in ("*.safetensors", "state.json", "checksums.json")),
    *(f"checkpoints/damaged/step_????????*/{name}" for name in ("*.safetensors", "state.json", "checksums.json")),
    *(".????????.incomplete.*", "checkpoints/.????????.incomplete.*"),  # leftovers of a killed run
    "training/*events.out.tfevents.*",  # TensorBoard files, written by accelerate
    "training/*hparams.yml",
    "profile/trace.json",
    "skipped_images.txt",
    LOCK,
)
_EVALUATION = (
    *(f"{protocol}.json" for protocol in ("real", "objectnet", "few_shot", "linear_probe", "knn")),
    *(f"features/*/{name}" for name in ("*.safetensors", "about.json")),
)
_CHECKPOINT = ("shard-?????-model-?????-of-?????.safetensors", "state.json", "checksums.json")
_REPORT = (
    *("report.html", "predictions.csv", "attention_distance.png", "position_similarity.png", "filters.png"),
    *(f"[0-9][0-9]*-*.{kind}.png" for kind in ("rollout", "flow", "heads")),
)
_DEPLOYMENT = (
    "model.onnx",
    "model.onnx.data",
    "model.xml",
    "model.bin",
    "labels.json",
    "preprocessing.json",
    "predict.py",
)
_KNOWN = (MARK, *CODE, *_SAVED, *_RUN, *_EVALUATION, *_CHECKPOINT, *_REPORT, *_DEPLOYMENT)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Tell whether a name, or a path with slashes, matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def refuse_foreign(folder: str | os.PathLike, linked: str = "") -> None:
    """Refuse a folder that holds anything that this package did not write; an empty folder is accepted.

    Args:
        linked: name of a folder in it that may be a symbolic link to one elsewhere.

    Raises:
        FileExistsError: it is no folder, or holds a foreign file; nothing was changed.
    """
    folder = Path(folder)
    if folder.is_symlink() or not folder.is_dir():
        kind = "a symbolic link" if folder.is_symlink() else "a file"
        raise FileExistsError(f"cannot replace {folder}: it is {kind} (expected a folder); nothing was changed")
    names = sorted(_names(folder))
    if linked in names and (folder / linked).is_dir():
        inside = (path.relative_to(folder).as_posix() for path in (folder / linked).rglob("*") if not path.is_dir())
        names = sorted([*(name for name in names if name != linked), *inside])
    if foreign := [name for name in names if _is_foreign(folder, name)]:
        raise FileExistsError(
            f"cannot replace {folder}: it holds {in_words(foreign)}, which hf_vit did not write; nothing was changed. "
            "Move that away, or choose another folder"
        )
    if {*names} - {LOCK} and not _is_ours(folder, names):
        raise FileExistsError(
            f"cannot replace {folder}: nothing in it shows that hf_vit wrote {in_words(names)}; nothing was changed. "
            "Delete the folder yourself, or choose another"
        )


def refuse_model(folder: str | os.PathLike) -> None:
    """Refuse a folder that holds weights, for an output without weights.

    Raises:
        FileExistsError: it holds weights; nothing was changed.
    """
    if weights := sorted(Path(folder).rglob("*.safetensors")):
        raise FileExistsError(
            f"cannot replace {folder}: it holds a model ({weights[0].relative_to(folder)}); nothing was changed. "
            "Choose another folder"
        )


def _names(folder: Path) -> Iterator[str]:
    """Yield all entries below a folder except folders, as paths with slashes; links to folders are not followed."""
    for place, folders, files in os.walk(folder):
        for name in (*files, *(name for name in folders if os.path.islink(os.path.join(place, name)))):
            yield Path(place, name).relative_to(folder).as_posix()


def _is_foreign(folder: Path, name: str) -> bool:
    if (folder / name).is_symlink():
        return True
    return not (is_ours_alone(folder / name) if name == "README.md" else matches(name, _KNOWN))


def _is_ours(folder: Path, names: list[str]) -> bool:
    if MARK in names or "recipe.yaml" in names or {"state.json", "checksums.json"} <= set(names):
        return True
    if "report.html" in names:
        return "hf_vit" in (folder / "report.html").read_text(encoding="utf-8", errors="replace")
    return "config.json" in names and _is_config_of_ours(folder / "config.json")


def _is_config_of_ours(file: Path) -> bool:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["model_type"]).startswith("hf_")
    except (ValueError, TypeError, KeyError):
        return False


def in_words(names: list[str], most: int = 5) -> str:
    """Return the first `most` names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
