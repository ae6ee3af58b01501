"""Remote code: files with which a folder loads without hf_vit, with `trust_remote_code=True`."""

import inspect
import json
import os
import shutil
from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from ..files.output import write_json
from ..models import image_processing_hf_vit
from ..models.utils import delete_manifest
from ..registration import AUTO_MODELS, CONFIGURATIONS


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
    config = _read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type not in CONFIGURATIONS:
        raise ValueError(f"{folder} holds a model of type {model_type!r}; known: {', '.join(CONFIGURATIONS)}")
    auto_map = {name: _reference(its_class) for name, its_class in _classes(model_type).items()}
    changed = {"config.json": config | {"auto_map": auto_map}}
    if (processor := _read_json(folder / "preprocessor_config.json")).get("image_processor_type"):
        class_name = _reference(image_processing_hf_vit.HfViTImageProcessor)
        changed["preprocessor_config.json"] = processor | {"auto_map": {"AutoImageProcessor": class_name}}
    delete_manifest(folder)
    for name, content in changed.items():
        write_json(folder / name, content, sort_keys=True)
    classes = (*_classes(model_type).values(), image_processing_hf_vit.HfViTImageProcessor)
    entries = [Path(inspect.getfile(cls)) for cls in classes]
    files = {*entries, *(Path(file) for entry in entries for file in get_relative_import_files(entry))}
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return [*changed, *sorted(file.name for file in files)]


def code_of(folder: Path) -> set[Path]:
    """Return the code files of a folder that its `auto_map` names, and those that these import.

    Other files with such names, `inference.py` for one, are the user's own.
    """
    named = [_read_json(folder / name).get("auto_map") for name in ("config.json", "preprocessor_config.json")]
    references = [reference for entry in named if isinstance(entry, dict) for reference in entry.values()]
    modules = {folder / f"{reference.partition('.')[0]}.py" for reference in references if isinstance(reference, str)}
    entries = {file for file in modules if file.parent == folder and file.is_file()}
    return entries | {Path(file) for entry in entries for file in get_relative_import_files(entry)}


def _classes(model_type: str) -> dict[str, type]:
    """Return name of the Auto class -> class, for a model type."""
    config_class = CONFIGURATIONS[model_type]
    models = {
        auto.__name__: model_class for auto, model_class in AUTO_MODELS if model_class.config_class is config_class
    }
    return {"AutoConfig": config_class, **models}


def _reference(cls: type) -> str:
    return f"{cls.__module__.split('.')[-1]}.{cls.__name__}"


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
