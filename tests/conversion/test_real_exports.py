"""The real ViT-Ti/16 in other formats: the same weights, and the same logits on real photographs."""

import io
import zipfile

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from hf_vit.conversion import convert, export_onnx, export_timm, export_transformers

NPZ = "weights/Ti_16-imagenet2012-res_224.npz"
TIMM = "weights/vit_tiny_patch16_224_timm.safetensors"


@pytest.fixture(scope="module")
def model_and_processor(shared):
    return convert(shared / NPZ)


@pytest.fixture(scope="module")
def pixel_values(shared, model_and_processor):
    """Pixel values of ten photographs: (10, 3, 224, 224)."""
    with zipfile.ZipFile(shared / "data/imagenet_sample/images.zip") as archive:
        names = [name for name in sorted(archive.namelist()) if name.lower().endswith((".jpg", ".jpeg", ".png"))]
        images = [Image.open(io.BytesIO(archive.read(name))) for name in names[:: len(names) // 10][:10]]
    assert len(images) == 10
    return model_and_processor[1](images, return_tensors="pt").pixel_values


@pytest.fixture(scope="module")
def logits(model_and_processor, pixel_values):
    with torch.no_grad():
        return model_and_processor[0](pixel_values).logits


def test_to_timm_gives_timms_own_file(shared, model_and_processor, tmp_path):
    export_timm(model_and_processor[0], tmp_path / "timm.safetensors")
    ours, theirs = load_file(tmp_path / "timm.safetensors"), load_file(shared / TIMM)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_transformers_computes_the_same_logits(model_and_processor, pixel_values, logits, tmp_path):
    export_transformers(*model_and_processor[:1], tmp_path / "folder", model_and_processor[1])
    theirs = transformers.ViTForImageClassification.from_pretrained(tmp_path / "folder").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(pixel_values).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_onnxruntime_computes_the_same_logits(model_and_processor, pixel_values, logits, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript (extra export) is not installed")
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime (extra export) is not installed")
    export_onnx(model_and_processor[0], tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    theirs = torch.from_numpy(session.run(None, {"pixel_values": pixel_values.numpy()})[0])
    # float32 itself is 2e-5 away from float64 here, with logits up to 19: 1e-5 is of the largest logit
    torch.testing.assert_close(theirs / logits.abs().max(), logits / logits.abs().max(), rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs.softmax(dim=1), logits.softmax(dim=1), rtol=0, atol=1e-5)
    assert theirs.argmax(dim=1).tolist() == logits.argmax(dim=1).tolist()
