"""Installed packages: their versions, and the extras that install them."""

from collections.abc import Iterable
from importlib.util import find_spec

EXTRAS = {  # extra -> packages that it adds
    "training": ("accelerate", "datasets", "evaluate", "pyarrow"),
    "remote": ("s3fs", "gcsfs"),
    "lora": ("peft",),
    "analysis": ("matplotlib",),
    "jax-checkpoints": ("msgpack", "tensorstore"),
    "export": ("onnx", "onnxscript"),
    "onnxruntime": ("onnxruntime",),
    "openvino": ("openvino",),
    "quantization": ("nncf",),
    "demo": ("scikit-learn",),
}
_PACKAGES = {"sklearn": "scikit-learn"}  # module -> its package, where the names differ


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return each package's version; "not installed" without one (also for hf_vit in a checkout without install)."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def extra_of(module: str) -> str | None:
    """Return the extra that installs a module; None for any other module."""
    package = _PACKAGES.get(module, module)
    return next((extra for extra, packages in EXTRAS.items() if package in packages), None)


def require(*modules: str) -> None:
    """Raise ImportError if a module of an extra is not installed; the message names the extra."""
    for module in modules:
        if find_spec(module) is None:
            raise ImportError(f"{module} is not installed: pip install 'hf_vit[{extra_of(module)}]'")
