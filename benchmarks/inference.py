"""Speed and memory of a forward, compared with transformers, timm, torchvision, vit-pytorch, JAX, OpenVINO and others.

    python benchmarks/inference.py [--lines NAME ...] [--seconds 60] [--threads 2] [--write]

Each line is one kind of work, such as "B/16 224 float32 x8" (model, pixels, precision, batch), and runs in a separate
process. There, all contestants load the same weights, and their outputs are compared. Then they take turns, in another
order in each round. The results are medians over the rounds, and ratios with the quartiles of the ratios within each
round. Peak memory is measured in another process for each contestant, which loads it alone and runs it three times.
`--list` prints the lines. A library that is not installed (`pip install 'hf_vit[benchmarks]'`) is omitted, with the
reason.

All contestants get the same images in memory, processors, threads and precision. Those in torch use fused attention
(sdpa), except vit-pytorch's, and `torch.inference_mode`. For JAX, XLA chooses the attention; it runs under jit in all
modes. torchvision's outputs are compared with the original's GELU; its time is measured with its own.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import common
from common import Aim, Failed, milliseconds_text, peak_mib, report_progress, run_apart

OPTIMIZED, PLAIN = "hf_vit optimized", "hf_vit"
_OURS = (PLAIN, OPTIMIZED)
_BACKENDS = {"hf_vit openvino": "openvino", "hf_vit onnxruntime": "onnxruntime"}
PEERS = ("transformers", "timm", "torchvision", "vit-pytorch")
JAX = "JAX/Flax"
_RUNTIMES = ("OpenVINO", "ONNX Runtime")
CONTESTANTS = (*_OURS, *_BACKENDS, *PEERS, JAX, *_RUNTIMES)
_OTHER_WEIGHTS = ("vit-pytorch",)
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # relative to the largest output


@dataclass(frozen=True)
class Line:
    """One kind of work.

    mode: "eager", "compiled" (torch.compile), "frozen" (the same with inductor's freezing), or "attentions" (all
        attention probabilities are returned).
    """

    variant: str
    image_size: int
    dtype: str
    batch: int
    mode: str = "eager"
    contestants: tuple[str, ...] = CONTESTANTS
    aims: list[Aim] = field(default_factory=list, hash=False)

    @property
    def name(self) -> str:
        mode = "" if self.mode == "eager" else f" {self.mode}"
        return f"{self.variant} {self.image_size} {self.dtype} x{self.batch}{mode}"


def aims(ratio: float, jax: float | None = None, runtimes: float | None = None) -> list[Aim]:
    """Return the aims: our torch backend against PEERS, JAX and the fastest; our best backend against the fastest."""
    found = [Aim(OPTIMIZED, PEERS, ratio), Aim(PLAIN, PEERS, 1.05)]
    if jax is not None:
        found.append(Aim(OPTIMIZED, (JAX,), jax))
    if runtimes is not None:
        everybody = (*PEERS, JAX, *_RUNTIMES)
        found += [Aim((OPTIMIZED, *_BACKENDS), everybody, 1.0), Aim(OPTIMIZED, everybody, runtimes)]
    return found


def compiled(dtype: str, mode: str) -> Line:
    return Line("B/16", 224, dtype, 8, mode, (*_OURS, *PEERS), [Aim(OPTIMIZED, PEERS, 1.3), Aim(PLAIN, PEERS, 1.3)])


LINES = [
    *(Line("B/16", 224, "float32", batch, aims=aims(2.2, jax=1.4, runtimes=0.95)) for batch in (1, 8, 32)),
    *(Line("B/16", 224, "bfloat16", batch, aims=aims(1.4, runtimes=0.95)) for batch in (1, 8, 32)),
    *(Line("S/16", 224, "float32", batch, aims=aims(2.0, runtimes=0.9)) for batch in (1, 8)),
    *(Line("S/16", 224, "bfloat16", batch, aims=aims(1.4, runtimes=0.9)) for batch in (1, 8)),
    *(Line("Ti/16", 224, "float32", batch, aims=aims(2.0)) for batch in (1, 8)),
    *(Line("B/16", size, "float32", 4, aims=aims(2.0)) for size in (384, 512)),
    Line("R50+B/16", 384, "float32", 4, contestants=(PLAIN, OPTIMIZED, "timm"), aims=aims(1.8)),
    *(compiled(dtype, mode) for mode in ("compiled", "frozen") for dtype in ("float32", "bfloat16")),
    Line(
        "B/16",
        224,
        "float32",
        8,
        "attentions",
        (PLAIN, OPTIMIZED, "transformers"),
        [Aim(PLAIN, ("transformers",), 1.0), Aim(OPTIMIZED, ("transformers",), 1.0)],
    ),
]


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    if options.apart:
        common.print_result(globals()[options.apart], options)
    elif options.list:
        print("\n".join(line.name for line in LINES))
    else:
        common.publish("inference", measure_all(options), as_markdown, options.write)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    names = [line.name for line in LINES]
    parser.add_argument("--lines", nargs="+", metavar="NAME", default=names, choices=names, help="default: all")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--seconds", type=float, default=60, help="time for a line, without loading (default 60)")
    parser.add_argument("--least", type=int, default=7, help="rounds of each line, however long they take (default 7)")
    parser.add_argument("--no_memory", action="store_true", help="skip the processes that measure memory")
    parser.add_argument("--list", action="store_true", help="print the names of the lines")
    parser.add_argument("--apart", choices=["prepare", "time_line", "measure_memory"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# The first process: it starts the others and collects their output


def measure_all(options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    with tempfile.TemporaryDirectory() as folder:
        for line in lines_of(options):
            report_progress(line.name)
            checkpoints = Path(folder, f"{line.variant}@{line.image_size}".replace("/", "_"))
            try:
                yield line.name, _measure_line(line, checkpoints, options)
            except Failed as error:
                report_progress(f"{line.name} failed: {error}")


def lines_of(options: argparse.Namespace) -> list[Line]:
    return [line for line in LINES if line.name in options.lines]


def _measure_line(line: Line, checkpoints: Path, options: argparse.Namespace) -> dict:
    shared = ["--folder", checkpoints, "--threads", options.threads, "--lines", line.name]
    if not checkpoints.exists():
        run_apart(__file__, "--apart", "prepare", *shared)
    limits = ["--seconds", options.seconds, "--least", options.least]
    result = run_apart(__file__, "--apart", "time_line", *shared, *limits, "--contestants", *options.contestants)
    names = [] if options.no_memory else result["turns"]
    result["memory"] = {
        name: run_apart(__file__, "--apart", "measure_memory", *shared, "--contestants", name) for name in names
    }
    return result


# The separate processes


def prepare(options: argparse.Namespace) -> dict:
    from contestants import config_of, make_checkpoints

    line = lines_of(options)[0]
    make_checkpoints(config_of(line.variant, line.image_size), options.folder)
    return {}


def time_line(options: argparse.Namespace) -> dict:
    line = lines_of(options)[0]
    names = [name for name in line.contestants if name in options.contestants]
    return time_contest(line, names, options.folder, options.seconds, options.least)


def time_contest(line: Line, names: list[str], folder: Path, seconds: float, least: int) -> dict:
    """Load the contestants, compare their outputs, then time them."""
    from contestants import VIT_PYTORCH_NOTE

    ready, left_out = enter(line, names, folder)
    differences = compare(line, ready)
    forwards = {name: contestant.forward for name, contestant in ready.items()}
    turns = common.take_turns(forwards, seconds, least, pause=0.05)
    notes = {"vit-pytorch": VIT_PYTORCH_NOTE} if "vit-pytorch" in turns else {}
    return {**common.stamp(), "turns": turns, "differences": differences, "left_out": left_out, "notes": notes}


def measure_memory(options: argparse.Namespace) -> dict:
    """Return the memory of one contestant alone in MiB: the peak, and the memory before the model was loaded."""
    line, name = lines_of(options)[0], options.contestants[0]
    import_libraries(name)
    before = peak_mib()
    contestant = build(name, line, options.folder)
    for _ in range(3):
        contestant.forward()
    return {"peak_mib": peak_mib(), "imports_mib": before}


def import_libraries(name: str) -> None:
    """Import the libraries of a contestant, so that the further memory is that of its model."""
    if name == JAX:
        import flax_vit  # noqa: F401
        import torch  # noqa: F401 - makes the images
    elif name in (*_OURS, *_BACKENDS):
        import hf_vit  # noqa: F401
    elif name in _RUNTIMES:
        __import__(name.replace(" ", "").lower())
    elif name == "transformers":
        from transformers import ViTForImageClassification  # noqa: F401
    else:
        __import__(name.replace("-", "_"))


# Contestants


class Contestant(NamedTuple):
    """forward: the timed function. outputs: returns the compared arrays; for some, not those of the timed function."""

    forward: Callable[[], Any]
    outputs: Callable[[], list[Any]]


def enter(line: Line, names: list[str], folder: Path) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the contestants that can take part, and the reasons why the others cannot."""
    from contestants import NotThere

    ready, left_out = {}, {}
    for name in names:
        try:
            ready[name] = build(name, line, folder)
        except ImportError as error:
            left_out[name] = f"not installed ({error})"
        except NotThere as error:
            left_out[name] = str(error)
    return ready, left_out


