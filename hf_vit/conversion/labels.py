"""Class names: reading them, and giving them to a model."""

from pathlib import Path
from unicodedata import category

from ..catalog.class_names import BUILT_IN, built_in_class_names
from ..files.messages import shorten
from ..files.reading import read_json, read_text
from ..models.pretrained import HfVisionPreTrainedModel
from .tables import ConversionError


def set_labels(model: HfVisionPreTrainedModel, labels: str | Path | list[str]) -> None:
    """Name the classes of a model.

    Args:
        model: the model; its configuration is changed.
        labels: "imagenet1k"; a file with one name per line, or JSON (a list, or an object from index to name); a list.

    Raises:
        ConversionError: the model has no head or another number of classes, the file holds no names, or a name is not
            printable text.
    """
    if not hasattr(model, "classifier"):
        raise ConversionError("cannot name the classes: the checkpoint has no trained head; omit labels")
    names = labels if isinstance(labels, list) else _read_labels(labels)
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name.strip() or any(category(letter) in ("Cc", "Cs") for letter in name):
            raise ConversionError(f"the name of class {index} is {shorten(name)} (expected text on one line)")
    if len(names) != model.config.num_labels:
        raise ConversionError(f"{len(names)} labels are given, but the head has {model.config.num_labels} classes")
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}


def _read_labels(source: str | Path) -> list[str]:
    """Read class names, in the order of the head's outputs."""
    if str(source) in BUILT_IN:
        return built_in_class_names(str(source))
    path = Path(source)
    if not path.is_file():
        raise ConversionError(
            f"cannot read labels {str(source)!r}: no such file (expected a file or {', '.join(BUILT_IN)})"
        )
    try:
        if path.suffix != ".json":
            return [line.strip() for line in read_text(path).splitlines() if line.strip()]
        content = read_json(path)
    except ValueError as error:
        raise ConversionError(f"cannot read class names from {path}: {error}") from error
    if isinstance(content, dict):
        missing = [index for index in range(len(content)) if str(index) not in content]
        if missing:
            raise ConversionError(f"cannot read class names from {path}: class {missing[0]} has no name")
        return [content[str(index)] for index in range(len(content))]
    if not isinstance(content, list):
        found = type(content).__name__
        raise ConversionError(f"cannot read class names from {path}: it holds a {found} (expected a list or an object)")
    return content
