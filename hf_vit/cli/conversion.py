"""`hf-vit convert` and `hf-vit export`."""

import argparse
import json
from pathlib import Path

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command, load_or_convert, parse_size
from .imports import quick_imports


def add_commands(commands: Commands) -> None:
    """Add `convert` and `export`."""
    _add_convert(commands)
    _add_export(commands)


def _add_convert(commands: Commands) -> None:
    command = add_command(commands, "convert", _convert, "convert a checkpoint to a folder that from_pretrained loads")
    command.add_argument(
        "source",
        help="an original .npz; .safetensors or .pth of timm, torchvision, DeiT, MAE or DINO; or a folder of these or "
        "of transformers: a path, https://..., gs://bucket/path or a name on the Hub; or augreg:best:B/16",
    )
    command.add_argument("--index", help="AugReg's index.csv, for `augreg:best:` of what is not recommended")
    command.add_argument("output", type=Path, nargs="?", help="the folder to write; none with --check")
    command.add_argument(
        "--check",
        action="store_true",
        help="write nothing: print what is recognised, each inference with its reason, and what is left out or assumed",
    )
    command.add_argument("--labels", help="names of the classes: imagenet1k, or a file with one per line, or JSON")
    command.add_argument("--image-size", type=parse_size, metavar="N|HxW", help="resample the position embeddings")
    command.add_argument(
        "--patch-size",
        type=parse_size,
        metavar="N|HxW",
        help="compute with patches of this size; the stored kernel and positions are kept (FlexiViT)",
    )
    command.add_argument(
        "--position-grid", type=parse_size, metavar="RxC", help="rows x columns, where it is no square"
    )
    command.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the configuration that no array shows, such as num_attention_heads=4; may be repeated",
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output folder")


def _convert(arguments: argparse.Namespace) -> None:
    output: Path | None = None if arguments.check else arguments.output
    if output is not None:
        refuse_existing(output, arguments.overwrite)  # before the work, not after
    elif not arguments.check:
        raise ValueError("cannot convert without the folder to write; give it, or --check")
    with quick_imports():
        silence_progress_bars()
        from ..catalog import address_of
        from ..conversion import check, convert_to_folder
        from ..conversion.checking import left_out

    source = address_of(arguments.source, arguments.index)
    options = {name: getattr(arguments, name) for name in ("labels", "image_size", "patch_size", "position_grid")}
    options |= dict(arguments.set)
    if output is None:
        print(check(source, **options))
        return
    model = convert_to_folder(source, output, overwrite=arguments.overwrite, **options)
    record = model.conversion_record or {}
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, image size {model.config.image_size}")
    identity = f" (sha256 {record['sha256'][:16]}...)" if "sha256" in record else ""
    print(f"read as {record['dialect']['names']} from {record['source']}{identity}")
    for sentence in [*left_out(record), *(f"assumed: {sentence}" for sentence in record["assumed"])]:
        print(sentence)
    print(f"saved in {output}")


def _add_export(commands: Commands) -> None:
    command = add_command(commands, "export", _export, "write a folder as somebody else's checkpoint")
    command.add_argument("folder", help="a folder of save_pretrained, here or of transformers, or a name on the Hub")
    command.add_argument(
        "output",
        type=Path,
        help="what to write: a file; for transformers a folder, for timm either; for onnx a file that ends in .onnx; "
        "for openvino, or onnx without that ending, a folder to deploy: program, labels, preprocessing, predict.py",
    )
    formats = ["jax", "transformers", "timm", "onnx", "openvino", "torch-export", "aot-inductor"]
    command.add_argument("--to", required=True, choices=formats, help="the format (OUTPUT says what it is)")
    command.add_argument(
        "--dialect", choices=["vit_jax", "flax", "big_vision", "big_transfer"], help="names in the .npz"
    )
    command.add_argument(
        "--beside",
        metavar="ORIGINAL",
        help="for jax: the file that was converted; its text tower, names and number formats are kept",
    )
    command.add_argument(
        "--size",
        type=lambda text: text if text == "dynamic" else parse_size(text),
        metavar="N|HxW|dynamic",
        help="of the images of a program (onnx, openvino, torch-export, aot-inductor); by default the model's own",
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output")


def _export(arguments: argparse.Namespace) -> None:
    refuse_existing(arguments.output, arguments.overwrite)
    with quick_imports():
        silence_progress_bars()
        from ..conversion import export

    model, processor = load_or_convert(arguments.folder)
    left = export(
        model,
        arguments.output,
        arguments.to,
        processor=processor,
        dialect=arguments.dialect,
        size=arguments.size,
        beside=arguments.beside,
        overwrite=arguments.overwrite,
    )
    if left:
        print("timm.create_model computes the same with", json.dumps(left))
    print(f"saved in {arguments.output}")


def _setting(text: str) -> tuple[str, object]:
    """Parse `name=value`, the value as JSON or, where it is none, as text."""
    name, separator, value = text.partition("=")
    if not (separator and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
