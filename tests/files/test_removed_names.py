"""Every row of the table of removed names is tried at each of its doors, where it gives one error."""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hf_vit import conversion
from hf_vit.cli import main
from hf_vit.files.removed_names import REMOVED_NAMES

Door = Callable[[], Any]


def function_doors(name: str) -> Iterator[Door]:
    """`hf_vit.module.name`: an attribute of a module."""
    module, _, function = name.rpartition(".")
    yield lambda: getattr(importlib.import_module(module), function)


def argument_doors(function: str, argument: str) -> Iterator[Door]:
    """`function(argument)`."""
    yield lambda: getattr(conversion, function)("model", **{argument: "x"})


def option_doors(option: str) -> Iterator[Door]:
    """`--option`: every command without an option of this name, also before it asks for missing arguments."""
    for command in ("convert", "inspect", "push", "finetune"):
        yield lambda command=command: main([command, option, "x"])
        yield lambda command=command: main([command, "model", "output", f"{option}=x"])


def format_doors(name: str) -> Iterator[Door]:
    yield lambda: conversion.export(None, "output", name)  # pyright: ignore[reportArgumentType]
    yield lambda: main(["export", "model", "output", "--to", name])


DOORS_OF_KIND = {"format": format_doors}


def doors_of(name: str) -> Iterator[Door]:
    if name.startswith("hf_vit."):
        return function_doors(name)
    if name.startswith("--"):
        return option_doors(name)
    if argument := re.fullmatch(r"(\w+)\((\w+)\)", name):
        return argument_doors(*argument.groups())
    kind, _, rest = name.rpartition(" ")
    return DOORS_OF_KIND[kind](rest)


@pytest.mark.parametrize("name", REMOVED_NAMES)
def test_each_row_at_each_of_its_doors(name, capsys):
    for door in doors_of(name):
        try:
            status = door()
        except (ImportError, ValueError) as error:
            message = str(error)
        else:
            assert status == 2
            message = capsys.readouterr().err
        assert f"{name} was removed: {REMOVED_NAMES[name]}" in message
        assert len(message.splitlines()) == 1
