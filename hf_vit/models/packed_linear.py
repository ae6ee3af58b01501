"""Frozen copies of models, made by `optimize_for_inference`, and their linear layers with packed weights.

On x86 CPUs, torch multiplies float32 matrices with MKL, which does not use AVX-512 on every CPU. oneDNN, which torch
also includes, uses AVX-512, and is faster with weights in its own packed layout (benchmarks/RESULTS.md, "Packed
weights").
The packed layers use the operators that torch.compile uses for frozen models. Without them, the layers use `F.linear`.
"""

import copy
import functools
import platform
from typing import Any, Self, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import PreTrainedModel

from .resnet_stem import StandardizedConv2d, convolve

_Module = TypeVar("_Module", bound=nn.Module)

_APPROXIMATIONS = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}  # `hidden_act` -> `approximate` of GELU
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
# Methods that raise FrozenModelError in a frozen model.
_FORBIDDEN = (
    "state_dict load_state_dict save_pretrained push_to_hub requires_grad_ set_image_size set_patch_size "
    "set_num_channels make_flexible make_fixed optimize_for_inference __deepcopy__ __reduce_ex__".split()
)


class FrozenModelError(RuntimeError):
    """Raised when a frozen copy of a model, or a model of another library, is used for anything but inference."""

    def __init__(self) -> None:
        super().__init__(
            "a model from optimize_for_inference or of another backend is for inference only: train, change, move, "
            "copy, trace, export or save the original model, and make a new one from it"
        )


def _raise_frozen_error(*args: Any, **kwargs: Any) -> Any:
    raise FrozenModelError


def _check_inference(inputs: torch.Tensor) -> None:
    is_recorded = torch.jit.is_tracing() or torch.compiler.is_exporting()  # pyright: ignore[reportPrivateImportUsage] - it is public
    if is_recorded or (torch.is_grad_enabled() and inputs.requires_grad):
        raise FrozenModelError


def packing_is_faster(weight: torch.Tensor) -> bool:
    """Return whether packed weights make matrix products faster; a fixed rule, so that the choice is reproducible.

    With AVX-512, a whole forward pass is 1.2 to 1.5 times as fast. bfloat16 also needs a CPU with bfloat16
    instructions. With AVX2, packed weights are not faster. Other CPUs were not measured.
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
    """Register `torch.ops.hf_vit.packed_linear`, because torch.compile cannot use oneDNN's operator directly."""

    @torch.library.custom_op("hf_vit::packed_linear", mutates_args=())
    def packed_linear(
        tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, approximate: str
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, activation, [], approximate)

    @packed_linear.register_fake
    def _(tokens, weight, bias, activation, approximate):
        return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])


class FrozenLinear(nn.Module):
    """Linear layer of a frozen model with its own copy of the weight, packed if this is faster.

    Args:
        linear: the layer to copy.
        rows: typical number of input rows (batch * tokens).

    Attributes:
        activation: ("gelu", approximation) to fuse the activation into the matrix product, or ("none", ""). Only packed
            weights support fusion.
    """

    weight = property(_raise_frozen_error)

    def __init__(self, linear: nn.Linear, rows: int):
        super().__init__()
        weight = linear.weight.detach()
        self._dtype = weight.dtype
        self.is_packed = packing_is_faster(weight)
        self.activation = ("none", "")
        if self.is_packed:
            _register_operator()
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        else:
            self._weight = weight.clone()
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features)"""
        _check_inference(tokens)
        if not self.is_packed:
            return F.linear(tokens, self._weight, self.bias)
        tokens = tokens.to(self._dtype)  # autocast may have changed the dtype
        activation, approximate = self.activation
        if torch.compiler.is_compiling():
            return torch.ops.hf_vit.packed_linear(tokens, self._weight, self.bias, activation, approximate)
        return torch.ops.mkldnn._linear_pointwise(tokens, self._weight, self.bias, activation, [], approximate)


class FrozenConv2d(nn.Module):
    """Convolution of a frozen model, with a weight that is standardized once."""

    weight = property(_raise_frozen_error)

    def __init__(self, conv: StandardizedConv2d):
        super().__init__()
        self.stride = conv.stride[0]
        self.padding_kind = conv.config.padding
        self._weight = conv.standardized_weight().contiguous(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, rows, columns)"""
        _check_inference(images)
        images = images.contiguous(memory_format=torch.channels_last)
        return convolve(images, self._weight, self.stride, self.padding_kind)


