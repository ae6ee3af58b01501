"""Optimizers, learning rate schedules and parameter groups, as in the original recipes."""

# pyright: reportPrivateImportUsage=false
# torch's own optimizers use torch._foreach_*: one call for many tensors; there are no public names.

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..settings.fields import TrainingSettings

_State = dict[str, Any]  # state of a parameter, or settings of a group
_Tensors = list[torch.Tensor]
Schedule = Callable[[int], float]

_LAYER_NUMBER = r"(?:^|\.)layers?\.(\d+)\."
_KERNELS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kernel_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: kernels of matmuls and convolutions.

    The module type decides, not the number of dimensions: class token, mask token and position embeddings have three
    dimensions but no decay in the original (big_vision masks `.*/kernel`).
    """
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, module in model.named_modules()
        if isinstance(module, _KERNELS)
    }


def freeze_parameters(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze parameters; return their names.

    Args:
        patterns: "encoder" (all but the head), "embeddings", "first N layers" (with the embeddings; for a ResNet,
            its root convolution and first N stages), or regular expressions to search in the names.

    Raises:
        ValueError: a pattern matches no parameter, or no parameter is left to train.
    """
    frozen = []
    for pattern in patterns:
        names = _find_part(model, pattern)
        if not names:
            raise ValueError(f"freeze pattern {pattern!r} matches no parameter of the model")
        frozen += names
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze {list(patterns)} leaves no parameter to train")
    return frozen


def _find_part(model: nn.Module, part: str) -> list[str]:
    """Return the names of the parameters that a pattern of `freeze_parameters` selects."""
    names = [name for name, _ in model.named_parameters()]
    if found := re.fullmatch(r"first (\d+) layers?", part):
        num_layers = _count_layers(model)
        return [name for name in names if layer_of(name, num_layers) <= int(found[1])]
    pattern = r"^(?!.*classifier\.)" if part == "encoder" else part
    return [name for name in names if re.search(pattern, name)]


def _count_layers(model: nn.Module) -> int:
    """Return the number of encoder layers or ResNet stages."""
    return max((layer_of(name, -1) for name, _ in model.named_parameters()), default=0)


def layer_of(name: str, num_layers: int) -> int:
    """Return a parameter's layer number: 0 for embeddings, i + 1 for layer or stage i, num_layers + 1 after them."""
    if "embeddings." in name or "resnet.convolution." in name or "resnet.norm." in name:
        return 0
    match = re.search(r"resnet\.stages\.(\d+)\.", name) or re.search(_LAYER_NUMBER, name)
    return num_layers + 1 if match is None else int(match[1]) + 1


def parameter_groups(model: nn.Module, settings: TrainingSettings) -> list[_State]:
    """Return parameter groups for an optimizer; `lr_scale` multiplies the schedule (see `set_learning_rate`).

    Kernels (`kernel_names`) have weight decay, other parameters none. All optimizers here that decouple it, as AdamW
    does, subtract `lr(step) * lr_scale * group["weight_decay"] * weight`. So the convention is a matter of the groups:

    * torch: `weight_decay` itself. The decay of a layer follows its learning rate, as in BEiT's and MAE's fine-tuning.
    * jax: big_vision chains `add_decayed_weights` behind the rates of the layers and before the schedule, whose peak is
      1 (big_vision/optax.py), so it subtracts `lr(step) / learning_rate * weight_decay * weight` for every layer. Its
      1e-4 is torch's 0.1 at a peak rate of 1e-3.

    Returns:
        Groups of which each has either only "hidden_matrices" (of linear layers in the encoder's blocks) or none.
    """
    kernels = kernel_names(model)
    num_layers = _count_layers(model)
    groups: dict[tuple[bool, float, bool], _State] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_kernel = name in kernels
        scale = 1.0
        if settings.layer_decay is not None:
            scale = settings.layer_decay ** (num_layers + 1 - layer_of(name, num_layers))
        decay = settings.weight_decay if is_kernel else 0.0
        if settings.weight_decay_convention == "jax":
            decay /= settings.learning_rate * scale
        is_hidden = is_kernel and parameter.ndim == 2 and re.search(_LAYER_NUMBER, name) is not None
        empty = {"params": [], "weight_decay": decay, "lr_scale": scale, "hidden_matrices": is_hidden}
        groups.setdefault((is_kernel, scale, is_hidden), empty)["params"].append(parameter)
    return list(groups.values())


