"""`fetch` against a local HTTP server that interrupts, refuses and changes its files."""

import hashlib
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from hf_vit.files import download as sources
from hf_vit.files.download import Fetched, SourceError, fetch, public_name
from hf_vit.files.manifest import sha256_of

from ..processes import start

BODY = random.Random(7).randbytes(300_007)


class Source:
    """A server of one body at every path; each list has one entry per coming request."""

    def __init__(self, serve, cache):
        self.cache = cache
        self.body = BODY
        self.version = {"ETag": '"v1"'}
        self.takes_ranges = True
        self.says_length = True
        self.wrong_range = False
        self.always_a_part = False  # also where nobody asked for it
        self.statuses: list[int] = []  # answered in place of the body
        self.cuts: list[int] = []  # bytes after which the connection breaks
        self.pause_at: int | None = None  # bytes after which the body waits for `go_on`
        self.go_on = threading.Event()
        server = serve(self.answer)
        self.requests, self.url = server.requests, f"{server.url}/models/vit%20tiny.npz"

    @property
    def ranges(self):
        return [request.get("Range") for request in self.requests]

    def kept(self, suffix=""):
        """The file in the cache."""
        address_hash = hashlib.sha256(self.url.encode()).hexdigest()
        return self.cache / "hf_vit" / "downloads" / address_hash / f"vit tiny.npz{suffix}"

    def answer(self, handler):
        if self.statuses:
            return handler.send_error(self.statuses.pop(0))
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range", ""))
        is_same = handler.headers.get("If-Range") in self.version.values()
        start = int(wanted[1]) if wanted and is_same and self.takes_ranges else 0
        if start >= len(self.body):
            return handler.send_error(416)
        headers = {**self.version}
        is_part = bool(start) or self.always_a_part
        if is_part:
            said_start = 0 if self.wrong_range else start
            headers["Content-Range"] = f"bytes {said_start}-{len(self.body) - 1}/{len(self.body)}"
        if self.says_length:
            headers["Content-Length"] = str(len(self.body) - start)
        handler.send_head(206 if is_part else 200, **headers)
        data = self.body[start:][: self.cuts.pop(0) if self.cuts else None]
        handler.wfile.write(data[: self.pause_at])
        handler.wfile.flush()
        if self.pause_at is not None:
            self.go_on.wait(timeout=60)
            handler.wfile.write(data[self.pause_at :])
        return None


@pytest.fixture
def server(serve, monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "RETRY_WAIT", 0.0)
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path))
    source = Source(serve, tmp_path)
    yield source
    source.go_on.set()


def test_download_is_kept_and_recorded(server, tmp_path):
    source = fetch(server.url)
    assert source == Fetched(server.url, server.kept())
    assert source.path.read_bytes() == BODY
    assert json.loads(server.kept(".json").read_text()) == {
        "url": server.url,
        "etag": '"v1"',
        "size": len(BODY),
        "sha256": hashlib.sha256(BODY).hexdigest(),
    }
    assert not server.kept(".incomplete").exists()
    server.statuses = [500]
    assert fetch(server.url) == source
    assert len(server.requests) == 1
    other = tmp_path / "other"
    assert fetch(f"{server.url}?generation=5", other).path.relative_to(other / "hf_vit").name == "vit tiny.npz"


@pytest.mark.parametrize("harm", ["a flipped bit", "a broken record"])
def test_a_damaged_cached_file_is_downloaded_again(harm, server, monkeypatch, caplog):
    fetch(server.url)
    if harm == "a flipped bit":
        server.kept().write_bytes(bytes([BODY[0] ^ 1]) + BODY[1:])
    else:
        server.kept(".json").write_text("{")
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        close_session()
        with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
            fetch(server.url)
    close_session()
    source = fetch(server.url)
    assert source.path.read_bytes() == BODY
    assert source.sha256 == hashlib.sha256(BODY).hexdigest()
    assert str(server.kept()) in caplog.text
    assert fetch(server.url).sha256 == source.sha256
    assert len(server.requests) == 2


def test_cut_bodies_are_resumed_at_the_byte(server):
    """After any number of interruptions with progress between them."""
    server.cuts = [100_003, 70_001, *[10_000] * 7]
    assert fetch(server.url).path.read_bytes() == BODY
    assert server.ranges[:3] == [None, "bytes=100003-", "bytes=170004-"]
    assert [request.get("If-Range") for request in server.requests] == [None, *['"v1"'] * 9]


def test_a_very_slow_download_ends_with_an_error(server, monkeypatch):
    monkeypatch.setattr(sources, "GRACE", 0.2)
    monkeypatch.setattr(sources, "MIN_SPEED", 2**20)
    server.pause_at = 100_003
    threading.Timer(1.0, server.go_on.set).start()
    with pytest.raises(SourceError, match=re.escape(server.url)):
        fetch(server.url)
    server.pause_at = None
    assert fetch(server.url).path.read_bytes() == BODY


