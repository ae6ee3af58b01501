"""Models to evaluate."""

import pytest
import torch
from accelerate import Accelerator
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_vit.evaluation.models import load_evaluated
from hf_vit.loading import load
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.settings.fields import EvaluateSettings

from ..tiny_models import save_tiny

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 22, "image_size": 32}


def test_a_classifier_of_transformers_is_evaluated_at_another_size(tmp_path):
    """Its own forward at that size, with position embeddings resampled by this package, gives the same logits."""
    theirs = ViTForImageClassification(ViTConfig(**SIZES, num_labels=5)).eval()
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    settings = EvaluateSettings(model=str(tmp_path), image_size=48)
    model, processor = load_evaluated(settings, Accelerator(cpu=True), needs_head=True)
    assert processor.size == {"height": 48, "width": 48}

    larger = ViTForImageClassification(ViTConfig(**{**SIZES, "image_size": 48}, num_labels=5)).eval()
    positions = "vit.embeddings.position_embeddings"
    larger.load_state_dict({**theirs.state_dict(), positions: model.state_dict()[positions]})
    pixels = torch.rand(2, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(pixels).logits, larger(pixels).logits, rtol=0, atol=1e-5)
        encoder, _ = load_evaluated(settings, Accelerator(cpu=True), needs_head=False)
        assert encoder(pixels).last_hidden_state.shape == (2, 10, 64)


def test_a_folder_without_a_head(tmp_path):
    model, _ = load(save_tiny(tmp_path / "tiny"), head="none")
    model.save_pretrained(tmp_path / "encoder")
    settings = EvaluateSettings(model=str(tmp_path / "encoder"))
    with pytest.raises(ValueError, match="encoder"):
        load_evaluated(settings, Accelerator(cpu=True), needs_head=True)
    assert type(load_evaluated(settings, Accelerator(cpu=True), needs_head=False)[0]) is type(model)


def test_another_preset_keeps_the_normalization(tmp_path):
    """The weights depend on it."""
    settings = EvaluateSettings(model=str(save_tiny(tmp_path / "tiny")), preset="timm")
    processor = HfViTImageProcessor(size={"height": 20, "width": 36}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path / "tiny")
    _, used = load_evaluated(settings, Accelerator(cpu=True), needs_head=True)
    assert (used.preset, used.image_mean, used.image_std) == ("timm", processor.image_mean, processor.image_std)
