"""The runtimes that a backend can be, as one table."""

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
    """What the module of a runtime has."""

    def convert(self, model: Any, size: tuple[int, int], names: list[str], folder: Path) -> None:
        """Write the program of a float32 model, for images of a size and any batch, into a folder."""
        ...

    def load(self, folder: Path, dtype: torch.dtype, threads: int, batch: int | None = None) -> Program:
        """Load what `convert` wrote, for one batch or (None) for any; several threads may call it."""
        ...


@dataclass(frozen=True)
class Runtime:
    """One way to compute programs.

    Attributes:
        needs: packages without which it loads no program; its extra has what converting needs besides.
        dtypes: of models that it computes.
        knows_batch: whether a program for one batch is faster than one for any.
    """

    name: str
    needs: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    knows_batch: bool = False

    @property
    def is_installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.needs)

    def module(self) -> _Module:
        """What computes.

        Raises:
            ImportError: its extra is not installed.
        """
        require(*self.needs, extra=self.name)
        module: Any = import_module(f".{self.name}_backend", __package__)
        return module

    def versions(self) -> dict[str, str]:
        packages = (*self.needs, "torch", "transformers", "hf_vit")
        return {package: importlib.metadata.version(package) for package in packages}


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("openvino", ("openvino",), (torch.float32, torch.bfloat16), knows_batch=True),
        Runtime("onnxruntime", ("onnxruntime",), (torch.float32,)),
    )
}