def headers_without_end(handler):
    handler.send_response(200)
    handler.flush_headers()
    while True:
        yield
        handler.wfile.write(b"X-Header: 1\r\n")


def one_byte_at_a_time(handler):
    handler.send_head(ETag='"v1"', Content_Length="1000000")
    while True:
        yield
        handler.wfile.write(b"x")


def one_byte_per_connection(handler):
    start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
    part = {"Content_Range": f"bytes {start}-999999/1000000"} if start else {}
    handler.send_head(206 if start else 200, ETag='"v1"', Content_Length=str(1_000_000 - start), **part)
    yield
    handler.wfile.write(b"x")


@pytest.mark.parametrize("steps", [headers_without_end, one_byte_at_a_time, one_byte_per_connection])
def test_no_server_holds_a_download_forever(serve, monkeypatch, tmp_path, steps):
    monkeypatch.setattr(sources, "RETRY_WAIT", 0.0)
    monkeypatch.setattr(sources, "GRACE", 0.3)
    monkeypatch.setattr("hf_vit.files.addresses.MAX_WAIT", 0.1)
    is_over = threading.Event()

    def answer(handler):
        for _ in steps(handler):
            if is_over.wait(0.02):
                return

    server = serve(answer)
    with pytest.raises(SourceError, match=re.escape(server.url)):
        fetch(f"{server.url}/x.npz", tmp_path)
    is_over.set()


def test_messages_have_no_passwords_and_signatures(server):
    server.statuses = [404]
    with pytest.raises(SourceError) as refusal:
        fetch(f"{server.url}?signature=hidden".replace("//", "//me:hidden@"))
    assert "hidden" not in str(refusal.value)
    for scheme in ("ftp", "gs"):
        with pytest.raises(SourceError) as refusal:
            fetch(f"{scheme}://me:hidden@host/x.npz")
        assert "hidden" not in str(refusal.value)


@pytest.fixture
def interrupted(server):
    """The server of a download that ended after 100003 bytes."""
    server.cuts = [100_003, 0, 0]
    with pytest.raises(SourceError, match="100003"):
        fetch(server.url)
    return server


@pytest.mark.parametrize("change", [None, "all bytes are there", "too many bytes are there", "broken record"])
def test_a_later_call_handles_any_state_of_the_cache(change, interrupted):
    partial = interrupted.kept(".incomplete")
    if change == "all bytes are there":
        partial.write_bytes(BODY)
        interrupted.statuses = [500] * 3
    elif change == "too many bytes are there":
        partial.write_bytes(BODY + b"more")
    elif change == "broken record":
        interrupted.kept(".json").write_text("{")
    assert fetch(interrupted.url).path.read_bytes() == BODY
    assert change or interrupted.ranges[-1] == "bytes=100003-"


def test_a_changed_file_is_downloaded_from_its_beginning(interrupted):
    interrupted.body, interrupted.version = BODY[::-1], {"ETag": '"v2"'}
    assert fetch(interrupted.url).path.read_bytes() == BODY[::-1]
    assert json.loads(interrupted.kept(".json").read_text())["etag"] == '"v2"'


@pytest.mark.parametrize(
    ("options", "ranges"),
    [
        ({"version": {}}, [None]),
        ({"version": {"ETag": 'W/"v1"'}}, [None]),
        ({"version": {"Last-Modified": "Fri, 20 Nov 2020 10:00:00 GMT"}}, ["bytes=100003-"]),
        ({"takes_ranges": False}, ["bytes=100003-"]),
        ({"wrong_range": True}, ["bytes=100003-", None]),
        ({"says_length": False, "cuts": []}, []),
    ],
    ids=["no version", "weak version", "date", "no ranges", "wrong range", "no length"],
)
def test_what_a_server_offers_is_resumed_or_begun_again(options, ranges, server):
    vars(server).update({"cuts": [100_003], **options})
    assert fetch(server.url).path.read_bytes() == BODY
    assert server.ranges == [None, *ranges]


def test_three_failures_without_progress_end_a_download(server):
    server.takes_ranges, server.cuts = False, [100_003] * 4
    with pytest.raises(SourceError, match="3 "):
        fetch(server.url)
    assert len(server.requests) == 3


def test_a_part_that_nobody_asked_for_is_refused(server):
    server.version, server.always_a_part = {}, True
    with pytest.raises(SourceError, match=re.escape(server.url)):
        fetch(server.url)


