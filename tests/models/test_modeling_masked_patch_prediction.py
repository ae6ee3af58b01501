"""Masked patch prediction, according to appendix B.1.2 of the paper."""

import numpy as np
import pytest
import torch
from transformers.testing_utils import CaptureLogger

from hf_vit.models import pretrained
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_vit_variants import HfViTForImageClassification, HfViTModel
from hf_vit.models.modeling_masked_patch_prediction import (
    Corruption,
    HfViTForMaskedPatchPrediction,
    color_classes,
    patch_targets,
    sample_corruption,
)

from ..comparing import assert_same_weights
from ..tiny_models import SIZES

SMALL = {**SIZES, "num_hidden_layers": 2, "image_size": [24, 40], "patch_size": 8}
PATCHES = 15


@pytest.fixture
def pixel_values():
    return torch.rand(3, 3, 24, 40, generator=torch.Generator().manual_seed(0)) * 2 - 1


def make(**changes):
    torch.manual_seed(0)
    return HfViTForMaskedPatchPrediction(HfViTConfig(**SMALL, **changes)).eval()


def test_corruption_statistics():
    """50% of the patches of each image: 80% masked, 10% another patch, 10% unchanged."""
    corruption = sample_corruption(4000, 20, generator=torch.Generator().manual_seed(0))
    selected = corruption.selected
    assert (selected.sum(dim=1) == 10).all()
    assert selected.float().mean(dim=0).sub(0.5).abs().max() < 0.03
    own = torch.arange(20)
    replaced = corruption.source != own
    shares = [kind.sum().item() / selected.sum().item() for kind in (corruption.masked, replaced)]
    np.testing.assert_allclose(shares, [0.8, 0.1], atol=0.01)
    assert not (corruption.masked & ~selected).any()
    assert not (replaced & (corruption.masked | ~selected)).any()
    others = corruption.source[replaced]
    assert np.bincount(others.numpy(), minlength=20).min() > 100
    with pytest.raises(ValueError, match=r"0\.01"):
        sample_corruption(2, PATCHES, share=0.01)


def test_mean_color_has_three_bits_a_channel():
    colors = torch.tensor([[-1.0, 0.0, 1.0], [-0.76, -0.74, 0.99]]).view(2, 3, 1, 1)
    # levels 0, 4, 7 and 0 (0.12 of 1), 1 (0.13), 7
    assert color_classes(colors).flatten().tolist() == [0 * 64 + 4 * 8 + 7, 0 * 64 + 1 * 8 + 7]


def test_targets_of_each_patch(pixel_values):
    targets = patch_targets(pixel_values, (3, 5), "mean_color")
    assert targets.shape == (3, PATCHES)
    patch = pixel_values[1, :, 8:16, 24:32]  # row 1, column 3
    levels = [min(int((patch[c].mean().item() + 1) / 2 * 8), 7) for c in range(3)]
    assert targets[1, 8] == levels[0] * 64 + levels[1] * 8 + levels[2]
    cells = patch_targets(pixel_values, (3, 5), "downsized")
    assert cells.shape == (3, PATCHES, 16)
    cell = pixel_values[1, :, 10:12, 28:30].mean(dim=(1, 2)).view(1, 3, 1, 1)  # row 1, column 2 of 4 x 4 in it
    assert cells[1, 8, 6] == color_classes(cell).item()
    pixels = patch_targets(pixel_values, (3, 5), "pixels")
    assert torch.equal(pixels[1, 8], patch.flatten())


@pytest.mark.parametrize(("target", "outputs"), [("mean_color", 512), ("downsized", 8192), ("pixels", 192)])
def test_output_width_and_first_loss(pixel_values, target, outputs):
    """A new head is zero, so every color is as likely as any other: log 512."""
    model = make(patch_target=target)
    output = model(pixel_values)
    assert output.logits.shape == (3, PATCHES, outputs)
    if target == "pixels":
        expected = (output.targets.square().mean(dim=-1) * output.selected).sum() / output.selected.sum()
    else:
        expected = torch.tensor(np.log(512.0), dtype=torch.float32)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.loss_per_image.mean(), output.loss)


def test_only_selected_patches_count_and_every_parameter_learns(pixel_values):
    model = make().train()
    torch.nn.init.normal_(model.predictor.weight)
    corruption = sample_corruption(3, PATCHES, generator=torch.Generator().manual_seed(1))
    output = model(pixel_values, corruption=corruption)
    by_hand = torch.nn.functional.cross_entropy(output.logits[corruption.selected], output.targets[corruption.selected])
    torch.testing.assert_close(output.loss, by_hand)
    output.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_masked_and_replaced_patches_have_the_right_content(pixel_values):
    """Masked patches are the mask token, replaced ones another patch, before position embeddings are added."""
    model = make()
    patches = model.vit.embeddings.embed_patches(pixel_values)
    own = torch.arange(PATCHES).repeat(3, 1)
    masked, source = torch.zeros(3, PATCHES, dtype=torch.bool), own.clone()
    masked[0, 2], source[1, 4] = True, 11
    corrupted = model.corrupt(patches, Corruption(masked | (source != own), masked, source))
    assert torch.equal(corrupted[0, 2], model.mask_token[0, 0])
    assert torch.equal(corrupted[1, 4], patches[1, 11])
    assert torch.equal(corrupted[2], patches[2])
    assert model.mask_token.abs().min() > 0


def test_saved_encoder_goes_into_a_classifier(tmp_path):
    model = make(patch_target="downsized")
    model.save_pretrained(tmp_path)
    again = HfViTForMaskedPatchPrediction.from_pretrained(tmp_path)
    assert again.config.patch_target == "downsized"
    assert_same_weights(again, model)
    classifier = HfViTForImageClassification.from_pretrained(tmp_path, num_labels=7)
    assert not classifier.classifier.weight.any()
    assert_same_weights(classifier.vit, model.vit)
    HfViTModel.from_pretrained(tmp_path)


def test_pretraining_continues_from_an_encoder_or_a_classifier(tmp_path):
    torch.manual_seed(0)
    classifier = HfViTForImageClassification(HfViTConfig(**SMALL, representation_size=9))
    classifier.save_pretrained(tmp_path / "classifier")
    classifier.vit.save_pretrained(tmp_path / "encoder")
    for folder in ("classifier", "encoder"):
        with CaptureLogger(pretrained.logger) as log:
            model = HfViTForMaskedPatchPrediction.from_pretrained(tmp_path / folder)
        assert "masked patches" in log.out
        assert not model.predictor.weight.any()
        for name, tensor in model.vit.state_dict().items():  # without the pre-logits layer
            assert torch.equal(classifier.vit.state_dict()[name], tensor)
