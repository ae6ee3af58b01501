"""Count of the parameters, multiply-adds and activations of a model, per part.

The model runs on fake tensors, which have shapes but no data.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForImageClassification
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights

from .resnet_stem import StandardizedConv2d
from .sizes import Size, as_pair

FLOPS_PER_MULTIPLY_ADD = 2
# Part of each parameter and operation, by the first pattern that matches the name of its module.
_PARTS = (
    (r"embeddings\.stem", "ResNet stem"),
    (r"resnet\.(convolution|norm)", "ResNet root"),
    (r"resnet\.stages\.0", "ResNet stage 1"),
    (r"resnet\.stages\.1", "ResNet stage 2"),
    (r"resnet\.stages\.2", "ResNet stage 3"),
    (r"resnet\.stages\.3", "ResNet stage 4"),
    (r"patch_embeddings", "patch embeddings"),
    (r"attention\.[qkvo]_proj", "attention: projections"),
    (r"attention$", "attention: between tokens"),
    (r"attention\.positions", "class token and positions"),
    (r"layers\.\d+\.mlp", "MLP"),
    (r"pooler", "pooling and pre-logits"),
    (r"classifier", "head"),
    (r"embeddings", "class token and positions"),
    (r"norm", "normalization"),
)
# The CPU's fused attention, which torch's counter does not count.
_MORE_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    )
}


class Part(NamedTuple):
    """Parameters and operations of one part of a model."""

    name: str
    parameters: int
    multiply_adds: int  # of one image


class Compute(NamedTuple):
    """Parameters, operations and memory of a model at one image size.

    parts: parts of a whole forward with every token through every layer, as counted in the paper.
    logits_multiply_adds: operations of a classifier, also in training: with a class token, the last layer computes no
        other token's output.
    activation_bytes: memory of the activations of one image for the backward pass, in float32 without dropout.
    """

    image_size: tuple[int, int]
    parts: Sequence[Part]
    logits_multiply_adds: int
    activation_bytes: int

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(part.parameters for part in self.parts)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of a whole forward of one image."""
        return sum(part.multiply_adds for part in self.parts)


