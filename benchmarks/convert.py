"""Time and memory of the conversion of a large checkpoint, compared with copying its file.

    python benchmarks/convert.py [--directory FOLDER] [--pairs 3]

The checkpoint is a ViT-L/16 of random numbers in the layout of the released files (1.2 GB). `cp FILE COPY && sync` and
`hf-vit convert FILE FOLDER && sync` are timed in turn, as whole processes. Before each, the file is in the page cache,
and no data waits to be written. The results are printed as a Markdown table and as JSON. The exit status is 1 if a
limit is exceeded. The disk needs space for two more copies of the file.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DEPTH, WIDTH, MLP, HEADS, PATCH, TOKENS, CLASSES = 24, 1024, 4096, 16, 16, 14 * 14 + 1, 1000  # ViT-L/16 at 224 pixels
_MAX_TIME_RATIO = 3.0  # time of the conversion / time of the copy
_MAX_MEMORY_RATIO = 1.25  # peak memory above that of the imports / size of the file


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        results = measure(Path(directory), arguments.pairs)
    print(as_markdown(results))
    print(json.dumps(results))
    return 0 if results["time_ratio"] <= _MAX_TIME_RATIO and results["memory_ratio"] <= _MAX_MEMORY_RATIO else 1


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="time and memory of a conversion, compared with cp", allow_abbrev=False
    )
    parser.add_argument("--directory", type=Path, help="folder on the disk to measure (default: a temporary folder)")
    parser.add_argument("--pairs", type=int, default=3, help="number of timings of both (default 3)")
    return parser.parse_args(argv)


def measure(directory: Path, pairs: int) -> dict:
    source, copy, output = directory / "L_16.npz", directory / "copy.npz", directory / "L_16"
    _make_in_other_process(source)
    copy_command = f"cp {source} {copy} && sync"
    convert_command = f"{Path(sys.executable).with_name('hf-vit')} convert {source} {output} && sync"
    copies, conversions, peaks = [], [], []
    for _ in range(pairs):
        copies.append(run(copy_command)[0])
        copy.unlink()
        seconds, peak = run(convert_command)
        shutil.rmtree(output)
        conversions.append(seconds)
        peaks.append(peak)
    size, imports = source.stat().st_size, run(f"{sys.executable} -c 'import torch, transformers'")[1]
    return {
        "file_bytes": size,
        "copy_seconds": copies,
        "convert_seconds": conversions,
        "time_ratio": statistics.median(conversions) / statistics.median(copies),
        "imports_peak_bytes": imports,
        "convert_peak_bytes": max(peaks),
        "memory_ratio": (max(peaks) - imports) / size,
        "processors": os.cpu_count(),
    }


def run(command: str) -> tuple[float, int]:
    """Run a shell command; return its seconds, and the peak memory in bytes of its largest process."""
    os.sync()
    start = time.perf_counter()
    with subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        messages = process.stderr.read().decode() if process.stderr else ""
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}: {messages}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def as_markdown(results: dict) -> str:
    gigabytes = {name: value / 1e9 for name, value in results.items() if name.endswith("_bytes")}
    rows = [
        f"| | {' | '.join(f'run {i + 1}' for i in range(len(results['copy_seconds'])))} | median |",
        f"|---{'|---:' * (len(results['copy_seconds']) + 1)}|",
        _seconds_row("`cp && sync`, s", results["copy_seconds"]),
        _seconds_row("`hf-vit convert && sync`, s", results["convert_seconds"]),
        "",
        "| | measured | promised |",
        "|---|---:|---:|",
        f"| file, GB | {gigabytes['file_bytes']:.2f} | |",
        f"| time of conversion / time of copy | {results['time_ratio']:.2f} | {_MAX_TIME_RATIO} |",
        f"| peak memory of `import torch, transformers`, GB | {gigabytes['imports_peak_bytes']:.2f} | |",
        f"| peak memory of the conversion, GB | {gigabytes['convert_peak_bytes']:.2f} | |",
        f"| (conversion - imports) / file | {results['memory_ratio']:.2f} | {_MAX_MEMORY_RATIO} |",
    ]
    return "\n".join(rows)


def _seconds_row(name: str, seconds: list[float]) -> str:
    return f"| {name} | {' | '.join(f'{value:.2f}' for value in [*seconds, statistics.median(seconds)])} |"


def _make_in_other_process(path: Path) -> None:
    """Write the file in another process, because the peak memory of a child starts with that of its parent."""
    process = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(path,))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"cannot write {path}: the process that writes it failed")


def make_checkpoint(path: Path) -> None:
    import numpy as np

    from hf_vit.files.npz import write_npz

    generator = np.random.default_rng(0)
    write_npz(path, ((name, generator.standard_normal(shape, np.float32)) for name, shape in array_shapes()))


def array_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the arrays of a released file with class token and without pre-logits layer."""
    yield "cls", (1, 1, WIDTH)
    yield from layer("embedding", (PATCH, PATCH, 3, WIDTH), (WIDTH,))
    yield "Transformer/posembed_input/pos_embedding", (1, TOKENS, WIDTH)
    for index in range(DEPTH):
        yield from _encoder_block(f"Transformer/encoderblock_{index}")
    yield from norm("Transformer/encoder_norm")
    yield from layer("head", (WIDTH, CLASSES), (CLASSES,))


def _encoder_block(block: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads = (HEADS, WIDTH // HEADS)
    yield from norm(f"{block}/LayerNorm_0")
    for name in ("query", "key", "value"):
        yield from layer(f"{block}/MultiHeadDotProductAttention_1/{name}", (WIDTH, *heads), heads)
    yield from layer(f"{block}/MultiHeadDotProductAttention_1/out", (*heads, WIDTH), (WIDTH,))
    yield from norm(f"{block}/LayerNorm_2")
    yield from layer(f"{block}/MlpBlock_3/Dense_0", (WIDTH, MLP), (MLP,))
    yield from layer(f"{block}/MlpBlock_3/Dense_1", (MLP, WIDTH), (WIDTH,))


def layer(name: str, kernel: tuple[int, ...], bias: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}/kernel", kernel
    yield f"{name}/bias", bias


def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}/scale", (WIDTH,)
    yield f"{name}/bias", (WIDTH,)


if __name__ == "__main__":
    sys.exit(main())
