"""Checkpoints: complete or absent, with checksums, and with the state at the start of saving."""

import copy
import errno
import json
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem

from hf_vit.files.output import add_to_marker, write_text
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training import checkpoint
from hf_vit.training.checkpoint import _RUN_FILES, Checkpoints, locked_output, restore, run_tensors
from hf_vit.training.optimization import Bfloat16MomentumAdamW, Bfloat16MomentumSGD


def save(store: Checkpoints, step: int, tensors: dict[str, torch.Tensor] | None = None):
    store.save(step, tensors or {"model/weight": torch.full((3, 5), float(step))}, {"step": step})
    store.wait()
    return store.paths()[-1]


def test_newest_checkpoints_are_kept_and_the_one_just_written(tmp_path):
    """Even if later steps are there, e.g. copied from another run."""
    store = Checkpoints(tmp_path / "c", keep=2)
    for step in (3, 20, 100):
        save(store, step)
    assert [path.name for path in store.paths()] == ["step_00000020", "step_00000100"]
    newest, damaged = store.newest()
    assert (checkpoint.read_state(newest)["step"], damaged) == (100, {})
    [file] = newest.glob("*.safetensors")
    assert torch.equal(load_file(file)["model/weight"], torch.full((3, 5), 100.0))
    store = Checkpoints(tmp_path, keep=1)
    for step in (50, 60, 2, 4):
        save(store, step)
    assert [path.name for path in store.paths()] == ["step_00000004", "step_00000060"]


SUMS = [b"{", b"5", b"null", b"[]", b"{}", b'{"state.json": null}', b"[" * 100_000]


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("*.safetensors", lambda content: content[:-1]),
        ("*.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("state.json", None),
        ("checksums.json", None),
        *(("checksums.json", lambda _, sums=sums: sums) for sums in SUMS),
    ],
)
def test_damaged_checkpoint_is_skipped(tmp_path, name, harm):
    """Another content, or no file."""
    store = Checkpoints(tmp_path, keep=3)
    first, second = (save(store, step) for step in (1, 2))
    [file] = second.glob(name)
    content = file.read_bytes()
    file.unlink()
    if harm:
        file.write_bytes(harm(content))
    newest, damaged = store.newest()
    assert (newest, list(damaged)) == (first, [second])
    assert checkpoint.find_damage(first) is None


def test_damaged_checkpoints_of_one_step_are_all_kept(tmp_path):
    store = Checkpoints(tmp_path, keep=1)
    moved = [checkpoint.quarantine(save(store, 1)) for _ in range(3)]
    assert len(set(moved)) == 3
    assert all((path / "state.json").is_file() and path.parent.name == "damaged" for path in moved)
    assert store.paths() == []


def test_unfinished_checkpoint_is_ignored(tmp_path):
    store = Checkpoints(tmp_path, keep=3)
    save(store, 1)
    for unfinished in (".0123.incomplete.step_00000002", ".00000002.incomplete.step_00000002"):
        (tmp_path / unfinished).mkdir()
        (tmp_path / unfinished / "shard-00009-model-00001-of-00001.safetensors").touch()
    (tmp_path / ".DS_Store").touch()  # of macOS, which shows the folder
    assert [path.name for path in store.paths()] == ["step_00000001"]
    save(store, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".DS_Store", "step_00000001", "step_00000002"]
    assert len(list(store.paths()[-1].glob("*.safetensors"))) == 1


@pytest.mark.parametrize("failing", ["flush_to_disk", "sha256_of"])
def test_full_disk_is_reported_and_keeps_the_last_checkpoint(tmp_path, monkeypatch, failing):
    """The error comes when training next waits for the checkpoint."""
    store = Checkpoints(tmp_path, keep=1)
    first = save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, failing, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        store.save(2, {"model/weight": torch.zeros(3)}, {})
        with pytest.raises(OSError, match="step_00000002"):
            store.save(3, {"model/weight": torch.zeros(3)}, {})
    assert store.newest() == (first, {})
    assert list(tmp_path.iterdir()) == [first]
    store.wait()  # it was reported once


def test_large_states_are_split_into_files(tmp_path, monkeypatch):
    """No file is much larger than the limit, because writing holds a file in memory again."""
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 100)
    model, optimizer = make(torch.optim.AdamW)
    step(model, optimizer, 1)
    saved = copy.deepcopy(run_tensors(model, optimizer))
    folder = save(Checkpoints(tmp_path, keep=1), 1, saved)
    assert len(list(folder.glob("*.safetensors"))) == 4  # 35 numbers three times and 8 counts, of 4 bytes
    step(model, optimizer, 1)
    restore(folder, model, optimizer)
    torch.testing.assert_close(run_tensors(model, optimizer), saved, rtol=0, atol=0)


def make(optimizer_class):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    model[0].weight.data = model[0].weight.data.T.contiguous().T  # as channels_last leaves kernels
    return model, optimizer_class(model.parameters())


