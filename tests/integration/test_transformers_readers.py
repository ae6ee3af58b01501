"""A folder for transformers, read in an environment without hf_vit."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.cli import main
from hf_vit.loading import save_folder

from ..tiny_models import save_tiny

NO_HF_VIT = """
import sys
try:
    import hf_vit
except ModuleNotFoundError:
    pass
else:
    sys.exit(f"hf_vit is here: {hf_vit.__file__}")
"""
READ = (
    NO_HF_VIT
    + """
import numpy as np, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification, Trainer, TrainingArguments
from transformers import pipeline

pixels = torch.from_numpy(np.load("pixels.npy"))
classifier, loading = AutoModelForImageClassification.from_pretrained("folder", output_loading_info=True)
assert not any(loading.values()), loading
with torch.no_grad():
    np.save("logits.npy", classifier(pixels).logits)
    np.save("states.npy", AutoModel.from_pretrained("folder")(pixels).last_hidden_state)
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
)


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The Python of an environment that has all packages but hf_vit."""
    environment = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    packages = next(environment.glob("lib/*/site-packages"))
    others = [path for path in sys.path if path.endswith("site-packages")]  # whose own .pth files are not read
    (packages / "others.pth").write_text("\n".join(others) + "\n")
    return environment / "bin" / "python"


def run(folder: Path, *command, **more) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", **more}
    done = subprocess.run(list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def written(tmp_path) -> Path:
    """A folder for transformers, and next to it an image, pixel values, and the logits of hf_vit."""
    save_tiny(tmp_path / "ours")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (31, 47, 3), np.uint8)).save(tmp_path / "image.png")
    model, processor = hf_vit.load(tmp_path / "ours")
    processor.update(preset="augreg", size={"height": 20, "width": 36})
    save_folder(tmp_path / "ours", model, processor, overwrite=True)
    folder = tmp_path / "folder"
    hf_vit.conversion.export_transformers(model, folder, processor)
    pixels = np.random.default_rng(1).standard_normal((4, 3, 20, 36), np.float32)
    np.save(tmp_path / "pixels.npy", pixels)
    with torch.no_grad():
        output = model(torch.from_numpy(pixels), output_hidden_states=True)
    np.save(tmp_path / "expected.npy", output.logits)
    return folder


@pytest.mark.slow
def test_every_reader_without_hf_vit(written, bare):
    here = written.parent
    run(here, bare, "-c", READ)
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
def test_sentence_transformers_without_hf_vit(written, bare):
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
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
    run(written.parent, bare, "-c", NO_HF_VIT + code)


@pytest.mark.slow
def test_finetune_for_transformers(tmp_path):
    save_tiny(tmp_path / "tiny")
    paths = ["--model", tmp_path / "tiny", "--dataset", "digits", "--output-dir", tmp_path / "out"]
    length = "--steps 1 --warmup-steps 0 --batch-size 8 --num-workers 0 --report-to none --image-size 24".split()
    assert main(["finetune", *map(str, paths), *length, "--for", "transformers"]) == 0
    for folder in (tmp_path / "out", tmp_path / "out" / "best"):
        settings = json.loads((folder / "config.json").read_text())
        assert settings["model_type"] == "vit"
        assert settings["hf_vit"]["preprocessing"]["images"] > 1
        assert hf_vit.load(folder)[1].preset == hf_vit.load(tmp_path / "tiny")[1].preset
