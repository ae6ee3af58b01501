"""`hf-vit embed` and `hf-vit search`."""

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from ..files.messages import silence_progress_bars
from ..files.output import refuse_existing
from .arguments import Count, Model, Overwrite, check_figure
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
    read_named,
)
from .parts import DryRun, Extend, NumWorkers, Part, PartOptions, UnitSize, is_folder, run_parts

_MODEL_FILES = ("*.safetensors", "*.bin", "preprocessor_config.json")
_ROWS_PER_GROUP = 4  # rows to search for per group of near duplicates


def embed(
    folder: Model,
    images: Images = (),  # pyright: ignore[reportArgumentType]
    *,
    dataset: Dataset = None,
    split: Split = None,
    image_column: ImageColumn = None,
    batch_size: BatchSize = 8,
    device: Device = "auto",
    backend: Backend = None,
    output: Annotated[
        str,
        "file to write: .npz or .parquet (needs hf_vit[training]) for `hf-vit search`, or .csv; or a folder, ending in "
        "a slash, for work in parts by any number of processes, see docs/scale.md",
        "FILE|FOLDER/",
    ],
    normalize: Annotated[bool, "scale the features of each image to L2 norm 1"] = False,
    num_workers: NumWorkers = None,
    unit_size: UnitSize = None,
    part: Part = None,
    extend: Extend = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
) -> None:
    """Write the features of images (the input of the classifier's head) to a file, or to a folder in parts.

    An image that cannot be read is skipped, with a message on standard error; the exit status is then 1, or 2 if no
    image can be read. In a folder, it is a row with the reason, and the exit status is 0.
    """
    options = PartOptions(part, unit_size, extend, dry_run)
    options.check(output)
    if is_folder(output):
        silence_progress_bars()
        from ..inference.predictor import Predictor
        from ..loading import resolve_model

        folder = str(resolve_model(folder))
        pair = load_on_device(folder, device, backend, batch_size, features=True)
        about = identify_model(folder) | {"features": "pooler_output", "normalized": normalize}
        about["jpeg_dct"] = pair[1].jpeg_dct
        predictor = Predictor(pair, "embed", None, batch_size, num_workers, normalize=normalize)
        run_parts(predictor, output, images, dataset, split, image_column, about, options)
        return
    from ..inference.feature_files import SUFFIXES, write_features  # which import NumPy

    suffix = Path(output).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"--output is {output} (expected a name that ends in {', '.join(SUFFIXES)}, or a slash)")
    refuse_existing(output, overwrite)  # before the work, not after
    if suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401
    found = find_images(images, dataset, split, image_column)
    program = open_program(folder, len(found), "pooler_output", device=device, backend=backend)
    if program is not None:
        about = program.about or identify_model(folder)
        jpeg_dct = program.jpeg_dct
        batches = program.embed(found, batch_size, fetch, normalize)
    else:
        silence_progress_bars()
        from ..inference.predictor import Predictor
        from ..loading import resolve_model

        folder = str(resolve_model(folder))
        model, processor = load_on_device(folder, device, backend, min(batch_size, len(found)), features=True)
        about = identify_model(folder)
        jpeg_dct = processor.jpeg_dct
        predictor = Predictor((model, processor), "embed", None, batch_size, num_workers, normalize=normalize)
        batches = predictor.batches(found, skip_unreadable=True)
    about |= {"features": "pooler_output", "normalized": normalize, "jpeg_dct": jpeg_dct}
    progress = BatchProgress("hf-vit embed", found)
    count, width = write_features(Path(output), about, progress.follow(batches), overwrite)
    print(f"{count:,} {'image' if count == 1 else 'images'}, {width} features each: {output}")
    if suffix != ".csv":
        print(f"next: hf-vit search {output} QUERY.jpg")
    progress.end()


def identify_model(folder: str) -> dict[str, Any]:
    """Return the folder or name of a model, and one SHA-256 of its weights and its preprocessing."""
    from ..files.manifest import sha256_of
    from ..files.model_files import find_file
    from ..runtimes.runner import is_deployed

    path = Path(folder) if Path(folder).is_dir() else Path(str(find_file(folder, "config.json", {}))).parent
    patterns = ("*.onnx", "*.xml", "*.bin", "preprocessing.json") if is_deployed(path) else _MODEL_FILES
    files = sorted(file for pattern in patterns for file in path.glob(pattern))
    digest = hashlib.sha256("".join(f"{sha256_of(file)}  {file.name}\n" for file in files).encode())
    return {"model": str(path.resolve()) if path == Path(folder) else folder, "sha256": digest.hexdigest()}


