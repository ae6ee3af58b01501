"""Comparisons of models and files that tests share, and samples of long tables."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn


def some(values: Iterable, *quick) -> list:
    """Return the values as parameters of a test, with all but a few marked as slow."""
    return [pytest.param(value, marks=() if value in quick else (pytest.mark.slow,)) for value in values]


def logits(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """What a classifier says of images, or what an encoder has in place of logits."""
    with torch.no_grad():
        outputs = model.eval()(pixel_values)
    return outputs.logits if "logits" in outputs else outputs.pooler_output


def assert_same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    """Names, shapes, types and numbers of all parameters are the same."""
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)


def relative_gap(ours: torch.Tensor, theirs: np.ndarray) -> float:
    """The largest difference over the largest value, of arrays of one shape."""
    assert ours.shape == theirs.shape
    return np.abs(ours.numpy() - theirs).max() / np.abs(theirs).max()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz, read by NumPy."""
    with np.load(path) as arrays:
        return dict(arrays)


def assert_same_file(ours: Path, theirs: Path) -> None:
    """Two .npz hold the same arrays, bit by bit, in any order."""
    ours_read, theirs_read = (
        {name: (array.shape, array.dtype, array.tobytes()) for name, array in read_arrays(path).items()}
        for path in (ours, theirs)
    )
    assert ours_read.keys() == theirs_read.keys()
    assert [name for name in ours_read if ours_read[name] != theirs_read[name]] == []


def change_json(file: Path, **changes) -> None:
    """Set fields of a JSON object in a file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
