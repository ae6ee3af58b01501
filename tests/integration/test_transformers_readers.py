"""A folder for transformers, read where hf_vit cannot be imported."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.loading import save_folder

from ..doc_fixtures import FEW_STEPS
from ..tiny_models import save_tiny

READ = """
import numpy as np, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, Trainer, TrainingArguments
from transformers import pipeline

pixels = torch.from_numpy(np.load("pixels.npy"))
classifier, loading = AutoModelForImageClassification.from_pretrained("folder", output_loading_info=True)
assert not any(loading.values()), loading
with torch.no_grad():
    np.save("logits.npy", classifier(pixels).logits)
    assert AutoModel.from_pretrained("folder")(pixels).last_hidden_state.isfinite().all()
image = Image.open("image.png")
assert AutoImageProcessor.from_pretrained("folder")(image, return_tensors="pt").pixel_values.shape == pixels[:1].shape
assert pipeline("image-classification", model="folder")(image)[0]["label"] in classifier.config.label2id

names = {"input_names": ["pixel_values"], "output_names": ["logits"]}
batch = {"pixel_values": {0: torch.export.Dim("batch")}}
program = torch.onnx.export(classifier, (pixels,), dynamic_shapes=batch, dynamo=True, **names)
program.save("model.onnx")
import onnxruntime
session = onnxruntime.InferenceSession("model.onnx")
np.save("onnx.npy", session.run(["logits"], {"pixel_values": pixels.numpy()})[0])

rows = [{"pixel_values": one, "labels": torch.tensor(number % 2)} for number, one in enumerate(pixels)]
arguments = TrainingArguments("run", max_steps=1, use_cpu=True, report_to="none", save_strategy="no", learning_rate=0.1)
processor = AutoImageProcessor.from_pretrained("folder")
trainer = Trainer(classifier, arguments, train_dataset=rows, processing_class=processor)
trainer.train()
trainer.save_model("trained")
"""


@pytest.fixture
def written(tmp_path) -> Path:
    """A folder for transformers, and next to it an image, pixel values, and the logits of hf_vit."""
    save_tiny(tmp_path / "ours")
    Image.effect_noise((47, 31), 80).save(tmp_path / "image.png")
    model, processor = hf_vit.load(tmp_path / "ours")
    processor.update(preset="augreg", size={"height": 20, "width": 36})
    save_folder(tmp_path / "ours", model, processor, overwrite=True)
    folder = tmp_path / "folder"
    hf_vit.conversion.export(model, folder, "transformers", processor=processor)
    pixels = np.random.default_rng(1).standard_normal((4, 3, 20, 36), np.float32)
    np.save(tmp_path / "pixels.npy", pixels)
    with torch.no_grad():  # hidden states: else the last layer computes less than in transformers, and rounds otherwise
        np.save(tmp_path / "expected.npy", model(torch.from_numpy(pixels), output_hidden_states=True).logits)
    return folder


@pytest.mark.slow
def test_every_reader_without_hf_vit(written, run_without_hf_vit):
    here = written.parent
    run_without_hf_vit(READ, written)
    expected = np.load(here / "expected.npy")
    np.testing.assert_allclose(np.load(here / "logits.npy"), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.load(here / "onnx.npy"), expected, rtol=0, atol=1e-5)
    # what Trainer saved still has our preprocessing and settings, and its own new weights
    trained, processor = hf_vit.load(here / "trained")
    model, ours = hf_vit.load(here / "ours")
    assert processor.to_dict() == ours.to_dict()
    assert trained.config.position_interpolation == model.config.position_interpolation
    assert not torch.equal(trained.classifier.bias, model.classifier.bias)


@pytest.mark.slow
def test_sentence_transformers_without_hf_vit(written, run_without_hf_vit):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    code = """
import numpy as np
from PIL import Image
from sentence_transformers import SentenceTransformer
from transformers import AutoImageProcessor, AutoModel
image = Image.open("image.png")
pixels = AutoImageProcessor.from_pretrained("folder")(image, return_tensors="pt").pixel_values
token = AutoModel.from_pretrained("folder")(pixels).last_hidden_state[:, 0]
np.testing.assert_allclose(SentenceTransformer("folder").encode([image]), token.detach(), rtol=0, atol=1e-6)
"""
    run_without_hf_vit(code, written)


@pytest.mark.slow
def test_finetune_for_transformers(tmp_path, run_command):
    save_tiny(tmp_path / "tiny")
    paths = ["--model", tmp_path / "tiny", "--dataset", "digits", "--output-dir", tmp_path / "out"]
    run_command(["finetune", *paths, *FEW_STEPS.split(), "--image-size", "24", "--for", "transformers"])
    for folder in (tmp_path / "out", tmp_path / "out" / "best"):
        settings = json.loads((folder / "config.json").read_text())
        assert settings["model_type"] == "vit"
        assert settings["hf_vit"]["preprocessing"]["images"] > 1
        assert hf_vit.load(folder)[1].preset == hf_vit.load(tmp_path / "tiny")[1].preset
