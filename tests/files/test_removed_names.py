"""Every row of the table of removed names is tried at each of its doors, where it gives one error."""

import importlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hf_vit
from hf_vit import conversion
from hf_vit.cli import main
from hf_vit.files.output import write_json
from hf_vit.files.removed_names import REMOVED_NAMES
from hf_vit.settings.recipes import read_recipe

from ..tiny_models import images, tiny, tiny_bit

Door = Callable[[], Any]


def function_doors(name: str) -> Iterator[Door]:
    """`hf_vit.module.name`: an attribute of a module."""
    module, _, function = name.rpartition(".")
    yield lambda: getattr(importlib.import_module(module), function)


def argument_doors(function: str, argument: str) -> Iterator[Door]:
    """`function(argument)`."""
    if function == "from_pretrained":
        for model_class in (hf_vit.HfViTModel, hf_vit.HfBiTForImageClassification):
            yield partial(model_class.from_pretrained, "model", **{argument: "x"})
        return
    if function == "forward":
        for model in (tiny(), tiny_bit()):
            yield partial(model, images(model), **{argument: "x"})
        return
    module = hf_vit if function in hf_vit.__all__ else conversion
    yield partial(getattr(module, function), "model", **{argument: "x"})


def option_doors(option: str) -> Iterator[Door]:
    """`--option`: every command without an option of this name, also before it asks for missing arguments."""
    for command in ("convert", "inspect", "push", "finetune"):
        yield partial(main, [command, option, "x"])
        yield partial(main, [command, "model", "output", f"{option}=x"])


def command_doors(name: str, folder: Path) -> Iterator[Door]:
    yield partial(main, [name])
    yield partial(main, [name, "model", "--help"])


def field_doors(name: str, folder: Path) -> Iterator[Door]:
    """A configuration field: an argument of `convert` and `load`, and in a config.json or a recipe's `config`."""
    write_json(folder / "config.json", {"model_type": "hf_vit", name: "x"})
    yield partial(hf_vit.load, folder)
    yield from argument_doors("convert", name)
    yield from argument_doors("load", name)
    given = {"dataset": "digits", "output_dir": folder / "out", "steps": 1}
    yield partial(hf_vit.pretrain, **given, config={name: "x"})
    yield partial(main, ["convert", "model", str(folder / "out"), "--set", f"{name}=x"])
    options = [text for option, value in given.items() for text in (f"--{option}", str(value))]
    yield partial(main, ["pretrain", *options, "--config", f"{{{name}: x}}"])


def format_doors(name: str, folder: Path) -> Iterator[Door]:
    yield lambda: conversion.export(None, "output", name)  # pyright: ignore[reportArgumentType]
    yield lambda: main(["export", "model", "output", "--to", name])


def setting_doors(name: str, folder: Path) -> Iterator[Door]:
    """A keyword argument, a key of a recipe, and an option."""
    recipe = folder / "old.yaml"
    recipe.write_text(f"{name}: x\nsteps: 1\n")
    option = f"--{name.replace('_', '-')}"
    given = {"dataset": "digits", "output_dir": folder / "out"}
    for train in (partial(hf_vit.finetune, "model", **given), partial(hf_vit.pretrain, **given)):
        yield partial(train, **{name: "x"})
        yield partial(train, recipe=recipe)
    for command in ("finetune", "pretrain"):
        yield partial(main, [command, "--recipe", str(recipe)])
        yield partial(main, [command, option, "x"])


def module_doors(name: str, folder: Path) -> Iterator[Door]:
    yield partial(importlib.import_module, name)
    yield lambda: exec(f"from {name} import something")


def recipe_doors(name: str, folder: Path) -> Iterator[Door]:
    """A keyword argument, the base of a recipe, and an option."""
    recipe = folder / "mine.yaml"
    recipe.write_text(f"base: {name}.yaml\nsteps: 1\n")
    yield partial(hf_vit.finetune, "model", "digits", folder / "out", recipe=name)
    yield partial(hf_vit.pretrain, "digits", folder / "out", recipe=f"{name}.yaml")
    yield partial(hf_vit.pretrain, "digits", folder / "out", recipe=recipe)
    yield partial(main, ["finetune", "--recipe", f"training/recipes/{name}.yaml"])
    yield partial(main, ["pretrain", "--recipe", str(recipe)])
    yield partial(main, ["recipes", "show", name])


DOORS_OF_KIND = {
    "command": command_doors,
    "configuration field": field_doors,
    "format": format_doors,
    "module": module_doors,
    "recipe": recipe_doors,
    "setting": setting_doors,
}


def doors_of(name: str, folder: Path) -> Iterator[Door]:
    if name.startswith("hf_vit."):
        return function_doors(name)
    if name.startswith("--"):
        return option_doors(name)
    if name == "load(name, image_size)":
        return (partial(hf_vit.load, "model", size) for size in (384, (384, 512)))
    if argument := re.fullmatch(r"(\w+)\((\w+)\)", name):
        return argument_doors(*argument.groups())
    kind, _, rest = name.rpartition(" ")
    return DOORS_OF_KIND[kind](rest, folder)


EXAMPLES = {"command sort": "use search", "configuration field gap": "use pooling"}  # of kinds without a row


@pytest.mark.parametrize("name", [*REMOVED_NAMES, *EXAMPLES])
def test_each_row_at_each_of_its_doors(name, tmp_path, capsys, monkeypatch):
    if name in EXAMPLES:
        monkeypatch.setitem(REMOVED_NAMES, name, EXAMPLES[name])
    for door in doors_of(name, tmp_path):
        try:
            status = door()
        except (ImportError, ValueError) as error:
            message = str(error)
        else:
            assert status == 2
            message = capsys.readouterr().err
        assert f"{name} was removed: {REMOVED_NAMES[name]}" in message
        assert len(message.splitlines()) == 1


def test_a_recipe_of_an_earlier_run_may_have_the_default_of_a_removed_setting(tmp_path):
    """Every run writes all of its settings."""
    (tmp_path / "recipe.yaml").write_text("decode_on: cpu\nsteps: 3\n")
    assert read_recipe(tmp_path / "recipe.yaml") == {"steps": 3}


@pytest.mark.parametrize("name", [name for name in REMOVED_NAMES if name.startswith("recipe ")])
def test_the_selection_that_replaces_a_recipe_exists(name):
    recipe, selection = re.match(r"use (\w+)(?: --select ([^,]+))?", REMOVED_NAMES[name]).groups(default="")
    assert read_recipe(recipe, dict(item.split("=") for item in selection.split()))
