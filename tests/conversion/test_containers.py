"""The same model in other containers: arrays equal the .npz bit for bit, logits equal the original code's."""

import json
import shutil
import subprocess
import sys

import msgpack
import numpy as np
import pytest
import torch
from transformers import ViTConfig, ViTModel

from hf_vit.conversion import ConversionError, convert
from hf_vit.conversion.checkpoint import open_arrays

from ..comparing import assert_same_weights, relative_gap
from ..paths import MORE, PEERS, golden_runs
from ..tiny_models import load_model

(RUN,) = golden_runs("container", folder=MORE)
CONTAINERS = [*RUN["containers"], "tensorstore_folder-LAST"]
TOLERANCE = 2e-5  # the original in float32 has itself an error of 1e-6
PEERS_CONTAINERS = PEERS / "containers"  # what flax and Orbax wrote: see make_containers.py


def outputs(model, expected):
    with torch.no_grad():
        return model(torch.from_numpy(expected["images"]).permute(0, 3, 1, 2))


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_holds_the_model_of_the_npz(container, tmp_path):
    expected = np.load(MORE / RUN["expected"])
    model, _ = convert(MORE / container)
    assert relative_gap(outputs(model, expected).logits, expected["logits"]) < TOLERANCE
    theirs, _ = convert(MORE / RUN["checkpoint"])
    assert model.conversion_record["inferred"] == theirs.conversion_record["inferred"]
    streamed = convert(MORE / container, read_weights=False).save(tmp_path / "streamed").model
    assert streamed.device.type == "meta"
    assert_same_weights(model, theirs)
    assert_same_weights(load_model(tmp_path / "streamed"), theirs)


def test_a_flax_classifier_of_transformers_keeps_its_classes():
    expected = np.load(MORE / "flax_folder.expected.npz")
    model, processor = convert(MORE / "flax_folder")
    assert relative_gap(outputs(model, expected).logits, expected["logits"]) < TOLERANCE
    assert list(model.config.id2label.values()) == [f"kind {number}" for number in range(10)]
    assert (model.config.hidden_act, model.config.layer_norm_eps) == ("gelu", 1e-12)
    assert processor.size == {"height": 32, "width": 32}


def test_a_flax_encoder_of_transformers_keeps_its_pooler():
    expected = np.load(MORE / "flax_model_folder.expected.npz")
    model, _ = convert(MORE / "flax_model_folder")
    result = outputs(model, expected)
    assert relative_gap(result.last_hidden_state, expected["encoded"]) < TOLERANCE
    assert relative_gap(result.pooler_output, expected["pooled"]) < TOLERANCE


def test_a_folder_with_two_weight_files(tmp_path):
    """The .safetensors is read, as in transformers."""
    ViTModel(ViTConfig.from_pretrained(MORE / "flax_model_folder")).save_pretrained(tmp_path)
    shutil.copy(MORE / "flax_model_folder" / "flax_model.msgpack", tmp_path)
    assert convert(tmp_path)[0].conversion_record["file"] == "model.safetensors"


def packed(tree) -> bytes:
    """Pack a tree of arrays in flax's msgpack format."""

    def pack(array):
        return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))

    return msgpack.packb(tree, default=pack)


@pytest.mark.parametrize(
    "container",  # the first cut up into chunks, as flax cuts arrays beyond 1 GiB
    ["flax.msgpack", "orbax_ocdbt", "orbax_zarr", "orbax_zarr3", "orbax_steps/7/default"],
)
def test_files_written_by_flax_and_orbax_are_read(container):
    expected = {
        "params/head/kernel": torch.from_numpy(np.load(PEERS_CONTAINERS / "kernel.npz")["kernel"]),
        "params/head/bias": torch.zeros(7),
        "params/dotted.name/scale": torch.tensor([1, -2.5], dtype=torch.bfloat16),
        "step": torch.tensor(3, dtype=torch.int32),
    }
    with open_arrays(PEERS_CONTAINERS / container) as reader:
        assert set(reader.arrays) == {*expected, "opt_state/0/mu", "opt_state/1/0"}
        for name, array in expected.items():
            info = reader.arrays[name]
            assert (info.shape, info.nbytes) == (tuple(array.shape), array.nbytes), name
            assert torch.equal(reader.read(name), array), name
            assert reader.read(name).dtype == array.dtype, name


def damaged_msgpack():
    whole = (MORE / "container_big_vision.msgpack").read_bytes()
    yield "cut off", whole[:5000]
    yield "more behind", whole + b"\x01"
    yield "no map", packed([1, 2])
    yield "no arrays", packed({"step": 3})
    yield "two of a name", packed({"a": {"b": np.ones(2)}, "a/b": np.ones(2)})
    yield "too deep", b"\x81\xa1a" * 2000 + b"\x80"
    short = msgpack.ExtType(1, msgpack.packb(((2**40, 2**40), "float32", b"1234")))
    yield "a shape beyond its bytes", packed({"a": short})
    objects = msgpack.ExtType(1, msgpack.packb(((1,), "object", b"12345678")))
    yield "objects", packed({"a": objects})
    lying = {"__msgpack_chunked_array__": True, "shape": {"0": 9}, "chunks": {"0": np.ones(8)}}
    yield "chunks of another size", packed({"a": lying})
    negative = {"__msgpack_chunked_array__": True, "shape": {"0": -2, "1": -4}, "chunks": {"0": np.ones(8)}}
    yield "chunks of a negative shape", packed({"a": negative})


