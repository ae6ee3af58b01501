"""From a model back to a checkpoint that the original JAX code loads."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...files.npz import write_npz
from ...models.configuration_hf_bit import ORIGINALS, HfBiTConfig
from ...models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from ...models.embeddings import stem_numbers
from ...models.modeling_hf_bit import HfBiTForImageClassification, HfBiTModel
from ...models.modeling_hf_vit import HfViTForImageClassification, HfViTModel, HfViTPreTrainedModel
from ...models.resnet_stem import ORIGINAL
from ..building import rules_for_model, variants_of_the_paper
from ..record import record_of
from ..rules import ConversionError
from . import bit_layout
from .layout import POSITIONS, Dialect, dialect_name, rules_for

DIALECTS = ("vit_jax", "big_vision")
BIT_DIALECTS = {"big_transfer": ("big_transfer",), "big_vision": ("bit_paper", "bit")}


def export_jax(model: HfViTPreTrainedModel, path: str | os.PathLike, dialect: str | None = None) -> None:
    """Write a model as an .npz that the original code loads; what was converted comes back bit by bit.

    Args:
        model: with or without a head. A model converted from a file whose all-zero head was left out gets it back.
        path: the .npz to write; it appears when it is complete.
        dialect: "vit_jax" (names of the released files, the default) or "big_vision"; of a BiT "big_transfer" or
            "big_vision", by default the one that computes as the model does.

    Raises:
        ConversionError: the dialect has no such model.
        NpzError: the file cannot be written.
    """
    if isinstance(model, HfBiTModel | HfBiTForImageClassification):
        write_npz(Path(path), _bit_arrays(model, _code_of(model.config, dialect)))
        return
    dialect = dialect or DIALECTS[0]
    if dialect not in DIALECTS:
        raise ConversionError(f"unknown dialect {dialect!r}; known: {', '.join(DIALECTS)}")
    if not isinstance(model, HfViTModel | HfViTForImageClassification):
        raise ConversionError(f"{type(model).__name__} has no JAX counterpart; convert its encoder or its classifier")
    _check_expressible(model.config, dialect)
    write_npz(Path(path), _arrays(model, Dialect(dialect)))


def _check_expressible(config: HfViTConfig, dialect: str) -> None:
    problems = variants_of_the_paper(config)
    if dialect == "vit_jax":
        if config.pooling == "map":
            problems.append("attention pooling (pooling='map')")
        if config.position_embedding_type == "sincos2d":
            problems.append("fixed sine-cosine positions")
    elif isinstance(config, HfViTHybridConfig):
        problems.append("ResNet stem")
    elif config.position_embedding_type == "none":
        problems.append("way to leave out position embeddings")
    if not config.qkv_bias:
        problems.append("attention without biases")
    if (config.hidden_act, config.layer_norm_eps) != ("gelu_pytorch_tanh", 1e-6):
        problems.append(f"{config.hidden_act} with LayerNorm epsilon {config.layer_norm_eps}")
    if config.norm_after_pooling:
        problems.append("LayerNorm after the pooling")
    if config.pool_patches_only and config.use_cls_token and config.pooling in ("mean", "map"):
        problems.append("pooling that leaves out the class token")
    if isinstance(config, HfViTHybridConfig) and stem_numbers(config) != ORIGINAL:
        problems.append(f"ResNet with {stem_numbers(config)}")
    if problems:
        other = next(name for name in DIALECTS if name != dialect)
        raise ConversionError(f"the dialect {dialect} has no {', no '.join(problems)}; another dialect is {other}")


def _arrays(model: HfViTPreTrainedModel, dialect: Dialect) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, array) pairs, one array in memory at a time."""
    has_head = model.base_model is not model
    state_dict = model.state_dict()
    folds_class_row = dialect.names == "big_vision" and model.config.use_cls_token
    for theirs, ours, layout in rules_for(model.config, has_head):
        parameter = state_dict[ours if has_head else ours.removeprefix("vit.")]
        array = layout.to_theirs(parameter, _their_shape(theirs, parameter, model.config))
        if folds_class_row and theirs == "cls":
            array = _with_class_row(array, model.base_model.embeddings.position_embeddings)
        if folds_class_row and theirs == POSITIONS:
            array = array[:, 1:]
        yield dialect_name(theirs, dialect), array
    yield from _left_out_head(model, has_head, *(dialect_name(f"head/{kind}", dialect) for kind in ("kernel", "bias")))


def _code_of(config: HfBiTConfig, dialect: str | None) -> str:
    """The code that computes as a BiT does, a key of `bit_layout.NAMES`."""
    if dialect is not None and dialect not in BIT_DIALECTS:
        raise ConversionError(f"unknown dialect {dialect!r}; of a BiT there are: {', '.join(BIT_DIALECTS)}")
    codes = BIT_DIALECTS[dialect] if dialect else tuple(ORIGINALS)
    for code in codes:
        if all(getattr(config, field) == value for field, value in ORIGINALS[code].items()):
            return code
    numbers = ", ".join(f"{field} {getattr(config, field)}" for field in ORIGINALS["bit"])
    raise ConversionError(f"{f'{dialect} has no' if dialect else 'no original code has a'} ResNet with {numbers}")


def _bit_arrays(model: HfViTPreTrainedModel, code: str) -> Iterator[tuple[str, torch.Tensor]]:
    has_head = model.base_model is not model
    state_dict = model.state_dict()
    for theirs, ours, layout in rules_for_model(model, bit_layout.rules_for(model.config, has_head, code)):
        parameter = state_dict[ours]
        is_linen_norm = re.search(r"(^|/)(gn[^/]*|norm-pre-head)/", theirs)
        yield theirs, layout.to_theirs(parameter, (1, 1, 1, len(parameter)) if is_linen_norm else parameter.shape)
    kernel, bias = (rule.theirs for rule in bit_layout.NAMES[code].head)
    yield from _left_out_head(model, has_head, kernel, bias)


def _their_shape(theirs: str, parameter: torch.Tensor, config: HfViTConfig) -> tuple[int, ...]:
    """The shape of an array whose axes are merged on our side."""
    hidden_size, heads = config.hidden_size, config.num_attention_heads
    if theirs.endswith(("query/kernel", "key/kernel", "value/kernel")):
        return hidden_size, heads, hidden_size // heads
    if theirs.endswith(("query/bias", "key/bias", "value/bias")):
        return heads, hidden_size // heads
    if theirs.endswith("out/kernel"):
        return heads, hidden_size // heads, hidden_size
    if re.search(r"(^|/)gn[^/]*/", theirs):
        return 1, 1, 1, len(parameter)
    return tuple(parameter.shape)


def _with_class_row(cls: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
    """big_vision adds no position to the class token: its row is part of it."""
    if positions is None or not positions[:, 0].any():
        return cls  # adding zero would lose the sign of -0.0
    return cls + positions[:, :1]


def _left_out_head(
    model: HfViTPreTrainedModel, has_head: bool, kernel_name: str, bias_name: str
) -> Iterator[tuple[str, torch.Tensor]]:
    left_out: dict[str, Any] = record_of(model).get("left_out", {})
    if has_head or "head" not in left_out:
        return
    kernel = torch.zeros(left_out["head"]["shape"], dtype=model.dtype)
    yield kernel_name, kernel
    yield bias_name, kernel.new_full(kernel.shape[-1:], left_out["head"]["bias"])
