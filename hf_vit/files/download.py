"""Sources of checkpoints: a local file or folder, or an address whose file is downloaded once into a cache."""

import hashlib
import json
import logging
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from filelock import FileLock
from huggingface_hub import cached_assets_path, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import httpx, tqdm

from ..models.utils import AddressError, allowed, open_address
from ..models.utils import sha256_of as sha256_of
from .limits import MAX_CHECKPOINT_BYTES

_logger = logging.getLogger(__name__)

BUCKETS = "https://storage.googleapis.com"  # the public address of gs://
MAX_FAILURES = 3  # consecutive failures without any progress
TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds without an answer or a byte
RETRY_WAIT = 1.0  # seconds before the second try; twice as long before the third
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}  # tried again (RFC 9110, 6585)


class SourceError(OSError):
    """A checkpoint that cannot be found or downloaded; the message says why."""


@dataclass(frozen=True)
class Fetched:
    """A checkpoint on this machine.

    Attributes:
        location: path or address, as the user gave it.
        path: the local file or folder.
        sha256: checksum of a downloaded file; None for others.
    """

    location: str
    path: Path
    sha256: str | None = field(default=None, compare=False)


def fetch(location: str | os.PathLike, cache_dir: str | os.PathLike | None = None, progress: bool = True) -> Fetched:
    """Find a checkpoint; download it if it is not in the cache yet.

    A download goes to `hf_vit/downloads/<sha256 of the address>/` in the Hugging Face assets cache (`HF_ASSETS_CACHE`,
    by default `HF_HOME/assets`). An interrupted download is resumed. Address, ETag, size and sha256 are kept beside the
    file in `<file name>.json`; a cached file with another sha256 is downloaded again.

    Args:
        location: a local file or folder, `https://...`, `gs://bucket/path` (read through its public https address), or
            `http://...` where `HF_VIT_ALLOW` allows it.
        cache_dir: folder to use instead of the assets cache.
        progress: show a progress bar; only if stderr is a terminal.

    Raises:
        SourceError: it does not exist, cannot be reached, is refused, or does not fit on the disk.
    """
    location = os.fspath(location)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location):
        return Fetched(location, *_fetch_url(_https_address(location), cache_dir, progress))
    return Fetched(location, _find_local(location))


def public_name(source: Fetched) -> str:
    """Return a checkpoint's origin for publication: without local folders, user names and signatures.

    >>> public_name(Fetched("https://me:secret@host/x.npz?signature=abc", Path("x.npz")))
    'https://host/x.npz'
    """
    if source.location.lower().startswith("http"):  # in gs:// a question mark is part of the name
        parts = urlsplit(source.location)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return source.path.name if os.path.exists(os.path.expanduser(source.location)) else source.location


def sha256_at(path: Path) -> str:
    """Return `sha256_of` a file, or `sha256_of_folder` for a folder."""
    return sha256_of_folder(path) if path.is_dir() else sha256_of(path)


