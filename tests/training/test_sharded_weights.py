"""FSDP2 on two processes without Accelerate, whose FSDP2 needs a GPU: optimizers and checkpoints.

Each optimizer takes the steps that it takes on one device, which test_optimization.py holds to optax, and continues
exactly from a checkpoint, on two processes or on one that reads what both wrote.
"""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training import checkpoint
from hf_vit.training.checkpoint import Checkpoints
from hf_vit.training.optimization import MovingAverage, build_optimizer

from ..processes import finish, start
from ..tiny_models import TINY

OPTIMIZERS = [("sgd", "float32"), ("sgd", "bfloat16"), ("adamw", "float32"), ("adamw", "bfloat16"), ("muon", "float32")]


def build(settings: FinetuneSettings, sharded: bool = True):
    torch.manual_seed(0)
    model = HfViTForImageClassification(HfViTConfig(**{**TINY, "num_hidden_layers": 1}))
    torch.nn.init.normal_(model.classifier.weight)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.vit.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, build_optimizer(settings, model)


def step(model, optimizer, seed: int):
    images = torch.randn(4, 3, 20, 36, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    model(images).logits.logsumexp(dim=1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def check_against_one_device(settings: FinetuneSettings):
    """Three updates with the same gradients: the same weights and moments, to the bit.

    Muon iterates in bfloat16, and in sums of another order: there a weight may differ by a part of the step.
    """
    (whole, whole_optimizer), (model, optimizer) = build(settings, sharded=False), build(settings)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for reference, parameter in zip(whole.parameters(), model.parameters(), strict=True):
            reference.grad = torch.randn(reference.shape, generator=generator)
            parameter.grad = distribute_tensor(reference.grad, parameter.device_mesh, parameter.placements)
        whole_optimizer.step()
        optimizer.step()
    expected = gathered(whole, whole_optimizer)
    slack = 0.1 * 3 * settings.learning_rate if settings.optimizer == "muon" else 0.0
    compare(expected, gathered(model, optimizer), slack)
    moments = [tensor.dtype for name, tensor in expected.items() if name.endswith(("momentum_buffer", "exp_avg"))]
    assert set(moments) == {getattr(torch, settings.momentum_dtype)}


def gathered(model, optimizer, average=None) -> dict[str, torch.Tensor]:
    """Return all tensors, gathered and copied."""
    tensors = checkpoint.run_tensors(model, optimizer, average)
    wholes = {name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in wholes.items()}


def compare(expected: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], slack: float = 0.0):
    assert expected.keys() == ours.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=slack, msg=name)


def check_continuing(folder: Path, settings: FinetuneSettings):
    """Each process writes its part while training goes on, and a fresh model continues from it exactly."""
    model, optimizer = build(settings)
    for seed in (1, 2):
        step(model, optimizer, seed)
    average = MovingAverage(dict(model.named_parameters()), 0.9)
    at_saving = gathered(model, optimizer, average.parameters)
    store = Checkpoints(folder, 1)
    store.save(2, checkpoint.run_tensors(model, optimizer, average.parameters), {})
    step(model, optimizer, 3)
    average.update(dict(model.named_parameters()))
    store.wait()
    sizes = [file.stat().st_size for file in store.paths()[0].glob("*.safetensors")]
    assert len(sizes) == 2, sizes
    assert max(sizes) < 1.3 * min(sizes), sizes  # each wrote half of it
    if dist.get_rank() == 0:
        save_file(at_saving, folder / "at_saving.safetensors")

    fresh, fresh_optimizer = build(settings)
    fresh_average = MovingAverage(dict(fresh.named_parameters()), 0.9)
    checkpoint.restore(store.paths()[0], fresh, fresh_optimizer, fresh_average.parameters)
    step(fresh, fresh_optimizer, 3)
    fresh_average.update(dict(fresh.named_parameters()))
    expected = gathered(model, optimizer, average.parameters)
    compare(expected, gathered(fresh, fresh_optimizer, fresh_average.parameters))


def check_full_disk(folder: Path):
    """If one process cannot write, all report the same error, and the previous checkpoint stays."""
    store, tensors = Checkpoints(folder, 1), {"model/weight": torch.ones(3)}
    store.save(1, tensors, {})
    store.wait()
    if dist.get_rank() == 1:
        checkpoint.sha256_of = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    store.save(2, {"model/first": torch.ones(3), "model/second": torch.ones(3)}, {})
    with pytest.raises(OSError, match=r"No space left on device$"):
        store.wait()
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]


def main(folder: Path):
    """Check everything, in one of the two processes."""
    dist.init_process_group("gloo")
    for optimizer, momentum_dtype in OPTIMIZERS:
        settings = FinetuneSettings(optimizer=optimizer, momentum_dtype=momentum_dtype)
        settings.weight_decay = 0.1 if optimizer != "sgd" else 0.0
        check_against_one_device(settings)
        check_continuing(folder / f"{optimizer}_{momentum_dtype}", settings)
    check_full_disk(folder / "full")
    print("the same weights", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def test_sharded_optimizers_step_as_on_one_device_and_continue_exactly(tmp_path):
    done = finish(start(f"from pathlib import Path\nfrom {__name__} import main\nmain(Path({str(tmp_path)!r}))", 2))
    assert done.stdout.count("the same weights") == 2
    for optimizer, momentum_dtype in OPTIMIZERS:
        settings = FinetuneSettings(optimizer=optimizer, momentum_dtype=momentum_dtype)
        model, alone = build(settings, sharded=False)
        average = MovingAverage(dict(model.named_parameters()), 0.9)
        folder = tmp_path / f"{optimizer}_{momentum_dtype}"
        checkpoint.restore(folder / "step_00000002", model, alone, average.parameters)
        compare(load_file(folder / "at_saving.safetensors"), gathered(model, alone, average.parameters))
