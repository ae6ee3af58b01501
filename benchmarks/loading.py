"""Time from the start of a Python process to the first logits of a saved model, compared with transformers and timm.

    python benchmarks/loading.py [--variant B/16] [--rounds 7] [--write]

Each start is a new process. It imports the library, loads the same weights from a folder in the page cache, classifies
one image of 224 pixels, and exits at once. The contestants take turns. The process itself measures the last three
columns; the rest of its time is the start and the end of Python.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import common
from common import Aim, milliseconds_text, report_progress

AIMS = [Aim("hf_vit", ("transformers",), 1.0)]  # timm starts faster: it does not import transformers
PARTS = ("import", "load", "forward")

_LOADING = {  # a user's code: imports, then the model
    "hf_vit": ("from hf_vit import HfViTForImageClassification", "HfViTForImageClassification.from_pretrained(folder)"),
    "transformers": (
        "from transformers import ViTForImageClassification",
        "ViTForImageClassification.from_pretrained(folder)",
    ),
    "timm": ("import timm", "timm.create_model('local-dir:' + folder, pretrained=True).eval()"),
}
_PROGRAM = """
import json, os, sys
from time import perf_counter as now
benchmarks, folder, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.path.insert(0, benchmarks)
import common
common.silence_torchvision()
times = [now()]
import torch
{imports}
times.append(now())
model = {model}
times.append(now())
with torch.inference_mode():
    output = model(torch.zeros(1, 3, size, size))
logits = output if isinstance(output, torch.Tensor) else output.logits
value = logits[0, 0].item()
times.append(now())
seconds = [after - before for before, after in zip(times, times[1:])]
print(json.dumps({{"seconds": seconds, "logit": value}}), flush=True)
os._exit(0)
"""


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    common.use_threads(options.threads)
    if options.apart:
        prepare(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options)
    common.publish("loading", [(options.variant, result)], as_markdown, options.write)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument("--variant", default="B/16")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--apart", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def prepare(options: argparse.Namespace) -> None:
    """Write the weights; return the versions of the packages that wrote them."""
    common.silence_torchvision()
    from contestants import config_of, make_checkpoints

    make_checkpoints(config_of(options.variant, options.image_size), options.apart)
    print(json.dumps(common.stamp()))


def measure(folder: Path, options: argparse.Namespace) -> dict:
    shared = ["--variant", options.variant, "--image_size", options.image_size, "--threads", options.threads]
    result = common.run_apart(__file__, "--apart", folder, *shared)
    starts: dict[str, list[dict]] = {}
    for name in _LOADING:
        try:
            starts[name] = [start(name, folder, options.image_size)]
        except common.Failed as error:
            report_progress(f"{name} left out: {error}")
    first = next(iter(starts.values()))[0]["logit"]
    for name, (once,) in starts.items():
        if not abs(once["logit"] - first) <= 1e-4 * max(1, abs(first)):
            raise SystemExit(f"cannot compare {name}: its first logit is {once['logit']} (expected {first})")
    contest = {name: lambda name=name: starts[name].append(start(name, folder, options.image_size)) for name in starts}
    turns = common.take_turns(contest, least=options.rounds, most=options.rounds, warm_up=0)
    parts = {name: list(zip(*(once["seconds"] for once in runs[1:]), strict=True)) for name, runs in starts.items()}
    return {**result, "turns": turns, "parts": parts}


def start(name: str, folder: Path, image_size: int) -> dict:
    """Run the program of one contestant."""
    imports, model = _LOADING[name]
    program = _PROGRAM.format(imports=imports, model=model)
    return json.loads(common.run_python("-c", program, common.HERE, folder / name, image_size).splitlines()[-1])


def as_markdown(results: dict[str, dict]) -> str:
    sections = [common.machine_as_markdown(results)]
    sections.append(common.aims_table((name, result["turns"], AIMS) for name, result in results.items()))
    for variant, result in results.items():
        rows = [
            [name, milliseconds_text(seconds), *(f"{1000 * statistics.median(p):.0f}" for p in result["parts"][name])]
            for name, seconds in result["turns"].items()
        ]
        columns = [variant, "ms to the first logits (quartiles)", *(f"{part}, ms" for part in PARTS)]
        sections.append(common.table(columns, rows))
    return "\n\n".join(sections)


if __name__ == "__main__":
    sys.exit(main())
