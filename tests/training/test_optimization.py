"""Optimizers against outputs of optax, and learning rates against the originals'; both are in goldens/training."""

import numpy as np
import pytest
import torch
from transformers import get_wsd_schedule

from hf_vit import HfBiTConfig, HfBiTForImageClassification, HfViTConfig, HfViTForImageClassification
from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training import optimization
from hf_vit.training.optimization import build_optimizer, build_schedule, freeze_parameters, set_learning_rate

from ..comparing import read_arrays
from ..paths import GOLDENS
from ..tiny_models import TINY


@pytest.fixture
def model():
    torch.manual_seed(0)
    return HfViTForImageClassification(HfViTConfig(**TINY))


def settings_with(**changes) -> FinetuneSettings:
    return FinetuneSettings(**{"learning_rate": 0.1, **changes})


def test_groups_hold_every_trainable_parameter_once(model):
    freeze_parameters(model, [r"layers\.0\."])
    groups = optimization.parameter_groups(model, settings_with(weight_decay=0.1, layer_decay=0.5))
    held = [id(parameter) for group in groups for parameter in group["params"]]
    expected = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(held) == sorted(expected)
    assert {group["weight_decay"] for group in groups} == {0.0, 0.1}


def test_layer_decay_falls_from_head_to_embeddings(model):
    groups = optimization.parameter_groups(model, settings_with(layer_decay=0.5))
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
    """By a pattern, or the first layers by name."""

    def starting_with(model, *starts):
        return [name for name, _ in model.named_parameters() if name.startswith(starts)]

    for part, starts in (
        (r"^(?!classifier)", ["vit."]),
        ("encoder", ["vit."]),
        ("first 2 layers", ["vit.embeddings.", "vit.layers.0.", "vit.layers.1."]),
    ):
        model.requires_grad_(True)
        assert sorted(freeze_parameters(model, [part])) == sorted(starting_with(model, *starts))
    for part in ("nothing_like_it", "", "first 4 layers"):
        with pytest.raises(ValueError, match=f"'{part}'"):
            freeze_parameters(model, [part])
    resnet = HfBiTForImageClassification(HfBiTConfig(embedding_size=32, depths=[2, 1, 1], image_size=16))
    expected = starting_with(resnet, "bit.resnet.convolution.", "bit.resnet.stages.0.", "bit.resnet.stages.1.")
    assert sorted(freeze_parameters(resnet, ["first 2 layers"])) == sorted(expected)


def test_published_decay_conversion(model):
    """big_vision's 1e-4 at a peak of 1e-3 is torch's 0.1 (arXiv 2205.01580 against its PyTorch reproductions)."""
    settings = settings_with(weight_decay=1e-4, weight_decay_convention="jax", learning_rate=1e-3)
    decays = {group["weight_decay"] for group in optimization.parameter_groups(model, settings)}
    assert sorted(decays) == pytest.approx([0.0, 0.1])


def test_decay_stays_out_of_bfloat16_momentum():
    """Without gradients, jax's convention multiplies by 1 - lr / peak * wd in each step (big_vision/optax.py)."""
    layer = torch.nn.Linear(13, 9)
    expected = layer.weight.detach().double().numpy().copy()
    optimizer = build_optimizer(settings_with(weight_decay=0.3, **JAX, **BFLOAT16), layer)
    for rate in (0.1, 0.05, 0.02):
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        expected *= 1 - rate / 0.1 * 0.3
    np.testing.assert_allclose(layer.weight.detach().numpy(), expected, rtol=1e-6)
    settings = {"output_dir": "out", "model": "m", "dataset": "d", "steps": 1, "weight_decay": 0.3, **BFLOAT16}
    settings_with(**settings, **JAX).validate()
    with pytest.raises(ValueError, match="momentum_dtype"):
        settings_with(**settings).validate()


BFLOAT16 = {"momentum_dtype": "bfloat16"}
JAX = {"weight_decay_convention": "jax"}
ADAM = {"optimizer": "adamw", **JAX}
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


