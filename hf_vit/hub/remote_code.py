"""Remote code: files with which a folder loads without hf_vit, with `trust_remote_code=True`."""

import inspect
import os
from pathlib import Path
from typing import Any

from transformers import AutoBackbone, AutoModel, AutoModelForImageClassification
from transformers.dynamic_module_utils import get_relative_import_files

from ..files.manifest import update_manifest
from ..files.output import json_text, write_text
from ..files.reading import read_json_object
from ..models.image_processing_hf_vit import HfViTImageProcessor
from ..models.modeling_hf_vit import HfViTBackbone, HfViTForImageClassification, HfViTModel
from ..models.registry import AUTO_MODELS, CONFIGURATIONS

_PROCESSOR = "preprocessor_config.json"
_PLAIN_MODELS = {
    AutoModel: HfViTModel,
    AutoModelForImageClassification: HfViTForImageClassification,
    AutoBackbone: HfViTBackbone,
}


def add_code(folder: str | os.PathLike) -> list[str]:
    """Copy the code into a folder of `save_pretrained`, and list its classes in `auto_map`.

    All Auto classes of the model are listed, so that a classifier can also be loaded as a bare model or a backbone. The
    code of a plain ViT has no masked patch prediction, FlexiViT, NaFlex or ablations.

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
    processor = _read_settings(folder / _PROCESSOR)
    classes = _auto_classes(CONFIGURATIONS[model_type], config, processor)
    auto_map = {name: _reference(its_class) for name, its_class in classes.items()}
    texts = {"config.json": json_text(config | {"auto_map": auto_map}, sort_keys=True)}
    if processor.get("image_processor_type"):
        auto_map = {"AutoImageProcessor": _reference(HfViTImageProcessor)}
        texts[_PROCESSOR] = json_text(processor | {"auto_map": auto_map}, sort_keys=True)
    entries = {inspect.getfile(its_class) for its_class in (*classes.values(), HfViTImageProcessor)}
    files = entries.union(*map(get_relative_import_files, entries))
    return texts | {Path(file).name: Path(file).read_text(encoding="utf-8") for file in sorted(files)}


def _auto_classes(config_class: Any, config: dict[str, Any], processor: dict[str, Any]) -> dict[str, type]:
    """Return the class of each Auto class; those of a plain ViT know nothing but it, so that only its files are pushed.

    Args:
        config, processor: contents of config.json and preprocessor_config.json.
    """
    names = config.get("architectures") or []
    is_plain = getattr(config_class.from_dict(config), "is_plain", False) and processor.get("preset") != "native"
    if is_plain and not any("MaskedPatch" in name for name in names):
        models = _PLAIN_MODELS
    else:
        models = {auto: model for auto, model in AUTO_MODELS if model.config_class is config_class}
    return {"AutoConfig": config_class} | {auto.__name__: model for auto, model in models.items()}


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
