"""Arguments of `forward` that no model has are refused; those of transformers' own models are taken."""

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