def search(
    features: Annotated[Path, ".parquet or .npz file, or folder of parts, that `hf-vit embed` wrote"],
    queries: Annotated[
        list[str], "query images: files, folders (with subfolders, sorted), quoted globs, or https:// URLs"
    ],
    *,
    top_k: Annotated[Count, "number of images to find for each query"] = 5,
    group: Annotated[
        bool, "group each result with its near-duplicates (re-encoded, resized, mirrored or cropped)"
    ] = False,
    model: Annotated[
        str | None,
        "model that computed the features; needed only if its folder has moved since `hf-vit embed`",
        "FOLDER",
    ] = None,
    device: Device = "auto",
    json_: Annotated[bool, "print one JSON object per result"] = False,
    sheet: Annotated[
        Path | None, "picture to write with one query and its results: .png, .jpg, .pdf or .svg", "FILE"
    ] = None,
    overwrite: Annotated[bool, "replace the sheet"] = False,
) -> None:
    """Find the images most similar to each query image.

    A query that cannot be read is skipped, with a message on standard error; the exit status is then 1, or 2 if no
    query can be read.
    """
    import numpy as np

    from ..inference.feature_files import Features

    found = find_images(queries)
    if sheet:
        if len(found) > 1:
            raise ValueError(f"--sheet draws only one query, but {len(found)} are given")
        check_figure("--sheet", sheet, overwrite)
    stored = Features(features)
    from ..inference.search import search as search_features

    folder = model or stored.about["model"]
    if identify_model(folder)["sha256"] != stored.about["sha256"]:
        raise ValueError(
            f"{features} was computed by another model than {folder}, by {stored.about['model']}; give that model's "
            "folder with --model, or run hf-vit embed again"
        )
    program = open_program(folder, len(found), "pooler_output", device=device)
    if program is not None:
        batches = program.embed(found, fetch=fetch)
    else:
        from ..inference.predictor import Predictor

        encoder, processor = load_on_device(folder, device)
        if stored.about["jpeg_dct"] != processor.jpeg_dct:
            processor.update(jpeg_dct=stored.about["jpeg_dct"])
            decoder = f"with jpeg_dct {processor.jpeg_dct}"
            print(f"queries are decoded as the images of {features}, {decoder}", file=sys.stderr)
        batches = Predictor((encoder, processor), "embed").batches(found, skip_unreadable=True)
    progress = BatchProgress("hf-vit search", found)
    names = []
    vectors = []
    for read, outputs in progress.follow(batches):
        names += read
        vectors.append(outputs)
    count = top_k * _ROWS_PER_GROUP  # some may be duplicates of each other
    rows, cosines = search_features(stored.chunks(), np.concatenate(vectors), count)
    known = stored.names(np.unique(rows))
    duplicates = _find_duplicates(stored, known) if group else set()
    for query, its_rows, its_cosines in zip(names, rows.tolist(), cosines.tolist(), strict=True):
        results = _group_duplicates(its_rows, its_cosines, duplicates, known)[:top_k]
        shown = query if len(found) > 1 else None
        if json_:
            _print_json(shown, results, with_duplicates=group)
        else:
            _print_text(shown, results)
        if sheet:
            from ..demo.contact_sheet import draw_neighbors

            draw_neighbors(query, [(read_named(name), name, cosine) for (name, *_), cosine in results], sheet)
    progress.end()


def _print_text(query: str | None, results: list[tuple[list[str], float]]) -> None:
    """Print the results of a query, each with its duplicates; the query first, where there are several."""
    if query is not None:
        print(query)
    for (name, *duplicates), cosine in results:
        print(f"{cosine:7.4f}  {name}")
        for duplicate in duplicates:
            print(f"         = {duplicate}")


def _print_json(query: str | None, results: list[tuple[list[str], float]], with_duplicates: bool) -> None:
    for (name, *duplicates), cosine in results:
        about: dict[str, Any] = {"image": name, "similarity": cosine}
        if query is not None:
            about = {"query": query, **about}
        if with_duplicates:
            about["duplicates"] = duplicates
        print(json.dumps(about))


def _find_duplicates(stored: Any, names: dict[int, str]) -> set[tuple[int, int]]:
    """Return the pairs of near duplicates among rows, in both orders; images that cannot be read have none."""
    import numpy as np
    import torch
    from PIL import Image

    from ..auditing.duplicates import SIDE, find_near_duplicates
    from ..files.download import fetch_image
    from ..files.pictures import read_for_display
    from ..models.image_reading import ImageReadingError

    pictures: dict[int, Any] = {}
    for row, name in names.items():
        with suppress(ImageReadingError, OSError):
            picture = read_for_display(fetch_image(read_named(name)), 4 * SIDE).convert("L")
            pictures[row] = np.asarray(picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    if len(pictures) < 2:
        return set()
    known = list(pictures)
    features = torch.from_numpy(stored.rows(np.array(known)))
    levels = torch.from_numpy(np.stack(list(pictures.values())))
    found = find_near_duplicates(features, levels)
    pairs = {(known[first], known[second]) for first, second in found}
    return pairs | {(second, first) for first, second in pairs}


def _group_duplicates(
    rows: list[int], cosines: list[float], duplicates: set[tuple[int, int]], names: dict[int, str]
) -> list[tuple[list[str], float]]:
    """Group the results of a query by near duplicates; return (names, highest cosine), the most similar group first."""
    groups: list[tuple[list[int], float]] = []
    for row, cosine in zip(rows, cosines, strict=True):
        for group, _ in groups:
            if any((row, other) in duplicates for other in group):
                group.append(row)
                break
        else:
            groups.append(([row], cosine))
    return [([names[row] for row in group], cosine) for group, cosine in groups]
