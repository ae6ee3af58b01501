"""Every removed name gives one error with its row of the table."""

import importlib

import pytest

from hf_vit.cli import main
from hf_vit.conversion import convert
from hf_vit.files.removed_names import REMOVED_NAMES


@pytest.mark.parametrize("name", [name for name in REMOVED_NAMES if name.startswith("hf_vit.")])
def test_functions(name):
    module, _, function = name.rpartition(".")
    with pytest.raises(ImportError, match="was removed") as found:
        getattr(importlib.import_module(module), function)
    assert REMOVED_NAMES[name] in str(found.value)


@pytest.mark.parametrize("argument", ["images", "weights"])
def test_arguments_of_convert(argument):
    with pytest.raises(ValueError, match=argument) as found:
        convert("model.npz", **{argument: "x"})
    assert REMOVED_NAMES[f"convert({argument})"] in str(found.value)


@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("--images", "convert model.npz out --images pets"),
        ("--images", "push folder name --images=pets"),
        ("--flow", "inspect folder --output out --flow"),
        ("--flow", "inspect folder --flow"),  # without an argument that is required
    ],
)
def test_options(option, command, capsys):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(command.split()))
    assert ended.value.code == 2
    assert REMOVED_NAMES[option] in capsys.readouterr().err
