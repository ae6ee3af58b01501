"""Models as programs: ONNX and torch.export, executed by their own runtimes."""

import shutil
from functools import partial

import pytest
import torch

from hf_vit import HfViTConfig, HfViTForMaskedPatchPrediction, HfViTHybridModel
from hf_vit.cli import main
from hf_vit.conversion import ConversionError, export

from ..comparing import logits, some
from ..paths import ROOT
from ..tiny_models import TINY, VARIANTS, randomize, tiny, tiny_bit


@pytest.fixture(scope="module")
def classifier():
    return sixteen()


def sixteen(**fields):
    return tiny(**{"hidden_size": 16, "num_hidden_layers": 2, "patch_size": (4, 4), **fields})


def assert_same(run, model, *shapes):
    for shape in shapes:
        pixel_values = torch.randn(shape)
        torch.testing.assert_close(run(pixel_values), logits(model, pixel_values), rtol=0, atol=1e-5)


def onnx_runner(onnxruntime, path):
    session = onnxruntime.InferenceSession(path)
    return lambda pixel_values: torch.from_numpy(session.run(None, {"pixel_values": pixel_values.numpy()})[0])


def torch_runner(path):
    module = torch.export.load(path).module()

    def run(pixel_values):
        with torch.no_grad():
            return module(pixel_values)

    return run


def test_onnx_of_the_models_own_size(classifier, onnxruntime, tmp_path):
    classifier.save_pretrained(tmp_path / "folder")
    assert main(["export", str(tmp_path / "folder"), str(tmp_path / "model.onnx"), "--to", "onnx"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "model.onnx"}
    shutil.move(tmp_path / "model.onnx", tmp_path / "elsewhere.onnx")  # the weights are in it
    run = onnx_runner(onnxruntime, tmp_path / "elsewhere.onnx")
    assert_same(run, classifier, (1, 3, 20, 36), (5, 3, 20, 36))
    with pytest.raises(Exception, match="Got invalid dimensions"):
        run(torch.randn(1, 3, 24, 36))


@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float16], torch.bfloat16))
def test_onnx_of_half_precision_computes_in_float32(dtype, onnxruntime, tmp_path):
    """onnxruntime issue 25740: it has no convolution in bfloat16."""
    half = sixteen().to(dtype)
    export(half, tmp_path / "half.onnx", "onnx")
    assert half.dtype == dtype
    assert_same(onnx_runner(onnxruntime, tmp_path / "half.onnx"), half.float(), (2, 3, 20, 36))


def test_onnx_of_any_size(onnxruntime, tmp_path):
    fields = {"num_hidden_layers": 1, "image_size": (32, 32), "patch_size": (2, 2), "stem_depths": [1]}
    hybrid = randomize(HfViTHybridModel(tiny(hybrid=True, pooling="mean", **fields).config))
    export(hybrid, tmp_path / "any.onnx", "onnx", size="dynamic")
    assert_same(onnx_runner(onnxruntime, tmp_path / "any.onnx"), hybrid, (1, 3, 32, 32), (3, 3, 40, 24))
    assert str(ROOT).encode() not in (tmp_path / "any.onnx").read_bytes()  # paths of source files on this machine


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"position_embedding_type": "relative"}, {"attention_axes": "axial", "pooling": "mean"}],
    ids=["relative", "axial"],
)
def test_onnx_of_variants(fields, onnxruntime, tmp_path):
    model = sixteen(**fields)
    export(model, tmp_path / "any.onnx", "onnx", size="dynamic")
    assert_same(onnx_runner(onnxruntime, tmp_path / "any.onnx"), model, (1, 3, 20, 36), (3, 3, 24, 12))


