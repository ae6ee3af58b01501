"""`hf-vit inspect` and `hf-vit compute`."""

import argparse
import json
from pathlib import Path

from ..files.output import new_file, refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command, need_analysis, parse_size, refuse_source


def add_commands(commands: Commands) -> None:
    """Add `inspect` and `compute`."""
    _add_inspect(commands)
    _add_compute(commands)


def _add_inspect(commands: Commands) -> None:
    command = add_command(commands, "inspect", _inspect, "write a report of a model: filters, positions, attention")
    command.add_argument("folder", help="model: a folder of hf_vit or transformers, or a name on the Hub")
    command.add_argument("--image", nargs="+", default=[], type=Path, metavar="FILE", help="images for attention maps")
    command.add_argument(
        "--output", required=True, type=Path, metavar="FOLDER", help="folder to write: pictures and report.html"
    )
    command.add_argument(
        "--image-size", type=parse_size, metavar="N|HxW", help="image size in pixels (default: the model's own)"
    )
    command.add_argument("--flow", action="store_true", help="also draw attention flow, which takes longer")
    command.add_argument("--overwrite", action="store_true", help="replace the output folder")


def _inspect(arguments: argparse.Namespace) -> None:
    refuse_source(arguments.output, arguments.folder)
    refuse_existing(arguments.output, arguments.overwrite)
    if arguments.flow and not arguments.image:
        raise ValueError("--flow needs --image, the images to draw it for")
    silence_progress_bars()
    need_analysis("matplotlib")
    if arguments.flow:
        need_analysis("scipy")
    from ..analysis.inspection import inspect
    from ..loading import load

    model, processor = load(arguments.folder, arguments.image_size, backend="eager")
    problems = inspect(
        model,
        processor,
        arguments.image,
        arguments.output,
        title=Path(arguments.folder).name or arguments.folder,
        flow=arguments.flow,
        overwrite=arguments.overwrite,
        progress=True,
    )
    print(f"saved {arguments.output / 'report.html'}")
    if problems:
        raise ValueError(f"{'; '.join(problems)} (the report is otherwise complete)")


def _add_compute(commands: Commands) -> None:
    command = add_command(commands, "compute", _compute, "count a model's operations, and estimate its training time")
    command.add_argument("model", nargs="?", help='model: a variant such as "B/16", a folder, or a name on the Hub')
    command.add_argument(
        "--image-size", type=parse_size, metavar="N|HxW", help="image size in pixels (default: the model's own)"
    )
    command.add_argument("--epochs", type=float, help="epochs of the training run, for --dataset-size (default 1)")
    command.add_argument("--dataset-size", type=float, metavar="IMAGES", help="images per epoch, such as 303e6")
    command.add_argument(
        "--accelerator", help="training hardware, for --dataset-size: tpu-v3-core (default), a100 or h100"
    )
    command.add_argument(
        "--utilization",
        type=float,
        help="share of the hardware's peak that is reached, for --dataset-size (default: the paper's, 0.38)",
    )
    command.add_argument("--table", type=int, choices=[2, 6], help="compare a table of the paper with our figures")
    command.add_argument(
        "--runs", type=Path, metavar="CSV", help="training runs to draw, with columns name, exaflops, accuracy, family"
    )
    command.add_argument(
        "--output", type=Path, metavar="PNG", help="picture to write: accuracy against compute, of --runs or --table 6"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output file")
    command.add_argument("--json", action="store_true", help="print JSON")


def _compute(arguments: argparse.Namespace) -> None:
    chosen = [name for name in ("model", "table", "runs") if getattr(arguments, name) is not None]
    if len(chosen) != 1:
        raise ValueError("give one of a model, --table 2, --table 6 and --runs CSV")
    _refuse_options_without(arguments)
    if arguments.runs is not None and arguments.output is None:
        raise ValueError("--runs needs --output, the picture to write")
    if arguments.output is not None and arguments.runs is None and arguments.table != 6:
        raise ValueError("--output needs --runs CSV or --table 6")
    if arguments.output is not None:
        _draw_runs(arguments)
    elif arguments.table is not None:
        _print_table(arguments)
    else:
        _print_compute(arguments)


def _refuse_options_without(arguments: argparse.Namespace) -> None:
    """Raise ValueError if an option has no effect without another argument."""
    of_training = ("epochs", "accelerator", "utilization")
    needs = {"image_size": "model", "dataset_size": "model", **dict.fromkeys(of_training, "dataset_size")}
    for option, other in needs.items():
        if getattr(arguments, option) is not None and getattr(arguments, other) is None:
            wanted = "a model" if other == "model" else "--dataset-size, the images per epoch"
            raise ValueError(f"--{option.replace('_', '-')} needs {wanted}")


def _draw_runs(arguments: argparse.Namespace) -> None:
    refuse_existing(arguments.output, arguments.overwrite)
    need_analysis("matplotlib")
    from ..analysis import plot_compute_accuracy, published_runs, read_runs

    published = arguments.runs is None
    runs = published_runs() if published else read_runs(arguments.runs)
    figure = plot_compute_accuracy(runs, "ImageNet accuracy [%]" if published else "accuracy [%]")
    with new_file(arguments.output, arguments.overwrite) as temporary:
        figure.savefig(temporary)
    print(f"saved {arguments.output}")


def _print_compute(arguments: argparse.Namespace) -> None:
    from ..analysis import compute_report

    compute = compute_report.account(
        arguments.model,
        arguments.image_size,
        1.0 if arguments.epochs is None else arguments.epochs,
        arguments.dataset_size,
        arguments.accelerator or "tpu-v3-core",
        arguments.utilization,
    )
    print(json.dumps(compute, indent=2) if arguments.json else compute_report.as_text(compute))


def _print_table(arguments: argparse.Namespace) -> None:
    from ..analysis import compute_report
    from ..analysis.training_runs import table_rows

    rows = table_rows(arguments.table)
    print(json.dumps(rows, indent=2) if arguments.json else compute_report.table_as_text(arguments.table, rows))
