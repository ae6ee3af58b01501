"""Remote code: files with which a folder loads without hf_vit, with `trust_remote_code=True`."""

import inspect
import os
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from ..files.manifest import update_manifest
from ..files.output import json_text, write_text
from ..files.reading import read_json_object
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.registry import AUTO_MODELS, CONFIGURATIONS

_PROCESSOR = "preprocessor_config.json"


def add_code(folder: str | os.PathLike) -> list[str]:
    """Copy the code into a folder of `save_pretrained`, and list its classes in `auto_map`.

    All Auto classes are listed, so that a classifier can also be loaded as a bare model.

    Returns:
        Names of the files that were written or changed.

    Raises:
        ValueError: the folder holds no model of hf_vit.

    Example:
        >>> import hf_vit
        >>> "modeling_hf_vit.py" in hf_vit.add_code("folder")
        True
    """
    folder = Path(folder)
    files = code_files(folder)
    for name, text in files.items():
        write_text(folder / name, text)
    update_manifest(folder, *files)
    return list(files)


def code_files(folder: Path) -> dict[str, str]:
    """Return the texts of the files that `add_code` writes into a folder, by name.

    Raises:
        ValueError: the folder holds no model of hf_vit.
    """
    config = _read_settings(folder / "config.json")
    model_type = str(config.get("model_type"))
    if model_type not in CONFIGURATIONS:
        raise ValueError(f"{folder} holds a model of type {model_type!r}; known: {', '.join(CONFIGURATIONS)}")
    config_class = CONFIGURATIONS[model_type]
    classes = {"AutoConfig": config_class}
    classes |= {auto.__name__: model for auto, model in AUTO_MODELS if model.config_class is config_class}
    auto_map = {name: _reference(its_class) for name, its_class in classes.items()}
    texts = {"config.json": json_text(config | {"auto_map": auto_map}, sort_keys=True)}
    processor = _read_settings(folder / _PROCESSOR)
    if processor.get("image_processor_type"):
        auto_map = {"AutoImageProcessor": _reference(HfViTImageProcessor)}
        texts[_PROCESSOR] = json_text(processor | {"auto_map": auto_map}, sort_keys=True)
    entries = {inspect.getfile(its_class) for its_class in (*classes.values(), HfViTImageProcessor)}
    files = entries.union(*map(get_relative_import_files, entries))
    return texts | {Path(file).name: Path(file).read_text(encoding="utf-8") for file in sorted(files)}


def code_of(folder: Path) -> set[Path]:
    """Return the code files of a folder that its `auto_map` names, and those that these import.

    Other files with such names, `inference.py` for one, are the user's own.
    """
    named = [_read_settings(folder / name).get("auto_map") for name in ("config.json", _PROCESSOR)]
    references = [reference for entry in named if isinstance(entry, dict) for reference in entry.values()]
    modules = {folder / f"{reference.partition('.')[0]}.py" for reference in references if isinstance(reference, str)}
    entries = {file for file in modules if file.parent == folder and file.is_file()}
    return entries | {Path(file) for entry in entries for file in get_relative_import_files(entry)}


def _reference(cls: type) -> str:
    return f"{cls.__module__.split('.')[-1]}.{cls.__name__}"


def _read_settings(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
