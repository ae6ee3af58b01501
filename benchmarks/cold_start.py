"""Time and peak memory from the start of a program to one classified image: hf_vit, transformers, the runtimes.

    python benchmarks/cold_start.py FOLDER IMAGE [--rounds 7] [--write]

FOLDER holds a model of hf_vit, which is exported for the other libraries first, and compiled into the cache. Each turn
is a whole process, from the start of Python to its end. All files are in the page cache. `imports` is the time of the
imports that hf_vit and transformers share: torch, and transformers' base class of models.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import common
from common import Aim, milliseconds_text, report_progress

AIMS = [
    Aim("hf-vit predict", ("transformers pipeline",), 2.0),
    Aim("hf-vit predict, exported to ONNX", ("ONNX Runtime",), 1 / 1.3),
    Aim("hf-vit predict, compiled", ("ONNX Runtime",), 1 / 1.3),
    Aim("hf-vit predict, exported to OpenVINO", ("OpenVINO",), 1 / 1.3),
]

_COMMAND = "import sys; from hf_vit_command import main; sys.argv[0] = 'hf-vit'; sys.exit(main())"
_PIPELINE = """
import json, sys
from transformers import pipeline
print(json.dumps(pipeline("image-classification", model=sys.argv[1])(sys.argv[2])[0]["label"]))
"""
_RUNTIME = """
import json, sys
from pathlib import Path
import numpy as np
from PIL import Image
program, image, folder = sys.argv[1:]
config = json.loads(Path(folder, "config.json").read_text())
image = Image.open(image).convert("RGB").resize((config["image_size"],) * 2, Image.Resampling.BILINEAR)
levels = np.ascontiguousarray(np.asarray(image, np.float32).transpose(2, 0, 1)[None])
if program.endswith(".onnx"):
    import onnxruntime
    logits = onnxruntime.InferenceSession(program).run(["logits"], {"pixel_values": levels})[0]
else:
    import openvino
    compiled = openvino.Core().compile_model(program, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    logits = compiled(levels)[0]
print(json.dumps(config["id2label"][str(logits.argmax())]))
"""
_IMPORTS = "from transformers import PreTrainedModel"


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    common.use_threads(options.threads)
    if options.apart:
        print(json.dumps(common.stamp()))
        return
    with tempfile.TemporaryDirectory() as directory:
        result = measure(Path(directory), options)
    common.publish("cold_start", [(options.folder.name, result)], as_markdown, options.write)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument(
        "folder", type=Path, help="folder of a classifier of hf_vit with square images and pixels in [-1, 1]"
    )
    parser.add_argument("image", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(directory: Path, options: argparse.Namespace) -> dict:
    result = common.run_apart(__file__, options.folder, options.image, "--threads", options.threads, "--apart")
    folder, onnx, openvino = (directory / name for name in ("transformers", "onnx", "openvino"))
    for path in (folder, onnx, openvino):
        common.run_python("-c", _COMMAND, "export", options.folder, path, "--to", path.name)
    common.run_python("-c", _COMMAND, "compile", options.folder)
    predict = (_COMMAND, "predict")
    starts = {
        "hf-vit predict": (*predict, options.folder, options.image, "--json", "--backend", "eager"),
        "transformers pipeline": (_PIPELINE, folder, options.image),
        "hf-vit predict, compiled": (*predict, options.folder, options.image, "--json"),
        "hf-vit predict, exported to ONNX": (*predict, onnx, options.image, "--json"),
        "ONNX Runtime": (_RUNTIME, onnx / "model.onnx", options.image, options.folder),
        "hf-vit predict, exported to OpenVINO": (*predict, openvino, options.image, "--json"),
        "OpenVINO": (_RUNTIME, openvino / "model.xml", options.image, options.folder),
    }
    for name, start in starts.items():
        report_progress(f"{name}: {common.run_python('-c', *start).splitlines()[-1][:100]}")
    starts["imports"] = (_IMPORTS,)
    contest = {name: lambda start=start: common.run_python("-c", *start) for name, start in starts.items()}
    turns = common.take_turns(contest, least=options.rounds, most=options.rounds, warm_up=1)
    peaks = {name: peak_memory("-c", *start) for name, start in starts.items()}
    return {**result, "turns": turns, "peaks": peaks}


def peak_memory(*arguments: object) -> float:
    """Run Python with these arguments; return the largest size of its memory, in MiB."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_maxrss / 1024


def as_markdown(results: dict[str, dict]) -> str:
    sections = [common.machine_as_markdown(results)]
    sections.append(common.aims_table((name, result["turns"], AIMS) for name, result in results.items()))
    for model, result in results.items():
        peaks = result.get("peaks", {})  # missing in older results
        rows = []
        for name, seconds in result["turns"].items():
            rows.append([name, milliseconds_text(seconds), f"{peaks[name]:.0f}" if name in peaks else ""])
        sections.append(common.table([model, "ms from start to end (quartiles)", "peak memory, MiB"], rows))
    return "\n\n".join(sections)


if __name__ == "__main__":
    sys.exit(main())
