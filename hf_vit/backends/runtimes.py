"""Table of the runtimes that can be a backend."""

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from ..conversion.programs import require

Program = Callable[[torch.Tensor], list[torch.Tensor]]  # (batch, channels, height, width) float32 -> its outputs


class _Module(Protocol):
    """Functions of a runtime's module."""

    def convert(self, model: Any, size: tuple[int, int], names: list[str], folder: Path) -> None:
        """Write the program of a float32 model, for one image size and any batch, into a folder."""
        ...

    def load(self, folder: Path, dtype: torch.dtype, threads: int, batch: int | None = None) -> Program:
        """Load a program of `convert`, for a fixed batch or any (None); several threads may call it."""
        ...


@dataclass(frozen=True)
class Runtime:
    """Runtime of programs.

    Attributes:
        name: name of the backend, its extra and its module.
        needs: packages that loading a program needs; its extra also has those for converting.
        dtypes: supported dtypes of models.
        knows_batch: a program for a fixed batch is faster than one for any batch.
    """

    name: str
    needs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    knows_batch: bool = False

    @property
    def is_installed(self) -> bool:
        """Flag: all needed packages are installed."""
        return all(find_spec(package) is not None for package in self.needs)

    def module(self) -> _Module:
        """Import the module that converts and loads programs.

        Raises:
            ImportError: its extra is not installed.
        """
        require(*self.needs, extra=self.name)
        module: Any = import_module(f".{self.name}_backend", __package__)
        return module

    def versions(self) -> dict[str, str]:
        """Return the versions of the packages that decide what a program computes."""
        packages = (*self.needs, "torch", "transformers", "hf_vit")
        return {package: importlib.metadata.version(package) for package in packages}


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("openvino", ("openvino",), (torch.float32, torch.bfloat16), knows_batch=True),
        Runtime("onnxruntime", ("onnxruntime",), (torch.float32,)),
    )
}
