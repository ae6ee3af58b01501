"""Imports point one way: commands, then training, conversion, analysis and hub, then modelling, then configuration."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hf_vit"
TRAVELLING = [
    "configuration_hf_vit",
    "position_embeddings",
    "resnet_stem",
    "modeling_hf_vit",
    "modeling_masked_patch_prediction",
    "configuration_hf_bit",
    "modeling_hf_bit",
    "image_processing_hf_vit",
]
AREAS = ("training", "conversion", "analysis")


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports, as dotted names below it."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join((*base, module)) for module in modules}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_vit."):
            found.add(node.module.removeprefix("hf_vit."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("hf_vit.") for alias in node.names if alias.name.startswith("hf_vit.")}
    return found


FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@pytest.mark.parametrize("name", FILES)
def test_areas_do_not_import_each_other_nor_the_commands(name):
    area = name.split("/")[0]
    if area in AREAS:
        forbidden = {other for other in AREAS if other != area} | {"cli", "demo"}
        assert not {module for module in imports_of(FILES[name]) if module.split(".")[0] in forbidden}


def travelling_files() -> set[str]:
    """Every file that the remote code consists of: what the travelling files import, and what these import."""
    todo, seen = list(TRAVELLING), set()
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imports_of(PACKAGE / f"{module}.py")
    return seen


@pytest.mark.parametrize("module", sorted(travelling_files()))
def test_files_that_travel_to_the_hub_are_flat_siblings(module):
    text = (PACKAGE / f"{module}.py").read_text()
    allowed = {"torch", "numpy", "PIL", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            assert (node.module or "").count(".") == 0 if node.level else (node.module or "").split(".")[0] in allowed
    assert "hf_vit." not in "\n".join(line for line in text.splitlines() if "import" in line)


def test_configuration_and_stem_depend_on_nothing_above_them():
    assert imports_of(PACKAGE / "upstream_vit.py") == set()
    assert imports_of(PACKAGE / "configuration_hf_vit.py") == {"upstream_vit"}
    assert imports_of(PACKAGE / "resnet_stem.py") <= {"configuration_hf_vit"}
    assert imports_of(PACKAGE / "position_embeddings.py") <= {"configuration_hf_vit"}


def test_the_package_registers_itself_on_import():
    code = "import hf_vit, transformers; print(transformers.AutoConfig.for_model('hf_vit_hybrid').__class__.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "HfViTHybridConfig"
