"""Versions of installed packages."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The version of each package; "not installed" where there is none, as for hf_vit in a bare checkout."""
    return {package: _version_of(package) for package in packages}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
