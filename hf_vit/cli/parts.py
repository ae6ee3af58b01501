"""`hf-vit embed` and `predict` with `--output FOLDER/`: work in parts."""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from .arguments import parse_count

# Arguments of `predict` and `embed`
UnitSize = Annotated[
    int | None, "with --output FOLDER/: images of a part (default: a 64th, from 256 to 8192)", {"type": parse_count}
]
NumWorkers = Annotated[
    int | None, "number of processes that read images ahead (default: by the processors)", {"type": int}
]
Extend = Annotated[bool, "with --output FOLDER/: add the images that came after the job began"]
DryRun = Annotated[
    bool, "with --output FOLDER/: count the images, measure the speed on one part, and print the time; write nothing"
]


def parse_part(text: str) -> tuple[int, int]:
    """Parse I/N, from 1/N to N/N."""
    number, slash, count = text.partition("/")
    if slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count):
        return int(number), int(count)
    raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 1 to N, such as 3/16")


Part = Annotated[
    tuple[int, int] | None,
    "with --output FOLDER/: compute only slice I of N, for an array of a scheduler",
    {"type": parse_part, "metavar": "I/N"},
]


def rent(
    *,
    job: Annotated[
        str | None,
        "with --output hf://buckets/OWNER/NAME: run on Hugging Face Jobs, on hardware such as cpu-upgrade; needs "
        "--package",
        "HARDWARE",
    ] = None,
    package: Annotated[
        str | None, "for --job: pip requirement of hf_vit: the URL of a wheel, or git+https://..."
    ] = None,
    timeout: Annotated[str, "for --job: time limit, such as 90m"] = "6h",
) -> dict[str, Any] | None:
    """Return where a command runs on Hugging Face Jobs; None: it runs on this machine."""
    if job is None and package is not None:
        raise ValueError("--package needs --job")
    return None if job is None else {"flavor": job, "package": package, "timeout": timeout}


def start_job(command: str, given: list[str], arguments: dict[str, Any], where: dict[str, Any]) -> None:
    """Run `embed` or `predict` on Hugging Face Jobs.

    Args:
        given: the words after the command.
        arguments: the arguments that these give.
        where: as returned by `rent`.
    """
    from ..hub.jobs import run_parts_job

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--job", "--package", "--timeout"):
        parser.add_argument(option)
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    _, options = parser.parse_known_args(given)
    run_parts_job(command, options, arguments, dry_run=arguments["dry_run"], **where)


def is_folder(output: str | None) -> bool:
    """Return whether an output is a folder of parts: it is a folder, or its name ends in a slash."""
    return output is not None and (output.endswith(("/", os.sep)) or os.path.isdir(output))


@dataclass
class PartOptions:
    """Options of work in parts."""

    part: tuple[int, int] | None = None
    unit_size: int | None = None
    extend: bool = False
    dry_run: bool = False

    def check(self, output: str | None) -> None:
        """Raise ValueError if options or processes need a folder, but the output is none.

        Args:
            output: `--output`.
        """
        if is_folder(output):
            return
        for name, value in vars(self).items():
            if value:
                raise ValueError(f"--{name.replace('_', '-')} needs --output FOLDER/, with a slash at its end")
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ValueError("several processes need --output FOLDER/, with a slash at its end, which they share")


def run_parts(
    predictor: Any,
    output: str,
    images: list[str],
    dataset: str | None,
    split: str | None,
    column: str | None,
    about: dict[str, Any],
    options: PartOptions,
) -> None:
    """Compute the parts of a job, and print what is there.

    Args:
        predictor: what computes the images.
        output: folder of the job.
        images, dataset, split, column: as in `find_sources`.
        about: what is stored about the model.
    """
    from tqdm import tqdm

    from ..data.listing import find_sources
    from ..data.workers import count_workers
    from ..inference.parts import UnfinishedError, count_new, extend_job, open_job, slice_of, unit_length

    folder = Path(output)
    sources = find_sources(images, dataset, split, column)
    inputs = list(images)
    if dataset:
        inputs.append(f"{dataset}:{split or ''}")
    batch_size = predictor.batch_size
    num_workers = count_workers("auto") if predictor.workers is None else predictor.workers
    if options.dry_run:
        estimate(predictor, folder, sources, about, options, num_workers)
        return
    is_new = not (folder / "job.json").exists()
    job = open_job(folder, inputs, sources, predictor, about)
    is_first = int(os.environ.get("RANK") or 0) == 0
    if options.extend:
        job = extend_job(job, sources)
    elif is_first and not is_new:
        later = count_new(job, sources)
        if later:
            print(f"{later:,} images came after the job began; --extend adds them", file=sys.stderr)
    total = len(job.listing)
    within = slice_of(total, options.part, batch_size)
    length = unit_length(total, batch_size, options.unit_size)
    done = len(within) - job.missing(within)
    is_hidden = None if is_first else True  # None: unless standard error is a terminal
    with tqdm(total=len(within), initial=done, unit=" images", disable=is_hidden, delay=1) as bar:
        for progress in job.run(predictor, within, length, num_workers):
            bar.update(len(progress.images))
    try:
        manifest = job.finish()
    except UnfinishedError as error:
        print(f"this slice is finished; {error}")
        return
    if is_first:
        unreadable = f"{manifest['unreadable']:,} of them unreadable"
        print(f"{total:,} images, {unreadable}, {len(manifest['parts']):,} parts: {folder}")
        if predictor.task == "embed":
            print(f"next: hf-vit search {output} QUERY.jpg")


def estimate(
    predictor: Any, folder: Path, sources: Any, about: dict[str, Any], options: PartOptions, num_workers: int
) -> None:
    """Compute one unit, and print how long the others take, and their bytes; nothing is written to `folder`."""

    from ..data.workers import count_processors
    from ..inference.parts import Job, open_job, slice_of, unit_length

    with tempfile.TemporaryDirectory() as temporary:
        job = open_job(Path(temporary), [], sources, predictor, about)
        total = len(job.listing)
        within = slice_of(total, options.part, predictor.batch_size)
        length = unit_length(total, predictor.batch_size, options.unit_size)
        units = -(-len(within) // length)
        missing = Job(folder).missing(within) if (folder / "job.json").exists() else len(within)
        unit = within[:length]
        predictor.columns([job.listing[unit.start]])  # the first forward pass is slower
        started = time.perf_counter()
        list(job.run(predictor, unit, length, num_workers))
        seconds = time.perf_counter() - started
        size = job.path(unit).stat().st_size
    rate = len(unit) / seconds
    hours = missing / rate / 3600
    print(f"images: {total:,} in {units:,} parts of {length:,}; {missing:,} are not computed yet")
    print(f"speed: {rate:,.1f} images a second, measured on one part with {num_workers} workers")
    print(f"time: {hours:,.2f} hours for one process like this one")
    print(f"result: about {size / len(unit) * len(within) / 1e6:,.1f} MB")
    if predictor.model.device.type == "cpu":
        cores = count_processors()
        print(f"Hugging Face Jobs: {hours * cores / 8:,.2f} hours on cpu-upgrade (8 processors; here {cores})")
