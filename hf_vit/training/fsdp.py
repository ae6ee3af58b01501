"""Sharded weights (FSDP2, launched with `training/accelerate/fsdp.yaml` or `hsdp.yaml`)."""

import os
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


def is_sharded(accelerator: Accelerator) -> bool:
    """Tell whether the accelerator shards parameters, as DTensors."""
    return accelerator.distributed_type == DistributedType.FSDP


def shard_by_layers(accelerator: Accelerator, model: Any) -> None:
    """Configure FSDP2 to shard the model layer by layer, unless the launch names the classes to wrap.

    Accelerate's defaults are not used for two reasons. It takes all of `_no_split_modules`, fails if the model has no
    module of a class, and wraps the input embeddings twice. With bf16 it rounds the output of every layer, the loss
    and the sum of the gradients; here autocast decides, as without sharding.
    """
    if not is_sharded(accelerator):
        return
    # safe to ignore: no layer changes its input in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    plugin: Any = accelerator.state.fsdp_plugin
    if "FSDP_TRANSFORMER_CLS_TO_WRAP" not in os.environ:
        plugin.transformer_cls_names_to_wrap = _layer_classes(model)
    policy = plugin.mixed_precision_policy
    if policy is not None:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            policy.param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )


def sharded_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters by name; those of a model under FSDP2 are DTensors.

    After a forward without a backward, FSDP2 leaves the parameters of the root module whole.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def _layer_classes(model: Any) -> list[str]:
    """Names in `_no_split_modules` that occur in the model and do not hold its input embeddings."""
    modules = {type(module).__name__: module for module in model.modules()}
    embeddings = set(model.get_input_embeddings().modules())
    return [
        name for name in model._no_split_modules if name in modules and not embeddings & set(modules[name].modules())
    ]
