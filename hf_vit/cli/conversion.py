"""`hf-vit convert` and `hf-vit export`."""

import argparse
import json
from pathlib import Path

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command, parse_size, refuse_source


def add_commands(commands: Commands) -> None:
    """Add `convert` and `export`."""
    _add_convert(commands)
    _add_export(commands)


def _add_convert(commands: Commands) -> None:
    command = add_command(commands, "convert", _convert, "convert a checkpoint to a folder that from_pretrained loads")
    command.add_argument(
        "source",
        help="checkpoint: an original .npz, a .safetensors or .pth of timm, torchvision, DeiT, MAE or DINO, or a "
        "folder of these or of transformers; as a path, https://..., gs://bucket/path or a name on the Hub; or "
        "augreg:best:B/16",
    )
    command.add_argument(
        "--index", help="AugReg's index.csv, for `augreg:best:` with variants that have no recommended file"
    )
    command.add_argument("output", type=Path, nargs="?", help="folder to write; not needed with --check")
    command.add_argument(
        "--check",
        action="store_true",
        help="write nothing; print the recognised model with reasons, unused weights, and assumptions",
    )
    command.add_argument("--labels", help="class names: imagenet1k, a text file with one per line, or a JSON file")
    command.add_argument(
        "--image-size",
        type=parse_size,
        metavar="N|HxW",
        help="image size in pixels, to which position embeddings are resampled",
    )
    command.add_argument(
        "--patch-size",
        type=parse_size,
        metavar="N|HxW",
        help="patch size in pixels to compute with; the stored kernel and positions are kept (FlexiViT)",
    )
    command.add_argument(
        "--position-grid", type=parse_size, metavar="RxC", help="rows x columns of the positions, if not square"
    )
    command.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="configuration field that the weights do not determine, e.g. num_attention_heads=4; may be repeated",
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output folder")


def _convert(arguments: argparse.Namespace) -> None:
    output: Path | None = None if arguments.check else arguments.output
    if output is not None:
        refuse_source(output, arguments.source)
        refuse_existing(output, arguments.overwrite)  # before the work, not after
    elif not arguments.check:
        raise ValueError("cannot convert: no output folder; give one, or --check")
    silence_progress_bars()
    from ..catalog import address_of
    from ..conversion import check, convert_to_folder
    from ..conversion.checking import left_out

    source = address_of(arguments.source, arguments.index)
    options = {name: getattr(arguments, name) for name in ("labels", "image_size", "patch_size", "position_grid")}
    if twice := [name for name, _ in arguments.set if options.get(name) is not None]:
        raise ValueError(f"{twice[0]} is given twice, with --set and its own option; give it once")
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
    command = add_command(commands, "export", _export, "write a model in another format")
    command.add_argument("folder", help="model: a folder of hf_vit or transformers, or a name on the Hub")
    command.add_argument(
        "output",
        type=Path,
        help="file or folder to write: a folder for transformers; either for timm; for onnx a .onnx file, or a folder "
        "to deploy (program, labels, preprocessing, predict.py); for openvino such a folder; for the others a file",
    )
    formats = ["jax", "transformers", "timm", "onnx", "openvino", "torch-export", "aot-inductor"]
    command.add_argument("--to", required=True, choices=formats, help="format to write")
    command.add_argument(
        "--dialect", choices=["vit_jax", "flax", "big_vision", "big_transfer"], help="for jax: array names in the .npz"
    )
    command.add_argument(
        "--beside",
        metavar="ORIGINAL",
        help="for jax: the converted file; its text tower, array names and number formats are kept",
    )
    command.add_argument(
        "--size",
        type=lambda text: text if text == "dynamic" else parse_size(text),
        metavar="N|HxW|dynamic",
        help="for onnx, openvino, torch-export and aot-inductor: image size of the program (default: the model's own)",
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output")


def _export(arguments: argparse.Namespace) -> None:
    refuse_source(arguments.output, arguments.folder)
    refuse_existing(arguments.output, arguments.overwrite)
    silence_progress_bars()
    from ..conversion import export
    from ..loading import load

    is_program_folder = arguments.to in ("onnx", "openvino") and arguments.output.suffix != ".onnx"
    model, processor = load(arguments.folder, backend=None if is_program_folder else "eager")
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
    if left and not arguments.output.is_dir():  # a folder says so itself
        print("pass to timm.create_model for the same results:", json.dumps(left))
    print(f"saved in {arguments.output}")


def _setting(text: str) -> tuple[str, object]:
    """Parse `name=value`; the value is JSON, or else text."""
    name, separator, value = text.partition("=")
    if not (separator and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"cannot read {text!r} (expected FIELD=VALUE)")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
