"""Time from the start of a program to one classified image: `hf-vit predict`, transformers, ONNX Runtime.

    python benchmarks/cold_start.py FOLDER IMAGE [--rounds 7] [--write]

FOLDER holds a model of hf_vit, which is exported for the other libraries first. Each turn is a whole process, from the
start of Python to its end. All files are in the page cache. `imports` is the time of the imports that hf_vit and
transformers share: torch, and transformers' base class of models.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import common
from common import Aim, milliseconds_text, report_progress

AIMS = [Aim("hf-vit predict", ("transformers pipeline",), 2.0)]

_COMMAND = "import sys; from hf_vit_command import main; sys.argv[0] = 'hf-vit'; sys.exit(main())"
_PIPELINE = """
import json, sys
from transformers import pipeline
print(json.dumps(pipeline("image-classification", model=sys.argv[1])(sys.argv[2])[0]["label"]))
"""
_ONNX_RUNTIME = """
import json, sys
from pathlib import Path
import numpy as np
import onnxruntime
from PIL import Image
program, image, folder = sys.argv[1:]
config = json.loads(Path(folder, "config.json").read_text())
image = Image.open(image).convert("RGB").resize((config["image_size"],) * 2, Image.Resampling.BILINEAR)
pixel_values = (np.asarray(image, np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]
session = onnxruntime.InferenceSession(program)
(logits,) = session.run(None, {session.get_inputs()[0].name: pixel_values})
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
    program, folder = directory / "model.onnx", directory / "transformers"
    common.run_python("-c", _COMMAND, "export", options.folder, folder, "--to", "transformers")
    common.run_python("-c", _COMMAND, "export", options.folder, program, "--to", "onnx")
    starts = {
        "hf-vit predict": (_COMMAND, "predict", options.folder, options.image, "--json"),
        "transformers pipeline": (_PIPELINE, folder, options.image),
        "ONNX Runtime": (_ONNX_RUNTIME, program, options.image, options.folder),
    }
    for name, start in starts.items():
        report_progress(f"{name}: {common.run_python('-c', *start).splitlines()[-1][:100]}")
    starts["imports"] = (_IMPORTS,)
    contest = {name: lambda start=start: common.run_python("-c", *start) for name, start in starts.items()}
    turns = common.take_turns(contest, least=options.rounds, most=options.rounds, warm_up=1)
    return {**result, "turns": turns}


def as_markdown(results: dict[str, dict]) -> str:
    sections = [common.machine_as_markdown(results)]
    sections.append(common.aims_table((name, result["turns"], AIMS) for name, result in results.items()))
    for model, result in results.items():
        rows = [[name, milliseconds_text(seconds)] for name, seconds in result["turns"].items()]
        sections.append(common.table([model, "ms from start to end (quartiles)"], rows))
    return "\n\n".join(sections)


if __name__ == "__main__":
    sys.exit(main())
