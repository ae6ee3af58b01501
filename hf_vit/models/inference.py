"""Faster forwards of single modules, for `optimize_for_inference` and for training.

For inference, a module computes from another *form* of its weight, which is made once:

* Linear layers: torch computes float32 products on x86 with MKL, whose kernels do not use the widest vectors of every
  CPU. oneDNN, which is part of torch too, does. The form is the weight packed for oneDNN, by the internal operators
  that torch's compiler uses for frozen models; where one is missing, nothing is packed.
* Standardised convolutions: the form is the standardised weight.
* Attention: see `onednn_attention_forward` in layers.py.

A compiled graph cannot hold packed weights; its products use oneDNN with the plain weights.

A form is never stale. While it exists, the Parameter (the same object) is a `GuardedWeight`. torch passes every use of
it in Python to `__torch_function__`, which drops the form first. A change inside torch, such as by compiled code,
raises its version. A later forward makes the form again, if torch's use counts show that nobody holds a view of the
weight, its storage, an array or a `state_dict()`; else the module's own forward runs. torch does not count uses of
memory that it has not allocated (NumPy's, a mapped file) or that processes share; such a weight gets no form, unless
`optimize` could move it. Only changes outside torch are missed: through an address of the weight or a DLPack capsule
that was used and released between two forwards.

For training, linear layers use oneDNN, forward and backward, where its float32 products are nearly twice as fast as
MKL's.

Only the `forward` of single modules is replaced, on the instance. Parameters, names, hooks and callers stay as they
are, so there is nothing to undo before a model is saved.
"""

import functools
import os
import platform
import re
import sys
from typing import Any, cast

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from .resnet_stem import StandardizedConv2d, standardize

DTYPES = (torch.float32, torch.bfloat16)
OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
_SMALLEST_TRAINED = 192  # fewest inputs and outputs of a layer that uses oneDNN in training
_FEWEST_ROWS = 64  # of such a product
_NARROWEST = 384  # fewest inputs and outputs of a layer that is packed without AVX-512
# torch 2.6 cannot tell a compilation from an export, which may contain torch's own operators only.
_is_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
_GELU_FORM = {"gelu": "none", "gelu_pytorch_tanh": "tanh"}  # names of transformers, and of oneDNN


def is_recorded() -> bool:
    """Tell whether torch records the computation for other inputs: torch.compile, torch.export, torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage] - is public


def has_onednn() -> bool:
    """Tell whether oneDNN's packing operators are available on this CPU; x86 only, since others were not measured."""
    is_there = torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)
    return is_there and platform.machine().lower() in ("x86_64", "amd64")


def onednn_beats_mkl() -> bool:
    """Tell whether oneDNN's float32 products are nearly twice as fast as MKL's: full AVX-512, which MKL does not use.

    MKL uses AVX-512 on Intel CPUs, unless MKL_ENABLE_INSTRUCTIONS forbids it. AMD CPUs before family 26, and laptop
    CPUs of family 26, compute half a vector at a time and gain nothing. The answer is constant on one machine, so that
    a resumed run rounds in the same way.
    """
    if not (has_onednn() and torch.backends.mkl.is_available() and onednn_has_avx512()):
        return False
    vendor, family, model = _cpu()
    if vendor == "AuthenticAMD":
        return family == 26 and (model < 0x20 or 0x40 <= model < 0x50)
    return not _allow_avx512("MKL_ENABLE_INSTRUCTIONS")


@functools.cache
def mkl_is_narrower() -> bool:
    """Tell whether oneDNN uses AVX-512 at full rate and MKL does not: AMD's family 26, or MKL_ENABLE_INSTRUCTIONS."""
    if not (torch.backends.mkl.is_available() and onednn_has_avx512()):
        return False
    vendor, family, _ = _cpu()
    return (vendor == "AuthenticAMD" and family >= 26) or not _allow_avx512("MKL_ENABLE_INSTRUCTIONS")


