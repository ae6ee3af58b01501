"""int8 models: outputs compared with the saved program in OpenVINO, and with ONNX Runtime without fusions."""

import json
import os
import shutil

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import pipeline

import hf_vit
from hf_vit import HfViTForImageClassification
from hf_vit.cli import main
from hf_vit.runtimes import Int8Model, OpenVINOModel

from ..comparing import change_json
from ..tiny_models import images, tiny, write_images

PROGRAM = ("program.xml", "program.bin")


def of_program(folder, pixel_values, name=PROGRAM[0]):
    """Return the logits of the saved files in OpenVINO, without this package."""
    core = openvino.Core()
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    return torch.from_numpy(core.compile_model(core.read_model(folder / name), "CPU", settings)(pixel_values)[0])


def test_outputs_are_those_of_the_saved_program(quantized):
    model, _ = hf_vit.load(quantized)
    plain, _ = hf_vit.load(quantized, backend="eager")
    assert (type(model), type(plain)) == (Int8Model, HfViTForImageClassification)
    pixel_values = images(model, 3)
    with torch.inference_mode():
        outputs = model(pixel_values, labels=torch.tensor([1, 2, 3]))
        expected = plain(pixel_values, labels=torch.tensor([1, 2, 3]))
        judged = of_program(quantized, pixel_values.numpy())
    assert type(outputs) is type(expected)
    torch.testing.assert_close(outputs.logits, judged)
    torch.testing.assert_close(outputs.loss, nn.functional.cross_entropy(judged, torch.tensor([1, 2, 3])))
    difference = (outputs.logits - expected.logits).abs().max()
    assert 0 < difference < 0.1 * expected.logits.abs().max()
    other, _ = hf_vit.load(quantized, backend="openvino")  # computes in float32
    assert type(other) is OpenVINOModel
    torch.testing.assert_close(other(pixel_values).logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_what_the_program_cannot_compute_is_refused(quantized, tmp_path, run_command):
    model, _ = hf_vit.load(quantized)
    with pytest.raises(ValueError, match="output_attentions"):
        model(images(model), output_attentions=True)
    with pytest.raises(ValueError, match="image_size"):
        hf_vit.load(quantized, image_size=(24, 36))
    with pytest.raises(ValueError, match="bfloat16"):
        hf_vit.load(quantized, dtype=torch.bfloat16)
    command = ["export", quantized, tmp_path / "out", "--to", "openvino", "--size", "24x36"]
    assert "(20, 36)" in run_command(command, status=2)
    assert not list(tmp_path.iterdir())


def test_predict_and_pipeline_use_the_int8_program(quantized, run_command):
    photograph = str(quantized.parent / "images" / "LABEL_3" / "00.png")
    model, processor = hf_vit.load(quantized)
    judged = of_program(quantized, processor([photograph], return_tensors="pt")["pixel_values"].numpy()).softmax(-1)
    printed = json.loads(run_command(["predict", quantized, photograph, "--top-k", "1", "--json"]))["predictions"][0]
    (piped,) = pipeline("image-classification", model=model, image_processor=processor)(photograph, top_k=1)
    for found in (printed, piped):
        assert found["score"] == pytest.approx(judged.max().item(), abs=1e-5)
        assert found["label"] == f"LABEL_{judged.argmax()}"


@pytest.mark.slow
def test_evaluate_measures_each_backend(quantized, tmp_path, run_command):
    _, processor = hf_vit.load(quantized)
    images_folder = tmp_path / "images"
    shutil.copytree(quantized.parent / "images" / "LABEL_3", images_folder / "cat")
    write_images(images_folder / "dog", count=5)
    files = [str(file) for file in sorted(images_folder.glob("*/*.png"))]
    logits = of_program(quantized, processor(files, return_tensors="pt").pixel_values.numpy())
    expected = nn.functional.cross_entropy(logits, torch.tensor([0] * 16 + [1] * 5)).item()
    losses = {}
    for backend in ("eager", "openvino", "onnxruntime", "int8"):
        settings = ["--dataset", images_folder, "--split", "train", "--num-workers", "0", "--backend", backend]
        printed = run_command(["evaluate", "--model", quantized, *settings])
        losses[backend] = json.loads(printed[printed.index("{") :])["loss"]
    assert losses["int8"] == pytest.approx(expected, rel=1e-4)
    assert losses["eager"] == pytest.approx(losses["openvino"], rel=1e-4)
    assert losses["eager"] == pytest.approx(losses["onnxruntime"], rel=1e-4)
    assert abs(losses["int8"] - losses["eager"]) > 1e-3


@pytest.mark.parametrize("to", ["openvino", "onnx"])
def test_deployed_programs_compute_in_int8(quantized, tmp_path, to):
    """ONNX Runtime without fusions computes the definition of the pairs; kernels without VNNI could saturate."""
    assert main(["export", str(quantized), str(tmp_path / "out"), "--to", to]) == 0
    files = sorted((quantized.parent / "images" / "LABEL_3").glob("*.png"))
    levels = np.stack([np.asarray(Image.open(file).resize((36, 20)), np.float32).transpose(2, 0, 1) for file in files])
    pixel_values = levels / 127.5 - 1
    expected = of_program(quantized, pixel_values)
    if to == "openvino":
        torch.testing.assert_close(of_program(tmp_path / "out", levels, "model.xml"), expected, rtol=1e-4, atol=1e-4)
        return
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", options)
    found = torch.from_numpy(session.run(None, {"pixel_values": levels})[0])
    plain, _ = hf_vit.load(quantized, backend="eager")
    with torch.no_grad():
        exact = plain(torch.from_numpy(pixel_values)).logits
    assert 1e-3 < (found - exact).abs().max() < 0.1 * exact.abs().max()
    fused = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx").run(None, {"pixel_values": levels})[0]
    for other in (expected, torch.from_numpy(fused)):  # with the whole range of weights, 0.3 without VNNI
        assert (other - found).abs().max() < 0.05 * exact.abs().max()
    record = json.loads((quantized / "quantization.json").read_text())
    nodes = onnx.load(tmp_path / "out" / "model.onnx").graph.node
    assert sum(node.op_type == "QuantizeLinear" for node in nodes) >= 3 * 4 - 1
    assert set(record["in_float32"]).isdisjoint(record["layers"])


@pytest.mark.parametrize("layers", [{"vit.layers.9.mlp.fc1": [-1, 1]}, {"classifier": [1]}, None])
def test_a_record_of_other_layers_is_not_exported(quantized, tmp_path, run_command, layers):
    folder = shutil.copytree(quantized, tmp_path / "copy")
    change_json(folder / "quantization.json", layers=layers)
    assert "quantization.json" in run_command(["export", folder, tmp_path / "out", "--to", "onnx"], status=2)
    assert not (tmp_path / "out").exists()


HARMS = {
    "damaged": (lambda folder: os.truncate(folder / PROGRAM[1], 100), "program.bin"),
    "away": (lambda folder: (folder / PROGRAM[0]).unlink(), "program.xml"),
    "other weights": (lambda folder: tiny(seed=1, intermediate_size=1500).save_pretrained(folder), "config.json"),
    "other settings": (lambda folder: change_json(folder / "config.json", layer_norm_eps=1e-3), "config.json"),
    "another record": (lambda folder: (folder / "quantization.json").write_text("{}"), "quantization.json"),
    "no files": (lambda folder: change_json(folder / "quantization.json", files=None), "quantization.json"),
    "no size": (lambda folder: change_json(folder / "quantization.json", image_size=None), "image_size"),
}


@pytest.mark.parametrize(("harm", "file"), HARMS.values(), ids=HARMS)
def test_a_damaged_or_foreign_program_is_refused(quantized, tmp_path, harm, file):
    folder = shutil.copytree(quantized, tmp_path / "copy")
    harm(folder)
    with pytest.raises(ValueError, match=file):
        hf_vit.load(folder)
