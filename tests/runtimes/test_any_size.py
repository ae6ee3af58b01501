"""Programs for images of any size, against the original's pixels and against our image processor, model and rollout."""

import numpy as np
import pytest
import torch

from hf_vit import HfViTImageProcessor
from hf_vit.analysis import attention_rollout
from hf_vit.conversion import ConversionError, export
from hf_vit.models.image_processing_hf_vit import PRESETS
from hf_vit.runtimes.any_size import TensorImageProcessor, make_any_size_onnx, to_onnx

from ..models.test_image_processing_hf_vit import GOLDEN_SETTINGS, TENSORFLOW_PIXELS
from ..tiny_models import tiny, tiny_bit

ONE_PRESET_PER_RESIZE = ("vit_jax", "augreg", "lit", "timm", "transformers")
SIZES = [(1, 1), (1, 7), (300, 1), (450, 2), (20, 36), (21, 37), (41, 72), (100, 300), (333, 97), (700, 900)]


def random_levels(*shape, dtype=torch.uint8):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture
def runner(onnxruntime, tmp_path):
    """Saves an ONNX program; returns a function of the levels that runs it."""

    def start(program):
        program.save(tmp_path / "program.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "program.onnx", providers=["CPUExecutionProvider"])
        return lambda levels: map(torch.from_numpy, session.run(None, {"pixel_values": levels.numpy()}))

    return start


@pytest.mark.parametrize("kind", GOLDEN_SETTINGS)
def test_pixel_values_are_those_of_the_original(kind):
    keys = [key for key in TENSORFLOW_PIXELS.files if f"/{kind}/" in key]
    assert len(keys) == 6
    for key in keys:
        processor = HfViTImageProcessor(**GOLDEN_SETTINGS[kind](int(key.split("/")[2])))
        levels = torch.from_numpy(TENSORFLOW_PIXELS[key.split("/")[0]]).movedim(-1, 0)[None]
        found = TensorImageProcessor(processor)(levels)[0].movedim(0, -1)
        np.testing.assert_allclose(found, TENSORFLOW_PIXELS[key], rtol=0, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS if preset != "native"])
def test_pixel_values_are_those_of_the_image_processor(preset):
    processor = HfViTImageProcessor(preset, size=(20, 36), crop_pct=0.92)  # 19 of 39 pixels are cut
    levels = random_levels(1, 3, 97, 61)
    expected = processor(levels, return_tensors="pt").pixel_values
    assert torch.equal(TensorImageProcessor(processor)(levels), expected)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ONE_PRESET_PER_RESIZE)
@pytest.mark.parametrize(("dtype", "crop_pct"), [(torch.uint8, 0.92), (torch.float32, 0.53)])
def test_the_program_of_a_preset_has_the_same_pixel_values(preset, dtype, crop_pct, runner):
    processor = HfViTImageProcessor(preset, size=(20, 36), crop_pct=crop_pct)
    example = torch.zeros(2, 3, 37, 53, dtype=dtype)
    run = runner(to_onnx(TensorImageProcessor(processor), example, ["pixels"]))
    for size in SIZES:
        levels = random_levels(2, 3, *size, dtype=dtype)
        expected = processor(levels.byte(), return_tensors="pt").pixel_values
        assert torch.equal(next(run(levels)), expected), size


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{}, {"pooling": "mean"}, {"pooling": "map", "representation_size": 9}, {"hybrid": True}, {"num_channels": 4}],
)
def test_logits_and_attention_are_those_of_the_model(fields, runner):
    model = tiny(num_hidden_layers=2, **fields)
    processor = HfViTImageProcessor.for_model(model.config, preset="augreg")
    run = runner(make_any_size_onnx(model, processor))
    for size in [(1, 1), (61, 47)]:
        levels = random_levels(3, model.config.num_channels, *size)
        pixel_values = processor(levels, return_tensors="pt").pixel_values
        logits, attention = run(levels)
        with torch.no_grad():
            torch.testing.assert_close(logits, model(pixel_values).logits, rtol=0, atol=1e-5)
        expected = torch.from_numpy(attention_rollout(model, pixel_values))
        torch.testing.assert_close(attention, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_program_without_attention(onnxruntime, tmp_path):
    model = tiny_bit()
    processor = HfViTImageProcessor.for_model(model.config, preset="bit")
    export(model, tmp_path / "bit.onnx", "onnx", processor=processor, size="any")
    session = onnxruntime.InferenceSession(tmp_path / "bit.onnx", providers=["CPUExecutionProvider"])
    levels = random_levels(1, 3, 61, 47)
    logits = torch.from_numpy(session.run(None, {"pixel_values": levels.numpy()})[0])
    with torch.no_grad():
        expected = model(**processor(levels, return_tensors="pt")).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preset": "native"}, "native"),
        ({"do_resize": False}, "do_resize"),
        ({"preset": "transformers", "resample": 1}, "resample=1"),
        ({"size": {"shortest_edge": 36}}, "crop"),
        ({"do_center_crop": True, "crop_size": {"height": 20, "width": 40}}, "crop_size"),
    ],
)
def test_unsupported_preprocessing_is_refused(settings, message, tmp_path):
    processor = HfViTImageProcessor(**{"size": (20, 36), **settings})
    with pytest.raises(ConversionError, match=message):
        export(tiny(), tmp_path / "program.onnx", "onnx", processor=processor, size="any")
    assert not list(tmp_path.iterdir())


def test_other_formats_are_refused(tmp_path):
    for to in ("openvino", "torch-export"):
        with pytest.raises(ValueError, match="'any'"):
            export(tiny(), tmp_path / "program.pt2", to, processor=HfViTImageProcessor(size=(20, 36)), size="any")
    with pytest.raises(ConversionError, match="NoneType"):
        export(tiny(), tmp_path / "program.onnx", "onnx", size="any")
