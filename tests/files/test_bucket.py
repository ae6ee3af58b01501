"""Folders of a bucket, from a local server that answers like Google's JSON API."""

import json
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from hf_vit.conversion import convert
from hf_vit.files import download
from hf_vit.files.download import SourceError, fetch_folder, is_folder_address

from ..comparing import assert_same_weights
from ..paths import MORE

STEP = "run/checkpoint.bv-000000010/"
PAGE = 17  # entries of a page of a listing


class Bucket:
    """Holds a run of big_vision's trainer."""

    def __init__(self, serve):
        folder = MORE / "tensorstore_folder-000000010"
        paths = [path for path in folder.rglob("*") if path.is_file()]
        self.files = {STEP + path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self.files |= {"run/checkpoint.bv-LAST": b"000000010", STEP: b""}
        server = serve(self.answer)
        self.url, self.requests = server.url, server.requests

    def answer(self, handler):
        url = urlsplit(handler.path)
        if url.path == "/storage/v1/b/models/o":
            return handler.send(json.dumps(self.page(parse_qs(url.query))).encode())
        content = self.files.get(unquote(url.path).removeprefix("/models/"))
        return handler.send_error(404) if content is None else handler.send(content)

    def page(self, query):
        names = sorted(name for name in self.files if name.startswith(query["prefix"][0]))
        start = int(query.get("pageToken", ["0"])[0])
        items = [{"name": name, "size": str(len(self.files[name]))} for name in names[start : start + PAGE]]
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(names) else {}
        return {**({"items": items} if items else {}), **more}


@pytest.fixture
def bucket(serve, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    bucket = Bucket(serve)
    monkeypatch.setattr(download, "BUCKETS", bucket.url)
    return bucket


@pytest.mark.parametrize("name", [STEP, "run/checkpoint.bv-LAST"])
def test_a_folder_of_a_bucket_converts_and_is_kept(bucket, name):
    pytest.importorskip("tensorstore")
    model, _ = convert(f"gs://models/{name}")
    assert model.conversion_record["source"] == f"gs://models/{name}"
    theirs, _ = convert(MORE / "container.npz")
    assert_same_weights(model, theirs)
    assert not any("opt~" in request["path"] for request in bucket.requests)
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
    monkeypatch.setattr("hf_vit.files.download.MAX_CHECKPOINT_BYTES", 1000)
    bucket.requests.clear()
    with pytest.raises(SourceError, match="1,000"):
        fetch_folder(f"gs://models/{STEP}", tmp_path)
    assert all("/storage/v1/" in request["path"] for request in bucket.requests)
