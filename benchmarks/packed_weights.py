"""What it costs that packed weights cannot be stale: forwards of a ViT, in processor time, that take turns.

    python benchmarks/packed_weights.py [--variants Ti/16 ...] [--batch_size 1] [--rounds 30] [--earlier FILE]

"packed" is a model after `optimize_for_inference` with all its linear layers packed, whichever wins the race;
"unchecked" has the same weights packed, and never looks whether they are current; "not packed" takes the weights as
they are to oneDNN, as a compiled model does. FILE is an earlier hf_vit/models/inference.py (`git show
COMMIT:hf_vit/models/inference.py`): "earlier" packs as that does. One thread, in time of its own: what else the machine
does counts little.
"""

import argparse
import copy
import importlib.util
import random
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import table

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.models import inference

_WARM_UP = 3  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=("Ti/16", "S/16"))
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--earlier", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    earlier = _import_beside(options.earlier) if options.earlier else None
    rows = []
    for variant in options.variants:
        for dtype in ("float32", "bfloat16"):
            turns = _time(variant, getattr(torch, dtype), options.batch_size, options.rounds, earlier)
            medians = {name: statistics.median(seconds) for name, seconds in turns.items()}
            packed = medians.pop("packed")
            ratios = [f"{packed / median:.3f}" for median in medians.values()]
            rows.append([f"{variant} {dtype} x{options.batch_size}", f"{1000 * packed:.1f}", *ratios])
    print(table(["", "packed, ms", *(f"of {name}" for name in medians)], rows))


def _import_beside(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hf_vit.models.earlier_inference", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def _time(
    variant: str, dtype: torch.dtype, batch_size: int, rounds: int, earlier: ModuleType | None
) -> dict[str, list[float]]:
    """Seconds of every forward, by contestant."""
    config = HfViTConfig.from_variant(variant, num_labels=1000)
    plain: Any = HfViTForImageClassification(config).eval()
    plain.to(dtype)
    pixel_values = torch.rand(batch_size, 3, 224, 224, dtype=dtype)
    models = {name: _optimized(plain, inference, batch_size) for name in ("packed", "unchecked", "not packed")}
    if earlier is not None:
        models["earlier"] = _optimized(plain, earlier, batch_size)
    _skip_checks(models["unchecked"], packed=True, inputs=pixel_values)
    _skip_checks(models["not packed"], packed=False, inputs=pixel_values)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for number in range(_WARM_UP + rounds):
        for name in random.sample(list(models), len(models)):
            start = time.thread_time()
            models[name](pixel_values)
            if number >= _WARM_UP:
                seconds[name].append(time.thread_time() - start)
    return seconds


def _optimized(plain: HfViTForImageClassification, code: Any, batch_size: int) -> HfViTForImageClassification:
    code.wins_race = lambda layer, rows: True
    model = copy.deepcopy(plain)
    code.optimize(model, batch_size * model.tokens_per_image)
    return model


@torch.no_grad()
def _skip_checks(model: HfViTForImageClassification, packed: bool, inputs: torch.Tensor) -> None:
    """Have each layer multiply with the weight that it has now, packed or as it is."""
    model(inputs)
    module: Any
    for module in model.modules():
        layer = module.__dict__.get("forward")
        if isinstance(layer, inference.PackedLinear):
            weight = vars(module.weight)["_form"].values if packed else module.weight.detach()
            layer.form = lambda inputs, weight=weight: weight


if __name__ == "__main__":
    main()