@functools.cache
def _cpu() -> tuple[str, int, int]:
    """Return vendor, family and model of the CPU; ("", 0, 0) if unknown."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            text = file.read(2**13)
        match = re.search(r"vendor_id\s*:\s*(?P<vendor>\w+)\ncpu family\s*:\s*(\d+)\nmodel\s*:\s*(\d+)", text)
    except OSError:  # Windows: "AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD"
        match = re.search(r"Family (\d+) Model (\d+) .*, (?P<vendor>\w+)", platform.processor())
    if match is None:
        return "", 0, 0
    family, model = (int(group) for group in match.groups() if group.isdigit())
    return match["vendor"], family, model


def onednn_has_avx512() -> bool:
    """Tell whether oneDNN uses AVX-512: the CPU has it, and oneDNN's environment variables do not forbid it."""
    is_allowed = _allow_avx512("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return is_allowed and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _allow_avx512(*variables: str) -> bool:
    """Tell whether an instruction set in environment variables, of which the first that is set counts, has AVX-512."""
    limit = next(filter(None, map(os.environ.get, variables)), "").upper()
    return not limit.startswith(("SSE", "AVX2")) and limit != "AVX"


@functools.cache
def _register_operator() -> None:
    """Register `torch.ops.hf_vit.onednn_linear`, the product in compiled graphs.

    torch's own compiler rules for oneDNN's operator are for frozen weights only. Registered on first use: 40 ms.
    """

    @torch.library.custom_op("hf_vit::onednn_linear", mutates_args=())
    def onednn_linear(
        tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str, form: str
    ) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, activation, [], form)

    @onednn_linear.register_fake
    def _(tokens, weight, bias, activation, form):
        return tokens.new_empty(*tokens.shape[:-1], weight.shape[0])


class GuardedWeight(nn.Parameter):
    """Parameter that has another form, until anything but its metadata is used."""

    def __new__(cls, *arguments: Any, **options: Any) -> nn.Parameter:
        return nn.Parameter(*arguments, **options)  # for callers of `type(parameter)(...)`

    def __reduce_ex__(self, protocol: Any) -> Any:
        drop_form(self)
        return self.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling() or func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        weights = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter)]
        for weight in weights:
            drop_form(weight)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            for weight in weights:  # another thread may have made the form while this changed the weight
                drop_form(weight)


_METADATA = {
    *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf")),
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "grad_fn", "layout", "is_meta", "is_cuda")),
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "__hash__")),
}


class _Form:
    """Another form of a weight, and the state of the weight that it was made from."""

    def __init__(self, weight: torch.Tensor):
        self.plain = weight.detach()
        self._storage = self.plain.untyped_storage()
        self._version: int = self.plain._version
        self.values: Any = None  # also None while they are being made

    def is_current(self, weight: Any) -> bool:
        """Tell whether the weight has not changed, and nobody can change it unseen."""
        return self.plain._version == self._version and self.uses(weight) == _uses_when_alone()

    def uses(self, weight: Any) -> tuple[int, int, int]:
        """Count those who could change the weight unseen: its holders in torch, its views, holders of its storage."""
        views: int = torch._C._storage_Use_Count(self._storage._cdata)
        return weight._use_count(), views, sys.getrefcount(self._storage)


@functools.cache
@torch.inference_mode(False)
def _uses_when_alone() -> tuple[int, int, int]:
    weight = nn.Parameter(torch.empty(1))
    return _Form(weight).uses(weight)


def drop_form(weight: Any) -> None:
    """Make a `GuardedWeight` an ordinary Parameter again."""
    if type(weight) is GuardedWeight:
        cast(Any, weight).__class__ = nn.Parameter
        vars(weight).pop("_form", None)


def _has_memory_of_torch(weight: torch.Tensor) -> bool:
    storage = weight.untyped_storage()
    return storage.resizable() and not storage.is_shared()


