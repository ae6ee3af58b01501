"""Learning rates as closed-form functions of the optimiser step: the same on any number of processes."""

import math
from collections.abc import Callable, Sequence

Schedule = Callable[[int], float]


def learning_rate_schedule(
    kind: str,
    base: float,
    num_steps: int,
    warmup_steps: int = 0,
    final: float = 0.0,
    decay_steps: Sequence[int] = (),
) -> Schedule:
    """The learning rate of optimiser step 0, 1, ..., num_steps - 1.

    It is `create_learning_rate_schedule` of google-research/vision_transformer (vit_jax/utils.py): a linear warm-up
    from 0, times a decay that starts when the warm-up ends. There the linear decay ends at 1e-5 and the cosine at 0;
    here both end at `final`.

    Args:
        kind: "linear", "cosine", "constant" or "staircase".
        base: the highest learning rate.
        num_steps: the step at which the decay would reach `final`.
        warmup_steps: the step at which the warm-up reaches `base`.
        decay_steps: "staircase" divides by 10 after each of these (`get_lr` of bit_hyperrule.py, big_transfer).

    Raises:
        ValueError: for another kind, or a warm-up that fills the run.
    """
    if kind not in (*DECAYS, "staircase"):
        raise ValueError(f"schedule is {kind!r}; it must be {', '.join(DECAYS)} or staircase")
    if warmup_steps >= num_steps:
        raise ValueError(f"warmup_steps ({warmup_steps}) must be less than the {num_steps} steps of the run")
    if kind == "staircase":
        return lambda step: _warmup(step, warmup_steps) * base / 10 ** sum(step > decay for decay in decay_steps)
    decay = DECAYS[kind]

    def learning_rate(step: int) -> float:
        progress = min(max((step - warmup_steps) / (num_steps - warmup_steps), 0.0), 1.0)
        return _warmup(step, warmup_steps) * (final + (base - final) * decay(progress))

    return learning_rate


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0


# progress in [0, 1] -> share of the way from the final to the base learning rate
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "constant": lambda progress: 1.0,
}
