"""Small helpers: sizes, limits, names, JSON and model files.

This module imports fast: neither PyTorch nor transformers is imported at its top.
"""

import difflib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Size = int | list[int] | tuple[int, int]

HUB_NAME = re.compile(r"[\w.-]*\w/\w[\w.-]*")  # owner/name, but not ./name
MAX_TEXT_BYTES = 2**26  # size of a JSON or text file; a config.json with 21,843 class names has 2 MB
MAX_DEPTH = 32  # nesting of lists and objects in JSON and YAML
_MAX_BRACKETS = 2**20  # number of lists and objects in JSON; "[]" takes 30 times as much memory when it is parsed
# Arguments of `from_pretrained` that locate files.
LOCATION_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# Removed arguments of the models' methods, and what replaces them: rows of the table of files/removed_names.py.
REMOVED_ARGUMENTS = {
    "forward(kept_patches)": "use keep, which has the same meaning",
    "from_pretrained(verify)": "hf-vit verify FOLDER hashes all files again",
}


def as_pair(size: Size | tuple[int, ...]) -> tuple[int, int]:
    """Return a size as (height, width): `224` -> `(224, 224)`; `[224, 320]` -> `(224, 320)`."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def is_same_grid(grid: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two grids are equal; False for symbolic sizes, which stand for any size in an export."""
    return all(isinstance(size, int) for size in (*grid, *other)) and tuple(grid) == tuple(other)


def allowed(what: str) -> bool:
    """Return whether the environment variable `HF_VIT_ALLOW`, a comma-separated list, contains `what`.

    Args:
        what: "large" (files and images above a size limit), "http" (unencrypted URLs) or "private" (hosts on this
            machine and in private networks).
    """
    return what in os.environ.get("HF_VIT_ALLOW", "").replace(" ", "").split(",")


def check_limit(what: str, number: int, most: int, error: type[Exception] = ValueError) -> None:
    """Raise an error for a number above a limit, unless `HF_VIT_ALLOW` contains "large".

    Args:
        what: beginning of the message, which describes the number.
        number: the number.
        most: the limit.
        error: class of the error.
    """
    if number > most and not allowed("large"):
        raise error(f"{what}; at most {most:,} are allowed (set HF_VIT_ALLOW=large to allow more)")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean NAME?" with the most similar known name, or "" if none is similar."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def check_choice(what: str, choice: str, known: Collection[str]) -> None:
    """Raise ValueError if `choice` is not a known name; the message lists the known names."""
    if choice not in known:
        raise ValueError(f"unknown {what} {choice!r}{did_you_mean(str(choice), known)}; known: {', '.join(known)}")


def check_removed_arguments(method: str, names: Iterable[str]) -> None:
    """Raise ValueError if an argument of a method of the models was removed."""
    for name in names:
        call = f"{method}({name})"
        if call in REMOVED_ARGUMENTS:
            raise ValueError(f"{call} was removed: {REMOVED_ARGUMENTS[call]}")


def check_arguments(what: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for the first argument that is unknown."""
    for name in names:
        if name not in known:
            raise ValueError(f"{what} has no argument {name}{did_you_mean(name, known)}")


# Readers of text and JSON from untrusted sources, with size limits and errors that name the file.


def read_text(path: str | os.PathLike, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Read a UTF-8 file, with or without a byte order mark.

    Raises:
        ValueError: the file is too large or not UTF-8.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"cannot read {path}: it has more than {max_bytes} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: it is not UTF-8 text (byte {error.start})") from None


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is too large, nested too deeply or not JSON.
        OSError: the file cannot be read.
    """
    return parse_json(read_text(path), str(path))


def read_json_object(path: str | os.PathLike) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: the file is too large, nested too deeply or not a JSON object.
        OSError: the file cannot be read.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__} (expected a JSON object)")
    return content


def parse_json(text: str, name: str) -> Any:
    """Parse JSON.

    Args:
        text: the JSON text.
        name: name of the source, for messages.

    Raises:
        ValueError: the text is nested too deeply, not JSON, or has a key twice in an object.
    """
    if text.count("[") + text.count("{") > _MAX_BRACKETS:
        raise ValueError(f"cannot read {name}: it has more than {_MAX_BRACKETS:,} lists and objects")
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from None
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        nested = [value for value in level if isinstance(value, dict | list)]
        level = [one for value in nested for one in (value.values() if isinstance(value, dict) else value)]
    if any(isinstance(value, dict | list) for value in level):
        raise ValueError(f"cannot read {name}: it is nested more than {MAX_DEPTH} levels deep")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the key {max(names, key=names.count)!r:.100} twice")
    return content


# Files of a model folder, local or on the Hub.


def check_model_path(name: str | os.PathLike, subfolder: str | None = None) -> None:
    """Check that a name is a model folder or a possible name on the Hub.

    Raises:
        OSError: the name is a file, a folder without a config.json, or a path that does not exist.
    """
    path = Path(name, subfolder or "")
    if path.is_dir() and not (path / "config.json").exists():
        hint = " (it is a PEFT adapter: load it with hf_vit.load)" if (path / "adapter_config.json").exists() else ""
        raise FileNotFoundError(f"{name} has no config.json{hint}")
    if (path.is_file() and path.suffix != ".json") or not (path.exists() or HUB_NAME.fullmatch(os.fspath(name))):
        raise FileNotFoundError(f"{name} is neither a model folder nor owner/name on the Hub (see `hf-vit catalog`)")


@contextmanager
def explain_missing_folder(name: str | os.PathLike) -> Iterator[None]:
    """If a download fails, raise an OSError that also says that there is no local folder of this name."""
    try:
        yield
    except OSError as error:
        if Path(name).exists():
            raise
        reason = " ".join(str(error).split())
        raise OSError(f"there is no folder {name}, and it cannot be loaded from the Hub: {reason}") from error


def find_file(name: str | os.PathLike, file: str, where: Mapping[str, Any], needs_hub: bool = True) -> str | None:
    """Return the local path of a file in a folder or a Hub repository; None if the file does not exist.

    Args:
        name: folder, or name on the Hub.
        file: file name.
        where: arguments of `from_pretrained` that locate files, such as `revision`; others are ignored.
        needs_hub: if the Hub cannot be reached, raise OSError; otherwise return None.
    """
    from transformers.utils.hub import cached_file

    return cached_file(
        os.fspath(name),
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=needs_hub,
        _raise_exceptions_for_connection_errors=needs_hub,
        **{option: where[option] for option in LOCATION_ARGUMENTS if option in where},
    )