def _frozen_layer(module: nn.Module, rows: int) -> nn.Module | None:
    """Return the frozen version of a layer; None if there is none for its type."""
    if "forward" in vars(module):  # replaced by other code, such as accelerate's hooks
        return None
    if isinstance(module, StandardizedConv2d):
        return FrozenConv2d(module)
    # quantized, adapted and sharded layers are not replaced
    is_plain = getattr(type(module), "forward", None) is nn.Linear.forward and type(module.weight) is nn.Parameter
    return FrozenLinear(module, rows) if isinstance(module, nn.Linear) and is_plain else None


def forbid_changes(model: Any) -> None:
    """Make every method that changes or saves the model raise FrozenModelError.

    Moves to the current device and dtype are allowed, because they change nothing.
    """

    def train(mode: bool = True) -> Any:
        return _raise_frozen_error() if mode else nn.Module.train(model, False)

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        moved = function(torch.empty(0, dtype=model.dtype, device=model.device))
        return model if (moved.dtype, moved.device) == (model.dtype, model.device) else _raise_frozen_error()

    vars(model).update(dict.fromkeys(_FORBIDDEN, _raise_frozen_error), train=train, _apply=apply)


@torch.no_grad()
def freeze(model: _Module, rows: int) -> _Module:
    """Return a copy of a model for inference; it shares no memory with the model.

    Hooks of linear layers are not copied. If the GELU of an MLP is fused into `fc1`, a hook of the copy's `fc1` sees
    the activated values.

    Args:
        rows: typical number of input rows of the linear layers (batch * tokens).
    """
    copies: dict[int, Any] = {}  # deepcopy's memo: it takes the frozen layers instead of copying the originals
    for module in model.modules():
        layer = _frozen_layer(module, rows)
        if layer is not None:
            copies[id(module)] = layer
    frozen = copy.deepcopy(model, copies).requires_grad_(False).eval()
    for module in frozen.modules():
        approximate = _APPROXIMATIONS.get(getattr(module, "hidden_act", ""))
        fc1 = getattr(module, "fc1", None)
        if approximate is not None and isinstance(fc1, FrozenLinear) and fc1.is_packed:
            fc1.activation = ("gelu", approximate)  # pyright: ignore[reportAttributeAccessIssue]
            module.activation = nn.Identity()
        if isinstance(module, PreTrainedModel):
            forbid_changes(module)
    return frozen


class OptimizeForInference:
    """The method of the models that returns a frozen copy."""

    config: Any

    def optimize_for_inference(self, batch_size: int = 1) -> Self:
        """Return a frozen copy of the model, which is faster on some CPUs; the outputs are equal up to rounding.

        The linear layers of the copy have packed weights, and a ResNet's convolutions have standardized weights (see
        `hf_vit.models.packed_linear`). The copy is for inference only, on the device and in the dtype of the model.
        Training, changing, moving, copying, saving or exporting it raises `FrozenModelError`. To change it, change the
        model and call `optimize_for_inference` again.

        Args:
            batch_size: typical number of images per forward pass.

        Returns:
            The copy, in evaluation mode.

        Example:
            >>> import hf_vit
            >>> model, processor = hf_vit.load("folder")
            >>> model = model.optimize_for_inference()
        """
        model: Any = self  # a module, to which this class is added
        return freeze(model, batch_size * _tokens_per_image(self.config))


def _tokens_per_image(config: Any) -> int:
    """Return the number of input rows of the linear layers for one image of the configured size."""
    if not hasattr(config, "num_prefix_tokens"):  # a ResNet, which has a head only
        return 1
    rows, columns = config.grid_size
    return config.num_prefix_tokens + rows * columns
