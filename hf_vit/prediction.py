"""The former home of `hf_vit.predict` and `hf_vit.embed`: each old name gives the error of `files.removed_names`."""

from .files.removed_names import describe_removed


def __getattr__(name: str):
    removed = describe_removed(f"{__name__}.{name}")
    if removed is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(removed)
