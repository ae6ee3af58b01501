"""Names of classes that come with the package."""

from importlib.resources import files

BUILT_IN = ("imagenet1k",)


def built_in_class_names(name: str) -> list[str]:
    """The names of one of `BUILT_IN`, in the order of the head's outputs."""
    return (files("hf_vit.catalog") / "labels" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
