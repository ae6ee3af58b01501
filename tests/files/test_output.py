"""Files and folders appear complete or not at all: after an error, after Ctrl+C at any moment, for every reader."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_vit.files.manifest import MANIFEST, write_manifest
from hf_vit.files.output import (
    MARK,
    add_to_marker,
    new_file,
    new_folder,
    new_model_files,
    own_file,
    refuse_inputs,
    restore_interrupted,
    write_json,
    write_text,
)
from hf_vit.files.readme import write_readme

from ..processes import Forked, start

TEXT = "best/config.json"  # a file of a folder of ours, in a folder of its own


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARK
    }


def save(folder: Path, *names: str) -> Path:
    """Make a folder with these files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"model_type": "hf_vit"}' if name.endswith("config.json") else name)
    return folder


def write_either(kind: str, path: Path, text: str, overwrite: bool = True, error: BaseException | None = None) -> None:
    """Write a file, or a folder with two files; where there is an error, raise it before the end."""
    with new_file(path, overwrite, flush=True) if kind == "file" else new_folder(path, overwrite) as draft:
        assert draft.name == path.name
        if kind == "folder":
            save(draft, "recipe.yaml", TEXT)
        (draft / TEXT if kind == "folder" else draft).write_text(text)
        if error is not None:
            raise error


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_new_output_appears_and_replaces_only_on_demand(kind, tmp_path):
    write_either(kind, tmp_path / "new" / "it", "old", overwrite=False)
    text = "new/it" if kind == "file" else f"new/it/{TEXT}"
    with pytest.raises(FileExistsError, match="--overwrite"):
        write_either(kind, tmp_path / "new" / "it", "new", overwrite=False)
    assert contents(tmp_path)[text] == "old"
    write_either(kind, tmp_path / "new" / "it", "new")
    assert contents(tmp_path)[text] == "new"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["it"]


@pytest.mark.parametrize("error", [ValueError("no"), OSError("no"), KeyboardInterrupt(), SystemExit()])
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("exists", [True, False])
def test_an_error_or_interrupt_leaves_everything_unchanged(kind, error, exists, tmp_path):
    if exists:
        write_either(kind, tmp_path / "it", "old")
    before = contents(tmp_path)
    with pytest.raises(type(error)):
        write_either(kind, tmp_path / "it", "half", error=error)
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == exists


