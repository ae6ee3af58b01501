"""A plain ViT computes the same with the classes that `hf_vit` exports and with those that travel to the Hub."""

import pytest
import torch

import hf_vit
from hf_vit.models import modeling_hf_vit

from ..tiny_models import VARIANTS, images, tiny

PLAIN = ["cls", "mean", "map", "none", "sincos", "no position of the class token", "no positions"]


@torch.no_grad()
@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_model_computes_the_same(name, tmp_path):
    model = tiny(**VARIANTS[name])
    model.save_pretrained(tmp_path)
    assert model.config.is_plain
    for size in ((20, 36), (12, 54)):
        pixel_values = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
        public = hf_vit.HfViTForImageClassification.from_pretrained(tmp_path, image_size=size)
        plain = modeling_hf_vit.HfViTForImageClassification.from_pretrained(tmp_path, image_size=size)
        assert plain.config.to_dict() == public.config.to_dict()
        assert torch.equal(plain(pixel_values).logits, public(pixel_values).logits)
        assert torch.equal(plain(images(model)).logits, public(images(model)).logits)
        recorded = plain(pixel_values, output_hidden_states=True, output_attentions=True)
        expected = public(pixel_values, output_hidden_states=True, output_attentions=True)
        torch.testing.assert_close(tuple(recorded.values()), tuple(expected.values()), rtol=0, atol=0)


@torch.no_grad()
def test_a_plain_backbone_computes_the_same():
    config = tiny().config
    config.out_features = ["stem", "stage2"]
    public = hf_vit.HfViTBackbone(config).eval()
    plain = modeling_hf_vit.HfViTBackbone(config).eval()
    plain.load_state_dict(public.state_dict())
    pixel_values = torch.randn(2, 3, 12, 54)
    torch.testing.assert_close(plain(pixel_values).feature_maps, public(pixel_values).feature_maps, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - set(PLAIN)))
def test_other_configurations_need_the_classes_that_hf_vit_exports(name):
    with pytest.raises(ValueError, match="hf_vit"):
        modeling_hf_vit.HfViTForImageClassification(tiny(**VARIANTS[name]).config)
