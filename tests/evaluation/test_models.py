"""Models to evaluate."""

import torch
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_vit.evaluation.models import load_pretrained
from hf_vit.loading import local_model

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 22, "image_size": 32}


def test_a_classifier_of_transformers_is_evaluated_at_another_size(tmp_path):
    """Its own forward at that size, with position embeddings resampled by this package, gives the same logits."""
    theirs = ViTForImageClassification(ViTConfig(**SIZES, num_labels=5)).eval()
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    name = str(local_model(tmp_path))
    model, processor, _ = load_pretrained(AutoModelForImageClassification, name, 48)
    assert processor.size == {"height": 48, "width": 48}

    larger = ViTForImageClassification(ViTConfig(**{**SIZES, "image_size": 48}, num_labels=5)).eval()
    positions = "vit.embeddings.position_embeddings"
    larger.load_state_dict({**theirs.state_dict(), positions: model.state_dict()[positions]})
    pixels = torch.rand(2, 3, 48, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(pixels).logits, larger(pixels).logits, rtol=0, atol=1e-5)
        encoder, _, _ = load_pretrained(AutoModel, name, 48)
        assert encoder(pixels).last_hidden_state.shape == (2, 10, 64)