KILLED = """
import os, signal, sys
from hf_vit.files.output import new_folder
renames, replace = [], os.replace
def replace_and_die(old, new):
    replace(old, new)
    renames.append(new)
    if len(renames) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace_and_die
with new_folder(sys.argv[1], overwrite=True) as folder:
    (folder / "recipe.yaml").write_text("new")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
@pytest.mark.parametrize("next_command", ["loads", "writes", "refuses"])
@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_between_the_renames_leaves_the_old_or_the_new_folder(renames, next_command, tmp_path):
    path = tmp_path / "it"
    write_either("folder", path, "old")
    killed = subprocess.run([sys.executable, "-c", KILLED, path, str(renames)])
    assert killed.returncode == -signal.SIGKILL
    assert path.exists() == (renames == 2)
    expected = {"recipe.yaml": "new"} if renames == 2 else {"recipe.yaml": "recipe.yaml", TEXT: "old"}
    if next_command == "loads":
        restore_interrupted(path)
        assert contents(path) == expected
    elif next_command == "refuses":
        with pytest.raises(FileExistsError, match="--overwrite"):
            write_either("folder", path, "newer", overwrite=False)
        assert contents(path) == expected
    write_either("folder", path, "newer")
    assert contents(path)[TEXT] == "newer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_moved_aside_by_somebody_else_is_neither_taken_nor_deleted(tmp_path):
    save(tmp_path / ".it.old", "thesis.tex")
    restore_interrupted(tmp_path / "it")
    assert not (tmp_path / "it").exists()
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        write_either("folder", tmp_path / "it", "new")
    assert contents(tmp_path) == {".it.old/thesis.tex": "thesis.tex"}


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
    assert modes.pop(MARK) == 0o640
    assert modes == {"folder": 0o750, "inside": 0o750, "x.safetensors": 0o640, "y.safetensors": 0o640}


def test_text_is_utf_8_with_its_own_line_ends(tmp_path):
    write_text(tmp_path / "text", "größer\r\n")
    assert (tmp_path / "text").read_bytes() == "größer\r\n".encode()
    write_json(tmp_path / "it.json", {"b": [1], "a": None}, sort_keys=True)
    assert (tmp_path / "it.json").read_text() == '{\n  "a": null,\n  "b": [\n    1\n  ]\n}\n'


MODEL_FILES = ("config.json", "model-00001.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("moves", [0, 1, 2, 3, 4])
def test_new_model_files_keep_other_files_and_are_never_mixed_with_old_ones(tmp_path, monkeypatch, moves):
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
    assert (folder / "config.json").exists() == (moves >= 3)
    assert (folder / MANIFEST).exists() == (moves == 4)
    assert held == {"new"} or moves < 3
    assert (folder / "checkpoints").is_dir()
    assert list(tmp_path.iterdir()) == [folder]


MODEL = ("config.json", "model.safetensors", "preprocessor_config.json", "conversion.json")


def save_ours(folder: Path, *names: str, marker: str = MARK) -> Path:
    """Make a folder that counts as written by this package."""
    folder.mkdir(exist_ok=True)
    save(folder, *names)
    write_manifest(folder) if marker == MANIFEST else add_to_marker(folder, *names)
    return folder


OURS = {
    "model": (MODEL, MANIFEST),
    "model and card": ((*MODEL, "sub/page.html"), MANIFEST),
    "report": (("report.html", "01-cat.rollout.png"), MARK),
    "nothing": ((), MARK),
}


@pytest.mark.parametrize("kind", OURS)
def test_a_folder_of_hf_vit_is_replaced(kind, tmp_path):
    names, marker = OURS[kind]
    folder = save_ours(tmp_path / "it", *names, marker=marker)
    if kind == "model and card":
        write_readme(folder, "hf_vit", "HfViTModel")
    write_either("folder", folder, "new")
    assert contents(folder) == {"recipe.yaml": "recipe.yaml", TEXT: "new"}


@pytest.mark.parametrize("kind", OURS)
@pytest.mark.parametrize("foreign", ["thesis.tex", "best/thesis.tex", "recipe.yaml", "layers.py", "README.md"])
def test_a_folder_with_a_foreign_file_is_refused_and_unchanged(kind, foreign, tmp_path):
    names, marker = OURS[kind]
    folder = save(save_ours(tmp_path / "it", *names, marker=marker), foreign)
    before = contents(folder)
    with pytest.raises(FileExistsError, match=foreign):
        write_either("folder", folder, "new")
    assert contents(tmp_path / "it") == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_folder_with_millions_of_foreign_files_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("os.walk", lambda folder: ((folder, [], [f"{number}.tex"]) for number in count()))
    with pytest.raises(FileExistsError, match=r"0\.tex"):
        write_either("folder", tmp_path, "new")


def test_our_files_are_listed_as_they_are_written_and_the_users_own_are_not(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    add_to_marker(folder, "checkpoints/step_*/state.json")
    write_text(folder / "audit" / "audit.html", "")
    with own_file(folder / "[0-9].png") as file:
        file.touch()
    write_readme(folder, "hf_vit", "HfViTModel")
    save(folder, "checkpoints/step_00000001/state.json")
    for name in ("mine.csv", "checkpoints/step_00000001/diary", "1.png"):
        with new_file(folder / name) as file:
            file.touch()
        with pytest.raises(FileExistsError, match=name):
            write_either("folder", folder, "new")
        (folder / name).unlink()
    write_either("folder", folder, "new")


def test_a_marker_of_an_earlier_version_is_read_and_continued(tmp_path):
    """Until November 2026 it was JSON, like a manifest."""
    folder = save(tmp_path / "it", "recipe.yaml", "report.html")
    entry = {"size": 11, "sha256": "0" * 64}
    files = {"recipe.yaml": entry, "report.html": entry}
    (folder / MARK).write_text(json.dumps({"format": "hf_vit manifest, version 1", "files": files}, indent=2))
    write_text(folder / "metrics.json", "{}")
    write_either("folder", folder, "new")


@pytest.fixture
def things(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "things", "folder/1.png", "file.npz")
    (tmp_path / "link").symlink_to("things/folder")
    about = {"base_model_name_or_path": str(tmp_path / "things" / "folder")}
    write_json(tmp_path / "adapter" / "adapter_config.json", about)


@pytest.mark.parametrize(
    ("output", "read"),
    [
        ("things/folder", "things/folder"),
        ("things", "things/folder"),
        (".", "things/folder"),
        ("link", "things/folder"),
        ("things/folder", "link"),
        ("things/folder/1.png", "things/folder"),
        ("link/1.png", "things"),
        ("things/file.npz", "things/file.npz"),
        ("things/folder/../file.npz", "things/file.npz"),
        ("things/file.npz", "things/*.npz"),
        ("things/folder/1.png", "things/**/*.png"),
        ("things/folder", "adapter"),
    ],
)
def test_what_a_command_reads_is_not_its_output(output, read, things):
    with pytest.raises(ValueError, match="which is read"):
        refuse_inputs(output, None, "owner/name", Path(read))


@pytest.mark.parametrize(
    ("output", "read"),
    [
        ("things/folder/new", "things/folder"),
        ("things/folder/new.csv", "link"),
        ("things/folder", "things/file.npz"),
        ("new", "things/*.csv"),
        ("new", "https://example.org/[x].npz"),
    ],
)
def test_a_new_output_in_an_input_is_allowed(output, read, things):
    refuse_inputs(output, None, "owner/name", Path(read) if "://" not in read else read)


@pytest.mark.parametrize(
    "names", [("config.json",), ("recipe.yaml",), ("report.html", "layers.py"), ("model.onnx", "recipe.yaml")]
)
@pytest.mark.parametrize("marker", [None, "", "{}", '{"format": "hf_vit manifest, version 1", "files": {}}'])
def test_foreign_files_with_our_names_are_kept(names, marker, tmp_path):
    folder = save(tmp_path / "it", *names)
    if marker is not None:
        (folder / MARK).write_text(marker)
    with pytest.raises(FileExistsError, match=names[0]):
        write_either("folder", folder, "new")
    assert contents(folder).keys() == set(names)


def test_links_and_files_are_not_replaced_by_folders(tmp_path):
    save_ours(tmp_path / "real", *MODEL)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "file", "dangling"):
        with pytest.raises(FileExistsError, match=name):
            write_either("folder", tmp_path / name, "new")
    (tmp_path / "real" / "best").symlink_to(save(tmp_path / "elsewhere", "config.json"))
    with pytest.raises(FileExistsError, match="best"):
        write_either("folder", tmp_path / "real", "new")
    assert contents(tmp_path / "elsewhere").keys() == {"config.json"}


def test_files_added_during_a_replacement_are_kept(tmp_path):
    folder = save_ours(tmp_path / "it", *MODEL)
    with pytest.raises(FileExistsError, match=r"thesis\.tex"), new_folder(folder, overwrite=True):
        (folder / "thesis.tex").write_text("all of it")
    assert contents(folder)["thesis.tex"] == "all of it"


WRITER = """
import time
from hf_vit.files.output import new_folder
with new_folder({path!r}, overwrite=True) as folder:
    (folder / "recipe.yaml").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def start_writer(path: Path) -> tuple[Forked, Path]:
    """Start a process that writes a folder; return it and its temporary folder."""
    [writer] = start(WRITER.format(path=str(path)))
    printed = writer.folder / "output"
    while not (printed.exists() and "\n" in printed.read_text()):
        assert writer.is_running()
        time.sleep(0.01)
    return writer, Path(printed.read_text().strip()).parent


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_leftovers_of_killed_processes_are_deleted_and_those_of_living_ones_kept(kind, tmp_path):
    (killed, left), (living, kept) = (start_writer(tmp_path / "it") for _ in range(2))
    other = tmp_path / ".01234567.incomplete.another"
    other.mkdir()
    killed.kill()
    try:
        assert left.is_dir()
        write_either(kind, tmp_path / "it", "new")
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "it", kept, other])
        assert (kept / "it" / "recipe.yaml").exists()
    finally:
        living.kill()
    if kind == "folder":
        write_either(kind, tmp_path / "it", "newer")
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "it", other])
