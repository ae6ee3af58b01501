"""Optimizers against outputs of optax (goldens/training), and their groups of parameters."""

import re

import numpy as np
import pytest
import torch

from hf_vit.models.configuration_hf_bit import HfBiTConfig
from hf_vit.models.configuration_hf_vit import HfViTConfig
from hf_vit.models.modeling_hf_bit import HfBiTForImageClassification
from hf_vit.models.modeling_hf_vit import HfViTForImageClassification
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training.optimization import (
    MovingAverage,
    build_optimizer,
    build_schedule,
    freeze_parameters,
    kernel_names,
    layer_of,
    parameter_groups,
    set_learning_rate,
    torch_weight_decay,
)

from ..tiny_models import TINY


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HfViTForImageClassification(HfViTConfig(**TINY))


def settings_with(**changes) -> FinetuneSettings:
    return FinetuneSettings(**{"learning_rate": 0.1, **changes})


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
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert freeze_parameters(model, ["encoder"]) == frozen
    with pytest.raises(ValueError, match="nothing_like_it"):
        freeze_parameters(model, ["nothing_like_it"])
    with pytest.raises(ValueError, match=r"\[''\]"):
        freeze_parameters(model, [""])


def test_freezing_the_first_layers_by_name(model):
    frozen = freeze_parameters(model, ["first 2 layers"])
    layers = {name.split(".")[2] for name in frozen if ".layers." in name}
    assert layers == {"0", "1"}
    assert "vit.embeddings.cls_token" in frozen
    assert all(".layers." in name or ".embeddings." in name for name in frozen)
    with pytest.raises(ValueError, match="first 4 layers"):
        freeze_parameters(model, ["first 4 layers"])
    resnet = HfBiTForImageClassification(HfBiTConfig(embedding_size=32, depths=[2, 1, 1], image_size=16))
    stages = {
        re.sub(r".*(stages\.\d|resnet\.convolution).*", r"\1", name)
        for name in freeze_parameters(resnet, ["first 2 layers"])
    }
    assert stages == {"resnet.convolution", "stages.0", "stages.1"}


def test_published_decay_conversion():
    """big_vision's 1e-4 at a peak of 1e-3 is torch's 0.1 (arXiv 2205.01580 against its PyTorch reproductions)."""
    assert torch_weight_decay(1e-4, "jax", 1e-3) == pytest.approx(0.1)
    assert torch_weight_decay(0.1, "torch", 1e-3) == 0.1


BFLOAT16 = {"momentum_dtype": "bfloat16"}
ADAM = {"optimizer": "adamw", "weight_decay_convention": "jax"}
OPTAX = {
    # run of goldens/training/optimizers.npz -> settings besides its own, and the largest difference
    "sgd": (BFLOAT16, 2e-3),
    "sgd_linear": ({**BFLOAT16, "schedule": "linear", "final_learning_rate": 1e-5}, 2e-3),
    "sgd_float32": ({}, 5e-6),
    "momentum_hp": (BFLOAT16, 2e-3),
    "adam": ({**ADAM, **BFLOAT16}, 2e-4),
    "adam_strong_decay": ({**ADAM, **BFLOAT16}, 2e-4),
    "adam_float32": (ADAM, 5e-6),
}


def test_muon_follows_its_paper_for_hidden_matrices_only(model):
    """arXiv 2502.16982, equations 1 to 4, in NumPy's float64: five times the quintic of the singular values.

    Momentum as torch keeps it: an average, which the iteration makes the same. It runs in bfloat16.
    """
    settings = settings_with(optimizer="muon", learning_rate=0.01, weight_decay=0.1, momentum=0.95)
    optimizer, generator = build_optimizer(settings, model), np.random.default_rng(0)
    matrices = {name for name in kernel_names(model) if ".layers." in name}
    assert len(matrices) == 3 * 6
    before = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}
    others = [parameter for name, parameter in model.named_parameters() if name not in matrices]
    judge = torch.optim.AdamW(
        [parameter.detach().clone().requires_grad_() for parameter in others], 0.01, weight_decay=0
    )
    momentum = dict.fromkeys(matrices, 0.0)
    for _ in range(3):
        gradients = {name: generator.standard_normal(value.shape) for name, value in before.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name]).float()
        for copy, parameter in zip(judge.param_groups[0]["params"], others, strict=True):
            copy.grad = parameter.grad.clone()
        optimizer.step()
        judge.step()
        for name in matrices:
            momentum[name] = 0.95 * momentum[name] + 0.05 * gradients[name]
            left, values, right = np.linalg.svd(0.05 * gradients[name] + 0.95 * momentum[name], full_matrices=False)
            values /= np.linalg.norm(values)
            for _ in range(5):
                values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
            length = 0.2 * np.sqrt(max(before[name].shape))
            before[name] = before[name] * (1 - 0.01 * 0.1) - 0.01 * length * (left * values) @ right
    for name in matrices:
        step = 0.01 * 0.2 * np.sqrt(max(before[name].shape))
        difference = np.abs(model.get_parameter(name).detach().numpy() - before[name]).max()
        assert difference < 0.05 * step, name
    for copy, parameter in zip(judge.param_groups[0]["params"], others, strict=True):
        if parameter.ndim == 1:  # the others decay
            torch.testing.assert_close(parameter, copy)
    optimizer.load_state_dict(optimizer.state_dict())  # as Accelerate does
    optimizer.step()
    with pytest.raises(ValueError, match="muon"):
        build_optimizer(settings, torch.nn.Linear(3, 5))


