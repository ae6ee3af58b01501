"""The forward of a model through a backend, and what is left to torch."""

import contextlib
import copy
import hashlib
import inspect
import threading
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..conversion import programs
from ..models.inference import OptimizedForward, restore
from .program_cache import cached
from .runtimes import RUNTIMES, Program
from .watching import Watched

logger = logging.get_logger(__name__)

_MOST_PROGRAMS = 4  # of one model in memory
# Arguments of a forward that a program can do; others must not be given.
_TAKEN = ("pixel_values", "labels", "interpolate_pos_encoding", "return_dict", "only_pooled")
_RECORDS = ("output_hidden_states", "output_attentions")
NAMES_ALONE = ("id2label", "label2id", "_name_or_path", "architectures", "transformers_version")


class BackendForward(OptimizedForward):
    """The forward of a model, through programs: for each size of images one for the usual batch, one for any other.

    A call that the backend cannot do goes to torch, and that is said once for each reason: outputs of layers, masked
    patches, a patch size of the call, wanted gradients, autocast, another device, hooks inside the model, and weights
    that somebody could change without being seen. A traced or compiled forward is torch's, without a word.

    Args:
        model: in evaluation mode.
        name: of a runtime.
        batch_size: the usual batch.
    """

    def __init__(self, model: Any, name: str, batch_size: int = 1):
        self.model, self.name, self.batch_size = model, name, batch_size
        self._runtime = RUNTIMES[name]
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))
        self._lock = threading.RLock()
        self._watched: Watched | None = None
        self._identity = ""
        self._programs: dict[tuple, Fitted] = {}
        self._said: set[str] = set()

    def __reduce__(self):
        return type(self), (self.model, self.name, self.batch_size)  # neither copied nor pickled, but made again

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - is public
            return type(self.model).forward(self.model, *arguments, **settings)
        named = settings
        if arguments:
            named = {**dict(zip(self.__signature__.parameters, arguments, strict=False)), **settings}
        obstacle = self._obstacle_of_call(named)
        if obstacle is None:
            obstacle = self._obstacle_of_model()
        if obstacle is not None:
            self._say(obstacle)
            return self.by_torch(*arguments, **settings)
        pixel_values = named["pixel_values"]
        program = self._program_for(pixel_values)
        found = program(pixel_values)
        self.model.base_model.note_image_size(pixel_values, named.get("interpolate_pos_encoding"))
        if named.get("labels") is not None:
            found["loss"] = self.model.loss_function(named["labels"], found["logits"], self.model.config)
        outputs = program.output_class(**found)
        returns_dict = named.get("return_dict")
        returns_dict = self.model.config.return_dict if returns_dict is None else returns_dict
        return outputs if returns_dict else outputs.to_tuple()

    def prepare(self, size: tuple[int, int]) -> None:
        """Make the program for images of a size, in the usual batch, ahead of the first call."""
        with torch.inference_mode():
            if (obstacle := self._obstacle_of_model()) is None:
                self._program_for(torch.zeros(self.batch_size, self.model.config.num_channels, *size))
            else:
                self._say(obstacle)

    def _obstacle_of_call(self, named: dict[str, Any]) -> str | None:
        """Why torch is to compute this call, in words; empty where torch is to refuse it."""
        if torch.is_grad_enabled():
            return "gradients are wanted (call it under torch.inference_mode())"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        config = self.model.config
        for name, value in named.items():
            if name not in _TAKEN and value is not None and value is not False:
                return f"of the argument {name}"
        for name in _RECORDS:
            if getattr(config, name, False) and named.get(name) is not False:
                return f"the configuration has {name}"
        images = named.get("pixel_values")
        if type(images) is not torch.Tensor or images.ndim != 4 or not images.numel() or not images.is_floating_point():
            return ""
        if images.device.type != "cpu":
            return f"the images are on {images.device}"
        return None

    def _obstacle_of_model(self) -> str | None:
        watched = self._watched
        if watched is None or not watched.is_unchanged():
            with self._lock:
                watched = self._watch()
        if self.model.dtype not in self._runtime.dtypes or self.model.device.type != "cpu":
            return f"the model is in {self.model.dtype} on {self.model.device}"
        return watched.obstacle()

    def _watch(self) -> Watched:
        """Look at the model anew; programs of what it still is stay."""
        if self._watched is None or not self._watched.is_unchanged():
            self._watched = Watched(self.model, self._watched)
            identity = "" if self._watched.problem else self._identity_of(self._watched)
            if identity != self._identity:
                self._programs, self._identity = {}, identity
        return self._watched

    def _identity_of(self, watched: Watched) -> str:
        digest = hashlib.sha256(f"{self._runtime.versions()} {_digest_of_code()}\n".encode())
        for line in watched.describe():
            digest.update(line.encode() + b"\n")
        config = {name: value for name, value in self.model.config.to_dict().items() if name not in NAMES_ALONE}
        digest.update(repr(sorted(config.items())).encode())
        return digest.hexdigest()

    def _program_for(self, pixel_values: torch.Tensor) -> "Fitted":
        size = (pixel_values.shape[-2], pixel_values.shape[-1])
        is_hybrid = hasattr(self.model.config, "stem_depths")  # of one batch, OpenVINO 2026.4 dies while it compiles
        is_usual = self._runtime.knows_batch and not is_hybrid and len(pixel_values) == self.batch_size
        batch = self.batch_size if is_usual else None
        key = (self._identity, batch, size, pixel_values.shape[1], torch.get_num_threads())
        found = self._programs.get(key)
        if found is None:
            with self._lock:
                found = self._programs.get(key) or self._make(pixel_values, size, batch)
                self._programs = dict([*self._programs.items(), (key, found)][-_MOST_PROGRAMS:])
        return found

    def _make(self, pixel_values: torch.Tensor, size: tuple[int, int], batch: int | None) -> "Fitted":
        """Convert, or load from the cache.

        Raises:
            ValueError: what torch raises for these images.
        """
        try:
            outputs = self.by_torch(pixel_values=pixel_values[:1], return_dict=True)
        except Exception:
            self.by_torch(pixel_values=pixel_values)  # the same, with the size of the batch in its words
            raise
        names = [name for name, value in outputs.items() if isinstance(value, torch.Tensor)]
        runtime = self._runtime.module()

        def convert(folder: Path) -> None:
            with _without_guards():
                model = copy.deepcopy(self.model)
            restore(model)
            runtime.convert(model.float(), size, names, folder)

        identity = hashlib.sha256(f"{self._identity} {size} {names}".encode()).hexdigest()
        dtype, threads = self.model.dtype, torch.get_num_threads()
        with torch.inference_mode(False), torch.no_grad():
            program = cached(identity, convert, lambda folder: runtime.load(folder, dtype, threads, batch))
        return Fitted(program, type(outputs), names, dtype)

    def by_torch(self, *arguments: Any, **settings: Any) -> Any:
        """What torch computes; reading the weights for that is no change of them."""
        forward = type(self.model).forward
        if torch.is_grad_enabled():
            return forward(self.model, *arguments, **settings)
        with _without_guards():  # the weights are read alone
            return forward(self.model, *arguments, **settings)

    def _say(self, obstacle: str) -> None:
        if obstacle and obstacle not in self._said:
            self._said.add(obstacle)
            logger.warning(f"{self.name} cannot compute this forward, and torch does: {obstacle}.")


class Fitted:
    """A program that takes what the model's forward does, and returns the fields of its `output_class`."""

    def __init__(self, program: Program, output_class: Any, names: list[str], dtype: torch.dtype):
        self._program, self.output_class, self._names, self._dtype = program, output_class, names, dtype

    def __call__(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        images = pixel_values.detach().to(self._dtype).float().contiguous()
        outputs = (output.to(self._dtype) for output in self._program(images))
        return dict(zip(self._names, outputs, strict=True))


def _without_guards() -> contextlib.AbstractContextManager:
    """Let torch read guarded weights without taking that for a change."""
    return torch._C.DisableTorchFunctionSubclass()


@cache
def _digest_of_code() -> str:
    """Of the files that decide what a program computes, which may change without the version."""
    root = Path(__file__).parents[1]
    files = [*(root / "models").glob("*.py"), *(root / "backends").glob("*_backend.py"), Path(programs.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