@pytest.mark.parametrize(("convention", "decay"), [("torch", 0.1), ("jax", 0.001)])
def test_muon_follows_its_paper_for_hidden_matrices_only(model, convention, decay):
    """arXiv 2502.16982, equations 1 to 4, in NumPy's float64: five times the quintic of the singular values.

    Momentum as torch keeps it: an average, which the iteration makes the same. It runs in bfloat16.
    """
    settings = settings_with(optimizer="muon", learning_rate=0.01, weight_decay=decay, momentum=0.95)
    settings.weight_decay_convention = convention  # jax: 0.001 at a peak rate of 0.01 is torch's 0.1
    optimizer, generator = build_optimizer(settings, model), np.random.default_rng(0)
    matrices = {name for name in optimization.kernel_names(model) if ".layers." in name}
    assert len(matrices) == 3 * 6
    before = {name: parameter.detach().double().numpy() for name, parameter in model.named_parameters()}
    others = [parameter for name, parameter in model.named_parameters() if name not in matrices]
    copies = [parameter.detach().clone().requires_grad_() for parameter in others]
    judge = torch.optim.AdamW(copies, 0.01, weight_decay=0)
    momentum = dict.fromkeys(matrices, 0.0)
    for _ in range(3):
        gradients = {name: generator.standard_normal(value.shape) for name, value in before.items()}
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name]).float()
        for copy, parameter in zip(copies, others, strict=True):
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
    for copy, parameter in zip(copies, others, strict=True):
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
    """Clipping, schedule, momentum or Adam, and decay: parameters after 1, 2, 10 and 50 updates, then the moments.

    Bits of bfloat16 may fall to the other side of a rounding boundary.
    """
    changes, largest = OPTAX[run]
    start = run.removesuffix("_float32") if f"{run}/initial/kernel" not in optax.files else run
    settings = settings_with(**changes, learning_rate=float(optax[f"{start}/base_lr"]))
    settings.weight_decay = float(optax[f"{start}/wd"]) if f"{start}/wd" in optax.files else 0.0
    settings.warmup_steps = int(optax[f"{start}/warmup_steps"])
    schedule = build_schedule(settings, int(optax[f"{start}/total_steps"]))
    rates = [schedule(step) for step in range(50)]
    np.testing.assert_allclose(rates, optax[f"{start}/learning_rates"], rtol=0, atol=1e-6 * max(rates))

    layer = torch.nn.Linear(13, 9)
    parameters = {"kernel": layer.weight, "bias": layer.bias}
    for name, parameter in parameters.items():
        parameter.data = torch.from_numpy(optax[f"{start}/initial/{name}"].T.copy())
    optimizer = build_optimizer(settings, layer)
    for step, rate in enumerate(rates):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(optax[f"{start}/gradients/{name}"][step].T.copy())
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), float(optax[f"{start}/clip"]))
        assert norm.item() == pytest.approx(optax[f"{start}/gradient_norms"][step], rel=1e-5)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        for name, parameter in parameters.items() if step + 1 in (1, 2, 10, 50) else ():
            difference = np.abs(parameter.detach().numpy().T - optax[f"{run}/step{step + 1}/{name}"])
            assert difference.max() <= largest, (step, name)
            assert np.mean(difference <= 5e-6) >= 0.9, (step, name)

    for name, original in (("momentum_buffer", "trace50"), ("exp_avg", "mu50"), ("exp_avg_sq", "nu50")):
        expected = optax.get(f"{run}/{original}/kernel")
        if expected is None:
            continue
        ours = optimizer.state[layer.weight][name].T
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
    average = optimization.MovingAverage({"p": parameter}, decay=0.9)
    with torch.no_grad():
        parameter.copy_(torch.tensor([2.0, 0.0]))
    average.update({"p": parameter})
    torch.testing.assert_close(average.parameters["p"], torch.tensor([1.1, 1.8]))
    for expected in ([1.1, 1.8], [2.0, 0.0]):
        average.swap({"p": parameter})
        torch.testing.assert_close(parameter.detach(), torch.tensor(expected))


def test_layers_of_learning_rate_decay():
    assert optimization.layer_of("vit.embeddings.stem.stages.1.layers.2.conv1.weight", 8) == 0
    assert optimization.layer_of("bit.resnet.convolution.weight", 8) == 0
    assert optimization.layer_of("bit.resnet.stages.2.layers.5.conv1.weight", 8) == 3
    assert optimization.layer_of("bit.norm.weight", 8) == 9


DECAY = {"weight_decay": 0.03, "layer_decay": 0.5}


@pytest.mark.parametrize("convention", ["torch", "jax"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_by_its_definition(model, optimizer, convention):
    """NumPy in float64, from the definitions.

    torch: sgd has v = 0.9 v + (g + wd w) (arXiv 1912.11370 pre-trains so), AdamW is decoupled (arXiv 1711.05101,
    algorithm 2), and both multiply by the layer's rate. jax: big_vision/optax.py scales the gradient's part by the rate
    of the layer, adds wd w, and multiplies both by the schedule, whose peak is 1.
    """
    peak = 0.1
    settings = settings_with(**DECAY, optimizer=optimizer, weight_decay_convention=convention, learning_rate=peak)
    built = build_optimizer(settings, model.double())
    generator = np.random.default_rng(0)
    kernels = optimization.kernel_names(model)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    first = {name: np.zeros_like(value) for name, value in weights.items()}
    second = {name: np.zeros_like(value) for name, value in weights.items()}
    for step, rate in enumerate((0.1, 0.05, 0.02), 1):
        set_learning_rate(built, rate)
        for name, parameter in model.named_parameters():
            gradient = generator.standard_normal(parameter.shape)
            parameter.grad = torch.from_numpy(gradient.copy())
            decayed = 0.03 * weights[name] if name in kernels else 0 * weights[name]
            layer_rate = rate * 0.5 ** (4 - optimization.layer_of(name, 3))
            if optimizer == "adamw":
                first[name] = 0.9 * first[name] + 0.1 * gradient
                second[name] = 0.999 * second[name] + 0.001 * gradient**2
                update = first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8)
            else:
                first[name] = 0.9 * first[name] + gradient
                if convention == "torch":
                    first[name] += decayed
                update = first[name]
            weights[name] = weights[name] - layer_rate * update
            if convention == "jax":
                weights[name] -= rate / peak * decayed
            elif optimizer == "adamw":
                weights[name] -= layer_rate * decayed
        built.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), weights[name], atol=1e-11, err_msg=name)


