"""Writer of .safetensors files, one tensor at a time; the safetensors library needs all tensors in memory at once."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_ALIGNMENT = 8  # bytes; the header ends at a multiple of this


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write float32 tensors one at a time, in the format that https://github.com/huggingface/safetensors describes.

    Args:
        path: the file to write.
        shapes: name -> shape of all tensors, in the order of `tensors`.
        tensors: (name, contiguous tensor) pairs. Each is made in another thread while the previous one is written.
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
    """Yield the same pairs; a thread makes the next pair while the caller uses the current one."""
    iterator = iter(tensors)
    with ThreadPoolExecutor(1) as executor:
        upcoming = executor.submit(next, iterator, None)
        while (pair := upcoming.result()) is not None:
            upcoming = executor.submit(next, iterator, None)
            yield pair
