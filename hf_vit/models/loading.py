"""Saving and loading folders."""

import os
from importlib import import_module

from transformers.configuration_utils import PreTrainedConfig

from ..files.output import new_folder
from . import modeling_hf_vit as modeling
from .upstream import is_of_transformers, model_class_for


def load_model(folder: str | os.PathLike) -> modeling.HfViTPreTrainedModel:
    """Load a model as the class that it was saved as, which the Auto classes cannot know.

    Args:
        folder: of `save_pretrained`, or a name on the Hub; also one of transformers' own `vit`, `vit_mae`, `bit` or
            `vit-hybrid`.

    Raises:
        ValueError: the folder holds a model of another package.
    """
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    name = (settings.get("architectures") or ["nothing"])[0]
    if is_of_transformers(settings):
        name = model_class_for(settings).__name__
    package = import_module("hf_vit")
    if name not in package.__all__:
        raise ValueError(f"{folder} holds {name}, which is not a model of hf_vit")
    return getattr(package, name).from_pretrained(folder)


def save_folder(
    output: str | os.PathLike, model: modeling.HfViTPreTrainedModel, processor, overwrite: bool = False
) -> None:
    """Save a model and its image processor into one folder: complete, or not at all.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        OSError: the disk is full, or nothing may be written there; `output` is as it was.
    """
    with new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
