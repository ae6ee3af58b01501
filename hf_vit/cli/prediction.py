"""`hf-vit predict`."""

import argparse
import json
from pathlib import Path

from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command
from .imports import quick_imports


def add_commands(commands: Commands) -> None:
    """Add `predict`."""
    command = add_command(commands, "predict", _predict, "classify image files")
    command.add_argument("folder", help="a folder of save_pretrained, or a name on the Hub")
    command.add_argument("images", nargs="+", type=Path, help="files of images")
    command.add_argument("--top-k", type=int, default=5, help="how many classes to name (default 5)")
    command.add_argument(
        "--backend", choices=["auto", "torch", "openvino", "onnxruntime"], help="what computes (default: plain torch)"
    )
    command.add_argument("--json", action="store_true", help="one JSON object per image")


def _predict(arguments: argparse.Namespace) -> None:
    if arguments.top_k < 1:
        raise ValueError(f"--top-k is {arguments.top_k}; it must be at least 1")
    if missing := [str(image) for image in arguments.images if not image.is_file()]:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    with quick_imports():
        silence_progress_bars()
        from ..models.prediction import predict

    found = predict(arguments.folder, arguments.images, arguments.top_k, backend=arguments.backend)
    for image, predictions in zip(arguments.images, found, strict=True):
        if arguments.json:
            print(json.dumps({"image": str(image), "predictions": [entry._asdict() for entry in predictions]}))
        else:
            print(image, *(f"  {entry.score:6.1%}  {entry.label}" for entry in predictions), sep="\n")