@torch.inference_mode(False)
def _leave_foreign_memory(weight: torch.Tensor) -> None:
    """Copy a weight that nobody else holds out of memory that torch did not allocate, e.g. a mapped file."""
    is_shared = weight.untyped_storage().is_shared()
    if not (weight.is_inference() or is_shared or _has_memory_of_torch(weight)) and _Form(weight).is_current(weight):
        weight.data = weight.data.clone()


def guard_weight(weight: Any) -> Any:
    """Watch a weight for changes; return a form for `is_guarded`, or None if PyTorch cannot tell of changes."""
    drop_form(weight)
    _leave_foreign_memory(weight)
    if type(weight) is not nn.Parameter or weight.is_inference() or not _has_memory_of_torch(weight):
        return None
    form = vars(weight)["_form"] = _Form(weight)
    weight.__class__ = GuardedWeight
    return form if form.is_current(weight) else None


def is_guarded(weight: Any, form: Any) -> bool:
    """Tell whether a weight is certainly unchanged since `guard_weight` returned this form."""
    return type(weight) is GuardedWeight and vars(weight).get("_form") is form and form.is_current(weight)


class OptimizedForward:
    """Replacement of a module's own forward, until `restore`."""

    def __init__(self, module: Any):  # an nn.Module, whose attributes torch types as Tensor | Module
        self.module = module

    def __reduce__(self):
        return type(self), (self.module,)  # a copy makes its own form of the weight


