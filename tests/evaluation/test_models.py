"""Models to evaluate."""

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_vit.evaluation.models import load_evaluated, load_pretrained
from hf_vit.loading import load, local_model
from hf_vit.models.image_processing_hf_vit import HfViTImageProcessor
from hf_vit.settings.fields import EvaluateSettings

from ..tiny_models import save_tiny

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 22, "image_size": 32}


def test_a_classifier_of_transformers_is_evaluated_at_another_size(tmp_path):
    """Its own forward at that size, with position embeddings resampled by this package, gives the same logits."""
    theirs = ViTForImageClassification(ViTConfig(**SIZES, num_labels=5)).eval()
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    name = str(local_model(tmp_path))
    model, processor = load_pretrained(AutoModelForImageClassification, name, 48)
    assert processor.size == {"height": 48, "width": 48}

    larger = ViTForImageClassification(ViTConfig(**{**SIZES, "image_size": 48}, num_labels=5)).eval()
    positions = "vit.embeddings.position_embeddings"
    larger.load_state_dict({**theirs.state_dict(), positions: model.state_dict()[positions]})
    pixels = torch.rand(2, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(pixels).logits, larger(pixels).logits, rtol=0, atol=1e-5)
        encoder, _ = load_pretrained(AutoModel, name, 48)
        assert encoder(pixels).last_hidden_state.shape == (2, 10, 64)


def test_a_folder_without_a_processor_or_a_head(tmp_path):
    """A missing processor is made as `load` makes it; a missing head is one error."""
    folder = str(save_tiny(tmp_path / "tiny"))
    (tmp_path / "tiny" / "preprocessor_config.json").unlink()
    model, processor = load_pretrained(AutoModelForImageClassification, folder, None, needs_head=True)
    assert processor.to_dict() == load(folder)[1].to_dict()
    model.base_model.save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match="encoder has no"):
        load_pretrained(AutoModelForImageClassification, str(tmp_path / "encoder"), None, needs_head=True)


def test_another_preset_keeps_the_normalization(tmp_path):
    """The weights depend on it."""
    settings = EvaluateSettings(model=str(save_tiny(tmp_path / "tiny")), preset="timm")
    processor = HfViTImageProcessor(size={"height": 20, "width": 36}, image_mean=[0.4, 0.5, 0.6], image_std=[0.2] * 3)
    processor.save_pretrained(tmp_path / "tiny")
    _, used = load_evaluated(settings, Accelerator(), needs_head=True)
    assert (used.preset, used.image_mean, used.image_std) == ("timm", processor.image_mean, processor.image_std)
