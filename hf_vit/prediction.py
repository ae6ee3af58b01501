"""The former home of `hf_vit.predict` and `hf_vit.embed`: each old name gives the error of `files.removed_names`."""

from typing import NoReturn

from .files.removed_names import refuse_removed


def __getattr__(name: str) -> NoReturn:
    refuse_removed(__name__, name)
