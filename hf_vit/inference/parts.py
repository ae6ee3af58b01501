"""Work in parts: the features or classes of any number of images, by any number of processes, each of which may die.

A job is a folder:

    job.json                  the inputs, and the fingerprints of model, preprocessing, settings and software
    listing-0.arrow           the images, frozen when the job began; those of `extend_job` are in listing-1.arrow
    claims/FIRST-END          a range of images that a process is computing
    part-FIRST-END.parquet    a range that is finished
    manifest.json             the parts, when all images are in one

Each process claims the next free range, computes it, and renames its part into place; it does the first and the last
under the lock of the folder, the last only if it still holds its claim. Parts therefore never overlap, also if
processes cut ranges of different lengths. The claim of a process that died is free again: at once on the same machine,
and on others when it has shown no sign of life for five minutes.
"""

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock

from ..data.listing import Files, Listing, keys_of, write_listing, write_rows
from ..files.addresses import redact_secrets
from ..files.manifest import MANIFEST, sha256_of
from ..files.output import LOCK, add_to_marker, clear_leftovers, new_file, write_json
from ..files.predictions import Batch
from ..files.reading import parse_json, read_json_object
from .columns import arrow_columns
from .predictor import Predictor

JOB = "job.json"
KEY = b"hf_vit"  # key in the metadata of a parquet file
_CLAIMS = "claims"
_RANGE = re.compile(r"(?:part-)?(\d{12})-(\d{12})(?:\.parquet)?")
_EXPIRY = 300.0  # seconds without a sign of life after which a claim of another machine is free
_REFRESH = 30.0  # seconds between two signs of life
_WAIT = 1.0  # seconds between two looks at the claims of other processes
_LEAST, _MOST, _UNITS = 256, 8192, 64  # images of a unit, and units of a job, where nothing is chosen


class UnfinishedError(ValueError):
    """A job that has not all of its parts."""


