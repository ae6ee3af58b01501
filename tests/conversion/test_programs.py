"""Models as programs: ONNX, torch.export and AOTInductor, run by what runs them elsewhere."""

import shutil
import warnings

import numpy as np
import pytest
import torch

from hf_vit import HfViTConfig, HfViTForImageClassification, HfViTHybridConfig, HfViTHybridModel
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, export, export_aot_inductor, export_onnx, export_torch
from hf_vit.conversion.exporting import FORMATS
from hf_vit.models.loading import save_folder

from ..models import SIZES, randomize

SIXTEEN = {**SIZES, "hidden_size": 16, "num_hidden_layers": 2, "image_size": (20, 36), "patch_size": 4}


@pytest.fixture(scope="module")
def classifier():
    return randomize(HfViTForImageClassification(HfViTConfig(**SIXTEEN, num_labels=11)))


def logits(model, pixel_values):
    with torch.no_grad():
        outputs = model(pixel_values)
    return outputs.logits if "logits" in outputs else outputs.pooler_output


def assert_same(run, model, *shapes):
    for shape in shapes:
        pixel_values = torch.randn(shape)
        torch.testing.assert_close(run(pixel_values), logits(model, pixel_values), rtol=0, atol=1e-5)


def onnx_runner(path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime (extra export) is not installed")
    session = onnxruntime.InferenceSession(path)
    return lambda pixel_values: torch.from_numpy(session.run(None, {"pixel_values": pixel_values.numpy()})[0])


def torch_runner(path):
    module = torch.export.load(path).module()

    def run(pixel_values):
        with torch.no_grad():
            return module(pixel_values)

    return run


@pytest.mark.slow
def test_onnx_of_the_models_own_size(classifier, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript (extra export) is not installed")
    save_folder(tmp_path / "folder", classifier, _Nothing())
    assert main(["export", str(tmp_path / "folder"), str(tmp_path / "model.onnx"), "--to", "onnx"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "model.onnx"}
    shutil.move(tmp_path / "model.onnx", tmp_path / "elsewhere.onnx")  # the weights are in it
    run = onnx_runner(tmp_path / "elsewhere.onnx")
    assert_same(run, classifier, (1, 3, 20, 36), (5, 3, 20, 36))
    with pytest.raises(Exception, match="Got invalid dimensions"):
        run(torch.randn(1, 3, 24, 36))


class _Nothing:
    def save_pretrained(self, folder):
        """A folder without an image processor."""


@pytest.mark.slow
def test_onnx_of_any_size(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript (extra export) is not installed")
    sizes = {**SIXTEEN, "num_hidden_layers": 1, "image_size": 32, "patch_size": 2}
    hybrid = randomize(HfViTHybridModel(HfViTHybridConfig(**sizes, stem_depths=[1], stem_width=32, pooling="mean")))
    export_onnx(hybrid, tmp_path / "any.onnx", size="dynamic")
    assert_same(onnx_runner(tmp_path / "any.onnx"), hybrid, (1, 3, 32, 32), (3, 3, 40, 24))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"position_embedding_type": "relative"}, {"attention_axes": "axial", "pooling": "mean"}],
    ids=["relative", "axial"],
)
def test_onnx_of_variants(fields, tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript (extra export) is not installed")
    model = randomize(HfViTForImageClassification(HfViTConfig(**SIXTEEN, **fields, num_labels=11)))
    export_onnx(model, tmp_path / "any.onnx", size="dynamic")
    assert_same(onnx_runner(tmp_path / "any.onnx"), model, (1, 3, 20, 36), (3, 3, 24, 12))


@pytest.mark.slow
def test_torch_export(classifier, tmp_path):
    export_torch(classifier, tmp_path / "own.pt2")
    assert_same(torch_runner(tmp_path / "own.pt2"), classifier, (1, 3, 20, 36), (5, 3, 20, 36))
    export_torch(classifier, tmp_path / "fixed.pt2", size=(28, 12))
    assert_same(torch_runner(tmp_path / "fixed.pt2"), classifier, (3, 3, 28, 12))
    assert classifier.config.image_size == (20, 36)  # a copy was resized
    export_torch(classifier, tmp_path / "any.pt2", size="dynamic")
    assert_same(torch_runner(tmp_path / "any.pt2"), classifier, (1, 3, 20, 36), (2, 3, 44, 8))


@pytest.mark.slow
def test_aot_inductor(tmp_path):
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("AOTInductor needs a C++ compiler")
    classifier = randomize(
        HfViTForImageClassification(HfViTConfig(**SIXTEEN | {"num_hidden_layers": 1}, num_labels=11))
    )
    export_aot_inductor(classifier, tmp_path / "compiled.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own loader
        module = torch._inductor.aoti_load_package(str(tmp_path / "compiled.pt2"))
    assert_same(module, classifier, (1, 3, 20, 36), (5, 3, 20, 36))


@pytest.mark.parametrize("write", [export_onnx, export_torch])
def test_what_cannot_be_exported_is_refused_before_the_work(classifier, tmp_path, write):
    path = tmp_path / "model.pt2"
    with pytest.raises(ValueError, match="image height 21 is not a multiple of 4"):
        write(classifier, path, size=21)
    fixed = HfViTForImageClassification(HfViTConfig(**SIXTEEN, position_embedding_type="sincos2d"))
    with pytest.raises(ConversionError, match="fixed sine-cosine positions are computed outside the program"):
        write(fixed, path, size="dynamic")
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="give --overwrite"):
        write(classifier, path)
    assert path.read_bytes() == b"mine"


def test_formats(classifier, tmp_path):
    with pytest.raises(ConversionError, match=f"unknown format 'tflite'; known: {', '.join(FORMATS)}"):
        export(classifier, tmp_path / "out", "tflite")
    with pytest.raises(ConversionError, match="a size can only be given for onnx, torch-export, aot-inductor"):
        export(classifier, tmp_path / "out", "timm", size=32)
    with pytest.raises(ConversionError, match=r"must end in \.pt2"):
        export(classifier, tmp_path / "out", "torch-export")
    assert not list(tmp_path.iterdir())


def test_a_program_that_cannot_be_written_leaves_no_trace(classifier, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        export_torch(classifier, tmp_path / "file" / "model.pt2")
    assert np.array_equal([path.name for path in tmp_path.iterdir()], ["file"])
