"""Examples of the docstrings: each runs, with a small model in `folder` and a picture in `photo.png`."""

import doctest
import pkgutil
from importlib import import_module

import pytest
from PIL import Image

from hf_vit import HfViTImageProcessor
from hf_vit.loading import save_folder

from ..tiny_models import tiny

PACKAGES = ("models", "analysis", "backends", "hub")


def modules_of(package: str) -> list[str]:
    parent = import_module(f"hf_vit.{package}")
    return [f"{parent.__name__}.{module.name}" for module in pkgutil.iter_modules(parent.__path__)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    model = tiny(image_size=32, patch_size=16)
    save_folder(tmp_path / "folder", model, HfViTImageProcessor.for_model(model.config, preset="vit_jax"))
    Image.new("RGB", (53, 37), (200, 30, 90)).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_run(package, folder):
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    examples = [example for name in modules_of(package) if "_backend" not in name
                for example in finder.find(import_module(name)) if example.examples]  # fmt: skip
    assert examples
    report: list[str] = []
    for example in examples:
        runner.run(example, out=report.append)
    assert not runner.failures, "".join(report)
