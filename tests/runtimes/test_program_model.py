"""OpenVINO and ONNX Runtime: outputs compared with the original's code and torch, refused calls, the cache."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from torch import nn
from transformers import Trainer, TrainingArguments, pipeline

import hf_vit
from hf_vit import HfViTImageProcessor
from hf_vit.conversion import convert
from hf_vit.models.packed_linear import FrozenModelError
from hf_vit.runtimes import ONNXRuntimeModel, OpenVINOModel, program_model

from ..comparing import logits, read_arrays, some
from ..paths import ROOT, golden_runs
from ..tiny_models import BIT_PIXELS, VARIANTS, images, tiny, tiny_bit

# What differs most in a program: poolings, kinds of positions, a stem, a ResNet.
GOLDEN_RUNS = ["vit_token", "vit_gap_rep", "bv_map", "bv_sincos", "hybrid_stem", "bit_v2"]
RUNS = {run["id"]: run for run in golden_runs("vit", "bit", "bit_paper") if run["id"] in GOLDEN_RUNS}
OF_TORCH = {"rtol": 1e-5, "atol": 2e-5}

of_both = pytest.mark.parametrize("backend", [OpenVINOModel, ONNXRuntimeModel])


@of_both
@pytest.mark.parametrize("run", some(GOLDEN_RUNS, "bv_map"))
def test_outputs_equal_the_goldens(backend, run, goldens):
    assert len(RUNS) == len(GOLDEN_RUNS)
    model, _ = convert(goldens / RUNS[run]["checkpoint"])
    expected = read_arrays(goldens / RUNS[run]["expected"])
    pixel_values = torch.from_numpy(expected["images"]).permute(0, 3, 1, 2)
    model.set_image_size(tuple(pixel_values.shape[2:]))  # not stored in a checkpoint without learned positions
    ours = logits(backend(model), pixel_values)
    wanted = expected["logits" if "logits" in expected else "pre_logits"]
    tolerance = 1e-5 if run.startswith(("vit", "bv")) else 1e-4
    assert np.abs(ours.numpy() - wanted).max() / max(1.0, np.abs(wanted).max()) <= tolerance


@of_both
@torch.no_grad()
@pytest.mark.parametrize("variant", some([*VARIANTS, "bit"], "cls"))
def test_outputs_equal_torch_for_every_batch_size(backend, variant):
    model = tiny_bit() if variant == "bit" else tiny(**VARIANTS[variant])
    pixel_values = BIT_PIXELS if variant == "bit" else images(model)
    batches = [pixel_values, pixel_values[:1], torch.cat([pixel_values, -pixel_values, pixel_values])[:5]]
    expected = [model(batch) for batch in batches]
    theirs = backend(model, batch_size=2)
    outputs = [theirs(batch) for batch in batches]  # all are kept: none overwrites another
    for found, wanted in zip(outputs, expected, strict=True):
        assert type(found) is type(wanted)
        assert found.keys() == wanted.keys()
        torch.testing.assert_close(found.logits, wanted.logits, **OF_TORCH)
    if variant != "none":  # which has logits of patches
        labels = torch.tensor([3, 0])
        torch.testing.assert_close(theirs(pixel_values, labels).loss, model(pixel_values, labels).loss, **OF_TORCH)
    assert isinstance(theirs(pixel_values, return_dict=False), tuple)


@pytest.fixture(scope="module", params=[OpenVINOModel, ONNXRuntimeModel])
def pair(request):
    """A tiny classifier and its program."""
    model = tiny()
    return model, request.param(model)


@of_both
@torch.no_grad()
def test_encoders(backend):
    model = tiny(seed=3).vit
    pixel_values = images(model)
    theirs, expected = backend(model), model(pixel_values)
    ours = theirs.base_model(pixel_values.transpose(0, 1).contiguous().transpose(0, 1))
    assert type(ours) is type(expected)
    assert list(ours) == list(expected) == ["last_hidden_state", "pooler_output"]
    torch.testing.assert_close(ours.to_tuple(), expected.to_tuple(), **OF_TORCH)
    with pytest.raises(ValueError, match="labels"):
        theirs(pixel_values, labels=torch.tensor([1, 2]))


@torch.no_grad()
def test_pipelines_and_trainer_use_it_as_a_model(pair, tmp_path, caplog):
    model, theirs = pair
    processor = HfViTImageProcessor(size={"height": 20, "width": 36})
    picture = Image.effect_noise((45, 31), 80)
    plain, ours = (
        pipeline("image-classification", model=one, image_processor=processor)(picture, top_k=3) for one in pair
    )
    assert ours == [{"label": one["label"], "score": pytest.approx(one["score"], abs=1e-5)} for one in plain]
    samples = [{"pixel_values": image, "labels": number} for number, image in enumerate(images(model, 5))]
    settings = {"report_to": [], "per_device_eval_batch_size": 2, "use_cpu": True, "disable_tqdm": True}
    predicted = Trainer(theirs, TrainingArguments(str(tmp_path), **settings)).predict(samples)
    wanted = model(images(model, 5), labels=torch.arange(5))
    np.testing.assert_allclose(predicted.predictions, wanted.logits.numpy(), atol=2e-5)
    assert predicted.metrics["test_loss"] == pytest.approx(wanted.loss.item(), abs=1e-4)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


OPTIONS = {
    "output_hidden_states": True,
    "output_attentions": True,
    "pixel_attention_mask": torch.ones(2, 30),
    "bool_masked_pos": torch.ones(2, 30),
    "patch_size": 4,
}


def test_unsupported_options_are_refused_by_name(pair, monkeypatch):
    model, theirs = pair
    for name, value in OPTIONS.items():
        with pytest.raises(ValueError, match=name):
            theirs(images(model), **{name: value})
        assert theirs(images(model), **{name: None}).logits.shape == (2, 11)
    monkeypatch.setattr(theirs.config, "output_hidden_states", True)
    with pytest.raises(ValueError, match="output_hidden_states"):
        theirs(images(model))


WRONG_IMAGES = {
    "channels": torch.zeros(2, 4, 20, 36),
    "size": torch.zeros(2, 3, 24, 36),
    "no batch": torch.zeros(3, 20, 36),
    "no images": torch.zeros(0, 3, 20, 36),
    "integers": torch.zeros(1, 3, 20, 36, dtype=torch.uint8),
    "device": torch.zeros(1, 3, 20, 36, device="meta"),
    "gradient": torch.zeros(1, 3, 20, 36, requires_grad=True),
}


@pytest.mark.parametrize("kind", WRONG_IMAGES)
def test_images_that_the_program_cannot_take_are_refused(pair, kind):
    with pytest.raises(ValueError, match="pixel_values"):
        pair[1](WRONG_IMAGES[kind], interpolate_pos_encoding=True)


def test_training_and_moves_are_refused(pair):
    _, theirs = pair
    assert (theirs.dtype, theirs.device.type, theirs.training) == (torch.float32, "cpu", False)
    assert theirs.eval().to("cpu").float() is theirs
    for change in (theirs.train, theirs.half, lambda: theirs.to("meta"), theirs.state_dict):
        with pytest.raises(FrozenModelError):
            change()
    with pytest.raises(ValueError, match=type(theirs).__name__):
        _ = theirs.base_model


@torch.no_grad()
def test_the_model_is_not_changed_and_its_changes_have_no_effect(pair):
    model, theirs = pair
    before = theirs(images(model)).logits
    assert "forward" not in vars(model)
    weight = model.classifier.weight.clone()
    model.classifier.weight.mul_(2)
    assert torch.equal(theirs(images(model)).logits, before)
    model.classifier.weight.copy_(weight)


@of_both
def test_unsupported_models_are_refused(backend, monkeypatch):
    with pytest.raises(ValueError, match=r"torch.float16"):
        backend(tiny().half())
    with pytest.raises(ValueError, match="HfViTBackbone"):
        backend(hf_vit.HfViTBackbone(tiny().config))
    monkeypatch.setitem(sys.modules, "openvino" if backend is OpenVINOModel else "onnxruntime", None)
    with pytest.raises(ImportError, match=r"hf_vit\["):
        backend(tiny())


@torch.no_grad()
def test_bfloat16_is_close_to_torch():
    model = tiny(seed=2).bfloat16()
    expected = model(images(model)).logits
    ours = OpenVINOModel(model)(images(model)).logits
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-2 * float(expected.abs().max()))
    with pytest.raises(ValueError, match="bfloat16"):
        ONNXRuntimeModel(model)


@torch.no_grad()
def test_programs_are_cached_by_what_they_compute(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path))
    made, make = [], program_model.make_openvino
    monkeypatch.setattr(program_model, "make_openvino", lambda *arguments: (made.append(1), make(*arguments)))

    def rename(model):
        model.config.id2label = {number: str(number) for number in range(11)}

    def replace(model):
        model.vit.layers[0].mlp = nn.Identity()

    def change_nothing(model):
        pass

    kinds = [({}, change_nothing), ({}, rename), ({"seed": 1}, change_nothing)]
    kinds += [({"layer_norm_eps": 0.5}, change_nothing), ({}, replace)]
    for (fields, change), count in zip([*kinds, *kinds], [1, 1, 2, 3, 4, 4, 4, 4, 4, 4], strict=True):
        model = tiny(num_hidden_layers=1, **fields)
        change(model)
        torch.testing.assert_close(OpenVINOModel(model)(images(model)).logits, model(images(model)).logits, **OF_TORCH)
        assert len(made) == count


END_AND_WAIT_FOR_A_CHILD = """
import faulthandler, gc, signal, subprocess, torch
from hf_vit.runtimes import OpenVINOModel
from tests.tiny_models import images, tiny
faulthandler.enable()  # gives the thread an alternate stack for signals
signal.signal(signal.SIGCHLD, lambda *_: None)  # as torch.utils.data.DataLoader does
models = [OpenVINOModel(tiny()) for _ in range(2)]
for model in models:
    model(images(model))
while models:
    del models[0], model
    gc.collect()
    model = None
for _ in range(3):
    subprocess.run(["true"])
print("alive")
"""


@pytest.mark.slow
def test_a_process_survives_signals_after_its_programs_are_deleted():
    """The judge is the operating system: with a `Core` for each program it ended the process by SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", END_AND_WAIT_FOR_A_CHILD], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
