"""Checkpoints: whole or absent, and checked."""

import json

import pytest
import torch

from hf_vit.files import output
from hf_vit.training import checkpoints
from hf_vit.training.checkpoints import Checkpoints, damage, optimizer_tensors, read, restore_model, restore_optimizer


def tensors(step: int) -> dict:
    return {"model": {"weight": torch.full((3, 5), float(step))}}


def test_the_newest_are_kept(tmp_path):
    store = Checkpoints(tmp_path / "c", keep=2)
    for step in (3, 20, 100):
        store.write(step, tensors(step), {"step": step})
    assert [path.name for path in store.paths()] == ["step_00000020", "step_00000100"]
    newest, complaints = store.newest()
    groups, state = read(newest)
    assert (state["step"], complaints) == (100, [])
    assert torch.equal(groups["model"]["weight"], torch.full((3, 5), 100.0))


@pytest.mark.parametrize("harm", ["cut", "flip", "delete", "no sums", "bad sums"])
def test_damage_is_noticed_and_the_one_before_is_used(tmp_path, harm):
    store = Checkpoints(tmp_path, keep=3)
    first, second = (store.write(step, tensors(step), {"step": step}) for step in (1, 2))
    file = second / "model.safetensors"
    content = file.read_bytes()
    if harm == "cut":
        file.write_bytes(content[:-1])
    elif harm == "flip":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "delete":
        (second / "state.json").unlink()
    elif harm == "no sums":
        (second / "checksums.json").unlink()
    else:
        (second / "checksums.json").write_text("{")
    newest, complaints = store.newest()
    assert newest == first
    assert len(complaints) == 1
    assert str(second) in complaints[0]
    assert damage(first) is None


def test_an_unfinished_checkpoint_is_not_one(tmp_path):
    store = Checkpoints(tmp_path, keep=3)
    store.write(1, tensors(1), {})
    (tmp_path / ".0123.incomplete.step_00000002").mkdir()
    assert [path.name for path in store.paths()] == ["step_00000001"]
    store.write(2, tensors(2), {})
    assert not (tmp_path / ".0123.incomplete.step_00000002").exists()


def test_a_full_disk_is_said_and_leaves_the_last_one(tmp_path, monkeypatch):
    store = Checkpoints(tmp_path, keep=1)
    first = store.write(1, tensors(1), {})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output, "_flush", full)
    with pytest.raises(OSError, match=r"step_00000002 cannot be written: No space left on device"):
        store.write(2, tensors(2), {})
    assert store.newest() == (first, [])
    assert list(tmp_path.iterdir()) == [first]


def make(optimizer_class):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    return model, optimizer_class(model.parameters())


@pytest.mark.parametrize("kind", ["sgd", "compact_sgd", "adamw", "compact_adamw"])
def test_model_and_optimizer_continue_exactly(kind, tmp_path):
    from hf_vit.training.optimization import CompactAdamW, CompactSGD

    classes = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9, fused=True),
        "compact_sgd": lambda parameters: CompactSGD(parameters, 0.1, 0.9),
        "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1, fused=True),
        "compact_adamw": lambda parameters: CompactAdamW(parameters, 0.1, weight_decay=0.1),
    }
    images = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))

    def steps(model, optimizer, count):
        for _ in range(count):
            model(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make(classes[kind])
    steps(model, optimizer, 3)
    groups = {"model": checkpoints.model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    path = Checkpoints(tmp_path, 1).write(3, groups, {})
    steps(model, optimizer, 2)

    fresh, fresh_optimizer = make(classes[kind])
    saved, _ = read(path)
    restore_model(fresh, saved["model"])
    restore_optimizer(fresh, fresh_optimizer, saved["optimizer"])
    steps(fresh, fresh_optimizer, 2)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    assert json.loads((path / "checksums.json").read_text()).keys() == {
        "model.safetensors", "optimizer.safetensors", "state.json"
    }  # fmt: skip


def test_a_checkpoint_of_another_model_is_refused():
    model, _ = make(torch.optim.SGD)
    with pytest.raises(ValueError, match=r"other tensors than the model: \['head.weight'\]"):
        restore_model(model, {**checkpoints.model_tensors(model), "head.weight": torch.zeros(1)})
