"""The same arrays in other containers: those of the .npz bit for bit, and the logits of the original code."""

import json
import shutil
import sys

import msgpack
import numpy as np
import pytest
import torch

from hf_vit.conversion import ConversionError, convert, convert_to_folder
from hf_vit.models.loading import load_model

from ..paths import MORE, golden_runs

(RUN,) = golden_runs("container", folder=MORE)
CONTAINERS = [name for name in RUN["containers"] if name.endswith(".msgpack")]


def assert_near(ours, theirs):
    """Largest difference over the largest value; the original in float32 is itself 1e-6 off."""
    assert np.abs(ours.numpy() - theirs).max() < 2e-5 * np.abs(theirs).max()


def outputs(model, expected):
    with torch.no_grad():
        return model(torch.from_numpy(expected["images"]).permute(0, 3, 1, 2))


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_holds_the_model_of_the_npz(container, tmp_path):
    expected = np.load(MORE / RUN["expected"])
    model, _ = convert(MORE / container)
    assert_near(outputs(model, expected).logits, expected["logits"])
    theirs, _ = convert(MORE / RUN["checkpoint"])
    assert model.conversion_record["inferred"] == theirs.conversion_record["inferred"]
    streamed = convert_to_folder(MORE / container, tmp_path / "streamed")
    assert streamed.device.type == "meta"
    streamed = load_model(tmp_path / "streamed").state_dict()
    for name, parameter in theirs.state_dict().items():
        assert torch.equal(model.state_dict()[name], parameter), name
        assert torch.equal(streamed[name], parameter), name


def test_a_flax_classifier_of_transformers_keeps_its_classes():
    expected = np.load(MORE / "flax_folder.expected.npz")
    model, processor = convert(MORE / "flax_folder")
    assert_near(outputs(model, expected).logits, expected["logits"])
    assert list(model.config.id2label.values()) == [f"kind {number}" for number in range(10)]
    assert (model.config.hidden_act, model.config.layer_norm_eps) == ("gelu", 1e-12)
    assert processor.size == {"height": 32, "width": 32}


def test_a_flax_encoder_of_transformers_keeps_its_pooler():
    expected = np.load(MORE / "flax_model_folder.expected.npz")
    model, _ = convert(MORE / "flax_model_folder")
    result = outputs(model, expected)
    assert_near(result.last_hidden_state, expected["encoded"])
    assert_near(result.pooler_output, expected["pooled"])


def test_the_better_weights_of_a_folder_are_read(tmp_path):
    """A folder with both: the .safetensors, as transformers chooses."""
    from transformers import ViTConfig, ViTModel

    ViTModel(ViTConfig(**json.loads((MORE / "flax_model_folder" / "config.json").read_text()))).save_pretrained(
        tmp_path
    )
    shutil.copy(MORE / "flax_model_folder" / "flax_model.msgpack", tmp_path)
    assert convert(tmp_path)[0].conversion_record["file"] == "model.safetensors"


def packed(tree) -> bytes:
    """A tree of arrays in msgpack, as flax writes it."""

    def pack(array):
        return msgpack.ExtType(1, msgpack.packb((array.shape, array.dtype.name, array.tobytes())))

    return msgpack.packb(tree, default=pack)


def test_arrays_in_chunks_bfloat16_and_other_leaves(tmp_path):
    """Beyond 1 GiB flax cuts an array up (`_chunk` of flax/serialization.py)."""
    from hf_vit.files.msgpack_arrays import MsgpackReader

    values = np.arange(30, dtype=np.float32).reshape(5, 6)
    chunks = {str(index): part for index, part in enumerate(np.split(values.ravel(), [8, 16, 24]))}
    chunked = {"__msgpack_chunked_array__": True, "shape": {"0": 5, "1": 6}, "chunks": chunks}
    half = msgpack.ExtType(1, msgpack.packb(((2,), "bfloat16", b"\x80\x3f\x00\x40")))
    scalar = msgpack.ExtType(3, msgpack.packb(((), "int32", b"\0\0\0\1")))
    tree = {"params": {"a": {"kernel": chunked}, "b": half}, "step": 7, "count": scalar, "opt_state": {"0": {}}}
    (tmp_path / "state").write_bytes(packed(tree))
    with MsgpackReader(tmp_path / "state") as reader:
        assert [(info.name, info.shape) for info in reader.arrays.values()] == [
            ("params/b", (2,)),
            ("params/a/kernel", (5, 6)),
        ]
        assert torch.equal(reader.read("params/a/kernel"), torch.from_numpy(values))
        assert torch.equal(reader.read("params/b"), torch.tensor([1, 2], dtype=torch.bfloat16))


def damaged_msgpack():
    whole = (MORE / "container_big_vision.msgpack").read_bytes()
    yield "cut off", whole[:5000], "is damaged"
    yield "more behind", whole + b"\x01", "1 bytes come after its end"
    yield "no map", packed([1, 2]), "is damaged, or no tree of arrays"
    yield "empty", b"", "is damaged, or no tree of arrays"
    yield "no arrays", packed({"step": 3}), "holds no arrays"
    yield "a number for a name", b"\x81\x01\x02", "1 stands where a name is expected"
    yield "a list", packed({"a": [1, 2]}), "exceeds max_array_len"
    yield "two of a name", b"\x82" + 2 * packed({"a": np.ones(2)})[1:], "two arrays of the name 'a'"
    yield "too deep", b"\x81\xa1a" * 40 + b"\x80", "nested more than 32 deep"
    short = msgpack.ExtType(1, msgpack.packb(((2**40, 2**40), "float32", b"1234")))
    yield "a shape beyond its bytes", packed({"a": short}), "but has 4 bytes"
    objects = msgpack.ExtType(1, msgpack.packb(((1,), "object", b"12345678")))
    yield "objects", packed({"a": objects}), "unsupported dtype object"
    lying = {"__msgpack_chunked_array__": True, "shape": {"0": 9}, "chunks": {"0": np.ones(8)}}
    yield "chunks of another size", packed({"a": lying}), r"a of shape \[9\] is stored in chunks of 64 bytes"


@pytest.mark.parametrize(("content", "message"), [case[1:] for case in damaged_msgpack()])
def test_damaged_msgpack_is_refused(content, message, tmp_path):
    (tmp_path / "model.msgpack").write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.msgpack .*{message}"):
        convert(tmp_path / "model.msgpack")


def test_without_the_extra_one_sentence_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(ImportError, match=r"needs msgpack: pip install 'hf_vit\[jax-checkpoints\]'"):
        convert(MORE / "flax_folder")


def test_flax_weights_without_their_configuration(tmp_path):
    shutil.copy(MORE / "flax_folder" / "flax_model.msgpack", tmp_path)
    with pytest.raises(ConversionError, match=r"give the folder that holds its config\.json too"):
        convert(tmp_path)


@pytest.mark.slow
def test_a_repository_of_flax_weights_alone(hub, client):
    folder = str(MORE / "flax_folder")
    client(f"from huggingface_hub import HfApi\napi = HfApi()\napi.create_repo('alice/flax')\n"
           f"api.upload_folder(repo_id='alice/flax', folder_path={folder!r})")  # fmt: skip
    output = client("from hf_vit.conversion import convert\nprint(convert('alice/flax')[0].config.id2label[9])")
    assert "kind 9" in output