def sha256_of_folder(folder: str | os.PathLike) -> str:
    """Return the hexadecimal sha256 of a folder: of the lines `<sha256>  <name>` of its files, sorted by name.

    A name is the path inside the folder, with slashes. `find . -type f | sed 's|^./||' | LC_ALL=C sort | xargs
    sha256sum | sha256sum` prints the same, if no name contains a space.
    """
    names = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    lines = [f"{sha256_of(Path(folder, name))}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _find_local(location: str) -> Path:
    path = Path(os.path.abspath(os.path.expanduser(location)))
    if not os.path.exists(path):
        raise SourceError(f"{path} does not exist")
    if path.is_dir() and not os.listdir(path):
        raise SourceError(f"{path} is an empty folder")
    return path


def _https_address(location: str) -> str:
    scheme, rest = location.split("://", 1)
    scheme = scheme.lower()
    if scheme == "gs":
        return f"{BUCKETS}/{quote(rest)}"
    if scheme in ("https", "http"):
        return location
    raise SourceError(f"{location} begins with {scheme}:// (expected a path, https:// or gs://)")


def _fetch_url(url: str, cache_dir: str | os.PathLike | None, progress: bool) -> tuple[Path, str]:
    """Return (cached file, its sha256) of an address."""
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    if name in ("", ".."):
        raise SourceError(f"{url} names no file")
    assets_dir = Path(cache_dir) if cache_dir else None
    address_hash = hashlib.sha256(url.encode()).hexdigest()
    try:
        file = cached_assets_path("hf_vit", "downloads", address_hash, assets_dir=assets_dir) / name
        download = _Download(url, file, progress)
        if (sha256 := download.kept()) is None:
            with FileLock(f"{file}.lock"):  # another process may download the same file
                sha256 = download.kept() or download.run()
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot cache {url}: {error}") from error
    return file, sha256


@dataclass(frozen=True)
class _Record:
    """Record of a download, written when it begins, and again with the sha256 when it is complete."""

    url: str
    etag: str | None  # ETag, or else the date of change: the version that the first part belongs to
    size: int | None  # bytes, if the server tells
    sha256: str | None = None


class _InterruptedError(Exception):
    """A failure that another try may overcome."""


class _Download:
    """Download of one file from `url` to `file`, through `<file>.incomplete`."""

    def __init__(self, url: str, file: Path, progress: bool):
        self.url = url
        self.file = file
        self.partial = file.with_name(f"{file.name}.incomplete")
        self.record_file = file.with_name(f"{file.name}.json")
        self.progress = progress

    def kept(self) -> str | None:
        """Return the sha256 of the cached file; None if it is missing or damaged."""
        if not self.file.exists():
            return None
        record, sha256 = self._load(), sha256_of(self.file)
        return sha256 if record and record.sha256 == sha256 else None

    def run(self) -> str:
        """Download the file, replacing a damaged one; return its sha256."""
        if self.file.exists():
            _logger.warning(f"{self.file} is damaged: its sha256 has changed; downloading {self.url} again.")
        record, sha256 = self._receive_all(), sha256_of(self.partial)
        self._save(replace(record, sha256=sha256))
        os.replace(self.partial, self.file)
        return sha256

    def _receive_all(self) -> _Record:
        failures, most_received = 0, self._received()
        while True:
            try:
                return self._receive_rest()
            except _InterruptedError as error:
                received = self._received()
                failures = 1 if received > most_received else failures + 1
                most_received = max(most_received, received)
                if failures == MAX_FAILURES:
                    raise SourceError(
                        f"cannot download {self.url}: {MAX_FAILURES} failures in a row ({error}); "
                        f"the {received} bytes received are kept for the next try"
                    ) from error
                time.sleep(RETRY_WAIT * 2 ** (failures - 1))

    def _receive_rest(self) -> _Record:
        """Request the missing part once and append it."""
        record, start = self._load(), self._received()
        if record and record.size == start:
            return record
        headers = {"Accept-Encoding": "identity"}
        if record and record.etag and start:
            headers |= {"Range": f"bytes={start}-", "If-Range": record.etag}
        try:
            with open_address(self.url, TIMEOUT, headers) as response:
                self._check_status(response)
                record, start = self._what_comes(response, record, start)
                self._append(response, record, start)
                return record
        except AddressError as error:
            raise SourceError(str(error)) from error
        except OfflineModeIsEnabled as error:
            state = f"is damaged in the cache ({self.file})" if self.file.exists() else "is not in the cache"
            raise SourceError(f"{self.url} {state}, and HF_HUB_OFFLINE forbids downloading it") from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL) as error:
            raise SourceError(f"cannot reach {self.url} ({error}); download it elsewhere and pass the file") from error
        except httpx.RequestError as error:
            raise _InterruptedError(str(error) or type(error).__name__) from error

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in (200, 206):
            return self._check_size(_content_length(response) or 0)
        if status == 416:
            self.partial.unlink()
            raise _InterruptedError("the part received earlier does not match")
        if status in TRANSIENT_STATUS:
            raise _InterruptedError(f"HTTP {status} {response.reason_phrase}")
        meaning = {401: "is refused", 403: "is refused, or does not exist", 404: "does not exist"}.get(status, "fails")
        raise SourceError(f"{self.url} {meaning}: the server answers HTTP {status} {response.reason_phrase}")

    def _check_size(self, size: int) -> None:
        if size > MAX_CHECKPOINT_BYTES and not allowed("large"):
            self.partial.unlink(missing_ok=True)
            limit = f"at most {MAX_CHECKPOINT_BYTES:,} are downloaded; set HF_VIT_ALLOW=large to download more"
            raise SourceError(f"{self.url} has {size:,} bytes or more; {limit}")

    def _what_comes(self, response: httpx.Response, record: _Record | None, start: int) -> tuple[_Record, int]:
        """Return (record of the response, offset of its body); the offset is 0 if the server sends the whole file."""
        if response.status_code == 200:
            return _Record(self.url, _version(response), _content_length(response)), 0
        is_next_part = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if record and is_next_part and _version(response) == record.etag:
            return record, start
        self.partial.unlink(missing_ok=True)
        raise _InterruptedError("the server sent another part than the missing one")

    def _append(self, response: httpx.Response, record: _Record, start: int) -> None:
        try:
            with open(self.partial, "ab" if start else "wb") as file, self._progress_bar(record, start) as bar:
                if start == 0:
                    self._save(record)
                for chunk in response.iter_raw():
                    start += len(chunk)
                    self._check_size(start)
                    file.write(chunk)
                    bar.update(len(chunk))
        except OSError as error:
            raise SourceError(
                f"cannot write {self.partial} ({error.strerror}): {self._received()} of {record.size} bytes are kept; "
                f"the next try continues from there"
            ) from error
        if record.size not in (None, self._received()):
            raise _InterruptedError(f"received only {self._received()} of {record.size} bytes")

    def _progress_bar(self, record: _Record, start: int) -> tqdm:
        off = None if self.progress else True  # None: off if stderr is no terminal
        return tqdm(desc=self.file.name, total=record.size, initial=start, unit="B", unit_scale=True, disable=off)

    def _received(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _load(self) -> _Record | None:
        try:
            return _Record(**json.loads(self.record_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None  # without a record, the download begins again

    def _save(self, record: _Record) -> None:
        temporary = self.record_file.with_name(f"{self.record_file.name}.incomplete")
        temporary.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.record_file)


def _version(response: httpx.Response) -> str | None:
    """Return the version for `If-Range` (RFC 9110, 13.1.5): a strong ETag, or else the date of the last change."""
    etag = response.headers.get("ETag", "W/")
    return response.headers.get("Last-Modified") if etag.startswith("W/") else etag


def _content_length(response: httpx.Response) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None
