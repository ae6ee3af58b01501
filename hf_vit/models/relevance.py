"""Relevance of each patch for one class: attention weighted by its gradient (Chefer et al., arXiv 2103.15679)."""

from typing import Any

import numpy as np
import torch
from torch import nn

from .image_processing_hf_vit import Normalize, flip_channels
from .modeling_hf_vit import HfViTAttention, HfViTPooler


class NoRelevance(ValueError):
    """Model without a class or without attention, of which nothing is relevant."""


@torch.inference_mode(False)
@torch.enable_grad()
def class_relevance(model: nn.Module, pixel_values: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the relevance of each patch for a class, which may be another one for each image.

    With the attention A of a layer (heads, queries, keys) and the gradient of the class's logit by it, the layer mixes
    tokens by the mean over the heads of max(gradient * A, 0). R begins as the identity and becomes R + mixing R in each
    layer (equations 5 and 6 of the paper). The result is the row of R of the class token (pooling "cls"), the mean of
    all pooled rows ("mean"), or their sum with the same weights of the probe's attention ("map").

    Args:
        model: a classifier with eager layers, in any attention implementation.
        pixel_values: (images, channels, height, width)
        targets: class indices (images,)

    Returns:
        (images, rows, columns), at least 0, in float32 at least.

    Raises:
        NoRelevance: it has no attention, or no logits of whole images; or its attention is axial.
    """
    attentions = [module for module in model.modules() if isinstance(module, HfViTAttention)]
    config: Any = model.config
    if not attentions or config.attention_axes != "all":
        raise NoRelevance(f"{type(model).__name__} has no attention over all tokens")
    pooler = next((module for module in model.modules() if isinstance(module, HfViTPooler)), None)
    if pooler is None or pooler.pooling == "none" or not hasattr(model, "classifier"):
        raise NoRelevance(f"{type(model).__name__} computes no logits of whole images")
    probabilities: list[torch.Tensor] = []  # of each layer: (images, heads, queries, tokens)
    probe: list[torch.Tensor] = []  # of attention pooling: its tokens, and its attended values

    def request(_: nn.Module, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        return arguments, {**options, "output_attentions": True}

    def keep_attention(_: nn.Module, arguments: tuple, output: tuple) -> None:
        probabilities.append(output[1])

    def keep_input(_: nn.Module, arguments: tuple) -> None:
        probe.append(arguments[0])

    hooks = [module.register_forward_pre_hook(request, with_kwargs=True) for module in attentions]
    hooks += [module.register_forward_hook(keep_attention) for module in attentions]
    if pooler.map is not None:
        hooks += [module.register_forward_pre_hook(keep_input) for module in (pooler.map, pooler.map.o_proj)]
    was_training = model.training
    try:
        images = pixel_values.detach().clone().requires_grad_()  # the graph begins here if all weights are frozen
        logits = model.eval()(images, interpolate_pos_encoding=True).logits
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    chosen = logits.gather(1, targets.to(logits.device).clone()[:, None]).sum()  # images do not depend on each other
    gradients = torch.autograd.grad(chosen, [*probabilities, *probe[1:]])
    with torch.no_grad():
        relevance = _pool(pooler, probabilities[0], probe, gradients[len(probabilities) :])  # (images, 1, queries)
        for attention, gradient in reversed([*zip(probabilities, gradients, strict=False)]):
            mixing = (gradient * attention).clamp(min=0).mean(dim=1).to(relevance.dtype)  # (images, queries, tokens)
            relevance = relevance + relevance[..., : mixing.shape[1]] @ mixing
        rows, columns = config.grid_of(*pixel_values.shape[-2:])
        return relevance[:, 0, -rows * columns :].unflatten(1, (rows, columns))


def _pool(
    pooler: HfViTPooler, like: torch.Tensor, probe: list[torch.Tensor], gradients: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the relevance of the last layer's tokens for the head's input, (images, 1, tokens).

    Args:
        like: attention (images, heads, queries, tokens) of a layer with all tokens.
        probe: of attention pooling, the pooled tokens (images, tokens, hidden_size) and the attended values
            (images, 1, hidden_size).
        gradients: of these attended values.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    weights = torch.zeros(len(like), 1, like.shape[-1], dtype=dtype, device=like.device)
    if pooler.map is None:
        first, last = (0, 1) if pooler.pooling == "cls" else (pooler.first_token, weights.shape[-1])
        weights[..., first:last] = 1 / (last - first)
        return weights
    tokens = probe[0]
    heads = pooler.map.split_heads
    query = heads(pooler.map.q_proj(pooler.map.probe))  # (1, heads, 1, head_dim)
    key = heads(pooler.map.k_proj(tokens))  # (images, heads, tokens, head_dim)
    value = heads(pooler.map.v_proj(tokens))  # (images, heads, tokens, head_dim)
    scores = (query @ key.transpose(2, 3)) * key.shape[-1] ** -0.5
    attention = scores.softmax(dim=-1)  # (images, heads, 1, tokens)
    gradient = heads(gradients[0]) @ value.transpose(2, 3)  # of the logit by this attention
    weights[..., pooler.first_token :] = (gradient * attention).clamp(min=0).mean(dim=1)
    return weights


def token_weights(pooler: HfViTPooler, hidden_states: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, hidden_size) -> (batch, tokens): the weight of each token in the pooled one, of sum 1

    With attention pooling, it is the attention of the probe, the mean over the heads.
    """
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    weights = torch.zeros_like(hidden_states[..., 0], dtype=dtype)
    pooled = hidden_states[:, pooler.first_token :]
    if pooler.pooling == "cls":
        weights[:, 0] = 1
    elif pooler.map is None:
        weights[:, pooler.first_token :] = 1 / pooled.shape[1]
    else:
        query = pooler.map.split_heads(pooler.map.q_proj(pooler.map.probe)).to(dtype)  # (1, heads, 1, head_dim)
        key = pooler.map.split_heads(pooler.map.k_proj(pooled)).to(dtype)  # (batch, heads, tokens, head_dim)
        scores = (query @ key.transpose(2, 3))[:, :, 0] * key.shape[-1] ** -0.5
        weights[:, pooler.first_token :] = scores.softmax(dim=-1).mean(dim=1)
    return weights


def visible_image(pixel_values: torch.Tensor, processor: Any) -> np.ndarray:
    """Undo the normalization: (channels, height, width) -> (height, width, 3) or (height, width) in [0, 1]"""
    scale, offset = Normalize.of(processor).scale_and_offset()
    image = (pixel_values - offset) / scale
    if processor.do_flip_channel_order:
        image = flip_channels(image)
    image = (image / 255).clamp(0, 1).numpy()
    return image.transpose(1, 2, 0) if len(image) == 3 else image.mean(axis=0)
