"""Speed of training images from disk to a batch, compared with timm: images per second of one core, and bytes read.

    python benchmarks/loading_images.py FOLDER [--size 224] [--batch_size 64] [--rounds 15] [--workers 2] [--write]

FOLDER holds JPEGs in folders of classes. timm (`create_dataset` and `create_loader`, uint8 batches, as with its
prefetcher) and hf_vit read them from there. hf_vit also reads tar files made by `hf-vit shard`, and parquet files. All
contestants decode, take a random resized crop and flip. "averaging" antialiases when a crop shrinks (`--antialias`), as
timm always does; the default does not, like the original, and is slower. "reduced" adds `--reduced_decoding`, which
matters for photographs of 1000 pixels or more. "RandAugment" applies two operations of strength 10. "on a device" is
the part of the data workers with `--augment-on device`: they decode and crop.

All run in one process without workers, in turns of one batch. The time is processor time, so that other load on the
machine matters little. Bytes are those that the process read, from the disk or from the page cache.

With --workers N, N workers decode the images of the parquet files, and the processor time is that of the training
thread, which takes their batches: its own share of loading.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

_STEPS = 10**6  # more than the benchmark takes


def main(argv: list[str] | None = None) -> None:
    options = parse_arguments(argv)
    if options.apart:
        common.silence_torchvision()
        common.use_threads(1)
        print(json.dumps(measure(options)))
        return
    arguments = ["--size", options.size, "--batch_size", options.batch_size, "--rounds", options.rounds, "--apart"]
    arguments += ["--workers", options.workers]
    name = f"{options.size} pixels, batches of {options.batch_size}"
    name += f", {options.workers} workers" if options.workers else ""
    measured = ((name, common.run_apart(__file__, options.folder, *arguments)) for _ in range(1))
    common.publish("loading_images", measured, as_markdown, options.write)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = common.parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=224, help="side of the crop in pixels (default 224)")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15, help="batches of each contestant (default 15)")
    parser.add_argument(
        "--workers", type=int, default=0, help="measure the training thread with this number of workers"
    )
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(options: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        loaders = contestants(options, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in loaders}
        read = dict.fromkeys(loaders, 0)
        for _ in range(options.rounds + 1):  # the first is a warm-up; it also fills the window of parquet files
            for name, loader in loaders.items():
                clock = time.thread_time if options.workers else time.process_time
                start, before = clock(), _bytes_read()
                labels = next(loader)
                seconds[name].append(clock() - start)
                read[name] += _bytes_read() - before
                assert len(labels) == options.batch_size, labels.shape
        images = options.batch_size * (options.rounds + 1)
    seconds = {name: turns[1:] for name, turns in seconds.items()}
    return {**common.stamp(), "seconds": seconds, "bytes": {name: total / images for name, total in read.items()},
            "batch_size": options.batch_size, "workers": options.workers}  # fmt: skip


def contestants(options: argparse.Namespace, folder: Path) -> dict[str, Iterator[Any]]:
    """Return endless batches of each contestant."""
    import datasets

    from hf_vit.data.shard_writing import ShardPlan, write_shards
    from hf_vit.data.sources import load_split

    write_shards(ShardPlan(str(options.folder), images=500), folder / "tars", [], 1)
    (folder / "parquet").mkdir()
    rows = load_split(str(options.folder), "train").cast_column("image", datasets.Image(decode=False))
    embedded = rows.map(lambda row: {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}})
    embedded.cast(rows.features).to_parquet(folder / "parquet" / "train.parquet", batch_size=100)
    places = {"folder": options.folder, "tars": folder / "tars", "parquet": folder / "parquet"}
    if options.workers:
        return {
            "hf_vit, parquet": _ours(options, places["parquet"], True),
            "hf_vit, parquet, on a device": _ours(options, places["parquet"], True, on_device=True),
        }
    found: dict[str, Iterator[Any]] = {
        f"hf_vit, {name}{', averaging' if antialias else ''}": _ours(
            options, place, name != "folder", antialias=antialias
        )
        for name, place in places.items()
        for antialias in (True, False)
    }
    found["hf_vit, folder, averaging, reduced"] = _ours(
        options, options.folder, False, antialias=True, reduced_decoding=True
    )
    found["hf_vit, folder, on a device"] = _ours(options, options.folder, False, on_device=True)
    layers: dict[str, Any] = {"randaugment_layers": 2, "randaugment_magnitude": 10}
    found["hf_vit, folder, RandAugment"] = _ours(options, options.folder, False, **layers)
    found["hf_vit, folder, RandAugment, on a device"] = _ours(options, options.folder, False, on_device=True, **layers)
    try:
        found["timm, folder, averaging"] = _timm(options)
    except ImportError as error:
        common.report_progress(f"timm is omitted: {error}")
    return found


def _ours(options: argparse.Namespace, place: Path, streaming: bool, on_device: bool = False, **changes: Any):
    """Yield the labels of endless batches."""
    from hf_vit.data.augmentation import TrainTransform
    from hf_vit.data.device_augmentation import CropTransform
    from hf_vit.data.loaders import TrainDataset, train_loader
    from hf_vit.data.samplers import BatchLayout, StepBatchSampler
    from hf_vit.data.sources import load_split
    from hf_vit.data.splits import open_split

    split = open_split(load_split(str(place), "train", streaming=streaming))
    shares = BatchLayout(options.batch_size, options.batch_size)
    size = (options.size, options.size)
    transform = (CropTransform if on_device else TrainTransform)(size, crop_area=(0.08, 1.0), **changes)
    batches = StepBatchSampler(shares, range(_STEPS), split.in_blocks)
    for batch in train_loader(TrainDataset(split, transform, 0), batches, options.workers):
        yield batch["label"]


def _timm(options: argparse.Namespace) -> Iterator[Any]:
    import torch
    from timm.data import create_dataset, create_loader  # pyright: ignore[reportMissingImports] - a peer

    def fast_batches() -> Iterator[Any]:
        dataset = create_dataset("", str(options.folder))
        loader: Any = create_loader(
            dataset, options.size, options.batch_size, is_training=True, color_jitter=0, num_workers=0,
            use_prefetcher=True, persistent_workers=False, device=torch.device("cpu"),
        )  # fmt: skip
        while True:
            for _, labels in loader.loader:  # images are uint8, before the prefetcher's normalization
                yield labels

    return fast_batches()


def _bytes_read() -> int:
    """Return the number of bytes that this process has read."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split("rchar:")[1].split()[0])


def as_markdown(results: dict[str, dict]) -> str:
    parts = [common.machine_as_markdown(results)]
    for name, result in results.items():
        batch, theirs = result["batch_size"], result["seconds"].get("timm, folder, averaging")
        columns = [name, "images per second of a core", "times as fast as timm", "kB read per image"]
        if result.get("workers"):
            columns[1:] = ["ms of the training thread per 256 images"]
        rows = []
        for contestant, seconds in result["seconds"].items():
            ratio = f"{statistics.median(theirs) / statistics.median(seconds):.2f}" if theirs else ""
            median = statistics.median(seconds)
            values = [f"{batch / median:.1f}", ratio, f"{result['bytes'][contestant] / 1000:.1f}"]
            rows.append([contestant, *([f"{256_000 * median / batch:.1f}"] if result.get("workers") else values)])
        parts.append(common.table(columns, rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