def test_transient_failures_are_tried_again(server):
    server.statuses = [503, 503]
    assert fetch(server.url).path.read_bytes() == BODY
    server.statuses = [503, 502, 500, 500]
    with pytest.raises(SourceError, match="500"):
        fetch(f"{server.url}?again")


@pytest.mark.parametrize("status", [401, 403, 404, 418])
def test_permanent_failures_are_not_tried_again(status, server):
    server.statuses = [status]
    with pytest.raises(SourceError, match=f"{re.escape(server.url)}.* {status}"):
        fetch(server.url)
    assert len(server.requests) == 1
    assert fetch(server.url).path.read_bytes() == BODY


@pytest.mark.usefixtures("server")
def test_no_network():
    with pytest.raises(SourceError, match="refused"):
        fetch("http://127.0.0.1:1/x.npz")


def test_offline_mode_uses_the_cache_only(server, monkeypatch):
    fetch(server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(server.url).path.read_bytes() == BODY
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE"):
        fetch(f"{server.url}?other")


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_interrupted_download_is_resumed(server):
    server.pause_at = 200_000
    partial = server.kept(".incomplete")

    def press_ctrl_c():
        wait_for(lambda: partial.exists() and partial.stat().st_size > 100_000)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press_ctrl_c)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        fetch(server.url)
    thread.join()
    received = partial.stat().st_size
    server.pause_at = None
    assert fetch(server.url).path.read_bytes() == BODY
    assert server.ranges == [None, f"bytes={received}-"]


FETCH_AND_PRINT = """
from huggingface_hub import constants
from hf_vit.files import download
constants.HF_HUB_OFFLINE = False  # the process that it is forked from is offline
print(download.fetch({url!r}, {folder!r}).path)
"""


def test_two_processes_download_once(server, tmp_path):
    server.pause_at = 1_000
    code = FETCH_AND_PRINT.format(url=server.url, folder=str(tmp_path))
    processes = [process for _ in range(2) for process in start(code)]
    wait_for(lambda: server.requests)
    time.sleep(0.3)  # for the other to reach the lock
    server.go_on.set()
    assert [process.wait()[0] for process in processes] == [f"{server.kept()}\n"] * 2
    assert len(server.requests) == 1
    assert server.kept().read_bytes() == BODY


def test_a_download_continues_after_a_full_disk(server):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_352, limits[1]))
    try:
        with pytest.raises(SourceError, match="too large"):
            fetch(server.url)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fetch(server.url).path.read_bytes() == BODY
    assert server.ranges == [None, "bytes=100352-"]


@pytest.mark.parametrize(("is_terminal", "progress"), [(True, True), (True, False), (False, True)])
def test_progress_is_shown_on_a_terminal(is_terminal, progress, server, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    fetch(server.url, progress=progress)
    shown = capsys.readouterr().err
    assert ("vit tiny.npz" in shown and "300k" in shown) == (is_terminal and progress)


@pytest.mark.parametrize(
    ("location", "address"),
    [
        ("gs://vit_models/augreg/Ti_16.npz", "https://storage.googleapis.com/vit_models/augreg/Ti_16.npz"),
        ("gs://bucket/a b?#%.npz", "https://storage.googleapis.com/bucket/a%20b%3F%23%25.npz"),
        ("https://host/x.npz?key=1", "https://host/x.npz?key=1"),
        ("HTTP://localhost:8000/x", "HTTP://localhost:8000/x"),
    ],
)
def test_addresses(location, address):
    assert sources.https_address(location) == address


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("ftp://host/x.npz", "ftp://host/x.npz"),
        ("https://", "HOST/FILE"),
        ("https://host/", "HOST/FILE"),
        ("https://host/a/..", "HOST/FILE"),
    ],
)
def test_addresses_that_are_refused(location, message):
    with pytest.raises(SourceError, match=re.escape(message)):
        fetch(location)


def test_public_names_hide_local_folders_and_keys(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.npz").touch()
    for location, name in {
        "https://me:word@host:1/a/x.npz?X-Signature=key#part": "https://host:1/a/x.npz",
        "gs://bucket/a b?#%.npz": "gs://bucket/a b?#%.npz",
        "owner/model": "owner/model",
        str(tmp_path / "x.npz"): "x.npz",
        "./x.npz": "x.npz",
    }.items():
        assert public_name(Fetched(location, tmp_path / "x.npz")) == name


def test_local_files_and_folders(tmp_path, monkeypatch):
    (tmp_path / "a.npz").write_bytes(BODY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("a.npz") == Fetched("a.npz", tmp_path / "a.npz")
    assert fetch("~/a.npz") == Fetched("~/a.npz", tmp_path / "a.npz")
    assert fetch(tmp_path) == Fetched(str(tmp_path), tmp_path)
    assert sha256_of("a.npz") == hashlib.sha256(BODY).hexdigest()
