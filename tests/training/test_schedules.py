"""Learning rates against values of the original functions: goldens/training/schedules.npz."""

import numpy as np
import pytest
import torch
from transformers import get_wsd_schedule

from hf_vit.settings.fields import FinetuneSettings
from hf_vit.training.optimization import build_schedule

# Names that the settings have in big_vision -> ours
BIG_VISION = {
    "linear_end": "final_learning_rate",
    "end": "final_learning_rate",
    "power": "decay_power",
    "timescale": "timescale",
    "shift": "timescale_shift",
    "mults": "decay_factors",
    "warmup_steps": "warmup_steps",
    "cooldown_steps": "cooldown_steps",
}
BIT_STEPS = {500: [200, 300, 400], 10_000: [3000, 6000, 9000], 20_000: [6000, 12_000, 18_000]}


@pytest.fixture(scope="module")
def originals(goldens):
    return np.load(goldens / "training" / "schedules.npz")


def settings_of(originals, run: str, **changes) -> tuple[FinetuneSettings, int]:
    """A run's settings in our words, and its number of steps."""
    held = {key.rsplit("/", 1)[1]: originals[key].tolist() for key in originals.files if key.startswith(f"{run}/")}
    kind = run.split("/")[1].split("_")[0]
    settings = FinetuneSettings(schedule="staircase" if kind == "stair" else kind, learning_rate=held.pop("base", 1.0))
    total = held.pop("total_steps")
    if "steps" in held:  # big_vision's are the first of each stair, ours the last
        settings.decay_steps = [step - 1 for step in held.pop("steps")]
    for name, value in held.items():
        setattr(settings, BIG_VISION[name], value)
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings, total


RUNS = [f"vit_jax/{run}" for run in ("cosine_0", "cosine_1", "linear_2", "linear_3")]
RUNS += [f"big_vision/{run}" for run in ("cosine_0", "cosine_1", "linear_2", "linear_3")]
RUNS += [f"big_vision/{run}" for run in ("rsqrt_4", "rsqrt_5", "polynomial_6", "stair_7")]


@pytest.mark.parametrize("run", RUNS)
def test_every_step_has_the_originals_rate(originals, run):
    """`create_learning_rate_schedule` of vit_jax/utils.py and of big_vision/utils.py, which compute in float32."""
    settings, total = settings_of(originals, run)
    schedule = build_schedule(settings, total)
    ours = [schedule(step) for step in range(total + 1)]
    np.testing.assert_allclose(ours, originals[run], rtol=0, atol=1e-6 * originals[run].max())


def test_every_original_schedule_is_tested(originals):
    assert {"/".join(key.split("/")[:2]) for key in originals.files if not key.startswith("bit/")} == set(RUNS)


@pytest.mark.parametrize("base", [0.003, 0.001])
@pytest.mark.parametrize("examples", [510, 5000, 19_999, 20_000, 49_000, 1_281_167])
def test_staircase_is_that_of_bit(originals, examples, base):
    """`get_lr` of bit_hyperrule.py, big_transfer, which the golden has where the rate changes."""
    warmup, *decays, total = originals[f"bit/{examples}_{base}/supports"].tolist()
    settings = FinetuneSettings(learning_rate=base, schedule="staircase", warmup_steps=warmup, decay_steps=decays)
    schedule = build_schedule(settings, total)
    steps, rates = originals[f"bit/{examples}_{base}"].T
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
        judge = get_wsd_schedule(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0),
            10,
            length,
            100,
            decay_type="1-sqrt",
            min_lr_ratio=final,
        ).lr_lambdas[0]
        steps = range(10 if final else 0, 101)
        assert [schedule(step) for step in steps] == pytest.approx([judge(step) for step in steps])


def test_constant_schedule():
    schedule = build_schedule(FinetuneSettings(schedule="constant", learning_rate=0.03, warmup_steps=10), 100)
    assert [schedule(step) for step in (0, 5, 10, 99)] == pytest.approx([0, 0.015, 0.03, 0.03])


def test_a_warm_up_that_fills_the_run_is_refused():
    with pytest.raises(ValueError, match="--warmup-steps"):
        build_schedule(FinetuneSettings(warmup_steps=9), 9)


@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (9, 0), (10, 1), (19, 1), (84, 8)])
def test_a_warm_up_below_1_is_a_share_of_the_run(num_steps, warmup_steps):
    share, count = (
        build_schedule(FinetuneSettings(schedule="cosine", warmup_steps=steps), num_steps)
        for steps in (0.1, warmup_steps)
    )
    assert [share(step) for step in range(num_steps)] == [count(step) for step in range(num_steps)]


def test_a_decay_that_ends_within_a_warm_up_of_a_share_is_refused():
    with pytest.raises(ValueError, match="--decay-steps"):
        build_schedule(FinetuneSettings(warmup_steps=0.5, decay_steps=[10]), 20)
