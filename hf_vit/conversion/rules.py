"""Rule tables: one row per parameter, their name, our name and how the axes move; applied once, nothing left over."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch


class ConversionError(ValueError):
    """A checkpoint that cannot be converted, in one sentence that says why."""


class Layout(NamedTuple):
    """How an array's axes move; `to_theirs` also gets the shape that the other side expects."""

    to_ours: Callable[[torch.Tensor], torch.Tensor]
    to_theirs: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


class Rule(NamedTuple):
    theirs: str
    ours: str
    layout: Layout


def _reshape(array: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return array.reshape(shape)


# What our layouts are called is what happens on the way to us; `shape` is theirs.
as_is = Layout(lambda array: array, _reshape)
flatten = Layout(lambda array: array.flatten(), _reshape)  # (1, 1, 1, channels) or (heads, head_dim) -> (n,)
transpose = Layout(lambda kernel: kernel.transpose(0, 1), lambda weight, shape: weight.T)  # (in, out) -> (out, in)
channels_first = Layout(  # (rows, columns, in, out) -> (out, in, rows, columns)
    lambda kernel: kernel.permute(3, 2, 0, 1), lambda weight, shape: weight.permute(2, 3, 1, 0)
)
split_heads = Layout(  # (hidden, heads, head_dim) -> (heads * head_dim, hidden)
    lambda kernel: kernel.flatten(1).transpose(0, 1), lambda weight, shape: weight.T.reshape(shape)
)
merge_heads = Layout(  # (heads, head_dim, hidden) -> (hidden, heads * head_dim)
    lambda kernel: kernel.flatten(0, 1).transpose(0, 1), lambda weight, shape: weight.T.reshape(shape)
)


def part(index: int, of: int) -> Layout:
    """One of several parameters that are one array: equal parts of its first axis, q | k | v.

    On the way back the parts are joined: see `to_theirs`.
    """
    return Layout(lambda array: array.tensor_split(of)[index], lambda parameter, shape: parameter)


def numbered(rules: Iterable[Rule], theirs: str, ours: str) -> Iterator[Rule]:
    """The same rules below two prefixes."""
    for rule in rules:
        yield Rule(theirs + rule.theirs, ours + rule.ours, rule.layout)


def check_names(rules: Iterable[Rule], names: Iterable[str], name_of_file: str) -> None:
    """Every rule needs its array and every array its rule.

    Raises:
        ConversionError: lists all that are missing and all that are left over.
    """
    wanted, found = {rule.theirs for rule in rules}, set(names)
    problems = [f"missing: {', '.join(sorted(wanted - found))}"] if wanted - found else []
    problems += [f"not understood: {', '.join(sorted(found - wanted))}"] if found - wanted else []
    if problems:
        raise ConversionError(f"{name_of_file} does not hold what its layout needs; {'; '.join(problems)}")


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, torch.Tensor],
    rules: Iterable[Rule],
    name_of_file: str,
) -> None:
    """Every array, once its axes have moved, has the shape of the parameter that it becomes.

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
        raise ConversionError(f"{name_of_file} has arrays of the wrong shape: {'; '.join(problems)}")


def to_ours(
    arrays: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], rules: Sequence[Rule], name_of_file: str
) -> dict[str, torch.Tensor]:
    """Apply a table to the arrays of a checkpoint: our parameters, in float32.

    Raises:
        ConversionError: arrays that are missing, left over, of the wrong shape or type, or not finite.
    """
    check_names(rules, arrays, name_of_file)
    check_shapes({name: tuple(array.shape) for name, array in arrays.items()}, expected, rules, name_of_file)
    if problems := [text for name, array in arrays.items() for text in check_values(name, array)]:
        raise ConversionError(f"{name_of_file} cannot be used: {'; '.join(problems)}")
    return {rule.ours: rule.layout.to_ours(arrays[rule.theirs]).float().contiguous() for rule in rules}


def to_theirs(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> dict[str, torch.Tensor]:
    """Apply a table to our parameters; rows with the same name of theirs are parts of one array."""
    arrays: dict[str, torch.Tensor] = {}
    for theirs, ours, layout in rules:
        array = layout.to_theirs(parameters[ours], tuple(parameters[ours].shape))
        arrays[theirs] = torch.cat([arrays[theirs], array]) if theirs in arrays else array.contiguous()
    return arrays


def check_values(name: str, array: torch.Tensor) -> Iterator[str]:
    """What is wrong with the numbers of an array."""
    if not array.is_floating_point():
        yield f"{name} holds {array.dtype}, not floating-point numbers"
    elif count := count_not_finite(array):
        yield f"{name} has {count} values that are NaN or infinite"


def count_not_finite(array: torch.Tensor) -> int:
    """How many values are NaN or infinite; where none is, at the price of one sum."""
    return 0 if torch.isfinite(array.sum()) else int((~torch.isfinite(array)).sum())
