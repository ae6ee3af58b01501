"""Watch of a model for changes of weights, structure and settings, since its program was made."""

import hashlib
import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

_CAPTURING = "transformers.utils.output_capturing"  # its permanent hooks do nothing unless outputs are captured


class Watched:
    """State of a model.

    It detects changes of a weight by torch's version counter, replaced modules and parameters, hooks, and other
    settings. Changes through `.data`, NumPy arrays and fused optimizers are not counted: choose the backend again then.

    Args:
        before: earlier state of the same model; unchanged weights are not read again.

    Attributes:
        problem: reason why changes of a weight cannot be detected; None if they can.
    """

    def __init__(self, model: nn.Module, before: "Watched | None" = None):
        self._model = model
        self._modules = list(model.modules())
        tables = [(module._parameters, module._buffers, module._modules) for module in self._modules]
        self._tables: list[dict[str, Any]] = list(chain.from_iterable(tables))
        self._entries = self._current_entries()
        self._hooks = [
            hooks
            for module in self._modules[1:]
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        ]
        self._types = list(map(type, self._modules))
        self._config = dict(vars(model.config))
        self._buffers = [(buffer, buffer._version) for buffer in model.buffers()]
        self.problem: str | None = None
        self._weights: list[tuple[Any, Any, str]] = []
        self._is_handed_over = False  # to the next one
        self._guard({} if before is None else before._hand_over())

    def _hand_over(self) -> dict[int, Any]:
        """Return states and digests by weight, and forget them."""
        found = {id(weight): (state, digest) for weight, state, digest in self._weights}
        self._weights, self._is_handed_over = [], True
        return found

    def _guard(self, before: dict[int, Any]) -> None:
        """Read the weights that may have changed."""
        for name, weight in self._model.named_parameters():
            if weight.is_inference():
                self.problem = f"{name} could change unnoticed: it was made in inference mode"
                return
            state, digest = before.pop(id(weight), (None, None))
            if state != _state_of(weight) or digest is None:
                digest = digest_of(weight)
            self._weights.append((weight, _state_of(weight), digest))

    def _current_entries(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._tables)))

    def is_unchanged(self) -> bool:
        """Tell whether the model still has the same weights, structure and settings."""
        entries = self._current_entries()
        return (
            self.problem is None
            and not self._is_handed_over
            and len(entries) == len(self._entries)
            and all(map(operator.is_, entries, self._entries))
            and all(_state_of(weight) == state for weight, state, _ in self._weights)
            and all(buffer._version == version for buffer, version in self._buffers)
            and list(map(type, self._modules)) == self._types
            and vars(self._model.config) == self._config
        )

    def obstacle(self) -> str | None:
        """Return the reason why a program would not compute the same as the model; None if it does."""
        if any(map(operator.attrgetter("training"), self._modules)):
            return "a part of the model is in training mode"
        if any(self._hooks) and any(
            getattr(hook, "__module__", None) != _CAPTURING for hooks in self._hooks for hook in hooks.values()
        ):
            return "a module inside the model has hooks"
        if any("forward" in vars(module) for module in self._modules[1:]):
            return "a module inside the model has a replaced forward"
        return self.problem

    def describe(self) -> Iterator[str]:
        """Describe what the model computes, line by line: names, classes, shapes and digests."""
        for name, module in self._model.named_modules():
            yield f"{name}: {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()}"
        yield from self.describe_weights()

    def describe_weights(self) -> Iterator[str]:
        """Describe the parameters and buffers, as in `describe`."""
        digests = {id(weight): digest for weight, _, digest in self._weights}
        for name, weight in self._model.named_parameters(remove_duplicate=False):
            yield f"{name} {weight.dtype} {tuple(weight.shape)} {digests[id(weight)]}"
        for name, buffer in self._model.named_buffers():
            yield f"{name} {buffer.dtype} {tuple(buffer.shape)} {digest_of(buffer)}"


def _state_of(weight: torch.Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


def digest_of(tensor: torch.Tensor) -> str:
    """Return the sha256 of a tensor's bytes, in the order of its elements."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy()).hexdigest()  # pyright: ignore[reportArgumentType] - is a buffer
