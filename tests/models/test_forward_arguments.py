"""Positional arguments of `forward` and the mask token, as in transformers."""

import inspect

import pytest
import torch
import transformers

import hf_vit

from ..tiny_models import SIZES, randomize

PAIRS = [
    (hf_vit.HfViTModel, transformers.ViTModel),
    (hf_vit.HfViTForImageClassification, transformers.ViTForImageClassification),
    (hf_vit.HfViTForMaskedPatchPrediction, transformers.ViTForMaskedImageModeling),
    (hf_vit.HfViTHybridModel, transformers.ViTModel),
    (hf_vit.HfViTHybridForImageClassification, transformers.ViTForImageClassification),
    (hf_vit.HfBiTModel, transformers.BitModel),
    (hf_vit.HfBiTForImageClassification, transformers.BitForImageClassification),
    (hf_vit.HfBiTBackbone, transformers.BitBackbone),
    (hf_vit.HfViTBackbone, transformers.BitBackbone),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_positional_arguments_have_the_order_of_transformers(ours, theirs):
    def positional(model_class):
        parameters = inspect.signature(model_class.forward).parameters.values()
        return [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    expected = [name for name in positional(theirs) if name not in ("output_hidden_states", "return_dict")]
    assert positional(ours) == expected  # those two, which BiT still declares, come by name


def test_an_encoder_with_a_mask_token(tmp_path):
    theirs = randomize(
        transformers.ViTModel(transformers.ViTConfig(**SIZES, image_size=20, patch_size=4), use_mask_token=True)
    )
    theirs.save_pretrained(tmp_path / "theirs")
    hf_vit.load(tmp_path / "theirs")[0].save_pretrained(tmp_path / "converted")
    ours = hf_vit.HfViTModel.from_pretrained(tmp_path / "converted", use_mask_token=True).eval()
    ours.embeddings.mask_token.data.copy_(theirs.embeddings.mask_token)
    pixel_values = torch.randn(3, 3, 20, 20, generator=torch.Generator().manual_seed(1))
    masked = torch.rand(3, 25, generator=torch.Generator().manual_seed(2)) < 0.4
    attended = torch.ones(3, 26)
    attended[1, 20:] = 0
    with torch.no_grad():
        output, expected = (model(pixel_values, masked, None, attended).last_hidden_state for model in (ours, theirs))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)

    ours.save_pretrained(tmp_path / "ours")
    plain = hf_vit.HfViTModel.from_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match="bool_masked_pos needs a mask token"):
        plain(pixel_values, masked)
    with pytest.raises(ValueError, match=r"bool_masked_pos has shape \(3, 9\); expected .*, \(3, 25\)"):
        ours(pixel_values, masked[:, :9])
    plain.save_pretrained(tmp_path / "plain")
    assert not hf_vit.HfViTModel.from_pretrained(tmp_path / "plain", use_mask_token=True).embeddings.mask_token.any()