def test_torch_export(classifier, tmp_path):
    export(classifier, tmp_path / "own.pt2", "torch-export")
    assert_same(torch_runner(tmp_path / "own.pt2"), classifier, (1, 3, 20, 36), (5, 3, 20, 36))
    export(classifier, tmp_path / "fixed.pt2", "torch-export", size=(28, 12))
    assert_same(torch_runner(tmp_path / "fixed.pt2"), classifier, (3, 3, 28, 12))
    assert classifier.config.image_size == (20, 36)  # a copy was resized
    export(classifier, tmp_path / "any.pt2", "torch-export", size="dynamic")
    assert_same(torch_runner(tmp_path / "any.pt2"), classifier, (1, 3, 20, 36), (2, 3, 44, 8))


@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_impossible_exports_are_refused_before_any_work(classifier, tmp_path, to):
    path = tmp_path / {"onnx": "model.onnx", "torch-export": "model.pt2"}[to]
    with pytest.raises(ValueError, match="21"):
        export(classifier, path, to, size=21)
    with pytest.raises(ConversionError, match="sine-cosine"):
        export(sixteen(position_embedding_type="sincos2d"), path, to, size="dynamic")
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        export(classifier, path, to)
    assert path.read_bytes() == b"mine"


def test_formats(classifier, tmp_path):
    with pytest.raises(ValueError, match="tflite"):
        export(classifier, tmp_path / "out", "tflite")
    with pytest.raises(ConversionError, match="size"):
        export(classifier, tmp_path / "out", "timm", size=32)
    with pytest.raises(ConversionError, match="PyTorch"):
        export(classifier, tmp_path / "out", "torch-export")
    assert not list(tmp_path.iterdir())


traces = pytest.mark.filterwarnings(  # of torch, and of transformers' own modules whose attributes torch reads
    "ignore::torch.jit.TracerWarning",
    "ignore:.*torch.jit.* is deprecated:DeprecationWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)
NO_POSITION = "no position of the class token"
TRACED = {
    **{name: partial(tiny, **VARIANTS[name]) for name in ("cls", NO_POSITION, "sincos", "axial", "hybrid")},
    "flexible": partial(tiny, stored_patch_size=(4, 6), position_grid=(3, 5)),
    "bit": tiny_bit,
}


@traces
@pytest.mark.parametrize("name", TRACED)
def test_jit_trace(name):
    """As in transformers' ViT: `strict=False` for a dictionary, any number of images of one size."""
    model = TRACED[name]()
    batches = [torch.randn(batch, 3, *model.config.image_size) for batch in (2, 1, 5)]
    expected = [logits(model, pixel_values) for pixel_values in batches]
    with torch.no_grad():
        traced = torch.jit.trace(model, batches[0], strict=False)
        model.config.return_dict = False
        as_tuple = torch.jit.trace(model, batches[0], check_trace=False)
    for pixel_values, its_logits in zip(batches, expected, strict=True):
        torch.testing.assert_close(traced(pixel_values)["logits"], its_logits)
        torch.testing.assert_close(as_tuple(pixel_values)[0], its_logits)


@traces
def test_jit_trace_of_masked_patch_prediction():
    model = randomize(HfViTForMaskedPatchPrediction(HfViTConfig(**TINY)))
    example, other = ((torch.randn(batch, 3, 20, 36), torch.rand(batch, 30) > 0.5) for batch in (2, 3))
    traced = torch.jit.trace(model, example, strict=False)
    torch.testing.assert_close(traced(*other), dict(model(*other)))


@traces
@pytest.mark.parametrize("name", ["sincos", NO_POSITION, pytest.param("hybrid", marks=pytest.mark.slow)])
def test_openvino_convert_model(name, monkeypatch):
    monkeypatch.setenv("CI", "true")  # otherwise it sends telemetry
    openvino = pytest.importorskip("openvino", reason="openvino (extra openvino) is not installed")
    model = TRACED[name]()
    program = openvino.convert_model(model, example_input=torch.randn(2, 3, *model.config.image_size))
    compiled = openvino.compile_model(program, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    for batch in (1, 3):
        pixel_values = torch.randn(batch, 3, *model.config.image_size)
        found = torch.from_numpy(compiled(pixel_values.numpy())["logits"])
        torch.testing.assert_close(found, logits(model, pixel_values), rtol=0, atol=1e-5)
