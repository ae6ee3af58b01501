"""Rule tables: one row per parameter, with their name, our name and the layout; every array must be used."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class ConversionError(ValueError):
    """A checkpoint that cannot be converted; the message says why."""


class UnknownGridError(ConversionError):
    """A table of positions whose rows and columns are not stated, with its number of patches."""

    def __init__(self, message: str, num_patches: int):
        super().__init__(message)
        self.num_patches = num_patches


@contextmanager
def name_checkpoint(name: str) -> Iterator[None]:
    """Convert whatever is wrong with the content of a checkpoint to a ConversionError that names its file."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError) as error:
        reason = str(error)
        if not isinstance(error, ValueError):
            reason = f"its content does not match its architecture ({error!r:.300})"
        raise ConversionError(f"cannot convert {name}: {reason}") from error


class Layout(NamedTuple):
    """Conversion of an array's axes, in both directions."""

    to_ours: Callable[[torch.Tensor], torch.Tensor]
    to_theirs: Callable[[torch.Tensor], torch.Tensor]


class Rule(NamedTuple):
    """One array: its name in their file, its name in our state dict, and its layout."""

    theirs: str
    ours: str
    layout: Layout


as_is = Layout(lambda array: array, lambda parameter: parameter)
transpose = Layout(lambda kernel: kernel.transpose(0, 1), lambda weight: weight.T)  # (in, out) -> (out, in)
channels_first = Layout(  # (rows, columns, in, out) -> (out, in, rows, columns)
    lambda kernel: kernel.permute(3, 2, 0, 1), lambda weight: weight.permute(2, 3, 1, 0)
)
flatten = Layout(lambda array: array.flatten(), lambda parameter: parameter[None, None, None])  # (1, 1, 1, n) -> (n,)


def split_heads(heads: int) -> Layout:
    """Make the layout (hidden, heads, head_dim) -> (heads * head_dim, hidden)."""
    return Layout(lambda kernel: kernel.flatten(1).transpose(0, 1), lambda weight: weight.T.unflatten(1, (heads, -1)))


def merge_heads(heads: int) -> Layout:
    """Make the layout (heads, head_dim, hidden) -> (hidden, heads * head_dim)."""
    return Layout(
        lambda kernel: kernel.flatten(0, 1).transpose(0, 1), lambda weight: weight.T.unflatten(0, (heads, -1))
    )


def flatten_heads(heads: int) -> Layout:
    """Make the layout (heads, head_dim) -> (heads * head_dim,)."""
    return Layout(lambda array: array.flatten(), lambda bias: bias.unflatten(0, (heads, -1)))


def part(index: int, of: int) -> Layout:
    """Make the layout of one part of a fused array, such as q | k | v: equal parts of its first axis.

    In the other direction, `to_theirs` joins the parts.
    """
    return Layout(lambda array: array.tensor_split(of)[index], lambda parameter: parameter)


def weight_and_bias(theirs: str, ours: str, layout: Layout = as_is) -> tuple[Rule, Rule]:
    """Make the rules of a PyTorch module's two parameters."""
    return Rule(f"{theirs}.weight", f"{ours}.weight", layout), Rule(f"{theirs}.bias", f"{ours}.bias", layout)


def within(theirs: str, ours: str, rules: Iterable[Rule]) -> list[Rule]:
    """Put prefixes in front of the names of rules."""
    return [Rule(theirs + rule.theirs, ours + rule.ours, rule.layout) for rule in rules]


def expand(table: Iterable[Rule], names: Iterable[str]) -> list[Rule]:
    """Return the rules of a model's parameters that a table has.

    In a table, `{}` in both names stands for a number; `{+}` in theirs for the number plus 1, and `{+02}` for that
    with two digits. Our names are without the prefix of the encoder.

    Args:
        table: one rule for each kind of parameter.
        names: our names of the parameters.
    """
    rows = {rule.ours: rule for rule in table}
    rules = []
    for name in names:
        bare = re.sub(r"^(vit|bit)\.", "", name)
        if (row := rows.get(_NUMBER.sub("{}", bare))) is not None:
            rules.append(row._replace(theirs=_numbered(row.theirs, _NUMBER.findall(bare)), ours=name))
    return rules


def _numbered(theirs: str, numbers: Iterable[str]) -> str:
    remaining = map(int, numbers)
    return re.sub(r"\{(\+?)(\d*)\}", lambda mark: format(next(remaining) + len(mark[1]), f"{mark[2]}d"), theirs)


def check_arrays(
    rules: Iterable[Rule], shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Check that every rule has its array, every array its rule, and that it has our parameter's shape.

    Args:
        rules: the rules.
        shapes: shapes of their arrays.
        parameters: our parameters.

    Raises:
        ConversionError: arrays are missing, unknown or of the wrong shape; the message lists all of them.
    """
    wanted, found = {rule.theirs for rule in rules}, set(shapes)
    problems = [f"missing: {', '.join(sorted(wanted - found))}"] if wanted - found else []
    problems += [f"unknown: {', '.join(sorted(found - wanted))}"] if found - wanted else []
    for theirs, ours, layout in rules if not problems else ():
        expected = tuple(parameters[ours].shape)
        try:
            became = tuple(layout.to_ours(torch.empty(shapes[theirs], device="meta")).shape)
        except (IndexError, RuntimeError):  # too few axes
            became = None
        if became != expected:
            problems.append(f"{theirs} {shapes[theirs]} does not fit {ours} {expected}")
    if problems:
        raise ConversionError(f"its arrays do not match its architecture: {'; '.join(problems)}")


def check_values(name: str, array: torch.Tensor) -> Iterator[str]:
    """Yield the faults of an array's values; costs one sum for a correct array."""
    if not array.is_floating_point():
        yield f"{name} has dtype {array.dtype} (expected floating point)"
    elif not torch.isfinite(array.sum()) and (count := int((~torch.isfinite(array)).sum())):
        yield f"{name} has {count} values that are NaN or infinite"


def to_theirs(parameters: Mapping[str, torch.Tensor], rules: Iterable[Rule]) -> dict[str, torch.Tensor]:
    """Apply a table to our parameters; rows with the same name in their file are parts of one array."""
    arrays: dict[str, torch.Tensor] = {}
    for theirs, ours, layout in rules:
        array = layout.to_theirs(parameters[ours])
        arrays[theirs] = torch.cat([arrays[theirs], array]) if theirs in arrays else array.contiguous()
    return arrays


IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
# Numbers of timm's ResNets (GroupNormAct, StdConv2dSame) and, after them, of transformers' BiT (modeling_bit.py).
TIMM_NUMBERS: dict[str, Any] = {
    "group_norm_eps": 1e-5,
    "weight_standardization_eps": 1e-8,
    "weight_standardization_form": "variance",
}
