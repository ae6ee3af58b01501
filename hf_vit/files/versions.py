"""Versions of installed packages."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return each package's version; "not installed" without one (also for hf_vit in a checkout without install)."""
    return {package: _version_of(package) for package in packages}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
