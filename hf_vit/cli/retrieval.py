"""`hf-vit embed` and `hf-vit search`."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command
from .image_list import SKIPPING, Reading, add_image_arguments, find_images, load_on, read_named
from .imports import quick_imports

_PROCESSOR = "preprocessor_config.json"


def add_commands(commands: Commands) -> None:
    """Add `embed` and `search`."""
    _add_embed(commands)
    _add_search(commands)


def _add_embed(commands: Commands) -> None:
    about = "write features of images: what a classifier's head sees"
    command = add_command(commands, "embed", _embed, about)
    command.epilog = SKIPPING
    command.add_argument("folder", help="a folder of save_pretrained, or a name on the Hub")
    add_image_arguments(command)
    command.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="a .parquet (extra training) or .npz file, which `hf-vit search` reads, or a .csv file",
    )
    command.add_argument(
        "--normalize", action="store_true", help="divide the features of an image by their length (L2)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output file")


def _add_search(commands: Commands) -> None:
    command = add_command(commands, "search", _search, "find the images that are most like another")
    command.add_argument("features", type=Path, help="a .parquet or .npz file that `hf-vit embed` wrote")
    command.add_argument("query", help="an image: a file, or an https:// address")
    command.add_argument("--top-k", type=int, default=5, help="how many images to name (default 5)")
    command.add_argument(
        "--model", metavar="FOLDER", help="where the model is now that computed the features (default: where it was)"
    )
    command.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps, ... (default cpu)")
    command.add_argument("--json", action="store_true", help="one JSON object per image")
    command.add_argument("--sheet", type=Path, metavar="FILE", help="draw the query and what was found, as a .png")
    command.add_argument("--overwrite", action="store_true", help="replace the sheet")


def _embed(arguments: argparse.Namespace) -> None:
    from .feature_files import SUFFIXES, import_pyarrow, new_features  # which import NumPy

    output = arguments.output
    if (suffix := output.suffix.lower()) not in SUFFIXES:
        raise ValueError(f"--output is {output} (expected a name that ends in {', '.join(SUFFIXES)})")
    refuse_existing(output, arguments.overwrite)  # before the work, not after
    if suffix == ".parquet":
        import_pyarrow(output.name)
    images = find_images(arguments)
    with quick_imports():
        silence_progress_bars()
        from ..models.prediction import embed_batches

    model, processor = load_on(arguments.folder, arguments.device, arguments.backend, encoder_alone=True)
    about = _identify(arguments.folder) | {"features": "pooler_output", "normalized": arguments.normalize}
    batches = embed_batches(
        model, processor, images, arguments.batch_size, normalize=arguments.normalize, skip_unreadable=True
    )
    reading, count, width = Reading("hf-vit embed", images), 0, 0
    with new_features(output, about, arguments.overwrite) as write:
        for names, features in reading.follow(batches):
            write(names, features)
            count, width = count + len(names), features.shape[1]
    print(f"{count:,} images, {width} features of each: {output}")
    if suffix != ".csv":
        print(f"next: hf-vit search {output} QUERY.jpg")
    reading.end()


def _identify(folder: str) -> dict[str, Any]:
    """What tells a loaded model from others: where it is, and one sha256 of its weights and of its preprocessing."""
    from transformers.utils.hub import cached_file

    from ..files.download import sha256_of

    place = Path(folder) if Path(folder).is_dir() else Path(str(cached_file(folder, "config.json"))).parent
    files = sorted(file for pattern in ("*.safetensors", _PROCESSOR) for file in place.glob(pattern))
    digest = hashlib.sha256("".join(f"{sha256_of(file)}  {file.name}\n" for file in files).encode())
    return {"model": str(place.resolve()) if place == Path(folder) else folder, "sha256": digest.hexdigest()}


def _search(arguments: argparse.Namespace) -> None:
    from .feature_files import Features

    if arguments.top_k < 1:
        raise ValueError(f"--top-k is {arguments.top_k}; it must be at least 1")
    if arguments.sheet:
        refuse_existing(arguments.sheet, arguments.overwrite)
    if not arguments.query.startswith("https://") and not Path(arguments.query).is_file():
        raise FileNotFoundError(f"no such file: {arguments.query}")
    stored = Features(arguments.features)
    with quick_imports():
        silence_progress_bars()
        from ..models.prediction import embed, search

    folder = arguments.model or stored.about["model"]
    if Path(folder).is_absolute() and not Path(folder).is_dir():
        raise ValueError(f"the features are of {folder}, which is not there; say with --model where it is now")
    model, processor = load_on(folder, arguments.device)
    _check_same(arguments.features, stored.about, _identify(folder))
    (rows,), (cosines,) = search(stored.chunks(), embed(model, processor, [arguments.query]), arguments.top_k)
    found = [(stored.names[row], float(cosine)) for row, cosine in zip(rows, cosines, strict=True)]
    for name, cosine in found:
        print(json.dumps({"image": name, "similarity": cosine}) if arguments.json else f"{cosine:7.4f}  {name}")
    if arguments.sheet:
        from ..demo.contact_sheet import draw_neighbors

        draw_neighbors(arguments.query, [(read_named(name), name, cosine) for name, cosine in found], arguments.sheet)


def _check_same(path: Path, about: dict[str, Any], model: dict[str, Any]) -> None:
    if about["sha256"] != model["sha256"]:
        raise ValueError(
            f"cannot search {path} with {model['model']}: its weights or its preprocessing (sha256 "
            f"{model['sha256'][:8]}) are not those of the features ({about['sha256'][:8]}, of {about['model']}); "
            "run hf-vit embed again, or say with --model where that model is"
        )
