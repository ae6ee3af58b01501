"""Rule tables: one row per parameter, their name, our name and how the axes move; applied once, nothing left over."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..models.configuration_hf_vision import MAX_STAGES


class ConversionError(ValueError):
    """A checkpoint that cannot be converted, in one sentence that says why."""


class Layout(NamedTuple):
    """How an array's axes move on the way to us, and back."""

    to_ours: Callable[[torch.Tensor], torch.Tensor]
    to_theirs: Callable[[torch.Tensor], torch.Tensor]


class Rule(NamedTuple):
    """One array: its name in their file, its name in our state dict."""

    theirs: str
    ours: str
    layout: Layout


# (what stands before their names, what before ours, rules)
Block = tuple[str, str, Iterable[Rule]]

as_is = Layout(lambda array: array, lambda parameter: parameter)
transpose = Layout(lambda kernel: kernel.transpose(0, 1), lambda weight: weight.T)  # (in, out) -> (out, in)
channels_first = Layout(  # (rows, columns, in, out) -> (out, in, rows, columns)
    lambda kernel: kernel.permute(3, 2, 0, 1), lambda weight: weight.permute(2, 3, 1, 0)
)
flatten = Layout(lambda array: array.flatten(), lambda parameter: parameter[None, None, None])  # (1, 1, 1, n) -> (n,)


def split_heads(heads: int) -> Layout:
    """(hidden, heads, head_dim) -> (heads * head_dim, hidden)"""
    return Layout(lambda kernel: kernel.flatten(1).transpose(0, 1), lambda weight: weight.T.unflatten(1, (heads, -1)))


def merge_heads(heads: int) -> Layout:
    """(heads, head_dim, hidden) -> (hidden, heads * head_dim)"""
    return Layout(
        lambda kernel: kernel.flatten(0, 1).transpose(0, 1), lambda weight: weight.T.unflatten(0, (heads, -1))
    )


def flatten_heads(heads: int) -> Layout:
    """(heads, head_dim) -> (heads * head_dim,)"""
    return Layout(lambda array: array.flatten(), lambda bias: bias.unflatten(0, (heads, -1)))


def part(index: int, of: int) -> Layout:
    """One of several parameters that are one array: equal parts of its first axis, q | k | v.

    On the way back the parts are joined: see `to_theirs`.
    """
    return Layout(lambda array: array.tensor_split(of)[index], lambda parameter: parameter)


def weight_and_bias(theirs: str, ours: str, layout: Layout = as_is) -> tuple[Rule, Rule]:
    """The two parameters of a module of PyTorch."""
    return Rule(f"{theirs}.weight", f"{ours}.weight", layout), Rule(f"{theirs}.bias", f"{ours}.bias", layout)


def table(blocks: Iterable[Block]) -> list[Rule]:
    """The rules of all blocks, with whole names."""
    return [
        Rule(theirs + rule.theirs, ours + rule.ours, rule.layout) for theirs, ours, rules in blocks for rule in rules
    ]


def resnet_units(
    depths: Sequence[int], name: str, first: int, ours: str, unit: Iterable[Rule], projection: Iterable[Rule]
) -> Iterator[Block]:
    """The residual units of a ResNet.

    Args:
        depths: units per stage.
        name: theirs, a format of the number of the stage and that of the unit.
        first: where they begin to count.
        ours: the name of our ResNet.
        unit, projection: rules of every unit, and of the first one in each stage besides.
    """
    for stage, depth in enumerate(depths):
        for index in range(depth):
            rules = (*unit, *projection) if index == 0 else unit
            yield name.format(stage + first, index + first), f"{ours}stages.{stage}.layers.{index}.", rules


def count_units(names: Iterable[str], pattern: str, first: int) -> list[int]:
    """Units per stage; 1 for a stage without, so that its arrays are listed as missing.

    Args:
        pattern: of their names from the beginning; the groups are the number of the stage and that of the unit.
        first: where they begin to count.
    """
    depths: dict[int, int] = {}
    for match in filter(None, (re.match(pattern, name) for name in names)):
        stage, unit = int(match[1]) - first, int(match[2]) - first
        depths[stage] = max(depths.get(stage, 0), unit + 1)
    if max(depths, default=0) >= MAX_STAGES:
        raise ConversionError(f"an array is of stage {max(depths) + first} of a ResNet; at most {MAX_STAGES} are read")
    return [depths.get(stage, 1) for stage in range(max(depths, default=-1) + 1)]


def check_names(rules: Iterable[Rule], names: Iterable[str], file: str) -> None:
    """Check that every rule has its array and every array its rule.

    Raises:
        ConversionError: lists all that are missing and all that are left over.
    """
    wanted, found = {rule.theirs for rule in rules}, set(names)
    problems = [f"missing: {', '.join(sorted(wanted - found))}"] if wanted - found else []
    problems += [f"not understood: {', '.join(sorted(found - wanted))}"] if found - wanted else []
    if problems:
        raise ConversionError(f"{file} does not hold what its layout needs; {'; '.join(problems)}")


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, torch.Tensor], rules: Iterable[Rule], file: str
) -> None:
    """Check that every array, once its axes have moved, has the shape of the parameter that it becomes.

    Args:
        shapes: of their arrays.
        expected: our parameters.

    Raises:
        ConversionError: lists all arrays that do not.
    """
    problems = []
    for theirs, ours, layout in rules:
        wanted = tuple(expected[ours].shape)
        try:
            became = tuple(layout.to_ours(torch.empty(shapes[theirs], device="meta")).shape)
        except (IndexError, RuntimeError):  # too few axes to move
            became = None
        if became != wanted:
            problems.append(f"{theirs} {tuple(shapes[theirs])} does not become {ours} {wanted}")
    if problems:
        raise ConversionError(f"{file} has arrays of the wrong shape: {'; '.join(problems)}")


def check_values(name: str, array: torch.Tensor) -> Iterator[str]:
    """What is wrong with the numbers of an array; checked at the price of one sum."""
    if not array.is_floating_point():
        yield f"{name} holds {array.dtype}, not floating-point numbers"
    elif not torch.isfinite(array.sum()) and (count := int((~torch.isfinite(array)).sum())):
        yield f"{name} has {count} values that are NaN or infinite"


def to_theirs(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> dict[str, torch.Tensor]:
    """Apply a table to our parameters; rows with the same name of theirs are parts of one array."""
    arrays: dict[str, torch.Tensor] = {}
    for theirs, ours, layout in rules:
        array = layout.to_theirs(parameters[ours])
        arrays[theirs] = torch.cat([arrays[theirs], array]) if theirs in arrays else array.contiguous()
    return arrays
