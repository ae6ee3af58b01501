"""Computed cost of a forward: multiply-adds, weights and activations."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from common import table

from hf_vit import HfViTConfig, HfViTHybridConfig
from hf_vit.analysis.compute import parts_of_logits
from hf_vit.models.configuration_hf_vit import as_pair

# A module belongs to the part of the first pattern that its name contains.
_PATTERNS = {
    r"embeddings\.stem": "stem",
    r"embeddings": "patches",
    r"attention\.[qkv]_proj": "q, k, v",
    r"attention\.o_proj": "projection",
    r"attention$": "attention",
    r"mlp": "MLP",
    r"norm": "norms",
    r"classifier": "head",
}


class Part(NamedTuple):
    """Cost of a part of the model.

    multiply_adds: for one image.
    weights: count of numbers, read once for a batch.
    activations: count of numbers read and written for one image. Assumptions: each step is one pass; additions and
        activation functions are fused into the products; attention probabilities stay in the cache.
    """

    name: str
    multiply_adds: int
    weights: int
    activations: int


def cost(config: HfViTConfig) -> list[Part]:
    """Return the cost of each part of a classifier; the last layer counts only the work that the logits need."""
    activations: dict[str, int] = {}
    for name, numbers in (*_stem(config), *_patches(config), *_encoder(config)):
        activations[name] = activations.get(name, 0) + numbers
    activations["head"] = config.hidden_size + (config.num_labels or 0)
    return [
        Part(part.name, part.multiply_adds, part.parameters, activations[part.name])
        for part in parts_of_logits(config, _part_of)
    ]


def _part_of(module: str) -> str:
    return next((part for pattern, part in _PATTERNS.items() if re.search(pattern, module)), "other")


def _stem(config: HfViTConfig) -> Iterator[tuple[str, int]]:
    """Return the cost of a hybrid's ResNet: convolutions, each with a GroupNorm that reads and writes its output."""
    if not isinstance(config, HfViTHybridConfig):
        return
    before = math.prod(as_pair(config.image_size))
    size = [_half(side) for side in as_pair(config.image_size)]
    yield _convolution(config.num_channels, config.stem_width, before, math.prod(size))
    pooled = [_half(side) for side in size]
    yield "stem", config.stem_width * (math.prod(size) + math.prod(pooled))
    size, channels_in = pooled, config.stem_width
    for stage, depth in enumerate(config.stem_depths):
        channels = config.stem_width * 2**stage
        for unit in range(depth):
            before = math.prod(size)
            if stage and not unit:
                size = [_half(side) for side in size]
            after = math.prod(size)
            yield _convolution(channels_in, channels, before, before)
            yield _convolution(channels, channels, before, after)
            yield _convolution(channels, 4 * channels, after, after)
            if not unit:
                yield _convolution(channels_in, 4 * channels, before, after)
            channels_in = 4 * channels


def _convolution(channels_in: int, channels_out: int, before: int, after: int) -> tuple[str, int]:
    return "stem", before * channels_in + 3 * after * channels_out


def _half(side: int) -> int:
    return -(-side // 2)


def _patches(config: HfViTConfig) -> Iterator[tuple[str, int]]:
    count, channels = math.prod(config.grid_size), config.num_channels
    if isinstance(config, HfViTHybridConfig):
        channels = config.stem_width * (4 * 2 ** (len(config.stem_depths) - 1) if config.stem_depths else 1)
    values = channels * math.prod(as_pair(config.patch_size))
    yield "patches", count * values + (count + config.num_prefix_tokens) * config.hidden_size


def _encoder(config: HfViTConfig) -> Iterator[tuple[str, int]]:
    tokens = math.prod(config.grid_size) + config.num_prefix_tokens
    for index in range(config.num_hidden_layers):
        needs_one = config.pooling == "cls" and index == config.num_hidden_layers - 1
        yield from _layer(config.hidden_size, config.intermediate_size, tokens, 1 if needs_one else tokens)
    yield "norms", 2 * (1 if config.pooling == "cls" else tokens) * config.hidden_size


def _layer(hidden: int, mlp: int, tokens: int, queries: int) -> Iterator[tuple[str, int]]:
    """Return the cost of an encoder layer that computes the first `queries` tokens."""
    yield "norms", 2 * (tokens + queries) * hidden
    yield "q, k, v", (queries + 3 * tokens) * hidden
    yield "attention", 2 * (queries + tokens) * hidden
    yield "projection", 3 * queries * hidden
    yield "MLP", queries * (3 * hidden + 2 * mlp)


def cost_as_markdown(variants: tuple[str, ...], sizes: tuple[int, ...]) -> str:
    """Return two Markdown tables (multiply-adds, megabytes) with a row for each variant and image size."""
    names = ("stem", "patches", "q, k, v", "attention", "projection", "MLP", "norms", "head")
    multiply_adds, megabytes = [], []
    for variant in variants:
        for size in sizes:
            config = HfViTConfig.from_variant(variant, image_size=size, num_labels=1000)
            parts = {part.name: part for part in cost(config)}
            present = [parts.get(name, Part(name, 0, 0, 0)) for name in names]
            numbers = [part.multiply_adds / 1e6 for part in present]
            multiply_adds.append([f"{variant}, {size}", *map(_as_number, numbers), f"**{sum(numbers):,.0f}**"])
            numbers = [4e-6 * part.activations for part in present]
            weights = 4e-6 * sum(part.weights for part in present)
            row = [f"{variant}, {size}", *map(_as_number, numbers), f"**{sum(numbers):,.0f}**", f"{weights:,.0f}"]
            megabytes.append(row)
    return (
        f"Multiply-adds of one image, in millions:\n\n{table(['', *names, 'all'], multiply_adds)}\n\n"
        "Megabytes of activations that one image reads and writes in float32, half of it in bfloat16; and of weights, "
        f"which are read once for a batch:\n\n{table(['', *names, 'all', 'weights'], megabytes)}"
    )


def _as_number(value: float) -> str:
    return f"{value:,.1f}" if value else ""
