"""What `optimize_for_inference` does: modules that compute the same from copies of their weights made once.

Linear layers: torch computes float32 products on x86 with MKL, whose kernels do not use the widest vectors of every
CPU; oneDNN, which comes with torch as well, does. Its operators here are those of torch's own compiler when it freezes
a model. They are internal: where one is missing, nothing is packed. Standardised convolutions: their weights are
standardised once, not in every forward.

A compiled graph cannot hold packed weights: there the products go through oneDNN with the weights as they are.

Only the `forward` of single modules is replaced, on the instance. Parameters, names, hooks and callers stay as they
are, so there is nothing to undo before a model is saved; a weight that changes is copied again.
"""

import functools
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .resnet_stem import StandardizedConv2d

DTYPES = (torch.float32, torch.bfloat16)
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
_ROUNDS = 5  # of the race between two products
# torch 2.6 cannot tell a compilation from an export, which is to have torch's own operators alone.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
_GELU_FORM = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}  # names of transformers, and of oneDNN


def has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)


@functools.cache
def _register_operator() -> None:
    """`torch.ops.hf_vit.onednn_linear`: the product as torch's compiler takes it.

    Its own rules for the operator are about frozen weights alone. Not done at import, since it takes 40 ms.
    """

    @torch.library.custom_op("hf_vit::onednn_linear", mutates_args=())
    def onednn_linear(
        tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, form: str
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, activation, [], form)

    @onednn_linear.register_fake
    def _(tokens, weight, bias, activation, form):
        return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])


class _ForwardFromCopy:
    """A forward that reads a copy of its module's weight where it can, and otherwise is the module's own."""

    def __init__(self, module: Any):  # an nn.Module with a weight; torch types its attributes as Tensor | Module
        self.module = module
        self.state: Any = None
        self.kept: Any = None

    def applies_to(self, inputs: torch.Tensor) -> bool:
        weight = self.module.weight
        is_plain = inputs.dtype == weight.dtype and inputs.device == weight.device and type(inputs) is torch.Tensor
        is_other_work = torch.is_grad_enabled() or _is_exporting() or torch.is_autocast_enabled("cpu")
        return is_plain and not is_other_work

    def copy(self, inputs: torch.Tensor) -> Any:
        """The copy of the weight, made again if the weight is another by now."""
        weight = self.module.weight
        state = (weight.data_ptr(), weight.dtype, None if weight.is_inference() else weight._version)
        if state != self.state:
            self.kept, self.state = self.make_copy(weight.detach(), inputs), state
        return self.kept

    def make_copy(self, weight: torch.Tensor, inputs: torch.Tensor) -> Any:
        raise NotImplementedError

    def __reduce__(self):
        return type(self), (self.module,)  # what is packed can neither be copied nor pickled, but made again


class PackedLinear(_ForwardFromCopy):
    """The product with a weight in the layout that oneDNN reads fastest."""

    def __init__(self, module: Any):
        super().__init__(module)
        _register_operator()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.applies_to(tokens):
            return self.product(tokens)
        return F.linear(tokens, self.module.weight, self.module.bias)

    def applies_to(self, inputs: torch.Tensor) -> bool:
        return super().applies_to(inputs) and inputs.dtype in DTYPES and inputs.device.type == "cpu"

    def product(self, tokens: torch.Tensor, activation: str = "none", form: str = "") -> torch.Tensor:
        bias = self.module.bias
        if torch.compiler.is_compiling():
            return torch.ops.hf_vit.onednn_linear(tokens, self.module.weight, bias, activation, form)
        weight = self.copy(tokens)
        return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, activation, [], form)

    def make_copy(self, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, inputs.numel() // inputs.shape[-1])


class PackedMLP:
    """The forward of an `HfViTMLP` whose `fc1` is packed: first product and GELU in one go."""

    def __init__(self, mlp: Any):
        self.mlp = mlp

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mlp = self.mlp
        first = mlp.fc1.__dict__.get("forward")
        is_watched = mlp.fc1._forward_hooks or mlp.fc1._forward_pre_hooks or mlp.activation._forward_hooks
        if mlp.training or is_watched or not isinstance(first, PackedLinear) or not first.applies_to(hidden_states):
            return type(mlp).forward(mlp, hidden_states)
        return mlp.fc2(first.product(hidden_states, "gelu", _GELU_FORM[mlp.hidden_act]))

    def __reduce__(self):
        return type(self), (self.mlp,)


class StandardizedOnce(_ForwardFromCopy):
    """The convolution with its weight standardised once, channels last."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        conv = self.module
        if torch.compiler.is_compiling() or not self.applies_to(images):
            return type(conv).forward(conv, images)
        return conv.convolve(images.contiguous(memory_format=torch.channels_last), self.copy(images))

    def make_copy(self, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return self.module.standardized_weight().detach().contiguous(memory_format=torch.channels_last)


def optimize(model: nn.Module, rows: int) -> None:
    """Replace the forwards of a model's modules where that is faster on this machine.

    Args:
        rows: of the products, batch times tokens, as they will usually be.
    """
    restore(model)
    packs = has_onednn()
    races: dict[tuple, bool] = {}
    module: Any
    for module in model.modules():
        if "forward" in module.__dict__:  # already replaced by someone else, e.g. accelerate's offloading hooks
            continue
        if isinstance(module, StandardizedConv2d):
            module.forward = StandardizedOnce(module)
        elif packs and _can_be_packed(module):
            shape = (*module.weight.shape, module.weight.dtype)
            if shape not in races:
                races[shape] = wins_race(module, rows)
            if races[shape]:
                module.forward = PackedLinear(module)
        elif packs and getattr(module, "hidden_act", None) in _GELU_FORM:
            module.forward = PackedMLP(module)


def restore(model: nn.Module) -> None:
    """Take back what `optimize` did, and free the copies."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _ForwardFromCopy | PackedMLP):
            del module.forward


def _can_be_packed(module: Any) -> bool:
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:  # quantised, adapted
        return False
    if type(module.weight) is not nn.Parameter:  # quantised, sharded
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype in DTYPES


@torch.no_grad()
def wins_race(layer: nn.Linear, rows: int) -> bool:
    """Whether the packed product is the faster one in this process, with its number of threads."""
    tokens = torch.randn(rows, layer.in_features, dtype=layer.weight.dtype)
    packed = PackedLinear(layer)
    times: dict[Any, list[float]] = {packed: [], layer: []}
    for _ in range(_ROUNDS):
        for contestant, measured in times.items():
            start = time.perf_counter()
            contestant(tokens)
            measured.append(time.perf_counter() - start)
    return min(times[packed]) < min(times[layer])
