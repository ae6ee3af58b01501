"""Folders of a bucket, from a local server that answers like Google's JSON API."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session

from hf_vit.conversion import convert
from hf_vit.files import download
from hf_vit.files.bucket import fetch_folder, is_folder_address
from hf_vit.files.download import SourceError

from ..paths import MORE

STEP = "run/checkpoint.bv-000000010/"
PAGE = 17  # entries of a page of a listing


class Bucket(BaseHTTPRequestHandler):
    def do_GET(self):
        url = urlsplit(self.path)
        self.server.requests.append(unquote(self.path))
        if url.path == "/storage/v1/b/models/o":
            return self.answer(json.dumps(self.page(parse_qs(url.query))).encode())
        content = self.server.files.get(unquote(url.path).removeprefix("/models/"))
        return self.send_error(404) if content is None else self.answer(content)

    def page(self, query):
        names = sorted(name for name in self.server.files if name.startswith(query["prefix"][0]))
        start = int(query.get("pageToken", ["0"])[0])
        items = [{"name": name, "size": str(len(self.server.files[name]))} for name in names[start : start + PAGE]]
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(names) else {}
        return {**({"items": items} if items else {}), **more}

    def answer(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A bucket that holds a run of big_vision's trainer."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_VIT_ALLOW", "http,private")
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    close_session()
    folder = MORE / "tensorstore_folder-000000010"
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        server.daemon_threads = False
        server.requests = []
        server.files = {
            STEP + path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        server.files |= {"run/checkpoint.bv-LAST": b"000000010", STEP: b""}
        monkeypatch.setattr(download, "BUCKETS", f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    close_session()


@pytest.mark.parametrize("name", [STEP, "run/checkpoint.bv-LAST"])
def test_a_folder_of_a_bucket_converts_and_is_kept(bucket, name):
    pytest.importorskip("tensorstore")
    model, _ = convert(f"gs://models/{name}")
    assert model.conversion_record["source"] == f"gs://models/{name}"
    theirs, _ = convert(MORE / "container.npz")
    assert all((model.state_dict()[name] == value).all() for name, value in theirs.state_dict().items())
    assert not any("opt~" in path for path in bucket.requests)
    bucket.requests.clear()
    convert(f"gs://models/{STEP}")
    assert bucket.requests == []


def test_bad_folders_are_refused(bucket, tmp_path, monkeypatch):
    assert not is_folder_address("gs://models/a.npz")
    with pytest.raises(SourceError, match="models/nothing"):
        fetch_folder("gs://models/nothing/", tmp_path)
    bucket.files["run/checkpoint.bv-LAST"] = b"../../etc"
    with pytest.raises(SourceError, match=r"'../../etc'"):
        fetch_folder("gs://models/run/checkpoint.bv-LAST", tmp_path)
    bucket.files[f"{STEP}../outside"] = b"x"
    with pytest.raises(SourceError, match=r"'../outside'"):
        fetch_folder(f"gs://models/{STEP}", tmp_path)
    monkeypatch.setattr("hf_vit.files.bucket.MAX_CHECKPOINT_BYTES", 1000)
    bucket.requests.clear()
    with pytest.raises(SourceError, match="1,000"):
        fetch_folder(f"gs://models/{STEP}", tmp_path)
    assert all("/storage/v1/" in path for path in bucket.requests)
