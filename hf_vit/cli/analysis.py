"""`hf-vit inspect` and `hf-vit compute`."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from ..files.messages import silence_progress_bars
from ..files.output import new_file, refuse_existing
from .arguments import ImageSize, Model, Overwrite, check_figure, parse_positive


def inspect(
    folder: Model,
    *,
    image: Annotated[list[Path], "images whose attention is drawn", "FILE"] = (),  # pyright: ignore[reportArgumentType]
    output: Annotated[Path, "folder to write: report.html and its figures", "FOLDER"],
    target: Annotated[
        list[str], "classes whose relevance is drawn for each image, by name; with the faithfulness of the maps", "NAME"
    ] = (),  # pyright: ignore[reportArgumentType]
    image_size: ImageSize = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a report on a model: filters, position embeddings and attention."""
    refuse_existing(output, overwrite)
    silence_progress_bars()
    import matplotlib  # noqa: F401

    from ..analysis.inspection import inspect
    from ..loading import load

    model, processor = load(folder, image_size=image_size, backend="eager")
    title = Path(folder).name or folder
    problems = inspect(model, processor, image, output, title=title, targets=target, overwrite=overwrite)
    print(f"saved {output / 'report.html'}")
    if problems:
        raise ValueError(f"{'; '.join(problems)} (the report is otherwise complete)")


def compute(
    model: Annotated[str | None, 'model: a variant such as "B/16", a folder, or a name on the Hub'] = None,
    *,
    image_size: ImageSize = None,
    epochs: Annotated[
        float | None, "epochs of the training run, for --dataset-size (default 1)", {"type": parse_positive}
    ] = None,
    dataset_size: Annotated[float | None, "images per epoch, such as 303e6", "IMAGES", {"type": parse_positive}] = None,
    accelerator: Annotated[
        str | None, "training hardware, for --dataset-size: tpu-v3-core (default), a100 or h100"
    ] = None,
    utilization: Annotated[
        float | None,
        "share of the hardware's peak that is reached, for --dataset-size, 0 to 1 (default 0.38, as in the paper)",
    ] = None,
    table: Annotated[Literal[2, 6] | None, "print table 2 or 6 of the paper next to the values computed here"] = None,
    runs: Annotated[
        Path | None,
        "training runs to draw, with the columns name, exaflops, accuracy (in percent) and, optionally, family",
        "CSV",
    ] = None,
    output: Annotated[Path | None, "figure to write: accuracy against compute, for --runs or --table 6", "PNG"] = None,
    overwrite: Overwrite = False,
    json_: Annotated[bool, "print JSON"] = False,
) -> None:
    """Count a model's operations, and estimate its training time."""
    if [model, table, runs].count(None) != 2:
        raise ValueError("give one of these: a model, --table or --runs")
    training = {"epochs": epochs, "accelerator": accelerator, "utilization": utilization}
    settings = {"image_size": image_size, "dataset_size": dataset_size, **training}
    stated: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if model is None and stated:
        raise ValueError("--image-size, --dataset-size and its options need a model")
    if dataset_size is None and stated.keys() & training:
        raise ValueError("--epochs, --accelerator and --utilization need --dataset-size, the images per epoch")
    if (runs is not None) != (output is not None) and not (output is not None and table == 6):
        raise ValueError("--output is the figure of --runs CSV, which needs it, or of --table 6")
    if output is not None:
        check_figure("--output", output, overwrite)
        from ..analysis import plot_compute_accuracy, published_runs, read_runs

        if runs is None:
            figure = plot_compute_accuracy(published_runs(), "ImageNet accuracy [%]")
        else:
            figure = plot_compute_accuracy(read_runs(runs), "accuracy [%]")
        with new_file(output, overwrite) as temporary:
            figure.savefig(temporary)
        print(f"saved {output}")
        return
    from ..analysis.compute import as_text, estimate, table_as_text, table_rows

    result: Any
    if table is not None:
        result = table_rows(table)
        text = table_as_text(table, result)
    else:
        result = estimate(str(model), **stated)
        text = as_text(result)
    print(json.dumps(result, indent=2) if json_ else text)
