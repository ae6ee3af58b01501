"""Weights from file to file: the library that writes .safetensors wants all tensors in memory at once."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_ALIGNMENT = 8  # bytes, of the header's end


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write float32 tensors one at a time, as https://github.com/huggingface/safetensors describes the format.

    Args:
        shapes: of all tensors, in the order in which they come.
        tensors: (name, contiguous tensor) pairs; each is made in another thread while the one before is written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in _one_ahead(tensors):
            file.write(tensor.numpy().data)


def _one_ahead(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same pairs; a thread makes the next one while the caller uses this one."""
    iterator = iter(tensors)
    with ThreadPoolExecutor(1) as executor:
        upcoming = executor.submit(next, iterator, None)
        while (pair := upcoming.result()) is not None:
            upcoming = executor.submit(next, iterator, None)
            yield pair
