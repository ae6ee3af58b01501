"""`hf-vit <command>`: thin, and quick to answer, since it imports what a command needs when it runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..files.progress import silence_progress_bars
from .analysis import add_analysis_commands
from .arguments import add_command, parse_size
from .demo import add_demo_command
from .hub import add_hub_commands


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; bad input is one sentence on standard error and exit status 2."""
    parser = build_parser()
    arguments, settings = parser.parse_known_args(argv)
    if settings and not arguments.takes_settings:
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    arguments.settings = settings
    try:
        arguments.run(arguments)
    except (ValueError, OSError, ImportError) as error:  # of an extra that is not installed
        print(f"hf-vit {arguments.command}: {one_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"hf-vit {arguments.command}: interrupted; nothing half-written was left", file=sys.stderr)
        return 130
    return 0


def one_sentence(error: BaseException) -> str:
    """What is wrong, without the names of the validators that found it."""
    while type(error).__name__.startswith("StrictDataclass") and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-vit", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_convert(commands)
    _add_export(commands)
    _add_predict(commands)
    _add_training(commands)
    add_hub_commands(commands)
    add_analysis_commands(commands)
    add_demo_command(commands)
    return parser


def _add_convert(commands) -> None:
    command = add_command(commands, "convert", _convert, "convert a checkpoint to a folder that from_pretrained loads")
    command.add_argument(
        "source",
        help="an original .npz; .safetensors or .pth of timm, torchvision, DeiT, MAE or DINO; or a folder of these or "
        "of transformers: a path, https://..., gs://bucket/path or a name on the Hub; or augreg:best:B/16",
    )
    command.add_argument("--index", help="AugReg's index.csv, for `augreg:best:` of what is not recommended")
    command.add_argument("output", type=Path, help="the folder to write")
    command.add_argument("--labels", help="names of the classes: imagenet1k, or a file with one per line, or JSON")
    command.add_argument("--image-size", type=parse_size, metavar="N|HxW", help="resample the position embeddings")
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
    if arguments.output.exists() and not arguments.overwrite:  # before the work, not after
        raise FileExistsError(f"{arguments.output} exists; give --overwrite to replace it")
    silence_progress_bars()
    from hf_vit.catalog import address_of
    from hf_vit.conversion import convert_to_folder

    model = convert_to_folder(
        address_of(arguments.source, arguments.index),
        arguments.output,
        overwrite=arguments.overwrite,
        labels=arguments.labels,
        image_size=arguments.image_size,
        position_grid=arguments.position_grid,
        **dict(arguments.set),
    )
    record = model.conversion_record or {}
    print(f"{type(model).__name__}, {model.num_parameters():,} parameters, image size {model.config.image_size}")
    print(f"read as {record['dialect']['names']} from {record['source']} (sha256 {record['sha256'][:16]}...)")
    if record["left_out"]:
        print("the head of the checkpoint is all zero: it was left out, so this is an encoder without a head")
    print(f"saved in {arguments.output}")


def _add_export(commands) -> None:
    command = add_command(commands, "export", _export, "write a folder as somebody else's checkpoint")
    command.add_argument("folder", help="a folder of save_pretrained, here or of transformers, or a name on the Hub")
    command.add_argument("output", type=Path, help="the file to write; a folder for transformers, either for timm")
    formats = ["jax", "transformers", "timm", "onnx", "torch-export", "aot-inductor"]
    command.add_argument("--to", required=True, choices=formats, help="the format")
    command.add_argument("--dialect", choices=["vit_jax", "big_vision", "big_transfer"], help="names in the .npz")
    command.add_argument(
        "--size",
        type=lambda text: text if text == "dynamic" else parse_size(text),
        metavar="N|HxW|dynamic",
        help="of the images of a program (onnx, torch-export, aot-inductor); by default the model's own",
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output")


def _export(arguments: argparse.Namespace) -> None:
    if arguments.output.exists() and not arguments.overwrite:
        raise FileExistsError(f"{arguments.output} exists; give --overwrite to replace it")
    silence_progress_bars()
    from hf_vit.conversion import export

    model, processor = _load(arguments.folder)
    left = export(
        model,
        arguments.output,
        arguments.to,
        processor=processor,
        dialect=arguments.dialect,
        size=arguments.size,
        overwrite=arguments.overwrite,
    )
    if left:
        print("timm.create_model computes the same with", json.dumps(left))
    print(f"saved in {arguments.output}")


def _load(folder: str):
    """A model and its image processor, None where it was saved without; converted, where it is one of transformers."""
    from transformers.configuration_utils import PreTrainedConfig

    from hf_vit import HfViTImageProcessor
    from hf_vit.conversion import convert
    from hf_vit.models.loading import load_model
    from hf_vit.models.upstream import is_of_transformers

    if is_of_transformers(PreTrainedConfig.get_config_dict(folder)[0]):
        return convert(folder)
    model = load_model(folder)
    try:
        return model, HfViTImageProcessor.from_pretrained(folder)
    except OSError:
        return model, None


def _add_predict(commands) -> None:
    command = add_command(commands, "predict", _predict, "classify image files")
    command.add_argument("folder", help="a folder of save_pretrained, or a name on the Hub")
    command.add_argument("images", nargs="+", type=Path)
    command.add_argument("--top-k", type=int, default=5, help="how many classes to name (default 5)")
    command.add_argument("--json", action="store_true", help="one JSON object per image")


def _predict(arguments: argparse.Namespace) -> None:
    if arguments.top_k < 1:
        raise ValueError(f"--top-k is {arguments.top_k}; it must be at least 1")
    if missing := [str(image) for image in arguments.images if not image.is_file()]:
        raise FileNotFoundError(f"no such file: {', '.join(missing)}")
    silence_progress_bars()
    from hf_vit.models.prediction import predict

    for image, predictions in zip(
        arguments.images, predict(arguments.folder, arguments.images, arguments.top_k), strict=True
    ):
        if arguments.json:
            print(json.dumps({"image": str(image), "predictions": [entry._asdict() for entry in predictions]}))
        else:
            print(image, *(f"  {entry.score:6.1%}  {entry.label}" for entry in predictions), sep="\n")


def _add_training(commands) -> None:
    about = {
        "train": "fine-tune the model of --model, or without one train from random weights",
        "evaluate": "measure a model: accuracy, ReaL, ObjectNet, few-shot, linear probe, k-NN or VTAB",
    }
    for name, what in about.items():
        command = commands.add_parser(name, help=what, add_help=False)  # the settings have a parser of their own
        command.set_defaults(run=_train, takes_settings=True)


def _train(arguments: argparse.Namespace) -> None:
    from hf_vit.training import commands

    if arguments.command == "evaluate":
        commands.main(commands.evaluate, arguments.settings)
    elif any(setting.split("=")[0] == "--model" for setting in arguments.settings):
        commands.main(commands.finetune, arguments.settings)
    else:
        commands.main(commands.pretrain, arguments.settings)


def _setting(text: str) -> tuple[str, object]:
    """`name=value`, the value as JSON or, where it is none, as text."""
    name, separator, value = text.partition("=")
    if not (separator and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
