"""Models to fine-tune."""

import torch
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor, ViTModel

from hf_vit.data.splits import Split
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training.build import load_for_finetuning

THREE_LABELS = Split(None, "image", "label", None, num_labels=3)
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 22, "image_size": 32}


def test_a_model_of_transformers_gets_a_new_head_the_settings_and_another_size(tmp_path):
    for name, theirs in (
        ("classifier", ViTForImageClassification(ViTConfig(**SIZES, num_labels=5))),
        ("encoder", ViTModel(ViTConfig(**SIZES))),
    ):
        folder = str(tmp_path / name)
        theirs.save_pretrained(folder)
        ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
        settings = FinetuneSettings(model=folder, dataset="x", output_dir="y", epochs=1, image_size=48, dropout=0.25)
        model, processor = load_for_finetuning(settings, THREE_LABELS)
        assert (model.config.num_labels, model.config.image_size, model.config.hidden_dropout_prob) == (3, 48, 0.25)
        assert processor.size == {"height": 48, "width": 48}
        assert model.name_or_path == folder
        assert not model.classifier.weight.any()
        kernel = theirs.base_model.embeddings.patch_embeddings.projection.weight
        assert torch.equal(model.vit.embeddings.patch_embeddings.projection.weight, kernel)
