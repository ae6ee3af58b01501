"""SigLIP 2 NaFlex: patches are vectors, the patch embedding is a matrix, positions are (rows, columns, D)."""

import math
from collections.abc import Iterator

import torch

from ..building import StoredArray
from ..checkpoint import Checkpoint
from ..rules import ConversionError
from .table import POSITIONS

_KERNEL, _RGB = "embedding/kernel", 3


def as_convolution(checkpoint: Checkpoint, arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """Give NaFlex's arrays the shapes of the rules; the values of a patch are ordered row, column, channel.

    Raises:
        ConversionError: a patch is not a square with three channels, or positions are not on a grid.
    """
    file, kernel = checkpoint.path.name, arrays[_KERNEL]
    values, hidden_size = checkpoint.shapes[kernel.name]
    side = math.isqrt(values // _RGB)
    if side * side * _RGB != values:
        raise ConversionError(f"{file} has patches of {values} values (expected a square with {_RGB} channels)")
    changed = {_KERNEL: kernel._replace(shape=(side, side, _RGB, hidden_size))}
    if POSITIONS in arrays:
        shape = checkpoint.shapes[arrays[POSITIONS].name]
        if len(shape) != 3 or shape[2] != hidden_size:
            raise ConversionError(f"{file} has positions of shape {shape} (expected (rows, columns, {hidden_size}))")
        changed[POSITIONS] = arrays[POSITIONS]._replace(shape=(1, shape[0] * shape[1], hidden_size))
    return arrays | changed


def as_patch_vectors(
    arrays: Iterator[tuple[str, torch.Tensor]], grid: tuple[int, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give arrays of the rules NaFlex's shapes: the inverse of `as_convolution`."""
    for name, array in arrays:
        if name == _KERNEL:
            array = array.flatten(0, 2)
        yield name, array[0].unflatten(0, grid) if name == POSITIONS else array