@pytest.fixture(scope="module")
def optax(goldens):
    """Parameters and states of 50 updates by optax under `jax.jit`, as vit_jax and big_vision chain them."""
    return np.load(goldens / "training" / "optimizers.npz")


@pytest.mark.parametrize("run", OPTAX)
def test_updates_equal_optax(optax, run):
    """Clipping, schedule, momentum or Adam, and decay: parameters after 1, 2, 10 and 50 updates."""
    steps, optimizer, layer = run_golden(optax, run, OPTAX[run][0])
    for step, (kernel, bias) in steps.items():
        for ours, name in ((kernel, "kernel"), (bias, "bias")):
            difference = np.abs(ours - optax[f"{run}/step{step}/{name}"])
            assert difference.max() <= OPTAX[run][1], (step, name)
            assert np.mean(difference <= 5e-6) >= 0.9, (step, name)
    check_states(optax, run, optimizer.state[layer.weight])


def run_golden(optax, run: str, changes: dict):
    """{step: (kernel, bias)} of a run's recorded steps, the optimizer, and the layer at the end."""
    start = run.removesuffix("_float32") if f"{run}/initial/kernel" not in optax.files else run
    settings = settings_with(**changes, learning_rate=float(optax[f"{start}/base_lr"]))
    settings.weight_decay = float(optax[f"{start}/wd"]) if f"{start}/wd" in optax.files else 0.0
    settings.warmup_steps = int(optax[f"{start}/warmup_steps"])
    schedule = build_schedule(settings, int(optax[f"{start}/total_steps"]))
    rates = [schedule(step) for step in range(50)]
    np.testing.assert_allclose(rates, optax[f"{start}/learning_rates"], rtol=0, atol=1e-6 * max(rates))

    layer = torch.nn.Linear(13, 9)
    layer.load_state_dict({name: start_of(optax, start, name) for name in ("weight", "bias")})
    optimizer, steps = build_optimizer(settings, layer), {}
    for step, rate in enumerate(rates):
        for parameter, name in ((layer.weight, "kernel"), (layer.bias, "bias")):
            parameter.grad = torch.from_numpy(optax[f"{start}/gradients/{name}"][step].T.copy())
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), float(optax[f"{start}/clip"]))
        assert norm.item() == pytest.approx(optax[f"{start}/gradient_norms"][step], rel=1e-5)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        if step + 1 in (1, 2, 10, 50):
            steps[step + 1] = layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy()
    return steps, optimizer, layer


def start_of(optax, run: str, name: str) -> torch.Tensor:
    return torch.from_numpy(optax[f"{run}/initial/{'kernel' if name == 'weight' else name}"].T.copy())


def check_states(optax, run: str, state: dict):
    """Moments after 50 updates; bits of bfloat16 may fall to the other side of a rounding boundary."""
    for name, original in (("momentum_buffer", "trace50"), ("exp_avg", "mu50"), ("exp_avg_sq", "nu50")):
        expected = optax.get(f"{run}/{original}/kernel")
        if expected is None:
            continue
        ours = state[name].T.contiguous()
        if expected.dtype == np.uint16:
            expected = torch.from_numpy(expected.view(np.int16).copy()).view(torch.bfloat16)
            assert ours.dtype == torch.bfloat16
            assert (ours == expected).float().mean() >= 0.9, name
            torch.testing.assert_close(ours, expected, rtol=2**-6, atol=2**-13)
        else:
            torch.testing.assert_close(ours, torch.from_numpy(expected), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_loaded_state_is_still_in_bfloat16(optimizer):
    """torch's own `load_state_dict` would make float32 of it."""
    layers = [torch.nn.Linear(3, 5) for _ in range(2)]
    first, second = (build_optimizer(settings_with(optimizer=optimizer, **BFLOAT16), layer) for layer in layers)
    layers[0](torch.ones(2, 3)).sum().backward()
    first.step()
    second.load_state_dict(first.state_dict())
    for ours, theirs in zip(layers[1].parameters(), layers[0].parameters(), strict=True):
        assert [value.dtype for value in second.state[ours].values()].count(torch.bfloat16) == 1
        for name, value in first.state[theirs].items():
            assert torch.equal(value, second.state[ours][name])


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
        ("bit.resnet.convolution.weight", 0),
        ("bit.resnet.stages.2.layers.5.conv1.weight", 3),
        ("bit.norm.weight", 9),
    ],
)
def test_layers_of_learning_rate_decay(name, layer):
    assert layer_of(name, 8) == layer


def test_weight_decay_of_sgd_is_l2_on_kernels(model):
    """arXiv 1912.11370 pre-trains so; NumPy in float64: v = 0.9 v + (g + wd w); w = w - lr v."""
    settings = settings_with(optimizer="sgd", weight_decay=0.3)
    optimizer = build_optimizer(settings, model.double())
    generator, kernels = np.random.default_rng(0), kernel_names(model)
    expected = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    velocity = {name: np.zeros_like(value) for name, value in expected.items()}
    for rate in (0.1, 0.05, 0.02):
        set_learning_rate(optimizer, rate)
        for name, parameter in model.named_parameters():
            gradient = generator.standard_normal(parameter.shape)
            parameter.grad = torch.from_numpy(gradient)
            decay = 0.3 * expected[name] if name in kernels else 0
            velocity[name] = 0.9 * velocity[name] + gradient + decay
            expected[name] = expected[name] - rate * velocity[name]
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), expected[name], atol=1e-12)