class _ForwardFromForm(OptimizedForward):
    """Forward that uses another form of its module's weight if it can, else the module's own forward."""

    def form(self, inputs: torch.Tensor) -> Any:
        """Return the other form of the weight, made if necessary; None where it cannot be used."""
        weight = self.module.weight
        if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage] - is public
            drop_form(weight)  # torch compares the recorded graph with that of a second forward
            return None
        if _is_other_work():
            return None
        form = vars(weight).get("_form") if type(weight) is GuardedWeight else self._guard(weight, inputs)
        if form is None or not _fits(inputs, form.plain):
            return None
        if form.is_current(weight):
            return form.values
        drop_form(weight)
        return None

    def _guard(self, weight: Any, inputs: torch.Tensor) -> _Form | None:
        if type(weight) is not nn.Parameter or weight.is_inference() or not self.takes(inputs, weight):
            return None
        if not _has_memory_of_torch(weight):
            return None
        form = vars(weight)["_form"] = _Form(weight)
        weight.__class__ = GuardedWeight
        if form.is_current(weight):  # from here on every change is seen
            form.values = self.make_values(form.plain, inputs)
        return form

    def takes(self, inputs: torch.Tensor, weight: torch.Tensor) -> bool:
        """Tell whether the form can be used for these inputs."""
        return _fits(inputs, weight)

    def make_values(self, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Make the other form of the weight."""
        raise NotImplementedError


def _is_other_work() -> bool:
    return torch.is_grad_enabled() or _is_exporting() or torch.is_autocast_enabled("cpu")


def _fits(inputs: torch.Tensor, weight: torch.Tensor) -> bool:
    return inputs.dtype == weight.dtype and inputs.device == weight.device and type(inputs) is torch.Tensor


class PackedLinear(_ForwardFromForm):
    """Forward of a linear layer with its weight packed for oneDNN."""

    def __init__(self, module: Any):
        super().__init__(module)
        _register_operator()

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        product = self.product(tokens)
        return F.linear(tokens, self.module.weight, self.module.bias) if product is None else product

    def product(self, tokens: torch.Tensor, activation: str = "none", form: str = "") -> torch.Tensor | None:
        """Multiply by oneDNN; None where the module's own forward must run."""
        bias = self.module.bias
        if torch.compiler.is_compiling():
            if _is_other_work() or not self.takes(tokens, self.module.weight):
                return None
            return torch.ops.hf_vit.onednn_linear(tokens, self.module.weight, bias, activation, form)
        weight = self.form(tokens)
        if weight is None:
            return None
        return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, activation, [], form)

    def takes(self, inputs: torch.Tensor, weight: torch.Tensor) -> bool:
        return super().takes(inputs, weight) and inputs.dtype in DTYPES and inputs.device.type == "cpu"

    def make_values(self, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._reorder_linear_weight(weight, inputs.numel() // inputs.shape[-1])


class PackedMLP(OptimizedForward):
    """Forward of an `HfViTMLP` whose `fc1` is packed: first product and GELU in one operator."""

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        mlp = self.module
        first = mlp.fc1.__dict__.get("forward")
        skipped = (mlp.fc1, mlp.activation, mlp.dropout)
        is_watched = any(module._forward_hooks or module._forward_pre_hooks for module in skipped)
        if not mlp.training and not is_watched and isinstance(first, PackedLinear):
            activated = first.product(hidden_states, "gelu", _GELU_FORM[mlp.hidden_act])
            if activated is not None:
                return mlp.fc2(activated)
        return type(mlp).forward(mlp, hidden_states)


class StandardizedOnce(_ForwardFromForm):
    """Forward of a convolution with its weight standardised once, channels last."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        conv = self.module
        weight = None if torch.compiler.is_compiling() else self.form(images)
        if weight is None:
            return type(conv).forward(conv, images)
        return conv.convolve(images.contiguous(memory_format=torch.channels_last), weight)

    def make_values(self, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return standardize(weight, self.module.numbers).contiguous(memory_format=torch.channels_last)


class _OneDNNProduct(torch.autograd.Function):
    """`F.linear` in float32 with all products by oneDNN; second derivatives are torch's."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        return _multiply(tokens, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        wants_tokens, wants_weight, wants_bias = ctx.needs_input_grad
        rows, gradient = tokens.flatten(0, -2), gradients[0].flatten(0, -2)
        of_tokens = of_weight = of_bias = None
        if torch.is_grad_enabled():  # `create_graph`
            multiply, multiply_transposed = torch.matmul, _gradient_of_weight_by_torch
        else:
            multiply, multiply_transposed = _gradient_of_rows, _gradient_of_weight
        if wants_tokens:
            of_tokens = multiply(gradient, weight).view(tokens.shape)
        if wants_weight:
            of_weight, of_bias = multiply_transposed(gradient, rows)
        if wants_bias and of_bias is None:
            of_bias = gradient.sum(0)
        return of_tokens, of_weight, of_bias if wants_bias else None


def _multiply(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


def _gradient_of_rows(gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    transposed = weight.t()
    return _multiply(gradient, transposed.contiguous() if _has_conflicting_columns(weight) else transposed)


def _gradient_of_weight(gradient: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(rows, outputs), (rows, inputs) -> (outputs, inputs), and the bias gradient (outputs) where it is free"""
    if _has_conflicting_columns(rows):
        if _has_conflicting_columns(gradient):
            return _gradient_of_weight_by_torch(gradient, rows)
        return _weight_and_bias_gradients(rows, gradient)[0].t().contiguous(), None
    return _weight_and_bias_gradients(gradient, rows)


def _gradient_of_weight_by_torch(gradient: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient.t() @ rows, None


def _weight_and_bias_gradients(gradient: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    shape_alone = gradient.new_empty(gradient.shape[1], rows.shape[1])
    found = torch.ops.aten.mkldnn_linear_backward_weights(
        gradient.contiguous().to_mkldnn(), rows.contiguous().to_mkldnn(), shape_alone, True
    )
    return found[0].to_dense(), found[1].to_dense()


def _has_conflicting_columns(matrix: torch.Tensor) -> bool:
    """Tell whether the elements of a column map to the same cache lines, which makes reading columns slow."""
    return matrix.shape[1] * matrix.element_size() % 4096 == 0


class TrainedLinear(OptimizedForward):
    """Forward of a linear layer that uses oneDNN in a training step, and the module's own forward elsewhere."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        weight, bias = self.module.weight, self.module.bias
        if torch.compiler.is_compiling() or not self._takes(tokens, weight):
            return F.linear(tokens, weight, bias)
        return cast(Any, _OneDNNProduct).apply(tokens, weight, bias)

    def _takes(self, tokens: torch.Tensor, weight: Any) -> bool:
        is_plain = type(tokens) is torch.Tensor and type(weight) is nn.Parameter
        if not (is_plain and tokens.dtype == weight.dtype == torch.float32 and tokens.device == weight.device):
            return False
        if tokens.numel() < _FEWEST_ROWS * weight.shape[1] or not torch.is_grad_enabled():
            return False
        return not (torch.is_autocast_enabled("cpu") or _is_transformed())


def _is_transformed() -> bool:
    """Tell whether torch.func, forward-mode AD, torch.jit or a dispatch mode is active: they know torch's operators."""
    is_in_mode = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    return bool(is_in_mode or forward_ad._current_level >= 0 or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage] - is public


def use_training_products(model: nn.Module, is_training: bool) -> None:
    """Switch to oneDNN's training forwards where they are faster, or back; training also undoes `optimize`."""
    if is_training:
        restore(model)
    multiplies = is_training and onednn_beats_mkl()
    module: Any
    for module in model.modules():
        if not is_training and isinstance(module.__dict__.get("forward"), TrainedLinear):
            del module.forward
        elif multiplies and "forward" not in module.__dict__ and _can_be_trained(module):
            module.forward = TrainedLinear(module)


def _can_be_trained(module: Any) -> bool:
    """Tell whether a layer gets the training forward; so do weights sharded between steps (FSDP2)."""
    if not _has_plain_forward(module) or module.weight.dtype != torch.float32 or module.weight.device.type != "cpu":
        return False
    is_whole_in_forward = type(module.weight) is nn.Parameter or hasattr(module.weight, "full_tensor")
    return is_whole_in_forward and min(module.weight.shape) >= _SMALLEST_TRAINED


def optimize(model: nn.Module) -> None:
    """Replace the forwards of a model's modules where this is faster on this machine."""
    restore(model)
    packs = has_onednn()
    module: Any
    for module in model.modules():
        if "forward" in module.__dict__:  # already replaced by someone else, e.g. accelerate's offloading hooks
            continue
        if hasattr(module, "is_optimized"):  # attention, which chooses for each input
            module.is_optimized = True
        elif isinstance(module, StandardizedConv2d):
            _leave_foreign_memory(module.weight)
            module.forward = StandardizedOnce(module)
        elif packs and _can_be_packed(module) and gains_from_packing(module.weight):
            _leave_foreign_memory(module.weight)
            module.forward = PackedLinear(module)
        elif packs and getattr(module, "hidden_act", None) in _GELU_FORM:
            module.forward = PackedMLP(module)


def restore(model: nn.Module) -> None:
    """Undo `optimize` and free the other forms."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), OptimizedForward):
            del module.forward
        vars(module).pop("is_optimized", None)
    for parameter in model.parameters():
        drop_form(parameter)


def _has_plain_forward(module: Any) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward  # not quantised, not adapted


def _can_be_packed(module: Any) -> bool:
    if not _has_plain_forward(module) or type(module.weight) is not nn.Parameter:  # quantised, sharded
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype in DTYPES


def gains_from_packing(weight: torch.Tensor) -> bool:
    """Tell whether packing a weight (outputs, inputs) makes its products faster; by a fixed rule, without timing.

    With AVX-512, packed products were never slower than torch's, and faster for 8 images. Without it, those of ViT-Ti
    were 12 % slower for one image and no faster for 8. See benchmarks/RESULTS.md.
    """
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return onednn_has_avx512() or min(weight.shape) >= _NARROWEST
