"""Every backend: outputs compared with the original's code and torch, warnings and errors."""

import copy
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import pipeline

import hf_vit
from hf_vit import HfViTForImageClassification, HfViTImageProcessor, HfViTModel
from hf_vit.backends.choosing import choose
from hf_vit.backends.forward import BackendForward
from hf_vit.backends.runtimes import RUNTIMES, Runtime
from hf_vit.conversion import convert

from ..paths import golden_runs
from ..tiny_models import BIT_PIXELS, VARIANTS, images, tiny, tiny_bit

# What differs most in a program: poolings, kinds of positions, a stem, a ResNet.
GOLDEN_RUNS = ["vit_token", "vit_gap_rep", "bv_map", "bv_sincos", "hybrid_stem", "bit_v2"]
RUNS = {run["id"]: run for run in golden_runs("vit", "bit", "bit_paper") if run["id"] in GOLDEN_RUNS}
OF_TORCH = {"rtol": 1e-5, "atol": 2e-5}

pytestmark = pytest.mark.parametrize("backend", list(RUNTIMES))


def slow_but(*quick):
    return lambda name: () if name in quick else (pytest.mark.slow,)


def some(names, *quick):
    """Return the parameters, with all but a few marked as slow."""
    return [pytest.param(name, marks=slow_but(*quick)(name)) for name in names]


@torch.no_grad()
@pytest.mark.parametrize("run", some(GOLDEN_RUNS, "vit_token", "bv_map"))
def test_outputs_equal_the_goldens(backend, run, goldens):
    assert len(RUNS) == len(GOLDEN_RUNS)
    model, _ = convert(goldens / RUNS[run]["checkpoint"])
    with np.load(goldens / RUNS[run]["expected"]) as expected:
        pixel_values = torch.from_numpy(expected["images"]).permute(0, 3, 1, 2)
        outputs = model.optimize_for_inference(backend=backend)(pixel_values)
        name = "logits" if "logits" in expected else "pre_logits"
        wanted = expected[name]
    ours = outputs.logits if "logits" in outputs else outputs.pooler_output
    tolerance = 1e-5 if run.startswith(("vit", "bv")) else 1e-4
    assert np.abs(ours.numpy() - wanted).max() / max(1.0, np.abs(wanted).max()) <= tolerance
    assert not model.forward._said


@torch.no_grad()
@pytest.mark.parametrize("variant", some([*VARIANTS, "bit"], "cls"))
def test_outputs_equal_torch_for_every_batch_size(backend, variant):
    model = tiny_bit() if variant == "bit" else tiny(**VARIANTS[variant])
    pixel_values = BIT_PIXELS if variant == "bit" else images(model)
    batches = [pixel_values, pixel_values[:1], torch.cat([pixel_values, -pixel_values, pixel_values])[:5]]
    expected = [model(batch) for batch in batches]
    assert model.optimize_for_inference(backend=backend) is model
    outputs = [model(batch) for batch in batches]  # all are kept: none overwrites another
    for ours, theirs in zip(outputs, expected, strict=True):
        assert type(ours) is type(theirs)
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours.logits, theirs.logits, **OF_TORCH)
    assert not model.forward._said


@torch.no_grad()
def test_encoders_with_images_of_another_size(backend):
    model = tiny().vit
    pixel_values = torch.randn(2, 3, 28, 24)
    expected = model(pixel_values, interpolate_pos_encoding=True)
    model.optimize_for_inference(backend=backend)
    ours = model(pixel_values=pixel_values.transpose(0, 1).contiguous().transpose(0, 1), interpolate_pos_encoding=True)
    assert list(ours) == list(expected) == ["last_hidden_state", "pooler_output"]
    torch.testing.assert_close(ours.to_tuple(), expected.to_tuple(), **OF_TORCH)
    assert isinstance(model(pixel_values, return_dict=False), tuple)


