"""`hf-vit predict`."""

import argparse
import math
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from ..files.output import new_file, refuse_existing
from .arguments import Count, ImageSize, Model, Overwrite
from .image_list import (
    Backend,
    BatchProgress,
    BatchSize,
    Dataset,
    Device,
    ImageColumn,
    Images,
    Split,
    fetch,
    find_images,
    load_on_device,
    open_program,
)
from .parts import DryRun, Extend, NumWorkers, Part, PartOptions, UnitSize, is_folder, run_parts

_FORMATS = {"": "text", ".txt": "text", ".csv": "csv", ".jsonl": "jsonl"}  # by the suffix of --output


def _parse_threshold(text: str) -> float | str:
    if text == "auto":
        return text
    with suppress(ValueError):
        threshold = float(text)
        if not math.isnan(threshold):
            return threshold
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto")


def _choose_format(stated: str | None, json_: bool, output: str | None) -> str:
    """Return the format that --format, --json or the suffix of --output states."""
    if json_ and stated not in (None, "jsonl"):
        raise ValueError(f"--json and --format {stated} contradict each other; remove one of them")
    if json_:
        return "jsonl"
    suffix = Path(output or "").suffix.lower()
    if stated is None and suffix not in _FORMATS:
        endings = ", ".join(filter(None, _FORMATS))
        raise ValueError(f"--output is {output} (expected a name that ends in {endings}, or --format)")
    return stated or _FORMATS[suffix]


def predict(
    folder: Model,
    images: Images = (),  # pyright: ignore[reportArgumentType]
    *,
    dataset: Dataset = None,
    split: Split = None,
    image_column: ImageColumn = None,
    batch_size: BatchSize = 8,
    device: Device = "auto",
    backend: Backend = None,
    image_size: ImageSize = None,
    preset: Annotated[
        str | None, "preprocessing preset, such as vit_jax, augreg, timm or native (default: the model's own)"
    ] = None,
    top_k: Annotated[Count, "number of classes per image"] = 5,
    threshold: Annotated[
        float | Literal["auto"] | None,
        "print all classes with at least this score; auto: each class's own threshold, chosen in multi-label training",
        {"type": _parse_threshold, "metavar": "SCORE"},
    ] = None,
    coverage: Annotated[
        float | None,
        "print the prediction set with this coverage, such as 0.95; needs a model from `hf-vit calibrate`",
    ] = None,
    reject: Annotated[
        bool,
        "print no class for an image that shows none of the classes; needs a model from `hf-vit calibrate`",
    ] = False,
    format_: Annotated[
        Literal["text", "jsonl", "csv"] | None,
        "output format; jsonl: one JSON object per image; csv: one row per image and class (default: by the suffix of "
        "--output, .txt, .csv or .jsonl; else text)",
    ] = None,
    json_: Annotated[bool, "same as --format jsonl"] = False,
    output: Annotated[
        str | None,
        "file to write, instead of standard output; or a folder, ending in a slash, for work in parts by any number of "
        "processes, see docs/scale.md",
        "FILE|FOLDER/",
    ] = None,
    num_workers: NumWorkers = None,
    unit_size: UnitSize = None,
    part: Part = None,
    extend: Extend = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Classify images.

    An image that cannot be read is skipped, with a message on standard error; the exit status is then 1, or 2 if no
    image can be read. In a folder, it is a row with the reason, and the exit status is 0.
    """
    options = PartOptions(part, unit_size, extend, dry_run)
    options.check(output)
    chosen: dict[str, Any] = {"top_k": top_k, "threshold": threshold, "coverage": coverage, "reject": reject}
    if is_folder(output):
        if json_ or format_:
            raise ValueError("--output is a folder, whose parts are .parquet; remove --json or --format")
        from ..inference.predictor import Predictor

        pair = load_on_device(folder, device, backend, batch_size, image_size=image_size, preset=preset)
        predictor = Predictor(pair, "classify", None, batch_size, num_workers, **chosen)
        run_parts(predictor, str(output), images, dataset, split, image_column, {"model": folder}, options)
        return
    kind = _choose_format(format_, json_, output)
    if output:
        refuse_existing(output, overwrite)  # before the work, not after
    found = find_images(images, dataset, split, image_column)
    from ..files.predictions import predictions_writer

    program = open_program(
        folder, len(found), "logits", device=device, backend=backend, image_size=image_size, preset=preset
    )
    if program is not None:
        is_regression = program.program["scores"] == "none"
        batches = program.predict(found, batch_size, fetch, **chosen)
    else:
        from ..inference.predictor import Predictor
        from ..models.scores import score_function

        model, processor = load_on_device(
            folder, device, backend, min(batch_size, len(found)), image_size=image_size, preset=preset
        )
        is_regression = score_function(model.config) == "none"
        predictor = Predictor((model, processor), batch_size=batch_size, workers=num_workers, **chosen)
        batches = predictor.batches(found, skip_unreadable=True)
    progress = BatchProgress("hf-vit predict", found)
    with ExitStack() as opened:
        file = sys.stdout
        if output:
            draft = opened.enter_context(new_file(output, overwrite))
            file = opened.enter_context(open(draft, "w", encoding="utf-8", errors="backslashreplace", newline=""))
        write = predictions_writer(kind, file, is_regression)
        for names, classes in progress.follow(batches):
            for name, predictions in zip(names, classes, strict=True):
                write(name, predictions)
    progress.end()
