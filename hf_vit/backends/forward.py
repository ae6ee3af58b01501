"""Forward of a model through a backend, with torch for the calls that the backend cannot compute."""

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
from ..models.pretrained import is_recorded
from .program_cache import cached
from .runtimes import RUNTIMES, Program
from .watching import Watched

logger = logging.get_logger(__name__)

_MOST_PROGRAMS = 4  # of one model in memory
# Arguments of a forward that a program supports.
_TAKEN = ("pixel_values", "labels", "interpolate_pos_encoding", "return_dict", "only_pooled")
_RECORDS = ("output_hidden_states", "output_attentions")
NAMES_ALONE = ("id2label", "label2id", "_name_or_path", "architectures", "transformers_version")


class BackendForward:
    """Forward of a model through programs: for each image size one for the usual batch, one for any other.

    A call that the backend cannot compute goes to torch, with one warning for each reason: outputs of layers, masked
    patches, the argument `patch_size`, gradients, autocast, another device, hooks inside the model, and weights that
    could change unnoticed. A traced or compiled forward is torch's, without a warning.

    Args:
        model: a model in evaluation mode.
        name: name of a runtime.
        batch_size: usual number of images of a forward.
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
        return type(self), (self.model, self.name, self.batch_size)  # a copy makes its own programs

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if is_recorded():
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
        """Make the program for an image size (height, width) and the usual batch, before the first call."""
        with torch.inference_mode():
            if (obstacle := self._obstacle_of_model()) is None:
                self._program_for(torch.zeros(self.batch_size, self.model.config.num_channels, *size))
            else:
                self._say(obstacle)

    def _obstacle_of_call(self, named: dict[str, Any]) -> str | None:
        """Return the reason why torch must compute a call, "" for input that torch refuses, None if there is none."""
        if torch.is_grad_enabled():
            return "gradients are enabled (call it under torch.inference_mode())"
        if torch.is_autocast_enabled("cpu"):
            return "autocast is on"
        config = self.model.config
        for name, value in named.items():
            if name not in _TAKEN and value is not None and value is not False:
                return f"it does not support the argument {name}"
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
        """Examine the model again; programs are kept if it computes the same as before."""
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
        is_hybrid = hasattr(self.model.config, "stem_depths")  # OpenVINO 2026.4 crashes compiling it for a fixed batch
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
        """Convert the model, or load its program from the cache.

        Raises:
            ValueError: torch refuses these images.
        """
        try:
            outputs = self.by_torch(pixel_values=pixel_values[:1], return_dict=True)
        except Exception:
            self.by_torch(pixel_values=pixel_values)  # raises the same, with the true batch size in the message
            raise
        names = [name for name, value in outputs.items() if isinstance(value, torch.Tensor)]
        runtime = self._runtime.module()

        def convert(folder: Path) -> None:
            model = copy.deepcopy(self.model)
            del model.forward
            runtime.convert(model.float(), size, names, folder)

        identity = hashlib.sha256(f"{self._identity} {size} {names}".encode()).hexdigest()
        dtype, threads = self.model.dtype, torch.get_num_threads()
        with torch.inference_mode(False), torch.no_grad():
            program = cached(identity, convert, lambda folder: runtime.load(folder, dtype, threads, batch))
        return Fitted(program, type(outputs), names, dtype)

    def by_torch(self, *arguments: Any, **settings: Any) -> Any:
        """Compute the forward with torch."""
        return type(self.model).forward(self.model, *arguments, **settings)

    def _say(self, obstacle: str) -> None:
        if obstacle and obstacle not in self._said:
            self._said.add(obstacle)
            logger.warning(f"{self.name} cannot compute this forward: {obstacle}. torch computes it.")


class Fitted:
    """Program with the model's dtype, which returns the fields of the model's `output_class`."""

    def __init__(self, program: Program, output_class: Any, names: list[str], dtype: torch.dtype):
        self._program, self.output_class, self._names, self._dtype = program, output_class, names, dtype

    def __call__(self, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
        images = pixel_values.detach().to(self._dtype).float().contiguous()
        outputs = (output.to(self._dtype) for output in self._program(images))
        return dict(zip(self._names, outputs, strict=True))


@cache
def _digest_of_code() -> str:
    """Return the sha256 of the code that makes programs, which may change without the version."""
    root = Path(__file__).parents[1]
    files = [*(root / "models").glob("*.py"), *(root / "backends").glob("*_backend.py"), Path(programs.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()
