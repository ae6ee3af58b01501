"""Exported folders through `hf_vit.load`, and what is built on it."""

import numpy as np
import pytest
import torch
from PIL import Image

import hf_vit
from hf_vit.conversion import export
from hf_vit.runtimes.deployed import RUNTIMES

from ..tiny_models import save_tiny


@pytest.fixture(scope="module", params=["onnx", "openvino"])
def folders(request, tmp_path_factory):
    """A model, and its exported folder."""
    pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[request.param])
    folder = tmp_path_factory.mktemp("folders")
    thresholds = [0.05 + index / 50 for index in range(11)]
    model, processor = hf_vit.load(save_tiny(folder / "model", label_thresholds=thresholds))
    export(model, folder / "deployed", request.param, processor=processor)
    return folder / "model", folder / "deployed"


@pytest.fixture
def images(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(6):
        path = tmp_path / "images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (31, 45, 3), np.uint8)).save(path)
    return tmp_path / "images"


def test_the_same_answers(folders, images):
    for options in ({"top_k": 3}, {"threshold": "auto"}):
        expected, found = (hf_vit.predict(folder, images, **options) for folder in folders)
        assert [[one.label for one in image] for image in found] == [[one.label for one in image] for image in expected]
        scores = [[one.score for image in answer for one in image] for answer in (expected, found)]
        np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)
    features = [hf_vit.embed(folder, images) for folder in folders]
    np.testing.assert_allclose(*features, rtol=0, atol=1e-5)
    metrics = [hf_vit.evaluate(folder, images, split="train") for folder in folders]
    assert metrics[0]["accuracy"] == metrics[1]["accuracy"]
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], abs=1e-5)


def test_the_model(folders):
    model, processor = hf_vit.load(folders[1])
    assert model.runtime in RUNTIMES.values()
    assert model.config.id2label == hf_vit.load(folders[0])[0].config.id2label
    levels = processor(torch.full((3, 20, 36), 7, dtype=torch.uint8), return_tensors="pt").pixel_values
    assert (levels == 7).all()
    with pytest.raises(ValueError, match="image_size"):
        hf_vit.load(folders[1], image_size=32)
    with pytest.raises(ValueError, match="backend"):
        hf_vit.load(folders[1], backend="onnxruntime")


def test_the_benchmark_times_the_program(folders, run_command):
    printed = run_command(["benchmark", folders[1], "--seconds", 0, "--batch-sizes", 1])
    assert "20 x 36" in printed
    assert any(runtime in printed for runtime in RUNTIMES.values())