def build(name: str, line: Line, folder: Path) -> Contestant:
    if name == JAX:
        return _build_jax(line, folder)
    if name in _RUNTIMES:
        return _build_runtime(name, line, folder)
    import torch
    from contestants import LOADERS, as_original, logits_of

    dtype = getattr(torch, line.dtype)
    settings, arguments = {}, {}
    if line.mode == "attentions":
        arguments = {"output_attentions": True}
        settings = {"attn_implementation": "eager"} if name == "transformers" else {}
    model: Any = LOADERS[name.split()[0] if name in (*_OURS, *_BACKENDS) else name](folder, dtype, **settings).eval()
    if name == OPTIMIZED:
        model = model.optimize_for_inference(batch_size=line.batch)
    elif name in _BACKENDS:
        model = _with_backend(model, name, line)
    pixel_values = images(line).to(dtype)
    timed = _compile_model(model, line.mode)

    def forward(module=timed):
        with torch.inference_mode():
            return module(pixel_values, **arguments)

    def outputs():
        with as_original(model):
            output = forward(model if name == "torchvision" else timed)
        return [array.float().numpy() for array in (logits_of(output), *(getattr(output, "attentions", None) or ()))]

    return Contestant(forward, outputs)


def _with_backend(model: Any, name: str, line: Line) -> Any:
    from contestants import NotThere

    import hf_vit

    try:
        return hf_vit.use_backend(model, _BACKENDS[name], line.batch)
    except ValueError as error:  # an unsupported dtype
        raise NotThere(str(error)) from error


