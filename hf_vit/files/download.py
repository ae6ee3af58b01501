"""Everything that comes from an address: a file or a folder, downloaded once into a cache, and shards of a dataset."""

import hashlib
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

from filelock import FileLock
from huggingface_hub import cached_assets_path, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import httpx, tqdm

from .addresses import UnsafeURLError, check_public, check_url, open_url
from .addresses import redact_secrets as redact_secrets
from .json_files import read_json_object, read_text
from .limits import MAX_ARRAYS, MAX_CHECKPOINT_BYTES, allowed, check_limit
from .manifest import sha256_of
from .messages import shorten
from .output import write_json

_logger = logging.getLogger(__name__)
BUCKETS = "https://storage.googleapis.com"  # the public address of gs://
MAX_FAILURES = 3  # consecutive failures without any progress
TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds without an answer or a byte
MIN_SPEED, GRACE = 1024, 60.0  # bytes per second, after so many seconds: a slow server cannot block forever
_MAX_IMAGE_BYTES = 2**26
_IMAGE_TIME = 60.0  # seconds for an image
RETRY_WAIT = 1.0  # seconds before the second try; twice as long before the third
_STORES = ("s3", "gs", "gcs", "hf", "az", "abfs", "abfss")  # file systems of fsspec that encrypt, at public addresses
_UNREACHABLE = (httpx.ConnectError, httpx.ConnectTimeout)  # not tried again
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}  # tried again (RFC 9110, 6585)
_LATEST = "-LAST"  # big_vision's file NAME-LAST holds the step of the folder NAME-<step>
_OPTIMIZER = re.compile(r"opt(_state)?[~./]")  # beginning of the names of files that hold only an optimizer's state


class SourceError(OSError):
    """A checkpoint that cannot be found or downloaded; the message says why."""


class UnavailableError(SourceError):
    """A source that cannot provide a file now; another source may have it."""


@dataclass(frozen=True)
class Fetched:
    """A checkpoint on this machine.

    Attributes:
        location: path or address, as the user gave it.
        path: the local file or folder.
        sha256: checksum of a downloaded file; None for others.
        copy: name on the Hub of a copy in another format, taken because the location was unavailable; None for the
            file itself.
    """

    location: str
    path: Path
    sha256: str | None = field(default=None, compare=False)
    copy: str | None = None


