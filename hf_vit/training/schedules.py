"""Learning rate schedules as closed-form functions of the optimiser step."""

import math
from collections.abc import Callable
from dataclasses import replace

from .settings import TrainingSettings

Schedule = Callable[[int], float]
_Decay = Callable[[TrainingSettings, int, int], float]


def build_schedule(settings: TrainingSettings, num_steps: int) -> Schedule:
    """Return the learning rate as a function of the optimiser step: 0, 1, ..., num_steps - 1.

    It is a decay that starts when the warm-up ends, times a linear warm-up from 0, times a linear cool-down to 0. It
    follows `create_learning_rate_schedule` of google-research/vision_transformer (vit_jax/utils.py) and of big_vision
    (utils.py), and `get_lr` of big_transfer (bit_hyperrule.py). vit_jax's linear decay ends at 1e-5 and its cosine at
    0; here both end at `final_learning_rate`.

    Tested against values of those functions (tests/goldens/training/schedules.npz), and wsd against transformers.

    Args:
        num_steps: the step at which the decay ends, unless `decay_steps` sets another.

    Raises:
        ValueError: the warm-up fills the run, or leaves no room for the decay.
    """
    if settings.warmup_steps < 1:  # a share; rounded down, because the first step of a warm-up has the rate 0
        settings = replace(settings, warmup_steps=int(settings.warmup_steps * num_steps))
    warmup_steps, cooldown_steps, decay = settings.warmup_steps, settings.cooldown_steps, _DECAYS[settings.schedule]
    if warmup_steps >= num_steps:
        raise ValueError(
            f"--warmup-steps ({warmup_steps}) must be less than the {num_steps} steps of the run (0.1: a tenth)"
        )
    if settings.decay_steps and settings.decay_steps[0] <= warmup_steps and decay is not _staircase:
        raise ValueError(f"--decay-steps ({settings.decay_steps[0]}) must be above --warmup-steps ({warmup_steps})")
    if decay is _wsd and warmup_steps + cooldown_steps > num_steps:
        raise ValueError(
            f"--warmup-steps ({warmup_steps}) and --cooldown-steps ({cooldown_steps}) are more than the {num_steps} "
            "steps of the run"
        )

    def learning_rate(step: int) -> float:
        warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        cooldown = min(1.0, (num_steps - step) / cooldown_steps) if cooldown_steps and decay is not _wsd else 1.0
        return decay(settings, step, num_steps) * warmup * cooldown

    return learning_rate


def _cosine(settings: TrainingSettings, step: int, num_steps: int) -> float:
    return _towards_final(settings, 0.5 * (1.0 + math.cos(math.pi * _progress(settings, step, num_steps))))


def _polynomial(settings: TrainingSettings, step: int, num_steps: int) -> float:
    return _towards_final(settings, (1.0 - _progress(settings, step, num_steps)) ** settings.decay_power)


def _linear(settings: TrainingSettings, step: int, num_steps: int) -> float:
    return _towards_final(settings, 1.0 - _progress(settings, step, num_steps))


def _constant(settings: TrainingSettings, step: int, num_steps: int) -> float:
    return settings.learning_rate


def _wsd(settings: TrainingSettings, step: int, num_steps: int) -> float:
    """Constant, then 1 - sqrt(progress) over the last fifth (Hägele et al., arXiv 2405.18392, section 4)."""
    length = settings.cooldown_steps or max(num_steps // 5, 1)
    return _towards_final(settings, 1.0 - math.sqrt(max(step - num_steps + length, 0) / length))


def _rsqrt(settings: TrainingSettings, step: int, num_steps: int) -> float:
    """Inverse square root of the steps since the warm-up, in units of `timescale`."""
    steps = max(step - settings.warmup_steps, 0) + settings.timescale_shift
    return settings.learning_rate / math.sqrt(1 + steps / settings.timescale)


def _staircase(settings: TrainingSettings, step: int, num_steps: int) -> float:
    """A lower share of the rate after each of `decay_steps`; by default a tenth, a hundredth, ..."""
    stair = sum(step > decay for decay in settings.decay_steps)
    factors = settings.decay_factors or [0.1**number for number in range(1, stair + 1)]
    return settings.learning_rate * (factors[stair - 1] if stair else 1.0)


def _progress(settings: TrainingSettings, step: int, num_steps: int) -> float:
    """Progress of the decay, from 0 at the end of the warm-up to 1."""
    end = settings.decay_steps[0] if settings.decay_steps else num_steps
    return min(max((step - settings.warmup_steps) / (end - settings.warmup_steps), 0.0), 1.0)


def _towards_final(settings: TrainingSettings, share: float) -> float:
    return settings.final_learning_rate + (settings.learning_rate - settings.final_learning_rate) * share


_DECAYS: dict[str, _Decay] = {
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "constant": _constant,
    "rsqrt": _rsqrt,
    "staircase": _staircase,
    "wsd": _wsd,
}