def unit_length(images: int, batch_size: int, wanted: int | None = None) -> int:
    """Return the number of images of a unit: a multiple of the batch size, so that units are cut between batches.

    Args:
        images: number of images of the job.
        wanted: None: a 64th of the job, from 256 to 8192.
    """
    if wanted is None:
        wanted = min(max(images // _UNITS, _LEAST), _MOST)
    return -(-wanted // batch_size) * batch_size


def slice_of(images: int, part: tuple[int, int] | None, batch_size: int) -> range:
    """Return the images of part I of N of a job, cut between batches; None: all."""
    if part is None:
        return range(images)
    number, count = part
    first = images * (number - 1) // count // batch_size * batch_size
    end = images if number == count else images * number // count // batch_size * batch_size
    return range(first, end)


def open_job(
    folder: Path, inputs: Sequence[str], sources: Sequence[Files], predictor: Predictor, about: dict[str, Any]
) -> "Job":
    """Open the job in a folder, or begin it; the first of several processes begins it, and the others wait.

    Args:
        folder: a folder of a job, an empty one or a new one.
        inputs: what the user named.
        sources: the sources of these; their images are listed when the job begins.
        predictor: what computes the images.
        about: what is stored about the model in each part.

    Raises:
        FileExistsError: the folder holds other files.
        ValueError: its job has other images or another fingerprint, or there are no images.
    """
    asked = {"task": predictor.task, "inputs": [redact_secrets(name) for name in inputs]}
    asked["fingerprints"] = predictor.fingerprints
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK):
        if not (folder / JOB).exists():
            others = [name for name in sorted(os.listdir(folder)) if not name.startswith((".", "listing-", _CLAIMS))]
            if others:
                raise FileExistsError(f"cannot begin a job in {folder}: it has other files, such as {others[0]}")
            add_to_marker(folder, "part-*.parquet", "listing-*.arrow", f"{_CLAIMS}/*", JOB, MANIFEST)
            (folder / _CLAIMS).mkdir(exist_ok=True)
            listing = folder / "listing-0.arrow"
            images = write_listing(listing, sources)
            listings = [{"file": listing.name, "images": images, "sha256": sha256_of(listing)}]
            write_json(folder / JOB, {**asked, "about": about, "listings": listings})
    job = Job(folder)
    if job.stored["inputs"] != asked["inputs"]:
        found = " ".join(job.stored["inputs"])
        raise ValueError(f"{folder} is a job of other images: {found}; choose another folder")
    for name, value in asked["fingerprints"].items():
        known = job.stored["fingerprints"][name]
        if known != value:
            raise ValueError(f"{folder} is a job with other {name}: {known}, and not {value}; choose another folder")
    job.check_parts()
    return job


def count_new(job: "Job", sources: Sequence[Files]) -> int:
    """Return the number of images that the sources have now beyond those of the job."""
    return max(sum(1 for source in sources for _ in source.rows()) - len(job.listing), 0)


def extend_job(job: "Job", sources: Sequence[Files]) -> "Job":
    """Add the images that are not yet in the listings of a job, and return the job with them."""
    with FileLock(job.folder / LOCK):
        job = Job(job.folder)  # another process may have extended it
        path = job.folder / f"listing-{len(job.stored['listings'])}.arrow"
        write_listing(path, sources)
        new = Listing(str(path))
        is_new = pc.invert(pc.is_in(keys_of(new), keys_of(job.listing)))  # pyright: ignore[reportAttributeAccessIssue]
        images = write_rows(path, sources, new.tables[0].filter(is_new).to_batches())
        if not images:
            path.unlink()
            return job
        listings = [*job.stored["listings"], {"file": path.name, "images": images, "sha256": sha256_of(path)}]
        (job.folder / MANIFEST).unlink(missing_ok=True)
        write_json(job.folder / JOB, {**job.stored, "listings": listings})
    return Job(job.folder)


class Progress(NamedTuple):
    """A finished unit."""

    images: range
    unreadable: int


class Job:
    """The folder of a job, which exists.

    Raises:
        ValueError: it is damaged, or not the folder of a job.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.stored = read_json_object(folder / JOB)
        try:
            files = [str(folder / one["file"]) for one in self.stored["listings"]]
            self.listing = Listing(*files)
        except (KeyError, TypeError, pa.ArrowInvalid) as error:
            raise ValueError(f"{folder / JOB} is damaged, or not that of a job: {error}") from error
        me = psutil.Process()
        self._token = f"{socket.gethostname()} {me.pid} {me.create_time()} {token_hex(4)}"
        self._refreshed = time.monotonic()
        self._claimed: deque[range] = deque()  # by this process, in their order

    def path(self, unit: range) -> Path:
        """Return the path of the part of a range."""
        return self.folder / f"part-{_name(unit)}.parquet"

    def parts(self) -> list[range]:
        """Return the finished ranges, in their order."""
        return _ranges_in(self.folder, "part-")

    def missing(self, within: range) -> int:
        """Return the number of images of a range that are in no part."""
        return len(within) - sum(len(_overlap(part, within)) for part in self.parts())

    def check_parts(self) -> int:
        """Return the number of unreadable images in the parts.

        Raises:
            ValueError: a part is damaged, or of another job.
        """
        unreadable = 0
        for part in self.parts():
            about = read_about(self.path(part))
            if about.get("fingerprints") != self.stored["fingerprints"] or about.get("listing") != self._listing_of(
                part
            ):
                raise ValueError(f"{self.path(part)} is of another job; move it away")
            unreadable += about["unreadable"]
        return unreadable

    def _listing_of(self, unit: range) -> str | None:
        """Return the checksum of the listing of a range; no range is in two."""
        end = 0
        for listing in self.stored["listings"]:
            end += listing["images"]
            if unit.start < end:
                return listing["sha256"] if unit.stop <= end else None
        return None

    def run(self, predictor: Predictor, within: range, length: int, num_workers: int = 0) -> Iterator[Progress]:
        """Compute the missing images of a range, unit by unit, while the result is iterated.

        When no unit is free, it waits for those that other processes compute, and takes the ones of processes that die.

        Args:
            within: numbers of the images.
            length: images of a unit, see `unit_length`.
            num_workers: number of processes that read and preprocess ahead.
        """
        try:
            while self.missing(within):
                yield from self._compute(predictor, within, length, num_workers)
                if self.missing(within):
                    time.sleep(_WAIT)
        finally:
            for unit in self._claimed:  # after an error
                self._claim(unit).unlink(missing_ok=True)
            self._claimed.clear()

    def _compute(self, predictor: Predictor, within: range, length: int, num_workers: int) -> Iterator[Progress]:
        """Compute units as long as one is free; the workers read the next units while the model computes."""
        first = self._take(within, length)
        if first is None:
            return

        def batches() -> Iterator[list[tuple[int, int]]]:
            unit = first
            while unit is not None:
                for start in range(unit.start, unit.stop, predictor.batch_size):
                    yield [(number, number) for number in unit[start - unit.start :][: predictor.batch_size]]
                unit = self._take(within, length)

        computed = predictor.answer(
            batches(),
            num_workers,
            skip_unreadable=True,
            fetch=self.listing.__getitem__,
            rows=predictor.batch_size,
            needs_spawn=self.listing.needs_spawn,
        )
        found: list[Batch] = []
        count = 0
        for batch in computed:
            self._show_life()
            found.append(batch)
            count += len(batch.numbers) + len(batch.unreadable)
            unit = self._claimed[0]
            if count == len(unit):
                unreadable = self._finish(unit, predictor.join(found, unit))
                self._claimed.popleft()
                yield Progress(unit, unreadable)
                found = []
                count = 0

    def table_of(self, unit: range, columns: dict[str, Any]) -> pa.Table:
        """Return the table of a part: index, name and answers of its images."""
        names = [self.listing.name(number) for number in unit]
        answers = arrow_columns(columns)
        unreadable = len(unit) - answers["error"].null_count
        about = {**self.stored["about"], "fingerprints": self.stored["fingerprints"]}
        about |= {"listing": self._listing_of(unit), "unreadable": unreadable}
        table = pa.table({"index": pa.array(unit, pa.int64()), "file": pa.array(names, pa.string()), **answers})
        return table.replace_schema_metadata({KEY: json.dumps(about)})

    def _finish(self, unit: range, columns: dict[str, Any]) -> int:
        """Write the part of a range, and return the number of its unreadable images."""
        table = self.table_of(unit, columns)
        unreadable = len(unit) - table["error"].null_count
        if unreadable == len(unit):
            self.listing.check_there(unit.start)
        with ExitStack() as held:
            try:
                with new_file(self.path(unit), overwrite=True, flush=True) as draft:
                    pq.write_table(table, draft)
                    held.enter_context(FileLock(self.folder / LOCK))
                    if _read_token(self._claim(unit)) != self._token:
                        raise _LostClaimError
            except _LostClaimError:  # this process showed no sign of life for long, and another one took the range
                return unreadable
            self._claim(unit).unlink()
        return unreadable

    def finish(self) -> dict[str, Any]:
        """Write the manifest if all images are in a part, and return it.

        Raises:
            UnfinishedError: some are not.
        """
        with FileLock(self.folder / LOCK):
            if missing := self.missing(range(len(self.listing))):
                raise UnfinishedError(f"{self.folder} lacks {missing:,} of {len(self.listing):,} images")
            manifest = {
                "task": self.stored["task"],
                "fingerprints": self.stored["fingerprints"],
                "images": len(self.listing),
                "unreadable": self.check_parts(),
                "parts": [self.path(part).name for part in self.parts()],
            }
            write_json(self.folder / MANIFEST, manifest)
        return manifest

    def _claim(self, unit: range) -> Path:
        return self.folder / _CLAIMS / _name(unit)

    def _take(self, within: range, length: int) -> range | None:
        """Claim the first free unit of a range; None if there is none."""
        with FileLock(self.folder / LOCK):
            taken = sorted([*self.parts(), *self._living_claims()], key=lambda unit: unit.start)
            unit = self._first_gap(taken, within, length)
            if unit is not None:
                draft = self.folder / _CLAIMS / ".new"
                draft.write_text(self._token, encoding="utf-8")
                os.replace(draft, self._claim(unit))
                self._claimed.append(unit)
        return unit

    def _first_gap(self, taken: Sequence[range], within: range, length: int) -> range | None:
        """Return the first range of at most `length` images that is not taken, within one listing."""
        ends = list(accumulate(listing["images"] for listing in self.stored["listings"]))
        first = within.start
        for unit in [*taken, range(within.stop, within.stop)]:
            gap_end = min(unit.start, within.stop)
            if gap_end > first:
                listing_end = min(end for end in ends if end > first)
                return range(first, min(gap_end, first + length, listing_end))
            first = max(first, unit.stop)
        return None

    def _living_claims(self) -> list[range]:
        """Return the claims of living processes, and delete those of dead ones with what they left."""
        os.utime(self.folder / LOCK)
        now = os.stat(self.folder / LOCK).st_mtime  # by the clock of the file system
        living = []
        for unit in _ranges_in(self.folder / _CLAIMS, ""):
            claim = self._claim(unit)
            if _is_alive(_read_token(claim), now - claim.stat().st_mtime):
                living.append(unit)
            else:
                clear_leftovers(self.path(unit))
                claim.unlink()
        return living

    def _show_life(self) -> None:
        if time.monotonic() - self._refreshed > _REFRESH:
            for unit in self._claimed:
                if self._claim(unit).exists():
                    os.utime(self._claim(unit))
            self._refreshed = time.monotonic()


class _LostClaimError(Exception):
    """Another process has taken the range that this one has computed."""


def stored_features(
    folder: str | os.PathLike, numbers: Mapping[str, int], predictor: Predictor
) -> tuple[np.ndarray, np.ndarray]:
    """Return the features of images that the parts of a job hold.

    An image whose file is newer than its part, or that could not be read, is left out.

    Args:
        folder: folder of a job that embeds images.
        numbers: the images: absolute path, or DATASET:SPLIT:ROW of a dataset without files -> number.
        predictor: what would compute them.

    Returns:
        (images,) numbers in their order, and (images, features) float32.

    Raises:
        ValueError: the job has another model or another preprocessing, or normalized its features.
    """
    job = Job(Path(folder))
    for name in ("model", "preprocessing", "settings"):
        known = job.stored["fingerprints"][name]
        if known != predictor.fingerprints[name]:
            expected = predictor.fingerprints[name]
            raise ValueError(f"{folder} has features of another {name}: {known} (expected {expected})")
    found: dict[int, np.ndarray] = {}
    for part in job.parts():
        path = job.path(part)
        table = pq.read_table(path, columns=["index", "features", "error"])
        table = table.filter(table["error"].is_null())
        written = path.stat().st_mtime
        features = table["features"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
        for index, row in zip(table["index"].to_pylist(), features, strict=True):
            file = job.listing.path(index)
            number = numbers.get(os.path.normpath(file) if file else job.listing.name(index))
            if number is None or (file is not None and os.path.exists(file) and os.path.getmtime(file) > written):
                continue
            found[number] = row
    order = sorted(found)
    return np.array(order, np.int64), np.stack([found[number] for number in order]) if order else np.empty((0, 0))


def read_about(path: Path) -> dict[str, Any]:
    """Return what a part says about its model and its images.

    Raises:
        ValueError: it is damaged, or not a part.
    """
    try:
        return parse_json(pq.read_schema(path).metadata[KEY].decode(), str(path))
    except (pa.ArrowInvalid, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is damaged, or not a part of a job: {error}") from error


def _name(unit: range) -> str:
    return f"{unit.start:012}-{unit.stop:012}"


def _ranges_in(folder: Path, prefix: str) -> list[range]:
    """Return the ranges in the names of files, in their order."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _RANGE.fullmatch(entry.name)
            if match is not None and entry.name.startswith(prefix):
                found.append(range(int(match[1]), int(match[2])))
    return sorted(found, key=lambda unit: unit.start)


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _read_token(claim: Path) -> str | None:
    try:
        return claim.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _is_alive(token: str | None, age: float) -> bool:
    """Return whether the process that wrote a claim is alive: on this machine it exists, on others it shows life."""
    host, number, created, _ = (token or "- 0 0 -").split()
    if age > _EXPIRY:
        return False
    if host != socket.gethostname():
        return True
    try:
        return abs(psutil.Process(int(number)).create_time() - float(created)) < 1
    except psutil.NoSuchProcess:
        return False
