"""Listings of images: every kind of source, frozen, in any process, without the names in memory."""

import io
import os
import pickle
import subprocess
import sys
import tarfile

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hf_vit.data.listing import Listing, find_sources, write_listing
from hf_vit.files.download import filesystem_of
from hf_vit.files.image_files import images_below
from hf_vit.models.image_decoding import ImageReadingError
from hf_vit.models.image_reading import read_image

from ..tiny_models import write_images


@pytest.fixture
def files(tmp_path):
    write_images(tmp_path / "images", 4)
    write_images(tmp_path / "images" / "a", 3)
    return images_below(tmp_path / "images")


def write_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for number, file in enumerate(files):
            archive.add(file, f"{number:04}{file.suffix}")
            label = tarfile.TarInfo(f"{number:04}.cls")
            label.size = 1
            archive.addfile(label, io.BytesIO(b"3"))


def folder(files, root):
    return [str(root / "images")], {}, [str(file) for file in files]


def pattern(files, root):
    return [str(root / "images" / "**" / "*")], {}, [str(file) for file in files]


def one_by_one(files, root):
    return list(map(str, files)), {}, [str(file) for file in files]


def list_of_names(files, root):
    (root / "list.txt").write_text("".join(f"{file}\n\n" for file in files))
    return [str(root / "list.txt")], {}, [str(file) for file in files]


def tars(files, root):
    write_tar(root / "x-000.tar", files[:3])
    write_tar(root / "x-001.tar", files[3:])
    names = [f"{root}/x-000.tar/{number:04}{file.suffix}" for number, file in enumerate(files[:3])]
    names += [f"{root}/x-001.tar/{number:04}{file.suffix}" for number, file in enumerate(files[3:])]
    return [str(root / "x-{000..001}.tar")], {}, names


def folder_of_tars(files, root):
    (root / "shards").mkdir()
    write_tar(root / "shards" / "0.tar", files)
    names = [f"{root}/shards/0.tar/{number:04}{file.suffix}" for number, file in enumerate(files)]
    return [str(root / "shards")], {}, names


def parquet(files, root):
    contents = [file.read_bytes() for file in files]
    pq.write_table(pa.table({"key": range(len(files)), "image": contents}), root / "x.parquet", row_group_size=3)
    return [str(root / "x.parquet")], {}, [f"{root}/x.parquet:{row // 3}:{row % 3}" for row in range(len(files))]


def data_set(files, root):
    images = datasets.Dataset.from_dict(
        {"image": list(map(str, files))}, datasets.Features({"image": datasets.Image()})
    )
    images.to_parquet(root / "set.parquet")
    name = str(root / "set.parquet")
    return [], {"dataset": name}, [f"{name}:train:{row}" for row in range(len(files))]


@pytest.fixture
def memory(files, monkeypatch):
    """A store in memory, as a bucket."""
    monkeypatch.setenv("HF_VIT_ALLOW", "private")
    filesystem, _ = filesystem_of("memory://bucket")
    for file in files:
        filesystem.pipe(f"/bucket/{file.parent.name}/{file.name}", file.read_bytes())
    write_tar(files[0].parent / "remote.tar", files)
    filesystem.pipe("/bucket/remote.tar", (files[0].parent / "remote.tar").read_bytes())
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


SOURCES = [folder, pattern, one_by_one, list_of_names, tars, folder_of_tars, parquet, data_set]


@pytest.mark.parametrize("write", SOURCES, ids=lambda write: write.__name__)
def test_every_source_gives_its_images(write, files, tmp_path):
    inputs, options, names = write(files, tmp_path)
    path = tmp_path / "listing.arrow"
    assert write_listing(path, find_sources(inputs, **options)) == len(files) == 7
    listing = pickle.loads(pickle.dumps(Listing(str(path))))
    assert [listing.name(number) for number in range(len(listing))] == names
    for number in [6, 0, 3, 1]:
        expected = np.asarray(Image.open(files[number]).convert("RGB"))
        np.testing.assert_array_equal(read_image(listing[number]), expected.transpose(2, 0, 1))
    first = path.read_bytes()
    write_listing(path, find_sources(inputs, **options))
    assert path.read_bytes() == first


STORED = {"files": ["memory://bucket/images", "memory://bucket/a"], "tar": ["memory://bucket/remote.tar"]}


@pytest.mark.parametrize("inputs", STORED.values(), ids=STORED)
def test_a_store_that_the_user_names(inputs, memory, files, tmp_path):
    path = tmp_path / "listing.arrow"
    assert write_listing(path, find_sources(inputs)) == 7
    listing = Listing(str(path))
    assert listing.needs_spawn
    assert {listing.name(number)[:15] for number in range(7)} == {"memory://bucket"}
    found = sorted(listing[number]["bytes"] for number in range(7))
    assert found == sorted(file.read_bytes() for file in files)
    memory.rm("/bucket/images", recursive=True)
    if len(inputs) == 2:
        with pytest.raises(ImageReadingError, match="bucket"):
            listing[0]


def test_an_address_in_a_list_is_only_https(tmp_path):
    (tmp_path / "list.txt").write_text(
        "s3://bucket/a.jpg\nhttp://example.org/a.jpg\nhttps://127.0.0.1/a.jpg?sig=secret\n"
    )
    path = tmp_path / "listing.arrow"
    assert write_listing(path, find_sources([str(tmp_path / "list.txt")])) == 3
    listing = Listing(str(path))
    assert listing.name(2) == "https://127.0.0.1/a.jpg"
    for number in range(3):
        with pytest.raises(ImageReadingError):
            read_image(listing[number])


def test_changed_shards_are_refused(files, tmp_path):
    inputs, _, _ = tars(files, tmp_path)
    path = tmp_path / "listing.arrow"
    write_listing(path, find_sources(inputs))
    write_tar(tmp_path / "x-000.tar", files[::-1][:2])
    with pytest.raises(ValueError, match=r"x-000\.tar"):
        Listing(str(path))[2]


WRONG = [
    ([], {}, ValueError, "no images"),
    (["nothing.jpg", "no.tar"], {}, FileNotFoundError, "nothing.jpg, no.tar"),
    (["empty/"], {}, ValueError, "empty"),
]


@pytest.mark.parametrize(("inputs", "options", "error", "about"), WRONG)
def test_what_is_not_there(inputs, options, error, about, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=about):
        write_listing(tmp_path / "listing.arrow", find_sources(inputs, **options))
    assert os.listdir(tmp_path) == ["empty"]


MEASURE = """
import resource, sys
from pathlib import Path
from hf_vit.data.listing import Listing, find_sources, write_listing
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
path = Path(sys.argv[2])
assert write_listing(path, find_sources([sys.argv[1]])) == 1_000_000
assert Listing(str(path)).name(999_999).endswith("0999999.jpg")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_million_addresses_need_less_than_200_mb(tmp_path):
    with open(tmp_path / "list.txt", "w") as file:
        file.writelines(f"https://example.org/a/folder/of/photographs/{number:07}.jpg\n" for number in range(1_000_000))
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "list.txt"), str(tmp_path / "listing.arrow")]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert used < 200 * 1024