def step(model, optimizer, count: int):
    images = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(count):
        model(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9, fused=True),
    "compact_sgd": lambda parameters: Bfloat16MomentumSGD(parameters, 0.1, 0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
    "compact_adamw": lambda parameters: Bfloat16MomentumAdamW(parameters, 0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_continues_exactly_from_the_saved_step(kind, tmp_path, monkeypatch):
    """Steps taken while the checkpoint is being written do not get into it."""
    model, optimizer = make(KINDS[kind])
    step(model, optimizer, 3)
    average = {"0.weight": torch.full((5, 3), 0.5)}
    store = Checkpoints(tmp_path, 1)
    write, stepped = HuggingFaceStorageWriter.write_data, []

    def write_late(self, plan, planner):
        while not stepped:
            pass
        return write(self, plan, planner)

    monkeypatch.setattr(HuggingFaceStorageWriter, "write_data", write_late)
    store.save(3, run_tensors(model, optimizer, average), {"step": 3})
    step(model, optimizer, 2)
    average["0.weight"].zero_()
    stepped.append(True)
    store.wait()

    fresh, fresh_optimizer = make(KINDS[kind])
    fresh_average = copy.deepcopy(average)
    restore(store.paths()[-1], fresh, fresh_optimizer, fresh_average)
    assert torch.equal(fresh_average["0.weight"], torch.full((5, 3), 0.5))
    step(fresh, fresh_optimizer, 2)
    expected, found = run_tensors(model, optimizer), run_tensors(fresh, fresh_optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_order_of_the_directory_does_not_matter(tmp_path, monkeypatch):
    """The order of the tensors decides which process saves which one; machines may list a folder differently."""
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 30)
    model, optimizer = make(torch.optim.AdamW)
    step(model, optimizer, 1)
    folder, orders = save(Checkpoints(tmp_path, 1), 1, run_tensors(model, optimizer)), []
    for reverse in (False, True):
        listed = sorted(folder.iterdir(), reverse=reverse)
        monkeypatch.setattr(FileSystem, "ls", lambda *_, files=listed: list(map(str, files)))
        fresh, fresh_optimizer = make(torch.optim.AdamW)
        restore(folder, fresh, fresh_optimizer)
        orders.append(list(run_tensors(fresh, fresh_optimizer)))
    assert orders[0] == orders[1] == list(run_tensors(model, optimizer))


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_checkpoint_without_some_of_its_tensors_is_refused(kind, tmp_path):
    model, optimizer = make(KINDS[kind])
    step(model, optimizer, 1)
    whole = run_tensors(model, optimizer)
    lost = next(name for name in whole if name.startswith("optimizer/1.weight/"))
    folder = save(Checkpoints(tmp_path, 1), 1, whole)
    [file] = folder.glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(file).items() if name != lost}, file)
    with pytest.raises(ValueError, match=lost):
        restore(folder, *make(KINDS[kind]))


def test_a_checkpoint_of_another_model_or_an_earlier_version_is_refused(tmp_path):
    model, optimizer = make(torch.optim.SGD)
    folder = save(Checkpoints(tmp_path, 1), 1, run_tensors(model, optimizer))
    other = torch.nn.Sequential(*model, torch.nn.Linear(5, 2, bias=False))
    with pytest.raises(ValueError, match=r"'model/2.weight'"):
        restore(folder, other, optimizer)
    (folder / "state.json").write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match="hf_vit"):
        restore(folder, model, optimizer)


@pytest.mark.parametrize("linked", ["out", "out/checkpoints"])
def test_an_output_folder_or_its_checkpoints_may_be_links(tmp_path, linked):
    """Overwriting empties what they point to, keeps the links, and still deletes no foreign file."""
    (tmp_path / "disk").mkdir()
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(tmp_path / "disk")
    output, accelerator = tmp_path / "out", Accelerator(cpu=True)
    settings = FinetuneSettings(overwrite=True)
    (output / "checkpoints").mkdir(exist_ok=True)
    save(Checkpoints(output / "checkpoints", keep=1), 3)
    (output / "recipe.yaml").touch()
    with pytest.raises(FileExistsError, match=r"recipe\.yaml"), locked_output(output, settings, accelerator):
        pass  # it could be the user's own
    (output / "recipe.yaml").unlink()
    with locked_output(output, FinetuneSettings(resume=True), accelerator):
        if linked == "out":  # a folder with files that no run has marked
            add_to_marker(output, *_RUN_FILES)
        write_text(output / "recipe.yaml", "")
    (output / "checkpoints" / "diary.txt").touch()
    with pytest.raises(FileExistsError, match="diary"), locked_output(output, settings, accelerator):
        pass
    (output / "checkpoints" / "diary.txt").unlink()
    with locked_output(output, FinetuneSettings(resume=True), accelerator):
        pass
    assert len(Checkpoints(output / "checkpoints", keep=1).paths()) == 1
    with locked_output(output, settings, accelerator):
        assert (tmp_path / linked).is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] in ([".lock", ".hf_vit"], [".hf_vit", ".lock"], [])


@pytest.mark.parametrize("begin", ["new", "link", "foreign"])
def test_resume_marks_only_a_new_folder(tmp_path, begin):
    """Jobs on a cluster always resume; what they began may be overwritten, and the user's own files not."""
    output, accelerator = tmp_path / "out", Accelerator(cpu=True)
    if begin != "new":
        output.mkdir()
    if begin == "link":
        (tmp_path / "disk").mkdir()
        (output / "checkpoints").symlink_to(tmp_path / "disk")
    if begin == "foreign":
        (output / "recipe.yaml").touch()
    with locked_output(output, FinetuneSettings(resume=True), accelerator):
        write_text(output / "recipe.yaml", "")
        save(Checkpoints(output / "checkpoints", keep=1), 3)
    expected = pytest.raises(FileExistsError, match=r"recipe\.yaml") if begin == "foreign" else nullcontext()
    with expected, locked_output(output, FinetuneSettings(overwrite=True), accelerator):
        assert not (output / "recipe.yaml").exists()
