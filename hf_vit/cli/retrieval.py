"""`hf-vit embed` and `hf-vit search`."""

import hashlib
import json as json_format
from pathlib import Path
from typing import Annotated, Any

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Count, Model, Overwrite, need_analysis
from .image_list import (
    Backend,
    BatchProgress,
    BatchSize,
    Dataset,
    Device,
    ImageColumn,
    Images,
    Split,
    find_images,
    load_on,
    read_named,
)

_PICTURES = (".png", ".jpg", ".pdf", ".svg")
_PROCESSOR = "preprocessor_config.json"


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
        Path,
        "file to write: .npz or .parquet (needs the extra training) for `hf-vit search`, or .csv",
        {"metavar": "FILE"},
    ],
    normalize: Annotated[bool, "normalise the features of each image to length 1 (L2)"] = False,
    overwrite: Overwrite = False,
) -> None:
    """Write features of images (the input of a classifier's head) to a file.

    An image that cannot be read is skipped, with a message on standard error; the exit status is then 1, or 2 if no
    image can be read.
    """
    from .feature_files import SUFFIXES, import_pyarrow, new_features  # which import NumPy

    if (suffix := output.suffix.lower()) not in SUFFIXES:
        raise ValueError(f"--output is {output} (expected a name that ends in {', '.join(SUFFIXES)})")
    refuse_existing(output, overwrite)  # before the work, not after
    if suffix == ".parquet":
        import_pyarrow(output.name)
    found = find_images(images, dataset, split, image_column)
    silence_progress_bars()
    from ..loading import local_model
    from ..prediction import embed_batches

    folder = str(local_model(folder))
    model, processor = load_on(folder, device, backend, encoder_alone=True)
    about = _identify(folder) | {"features": "pooler_output", "normalized": normalize}
    batches = embed_batches(model, processor, found, batch_size, normalize=normalize, skip_unreadable=True)
    progress, count, width = BatchProgress("hf-vit embed", found), 0, 0
    with new_features(output, about, overwrite) as write:
        for names, features in progress.follow(batches):
            write(names, features)
            count, width = count + len(names), features.shape[1]
    print(f"{count:,} images, {width} features of each: {output}")
    if suffix != ".csv":
        print(f"next: hf-vit search {output} QUERY.jpg")
    progress.end()


def _identify(folder: str) -> dict[str, Any]:
    """Identity of a model: its folder or name, and one SHA-256 of its weights and its preprocessing."""
    from transformers.utils.hub import cached_file

    from ..files.download import sha256_of

    place = Path(folder) if Path(folder).is_dir() else Path(str(cached_file(folder, "config.json"))).parent
    files = sorted(file for pattern in ("*.safetensors", "*.bin", _PROCESSOR) for file in place.glob(pattern))
    digest = hashlib.sha256("".join(f"{sha256_of(file)}  {file.name}\n" for file in files).encode())
    return {"model": str(place.resolve()) if place == Path(folder) else folder, "sha256": digest.hexdigest()}


def search(
    features: Annotated[Path, ".parquet or .npz file that `hf-vit embed` wrote"],
    query: Annotated[str, "query image: a file, or an https:// address"],
    *,
    top_k: Annotated[Count, "number of images to find"] = 5,
    model: Annotated[
        str | None, "the model of the features, if its folder has moved since `hf-vit embed`", {"metavar": "FOLDER"}
    ] = None,
    device: Device = "auto",
    json: Annotated[bool, "print one JSON object per image"] = False,
    sheet: Annotated[Path | None, "picture to draw, of the query and the results", {"metavar": "FILE"}] = None,
    overwrite: Annotated[bool, "replace the sheet"] = False,
) -> None:
    """Find the images most similar to a query image."""
    from .feature_files import Features

    if sheet:
        if sheet.suffix.lower() not in _PICTURES:
            raise ValueError(f"--sheet is {sheet} (expected a name that ends in {', '.join(_PICTURES)})")
        refuse_existing(sheet, overwrite)
        need_analysis("matplotlib")
    if not query.startswith("https://") and not Path(query).is_file():
        raise FileNotFoundError(f"no such file: {query}")
    stored = Features(features)
    silence_progress_bars()
    from .. import prediction

    folder = model or stored.about["model"]
    if Path(folder).is_absolute() and not Path(folder).is_dir():
        raise ValueError(f"cannot find {folder}, the model of the features; name its folder with --model")
    pair = load_on(folder, device)
    identity = _identify(folder)
    if stored.about["sha256"] != identity["sha256"]:
        raise ValueError(
            f"cannot search {features} with {identity['model']}: its weights or its preprocessing (sha256 "
            f"{identity['sha256'][:8]}) are not those of the features ({stored.about['sha256'][:8]}, of "
            f"{stored.about['model']}); run hf-vit embed again, or name the folder of that model with --model"
        )
    (rows,), (cosines,) = prediction.search(stored.chunks(), prediction.embed(pair, [query]), top_k)
    found = [(stored.names[row], float(cosine)) for row, cosine in zip(rows, cosines, strict=True)]
    for name, cosine in found:
        print(json_format.dumps({"image": name, "similarity": cosine}) if json else f"{cosine:7.4f}  {name}")
    if sheet:
        from ..demo.contact_sheet import draw_neighbors

        draw_neighbors(query, [(read_named(name), name, cosine) for name, cosine in found], sheet)