def build_optimizer(settings: TrainingSettings, model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimizer of the model's trainable parameters.

    Args:
        fused: update all parameters in one kernel; torch has it for CPUs and NVIDIA GPUs with float32 momentum.

    Raises:
        ValueError: the optimizer is Muon, but there is nothing for it to train.
    """
    groups = parameter_groups(model, settings)
    rate, momentum, epsilon = settings.learning_rate, settings.momentum, settings.adam_epsilon
    is_compact, betas = settings.momentum_dtype == "bfloat16", (settings.adam_beta1, settings.adam_beta2)
    if settings.optimizer == "sgd":
        if is_compact:
            return Bfloat16MomentumSGD(groups, rate, momentum)
        if settings.weight_decay and settings.weight_decay_convention == "jax":
            return DecoupledSGD(groups, rate, momentum)
        return torch.optim.SGD(groups, rate, momentum, fused=fused)
    if settings.optimizer == "adamw":
        if is_compact:
            return Bfloat16MomentumAdamW(groups, rate, betas, epsilon)
        return torch.optim.AdamW(groups, rate, betas, epsilon, fused=fused)
    matrices = [group for group in groups if group["hidden_matrices"]]
    others = [group for group in groups if not group["hidden_matrices"]]
    if not matrices:
        raise ValueError("optimizer is muon, but no weight matrix of a hidden layer is trained: use adamw or sgd")
    parts: list[Any] = [torch.optim.Muon(matrices, rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")]
    if others:
        parts.append(torch.optim.AdamW(others, rate, betas, epsilon, fused=fused))
    return MuonWithAdamW(parts)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step, multiplied by the `lr_scale` of each group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def build_schedule(settings: TrainingSettings, num_steps: int) -> Schedule:
    """Return the learning rate as a function of the optimizer step: 0, 1, ..., num_steps - 1.

    It is a decay that starts when the warm-up ends, times a linear warm-up from 0, times a linear cool-down to 0. It
    follows `create_learning_rate_schedule` of google-research/vision_transformer (vit_jax/utils.py) and of big_vision
    (utils.py), and `get_lr` of big_transfer (bit_hyperrule.py). vit_jax's linear decay ends at 1e-5 and its cosine at
    0; here both end at `final_learning_rate`.

    Tested against values of those functions (tests/goldens/training/schedules.npz), and wsd against transformers.

    Args:
        num_steps: the step at which the decay ends, unless `decay_steps` sets another.

    Raises:
        ValueError: the warm-up is as long as the run, or overlaps with the decay or cool-down.
    """
    if settings.warmup_steps < 1:  # a fraction; rounded down, because a warm-up begins at 0
        settings = replace(settings, warmup_steps=int(settings.warmup_steps * num_steps))
    warmup_steps, cooldown_steps, is_wsd = settings.warmup_steps, settings.cooldown_steps, settings.schedule == "wsd"
    end = settings.decay_steps[0] if settings.decay_steps and settings.schedule != "staircase" else num_steps
    if warmup_steps >= min(end, num_steps) or (is_wsd and warmup_steps + cooldown_steps > num_steps):
        raise ValueError(
            f"--warmup-steps ({warmup_steps}) must end before the {num_steps} steps of the run, before --decay-steps "
            f"{settings.decay_steps}, and before --cooldown-steps ({cooldown_steps}) of wsd begin; 0.1 means a tenth"
        )

    def learning_rate(step: int) -> float:
        warmup = min(1.0, step / warmup_steps) if warmup_steps else 1.0
        cooldown = min(1.0, (num_steps - step) / cooldown_steps) if cooldown_steps and not is_wsd else 1.0
        return _decayed(settings, step, num_steps) * warmup * cooldown

    return learning_rate


def _decayed(settings: TrainingSettings, step: int, num_steps: int) -> float:
    """Return the learning rate at a step, without warm-up and cool-down."""
    rate, final = settings.learning_rate, settings.final_learning_rate
    if settings.schedule == "constant":
        return rate
    if settings.schedule == "rsqrt":  # inverse square root of the steps since the warm-up, in units of `timescale`
        steps = max(step - settings.warmup_steps, 0) + settings.timescale_shift
        return rate / math.sqrt(1 + steps / settings.timescale)
    if settings.schedule == "staircase":  # the next factor after each of `decay_steps`; by default 0.1, 0.01, ...
        passed = sum(step > decay for decay in settings.decay_steps)
        factors = settings.decay_factors or [0.1**number for number in range(1, passed + 1)]
        return rate * (factors[passed - 1] if passed else 1.0)
    end = settings.decay_steps[0] if settings.decay_steps else num_steps
    progress = min(max((step - settings.warmup_steps) / (end - settings.warmup_steps), 0.0), 1.0)
    if settings.schedule == "wsd":  # 1 - sqrt over the last fifth (Hägele et al., arXiv 2405.18392, section 4)
        length = settings.cooldown_steps or max(num_steps // 5, 1)
        share = 1.0 - math.sqrt(max(step - num_steps + length, 0) / length)
    elif settings.schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    elif settings.schedule == "polynomial":
        share = (1.0 - progress) ** settings.decay_power
    else:
        share = 1.0 - progress
    return final + (rate - final) * share


class DecoupledSGD(torch.optim.SGD):
    """SGD with momentum whose weight decay stays out of the momentum, as AdamW's stays out of the moments.

    `weight -= lr * (velocity + weight_decay * weight)`, as big_vision chains `momentum_hp` and `add_decayed_weights`.
    """

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9):
        groups = [{**group, "weight_decay": 0.0, "decoupled_decay": group["weight_decay"]} for group in params]
        super().__init__(groups, lr, momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has two overloads
        """Take one step; `closure` (part of torch's interface) is called first if given."""
        loss = closure() if closure else None
        for group in self.param_groups:
            trained = _local(parameter for parameter in group["params"] if parameter.grad is not None)
            if trained and group["decoupled_decay"]:
                torch._foreach_mul_(trained, 1 - group["lr"] * group["decoupled_decay"])
        super().step()
        return loss


class _Bfloat16MomentumOptimizer(torch.optim.Optimizer):
    """Optimizer with its first moment in bfloat16, as in optax with `accumulator_dtype` or `mu_dtype`.

    As in optax, the decay is rounded too (0.9 becomes 0.8984375), the arithmetic is in float32, and the step uses the
    moment before it is rounded for storage.

    Tested against outputs of optax under `jax.jit` (tests/goldens/training/optimizers.npz).
    """

    moment: str  # name of the first moment in the state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has two overloads
        """Take one step; `closure` (part of torch's interface) is called first if given."""
        loss = closure() if closure else None
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for part in _in_parts(trained):
                states = [self.state[parameter] or self._new_state(parameter) for parameter in part]
                moments = _local(state[self.moment] for state in states)
                parameters, gradients = _local(part), _local(parameter.grad for parameter in part)
                wide = [torch.empty_like(parameter) for parameter in parameters]
                torch._foreach_copy_(wide, moments)
                self._update(parameters, gradients, wide, states, group)
                torch._foreach_copy_(moments, wide)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; torch casts it to the parameters' dtype, so the first moment is cast back to bfloat16."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if self.moment in state:
                state[self.moment] = state[self.moment].bfloat16()

    def _new_state(self, parameter: torch.Tensor) -> _State:
        self.state[parameter][self.moment] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return self.state[parameter]

    def _update(
        self, parameters: _Tensors, gradients: _Tensors, moments: _Tensors, states: list[_State], group: _State
    ) -> None:
        """Change the parameters and their first moments, which are float32 here."""
        raise NotImplementedError


def _in_parts(parameters: list[torch.Tensor], values: int = 2**25) -> Iterator[list[torch.Tensor]]:
    """Split parameters into parts of about `values` values; wide copies of all moments would need too much memory."""
    part, size = [], 0
    for parameter in parameters:
        if part and size + parameter.numel() > values:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += parameter.numel()
    if part:
        yield part


def _local(tensors: Iterable[Any]) -> _Tensors:
    """Return the shards of this process; parameters, gradients and states are sharded in the same way."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def _to_bfloat16(number: float) -> float:
    return torch.tensor(number, dtype=torch.bfloat16).item()


class Bfloat16MomentumSGD(_Bfloat16MomentumOptimizer):
    """SGD with bfloat16 momentum, as in the original's fine-tuning (`optax.sgd(accumulator_dtype="bfloat16")`).

    The weight decay stays out of the momentum, as in `DecoupledSGD`.
    """

    moment = "momentum_buffer"

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _update(
        self, parameters: _Tensors, gradients: _Tensors, moments: _Tensors, states: list[_State], group: _State
    ) -> None:
        torch._foreach_mul_(moments, _to_bfloat16(group["momentum"]))
        torch._foreach_add_(moments, gradients)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(parameters, moments, alpha=group["lr"])


class Bfloat16MomentumAdamW(_Bfloat16MomentumOptimizer):
    """AdamW with bfloat16 first moment, as in big_vision's pre-training (`scale_by_adam(mu_dtype="bfloat16")`).

    Only the decay is rounded: the weight of a new gradient (1 - beta1) and the bias correction use the exact beta1.
    """

    moment = "exp_avg"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _new_state(self, parameter: torch.Tensor) -> _State:
        self.state[parameter].update(step=torch.zeros(()), exp_avg_sq=torch.zeros_like(parameter))
        return super()._new_state(parameter)

    def _update(
        self, parameters: _Tensors, gradients: _Tensors, moments: _Tensors, states: list[_State], group: _State
    ) -> None:
        learning_rate, (beta1, beta2) = group["lr"], group["betas"]
        steps = [state["step"] for state in states]  # on the CPU, where reading them is fast
        torch._foreach_add_(steps, 1)
        counts = [int(step) for step in steps]
        squares = _local(state["exp_avg_sq"] for state in states)
        torch._foreach_mul_(moments, _to_bfloat16(beta1))
        torch._foreach_add_(moments, gradients, alpha=1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        deviations = torch._foreach_div(squares, [1 - beta2**count for count in counts])
        torch._foreach_sqrt_(deviations)
        torch._foreach_add_(deviations, group["eps"])
        torch._foreach_mul_(parameters, 1 - learning_rate * group["weight_decay"])
        rates = [-learning_rate / (1 - beta1**count) for count in counts]
        torch._foreach_addcdiv_(parameters, moments, deviations, rates)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the hidden layers and AdamW for the rest, as one optimizer.

    Muon orthogonalizes the momentum of a matrix before each step (Keller Jordan, 2024,
    https://kellerjordan.github.io/posts/muon/); this is torch's implementation. Its author trains embeddings, head,
    norms and biases with AdamW. The step of an A x B matrix is scaled by 0.2 sqrt(max(A, B)), which makes it about as
    large as a step of AdamW, so that both use the same learning rate and weight decay ("Muon is scalable for LLM
    training", arXiv 2502.16982, section 2.2).

    A sharded matrix (a DTensor) gets the same update as a whole one, up to the order of bfloat16 rounding.

    Args:
        parts: Muon, and AdamW if it has parameters.
    """

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has two overloads
        """Take one step; `closure` (part of torch's interface) is called first if given."""
        loss = closure() if closure else None
        for part in self._parts:  # in each step, because loading and sharding replace state and groups
            is_muon = isinstance(part, torch.optim.Muon)
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group["hidden_matrices"] == is_muon]
            part.step()
        return loss


class MovingAverage:
    """Exponential moving average of a model's parameters (Polyak averaging; 0.9999 in Table 2 of the paper)."""

    def __init__(self, parameters: dict[str, torch.Tensor], decay: float):
        self.decay = decay
        self.parameters = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: dict[str, torch.Tensor]):
        """Move the average toward the parameters by a fraction 1 - decay of the distance."""
        latest = [parameters[name].detach() for name in self.parameters]
        torch._foreach_lerp_(list(self.parameters.values()), latest, 1 - self.decay)

    @torch.no_grad()
    def swap(self, parameters: dict[str, torch.Tensor]):
        """Exchange the average and the parameters."""
        for name, average in self.parameters.items():
            average_before = average.clone()
            average.copy_(parameters[name])
            parameters[name].copy_(average_before)
