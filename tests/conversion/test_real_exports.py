"""The real ViT-Ti/16 in other formats: the same weights, and the same logits on real photographs."""

import os

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_vit.conversion import convert, export

from ..comparing import assert_same_weights
from ..photographs import read_photographs

NPZ = "weights/Ti_16-imagenet2012-res_224.npz"
TIMM = "weights/vit_tiny_patch16_224_timm.safetensors"


def test_to_timm_gives_timms_own_file(shared, tmp_path):
    export(convert(shared / NPZ)[0], tmp_path / "timm.safetensors", "timm")
    ours, theirs = load_file(tmp_path / "timm.safetensors"), load_file(shared / TIMM)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_from_timm_gives_the_same_weights(shared):
    model, _ = convert(shared / TIMM)
    assert_same_weights(model, convert(shared / NPZ)[0])
    # the file does not say that these weights were trained with tanh GELU; timm computes the exact one
    assert (model.config.hidden_act, model.config.num_attention_heads) == ("gelu", 3)


def test_transformers_computes_the_same_logits(shared, tmp_path):
    model, processor = convert(shared / NPZ)
    export(model, tmp_path / "folder", "transformers", processor=processor)
    theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path / "folder").eval()
    pixel_values = processor(list(read_photographs(shared).values())[:10], return_tensors="pt").pixel_values
    with torch.no_grad():
        torch.testing.assert_close(theirs(pixel_values).logits, model(pixel_values).logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnxruntime_computes_the_same_logits(shared, onnxruntime, tmp_path):
    model, processor = convert(shared / NPZ)
    photographs = list(read_photographs(shared).values())[:10]
    pixel_values = processor(photographs, return_tensors="pt").pixel_values
    export(model, tmp_path / "model.onnx", "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    theirs = torch.from_numpy(session.run(None, {"pixel_values": pixel_values.numpy()})[0])
    with torch.no_grad():
        logits = model(pixel_values).logits
    # float32 itself is 2e-5 away from float64 here, with logits up to 19: 1e-5 is of the largest logit
    torch.testing.assert_close(theirs / logits.abs().max(), logits / logits.abs().max(), rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.softmax(dim=1), logits.softmax(dim=1), rtol=0, atol=1e-5)
    assert theirs.argmax(dim=1).tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("read_weights", [True, False])
def test_a_released_file_of_another_name_is_recognized_by_its_weights(shared, tmp_path, caplog, read_weights):
    """The preset of its evaluation and ImageNet's class names are used, and said; what the caller states wins."""
    os.symlink(shared / NPZ, tmp_path / "mine.npz")
    saved = convert(tmp_path / "mine.npz", read_weights=read_weights).save(tmp_path / "saved")
    assert saved.processor.preset == "augreg"
    assert saved.model.config.id2label[281].startswith("tabby")
    assert "gs://vit_models/augreg/Ti_16" in caplog.text
    stated, processor = convert(tmp_path / "mine.npz", preset="vit_jax", labels=[f"kind {i}" for i in range(1000)])
    assert processor.preset == "vit_jax"
    assert stated.config.id2label[281] == "kind 281"
