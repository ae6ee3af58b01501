"""Optimisers against optax's formulas written in NumPy, and which parameters they see."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_vit.models.configuration_hf_vit import HfViTConfig, HfViTHybridConfig
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification, HfViTHybridForImageClassification
from hf_vit.training.optimization import (
    CompactSGD,
    MovingAverage,
    build_optimizer,
    freeze_parameters,
    kernel_names,
    layer_of,
    parameter_groups,
    set_learning_rate,
    torch_weight_decay,
)

TINY = {
    "hidden_size": 14,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 22,
    "image_size": [20, 36],
    "patch_size": 4,
    "num_labels": 11,
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HfViTForImageClassification(HfViTConfig(**TINY))


def settings_with(**changes):
    defaults = {
        "optimizer": "sgd",
        "learning_rate": 0.1,
        "momentum": 0.9,
        "momentum_dtype": "float32",
        "weight_decay": 0.0,
        "weight_decay_convention": "torch",
        "layer_decay": None,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
    }
    return SimpleNamespace(**{**defaults, **changes})


def test_only_kernels_decay(model):
    kernels = kernel_names(model)
    assert "vit.embeddings.patch_embeddings.projection.weight" in kernels
    assert "vit.layers.2.attention.o_proj.weight" in kernels
    assert "classifier.weight" in kernels
    others = {name for name, _ in model.named_parameters()} - kernels
    tokens = {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"}
    assert {name for name in others if not name.endswith(".bias") and "layernorm" not in name} == tokens


def test_standardised_convolutions_of_the_stem_are_kernels_and_their_norms_are_not():
    config = HfViTHybridConfig(**{**TINY, "patch_size": 1, "image_size": 32}, stem_depths=[1], stem_width=32)
    kernels = kernel_names(HfViTHybridForImageClassification(config))
    stem = {name for name in kernels if ".stem." in name}
    assert stem
    assert not any("norm" in name for name in stem)


def test_groups_hold_every_trainable_parameter_once(model):
    freeze_parameters(model, [r"layers\.0\."])
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    held = [id(parameter) for group in groups for parameter in group["params"]]
    expected = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(held) == sorted(expected)
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def test_layer_decay_falls_from_head_to_embeddings(model):
    groups = parameter_groups(model, layer_decay=0.5)
    scale = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    assert scale[id(model.classifier.weight)] == 1
    assert scale[id(model.vit.layernorm.weight)] == 1
    assert scale[id(model.vit.layers[2].mlp.fc1.weight)] == 0.5
    assert scale[id(model.vit.layers[0].mlp.fc1.weight)] == 0.125
    assert scale[id(model.vit.embeddings.cls_token)] == 0.0625
    optimizer = torch.optim.SGD(groups, 1.0)
    set_learning_rate(optimizer, 0.4)
    assert {group["lr"] for group in optimizer.param_groups} == {0.4, 0.2, 0.1, 0.05, 0.025}


def test_freezing(model):
    frozen = freeze_parameters(model, [r"^(?!classifier)"])
    assert set(frozen) == {name for name, _ in model.named_parameters()} - {"classifier.weight", "classifier.bias"}
    with pytest.raises(ValueError, match="'nothing_like_it' matches none"):
        freeze_parameters(model, ["nothing_like_it"])
    with pytest.raises(ValueError, match="leaves no parameter"):
        freeze_parameters(model, [""])


def quadratic_gradients(count: int, shape=(5, 3)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


def run_optimizer(optimizer, parameter, gradients, rates):
    for gradient, rate in zip(gradients, rates, strict=True):
        parameter.grad = torch.from_numpy(gradient.copy())
        set_learning_rate(optimizer, rate)
        optimizer.step()
    return parameter.detach().numpy()


def test_adamw_with_jax_decay_equals_optax():
    """optax.chain(scale_by_adam, add_decayed_weights(1e-4)) with big_vision's schedule, in NumPy."""
    layer = torch.nn.Linear(3, 5, bias=False)
    settings = settings_with(optimizer="adamw", learning_rate=1e-2, weight_decay=1e-1, weight_decay_convention="jax")
    gradients, shape_of_schedule = quadratic_gradients(6), [0.5, 1.0, 0.8, 0.6, 0.4, 0.2]
    weight = layer.weight.detach().numpy().astype(np.float64).copy()
    mean = variance = np.zeros_like(weight)
    for count, (gradient, share) in enumerate(zip(gradients, shape_of_schedule, strict=True), start=1):
        mean = 0.9 * mean + 0.1 * gradient
        variance = 0.999 * variance + 0.001 * gradient.astype(np.float64) ** 2
        direction = (mean / (1 - 0.9**count)) / (np.sqrt(variance / (1 - 0.999**count)) + 1e-8)
        weight = weight - share * 1e-2 * direction - share * 1e-1 * weight
    optimizer = build_optimizer(settings, layer)
    result = run_optimizer(optimizer, layer.weight, gradients, [1e-2 * share for share in shape_of_schedule])
    np.testing.assert_allclose(result, weight, rtol=2e-5, atol=1e-6)


