"""Batches of columns, as engines for data pass them, have the answers of their images."""

import pickle
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

import hf_vit
from hf_vit import Predictor
from hf_vit.loading import load

from ..tiny_models import write_images


@pytest.fixture
def files(tmp_path):
    return sorted(map(str, write_images(tmp_path / "images", 5).iterdir()))


def contents(files):
    return [Path(file).read_bytes() for file in files]


def structs(files):
    return pa.array([{"bytes": content, "path": None} for content in contents(files)])


KEYS = ["a", "b", "c", "d", "e"]
BATCHES = {  # how a batch is given -> the batch with a column of images and one of keys
    "paths": lambda files: {"image": files, "key": KEYS},
    "bytes": lambda files: {"image": contents(files), "key": np.array(KEYS)},
    "array of bytes": lambda files: {"image": np.array(contents(files), object), "key": KEYS},
    "rows of datasets": lambda files: {"image": structs(files).to_pylist(), "key": KEYS},
    "arrays": lambda files: {"image": [np.asarray(Image.open(file)) for file in files], "key": KEYS},
    "Arrow column": lambda files: {"image": pa.array(contents(files)), "key": KEYS},
    "chunks": lambda files: {"image": pa.chunked_array([pa.array(contents(files))]), "key": KEYS},
    "pandas column": lambda files: {"image": pd.Series(contents(files)), "key": KEYS},
    "table": lambda files: pa.table({"image": contents(files), "key": KEYS}),
    "table of structs": lambda files: pa.table({"image": structs(files), "key": KEYS}),
    "record batch": lambda files: pa.record_batch({"image": contents(files), "key": KEYS}),
    "DataFrame": lambda files: pd.DataFrame({"image": contents(files), "key": KEYS}),
}


@pytest.mark.parametrize("give", BATCHES.values(), ids=BATCHES)
def test_a_batch_of_columns_gives_columns(folder, files, give):
    batch = give(files)
    features = hf_vit.embed(folder, files)
    found = Predictor(folder, "embed")(batch)
    is_arrow = isinstance(found, pa.Table | pa.RecordBatch)
    table = found if is_arrow else pa.table({name: list(found[name]) for name in found})
    assert isinstance(found, dict if isinstance(batch, dict) else type(batch))
    assert set(table.column_names) == {"key", "features", "error"}
    np.testing.assert_array_equal(np.stack(table["features"].to_pylist()).astype(np.float32), features)
    assert table["key"].to_pylist() == KEYS
    classes = Predictor(folder, top_k=2)(batch)
    expected = hf_vit.predict(folder, files, top_k=2)
    assert [list(labels) for labels in np.asarray(classes["labels"], object)] == [
        [one.label for one in its] for its in expected
    ]


def test_an_unreadable_image_is_a_row_with_the_reason(folder, files, tmp_path):
    missing = str(tmp_path / "missing.jpg")
    batch = {"image": [files[0], missing, None, files[1]], "key": [1, 2, 3, 4]}
    found = Predictor(folder, "embed")(batch)
    assert [bool(error) for error in found["error"]] == [False, True, True, False]
    assert "missing.jpg" in found["error"][1]
    assert np.isnan(found["features"]).all(axis=1).tolist() == [False, True, True, False]
    table = Predictor(folder, "embed")(pa.table(batch))
    assert (
        table["features"].is_null().to_pylist() == table["error"].is_valid().to_pylist() == [False, True, True, False]
    )
    np.testing.assert_allclose(found["features"][3], hf_vit.embed(folder, files[1])[0], atol=1e-5)
    alone = Predictor(folder, "embed")({"image": [missing]})
    assert alone["features"].shape == found["features"][:1].shape
    classes = Predictor(folder)(pa.table(batch))
    assert classes["labels"].is_null().to_pylist() == [False, True, True, False]


def test_the_column_of_images(folder, files):
    predictor = Predictor(folder, "embed")
    features = hf_vit.embed(folder, files)
    alone = {"bytes": contents(files)}
    np.testing.assert_array_equal(predictor(alone)["features"], features)
    with pytest.raises(ValueError, match="image_column"):
        predictor(alone | {"path": files})
    chosen = Predictor(folder, "embed", image_column="bytes")
    assert list(chosen(alone | {"path": files})) == ["path", "features", "error"]
    np.testing.assert_array_equal(predictor(pa.array(contents(files))), features)
    assert predictor({"bytes": contents(files)[0], "path": None}).shape == (1, features.shape[1])


@pytest.mark.parametrize("workers", [None, 2])
def test_datasets_map(folder, files, workers):
    images = datasets.Dataset.from_dict(
        {"image": files, "key": KEYS},
        datasets.Features({"image": datasets.Image(decode=False), "key": datasets.Value("string")}),
    )
    predictor = Predictor(folder, "embed")
    found = images.map(predictor, batched=True, batch_size=2, num_proc=workers, remove_columns=["image"])
    np.testing.assert_array_equal(np.array(found["features"], np.float32)[:2], hf_vit.embed(folder, files[:2]))
    assert found["key"] == KEYS


def test_a_relative_folder_is_found_from_elsewhere(folder, files, tmp_path, monkeypatch):
    monkeypatch.chdir(Path(folder).parent)
    content = pickle.dumps(Predictor(Path(folder).name, "embed"))
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(pickle.loads(content)(files), hf_vit.embed(folder, files))


def test_an_encoder_is_embedded_by_every_backend(folder, files):
    expected = Predictor(load(folder), "embed")
    assert expected.fingerprint == Predictor(folder, "embed").fingerprint
    np.testing.assert_allclose(Predictor(folder, "embed", backend="torch")(files), expected(files), atol=1e-5)
    assert expected.to("cpu") is expected
