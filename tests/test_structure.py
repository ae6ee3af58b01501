"""Structure of hf_vit: allowed imports (also inside functions and by `import_module`), and form of docstrings."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_vit"
# package -> packages of ours that it may import and reach
MAY_IMPORT = {
    "files": set(),
    "images": set(),
    "models": {"files", "images"},
    "catalog": {"files", "models"},
    "conversion": {"files", "images", "models", "catalog"},
    "backends": {"files", "images", "models", "catalog", "conversion"},
    "training": {"files", "images", "models", "catalog"},
    "evaluation": {"files", "images", "models", "catalog", "training"},
    "analysis": {"files", "images", "models"},
    "hub": {"files", "images", "models", "catalog", "conversion"},
}
MAY_IMPORT |= {command: {*MAY_IMPORT, "cli", "demo"} for command in ("cli", "demo")}
# Modules that do not travel to the Hub; the other modules of these packages do, as flat siblings.
STAY = {"models": {"auto", "loading", "prediction", "processor_size", "variants"}, "images": set()}
THIRD_PARTY = {"torch", "numpy", "PIL", "transformers", "huggingface_hub"}

# First words of docstrings that begin with a clause (expected: an imperative or a noun phrase)
CLAUSES = {"How", "Of", "That", "What", "When", "Where", "Whether", "Which", "Who"}

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
SCRIPTS = {
    path.relative_to(PACKAGE.parent).as_posix(): path
    for folder in ("training", "benchmarks")
    for path in sorted((PACKAGE.parent / folder).glob("*.py"))
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def nodes_of(tree: ast.AST):
    """Yield every node outside blocks for type checkers."""
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            continue
        yield child
        yield from nodes_of(child)


@cache
def imports_of(name: str) -> frozenset[str]:
    """Return the modules of hf_vit that a file imports, without the prefix "hf_vit."; "" for the package itself."""
    path = FILES[name]
    package = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in nodes_of(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            source = (*base, *(node.module.split(".") if node.module else ()))
            found |= {".".join((*source, alias.name)) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hf_vit":
            found |= {f"{node.module}.{alias.name}".removeprefix("hf_vit.") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hf_vit").lstrip(".") for alias in node.names if "hf_vit" in alias.name}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            found |= {
                argument.value.removeprefix("hf_vit").lstrip(".")
                for argument in node.args
                if isinstance(argument, ast.Constant) and str(argument.value).startswith("hf_vit")
            }
    return frozenset(found)


def packages_of(modules: frozenset[str]) -> set[str]:
    """Return the packages of imported names; a name at the top of hf_vit stands for itself."""
    return {module.split(".")[0] for module in modules}


def file_of(module: str) -> str | None:
    """Return the file of an imported dotted name."""
    parts = module.split(".")
    while parts:
        for name in ("/".join(parts) + ".py", "/".join((*parts, "__init__.py"))):
            if name in FILES:
                return name
        parts.pop()
    return None


@cache
def reach_of(name: str) -> frozenset[str]:
    """Return all files that a file imports, directly or indirectly."""
    todo, seen = [name], set()
    while todo:
        if (current := todo.pop()) not in seen:
            seen.add(current)
            todo += [file for module in imports_of(current) if (file := file_of(module)) is not None]
    return frozenset(seen)


def test_every_package_is_in_the_table():
    assert {name.split("/")[0] for name in FILES if "/" in name} == set(MAY_IMPORT)
    assert {path.name for path in PACKAGE.iterdir() if path.is_file()} == {"__init__.py", "py.typed"}


@pytest.mark.parametrize("name", [name for name in FILES if "/" in name])
def test_a_package_imports_and_reaches_only_what_the_table_gives_it(name):
    package = name.split("/")[0]
    allowed = MAY_IMPORT[package] | {package}
    if package not in ("cli", "demo"):  # these may import public names from hf_vit
        assert packages_of(imports_of(name)) <= allowed
    assert {file.split("/")[0] for file in reach_of(name) if "/" in file} <= allowed


def travelling_files() -> list[str]:
    return [name for name in FILES if name.startswith(("images/", "models/")) and Path(name).stem not in
            {"__init__", *STAY[name.split("/")[0]]}]  # fmt: skip


@pytest.mark.parametrize("name", travelling_files())
def test_files_that_travel_to_the_hub_import_only_siblings_and_what_transformers_brings(name):
    text = FILES[name].read_text(encoding="utf-8")
    allowed = THIRD_PARTY | set(sys.stdlib_module_names)
    for node in nodes_of(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1
            assert node.module is not None
            assert "." not in node.module
            assert node.module not in STAY[name.split("/")[0]]
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] in allowed
    # transformers searches the text for imports, including docstrings
    assert "hf_vit." not in "\n".join(line for line in text.splitlines() if "import " in line)


def test_no_two_files_import_each_other():
    circles = {
        (name, other)
        for name in FILES
        for module in imports_of(name)
        if (other := file_of(module)) not in (None, name) and name in reach_of(other)
    }
    assert not {pair for pair in circles if not pair[0].endswith("__init__.py")}


@pytest.mark.parametrize("path", [pytest.param(path, id=name) for name, path in (FILES | SCRIPTS).items()])
def test_no_docstring_begins_with_a_clause(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    lines = [
        (ast.get_docstring(node) or "").partition("\n")[0] for node in ast.walk(tree) if isinstance(node, documented)
    ]
    assert not [line for line in lines if line.split(" ")[0] in CLAUSES]


@pytest.mark.slow
def test_the_package_registers_itself_on_import():
    code = "import hf_vit, transformers; print(transformers.AutoConfig.for_model('hf_vit_hybrid').__class__.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "HfViTHybridConfig"
