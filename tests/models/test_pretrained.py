"""What all models have of their base class: checked arguments of `forward`, and a new head."""

import pytest
import torch

from hf_vit import HfBiTBackbone, HfBiTModel, HfViTBackbone, HfViTForMaskedPatchPrediction, HfViTModel

from ..tiny_models import TINY, TINY_BIT, HfBiTConfig, HfViTConfig, tiny, tiny_bit

MODELS = {
    "classifier": lambda: tiny(),
    "encoder": lambda: HfViTModel(HfViTConfig(**TINY)),
    "backbone": lambda: HfViTBackbone(HfViTConfig(**TINY)),
    "masked patches": lambda: HfViTForMaskedPatchPrediction(HfViTConfig(**TINY)),
    "hybrid": lambda: tiny(hybrid=True),
    "ResNet classifier": lambda: tiny_bit(),
    "ResNet": lambda: HfBiTModel(HfBiTConfig(**TINY_BIT)),
    "ResNet backbone": lambda: HfBiTBackbone(HfBiTConfig(**TINY_BIT)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_unknown_arguments_are_refused(kind):
    model = MODELS[kind]().eval()
    pixel_values = torch.randn(1, 3, *model.config.image_size)
    known = {"output_hidden_states": True, "return_dict": True, "interpolate_pos_encoding": True}
    if "backbone" in kind:
        known = {"output_hidden_states": True, "return_dict": True}
    model(pixel_values, **known)
    with pytest.raises(ValueError, match="no_such_thing"):
        model(pixel_values, no_such_thing=3)


@pytest.mark.parametrize("name", ["vit", "bit"])
def test_a_new_head_is_initialized_as_the_configuration_says(name, tmp_path, caplog):
    """Normal weights have the standard deviation `initializer_range`; the message says what the new head is."""
    model = tiny(hidden_size=14 * 16, num_attention_heads=2) if name == "vit" else tiny_bit()
    model.save_pretrained(tmp_path)
    model_class = type(model)
    narrow = {"head_init": "normal", "initializer_range": 0.005}
    for changes, expected in (({}, 0), ({"head_init": "normal"}, 0.02), (narrow, 0.005)):
        caplog.clear()
        loaded = model_class.from_pretrained(tmp_path, num_labels=97, **changes)
        assert loaded.classifier.weight.std().item() == pytest.approx(expected, rel=0.05)
        assert not loaded.classifier.bias.any()
        assert ("zeros" in caplog.text) == (expected == 0)
        built = model_class(loaded.config)
        assert built.classifier.weight.std().item() == pytest.approx(expected, rel=0.05)
    again = model_class.from_pretrained(tmp_path)
    torch.testing.assert_close(again.classifier.weight, model.classifier.weight)
    with pytest.raises(ValueError, match="head_init"):
        type(model.config)(head_init="ones")
