"""Versions of installed packages."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return each package's version; "not installed" without one (also for hf_vit in a checkout without install)."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