def _build_runtime(name: str, line: Line, folder: Path) -> Contestant:
    from contestants import existing, load_runtime

    pixels = images(line)
    function = load_runtime(name, existing(folder), line.dtype, tuple(pixels.shape))
    return Contestant(lambda: function(pixels.numpy()), lambda: [function(pixels.numpy())])


def _build_jax(line: Line, folder: Path) -> Contestant:
    import flax_vit
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports] - a peer
    import numpy as np
    from contestants import existing, sizes_of

    function = flax_vit.load(existing(folder / "jax.npz"), sizes_of(folder), line.dtype)
    pixels = jnp.asarray(images(line).permute(0, 2, 3, 1).numpy(), dtype=line.dtype)
    return Contestant(lambda: function(pixels), lambda: [np.asarray(function(pixels), dtype=np.float32)])


def images(line: Line):
    """Return the images of all contestants, with values in [-1, 1)."""
    import torch

    torch.manual_seed(1)
    return torch.rand(line.batch, 3, line.image_size, line.image_size) * 2 - 1


def _compile_model(model, mode: str):
    if mode not in ("compiled", "frozen"):
        return model
    import torch
    import torch._inductor.config

    torch._inductor.config.freezing = mode == "frozen"
    return torch.compile(model)


def compare(line: Line, ready: dict[str, Contestant]) -> dict[str, float]:
    """Return the largest difference of each contestant from the first, relative to the largest output.

    Raises:
        SystemExit: a difference exceeds the tolerance of the dtype, so that the times would not be comparable.
    """
    import numpy as np

    first, *others = [name for name in ready if name not in _OTHER_WEIGHTS]
    expected = ready[first].outputs()
    differences = {}
    for name in others:
        arrays = ready[name].outputs()
        if [array.shape for array in arrays] != [array.shape for array in expected]:
            raise SystemExit(f"cannot compare {name}: its outputs have the shapes {[array.shape for array in arrays]}")
        differences[name] = max(
            float(np.abs(array - wanted).max() / np.abs(wanted).max())
            for array, wanted in zip(arrays, expected, strict=True)
        )
        if not differences[name] <= TOLERANCE[line.dtype]:
            raise SystemExit(f"the outputs of {name} differ from those of {first} by {differences[name]:.1e}")
    return differences


# Markdown


def as_markdown(results: dict[str, dict]) -> str:
    lines = [line for line in LINES if line.name in results]
    aims = common.aims_table((line.name, results[line.name]["turns"], line.aims) for line in lines)
    sections = [common.machine_as_markdown(results), aims]
    sections += [f"**{line.name}**\n\n{_line_table(line, results[line.name])}" for line in lines]
    return "\n\n".join(sections)


def _line_table(line: Line, result: dict) -> str:
    turns = result["turns"]
    rows = []
    for name, seconds in turns.items():
        rows.append(
            [
                name,
                milliseconds_text(seconds),
                f"{line.batch / statistics.median(seconds):.2f}",
                f"{result['differences'][name]:.1g}" if name in result["differences"] else "",
                common.memory_text(result["memory"].get(name)),
            ]
        )
    columns = ["", "ms, median (quartiles)", "images/s", "largest difference", "peak MiB (after imports)"]
    remarks = [f"{len(next(iter(turns.values())))} rounds."]
    remarks += [f"{name} left out: {reason}." for name, reason in result["left_out"].items()]
    remarks += [f"{name} has {note}." for name, note in result["notes"].items()]
    return f"{common.table(columns, rows)}\n\n{' '.join(remarks)}"


if __name__ == "__main__":
    sys.exit(main())
