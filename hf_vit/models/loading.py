"""Saving and loading folders."""

import os
from typing import Any

from transformers import AutoImageProcessor
from transformers.utils import IMAGE_PROCESSOR_NAME
from transformers.utils.hub import cached_file

from ..files.output import new_folder
from ..files.reading import read_json_object
from ..images.image_processing_hf_vit import HfViTImageProcessor
from .auto import AUTO_MODELS
from .configuration_hf_vision import Size, as_pair, read_settings, wrong_types_refused
from .pretrained import HfVisionPreTrainedModel
from .upstream import is_of_transformers, model_class_for

_CLASSES = {model_class.__name__: model_class for _, model_class in AUTO_MODELS}


def load(
    folder: str | os.PathLike, *, image_size: Size | None = None, **settings: Any
) -> tuple[HfVisionPreTrainedModel, Any]:
    """Load a model and its image processor.

    Args:
        folder, settings: see `load_model`.
        image_size: the model's and the processor's, an int or (height, width) in pixels; by default the stored one.

    Returns:
        The model, in evaluation mode, and the processor; None where the folder has none.

    Raises:
        ValueError: the folder holds a model of another package.
    """
    model = load_model(folder, image_size=image_size, **settings)
    processor = load_processor(folder)
    if image_size is not None and processor is not None:
        set_processor_size(processor, image_size)
    return model, processor


def load_model(
    folder: str | os.PathLike, *, image_size: Size | None = None, **settings: Any
) -> HfVisionPreTrainedModel:
    """Load a model as the class that it was saved as, which the Auto classes cannot know.

    Args:
        folder: of `save_pretrained`, or a name on the Hub; also one of transformers' own `vit`, `vit_mae`, `bit` or
            `vit-hybrid`.
        image_size: as in `from_pretrained`, an int or (height, width) in pixels.
        settings: more arguments of `from_pretrained`.

    Raises:
        ValueError: the folder holds a model of another package.
    """
    stored = read_settings(folder)
    if is_of_transformers(stored):
        model_class = model_class_for(stored)
    elif (name := (stored.get("architectures") or ["nothing"])[0]) in _CLASSES:
        model_class = _CLASSES[name]
    else:
        raise ValueError(f"{folder} holds {name}, which is not a model of hf_vit")
    size = {} if image_size is None else {"image_size": image_size}
    return model_class.from_pretrained(folder, **size, **settings)


def load_processor(folder: str | os.PathLike) -> Any:
    """Load the image processor of a folder or a name on the Hub, whoever's it is; None where there is none.

    Raises:
        ValueError: its preprocessor_config.json is damaged, or has values of a wrong type.
    """
    file = cached_file(
        str(folder),
        IMAGE_PROCESSOR_NAME,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if file is not None:
        read_json_object(file)
    with wrong_types_refused(f"the {IMAGE_PROCESSOR_NAME} of {folder}"):
        try:
            return AutoImageProcessor.from_pretrained(folder)
        except OSError:
            return None


def set_processor_size(processor: Any, image_size: Size) -> None:
    """Let an image processor, ours or another's, make images of this size, an int or (height, width) in pixels."""
    height, width = as_pair(image_size)
    size = {"height": height, "width": width}
    if isinstance(processor, HfViTImageProcessor):
        processor.update(size=size)  # what depends on the size follows
    else:
        processor.size = size


def save_folder(
    output: str | os.PathLike, model: HfVisionPreTrainedModel, processor: Any, overwrite: bool = False
) -> None:
    """Save a model and its image processor into one folder: complete, or not at all.

    Raises:
        FileExistsError: `output` exists and may not be overwritten.
        OSError: the disk is full, or nothing may be written there; `output` is as it was.
    """
    with new_folder(output, overwrite) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
