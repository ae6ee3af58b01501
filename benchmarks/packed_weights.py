"""Cost of the check that packed weights are current: processor time of a ViT's forwards, with and without it.

    python benchmarks/packed_weights.py [--variants Ti/16 ...] [--batch_size 1] [--rounds 30] [--earlier FILE]
    python benchmarks/packed_weights.py --choices 10 [--calls 5] [--load 12] [--variants Ti/16 ...]

"packed" is a model after `optimize_for_inference` with all its linear layers packed. "unchecked" has the same packed
weights, and never checks that they are current. "not packed" gives the weights unchanged to oneDNN, as a compiled model
does. "earlier" packs as FILE does, an earlier hf_vit/models/inference.py (`git show
COMMIT:hf_vit/models/inference.py`). The time is processor time of one thread, so that other load matters little.

`--choices N` prints which layers are packed in N new processes, a few at a time. Each process optimises new models
`--calls` times, while `--load` other processes keep the CPU busy.
"""

import argparse
import collections
import copy
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import run_apart, table

from hf_vit import HfViTConfig, HfViTForImageClassification
from hf_vit.models import inference

_WARM_UP = 3  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=("Ti/16", "S/16"))
    parser.add_argument("--batch_size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--choices", type=int, default=0)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apart:
        print(json.dumps({"choices": [_choose(options.variants) for _ in range(options.calls)]}))
    elif options.choices:
        _print_choices(options)
    else:
        _print_costs(options)


def _print_choices(options: argparse.Namespace) -> None:
    arguments = (__file__, "--apart", "--calls", options.calls, "--variants", *options.variants)
    with _load(options.load), ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda _: run_apart(*arguments), range(options.choices)))
    counts = collections.Counter(json.dumps(choice) for result in results for choice in result["choices"])
    print(table(["packed layers", "calls"], [[choice, str(count)] for choice, count in counts.most_common()]))


@contextmanager
def _load(count: int) -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def _choose(variants: list[str]) -> dict[str, list[str]]:
    """Optimise new models; return the numbers of packed layers, by the last part of their names."""
    choices = {}
    for variant in variants:
        for dtype in (torch.float32, torch.bfloat16):
            model: Any = HfViTForImageClassification(HfViTConfig.from_variant(variant, num_labels=1000))
            model.to(dtype)
            inference.optimize(model)
            packed = [n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), inference.PackedLinear)]
            kinds = collections.Counter(name.rpartition(".")[2] for name in packed)
            choices[f"{variant} {str(dtype)[6:]}"] = [f"{count} {name}" for name, count in sorted(kinds.items())]
    return choices


def _print_costs(options: argparse.Namespace) -> None:
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
    """Return the seconds of every forward of each contestant."""
    config = HfViTConfig.from_variant(variant, num_labels=1000)
    plain: Any = HfViTForImageClassification(config).eval()
    plain.to(dtype)
    pixel_values = torch.rand(batch_size, 3, 224, 224, dtype=dtype)
    models = {name: _optimized(plain, inference) for name in ("packed", "unchecked", "not packed")}
    if earlier is not None:
        models["earlier"] = _optimized(plain, earlier, batch_size * plain.tokens_per_image)
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


def _optimized(plain: HfViTForImageClassification, code: Any, *rows: int) -> HfViTForImageClassification:
    """Optimise a model; earlier versions need the rows of the products, and measured several methods."""
    code.gains_from_packing = code.wins_race = lambda *arguments: True
    model = copy.deepcopy(plain)
    code.optimize(model, *rows)
    return model


@torch.no_grad()
def _skip_checks(model: HfViTForImageClassification, packed: bool, inputs: torch.Tensor) -> None:
    """Make each layer use its present weight, packed or not, without a check."""
    model(inputs)
    module: Any
    for module in model.modules():
        layer = module.__dict__.get("forward")
        if isinstance(layer, inference.PackedLinear):
            weight = vars(module.weight)["_form"].values if packed else module.weight.detach()
            layer.form = lambda inputs, weight=weight: weight


if __name__ == "__main__":
    main()
