"""What test_sharding.py starts on two processes: FSDP2 by hand, since Accelerate's needs a GPU."""

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

SIZES = {"hidden_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 22}


def build(momentum_dtype: str):
    torch.manual_seed(0)
    model = HfViTForImageClassification(HfViTConfig(**SIZES, image_size=[20, 36], patch_size=4, num_labels=11))
    torch.nn.init.normal_(model.classifier.weight)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.vit.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    settings = FinetuneSettings(momentum_dtype=momentum_dtype)
    return model, build_optimizer(settings, model)


def step(model, optimizer, seed: int):
    images = torch.randn(4, 3, 20, 36, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))
    model(images).logits.logsumexp(dim=1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(folder: Path, momentum_dtype: str):
    dist.init_process_group("gloo")
    model, optimizer = build(momentum_dtype)
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

    fresh, fresh_optimizer = build(momentum_dtype)
    saved, _ = checkpoints.read(folder / "step_00000002")
    checkpoints.restore_model(fresh, saved["model"])
    checkpoints.restore_optimizer(fresh, fresh_optimizer, saved["optimizer"])
    step(fresh, fresh_optimizer, 3)
    for name, tensor in checkpoints.model_tensors(model).items():
        assert torch.equal(tensor, checkpoints.model_tensors(fresh)[name]), name
    print("the same weights", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads can outlive the group, and then end the interpreter's own ending with SIGABRT


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
