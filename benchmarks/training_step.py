"""Speed and memory of one optimizer step of the model, compared with transformers and timm, with the same weights.

    python benchmarks/training_step.py [--variants S/16 B/16] [--batch_size 32] [--seconds 120] [--write]

A step is forward, cross entropy, backward and SGD with momentum, in float32 on images in memory. First, the loss and
the norm of the gradient of the first step are compared. Then the contestants take turns in one process. Peak memory is
measured in a separate process for each contestant, over three steps, with and without activation checkpointing.
`benchmarks/training.py` measures whole training loops, which also read images.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import common
from common import Aim, Failed, milliseconds_text, peak_mib, report_progress, run_apart

PEERS = ("transformers", "timm")
CONTESTANTS = ("hf_vit", *PEERS)
AIMS = [Aim("hf_vit", PEERS, 1.05)]
TOLERANCE = 1e-3  # for the loss, and for the norm of the gradient


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    if options.apart:
        common.print_result(globals()[options.apart], options)
    else:
        common.publish("training_step", measure_all(options), as_markdown, options.write)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument("--variants", nargs="+", default=["S/16", "B/16"])
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=120, help="time for a variant, without loading (default 120)")
    parser.add_argument("--least", type=int, default=5, help="rounds, however long they take (default 5)")
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS, choices=CONTESTANTS, metavar="NAME")
    parser.add_argument("--no_memory", action="store_true", help="skip the processes that measure memory")
    parser.add_argument("--apart", choices=["prepare", "time_steps", "measure_memory"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--checkpointing", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# The first process


def measure_all(options: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    for variant in options.variants:
        name = f"{variant} {options.image_size} float32 x{options.batch_size}"
        report_progress(name)
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield name, _measure_variant(variant, folder, options)
        except Failed as error:
            report_progress(f"{name} failed: {error}")


def _measure_variant(variant: str, folder: str, options: argparse.Namespace) -> dict:
    settings = {"folder": folder, "variants": variant, "image_size": options.image_size}
    settings |= {"batch_size": options.batch_size, "threads": options.threads, "least": options.least}
    shared = [text for name, value in settings.items() for text in (f"--{name}", value)]
    run_apart(__file__, "--apart", "prepare", *shared)
    names = ["--contestants", *options.contestants]
    result = run_apart(__file__, "--apart", "time_steps", *shared, "--seconds", options.seconds, *names)
    memory = ["--apart", "measure_memory", *shared, "--contestants"]
    result["memory"] = {}
    for name in [] if options.no_memory else result["turns"]:
        plain, checkpointing = (run_apart(__file__, *memory, name, *how) for how in ([], ["--checkpointing"]))
        result["memory"][name] = {"plain": plain, "checkpointing": checkpointing}
    return result


# The separate processes


def prepare(options: argparse.Namespace) -> dict:
    from contestants import config_of, make_checkpoints

    make_checkpoints(config_of(options.variants[0], options.image_size), options.folder)
    return {}


def time_steps(options: argparse.Namespace) -> dict:
    models, left_out = {}, {}
    for name in options.contestants:
        try:
            models[name] = load(name, options.folder)
        except ImportError as error:
            left_out[name] = f"not installed ({error})"
    steps = {name: _make_step(model, options) for name, model in models.items()}
    losses = compare({name: _first_step(step, models[name]) for name, step in steps.items()})
    turns = common.take_turns(steps, options.seconds, options.least, warm_up=1)
    return {**common.stamp(), "turns": turns, "first_steps": losses, "left_out": left_out}


def measure_memory(options: argparse.Namespace) -> dict:
    """Return the peak memory of three steps in MiB, and the memory before the model was loaded."""
    (name,) = options.contestants
    import_libraries(name)
    before = peak_mib()
    model = load(name, options.folder)
    if options.checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None) or model.set_grad_checkpointing  # timm's
        enable()
    step = _make_step(model, options)
    for _ in range(3):
        step()
    return {"peak_mib": peak_mib(), "imports_mib": before}


def import_libraries(name: str) -> None:
    if name == "hf_vit":
        import hf_vit  # noqa: F401
    elif name == "transformers":
        from transformers import ViTForImageClassification  # noqa: F401
    else:
        import timm  # noqa: F401  # pyright: ignore[reportMissingImports] - a peer


def load(name: str, folder: Path) -> Any:
    import torch
    from contestants import LOADERS

    return LOADERS[name](folder, torch.float32).train()


def _make_step(model, options: argparse.Namespace) -> Callable[[], Any]:
    """Return a function that makes one step and returns the loss."""
    import torch
    from contestants import logits_of

    torch.manual_seed(1)
    images = torch.rand(options.batch_size, 3, options.image_size, options.image_size) * 2 - 1
    labels = torch.arange(options.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(logits_of(model(images)), labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _first_step(step: Callable[[], Any], model) -> dict[str, float]:
    import torch

    loss = step().item()
    norms = [parameter.grad.norm() for parameter in model.parameters()]
    return {"loss": loss, "gradient_norm": torch.stack(norms).norm().item()}


def compare(first_steps: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Raise an error if the contestants do not compute the same results."""
    expected, *_ = first_steps.values()
    for name, found in first_steps.items():
        for what, value in found.items():
            if not abs(value / expected[what] - 1) <= TOLERANCE:
                raise SystemExit(f"cannot compare {name}: its {what} is {value:.6g} (expected {expected[what]:.6g})")
    return first_steps


# Markdown


def as_markdown(results: dict[str, dict]) -> str:
    aims = common.aims_table((name, result["turns"], AIMS) for name, result in results.items())
    sections = [common.machine_as_markdown(results), aims]
    for name, result in results.items():
        sections.append(f"**{name}**\n\n{_step_table(result, int(name.rpartition('x')[2]))}")
        sections += [f"{left} left out: {reason}." for left, reason in result["left_out"].items()]
    return "\n\n".join(sections)


def _step_table(result: dict, batch_size: int) -> str:
    rows = []
    for name, seconds in result["turns"].items():
        memory = result["memory"].get(name, {})
        peaks = [common.memory_text(memory.get(how)) for how in ("plain", "checkpointing")]
        rows.append([name, milliseconds_text(seconds), f"{batch_size / statistics.median(seconds):.2f}", *peaks])
    columns = ["", "ms a step, median (quartiles)", "images/s", "peak MiB (after imports)", "with checkpointing"]
    return f"{common.table(columns, rows)}\n\n{len(seconds)} rounds."


if __name__ == "__main__":
    sys.exit(main())
