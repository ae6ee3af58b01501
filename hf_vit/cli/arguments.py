"""Arguments of commands, from the signatures of functions.

Parameters before the `*` are positional arguments, and those after it are options; `json_` is `--json`. `Annotated`
adds the help text of a parameter, then perhaps its metavar; a dictionary adds other keyword arguments of argparse's
`add_argument`.
"""

import argparse
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from ..files.output import refuse_existing, refuse_inputs


def add_arguments(parser: Any, command: Callable[..., Any]) -> None:
    """Add an argument for each parameter of a command to a parser, or to a group of its options."""
    metavars = {int: "INT", parse_count: "INT", float: "FLOAT", parse_positive: "FLOAT"}
    for parameter in inspect.signature(command).parameters.values():
        about = _read_annotation(parameter.annotation)
        is_required = parameter.default is parameter.empty
        if not is_required:
            about["default"] = [] if parameter.default == () else parameter.default
            if "default" not in about["help"] and parameter.default not in (None, False, ()):
                about["help"] += f" (default {parameter.default})"
        about["help"] = about["help"].replace("%", "%%")
        if parameter.kind is parameter.KEYWORD_ONLY:
            if "type" in about and "choices" not in about:
                about.setdefault("metavar", metavars.get(about["type"], "TEXT"))
            option = parameter.name.removesuffix("_").replace("_", "-")
            parser.add_argument(f"--{option}", dest=parameter.name, required=is_required, **about)
        else:
            if not is_required:
                about["nargs"] = "*" if "nargs" in about else "?"
            parser.add_argument(parameter.name, **about)


def _read_annotation(annotation: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for the type of a parameter, and its help text."""
    kind, *metadata = typing.get_args(annotation)
    texts = [item for item in metadata if isinstance(item, str)]
    about: dict[str, Any] = dict(zip(("help", "metavar"), texts, strict=False))
    for more in metadata:
        if isinstance(more, dict):
            about = more | about
    if NoneType in typing.get_args(kind):
        kind = typing.get_args(kind)[0]
    if kind is bool:
        about["action"] = "store_true"
    elif typing.get_origin(kind) is Literal:
        about["choices"] = typing.get_args(kind)
        about.setdefault("type", type(about["choices"][0]))
    elif typing.get_origin(kind) is list:
        about.setdefault("type", *typing.get_args(kind))
        if "action" not in about:
            about["nargs"] = "+"
    else:
        about.setdefault("type", kind)
    return about


def parse_size(text: str) -> int | tuple[int, int]:
    """Parse `384` or `384x512`, height first."""
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"cannot read {text!r} as a size (expected N or HxW, such as 384 or 384x512)")
    return int(parts[0]) if len(parts) == 1 else (int(parts[0]), int(parts[1]))


def parse_count(text: str) -> int:
    """Parse a number that is at least 1."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def parse_positive(text: str) -> float:
    """Parse a finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


# Arguments of several commands
Count = Annotated[int, {"type": parse_count}]
Size = Annotated[int | tuple[int, int] | None, {"type": parse_size, "metavar": "N|HxW"}]
Model = Annotated[
    str, "a folder, a name on the Hub, a checkpoint file, or a released checkpoint such as augreg:Ti/16", "model"
]
ImageSize = Annotated[Size, "image size in pixels (default: the model's own)"]
Overwrite = Annotated[bool, "replace the output"]
SaveFor = Annotated[
    Literal["hf_vit", "transformers"] | None,
    "format of the folder (also --for): hf_vit, or transformers, which loads without hf_vit (model types vit, bit and "
    "siglip_vision_model); hf_vit.load loads both formats, with the same outputs (default: hf_vit for convert, the "
    "folder's own format for push)",
]


def check_figure(option: str, path: Path, overwrite: bool) -> None:
    """Raise an error if a figure may not be written, or matplotlib does not know its format."""
    refuse_existing(path, overwrite)
    from matplotlib.backend_bases import FigureCanvasBase

    if path.suffix.lower().removeprefix(".") not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"{option} is {path} (expected a name that ends in .png, .jpg, .pdf or .svg)")


# Parameters of commands that are written, and texts that are no paths. All others may be paths that are read.
_OUTPUTS = ("output", "sheet", "static", "published")
_NO_PATHS = ("split", "splits", "image_column", "config", "preset", "name", "license_", "message")


def place_data(command: str, arguments: dict[str, Any]) -> None:
    """Give the words of `hf-vit COMMAND MODEL DATA OUTPUT` to their parameters, also of MODEL OUTPUT --dataset DATA.

    Raises:
        ValueError: a word is missing or too many.
    """
    option = "calibrate" if "calibrate" in arguments else "dataset"
    given = arguments.pop(option)
    if given:
        if arguments["output"] is not None:
            raise ValueError(f"the data is given twice: {arguments['data']} and --{option}")
        arguments["output"] = arguments["data"]
        arguments["data"] = given
    if None in (arguments["data"], arguments["output"]):
        raise ValueError(f"a word is missing: the command is hf-vit {command} MODEL DATA OUTPUT")
    arguments["output"] = Path(arguments["output"])


def check_outputs(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if a command would write what it reads.

    Args:
        arguments: parameters of the command -> values.
    """
    inputs = []
    for name, value in arguments.items():
        if name not in (*_OUTPUTS, *_NO_PATHS):
            values = value if isinstance(value, list) else [value]
            inputs += [one for one in values if isinstance(one, str | Path)]
    for name in _OUTPUTS:
        if arguments.get(name) is not None:
            refuse_inputs(arguments[name], *inputs)