def test_published_decay_conversion():
    """big_vision's 1e-4 at a peak of 1e-3 is torch's 0.1 (arXiv 2205.01580 against its PyTorch reproductions)."""
    assert torch_weight_decay(1e-4, "jax", 1e-3) == pytest.approx(0.1)
    assert torch_weight_decay(0.1, "torch", 1e-3) == 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sgd_momentum_equals_optax(dtype):
    """optax.sgd: trace = gradient + momentum * trace, stored rounded, used before rounding."""
    layer = torch.nn.Linear(3, 5, bias=False)
    optimizer = build_optimizer(settings_with(momentum_dtype=dtype), layer)
    gradients, rates = quadratic_gradients(5), [0.1, 0.2, 0.1, 0.05, 0.01]
    weight, trace = layer.weight.detach().clone(), torch.zeros(5, 3)
    for gradient, rate in zip(gradients, rates, strict=True):
        velocity = torch.from_numpy(gradient) + 0.9 * trace
        weight = weight - rate * velocity
        trace = velocity.to(getattr(torch, dtype)).float()
    result = run_optimizer(optimizer, layer.weight, gradients, rates)
    np.testing.assert_allclose(result, weight.numpy(), rtol=1e-5, atol=1e-6)
    assert optimizer.state[layer.weight]["momentum_buffer"].dtype == getattr(torch, dtype)


def test_compact_sgd_stays_near_full_precision():
    torch.manual_seed(3)
    layers = [torch.nn.Linear(3, 5, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    gradients, rates = quadratic_gradients(20), [0.01] * 20
    exact = run_optimizer(torch.optim.SGD([layers[0].weight], 0.1, 0.9), layers[0].weight, gradients, rates)
    compact = run_optimizer(CompactSGD([layers[1].weight], 0.1, 0.9), layers[1].weight, gradients, rates)
    assert 0 < np.abs(exact - compact).max() < 0.01


def test_moving_average():
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    average = MovingAverage({"p": parameter}, decay=0.9)
    with torch.no_grad():
        parameter.copy_(torch.tensor([2.0, 0.0]))
    average.update({"p": parameter})
    torch.testing.assert_close(average.parameters["p"], torch.tensor([1.1, 1.8]))
    average.swap({"p": parameter})
    torch.testing.assert_close(parameter.detach(), torch.tensor([1.1, 1.8]))
    average.swap({"p": parameter})
    torch.testing.assert_close(parameter.detach(), torch.tensor([2.0, 0.0]))


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("vit.embeddings.stem.stages.1.layers.2.conv1.weight", 0),
        ("vit.layers.3.mlp.fc1.weight", 4),
        ("bit.resnet.convolution.weight", 0),
        ("bit.resnet.stages.2.layers.5.conv1.weight", 3),
        ("bit.norm.weight", 9),
        ("classifier.weight", 9),
    ],
)
def test_layers_of_learning_rate_decay(name, layer):
    assert layer_of(name, 8) == layer