# Schedules


# Names that settings have in big_vision -> ours, where they differ
BIG_VISION = {"linear_end": "final_learning_rate", "end": "final_learning_rate", "power": "decay_power"}
BIG_VISION |= {"shift": "timescale_shift", "mults": "decay_factors"}
BIT_STEPS = {500: [200, 300, 400], 10_000: [3000, 6000, 9000], 20_000: [6000, 12_000, 18_000]}


SCHEDULES = read_arrays(GOLDENS / "training" / "schedules.npz")
RUNS = sorted({"/".join(name.split("/")[:2]) for name in SCHEDULES if not name.startswith("bit/")})


@pytest.mark.parametrize("run", RUNS)
def test_every_step_has_the_originals_rate(run):
    """`create_learning_rate_schedule` of vit_jax/utils.py and of big_vision/utils.py, which compute in float32."""
    assert len(RUNS) == 12
    held = {name.rsplit("/", 1)[1]: array.tolist() for name, array in SCHEDULES.items() if name.startswith(f"{run}/")}
    kind = run.split("/")[1].split("_")[0]
    settings = FinetuneSettings(schedule="staircase" if kind == "stair" else kind, learning_rate=held.pop("base", 1.0))
    total = held.pop("total_steps")
    if "steps" in held:  # big_vision's are the first of each stair, ours the last
        settings.decay_steps = [step - 1 for step in held.pop("steps")]
    for name, value in held.items():
        setattr(settings, BIG_VISION.get(name, name), value)
    schedule = build_schedule(settings, total)
    ours = [schedule(step) for step in range(total + 1)]
    np.testing.assert_allclose(ours, SCHEDULES[run], rtol=0, atol=1e-6 * SCHEDULES[run].max())


@pytest.mark.parametrize("base", [0.003, 0.001])
@pytest.mark.parametrize("examples", [510, 5000, 19_999, 20_000, 49_000, 1_281_167])
def test_staircase_is_that_of_bit(examples, base):
    """`get_lr` of bit_hyperrule.py, big_transfer, which the golden has where the rate changes."""
    warmup, *decays, total = SCHEDULES[f"bit/{examples}_{base}/supports"].tolist()
    settings = FinetuneSettings(learning_rate=base, schedule="staircase", warmup_steps=warmup, decay_steps=decays)
    schedule = build_schedule(settings, total)
    steps, rates = SCHEDULES[f"bit/{examples}_{base}"].T
    expected = rates[np.searchsorted(steps, np.arange(total), side="right") - 1]
    np.testing.assert_allclose([schedule(step) for step in range(total)], expected, rtol=0, atol=1e-12)
    assert BIT_STEPS[total] == decays  # of the recipes


@pytest.mark.parametrize(("cooldown_steps", "length"), [(0, 20), (30, 30)])
def test_wsd_is_that_of_transformers(cooldown_steps, length):
    """transformers warms up from the final rate, so the warm-up is compared with a final rate of 0."""
    for final in (0.0, 0.2):
        settings = FinetuneSettings(schedule="wsd", warmup_steps=10, cooldown_steps=cooldown_steps)
        settings.learning_rate, settings.final_learning_rate = 1.0, final
        schedule = build_schedule(settings, 100)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)
        judge = get_wsd_schedule(optimizer, 10, length, 100, decay_type="1-sqrt", min_lr_ratio=final).lr_lambdas[0]
        steps = range(10 if final else 0, 101)
        assert [schedule(step) for step in steps] == pytest.approx([judge(step) for step in steps])


def test_constant_schedule():
    schedule = build_schedule(FinetuneSettings(schedule="constant", learning_rate=0.03, warmup_steps=10), 100)
    assert [schedule(step) for step in (0, 5, 10, 99)] == pytest.approx([0, 0.015, 0.03, 0.03])


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (9, 0), (10, 1), (19, 1), (84, 8)])
def test_a_warm_up_below_1_is_a_share_of_the_run(num_steps, warmup_steps):
    share, count = (
        build_schedule(FinetuneSettings(schedule="cosine", warmup_steps=steps), num_steps)
        for steps in (0.1, warmup_steps)
    )
    assert [share(step) for step in range(num_steps)] == [count(step) for step in range(num_steps)]


def test_a_warm_up_that_fills_the_run_or_the_decay_is_refused():
    with pytest.raises(ValueError, match="--warmup-steps"):
        build_schedule(FinetuneSettings(warmup_steps=9), 9)
    with pytest.raises(ValueError, match="--decay-steps"):
        build_schedule(FinetuneSettings(warmup_steps=0.5, decay_steps=[10]), 20)
