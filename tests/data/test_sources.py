"""Names of datasets: a misspelled folder, and the Hub out of reach."""

import gzip
import json
import struct
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from huggingface_hub import HfApi

from hf_vit.data import sources
from hf_vit.data.shards import read_range


@pytest.fixture
def out_of_reach(tmp_path, monkeypatch):
    """A folder with photographs, an empty cache, and no network."""

    def unreachable(*_, **__):
        raise ConnectionError("no network")

    (tmp_path / "photographs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HfApi, "dataset_info", unreachable)
    monkeypatch.setattr(sources, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    asked = []
    empty = datasets.Dataset.from_dict({})
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: asked.append(arguments["path"]) or empty)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda **arguments: asked.append(arguments["path"]))
    return asked


@pytest.mark.parametrize("name", ["photgraphs", "./photgraphs", "photo graphs", "data/photgraphs", "a/b/photgraphs"])
def test_a_misspelled_folder_is_refused_at_once(out_of_reach, name):
    hint = "photographs" if name.count("/") < 2 and not name.startswith("data/") else name
    with pytest.raises(ValueError, match=hint):
        sources.load_split(name, "train")
    with pytest.raises(ValueError, match=hint):
        sources.names_of_splits(name)
    assert not out_of_reach


@pytest.mark.parametrize("file", ["photographs.zip", "photographs/table.csv"])
def test_files_without_images_are_no_data_set(out_of_reach, file):
    """Neither are they looked for on the Hub."""
    Path(file).touch()
    with pytest.raises(ValueError, match="CLASS/FILE"):
        sources.load_split(file.removesuffix("/table.csv"), "train")
    assert not out_of_reach


def test_a_data_set_in_the_cache_needs_no_network(out_of_reach, tmp_path):
    (tmp_path / "cache" / "someone___my_photos").mkdir(parents=True)
    sources.load_split("someone/MyPhotos", "train")
    assert out_of_reach == ["someone/MyPhotos"]


def test_a_name_that_the_hub_lacks(hub):
    with pytest.raises(ValueError, match="no/such"):
        sources.load_split("no/such", "train")


@pytest.mark.parametrize(
    "address",
    [
        "http://example.com/a.tar",
        "https://127.0.0.1:9/a-{0..1}.tar",
        "https://me:hidden@[::1]/a*.tar?signature=hidden",
        "simplecache::https://192.168.0.1/a.tar",
        "webhdfs://127.0.0.1:9/a.tar",
        "ftp://127.0.0.1:9/a.tar",
        "generic://http://127.0.0.1:9/a.tar",
        "file:///etc/a.tar",
        "zip://a.tar::http://127.0.0.1:9/a.zip",
        "hf://a::http://127.0.0.1:9/a.tar",
        "https://example.com/a.zip::file:///etc/a.tar",
    ],
)
def test_addresses_that_are_not_encrypted_or_not_public_are_refused(address):
    with pytest.raises(ValueError, match=r"HF_VIT_ALLOW|https://") as refusal:
        read_range(sources.load_split(address, "train")[0], 0, 1)
    assert "hidden" not in str(refusal.value)


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_store_without_its_package_names_the_extra():
    with pytest.raises(ValueError, match=r"hf_vit\[remote\]") as refusal:
        sources.load_split("s3://bucket/a.tar?X-Amz-Signature=hidden#token=hidden", "train")
    assert "hidden" not in str(refusal.value)


def test_redirects_of_shards_are_checked(serve, monkeypatch):
    server = serve(lambda request: request.send_head(302, Location="ftp://127.0.0.1/b.tar"))
    address = f"{server.url}/a.tar"
    monkeypatch.setenv("HF_VIT_ALLOW", "http,private")
    with pytest.raises(ValueError, match="ftp:"):
        read_range(address, 0, 1)
    monkeypatch.setattr("hf_vit.files.download.check_url", lambda url: None)  # which saw a public machine
    monkeypatch.setenv("HF_VIT_ALLOW", "http")
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        read_range(f"{address}?another", 0, 1)
    assert [request["path"] for request in server.requests] == ["/a.tar"]


@pytest.mark.parametrize("numbers", ["{0..20000000}", "{0..999}{0..999}{0..999}"])
def test_a_range_of_very_many_shards_is_refused(numbers):
    with pytest.raises(ValueError, match="100,000"):
        sources.load_split(f"https://example.com/x-{numbers}.tar", "train")


@pytest.mark.parametrize(
    "files",
    [
        {"data_files": "http://127.0.0.1/a.parquet"},
        {"data_files": [{"split": "train", "path": ["a.parquet", "/etc/*.parquet"]}]},
        {"data_files": "data/../../../b.parquet"},
        {"data_dir": "../secret"},
    ],
)
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_metadata_on_the_hub_name_no_files_elsewhere(files, name, monkeypatch, tmp_path):
    metadata = {"configs": [{"config_name": "default", **files}]}
    (tmp_path / name).write_text(json.dumps(metadata))
    card = metadata if name == "README.md" else None
    info = SimpleNamespace(card_data=card, siblings=[SimpleNamespace(rfilename=name)])
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: info)
    monkeypatch.setattr(HfApi, "hf_hub_download", lambda *_, **__: tmp_path / name)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1|/etc/|\.\./"):
        sources.load_split("someone/photographs", "train")


def test_a_small_idx_file_that_unpacks_to_gigabytes_is_refused(tmp_path):
    file = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(file, "wb", 1) as stream:
        stream.write(struct.pack(">4I", 0x803, 300, 1024, 1024))
        for _ in range(300):
            stream.write(bytes(2**20))
    with pytest.raises(ValueError, match=file.name):
        sources.read_idx(file)
