"""Rows of `gpu.py`, the most useful first, because the time may not suffice for all."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

GOALS = {("train", "S/16"): 0.25, ("train", "B/16"): 0.35, ("train", "L/16"): 0.50}  # shares of the measured peak
INFERENCE_GOAL = 0.60
TOY = "toy"  # a ViT of two layers, for CPUs
_TOY_LIMIT = 600  # seconds
_GRAPHS, _AUTOTUNE = "reduce-overhead", "max-autotune"  # names of torch.compile's modes


@dataclass(frozen=True)
class Setting:
    """Setting of a row: how the same model is computed.

    precision: "float32", "tf32" (float32 with TF32 products), "autocast" (bfloat16 products, float32 weights),
        "bfloat16" (everything), "fp8" (linear layers by torchao, the rest as with autocast).
    compile: mode of torch.compile; None for eager.
    by_layers: compile each layer separately, in a tenth of the compilation time.
    pad: pad the tokens to a multiple of this number; the attention masks the padding.
    attention: "sdpa", "cudnn" (sdpa with cuDNN's kernel), or a repository of `kernels`.
    """

    name: str
    precision: str = "autocast"
    compile: str | None = None
    by_layers: bool = False
    fused: bool = True
    pad: int | None = None
    attention: str = "sdpa"
    channels_last: bool = False


@dataclass(frozen=True)
class Row:
    """Measurement in a separate process.

    kind: "run" (a training run from files), "infer", "images", "train" (steps alone), "peak" or "paper".
    limit: time limit in seconds.
    least: minimum of remaining seconds to start it.
    grace: seconds between SIGTERM and SIGKILL.
    run: the kind of run.
    """

    kind: str
    variant: str = ""
    setting: Setting | None = None
    limit: float = 120
    least: float = 30
    grace: float = 2
    run: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.kind, self.variant, self.run, self.setting and self.setting.name)))

    def as_message(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name}


REFERENCE = "float32"  # the losses of the other settings are compared with this one's
BASE = "bf16 autocast"  # compiled settings start at the best batch size of this one

_CORE = (
    Setting(BASE),
    Setting("compile", compile="default"),
    Setting("compile, CUDA graphs", compile=_GRAPHS),
    Setting(REFERENCE, "float32"),
)
_EXTRA = (
    Setting("compile, cuDNN attention", compile="default", attention="cudnn"),
    Setting("compile, max-autotune", compile=_AUTOTUNE),
    *(Setting(f"compile, tokens padded to x{pad}", compile="default", pad=pad) for pad in (8, 16, 64)),
    Setting("compile, pure bf16", "bfloat16", "default"),
    Setting("compile, channels_last", compile="default", channels_last=True),
    Setting("compile by layers", compile="default", by_layers=True),
    Setting("bf16 autocast, flash attention 3", attention="kernels-community/flash-attn3"),
    Setting("bf16 autocast, tokens padded to x8", pad=8),
    Setting("bf16 autocast, AdamW not fused", fused=False),
    Setting("TF32", "tf32"),
)
_FP8 = Setting("compile, fp8", "fp8", "default")
_INFERENCE = (
    Setting("pure bf16", "bfloat16"),
    Setting("compile", "bfloat16", "default"),
    Setting("compile, CUDA graphs", "bfloat16", _GRAPHS),
)
_INFERENCE_EXTRA = (
    Setting("compile, max-autotune", "bfloat16", _AUTOTUNE),
    Setting("compile, cuDNN attention", "bfloat16", "default", attention="cudnn"),
    Setting("compile, tokens padded to x8", "bfloat16", "default", pad=8),
    Setting("compile, channels_last", "bfloat16", "default", channels_last=True),
    Setting("flash attention 3", "bfloat16", attention="kernels-community/flash-attn3"),
    Setting("TF32", "tf32"),
    Setting("float32", "float32"),
)


def ladder(toy: bool, inductor: bool = False) -> list[Row]:
    """Return all rows, the most useful first; the toy model's rows cover every code path once."""
    return list(_toy_rows(inductor) if toy else _rows())


RUNS = ("loop", "loop, augmentation on the device", "resume", "CPU and device", "fp16", "FSDP2")


def _rows() -> Iterator[Row]:
    for run in RUNS:
        yield Row("run", "B/16" if "loop" in run else "S/16", run=run, limit=400, least=60, grace=5)
    for variant in ("B/16", "S/16", "L/16"):
        yield from _timed("infer", variant, _INFERENCE)
    yield Row("images", limit=120, least=20)
    for variant in ("B/16", "S/16", "L/16"):
        yield from _timed("train", variant, _CORE)
    yield Row("peak", limit=90, least=10)
    yield Row("paper", limit=1500, least=120, grace=45)
    yield from _timed("train", "L/16", [_FP8])
    for variant in ("B/16", "S/16", "L/16"):
        yield from _timed("train", variant, _EXTRA)
        yield from _timed("infer", variant, _INFERENCE_EXTRA)
    yield from _timed("infer", "L/16", [_FP8])
    for kind in ("train", "infer"):
        yield from _timed(kind, "H/14", [_CORE[1], _FP8])


def _toy_rows(inductor: bool) -> Iterator[Row]:
    """Return the rows of the toy model; without inductor only one setting is compiled, to make its graphs."""
    for run in RUNS:
        yield Row("run", TOY, run=run, limit=_TOY_LIMIT, least=1)
    seen = set()
    for kind, settings in (("train", (*_CORE, *_EXTRA, _FP8)), ("infer", (*_INFERENCE, *_INFERENCE_EXTRA))):
        for setting in settings:
            is_eager = not inductor and (kind, setting.name) != ("train", "compile")
            setting = replace(setting, compile=None, by_layers=False) if is_eager else setting
            if setting.pad in (None, 8) and (kind, replace(setting, name="")) not in seen:
                seen.add((kind, replace(setting, name="")))
                yield Row(kind, TOY, setting, _TOY_LIMIT, least=1)
    yield Row("images", limit=_TOY_LIMIT, least=1)
    yield Row("peak", limit=_TOY_LIMIT, least=1)
    yield Row("paper", limit=_TOY_LIMIT, least=1, grace=10)


def _timed(kind: str, variant: str, settings: Sequence[Setting]) -> Iterator[Row]:
    """Return rows with a time limit for each setting; large models get more time."""
    slower = {"L/16": 1.5, "H/14": 2}.get(variant, 1)
    for setting in settings:
        limit, least = (600, 200) if setting.compile == _AUTOTUNE else (400, 60) if setting.compile else (100, 30)
        limit = 200 if setting.name == REFERENCE else limit  # it has losses of several seeds
        yield Row(kind, variant, setting, limit * slower, least)
