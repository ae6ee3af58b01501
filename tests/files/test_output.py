"""Files and folders appear whole or not at all: after an error, after Ctrl+C at any moment, for every reader."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_vit.files.output import new_file, new_folder, new_model_files, write_json, write_text


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def write_either(kind: str, path: Path, text: str, overwrite: bool = True) -> None:
    if kind == "file":
        with new_file(path, overwrite, flush=True) as file:
            assert file.name == path.name
            file.write_text(text)
    else:
        with new_folder(path, overwrite, flush=True) as folder:
            assert folder.name == path.name
            (folder / "inside").mkdir()
            (folder / "inside" / "text").write_text(text)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_it_appears_and_is_replaced_on_demand_alone(kind, tmp_path):
    write_either(kind, tmp_path / "new" / "it", "old", overwrite=False)
    name = {"file": "new/it", "folder": "new/it/inside/text"}[kind]
    assert contents(tmp_path) == {name: "old"}
    with pytest.raises(FileExistsError, match="give --overwrite"):
        write_either(kind, tmp_path / "new" / "it", "new", overwrite=False)
    assert contents(tmp_path) == {name: "old"}
    write_either(kind, tmp_path / "new" / "it", "new")
    assert contents(tmp_path) == {name: "new"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["it"]


@pytest.mark.parametrize("error", [ValueError("no"), OSError("no"), KeyboardInterrupt(), SystemExit()])
@pytest.mark.parametrize("new", [new_file, new_folder])
@pytest.mark.parametrize("exists", [True, False])
def test_after_an_error_or_an_interrupt_all_is_as_it_was(new, error, exists, tmp_path):
    if exists:
        (tmp_path / "it").write_text("old")

    def fail():
        with new(tmp_path / "it", overwrite=True) as draft:
            (draft / "text" if draft.is_dir() else draft).write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert contents(tmp_path) == ({"it": "old"} if exists else {})
    assert len(list(tmp_path.iterdir())) == exists


@pytest.mark.parametrize("rename", [1, 2])
@pytest.mark.parametrize("after", [False, True])
def test_an_interrupt_between_the_two_renames_leaves_the_old_folder_or_the_new(rename, after, tmp_path, monkeypatch):
    """Ctrl+C just before or just after the first or the second rename."""
    write_either("folder", tmp_path / "it", "old")
    true_rename, count = Path.rename, 0

    def interrupted(path, target):
        nonlocal count
        count += 1
        if count == rename and not after:
            raise KeyboardInterrupt
        true_rename(path, target)
        if count == rename:
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_either("folder", tmp_path / "it", "new")
    assert contents(tmp_path) == {"it/inside/text": "new" if (rename, after) == (2, True) else "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    with pytest.raises(OSError, match=r"full cannot be written: Is a directory"):
        write_text(tmp_path / "full", "text")
    with pytest.raises(OSError, match="file"):
        write_text(tmp_path / "file" / "below", "text")
    assert contents(tmp_path) == {"file": "mine"}


def test_files_are_as_readable_as_the_umask_allows(tmp_path):
    """safetensors makes files that only their owner may read."""
    old = os.umask(0o027)
    try:
        with new_folder(tmp_path / "folder") as folder:
            (folder / "inside").mkdir()
            save_file({"x": torch.zeros(2)}, folder / "inside" / "x.safetensors")
        with new_file(tmp_path / "y.safetensors") as file:
            save_file({"y": torch.zeros(2)}, file)
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"folder": 0o750, "inside": 0o750, "x.safetensors": 0o640, "y.safetensors": 0o640}


def test_text_is_utf_8_with_its_own_line_ends(tmp_path):
    write_text(tmp_path / "text", "größer\r\n")
    assert (tmp_path / "text").read_bytes() == "größer\r\n".encode()
    write_json(tmp_path / "it.json", {"b": [1], "a": None}, sort_keys=True)
    assert (tmp_path / "it.json").read_text() == '{\n  "a": null,\n  "b": [\n    1\n  ]\n}\n'


MODEL_FILES = ("config.json", "model-00001.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("moves", [0, 1, 2, 3])
def test_model_files_join_a_folder_that_holds_more_and_a_kill_leaves_the_old_model_the_new_or_none(
    tmp_path, monkeypatch, moves
):
    folder, done, replace = tmp_path / "run", [], os.replace
    (folder / "checkpoints").mkdir(parents=True)
    for name in MODEL_FILES:
        (folder / name).write_text("old")

    def replace_until_killed(old, new):
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(replace(old, new))

    monkeypatch.setattr(os, "replace", replace_until_killed)
    with suppress(KeyboardInterrupt), new_model_files(folder) as draft:
        for name in MODEL_FILES:
            (draft / name).write_text("new")
        assert {(folder / name).read_text() for name in MODEL_FILES} == {"old"}
    held = {(folder / name).read_text() for name in MODEL_FILES if (folder / name).exists()}
    assert (folder / "config.json").exists() == (moves == 3)
    assert held == {"new"} or moves < 3
    assert (folder / "checkpoints").is_dir()
    assert list(tmp_path.iterdir()) == [folder]


def test_model_files_that_cannot_be_written_leave_the_folder_as_it_was(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.safetensors").write_text("new")
    with pytest.raises(OSError, match="run cannot be written: No space left"), new_model_files(folder):
        raise OSError(28, "No space left on device")
    assert (folder / "model.safetensors").read_text() == "new"
    assert list(tmp_path.iterdir()) == [folder]