@torch.no_grad()
def test_loss_pipeline_and_training_mode(backend):
    model = tiny()
    labels = torch.tensor([3, 0])
    expected = model(images(model), labels)
    model.optimize_for_inference(backend=backend)
    ours = model(images(model), labels=labels)
    torch.testing.assert_close(ours.to_tuple(), expected.to_tuple(), **OF_TORCH)
    processor = HfViTImageProcessor(size={"height": 20, "width": 36})
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (31, 45, 3), np.uint8))
    answers = pipeline("image-classification", model=model, image_processor=processor)(picture, top_k=3)
    assert not model.forward._said
    model.train()
    assert "forward" not in vars(model)
    plain = pipeline("image-classification", model=model.eval(), image_processor=processor)(picture, top_k=3)
    assert [answer["label"] for answer in answers] == [answer["label"] for answer in plain]
    np.testing.assert_allclose([a["score"] for a in answers], [a["score"] for a in plain], atol=1e-5)


@torch.no_grad()
def test_optimised_models_can_be_copied_and_pickled(backend, tmp_path):
    model = tiny().optimize_for_inference(backend=backend)
    expected = model(images(model)).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other.forward, BackendForward)
        assert other.forward.model is other
        other.classifier.bias += 1
        torch.testing.assert_close(other(images(model)).logits, expected + 1, **OF_TORCH)
        torch.testing.assert_close(model(images(model)).logits, expected, **OF_TORCH)
    model.save_pretrained(tmp_path)
    loaded, _ = hf_vit.load(tmp_path, backend=backend)
    assert isinstance(loaded.forward, BackendForward)
    torch.testing.assert_close(loaded(images(model)).logits, expected, **OF_TORCH)


@torch.no_grad()
@pytest.mark.parametrize("pixels", [(2, 4, 20, 36), (2, 3, 20, 35), (3, 20, 36), (0, 3, 20, 36)], ids=str)
def test_images_of_a_wrong_shape_give_torchs_errors(backend, pixels):
    """The errors are those of torch."""
    plain, model = tiny(), tiny().optimize_for_inference(backend=backend)
    errors = []
    for one in (plain, model):
        try:
            errors.append(one(torch.randn(pixels)).logits.shape)
        except Exception as error:
            errors.append(repr(error))
    assert errors[0] == errors[1]


def test_unsupported_models_and_backends_are_refused(backend, monkeypatch):
    with pytest.raises(ValueError, match=r"torch.float16 on cpu \(expected torch.float32"):
        tiny().half().optimize_for_inference(backend=backend)
    config = tiny().config
    with pytest.raises(ValueError, match=r"HfViTBackbone has no program \(expected an encoder or a classifier\)"):
        hf_vit.HfViTBackbone(config).optimize_for_inference(backend=backend)
    with pytest.raises(ValueError, match=r"backend is 'tpu' \(expected one of auto, torch, openvino, onnxruntime\)"):
        tiny().optimize_for_inference(backend="tpu")
    monkeypatch.setitem(sys.modules, backend, None)
    with pytest.raises(ImportError, match=rf"{backend} is not installed: pip install 'hf_vit\[{backend}\]'"):
        tiny().optimize_for_inference(backend=backend)


@torch.no_grad()
def test_bfloat16_is_close_to_torch(backend):
    model = tiny(seed=2).bfloat16()
    expected = model(images(model)).logits
    if torch.bfloat16 not in RUNTIMES[backend].dtypes:
        with pytest.raises(ValueError, match=r"torch.bfloat16 on cpu \(expected torch.float32 on the CPU\)"):
            model.optimize_for_inference(backend=backend)
        return
    ours = model.optimize_for_inference(backend=backend)(images(model)).logits
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-2 * float(expected.abs().max()))


def test_auto_selects_the_backend_by_a_fixed_rule(backend, monkeypatch):
    """The selection is the same every time; no time is measured."""
    for name in RUNTIMES:
        monkeypatch.setitem(
            RUNTIMES, name, Runtime(name, () if name == backend else ("no_such",), RUNTIMES[name].dtypes)
        )
    assert choose(tiny()) == backend
    assert choose(tiny().half()) == choose(tiny_bit()) == "torch"
    assert choose(tiny().bfloat16()) == (backend if torch.bfloat16 in RUNTIMES[backend].dtypes else "torch")
    assert choose(hf_vit.HfViTBackbone(tiny().config)) == "torch"
    assert HfViTForImageClassification is not HfViTModel
