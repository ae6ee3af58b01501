"""Choice of a backend by name and by rule."""

import pytest
import torch

import hf_vit
from hf_vit.loading import use_backend
from hf_vit.runtimes import ONNXRuntimeModel, OpenVINOModel, choosing
from hf_vit.runtimes.choosing import choose

from ..tiny_models import images, save_tiny, tiny, tiny_bit


@torch.no_grad()
def test_load_returns_the_model_of_a_backend(tmp_path):
    folder = save_tiny(tmp_path / "model", num_hidden_layers=1)
    plain, _ = hf_vit.load(folder)
    classes = {"eager": type(plain), "openvino": OpenVINOModel, "onnxruntime": ONNXRuntimeModel}
    for backend, model_class in classes.items():
        model, _ = hf_vit.load(folder, backend=backend)
        assert type(model) is model_class
        torch.testing.assert_close(model(images(plain)).logits, plain(images(plain)).logits, rtol=1e-5, atol=2e-5)
    smaller, processor = hf_vit.load(folder, image_size=(12, 18), backend="openvino")
    assert smaller(processor(torch.zeros(3, 30, 40), return_tensors="pt").pixel_values).logits.shape == (1, 11)
    with pytest.raises(ValueError, match="quantization"):
        hf_vit.load(folder, backend="int8")
    with pytest.raises(ValueError, match="'tpu'"):
        use_backend(plain, "tpu")


@pytest.mark.parametrize("installed", ["openvino", "onnxruntime"])
def test_auto_chooses_by_a_fixed_rule(installed, monkeypatch):
    """The choice is the same every time; no time is measured."""
    monkeypatch.setattr(choosing, "find_spec", lambda name: name if name == installed else None)
    assert choose(tiny()) == installed
    assert choose(tiny().half()) == choose(tiny_bit()) == "torch"
    assert choose(tiny().bfloat16()) == ("openvino" if installed == "openvino" else "torch")
    assert choose(hf_vit.HfViTBackbone(tiny().config)) == "torch"
