"""Work in parts against one call of `hf_vit.embed`, in turns, and the memory of a worker for more images.

Generated JPEGs of 500 x 375 pixels and a Ti/16 with random weights. Every measurement is a process of its own.

    python benchmarks/parts.py --images 10000 --rounds 3
    python benchmarks/parts.py --memory 1000 100000
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import hf_vit
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.models.modeling_hf_vit_variants import HfViTForImageClassification

MODEL = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
CHEAP = {"image_size": 32, "num_hidden_layers": 1}  # what memory is measured with: its images are soon computed
BATCH_SIZE = 32
DIFFERENT = 50


def write_model(folder: Path, **changes: int) -> None:
    """Write a Ti/16 with random weights."""
    fields: dict[str, Any] = {"image_size": 224, "patch_size": 16, "num_labels": 1000, **MODEL, **changes}
    config = HfViTConfig(**fields)
    HfViTForImageClassification(config).save_pretrained(folder)
    HfViTImageProcessor.for_model(config, preset="augreg").save_pretrained(folder)


def write_images(folder: Path, count: int) -> None:
    """Write JPEGs of smooth noise, of about 50 KB, in folders of 1000; all but 50 are links to these."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for number in range(count):
        path = folder / f"{number // 1000:04}" / f"{number:07}.jpg"
        path.parent.mkdir(exist_ok=True)
        if number < DIFFERENT:
            small = Image.fromarray(rng.integers(0, 256, (75, 100, 3), np.uint8))
            small.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
        else:
            os.link(folder / "0000" / f"{number % DIFFERENT:07}.jpg", path)


def write_tars(images: Path, folder: Path) -> None:
    """Write a tar for each folder of images."""
    folder.mkdir()
    for part in sorted(images.iterdir()):
        with tarfile.open(folder / f"{part.name}.tar", "w", dereference=True) as archive:
            for file in sorted(part.iterdir()):
                archive.add(file, file.name)


def run(kind: str, model: Path, images: Path, output: Path, workers: int) -> dict[str, float]:
    """Run one measurement in this process; return seconds without imports, and the peaks of memory in MB."""
    start = time.perf_counter()
    if kind == "embed":
        hf_vit.embed(model, images, BATCH_SIZE, workers)
    else:
        from hf_vit.cli import main

        options = ["--batch-size", str(BATCH_SIZE), "--num-workers", str(workers)]
        assert main(["embed", str(model), str(images), "--output", f"{output}/", *options]) == 0
    seconds = time.perf_counter() - start
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    of_workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    return {"seconds": seconds, "peak": own, "peak_of_workers": of_workers}


def measure(*arguments: object, threads: int | None = None) -> dict[str, float]:
    """Run one measurement in a new process."""
    variables = dict(os.environ)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)
    return json.loads(done.stdout.splitlines()[-1])


def compare_speed(root: Path, count: int, rounds: int, workers: list[int]) -> None:
    """Print images a second of both, in turns, each with its best number of workers."""
    write_images(root / "images", count)
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(rounds):
        for number in workers:
            for kind in ("embed", "parts"):
                found = measure(kind, root / "model", root / "images", root / "output", number)
                seconds.setdefault((kind, number), []).append(found["seconds"])
                shutil.rmtree(root / "output", ignore_errors=True)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    for (kind, number), value in medians.items():
        print(f"{kind:6} {number} workers: {count / value:8.1f} images a second")
    best = {kind: min(value for key, value in medians.items() if key[0] == kind) for kind in ("embed", "parts")}
    print(f"parts : embed, each at its best: {best['embed'] / best['parts']:.3f}")


def compare_memory(root: Path, counts: list[int]) -> None:
    """Print the peak memory of the computing process, and of its worker, for folders and tars."""
    for count in counts:
        write_images(root / "images", count)
        write_tars(root / "images", root / "tars")
        for kind in ("images", "tars"):
            found = measure("parts", root / "model", root / kind, root / "output", 1)
            peaks = f"{found['peak']:.0f} MB, of the worker that reads {found['peak_of_workers']:.0f} MB"
            print(f"{count:9,} {kind}: peak {peaks}, {found['seconds']:.0f} s", flush=True)
            shutil.rmtree(root / "output")
        for kind in ("images", "tars"):
            shutil.rmtree(root / kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--memory", type=int, nargs="+", default=[])
    parser.add_argument("--one", nargs=5)
    options = parser.parse_args()
    if options.one:
        kind, model, images, output, workers = options.one
        print(json.dumps(run(kind, Path(model), Path(images), Path(output), int(workers))))
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if options.memory:
            write_model(root / "model", **CHEAP)
            compare_memory(root, options.memory)
        if options.images:
            write_model(root / "model")
            compare_speed(root, options.images, options.rounds, options.workers)


if __name__ == "__main__":
    main()
