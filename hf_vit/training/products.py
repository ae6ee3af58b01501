"""Linear layers whose products go through oneDNN in training on a CPU; see `hf_vit.inference` for why.

The weight's gradient stays with torch: there oneDNN was no faster.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..inference import has_onednn


def use_onednn(model: nn.Module) -> None:
    """Have every linear layer of a model compute float32 products through oneDNN, from now on."""
    if not has_onednn():
        return
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in module.__dict__:
            module.forward = OneDNNLinear(module)


class OneDNNLinear:
    """The forward of a linear layer: a product through oneDNN for float32 on a CPU, and otherwise torch's."""

    def __init__(self, layer: Any):
        self.layer = layer

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        is_plain = type(weight) is nn.Parameter and type(tokens) is torch.Tensor and tokens.ndim > 1
        is_float32 = tokens.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if is_plain and is_float32 and weight.device.type == "cpu" and not torch.compiler.is_compiling():
            return Product.apply(tokens, weight, bias)
        return F.linear(tokens, weight, bias)


class Product(torch.autograd.Function):
    """(..., in_features), (out_features, in_features), (out_features,) or None -> (..., out_features)"""

    @staticmethod
    def forward(ctx, tokens, weight, bias):
        ctx.save_for_backward(tokens, weight)
        return product(tokens, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        tokens, weight = ctx.saved_tensors
        for_tokens, for_weight, for_bias = ctx.needs_input_grad
        gradient = gradient.contiguous()
        rows = gradient.flatten(0, -2)  # (rows, out_features)
        return (
            product(gradient, weight.t(), None) if for_tokens else None,
            rows.t() @ tokens.flatten(0, -2) if for_weight else None,
            rows.sum(dim=0) if for_bias else None,
        )


def product(tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(tokens, weight, bias, "none", [], "")