def fetch(location: str | os.PathLike, cache_dir: str | os.PathLike | None = None, progress: bool = True) -> Fetched:
    """Find a checkpoint; download it if it is not in the cache yet.

    A download goes to `hf_vit/downloads/<sha256 of the address>/` in the Hugging Face assets cache (`HF_ASSETS_CACHE`,
    by default `HF_HOME/assets`). An interrupted download is resumed. Address, ETag, size and sha256 are kept in
    `<file name>.json` next to the file; a cached file with another sha256 is downloaded again.

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
        return Fetched(location, *_fetch_url(https_address(location), cache_dir, progress))
    path = Path(os.path.abspath(os.path.expanduser(location)))
    if not os.path.exists(path):
        raise UnavailableError(f"{path} does not exist")
    if path.is_dir() and not os.listdir(path):
        raise SourceError(f"{path} is an empty folder")
    return Fetched(location, path)


def public_name(source: Fetched) -> str:
    """Return a checkpoint's origin for publication: without local folders, user names and signatures.

    >>> public_name(Fetched("https://me:secret@host/x.npz?signature=abc", Path("x.npz")))
    'https://host/x.npz'
    """
    is_local = os.path.exists(os.path.expanduser(source.location))
    return source.path.name if is_local else redact_secrets(source.location)


def sha256_at(path: Path) -> str:
    """Return the hexadecimal sha256 of a file; of a folder, that of the lines `<sha256>  <name>` of its files.

    A name is the path inside the folder, with slashes, and the lines are sorted by it. `find . -type f | sed 's|^./||'
    | LC_ALL=C sort | xargs sha256sum | sha256sum` prints the same, if no name contains a space.
    """
    if not path.is_dir():
        return sha256_of(path)
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    lines = [f"{sha256_of(path / name)}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def fetch_image(image: Any) -> Any:
    """Return an image; one that is given by its address is downloaded, as {"bytes", "path"}.

    Raises:
        ImageReadingError: it cannot be downloaded: the address is not allowed, the file is too large, or it takes too
            long.
    """
    if not (isinstance(image, str) and image.startswith(("https://", "http://"))):
        return image
    from ..models.image_decoding import ImageReadingError  # imports Pillow

    end = time.monotonic() + _IMAGE_TIME
    body = bytearray()
    try:
        with open_url(image, TIMEOUT, {"Accept-Encoding": "identity"}) as response:
            if response.status_code != 200:
                raise ValueError(f"the server returned HTTP {response.status_code} {response.reason_phrase}")
            for chunk in response.iter_raw():
                check_limit("it has too many bytes", len(body) + len(chunk), _MAX_IMAGE_BYTES)
                body += chunk
                if time.monotonic() > end:
                    raise ValueError(f"the download did not finish within {_IMAGE_TIME:g} seconds")
    except (ValueError, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise ImageReadingError(f"cannot read {redact_secrets(image)}: {reason}") from error
    return {"bytes": bytes(body), "path": image}


def https_address(location: str) -> str:
    scheme, rest = location.split("://", 1)
    scheme = scheme.lower()
    if scheme == "gs" and "@" not in rest.split("/")[0]:  # a bucket has no user name
        return f"{BUCKETS}/{quote(rest)}"
    if scheme in ("https", "http"):
        return location
    raise SourceError(f"cannot read {redact_secrets(location)} (expected a path, https:// or gs://bucket/name)")


def _fetch_url(url: str, cache_dir: str | os.PathLike | None, progress: bool) -> tuple[Path, str]:
    """Return (cached file, its sha256) of an address."""
    name, file_name = redact_secrets(url), PurePosixPath(unquote(urlsplit(url).path)).name
    if file_name in ("", ".."):
        raise SourceError(f"{name} has no file name (expected https://HOST/FILE or gs://BUCKET/FILE)")
    try:
        file = _cache_path(url, file_name, cache_dir)
        download = _Download(url, file, progress)
        if (sha256 := download.kept()) is None:
            with FileLock(f"{file}.lock"):  # another process may download the same file
                sha256 = download.kept() or download.run()
        return file, sha256
    except SourceError:
        raise
    except OfflineModeIsEnabled as error:
        state = "is not in the cache, or is damaged there"
        raise UnavailableError(f"{name} {state}, and HF_HUB_OFFLINE forbids downloading it") from error
    except (*_UNREACHABLE, httpx.InvalidURL) as error:
        raise UnavailableError(f"cannot reach {name} ({error}); download it elsewhere and pass the file") from error
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot cache {name}: {error}") from error


def _cache_path(address: str, name: str, cache_dir: str | os.PathLike | None) -> Path:
    """Return the path in the cache of a file or folder, by its address and its name."""
    address_hash = hashlib.sha256(address.encode()).hexdigest()
    assets_dir = Path(cache_dir) if cache_dir else None
    return cached_assets_path("hf_vit", "downloads", address_hash, assets_dir=assets_dir) / name


def filesystem_of(address: str) -> tuple[Any, str]:
    """Return the file system of fsspec for an address, such as that of a shard, and the path in it.

    Of http, every connection and redirect must lead to an encrypted and public address, as in `fetch`.

    Raises:
        UnsafeURLError: the address is not encrypted or not public, and `HF_VIT_ALLOW` does not allow it.
    """
    import fsspec  # not at the top: the import is slow

    scheme = address.split(":", 1)[0]
    if "::" in address:  # fsspec would open each part of it
        raise UnsafeURLError(
            f"{redact_secrets(address)} contains ::, which chains file systems (expected https://... alone)"
        )
    if scheme in _STORES or (allowed("private") and "http" not in address.lower()):
        return fsspec.core.url_to_fs(address)
    check_url(address)
    return fsspec.core.url_to_fs(address, get_client=_public_session)


async def _public_session(**options: Any) -> Any:
    import aiohttp

    def open_socket(address: Any) -> socket.socket:
        if not allowed("private"):
            check_public("the dataset", address[4][0])
        return socket.socket(*address[:3])

    async def check_redirect(session: Any, context: Any, redirect: Any) -> None:
        check_url(urljoin(str(redirect.url), redirect.response.headers["Location"]))

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check_redirect)
    connector = aiohttp.TCPConnector(socket_factory=open_socket)
    return aiohttp.ClientSession(connector=connector, trace_configs=[trace], **options)


class _InterruptedError(Exception):
    """A failure that another try may overcome."""


class _Download:
    """Download of one file from `url` to `file`, through `<file>.incomplete`.

    huggingface_hub's `http_get` does not check where redirects lead, nor that the rest is of the same version as the
    first part.

    The record next to the file has its url, etag (else the date of change: the version that the first part belongs to),
    size if the server tells, and the sha256 once it is complete.
    """

    def __init__(self, url: str, file: Path, progress: bool):
        self.url, self.name = url, redact_secrets(url)
        self.file = file
        self.partial = file.with_name(f"{file.name}.incomplete")
        self.record_file = file.with_name(f"{file.name}.json")
        self.progress = progress
        self.end = math.inf  # of the whole download, all connections together

    def kept(self) -> str | None:
        """Return the sha256 of the cached file; None if it is missing or damaged."""
        if not self.file.exists():
            return None
        recorded, sha256 = self._load().get("sha256"), sha256_of(self.file)
        return sha256 if recorded == sha256 else None

    def run(self) -> str:
        """Download the file, replacing a damaged one; return its sha256."""
        if self.file.exists():
            _logger.warning(f"{self.file} is damaged: its sha256 has changed; downloading {self.name} again.")
        failures, most_received = 0, self._received()
        self.end = time.monotonic() + GRACE
        while True:
            try:
                self._receive_rest()
                break
            except _UNREACHABLE:
                raise
            except (httpx.RequestError, _InterruptedError) as error:
                received = self._received()
                failures = 1 if received > most_received else failures + 1
                most_received = max(most_received, received)
                if failures == MAX_FAILURES:
                    reason = str(error) or type(error).__name__
                    raise UnavailableError(
                        f"cannot download {self.name}: {MAX_FAILURES} failures in a row ({reason}); "
                        f"the {received} bytes received are kept for the next try"
                    ) from error
                self._check_speed(0)
                time.sleep(RETRY_WAIT * 2 ** (failures - 1))
        sha256 = sha256_of(self.partial)
        write_json(self.record_file, self._load() | {"sha256": sha256})
        os.replace(self.partial, self.file)
        return sha256

    def _receive_rest(self) -> None:
        """Request the missing part once and append it."""
        record, start = self._load(), self._received()
        if record and record["size"] == start:
            return
        headers = {"Accept-Encoding": "identity"}
        if start and record.get("etag"):
            headers |= {"Range": f"bytes={start}-", "If-Range": record["etag"]}
        with open_url(self.url, TIMEOUT, headers) as response:
            status, sent = response.status_code, response.headers.get("Content-Range", "")
            is_rest = bool(record) and _version(response) == record["etag"] and sent.startswith(f"bytes {start}-")
            if status == 200:  # the whole file
                start = 0
                record = {"url": self.url, "etag": _version(response), "size": _content_length(response)}
                write_json(self.record_file, record | {"sha256": None})
            elif status == 416 or (status == 206 and not is_rest):
                self.partial.unlink(missing_ok=True)
                raise _InterruptedError("the server did not send the requested byte range")
            elif status in TRANSIENT_STATUS:
                raise _InterruptedError(f"HTTP {status} {response.reason_phrase}")
            elif status != 206:
                reason = f"the server answers {status} {response.reason_phrase}"
                raise UnavailableError(f"{self.name} cannot be downloaded: {reason}")
            self._append(response, record["size"], start)

    def _append(self, response: httpx.Response, size: int | None, start: int) -> None:
        off = None if self.progress else True  # None: off if stderr is no terminal
        bar = tqdm(desc=self.file.name, total=size, initial=start, unit="B", unit_scale=True, disable=off)
        received = 0
        self._check_size(size or 0)
        with open(self.partial, "ab" if start else "wb") as file, bar:
            for chunk in response.iter_raw():
                received += len(chunk)
                self._check_size(start + received)
                file.write(chunk)
                self._check_speed(len(chunk))
                bar.update(len(chunk))
        if size not in (None, self._received()):
            raise _InterruptedError(f"received only {self._received()} of {size} bytes")

    def _check_speed(self, received: int) -> None:
        """Raise UnavailableError if the bytes so far, and so many more, took too long."""
        self.end += received / MIN_SPEED
        if time.monotonic() > self.end:
            raise UnavailableError(f"{self.name} downloads too slowly; run the command again to continue")

    def _check_size(self, size: int) -> None:
        check_limit(f"{self.name} has {size:,} bytes or more", size, MAX_CHECKPOINT_BYTES, SourceError)

    def _received(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _load(self) -> dict[str, Any]:
        """Return the record; without one, the download begins again."""
        try:
            record = read_json_object(self.record_file)
        except (OSError, ValueError):
            return {}
        return record if {"etag", "size"} <= record.keys() else {}


def _version(response: httpx.Response) -> str | None:
    """Return the version for `If-Range` (RFC 9110, 13.1.5): a strong ETag, or else the date of the last change."""
    etag = response.headers.get("ETag", "W/")
    return response.headers.get("Last-Modified") if etag.startswith("W/") else etag


def _content_length(response: httpx.Response) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


def is_folder_address(location: str) -> bool:
    """Return whether an address names a folder: it ends with a slash, or is big_vision's NAME-LAST."""
    return location.startswith("gs://") and location.endswith(("/", _LATEST))


