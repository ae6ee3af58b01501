"""Write a dataset as WebDataset tars (`hf-vit shard`): shuffled, with an index, and resized on request."""

import io
import multiprocessing
import tarfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from tqdm import tqdm

from ..files.output import new_file, write_json
from ..files.pictures import to_mode
from ..files.reading import read_json_object
from ..models.image_reading import ImageReadingError, load_image
from ..settings.fields import DataSettings, check_bounds, setting
from .fingerprint import fingerprint_data
from .samplers import ShuffledSampler
from .shards import index_shards
from .sources import open_source
from .splits import Split, open_named
from .summary import log_splits

_PLAN = "shards.json"
_MAGIC = {b"\xff\xd8\xff": "jpg", b"\x89PNG": "png", b"RIFF": "webp", b"GIF8": "gif", b"BM": "bmp"}


@dataclass(frozen=True)
class ShardPlan:
    """Plan of the shards; it is saved next to them, so that a second run with the same plan continues the first."""

    source: str  # dataset, as for `sources.load_split`
    config: str | None = setting(None, "configuration of a Hub dataset")
    layout: Literal["class", "split/class"] | None = setting(
        None, "what the folders at the top are, as in finetune; by default found"
    )
    size: int | None = setting(
        None, "shorter side in pixels to which larger images are resized; none: keep their size", at_least=1
    )
    quality: int = setting(95, "JPEG quality of resized images", at_least=1, at_most=100)
    images: int = setting(10_000, "number of images per shard", at_least=1)

    def __post_init__(self):
        check_bounds(self)


def write_shards(plan: ShardPlan, output: Path, splits: list[str], workers: int) -> dict[str, int]:
    """Write the shards of some splits (`train-00000.tar`, ...) and their index.

    Args:
        splits: names of the splits; an empty list means all.
        workers: number of processes that read, resize and write.

    Returns:
        The number of images written, by split.

    Raises:
        ValueError: the folder has shards of another plan or of other images, or there are no images.
        OSError: a file cannot be read or written; finished shards stay, and the same call continues.
    """
    if Path(plan.source).is_dir() and output.resolve().is_relative_to(Path(plan.source).resolve()):
        raise ValueError(f"cannot write {output} inside {plan.source}, the folder of the images; choose another folder")
    source = open_source(plan.source, plan.config, plan.layout)
    opened = {name: _open(plan, name) for name in splits or source.names}
    log_splits(source, opened)
    _write_plan(plan, {name: fingerprint_data(split) for name, split in opened.items()}, output)
    written = {}
    for split_name, split in opened.items():
        shards = range(-(-len(split) // plan.images))
        files = [output / f"{split_name}-{number:05d}.tar" for number in shards]
        todo = [(number, file) for number, file in zip(shards, files, strict=True) if not file.exists()]
        write = partial(_write_shard, plan, split_name)
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            # The pool starts processes for its first task
            run: Any = pool.map if workers > 1 and len(todo) > 1 else map
            list(tqdm(run(write, todo), f"Writing {split_name}", len(todo), unit=" shards"))
        written[split_name] = index_shards([file.as_posix() for file in files], split.label_names)
        if missing := len(split) - written[split_name]:
            tqdm.write(f"{missing} of {len(split)} images of {split_name} cannot be read and were omitted")
    return written


def _write_plan(plan: ShardPlan, data: dict[str, Any], output: Path) -> None:
    """Save the plan and the data's fingerprint in the output folder.

    Args:
        data: fingerprint of images and labels, by split.

    Raises:
        ValueError: the folder has shards of another plan or of other images.
    """
    earlier: dict[str, Any] = {"plan": asdict(plan), "data": {}}
    if (output / _PLAN).exists():
        earlier = {"plan": {}, "data": {}, **read_json_object(output / _PLAN)}
    elif any(output.glob("*.tar")):  # not of `hf-vit shard`
        earlier["plan"] = {}
    before = earlier["plan"]
    differing = [f"{name} {before.get(name)}, not {x}" for name, x in asdict(plan).items() if before.get(name) != x]
    differing += [f"other images of {name}" for name, x in data.items() if earlier["data"].get(name, x) != x]
    if differing:
        raise ValueError(f"{output} has other shards ({'; '.join(differing)}); choose another folder")
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / _PLAN, {"plan": asdict(plan), "data": {**earlier["data"], **data}})


@lru_cache(8)
def _open(plan: ShardPlan, split_name: str) -> Split:
    source = DataSettings(dataset=plan.source, dataset_config=plan.config, layout=plan.layout)
    try:
        split = open_named(source, split_name)
    except ValueError:  # images without labels
        return open_named(source, split_name, needs_labels=False)
    if split.multi_label:
        raise ValueError(f"{plan.source} has several labels per image, but shards have one")
    return split


def _write_shard(plan: ShardPlan, split_name: str, shard: tuple[int, Path]) -> None:
    """Write one shard atomically.

    Args:
        shard: its number and its file.
    """
    number, file = shard
    split = _open(plan, split_name)
    indices = np.arange(number * plan.images, min((number + 1) * plan.images, len(split)))
    rows = ShuffledSampler(len(split), seed=0).rows(0, indices)
    with new_file(file) as draft, tarfile.open(draft, "w", format=tarfile.USTAR_FORMAT) as archive:
        for row in map(int, rows):
            sample = split.samples[row]
            found = encode_image(split.image(sample, row), plan)
            if found is None:
                continue
            _add(archive, f"{row:09d}.{found[0]}", found[1])
            if split.label_column is not None:
                _add(archive, f"{row:09d}.cls", str(split.label(sample)).encode())


def encode_image(image: dict, plan: ShardPlan) -> tuple[str, bytes] | None:
    """Return (extension, bytes) of an image; None if it must be resized but cannot be read."""
    if plan.size is None:
        content = image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()
        kinds = (kind for magic, kind in _MAGIC.items() if content.startswith(magic))
        return next(kinds, Path(image["path"] or ".jpg").suffix[1:].lower()), content
    try:
        picture = load_image(image, name=image["path"])
        picture = to_mode(picture, "L" if picture.mode == "L" else "RGB", name=image["path"])
    except ImageReadingError as error:
        tqdm.write(f"omitted: {error}")
        return None
    scale = plan.size / min(picture.size)
    if scale < 1:
        width, height = (max(round(side * scale), plan.size) for side in picture.size)
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=plan.quality)
    return "jpg", content.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
