"""`hf-vit embed` and `hf-vit search`."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from ..files.output import refuse_existing
from ..files.progress import silence_progress_bars
from .arguments import Commands, add_command, need_analysis
from .image_list import SKIPPING, Reading, add_device, add_image_arguments, find_images, load_on, read_named

_PICTURES = (".png", ".jpg", ".pdf", ".svg")
_PROCESSOR = "preprocessor_config.json"


def add_commands(commands: Commands) -> None:
    """Add `embed` and `search`."""
    _add_embed(commands)
    _add_search(commands)


def _add_embed(commands: Commands) -> None:
    about = "write features of images (the input of a classifier's head) to a file"
    command = add_command(commands, "embed", _embed, about)
    command.epilog = SKIPPING
    command.add_argument("folder", help="model: a folder of save_pretrained, or a name on the Hub")
    add_image_arguments(command)
    command.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="file to write: .npz or .parquet (needs the extra training) for `hf-vit search`, or .csv",
    )
    command.add_argument(
        "--normalize", action="store_true", help="normalise the features of each image to length 1 (L2)"
    )
    command.add_argument("--overwrite", action="store_true", help="replace the output file")


def _add_search(commands: Commands) -> None:
    command = add_command(commands, "search", _search, "find the images most similar to a query image")
    command.add_argument("features", type=Path, help=".parquet or .npz file that `hf-vit embed` wrote")
    command.add_argument("query", help="query image: a file, or an https:// address")
    command.add_argument("--top-k", type=int, default=5, help="number of images to find (default 5)")
    command.add_argument(
        "--model", metavar="FOLDER", help="the model of the features, if its folder has moved since `hf-vit embed`"
    )
    add_device(command)
    command.add_argument("--json", action="store_true", help="print one JSON object per image")
    command.add_argument("--sheet", type=Path, metavar="FILE", help="picture to draw, of the query and the results")
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
    silence_progress_bars()
    from ..prediction import embed_batches

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
    """Identity of a model: its folder or name, and one SHA-256 of its weights and its preprocessing."""
    from transformers.utils.hub import cached_file

    from ..files.download import sha256_of

    place = Path(folder) if Path(folder).is_dir() else Path(str(cached_file(folder, "config.json"))).parent
    files = sorted(file for pattern in ("*.safetensors", "*.bin", _PROCESSOR) for file in place.glob(pattern))
    digest = hashlib.sha256("".join(f"{sha256_of(file)}  {file.name}\n" for file in files).encode())
    return {"model": str(place.resolve()) if place == Path(folder) else folder, "sha256": digest.hexdigest()}


def _search(arguments: argparse.Namespace) -> None:
    from .feature_files import Features

    if arguments.top_k < 1:
        raise ValueError(f"--top-k is {arguments.top_k}; it must be at least 1")
    if arguments.sheet:
        if arguments.sheet.suffix.lower() not in _PICTURES:
            raise ValueError(f"--sheet is {arguments.sheet} (expected a name that ends in {', '.join(_PICTURES)})")
        refuse_existing(arguments.sheet, arguments.overwrite)
        need_analysis("matplotlib")
    if not arguments.query.startswith("https://") and not Path(arguments.query).is_file():
        raise FileNotFoundError(f"no such file: {arguments.query}")
    stored = Features(arguments.features)
    silence_progress_bars()
    from ..prediction import embed, search

    folder = arguments.model or stored.about["model"]
    if Path(folder).is_absolute() and not Path(folder).is_dir():
        raise ValueError(f"cannot find {folder}, the model of the features; name its folder with --model")
    model, processor = load_on(folder, arguments.device)
    _check_same(arguments.features, stored.about, _identify(folder))
    (rows,), (cosines,) = search(stored.chunks(), embed((model, processor), [arguments.query]), arguments.top_k)
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
            "run hf-vit embed again, or name the folder of that model with --model"
        )
