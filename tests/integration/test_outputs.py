"""No command writes what it reads: every option of every command that may name a file, with every kind of output."""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_vit
from hf_vit.cli import main
from hf_vit.cli.arguments import _NO_PATHS, _OUTPUTS
from hf_vit.cli.command_line import SCRIPTS, build_parser, commands_of
from hf_vit.conversion import convert, export
from hf_vit.settings.fields import AuditSettings, EvaluateSettings, FinetuneSettings, PretrainSettings

from ..tiny_models import save_tiny, tiny

PARSERS = commands_of(build_parser())
SETTINGS = {
    "finetune": FinetuneSettings,
    "pretrain": PretrainSettings,
    "audit": AuditSettings,
    "evaluate": EvaluateSettings,
}
REQUIRED = {"finetune": ["--steps", "1"], "pretrain": ["--steps", "1", "--variant", "Ti/16"]}
# Settings that are texts and no paths; every other one has is_path. A new setting belongs to one of them.
NO_PATHS = {"dataset_config", "image_column", "label_column", "preset", "output_dir", "variant", "report_to"}
NO_PATHS |= {"tracker_project", "tracker_name"}
NO_PATHS |= {"train", "split", "train_split", "eval_split", "best_metric"}


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield each command with each of its outputs and inputs."""
    for command, parser in PARSERS.items():
        actions = {action.dest: action for action in parser._actions}
        for output in actions.keys() & {*_OUTPUTS}:
            for name, action in actions.items():
                if action.type in (str, Path) and not action.choices and name not in (*_OUTPUTS, *_NO_PATHS):
                    yield command, output, name
    for command, settings in SETTINGS.items():
        for one in dataclasses.fields(settings):
            if one.metadata["is_path"]:
                yield command, "output_dir", one.name


ROWS = sorted(rows())


def line(command: str, **given: Path) -> list[str]:
    """A command line with these arguments, and others that are required."""
    if command in SCRIPTS:
        overwrite = ["--overwrite", "true"] if command in REQUIRED else []
        words = [command, *REQUIRED.get(command, ()), *overwrite]
        if "objectnet_classes" in given:
            words += ["--protocol", "objectnet"]
        needed = {"dataset": "nothing", **({} if command == "pretrain" else {"model": "nothing"})}
        if "add" in given:  # which takes no dataset and no length
            del needed["dataset"]
            words = [command, *overwrite]
        return words + [f"--{name.replace('_', '-')}={value}" for name, value in {**needed, **given}.items()]
    words, last = [command], []
    needed = {"help", "output"} if {"dataset", "calibrate"} & given.keys() else {"help", "output", "data"}
    for action in PARSERS[command]._actions:
        value = given.get(action.dest)
        is_needed = action.required or action.dest == "help" or (not action.option_strings and action.dest in needed)
        if value is None and not is_needed:
            continue
        if isinstance(action, argparse._HelpAction):
            continue
        texts = [str(value if value is not None else next(iter(action.choices or ["jax"])))]
        if action.option_strings:
            words += [action.option_strings[-1], *texts]
        else:
            last += texts
    return words + (["--overwrite"] if command not in ("card", "shard") else []) + ["--", *last]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "things" / "folder"
    folder.mkdir(parents=True)
    (folder / "1.png").write_text("a picture")
    (tmp_path / "link").symlink_to(folder)
    return tmp_path


def contents(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "output", "name"), ROWS)
def test_an_output_is_no_input(command, output, name, place, capsys):
    """Here by a link; all kinds of places are in the tests of `refuse_inputs`."""
    before = contents(place)
    assert main(line(command, **{name: "things/folder", output: "link"})) == 2
    assert "which is read" in capsys.readouterr().err
    assert contents(place) == before


def test_every_command_with_an_output_is_here():
    found = {command for command, *_ in ROWS}
    others = {"catalog", "fingerprint", "plan", "recipes", "launch-configs", "benchmark", "push", "verify", "env"}
    assert PARSERS.keys() - found == {*others, "compile", "completion"}


@pytest.mark.parametrize("settings", SETTINGS.values())
def test_every_text_is_a_path_or_known_as_none(settings):
    texts = {one.name for one in dataclasses.fields(settings) if one.type == str | None or one.type is str}
    paths = {one.name for one in dataclasses.fields(settings) if one.metadata["is_path"]}
    assert texts - paths <= NO_PATHS


@pytest.mark.parametrize("command", ["finetune", "pretrain"])
def test_a_recipe_is_not_deleted(command, place, capsys):
    (place / "mine").mkdir()
    (place / "mine" / "recipe.yaml").write_text("steps: 3\n")
    words = [command, "--recipe", "mine/recipe.yaml", "--dataset", "x", "--output-dir", "mine", "--overwrite", "true"]
    assert main([*words, *(["--model", "x"] if command == "finetune" else ["--variant", "Ti/16"])]) == 2
    assert "which is read" in capsys.readouterr().err
    assert (place / "mine" / "recipe.yaml").exists()


@pytest.mark.parametrize("command", ["evaluate", "audit"])
@pytest.mark.parametrize("sign", ["config.json", "checkpoints/step"])
def test_results_do_not_replace_those_of_a_run(command, sign, place, capsys):
    (place / "mine" / sign).parent.mkdir(parents=True)
    (place / "mine" / sign).touch()
    assert main([command, "--model", "x", "--dataset", "y", "--output-dir", "mine"]) == 2
    assert "training run" in capsys.readouterr().err


FUNCTIONS = {
    "calibrate": lambda folder: hf_vit.calibrate(folder, "x", folder, overwrite=True),
    "calibrate, data": lambda folder: hf_vit.calibrate("x", folder, folder, overwrite=True),
    "quantize": lambda folder: hf_vit.quantize(folder, folder, [folder], overwrite=True),
    "quantize, images": lambda folder: hf_vit.quantize("x", folder, [folder], overwrite=True),
    "finetune": lambda folder: hf_vit.finetune(folder, "x", folder, steps=1, overwrite=True),
    "pretrain": lambda folder: hf_vit.pretrain(folder, folder, steps=1, variant="Ti/16", overwrite=True),
    "evaluate": lambda folder: hf_vit.evaluate(folder, "x", output_dir=folder),
    "audit": lambda folder: hf_vit.audit(folder, "x", output_dir=folder),
    "export": lambda folder: export(hf_vit.load(folder)[0], folder, "transformers", overwrite=True),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_does_not_write_what_it_reads(function, tmp_path):
    folder = save_tiny(tmp_path / "folder")
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="which is read"):
        FUNCTIONS[function](folder)
    assert contents(tmp_path) == before


def test_a_conversion_does_not_replace_its_checkpoint(tmp_path):
    export(tiny(image_size=24, patch_size=4), tmp_path / "folder" / "model.npz", "jax")
    conversion = convert(tmp_path / "folder" / "model.npz", read_weights=False)
    with pytest.raises(ValueError, match="which is read"):
        conversion.save(tmp_path / "folder", overwrite=True)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["model.npz"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_model_is_not_replaced(name, tmp_path, run_command):
    """Also of a model that is not read."""
    (tmp_path / "images").mkdir()
    hf_vit.loading.save_folder(tmp_path / "other", *hf_vit.load(save_tiny(tmp_path / "model")))
    before = contents(tmp_path)
    words = ["predict", tmp_path / "model", tmp_path / "images", "--format", "csv", "--overwrite"]
    run_command([*words, "--output", tmp_path / "other" / name], status=2)
    assert contents(tmp_path) == before
