"""Learning rates against the closed forms of vit_jax/utils.py."""

import math

import pytest

from hf_vit.training.schedules import learning_rate_schedule


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("linear", 0, 0.0),
        ("linear", 5, 0.015),
        ("linear", 10, 0.03),
        ("linear", 55, 1e-5 + (0.03 - 1e-5) * 0.5),
        ("linear", 100, 1e-5),
        ("cosine", 9, 0.027),
        ("cosine", 10, 0.03),
        ("cosine", 40, 1e-5 + (0.03 - 1e-5) * 0.5 * (1 + math.cos(math.pi / 3))),
        ("cosine", 100, 1e-5),
        ("constant", 99, 0.03),
    ],
)
def test_values(kind, step, expected):
    schedule = learning_rate_schedule(kind, 0.03, 100, warmup_steps=10, final=1e-5)
    assert schedule(step) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.0), (250, 0.0015), (500, 0.003), (3000, 0.003), (3001, 0.0003), (6001, 3e-5), (9000, 3e-5), (9999, 3e-6)],
)
def test_staircase(step, expected):
    """`get_lr` of bit_hyperrule.py, big_transfer, for 20,000 to 499,999 images."""
    schedule = learning_rate_schedule("staircase", 0.003, 10_000, warmup_steps=500, decay_steps=[3000, 6000, 9000])
    assert schedule(step) == pytest.approx(expected, abs=1e-15)


def test_without_warmup_the_first_step_has_the_full_rate():
    assert learning_rate_schedule("cosine", 0.5, 7)(0) == 0.5


def test_paper_pretraining_ends_at_the_floor():
    """Google's answer in google-research/vision_transformer issue 62: linear from 1e-3 to 1e-5."""
    schedule = learning_rate_schedule("linear", 1e-3, 300_000, warmup_steps=10_000, final=1e-5)
    assert schedule(10_000) == 1e-3
    assert schedule(300_000) == pytest.approx(1e-5)


@pytest.mark.parametrize(("kind", "warmup", "message"), [("step", 0, "step"), ("linear", 9, r"warmup_steps \(9\)")])
def test_refused(kind, warmup, message):
    with pytest.raises(ValueError, match=message):
        learning_rate_schedule(kind, 0.1, 9, warmup_steps=warmup)
