"""Quantization by torchao: logits are close to float32's, and equal after saving and loading."""

import pytest
import torch
import transformers

from hf_vit import HfViTConfig, HfViTForImageClassification

pytest.importorskip("torchao", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "num_hidden_layers": 2}
    model = HfViTForImageClassification(HfViTConfig(**sizes, image_size=20, patch_size=4, num_labels=32))
    torch.manual_seed(0)
    torch.nn.init.normal_(model.classifier.weight)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "name", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao_quantized_models_are_saved_and_loaded(folder, tmp_path, name):
    from torchao import quantization

    how = transformers.TorchAoConfig(getattr(quantization, name)())
    quantized = HfViTForImageClassification.from_pretrained(folder, quantization_config=how)
    assert type(quantized.vit.layers[0].mlp.fc1.weight).__name__ in ("Int8Tensor", "Float8Tensor")
    quantized.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 0.5 * (folder / "model.safetensors").stat().st_size
    again = HfViTForImageClassification.from_pretrained(tmp_path)
    plain = HfViTForImageClassification.from_pretrained(folder)
    pixel_values = torch.randn(3, 3, 20, 20)
    with torch.no_grad():
        logits, reloaded, exact = (model.eval()(pixel_values).logits for model in (quantized, again, plain))
    assert torch.equal(reloaded, logits)
    assert 0 < (logits - exact).abs().max() < 0.1 * exact.abs().max()
