"""Export to the original's files: names, shapes, dtypes and bytes of every array; judged by the files themselves."""

import re
from itertools import product

import numpy as np
import pytest

from hf_vit.conversion import ConversionError, convert, export
from hf_vit.files.npz import NpzReader
from hf_vit.loading import save_folder

from ..comparing import assert_same_weights, read_arrays
from ..paths import golden_runs
from ..tiny_models import load_model

RUNS = {run["checkpoint"]: run for run in golden_runs("vit", "bit", "bit_paper") if "@" not in run["id"]}
GROUP_NORM = re.compile(r"(^|/)(gn[^/]*|norm-pre-head)/(scale|bias)$")
WITH_GROUP_NORM = [name for name, run in RUNS.items() if run["family"] != "vit" or run["resnet"]]


def written(path, prefix):
    """Arrays of a file in the form that `export` promises: no prefix, no other parts, no stacks, float32."""
    arrays = {}
    with NpzReader(path) as reader:
        for stored in reader.arrays:
            if not stored.startswith(prefix):
                continue
            name, array = stored.removeprefix(prefix), reader.read(stored).float().numpy()
            if "encoderblock/" in name:
                arrays |= {name.replace("block/", f"block_{i}/"): one for i, one in enumerate(array)}
            else:
                arrays[name] = array
    return arrays


def stored(path):
    """Names in their order, shapes, dtypes and bytes of a file, read by NumPy."""
    return [(name, array.shape, str(array.dtype), array.tobytes()) for name, array in read_arrays(path).items()]


def convert_golden(path, run):
    grid = tuple(run["token_grid"]) if run.get("posemb") == "learn" else None
    return convert(path, position_grid=grid)


def assert_comes_back(path, run, tmp_path):
    model, processor = convert_golden(path, run)
    dialect = model.conversion_record["dialect"]
    save_folder(tmp_path / "folder", model, processor)
    name = "big_vision" if run["family"] != "vit" else dialect["names"]
    export(load_model(tmp_path / "folder"), tmp_path / "back.npz", "jax", dialect=name)
    theirs, ours = written(path, dialect["prefix"]), read_arrays(tmp_path / "back.npz")
    assert set(ours) == set(theirs)
    for name, array in theirs.items():
        assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype), name
        assert ours[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("checkpoint", RUNS)
def test_every_golden_is_restored_bit_by_bit(goldens, tmp_path, checkpoint):
    """The model alone; and with the original every array in its order, also optimizer state and text towers."""
    assert_comes_back(goldens / checkpoint, RUNS[checkpoint], tmp_path)
    model, _ = convert_golden(goldens / checkpoint, RUNS[checkpoint])
    export(model, tmp_path / "whole.npz", "jax", original=goldens / checkpoint)
    assert stored(tmp_path / "whole.npz") == stored(goldens / checkpoint)


@pytest.mark.parametrize("shape", [(-1,), (1, 1, 1, -1)])
@pytest.mark.parametrize("checkpoint", WITH_GROUP_NORM)
def test_group_norms_are_restored_in_either_shape(goldens, tmp_path, checkpoint, shape):
    arrays = read_arrays(goldens / checkpoint)
    norms = {name: array.reshape(shape) for name, array in arrays.items() if GROUP_NORM.search(name)}
    assert norms
    np.savez(tmp_path / "in.npz", **arrays | norms)
    assert_comes_back(tmp_path / "in.npz", RUNS[checkpoint], tmp_path)
    model, _ = convert_golden(tmp_path / "in.npz", RUNS[checkpoint])
    assert model.conversion_record["dialect"].get("flat_group_norm", False) == (len(shape) == 1)


@pytest.mark.parametrize(
    ("checkpoint", "prefix"),
    [
        *product(
            ["vit_token.npz", "vit_linen.npz", "hybrid_stem.npz", "bv_tok.npz", "bit_v2.npz"],
            ["params/", "opt/target/"],
        ),
        ("vit_token.npz", "0/"),  # vit_jax/train.py saves a tuple
    ],
)
def test_a_prefix_is_not_written(goldens, tmp_path, checkpoint, prefix):
    arrays = {prefix + name: array for name, array in read_arrays(goldens / checkpoint).items()}
    np.savez(tmp_path / "in.npz", **arrays, step=np.int32(3))
    assert_comes_back(tmp_path / "in.npz", RUNS[checkpoint], tmp_path)


def test_negative_zeros_are_restored(goldens, tmp_path):
    """The class token, to which big_vision's dialect adds its row of positions, keeps -0.0."""
    arrays = read_arrays(goldens / "bv_tok.npz")
    np.savez(tmp_path / "in.npz", **arrays | {"cls": np.full_like(arrays["cls"], -0.0)})
    assert_comes_back(tmp_path / "in.npz", RUNS["bv_tok.npz"], tmp_path)


@pytest.mark.parametrize(
    ("checkpoint", "dialect"),
    [("vit_linen.npz", "vit_jax"), ("hybrid_r11_linen.npz", "vit_jax"), ("bv_tok.npz", "big_vision")],
)
def test_the_default_dialect_is_the_first_that_stores_the_model(goldens, tmp_path, checkpoint, dialect):
    """The names of the released files, but for a class token without a position; and it is the same model."""
    model, _ = convert_golden(goldens / checkpoint, RUNS[checkpoint])
    export(model, tmp_path / "back.npz", "jax")
    again, _ = convert_golden(tmp_path / "back.npz", RUNS[checkpoint])
    assert again.conversion_record["dialect"]["names"] == dialect
    assert_same_weights(again, model)


@pytest.mark.parametrize("dialect", ["vit_jax", "flax"])
def test_a_class_token_without_a_position_is_refused_where_it_must_have_one(goldens, tmp_path, dialect):
    model, _ = convert(goldens / "bv_tok.npz")
    with pytest.raises(ConversionError, match="no_embed_class"):
        export(model, tmp_path / "back.npz", "jax", dialect=dialect)