def count_compute(
    model: PreTrainedConfig | nn.Module, image_size: Size | None = None, attention: str | None = None
) -> Compute:
    """Count the operations and the memory of one image; of convolutions and matrix products, as in the paper.

    Args:
        model: a model of this package, or the configuration of a classifier.
        image_size: an int or (height, width) in pixels; None: the model's own.
        attention: attention implementation for the memory, such as "eager", which stores all attentions; None:
            transformers' choice ("sdpa", fused).

    Raises:
        ValueError: the patches do not divide the image.

    Example:
        >>> import hf_vit
        >>> compute = hf_vit.analysis.count_compute(hf_vit.HfViTConfig.from_variant("B/16"))
        >>> f"{compute.multiply_adds / 1e9:.1f} G"
        '17.6 G'
    """
    with _shapes_of(model, image_size, attention) as (shapes, one):
        parts = _parts(shapes, _count_flops(shapes, one, output_hidden_states=True), _paper_part)
        logits_flops = _count_flops(shapes, one)[type(shapes).__name__]
        # a difference, since standardized weights are stored too, once for all images
        two = torch.cat([one, one])
        activation_bytes = _bytes_for_backward(shapes, two) - _bytes_for_backward(shapes, one)
    return Compute((one.shape[-2], one.shape[-1]), parts, logits_flops // FLOPS_PER_MULTIPLY_ADD, activation_bytes)


def count_multiply_adds(model: PreTrainedConfig | nn.Module, image_size: Size | None = None) -> int:
    """Count the multiply-adds of one image, as `count_compute(...).multiply_adds`, but faster."""
    return count_with_padding(model, image_size)[0]


def count_with_padding(model: PreTrainedConfig | nn.Module, image_size: Size | None = None) -> tuple[int, int]:
    """Count multiply-adds, and how many of them multiply the zero padding of standardized convolutions.

    torch's counter includes the latter; XLA's does not. The paper's exaFLOPs for ResNets seem to exclude them.
    """
    on_padding = []

    def count_padding(convolution: Any, images: tuple[torch.Tensor], output: torch.Tensor) -> None:
        kernel_size, stride = convolution.kernel_size[0], convolution.stride[0]
        every = inside = 1  # products of a kernel with values, of the map alone
        for size, outputs in zip(images[0].shape[-2:], output.shape[-2:], strict=True):
            total = max((outputs - 1) * stride + kernel_size - size, 0)
            before = total // 2 if convolution.config.padding == "same" else (kernel_size - 1) // 2
            places = [start * stride + tap - before for start in range(outputs) for tap in range(kernel_size)]
            every, inside = every * len(places), inside * sum(0 <= place < size for place in places)
        on_padding.append(convolution.in_channels * convolution.out_channels * (every - inside))

    with _shapes_of(model, image_size) as (shapes, one), torch.no_grad():
        for module in shapes.modules():
            if isinstance(module, StandardizedConv2d):
                module.register_forward_hook(count_padding)
        flops = _count_flops(shapes, one, output_hidden_states=True)[type(shapes).__name__]
    return flops // FLOPS_PER_MULTIPLY_ADD, sum(on_padding)


def parts_of_logits(model: PreTrainedConfig | nn.Module, part_of: Callable[[str], str]) -> list[Part]:
    """Count the parts of a forward that computes the logits only, in the order of the model.

    Args:
        part_of: function from the name of a module, such as "vit.layers.0.mlp.fc1", to the name of its part.
    """
    with _shapes_of(model, None) as (shapes, one):
        return _parts(shapes, _count_flops(shapes, one), part_of)


@contextmanager
def _shapes_of(model: PreTrainedConfig | nn.Module, image_size: Size | None, attention: str | None = None):
    """Provide the model and an image as fake tensors, in the mode that runs them."""
    config: Any = model if isinstance(model, PreTrainedConfig) else model.config
    size = as_pair(image_size or config.image_size)
    config = type(config).from_dict({**config.to_dict(), "image_size": size}, attn_implementation=attention)
    with FakeTensorMode(), no_init_weights():
        build: Any = type(model) if isinstance(model, nn.Module) else AutoModelForImageClassification.from_config
        yield build(config).eval(), torch.empty(1, config.num_channels, *size)


def _count_flops(model: Any, images: torch.Tensor, **options: bool) -> dict[str, int]:
    """Count the FLOPs of each module that runs, submodules included; names begin with the class of the model.

    With `output_hidden_states` every layer computes every token.
    """
    with FlopCounterMode(display=False, custom_mapping=_MORE_FORMULAS) as counter:
        model(images, **options)
    return {name: sum(operations.values()) for name, operations in counter.get_flop_counts().items()}


def _bytes_for_backward(model: nn.Module, images: torch.Tensor) -> int:
    """Count the bytes that autograd stores in a forward, besides the weights."""
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    kept = {}  # by their storage, which several tensors can share

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(images)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def _parts(model: nn.Module, flops: dict[str, int], part_of: Callable[[str], str]) -> list[Part]:
    """Sum parameters and multiply-adds by the part of their innermost module, in the order of the model."""
    own = Counter(flops)  # without those of submodules
    for name in flops:
        parent = name.rpartition(".")[0]
        while parent and parent not in flops:  # a list of modules, which has no forward
            parent = parent.rpartition(".")[0]
        own[parent] -= flops[name]
    parameters = Counter()
    multiply_adds = Counter()
    for name, module in model.named_modules():
        part = part_of(name)
        full = f"{type(model).__name__}.{name}".rstrip(".")
        parameters[part] += sum(weight.numel() for weight in module.parameters(recurse=False))
        multiply_adds[part] += own[full] // FLOPS_PER_MULTIPLY_ADD
    parts = [Part(name, parameters[name], multiply_adds[name]) for name in parameters]
    return [part for part in parts if part.parameters or part.multiply_adds]


def _paper_part(module: str) -> str:
    """Return a part of `_PARTS`; for any other module its name without numbers."""
    unknown = re.sub(r"\.\d+.*", "", module) or "other"
    return next((part for pattern, part in _PARTS if re.search(pattern, module)), unknown)