@pytest.mark.parametrize("content", [pytest.param(content, id=kind) for kind, content in damaged_msgpack()])
def test_damaged_msgpack_is_refused(content, tmp_path):
    (tmp_path / "model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.msgpack"):
        convert(tmp_path / "model.msgpack")


FOLDER = "tensorstore_folder-000000010"


@pytest.fixture
def run_folder(tmp_path):
    """A copy of a run of big_vision's trainer; tests may change it."""
    shutil.copytree(MORE / FOLDER, tmp_path / FOLDER)
    shutil.copy(MORE / "tensorstore_folder-LAST", tmp_path)
    return tmp_path


def test_optimizer_state_is_not_read(run_folder):
    for name in ("opt~mu~head~bias/0", "opt~mu~head~kernel/0.0"):
        (run_folder / FOLDER / name).write_bytes(b"no chunk")
    (run_folder / "config.json").write_text('{"seed": 0}')  # that of the run
    model, _ = convert(run_folder)
    assert model.conversion_record["other_parts"] == ["opt"]
    pipe = "find . -type f | sed 's|^./||' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    judged = subprocess.run(pipe, shell=True, cwd=run_folder / FOLDER, capture_output=True, text=True, check=True)
    assert model.conversion_record["sha256"] == judged.stdout.split()[0]
    with open_arrays(run_folder / FOLDER) as reader, pytest.raises(ValueError, match="opt/mu/head/bias"):
        reader.read("opt/mu/head/bias")


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("missing chunk", "params/head/bias"),
        ("damaged chunk", "params/head/bias"),
        ("damaged metadata", "000000010"),
        ("huge array", "HF_VIT_ALLOW=large"),
        ("huge chunks", "HF_VIT_ALLOW=large"),
        ("other shape", "params/head/bias"),
        ("another step", "tensorstore_folder"),
        ("no arrays", r"\.npz"),
    ],
)
def test_damaged_folders_are_refused(run_folder, harm, message):
    bias = run_folder / FOLDER / "params~head~bias"
    metadata = json.loads((bias / ".zarray").read_text())
    if harm == "missing chunk":
        (bias / "0").unlink()
    elif harm == "damaged chunk":
        (bias / "0").write_bytes((bias / "0").read_bytes()[:-3])
    elif harm == "damaged metadata":
        (bias / ".zarray").write_text("{")
    elif harm == "another step":
        shutil.copytree(run_folder / FOLDER, run_folder / "tensorstore_folder-000000011")
    elif harm == "no arrays":
        shutil.rmtree(run_folder / FOLDER)
    else:
        changes = {"huge array": {"shape": [2**33], "chunks": [2**20]}, "huge chunks": {"chunks": [2**33]}}
        (bias / ".zarray").write_text(json.dumps({**metadata, **changes.get(harm, {"shape": [11]})}))
    with pytest.raises(ValueError, match=message):
        convert(run_folder)


@pytest.mark.parametrize("tree", ["text", [], {"a": 3}, {"a": {"key_metadata": [{}]}}, None])
def test_a_damaged_database_or_table_of_keys_is_refused(tmp_path, tree):
    shutil.copytree(MORE / "orbax_folder", tmp_path / "orbax")
    if tree is None:
        for file in (tmp_path / "orbax" / "d").iterdir():
            file.write_bytes(file.read_bytes()[:-9])
    else:
        (tmp_path / "orbax" / "_METADATA").write_text(json.dumps({"tree_metadata": tree}))
    with pytest.raises(ValueError, match="orbax"):
        convert(tmp_path / "orbax")


def test_a_step_of_a_checkpoint_manager_holds_one_checkpoint():
    with pytest.raises(ConversionError, match="opt_state"):
        convert(PEERS_CONTAINERS / "orbax_steps" / "7")


@pytest.mark.parametrize(("package", "container"), [("msgpack", "flax_folder"), ("tensorstore", "orbax_folder")])
def test_a_missing_extra_is_named_in_one_sentence(monkeypatch, package, container):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}.*hf_vit\[jax-checkpoints\]"):
        convert(MORE / container)


def test_flax_weights_without_their_configuration(tmp_path):
    shutil.copy(MORE / "flax_folder" / "flax_model.msgpack", tmp_path)
    with pytest.raises(ConversionError, match=r"config\.json"):
        convert(tmp_path)


def test_a_repository_of_flax_weights_alone(hub, client):
    folder = str(MORE / "flax_folder")
    client(f"from huggingface_hub import HfApi\napi = HfApi()\napi.create_repo('alice/flax')\n"
           f"api.upload_folder(repo_id='alice/flax', folder_path={folder!r})")  # fmt: skip
    output = client("from hf_vit.conversion import convert\nprint(convert('alice/flax')[0].config.id2label[9])")
    assert "kind 9" in output
