"""Exported files are opened by their reader before they replace anything.

For an image of noise, the reader must compute what the model computes. An error leaves nothing behind.
"""

import json
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers.utils import logging

from ..models.sizes import as_pair
from .tables import ConversionError

logger = logging.get_logger(__name__)

# Largest difference of outputs, relative to the largest output. Rounding, and numbers that a format fixes (epsilons),
# give less than 1e-3; a wrong setting gave 0.14 and more.
TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-2, torch.float16: 5e-2, torch.bfloat16: 0.2}


def noise(config: Any) -> torch.Tensor:
    """Return pixel values of a model's own size, (1, channels, height, width)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, config.num_channels, *as_pair(config.image_size), generator=generator)


def model_output(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return what a model says of images: logits, an embedding, or the tokens of an encoder that does not pool."""
    was_training = getattr(model, "training", False)
    if was_training:
        model.eval()
    with torch.no_grad():
        outputs = model(pixel_values.to(model.dtype))
    if was_training:
        model.train()
    if isinstance(outputs, torch.Tensor):  # of timm
        return outputs
    found = [getattr(outputs, name, None) for name in ("logits", "image_embeds", "pooler_output", "last_hidden_state")]
    return next(output for output in found if output is not None)


def check_outputs(reader: str, found: Any, expected: Any, tolerance: float) -> None:
    """Compare the outputs of a reader with those of the model.

    Args:
        reader: name of the program that read the file.
        tolerance: largest difference, relative to the largest output; inf only asks for finite outputs.

    Raises:
        ConversionError: they differ.
    """
    found = torch.as_tensor(found).float().squeeze()  # transformers' BiT pools to (batch, channels, 1, 1)
    expected = torch.as_tensor(expected).float().squeeze()
    if found.shape != expected.shape:
        difference = f"{tuple(found.shape)} numbers instead of {tuple(expected.shape)}"
    elif not torch.isfinite(found).all():
        difference = "NaN or infinite outputs"
    else:
        largest = (found - expected).abs().max().item() / max(expected.abs().max().item(), 1e-6)
        if largest <= tolerance:
            return
        difference = f"outputs that differ by {largest:.1g} of the largest output"
    raise ConversionError(f"the export is wrong: {reader} computes {difference}. Nothing was written")


def check_arrays(reader: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare the arrays in a file with those that were written, bit by bit.

    Raises:
        ConversionError: they differ.
    """
    if set(found) != set(expected):
        raise ConversionError(f"the export is wrong: {reader} finds other arrays than were written")
    for name, array in expected.items():
        read = found[name]
        if read.shape != array.shape or _bytes_of(read) != _bytes_of(array):
            raise ConversionError(f"the export is wrong: {reader} reads other values of {name} than were written")


def _bytes_of(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous()
        array = array.reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()


def read_npz_back(file: Path, expected: Mapping[str, Any] | None = None) -> None:
    """Read each array of an .npz with NumPy, as the original code does; compare it with what was written, if given."""
    with np.load(file, allow_pickle=False) as stored:
        if expected is None:
            for name in stored.files:
                stored[name]  # compares the checksum
        else:
            check_arrays("numpy", stored, expected)


def read_transformers_back(folder: Path, model: Any) -> None:
    """Load a folder with transformers' own class; none of its weights may be missing or left over."""
    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    theirs, loading = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    if problems := [kind for kind, names in loading.items() if names]:
        raise ConversionError(f"the export is wrong: {name} finds {', '.join(problems)}")
    if not name.endswith("ForMaskedImageModeling"):  # which masks random patches
        pixel_values = noise(model.config)
        found = model_output(theirs, pixel_values)
        check_outputs(name, found, model_output(model, pixel_values), TOLERANCES[model.dtype])


def read_timm_back(path: Path, arrays: Mapping[str, torch.Tensor], model: Any) -> None:
    """Read a .safetensors file or folder of timm; with timm itself if it is installed."""
    is_folder = path.is_dir()
    file = path / "model.safetensors" if is_folder else path
    check_arrays("safetensors", load_file(file), arrays)
    if not is_folder or find_spec("timm") is None:
        return
    try:
        timm: Any = import_module("timm")
    except Exception as error:  # such as a torchvision that does not fit the installed PyTorch
        logger.warning(f"timm did not open {path.name}, because it cannot be imported here: {error}")
        return
    theirs = timm.create_model(f"local-dir:{path}", pretrained=True).to(model.dtype).eval()
    pixel_values = noise(model.config)
    with torch.no_grad():
        found = theirs(pixel_values.to(model.dtype))
    check_outputs("timm", found, model_output(model, pixel_values), TOLERANCES[model.dtype])
