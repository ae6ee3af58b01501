"""Saving and loading folders."""

import os
from importlib import import_module

from transformers import AutoConfig

from . import modeling_hf_vit as modeling
from .auto import register_auto_classes
from .output import new_folder


def load_model(folder: str | os.PathLike) -> modeling.HfViTPreTrainedModel:
    """Load a model as the class that it was saved as, which the Auto classes cannot know.

    Raises:
        ValueError: the folder holds a model of another package.
    """
    register_auto_classes()
    config = AutoConfig.from_pretrained(folder)
    name = (config.architectures or ["nothing"])[0]
    package = import_module(__package__)
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
