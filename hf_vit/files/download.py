"""Where a checkpoint comes from: a local file or folder, or an address whose file is downloaded once and kept."""

import hashlib
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from filelock import FileLock
from huggingface_hub import cached_assets_path, constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import httpx, tqdm

from .limits import MAX_CHECKPOINT_BYTES, allowed

_logger = logging.getLogger(__name__)

BUCKETS = "https://storage.googleapis.com"  # the public address of gs://
MAX_FAILURES = 3  # in a row, without a byte of progress between them
TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT  # seconds without an answer or a byte
RETRY_WAIT = 1.0  # seconds before the second try; doubled before the third
TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}  # worth another try (RFC 9110, 6585)
_MAX_REDIRECTS = 5


class SourceError(OSError):
    """Why a checkpoint cannot be had, in one sentence."""


@dataclass(frozen=True)
class Fetched:
    """A checkpoint on this machine: what the user gave, and the local file or folder that it leads to.

    sha256: of the file, where it was computed: of downloads.
    """

    location: str
    path: Path
    sha256: str | None = field(default=None, compare=False)


def fetch(location: str | os.PathLike, cache_dir: str | os.PathLike | None = None, progress: bool = True) -> Fetched:
    """Find a checkpoint, downloading it if it is not here yet.

    A download goes to `hf_vit/downloads/<sha256 of the address>/` in the Hugging Face assets cache (`HF_ASSETS_CACHE`,
    by default `HF_HOME/assets`), is taken up where it broke off, and is not repeated once it is complete. Its address,
    ETag, size and sha256 stand beside it in `<file name>.json`; a file that has another sha256 is downloaded anew.

    Args:
        location: a local file or folder, `https://...`, `gs://bucket/path` (read through its public https address),
            or, where `HF_VIT_ALLOW` allows it, `http://...`.
        cache_dir: the folder to use in place of the assets cache.
        progress: whether to show a progress bar; none is shown where stderr is no terminal.

    Raises:
        SourceError: if it does not exist, cannot be reached, is refused, or does not fit on the disk.
    """
    location = os.fspath(location)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location):
        return Fetched(location, *_fetch_url(_https_address(location), cache_dir, progress))
    return Fetched(location, _find_local(location))


def public_name(source: Fetched) -> str:
    """Where a checkpoint comes from, as everybody may know it: without folders of this machine, names and signatures.

    >>> public_name(Fetched("https://me:secret@host/x.npz?signature=abc", Path("x.npz")))
    'https://host/x.npz'
    """
    if source.location.lower().startswith("http"):  # in gs:// a question mark is part of the name
        parts = urlsplit(source.location)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return source.path.name if os.path.exists(os.path.expanduser(source.location)) else source.location


def sha256_of(path: str | os.PathLike) -> str:
    """The hexadecimal sha256 of a file; hashing leaves other threads running."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file:
        while length := file.readinto(block):
            digest.update(block[:length])
    return digest.hexdigest()


def sha256_at(path: Path) -> str:
    """`sha256_of` a file, `sha256_of_folder` of a folder."""
    return sha256_of_folder(path) if path.is_dir() else sha256_of(path)


def sha256_of_folder(folder: str | os.PathLike) -> str:
    """The hexadecimal sha256 over the files of a folder: over a line `<sha256>  <name>` for each, sorted by name.

    A name is the path below the folder, with slashes. So `find . -type f | sed 's|^./||' | LC_ALL=C sort | xargs
    sha256sum | sha256sum` has it too, where no name has spaces.
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
    raise SourceError(f"{location} begins with {scheme}://; a path, https:// or gs:// is needed")


def _fetch_url(url: str, cache_dir: str | os.PathLike | None, progress: bool) -> tuple[Path, str]:
    """The file of an address, and its sha256."""
    name = PurePosixPath(unquote(urlsplit(url).path)).name
    if name in ("", ".."):
        raise SourceError(f"{url} names no file")
    assets_dir = Path(cache_dir) if cache_dir else None
    address_hash = hashlib.sha256(url.encode()).hexdigest()
    try:
        file = cached_assets_path("hf_vit", "downloads", address_hash, assets_dir=assets_dir) / name
        download = _Download(url, file, progress)
        if (sha256 := download.kept()) is None:
            with FileLock(f"{file}.lock"):  # another process may be at the same download
                sha256 = download.kept() or download.run()
    except SourceError:
        raise
    except (OSError, ValueError) as error:
        raise SourceError(f"{url} cannot be kept in the cache: {error}") from error
    return file, sha256


