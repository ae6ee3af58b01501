"""Weights that are spread over processes (FSDP2, launched by `training/accelerate/fsdp.yaml` or `hsdp.yaml`)."""

import os
import warnings
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether parameters become DTensors when the accelerator prepares them."""
    return accelerator.distributed_type == DistributedType.FSDP


def shard_by_layers(accelerator: Accelerator, model: Any) -> None:
    """Have each layer of the model gathered by itself, unless the launch names the classes to wrap.

    Accelerate takes all of `_no_split_modules`, fails for one that the model has no module of, and wraps the input
    embeddings once more by themselves.
    """
    # no layer of a model changes in place what the one before it returns
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if is_sharded(accelerator) and "FSDP_TRANSFORMER_CLS_TO_WRAP" not in os.environ:
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = _layer_classes(model)


def _layer_classes(model: Any) -> list[str]:
    """Those of `_no_split_modules` that occur in the model and do not hold its input embeddings."""
    modules = {type(module).__name__: module for module in model.modules()}
    embeddings = set(model.get_input_embeddings().modules())
    return [
        name for name in model._no_split_modules if name in modules and not embeddings & set(modules[name].modules())
    ]
