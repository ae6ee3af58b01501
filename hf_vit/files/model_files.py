"""The files of a model folder, local or on the Hub: where they are, and its config.json."""

import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .json_files import read_json_object

HUB_NAME = re.compile(r"[\w.-]*\w/\w[\w.-]*")  # owner/name, but not ./name
# Arguments of `from_pretrained` that locate files.
LOCATION_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


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


def read_config(name: str | os.PathLike, **where: Any) -> dict[str, Any]:
    """Read the config.json of a folder or a Hub repository, of any model type.

    Args:
        where: arguments of `from_pretrained` that locate the file, such as `revision`.

    Raises:
        ValueError: the file is damaged, too large or nested too deeply, or its `model_type` or `architectures` has the
            wrong type.
        OSError: there is no such file, or it cannot be downloaded.
    """
    check_model_path(name, where.get("subfolder"))
    with explain_missing_folder(name):
        file = find_file(name, "config.json", where)
    if file is None:
        raise FileNotFoundError(f"{name} has no config.json")
    config = read_json_object(file)
    architectures = config.get("architectures") or []
    stated = [config.get("model_type") or "", *(architectures if isinstance(architectures, list) else [architectures])]
    if not all(isinstance(one, str) for one in stated):
        raise ValueError(f"the config.json of {name} has {reprlib.repr(stated)} as model_type and architectures")
    return config


def saved_class(config: Mapping[str, Any]) -> str | None:
    """Return the name of the model class in a config.json; for a hybrid, HfViTFor... becomes HfViTHybridFor...."""
    name = next(iter(config.get("architectures") or ()), None)
    if name is None or config.get("model_type") != "hf_vit_hybrid":
        return name
    return re.sub("^HfViT(?!Hybrid)", "HfViTHybrid", name)