@dataclass(frozen=True)
class _Record:
    """What is known of a download: written when its first bytes come, and again with the sha256 when all have come."""

    url: str
    etag: str | None  # or else the date of change; tells the server which version the first part is of
    size: int | None  # bytes, if the server says
    sha256: str | None = None


class _InterruptedError(Exception):
    """A failure that another try may mend."""


class _Download:
    """One file on its way from `url` to `file`, by way of `<file>.incomplete`."""

    def __init__(self, url: str, file: Path, progress: bool):
        self.url = url
        self.file = file
        self.partial = file.with_name(f"{file.name}.incomplete")
        self.record_file = file.with_name(f"{file.name}.json")
        self.progress = progress

    def kept(self) -> str | None:
        """The sha256 of the file, if it is here and is what was downloaded."""
        if not self.file.exists():
            return None
        record, sha256 = self._load(), sha256_of(self.file)
        return sha256 if record and record.sha256 == sha256 else None

    def run(self) -> str:
        """Download the file, in the place of one that is damaged; return its sha256."""
        if self.file.exists():
            _logger.warning(f"{self.file} is not what was downloaded from {self.url}; downloading it anew.")
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
                        f"{self.url} failed {MAX_FAILURES} times in a row ({error}); "
                        f"the {received} bytes that came are kept for the next time"
                    ) from error
                time.sleep(RETRY_WAIT * 2 ** (failures - 1))

    def _receive_rest(self) -> _Record:
        """Ask once for what is missing and append what comes."""
        record, start = self._load(), self._received()
        if record and record.size == start:
            return record
        headers = {"Accept-Encoding": "identity"}
        if record and record.etag and start:
            headers |= {"Range": f"bytes={start}-", "If-Range": record.etag}
        try:
            with _open_address(self.url, TIMEOUT, headers) as response:
                self._check_status(response)
                record, start = self._what_comes(response, record, start)
                self._append(response, record, start)
                return record
        except _AddressError as error:
            raise SourceError(str(error)) from error
        except OfflineModeIsEnabled as error:
            state = f"is damaged in the cache ({self.file})" if self.file.exists() else "is not in the cache"
            raise SourceError(f"{self.url} {state} and HF_HUB_OFFLINE forbids downloading it") from error
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.InvalidURL) as error:
            raise SourceError(
                f"{self.url} cannot be reached ({error}); download it elsewhere and pass the file"
            ) from error
        except httpx.RequestError as error:
            raise _InterruptedError(str(error) or type(error).__name__) from error

    def _check_status(self, response: httpx.Response) -> None:
        status = response.status_code
        if status in (200, 206):
            return self._check_size(_content_length(response) or 0)
        if status == 416:
            self.partial.unlink()
            raise _InterruptedError("what was received earlier does not fit")
        if status in TRANSIENT_STATUS:
            raise _InterruptedError(f"HTTP {status} {response.reason_phrase}")
        meaning = {401: "is refused", 403: "is refused, or is not there", 404: "is not there"}.get(status, "fails")
        raise SourceError(f"{self.url} {meaning}: the server answers HTTP {status} {response.reason_phrase}")

    def _check_size(self, size: int) -> None:
        if size > MAX_CHECKPOINT_BYTES and not allowed("large"):
            self.partial.unlink(missing_ok=True)
            limit = f"at most {MAX_CHECKPOINT_BYTES:,} are downloaded (HF_VIT_ALLOW=large downloads more)"
            raise SourceError(f"{self.url} has {size:,} bytes or more; {limit}")

    def _what_comes(self, response: httpx.Response, record: _Record | None, start: int) -> tuple[_Record, int]:
        """The record that the body belongs to and the offset where it begins: 0 if the server sends it all again."""
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
                f"{self.partial} cannot be written ({error.strerror}): {self._received()} of {record.size} bytes "
                f"have been kept and the next try goes on from there"
            ) from error
        if record.size not in (None, self._received()):
            raise _InterruptedError(f"{self._received()} of {record.size} bytes came")

    def _progress_bar(self, record: _Record, start: int) -> tqdm:
        off = None if self.progress else True  # None: only where stderr is no terminal
        return tqdm(desc=self.file.name, total=record.size, initial=start, unit="B", unit_scale=True, disable=off)

    def _received(self) -> int:
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _load(self) -> _Record | None:
        try:
            return _Record(**json.loads(self.record_file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None  # without it the download begins again

    def _save(self, record: _Record) -> None:
        temporary = self.record_file.with_name(f"{self.record_file.name}.incomplete")
        temporary.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, self.record_file)


def _version(response: httpx.Response) -> str | None:
    """What `If-Range` takes (RFC 9110, 13.1.5): a strong ETag, or else the date of the last change."""
    etag = response.headers.get("ETag", "W/")
    return response.headers.get("Last-Modified") if etag.startswith("W/") else etag


def _content_length(response: httpx.Response) -> int | None:
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdecimal() else None


# Which addresses are asked. The same text is in images/image_reading.py, which travels to the Hub without this file.


class _AddressError(ValueError):
    """An address that is not asked, in one sentence."""


@contextmanager
def _open_address(url: str, timeout: float, headers: Mapping[str, str]) -> Iterator[Any]:
    """Ask for an encrypted address of a public machine; each redirect is held to the same.

    Both the machines of a name, before it is asked, and the one that a connection leads to, before anything is sent.

    Args:
        timeout: seconds without an answer or a byte.

    Yields:
        The response of httpx; its body is yet to come.

    Raises:
        _AddressError: an address is not encrypted or not public, and `HF_VIT_ALLOW` does not allow it.
        httpx.RequestError: it cannot be reached.
    """
    for _ in range(_MAX_REDIRECTS + 1):
        _check_address(url)
        watch: dict[str, Any] = {"trace": partial(_check_connection, url)}
        request: dict[str, Any] = {"headers": headers, "timeout": timeout, "extensions": watch}
        with get_session().stream("GET", url, follow_redirects=False, **request) as response:
            if response.next_request is None:
                yield response
                return
            url = str(response.next_request.url)
    raise _AddressError(f"{_bare(url)} is one of more than {_MAX_REDIRECTS} redirects")


def _check_address(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme == "http" and not allowed("http"):
        raise _AddressError(f"{_bare(url)} is not encrypted: use https://, or set HF_VIT_ALLOW=http")
    if parts.scheme not in ("http", "https"):
        raise _AddressError(f"{_bare(url)} begins with {parts.scheme[:20]}: (expected https://)")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host:
        raise _AddressError(f"{_bare(url)} names no machine")
    try:
        found = [] if allowed("private") else socket.getaddrinfo(host, port or 443, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # left to whoever connects: a proxy may know the name
    for *_, address in found:
        _refuse_private(url, str(address[0]))


def _check_connection(url: str, event: str, about: Mapping[str, Any]) -> None:
    """Check where a new connection leads, since a name may have led elsewhere a moment ago; a proxy is the user's."""
    if event != "connection.connect_tcp.complete" or allowed("private"):
        return
    parts, proxies = urlsplit(url), getproxies()
    if (proxies.get(parts.scheme) or proxies.get("all")) and not proxy_bypass(parts.hostname or ""):
        return
    try:
        _refuse_private(url, about["return_value"].get_extra_info("server_addr")[0])
    except _AddressError:
        about["return_value"].close()
        raise


def _refuse_private(url: str, address: str) -> None:
    if not _is_public(ip_address(address)):
        raise _AddressError(f"{_bare(url)} leads to {address}, which is not public; HF_VIT_ALLOW=private allows it")


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour
        if int(address) >> 32 == 0x0064FF9B << 64:  # 64:ff9b::/96, NAT64's (RFC 6052)
            embedded = IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return _is_public(embedded)
    return address.is_global and not address.is_multicast


def _bare(url: str) -> str:
    """An address for messages: without names, keys and signatures, and not longer than a line."""
    parts = urlsplit(url)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    return bare if len(bare) <= 200 else f"{bare[:200]}..."
