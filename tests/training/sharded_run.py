"""What test_sharding.py starts on two processes: FSDP2 by hand, since Accelerate's needs a GPU.

Each optimiser continues exactly from a checkpoint, and takes the steps that it takes on one device.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification
from hf_vit.training import checkpoints
from hf_vit.training.checkpoints import Checkpoints
from hf_vit.training.optimization import MovingAverage, build_optimizer
from hf_vit.training.settings import FinetuneSettings
from tests.models import TINY

OPTIMIZERS = [("sgd", "float32"), ("sgd", "bfloat16"), ("adamw", "float32"), ("adamw", "bfloat16")]


def build(settings: FinetuneSettings, sharded: bool = True):
    torch.manual_seed(0)
    model = HfViTForImageClassification(HfViTConfig(**TINY))
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
    """Three updates with the same gradients: the same weights and moments, to the bit."""
    (whole, whole_optimizer), (model, optimizer) = build(settings, sharded=False), build(settings)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for reference, parameter in zip(whole.parameters(), model.parameters(), strict=True):
            reference.grad = torch.randn(reference.shape, generator=generator)
            parameter.grad = checkpoints.placed_like(reference.grad, parameter)
        whole_optimizer.step()
        optimizer.step()
    compare(checkpoints.model_tensors(whole), checkpoints.model_tensors(model))
    expected = checkpoints.optimizer_tensors(whole, whole_optimizer)
    compare(expected, checkpoints.optimizer_tensors(model, optimizer))
    moments = [tensor.dtype for name, tensor in expected.items() if name.endswith(("momentum_buffer", "exp_avg"))]
    assert set(moments) == {getattr(torch, settings.momentum_dtype)}


def compare(expected: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]):
    assert expected.keys() == ours.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, ours[name]), name
        assert tensor.dtype == ours[name].dtype, name


def check_continuing(folder: Path, settings: FinetuneSettings):
    """A checkpoint holds whole tensors, and a fresh model continues from it exactly."""
    model, optimizer = build(settings)
    for seed in (1, 2):
        step(model, optimizer, seed)
    average = MovingAverage(dict(model.named_parameters()), 0.9)
    groups = {
        "model": checkpoints.model_tensors(model),
        "optimizer": checkpoints.optimizer_tensors(model, optimizer),
        "average": {name: checkpoints.whole(tensor) for name, tensor in average.parameters.items()},
    }
    assert groups["model"]["classifier.weight"].shape == (11, 14)  # whole, not half
    if dist.get_rank() == 0:
        Checkpoints(folder, 1).write(2, groups, {})
    dist.barrier()
    step(model, optimizer, 3)
    average.update(dict(model.named_parameters()))

    fresh, fresh_optimizer = build(settings)
    saved, _ = checkpoints.read(folder / "step_00000002")
    checkpoints.restore_model(fresh, saved["model"])
    checkpoints.restore_optimizer(fresh, fresh_optimizer, saved["optimizer"])
    step(fresh, fresh_optimizer, 3)
    compare(checkpoints.model_tensors(model), checkpoints.model_tensors(fresh))


def main(folder: Path):
    dist.init_process_group("gloo")
    for optimizer, momentum_dtype in OPTIMIZERS:
        settings = FinetuneSettings(optimizer=optimizer, momentum_dtype=momentum_dtype)
        settings.weight_decay = 0.1 if optimizer == "adamw" else 0.0
        check_against_one_device(settings)
        check_continuing(folder / f"{optimizer}_{momentum_dtype}", settings)
    print("the same weights", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads can outlive the group, and then end the interpreter's own ending with SIGABRT


if __name__ == "__main__":
    main(Path(sys.argv[1]))