def fetch_folder(location: str, cache_dir: str | os.PathLike | None = None) -> Fetched:
    """Download a folder of a public bucket into the cache, without the optimizer's state; a complete folder is reused.

    Args:
        location: `gs://bucket/folder/`, or `gs://bucket/NAME-LAST` for the folder of the step that this file holds.
        cache_dir: folder to use instead of the assets cache.

    Raises:
        SourceError: it does not exist, cannot be reached, or exceeds a limit on files or bytes.
    """
    address = _latest_of(location) if location.endswith(_LATEST) else location
    kept = _cache_path(address, PurePosixPath(address).name, cache_dir)
    with FileLock(f"{kept}.lock"):  # another process may download the same folder
        if not kept.is_dir():
            _assemble(address, kept, cache_dir)
    return Fetched(location, kept)


def _latest_of(location: str) -> str:
    """Return the address of the folder whose step NAME-LAST holds; the file is downloaded every time."""
    with tempfile.TemporaryDirectory() as folder:
        step = read_text(fetch(location, folder).path, max_bytes=100).strip()
    if not step.isdecimal():
        raise SourceError(f"{location} holds {shorten(step)} (expected a step number)")
    return f"{location.removesuffix(_LATEST)}-{step}/"


def _assemble(address: str, kept: Path, cache_dir: str | os.PathLike | None) -> None:
    """Download every file; the folder appears when it is complete."""
    bucket, _, prefix = address.removeprefix("gs://").partition("/")
    files = {}  # name inside the folder -> bytes
    for name, size in _list(bucket, prefix).items():
        if not _OPTIMIZER.match(name.removeprefix(prefix)):
            files[name.removeprefix(prefix)] = size
    if not files:
        raise SourceError(f"{address} does not exist, or holds no files")
    size = sum(files.values())
    check_limit(f"{address} has {size:,} bytes", size, MAX_CHECKPOINT_BYTES, SourceError)
    draft = kept.with_name(f"{kept.name}.incomplete")
    for name in files:
        if set(name.split("/")) & {"", ".", ".."} or "\\" in name:
            raise SourceError(f"{address} holds {shorten(name)} (expected names of files inside the folder)")
        target = draft / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(fetch(f"gs://{bucket}/{prefix}{name}", cache_dir).path, target)
    os.replace(draft, kept)


def _list(bucket: str, prefix: str) -> dict[str, int]:
    """Return the bytes of every file below a folder, by name.

    See https://cloud.google.com/storage/docs/json_api/v1/objects/list.
    """
    files: dict[str, int] = {}
    token = ""
    while True:
        query = f"prefix={quote(prefix, safe='')}&pageToken={quote(token, safe='')}"
        url = f"{BUCKETS}/storage/v1/b/{quote(bucket, safe='')}/o?fields=items(name,size),nextPageToken&{query}"
        with tempfile.TemporaryDirectory() as folder:  # not the cache: a listing may change
            page = read_json_object(fetch(url, folder, progress=False).path)
        for item in page.get("items", ()):
            if not item["name"].endswith("/"):  # a folder
                files[item["name"]] = int(item["size"])
        if len(files) > MAX_ARRAYS:
            raise SourceError(f"gs://{bucket}/{prefix} has more than {MAX_ARRAYS:,} files")
        token = str(page.get("nextPageToken") or "")
        if not token:
            return files
