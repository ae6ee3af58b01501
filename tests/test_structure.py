"""Which package of hf_vit may import which, imports inside functions included."""

import ast
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports

from hf_vit.runtimes.deployment import RUNNER

PACKAGE = Path(__file__).parents[1] / "hf_vit"
# The rooms from the lowest floor up, and what each may import of ours, directly or through others. A leaf is imported
# by the command line and `hf_vit/__init__.py` alone.
MAY_IMPORT = {
    "models": set(),
    "files": {"models"},
    "settings": {"files", "models"},
    "catalog": {"files", "models"},
    "analysis": {"files", "models"},  # leaf
    "conversion": {"files", "models", "catalog"},
    "data": {"files", "models", "catalog", "settings"},
}
MAY_IMPORT["loading"] = {*MAY_IMPORT["conversion"], "conversion"}
MAY_IMPORT["hub"] = MAY_IMPORT["runtimes"] = {*MAY_IMPORT["loading"], "loading"}  # leaves
MAY_IMPORT["inference"] = {*MAY_IMPORT["loading"], *MAY_IMPORT["data"], "loading", "data"}
MAY_IMPORT["training"] = {*MAY_IMPORT["inference"], "inference"}
MAY_IMPORT["evaluation"] = {*MAY_IMPORT["training"], "training"}
MAY_IMPORT["auditing"] = {*MAY_IMPORT["evaluation"], "evaluation"}  # leaf
MAY_IMPORT["demo"] = {*MAY_IMPORT["loading"], "loading", "data", "settings", "hub", "runtimes"}  # leaf
# The only ways from the core to a leaf, each when a user asks for it: a backend, a program as the format of an export,
# and the audit that a run was told to make.
EXCEPTIONS = {("loading.py", "runtimes"), ("conversion/exporting.py", "runtimes"), ("training/api.py", "auditing")}
EVERYTHING = {"cli", "__init__"}
# What code on the Hub may import: transformers refuses to load it where one of these is not installed.
THIRD_PARTY = {"torch", "numpy", "PIL", "transformers", "huggingface_hub"}

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


def nodes_of(tree: ast.AST):
    """Yield every node outside `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield child
        yield from nodes_of(child)


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the full names of what a file imports."""
    package = ".".join(FILES[name].relative_to(PACKAGE.parent).parts[:-1])
    found = set()
    for node in nodes_of(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
            found |= {str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)}
    return frozenset(found)


def file_of(name: str) -> str | None:
    """Return the file of a name that is imported; None for a name of another package."""
    package, *parts = name.split(".")
    ends = [f"{'/'.join(parts[:count])}{end}" for count in range(len(parts), 0, -1) for end in (".py", "/__init__.py")]
    return next((end for end in ends if package == "hf_vit" and end in FILES), None)


@cache
def reach_of(name: str) -> frozenset[str]:
    """Return all files that a file imports, directly or indirectly."""
    todo, seen = [name], set()
    while todo:
        if (current := todo.pop()) not in seen:
            seen.add(current)
            files = {file_of(module) for module in imports_of(current)} - {None}
            todo += [file for file in files if (current, package_of(file)) not in EXCEPTIONS]
    return frozenset(seen)


def package_of(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


@pytest.mark.parametrize("name", [name for name in FILES if package_of(name) not in EVERYTHING])
def test_imports(name):
    allowed = MAY_IMPORT[package_of(name)] | {package_of(name)}
    assert {package_of(file) for file in reach_of(name)} <= allowed


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("models/")])
def test_files_that_travel_to_the_hub(name):
    text = FILES[name].read_text(encoding="utf-8")
    assert set(get_imports(FILES[name])) <= THIRD_PARTY | set(sys.stdlib_module_names)
    for node in nodes_of(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert "." not in (node.module or ".")
    # transformers searches the text for imports, docstrings included
    assert "hf_vit." not in "\n".join(line for line in text.splitlines() if "import " in line)


def test_a_deployed_folder_has_what_its_runner_imports():
    assert reach_of(RUNNER[0]) == set(RUNNER)
    found = {module for name in RUNNER for module in get_imports(FILES[name])}
    assert found <= {"numpy", "PIL", "onnxruntime", "openvino"} | set(sys.stdlib_module_names)


DEVICES = {"cuda", "cudnn", "hpu", "mps", "tpu", "torch_xla", "xla", "xpu"}


def device_names_in(name: str) -> frozenset[str]:
    """Return the names of devices in a file's code; in a longer text, such as a help text, they do not count."""
    words = set()
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant):
            words.add(getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "value", None))
    return frozenset(words & DEVICES)


def test_one_module_knows_the_names_of_devices():
    assert {name for name in FILES if device_names_in(name)} == {"data/devices.py"}
