"""Programs of changed models are converted again; torch computes unsupported calls. A plain model is the reference."""

import pytest
import torch
from torch import nn

import hf_vit.backends.forward as forward_module
from hf_vit import HfViTForImageClassification
from hf_vit.conversion import export_torch

from ..tiny_models import images, tiny

EXACT = {"rtol": 0, "atol": 0}


def half_the_head(model):
    with torch.no_grad():
        model.classifier.weight.mul_(0.5)


def by_load(model):
    model.load_state_dict(tiny(seed=3).state_dict())


def by_another_parameter(model):
    model.vit.layernorm.weight = nn.Parameter(torch.full_like(model.vit.layernorm.weight, 0.3))


def by_another_module(model):
    model.vit.layers[0].mlp = model.vit.layers[1].mlp


def by_a_hook(model):
    model.vit.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)


def by_its_size(model):
    model.set_image_size((20, 24), processor_follows=True)
    model.set_image_size((20, 36), processor_follows=True)


def by_its_dtype(model):
    model.bfloat16().float()


def in_part_training(model):
    model.vit.train()
    model.vit.eval()


WAYS = [half_the_head, by_load, by_another_parameter, by_another_module, by_a_hook, by_its_size, by_its_dtype,
        in_part_training]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_changed_weights_are_used(quick, way):
    model, twin = tiny().optimize_for_inference(backend="openvino"), tiny()
    for _ in range(2):
        for one in (model, twin):
            way(one)
        with torch.inference_mode():
            torch.testing.assert_close(model(images(model)).logits, twin(images(twin)).logits, **EXACT)


@torch.no_grad()
def test_reading_the_weights_converts_nothing(quick):
    model = tiny().optimize_for_inference(backend="openvino")
    model.state_dict()
    model(images(model), output_hidden_states=True)
    model(images(model))
    assert quick.made == 1


CALLS = {
    "output_hidden_states": {"output_hidden_states": True},
    "output_attentions": {"output_attentions": True},
    "attention_mask": {"attention_mask": torch.ones(2, 31)},
    "bool_masked_pos": {"bool_masked_pos": None},
}


@torch.no_grad()
@pytest.mark.parametrize("name", CALLS)
def test_unsupported_arguments_are_computed_by_torch(quick, name, caplog):
    model, twin = tiny().optimize_for_inference(backend="openvino"), tiny()
    for _ in range(2):
        ours, theirs = model(images(model), **CALLS[name]), twin(images(twin), **CALLS[name])
        assert ours.keys() == theirs.keys()
        torch.testing.assert_close(ours.logits, theirs.logits, **EXACT)
    said = [record.message for record in caplog.records if "torch computes it" in record.message]
    reason = f"it does not support the argument {name}"
    expected = [f"openvino cannot compute this forward: {reason}. torch computes it."]
    assert said == ([] if CALLS[name][name] is None else expected)


def test_gradients_autocast_and_output_settings_are_computed_by_torch(quick, caplog):
    model, twin = tiny().optimize_for_inference(backend="openvino"), tiny()
    for one in (model, twin):
        one(images(one)).logits.square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, **EXACT)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert model(images(model)).logits.dtype == torch.bfloat16
    model.config.output_hidden_states = True
    with torch.inference_mode():
        assert len(model(images(model)).hidden_states) == 4
    model.vit.layers[0].train()
    model.config.output_hidden_states = False
    with torch.inference_mode():
        model(images(model))
    said = "\n".join(record.message for record in caplog.records)
    for reason in ("gradients are enabled", "autocast is on", "has output_hidden_states", "in training mode"):
        assert said.count(reason) == 1


@torch.no_grad()
def test_an_optimised_model_exports_as_a_plain_one(quick, tmp_path):
    model = tiny().optimize_for_inference(backend="openvino")
    expected = tiny()(images(model)).logits
    export_torch(model, tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    torch.testing.assert_close(program(images(model)), expected, rtol=1e-5, atol=1e-5)
    assert quick.made == 1


@torch.no_grad()
def test_the_number_of_kept_programs_is_limited(quick):
    model = tiny().optimize_for_inference(backend="openvino")
    for columns in range(2, 10):
        model(torch.randn(1, 3, 20, 6 * columns), interpolate_pos_encoding=True)
    assert len(model.forward._programs) == forward_module._MOST_PROGRAMS
    assert isinstance(model, HfViTForImageClassification)
