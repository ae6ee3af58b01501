"""Images per second from JPEG files to classes, compared with transformers, timm and OpenVINO.

    python benchmarks/pipeline.py [FOLDER] [--weights FILE.npz] [--lines NAME ...] [--images 48] [--write]

Every image of FOLDER is converted to a JPEG of 500 x 375 pixels; without FOLDER, the JPEGs hold noise with the spectrum
of photographs. All contestants read the same files, resize them to 224 x 224 and use the same weights: those of
`--weights`, an original checkpoint of a ViT-Ti/16, or random ones. Before the timing, the predictions are compared.
Because the resizes differ, the table has the share of images with the same top class; with random weights this share
means nothing.

* hf_vit: `predict` with an optimized model; "one after another" reads a batch, then computes it.
* transformers: `pipeline("image-classification")` in batches of 8.
* timm: its transform in a DataLoader, in this process or in persistent worker processes, one for each processor.
* OpenVINO: `PrePostProcessor` resizes and normalizes inside the program; Pillow decodes. One image at a time with all
  threads, or "asynchronous": a stream for each thread, while the next image is decoded.
"""

import argparse
import io
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import Aim

_SIDE, _WIDTH, _HEIGHT, _QUALITY = 224, 500, 375, 90
_BATCH = 8
_OURS = ("hf_vit", "hf_vit openvino")
_PEERS = ("transformers", "timm", "timm, workers", "OpenVINO", "OpenVINO, asynchronous")
CONTESTANTS = ("hf_vit", "hf_vit, one after another", "hf_vit openvino", *_PEERS)
LINES = ("Ti/16 float32", "Ti/16 bfloat16", "S/16 float32")
_MIN_AGREEMENT = 0.85
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}  # OpenVINO's names
_Contestant = Callable[[], list[int]]  # returns the top class of every file


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    if options.apart:
        common.print_result(globals()[options.apart], options)
        return
    with tempfile.TemporaryDirectory() as folder:
        common.publish("pipeline", ((line, _measure(line, options, Path(folder))) for line in options.lines),
                       as_markdown, options.write)  # fmt: skip


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument("photographs", type=Path, nargs="?", metavar="FOLDER")
    parser.add_argument("--weights", type=Path, help="an original checkpoint of a ViT-Ti/16")
    parser.add_argument("--lines", nargs="+", metavar="NAME", default=LINES, choices=LINES, help="default: all")
    parser.add_argument("--contestants", nargs="+", metavar="NAME", default=CONTESTANTS, choices=CONTESTANTS)
    parser.add_argument("--images", type=int, default=48, help="maximum number of images (default 48)")
    parser.add_argument("--seconds", type=float, default=60, help="time for a line, without loading (default 60)")
    parser.add_argument("--least", type=int, default=5, help="rounds, however long they take (default 5)")
    parser.add_argument("--apart", choices=["prepare", "time_line"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _measure(line: str, options: argparse.Namespace, folder: Path) -> dict:
    common.report_progress(line)
    place = folder / line.replace("/", "_")
    given = [options.photographs] if options.photographs else []
    given += ["--weights", options.weights] if options.weights else []
    shared = ["--folder", place, "--lines", line, "--threads", options.threads, "--images", options.images]
    common.run_apart(__file__, *given, *shared, "--apart", "prepare")
    limits = ["--seconds", options.seconds, "--least", options.least]
    return common.run_apart(__file__, *shared, *limits, "--apart", "time_line", "--contestants", *options.contestants)


# The separate processes


def prepare(options: argparse.Namespace) -> dict:
    """Write the JPEGs, and the weights in the format of each contestant."""
    from contestants import config_of, make_checkpoints

    from hf_vit import HfViTImageProcessor
    from hf_vit.conversion import convert, export

    variant, folder = options.lines[0].split()[0], options.folder
    (folder / "images").mkdir(parents=True)
    for number, image in enumerate(_photographs(options)):
        image.resize((_WIDTH, _HEIGHT)).save(folder / "images" / f"{number:04}.jpg", quality=_QUALITY)
    if options.weights and variant == "Ti/16":
        model, _ = convert(options.weights)
        model.save_pretrained(folder / "hf_vit")
        export(model, folder / "timm", "timm")
        export(model, folder / "transformers", "transformers")
    else:
        make_checkpoints(config_of(variant, _SIDE), folder)
        model = _our_model(folder, "float32")
    HfViTImageProcessor(size=_SIDE).save_pretrained(folder / "hf_vit")
    export(model, folder / "model.onnx", "onnx", size=_SIDE)
    return {}


def _photographs(options: argparse.Namespace) -> list[Any]:
    from PIL import Image

    if not options.photographs:
        from image_processing import make_photograph

        whole = make_photograph(None)
        boxes = [(left, top, left + 1000, top + 750) for top in range(0, 2251, 375) for left in range(0, 3001, 500)]
        return [whole.crop(box) for box in boxes[: options.images]]
    files = sorted(file for file in options.photographs.rglob("*") if file.suffix.lower() in (".jpg", ".jpeg"))
    return [Image.open(file).convert("RGB") for file in files[: options.images]]


def time_line(options: argparse.Namespace) -> dict:
    """Load the contestants, compare their outputs, then time them."""
    files = sorted(str(file) for file in (options.folder / "images").iterdir())
    dtype = options.lines[0].split()[1]
    ready: dict[str, _Contestant] = {}
    left_out: dict[str, str] = {}
    for name in CONTESTANTS:
        if name in options.contestants:
            try:
                ready[name] = _LOADERS[name](options, files, dtype)
            except (ImportError, TypeError) as error:
                left_out[name] = str(error)
    answers = {name: contestant() for name, contestant in ready.items()}
    first = next(iter(answers.values()))
    agreement = {name: sum(map(int.__eq__, classes, first)) / len(files) for name, classes in answers.items()}
    if options.lines[0].startswith("Ti/16") and min(agreement.values()) < _MIN_AGREEMENT:
        common.report_progress(f"the classes of the contestants differ too often for equal weights: {agreement}")
    turns = common.take_turns(ready, options.seconds, options.least, warm_up=1)
    sizes = [len(Path(file).read_bytes()) for file in files]
    return {**common.stamp(), "turns": turns, "agreement": agreement, "left_out": left_out, "images": len(files),
            "bytes": statistics.mean(sizes)}  # fmt: skip


# Contestants


def _our_model(folder: Path, dtype: str) -> Any:
    import torch

    from hf_vit.loading import load

    return load(folder / "hf_vit", dtype=getattr(torch, dtype))[0]


def _ours(options: argparse.Namespace, files: list[str], dtype: str, backend: str = "torch") -> _Contestant:
    import hf_vit

    model = hf_vit.use_backend(_our_model(options.folder, dtype), backend, _BATCH)
    processor = hf_vit.HfViTImageProcessor.from_pretrained(options.folder / "hf_vit")

    def classify() -> list[int]:
        classes = hf_vit.predict((model, processor), files, top_k=1, batch_size=_BATCH)
        return [model.config.label2id[found.label] for [found] in classes]

    return classify


def _ours_in_turn(options: argparse.Namespace, files: list[str], dtype: str) -> _Contestant:
    import torch

    import hf_vit

    model = _our_model(options.folder, dtype).optimize_for_inference(batch_size=_BATCH)
    processor = hf_vit.HfViTImageProcessor.from_pretrained(options.folder / "hf_vit")

    @torch.inference_mode()
    def classify() -> list[int]:
        batches = (files[start : start + _BATCH] for start in range(0, len(files), _BATCH))
        logits = (model(**processor(batch, return_tensors="pt")).logits for batch in batches)
        return torch.cat(list(logits)).argmax(-1).tolist()

    return classify


def _transformers(options: argparse.Namespace, files: list[str], dtype: str) -> _Contestant:
    import torch
    from transformers import ViTForImageClassification, ViTImageProcessor, pipeline

    model = ViTForImageClassification.from_pretrained(options.folder / "transformers", dtype=getattr(torch, dtype))
    classifier: Any = pipeline(
        "image-classification", model=model, image_processor=ViTImageProcessor(), batch_size=_BATCH, top_k=1
    )  # ViTImageProcessor's defaults: squashed to 224, mean and deviation 0.5
    numbers: dict[str, int] = {label: int(number) for number, label in (model.config.id2label or {}).items()}

    def classify() -> list[int]:
        return [numbers[found[0]["label"]] for found in classifier(files)]

    return classify


def _timm(options: argparse.Namespace, files: list[str], dtype: str, in_workers: bool = False) -> _Contestant:
    import torch
    from contestants import LOADERS
    from PIL import Image
    from timm.data import create_transform  # pyright: ignore[reportMissingImports] - a peer
    from torch.utils.data import DataLoader, Dataset

    model = LOADERS["timm"](options.folder, getattr(torch, dtype)).eval()
    transform: Any = create_transform(
        _SIDE, interpolation="bilinear", crop_pct=1.0, crop_mode="squash", mean=(0.5,) * 3, std=(0.5,) * 3
    )

    class Files(Dataset):
        def __len__(self) -> int:
            return len(files)

        def __getitem__(self, index: int) -> torch.Tensor:
            return transform(Image.open(files[index]).convert("RGB"))

    workers = options.threads if in_workers else 0
    loader = DataLoader(Files(), _BATCH, num_workers=workers, persistent_workers=in_workers)

    @torch.inference_mode()
    def classify() -> list[int]:
        return torch.cat([model(images.to(getattr(torch, dtype))) for images in loader]).argmax(-1).tolist()

    return classify


def _openvino_program(options: argparse.Namespace, dtype: str, hint: str) -> Any:
    import openvino
    from openvino.preprocess import PrePostProcessor, ResizeAlgorithm

    core = openvino.Core()
    steps = PrePostProcessor(core.read_model(options.folder / "model.onnx"))
    levels = steps.input()
    levels.tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
    levels.tensor().set_spatial_static_shape(_HEIGHT, _WIDTH)
    levels.model().set_layout(openvino.Layout("NCHW"))
    levels.preprocess().convert_element_type(openvino.Type.f32).resize(ResizeAlgorithm.RESIZE_LINEAR)
    levels.preprocess().mean([127.5] * 3).scale([127.5] * 3)
    program = steps.build()
    program.reshape([1, _HEIGHT, _WIDTH, 3])
    settings = {"PERFORMANCE_HINT": hint, "INFERENCE_NUM_THREADS": options.threads}
    return core.compile_model(program, "CPU", {**settings, "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype]})


def _openvino(options: argparse.Namespace, files: list[str], dtype: str) -> _Contestant:
    program = _openvino_program(options, dtype, "LATENCY")
    return lambda: [int(program(_decode(file))[0].argmax()) for file in files]


def _openvino_asynchronous(options: argparse.Namespace, files: list[str], dtype: str) -> _Contestant:
    import openvino

    program = _openvino_program(options, dtype, "THROUGHPUT")

    def classify() -> list[int]:
        classes, requests = [0] * len(files), openvino.AsyncInferQueue(program)

        def receive(request: Any, number: int) -> None:
            classes[number] = int(request.get_output_tensor().data.argmax())

        requests.set_callback(receive)
        for number, file in enumerate(files):
            requests.start_async(_decode(file), number)
        requests.wait_all()
        return classes

    return classify


def _decode(file: str) -> Any:
    """Decode an image to (1, height, width, 3) uint8."""
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(Path(file).read_bytes())).convert("RGB"))[None]


_LOADERS: dict[str, Callable[[argparse.Namespace, list[str], str], _Contestant]] = {
    "hf_vit": _ours,
    "hf_vit, one after another": _ours_in_turn,
    "hf_vit openvino": partial(_ours, backend="openvino"),
    "transformers": _transformers,
    "timm": _timm,
    "timm, workers": partial(_timm, in_workers=True),
    "OpenVINO": _openvino,
    "OpenVINO, asynchronous": _openvino_asynchronous,
}


# Markdown


def as_markdown(results: dict[str, dict]) -> str:
    measured = []
    for line, result in results.items():
        ours = common.fastest(result["turns"], _OURS)
        measured.append((line, result["turns"], [Aim(ours, _PEERS, 1.3)] if ours else []))
    parts = [common.machine_as_markdown(results), common.aims_table(measured)]
    for line, result in results.items():
        rows = []
        for name, seconds in result["turns"].items():
            each = [1000 * turn / result["images"] for turn in seconds]
            low, median, high = common.quartiles(each)
            rows.append([name, f"{1000 / median:.1f}", f"{median:.1f} ({low:.1f} to {high:.1f})",
                         f"{result['agreement'][name]:.0%}"])  # fmt: skip
        columns = ["", "images/s", "ms per image, median (quartiles)", "likeliest class as ours"]
        remarks = [f"{result['images']} files of {result['bytes'] / 1000:.0f} kB on average, "
                   f"{len(next(iter(result['turns'].values())))} rounds."]  # fmt: skip
        remarks += [f"{name} left out: {reason}." for name, reason in result["left_out"].items()]
        parts.append(f"**{line}**\n\n{common.table(columns, rows)}\n\n{' '.join(remarks)}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
