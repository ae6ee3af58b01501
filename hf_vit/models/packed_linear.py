"""The frozen copy of a model that `optimize_for_inference` returns, and its linear layers with packed weights.

torch multiplies float32 matrices on x86 with MKL, whose kernels do not use AVX-512 on every CPU. oneDNN, also a part of
torch, does, and is faster with weights in its own layout (benchmarks/RESULTS.md, "Packed weights"). The operators are
those that torch's compiler uses for frozen models. Where one is missing, the layers use `F.linear`.
"""

import copy
import functools
import platform
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from .resnet_stem import StandardizedConv2d

_Module = TypeVar("_Module", bound=nn.Module)

_APPROXIMATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}  # `hidden_act` -> `approximate` of GELU
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")


class FrozenModelError(RuntimeError):
    """Raised for everything but inference with a frozen copy of a model."""

    def __init__(self) -> None:
        super().__init__(
            "a model made by optimize_for_inference only computes outputs: train, change, move, copy, trace, export or "
            "save the original model instead, and call optimize_for_inference again"
        )


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise FrozenModelError


def _check_inference(inputs: torch.Tensor) -> None:
    is_exporting = getattr(torch.compiler, "is_exporting", bool)  # since torch 2.7
    is_recorded = torch.jit.is_tracing() or is_exporting()  # pyright: ignore[reportPrivateImportUsage] - is public
    if is_recorded or (torch.is_grad_enabled() and inputs.requires_grad):
        raise FrozenModelError


# The fast path: linear layers, and the MLP, whose first product includes its GELU


def gains_from_packing(weight: torch.Tensor) -> bool:
    """Return whether products with packed weights are faster than torch's; a fixed rule, not a benchmark.

    They are with AVX-512, by 1.2 to 1.5 times for a whole forward, and in bfloat16 with products in bfloat16. With AVX2
    they are not; other CPUs were not measured.
    """
    operators = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and all(hasattr(operators, name) for name in _OPERATORS)):
        return False
    if platform.machine().lower() not in ("x86_64", "amd64") or weight.device.type != "cpu":
        return False
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    is_bfloat16 = weight.dtype == torch.bfloat16 and operators._is_mkldnn_bf16_supported()
    return has_avx512 and (weight.dtype == torch.float32 or is_bfloat16)


@functools.cache
def _register_operator() -> None:
    """Register `torch.ops.hf_vit.packed_linear`: inductor compiles oneDNN's operator for its own constants only."""

    @torch.library.custom_op("hf_vit::packed_linear", mutates_args=())
    def packed_linear(
        tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, approximate: str
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, activation, [], approximate)

    @packed_linear.register_fake
    def _(tokens, weight, bias, activation, approximate):
        return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])


class FrozenLinear(nn.Linear):
    """Linear layer of a frozen model, which owns its weight, packed where this is faster."""

    weight = property(_refuse)  # pyright: ignore[reportAssignmentType]

    def take_weight_from(self, linear: nn.Linear, rows: int) -> None:
        """Copy or pack the weight of a layer, for products with `rows` rows of inputs."""
        weight = linear.weight.detach()
        self._dtype, self.is_packed = weight.dtype, gains_from_packing(weight)
        if self.is_packed:
            _register_operator()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows) if self.is_packed else weight.clone()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        return self.product(input)

    def product(self, tokens: torch.Tensor, activation: str = "none", approximate: str = "") -> torch.Tensor:
        """Multiply; only a packed weight can apply an activation ("gelu") too."""
        _check_inference(tokens)
        if not self.is_packed:
            return F.linear(tokens, self._weight, self.bias)
        tokens = tokens.to(self._dtype)  # autocast may have changed it
        if torch.compiler.is_compiling():
            return torch.ops.hf_vit.packed_linear(tokens, self._weight, self.bias, activation, approximate)
        return torch.ops.mkldnn._linear_pointwise(tokens, self._weight, self.bias, activation, [], approximate)


class FrozenMLP(nn.Module):
    """Mixin of the MLP of a frozen model: first product and GELU are one operator, unless hooks need both outputs."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden_size) -> the same"""
        has_hooks = any(one._forward_hooks or one._forward_pre_hooks for one in (self.fc1, self.activation))
        if has_hooks or not getattr(self.fc1, "is_packed", False):
            return super().forward(hidden_states)
        activated = self.fc1.product(hidden_states, "gelu", _APPROXIMATIONS[self.hidden_act])
        return self.dropout(self.fc2(self.dropout(activated)))


class FrozenConv2d(StandardizedConv2d):
    """Convolution of a frozen model, which owns its standardized weight."""

    weight = property(_refuse)  # pyright: ignore[reportAssignmentType]

    def take_weight_from(self, conv: StandardizedConv2d, rows: int) -> None:
        """Standardize the weight of a convolution; `rows` is not used."""
        self._weight = conv.standardized_weight().contiguous(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, rows, columns)"""
        _check_inference(images)
        return self.convolve(images.contiguous(memory_format=torch.channels_last), self._weight)


class FrozenModel(nn.Module):
    """Mixin of a frozen model; `eval` and a move to the current device and dtype change nothing."""

    state_dict = load_state_dict = save_pretrained = push_to_hub = _refuse
    requires_grad_ = set_image_size = set_patch_size = make_flexible = make_fixed = optimize_for_inference = _refuse
    __deepcopy__ = __reduce_ex__ = _refuse

    def train(self, mode: bool = True) -> Any:
        """Raise FrozenModelError for `mode=True`."""
        return _refuse() if mode else super().train(False)

    def _apply(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Raise FrozenModelError for another device or dtype."""
        moved = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        return self if (moved.dtype, moved.device) == (self.dtype, self.device) else _refuse()


@functools.cache
def _with_mixin(mixin: type, module_class: type) -> type:
    """Derive a class of the same name, by which transformers registers outputs and pipelines choose models."""
    names = {name: getattr(module_class, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(module_class.__name__, (mixin, module_class), names)


def _frozen_class(module: Any) -> type | None:
    """Return the class of a module in a frozen model; None if it stays the same."""
    if isinstance(module, PreTrainedModel):
        return _with_mixin(FrozenModel, type(module))
    if "forward" in vars(module):  # replaced by other code, such as accelerate's hooks
        return None
    if isinstance(module, nn.Linear):  # quantized, adapted and sharded layers stay
        is_plain = type(module).forward is nn.Linear.forward and type(module.weight) is nn.Parameter
        return FrozenLinear if is_plain else None
    if isinstance(module, StandardizedConv2d):
        return FrozenConv2d
    return _with_mixin(FrozenMLP, type(module)) if getattr(module, "hidden_act", None) in _APPROXIMATIONS else None


@torch.no_grad()
def freeze(model: _Module, rows: int) -> _Module:
    """Return a copy of a model for inference, which shares no memory with it.

    Args:
        rows: usual number of rows of the linear layers' inputs.
    """
    classes = {module: found for module in model.modules() if (found := _frozen_class(module))}
    frozen: Any = {module: object.__new__(found) for module, found in classes.items()}
    memo: dict[int, Any] = {id(module): one for module, one in frozen.items()}
    for module, one in frozen.items():  # the weights of these layers are packed, not copied
        if isinstance(one, FrozenLinear | FrozenConv2d):
            memo[id(module.weight)] = nn.Parameter(torch.empty(0))
    for module, one in frozen.items():
        vars(one).update(copy.deepcopy(vars(module), memo))
        if isinstance(one, FrozenLinear | FrozenConv2d):
            del one._parameters["weight"]
            one.take_weight_from(module, rows)
    copied = frozen[model]
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    return copied.eval()
