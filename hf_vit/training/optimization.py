"""Optimisers of the original recipes, and their groups of parameters with learning rate and decay."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from .settings import TrainingSettings

_State = dict[str, Any]  # state of a parameter, or settings of a group

_IN_A_LAYER = r"(?:^|\.)layers?\.(\d+)\."
_KERNELS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kernel_names(model: nn.Module) -> set[str]:
    """Return the names of the parameters with weight decay: kernels of matmuls and convolutions.

    The type of the module decides. The number of dimensions would not do: class token, mask token and position
    embeddings have three, and the original does not decay them (big_vision masks `.*/kernel`).
    """
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, module in model.named_modules()
        if isinstance(module, _KERNELS)
    }


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that Muon trains: weights of linear layers within the encoder's layers.

    Raises:
        ValueError: there are none.
    """
    kernels = kernel_names(model)
    inside = [(name, p) for name, p in model.named_parameters() if re.search(_IN_A_LAYER, name) and p.requires_grad]
    matrices = [parameter for name, parameter in inside if name in kernels and parameter.ndim == 2]
    if not matrices:
        raise ValueError("optimizer is muon, but no matrix of a hidden layer trains: use adamw or sgd")
    return matrices


def split_groups(groups: Iterable[_State], chosen: Iterable[nn.Parameter]) -> tuple[list[_State], list[_State]]:
    """Split groups into those of the chosen parameters and those of the others, without empty groups."""
    ids = {id(parameter) for parameter in chosen}
    parts: tuple[list[_State], list[_State]] = ([], [])
    for group in groups:
        for part, is_chosen in zip(parts, (True, False), strict=True):
            if parameters := [one for one in group["params"] if (id(one) in ids) == is_chosen]:
                part.append({**group, "params": parameters})
    return parts


def freeze_parameters(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Freeze parameters; return their names.

    Args:
        patterns: "encoder" (all but the head), "embeddings", "first N layers" (with the embeddings; of a ResNet its
            stem and stages), or regular expressions to search in the names.

    Raises:
        ValueError: a pattern matches no parameter, there are fewer layers, or no parameter is left to train.
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
    """Return the names of the parameters of a part; a text that names no part is a regular expression."""
    names = [name for name, _ in model.named_parameters()]
    if found := re.fullmatch(r"first (\d+) layers?", part):
        count, num_layers = int(found[1]), _count_layers(model)
        if count > num_layers:
            raise ValueError(f"freeze is {part!r}, but the model has {num_layers} layers")
        return [name for name in names if layer_of(name, num_layers) <= count]
    pattern = r"^(?!.*classifier\.)" if part == "encoder" else part
    return [name for name in names if re.search(pattern, name)]


def _count_layers(model: nn.Module) -> int:
    """Number of encoder layers or ResNet stages."""
    return max((layer_of(name, -1) for name, _ in model.named_parameters()), default=0)


def layer_of(name: str, num_layers: int) -> int:
    """Layer number of a parameter: 0 for embeddings, i + 1 for layer or ResNet stage i, num_layers + 1 after them."""
    if "embeddings." in name or "resnet.convolution." in name or "resnet.norm." in name:
        return 0
    match = re.search(r"resnet\.stages\.(\d+)\.", name) or re.search(_IN_A_LAYER, name)
    return num_layers + 1 if match is None else int(match[1]) + 1


def parameter_groups(model: nn.Module, weight_decay: float = 0.0, layer_decay: float | None = None) -> list[_State]:
    """Return the groups for an optimiser; `lr_scale` of a group multiplies the schedule (see `set_learning_rate`).

    Args:
        weight_decay: weight decay of `kernel_names(model)`; other parameters have none.
        layer_decay: a layer's learning rate divided by the next layer's.
    """
    kernels = kernel_names(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    num_layers = _count_layers(model)
    groups: dict[tuple[float, float], _State] = {}
    for name, parameter in trained:
        decay = weight_decay if name in kernels else 0.0
        scale = layer_decay ** (num_layers + 1 - layer_of(name, num_layers)) if layer_decay else 1.0
        group = groups.setdefault((decay, scale), {"params": [], "weight_decay": decay, "lr_scale": scale})
        group["params"].append(parameter)
    return list(groups.values())


def torch_weight_decay(weight_decay: float, convention: str, learning_rate: float) -> float:
    """Convert a weight decay in either convention to torch's AdamW.

    torch subtracts `lr(step) * weight_decay * weight`. optax's `add_decayed_weights` under big_vision's schedule
    subtracts `lr(step) / learning_rate * weight_decay * weight`: its 1e-4 is torch's 0.1 at a peak rate of 1e-3.
    """
    return weight_decay if convention == "torch" else weight_decay / learning_rate


def build_optimizer(settings: TrainingSettings, model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    """Return the optimiser of the model's trainable parameters.

    Args:
        fused: update all parameters in one kernel; torch has it for CPUs and NVIDIA GPUs with float32 momentum.

    Raises:
        ValueError: the optimiser is Muon, but no hidden matrix trains.
    """
    decay = torch_weight_decay(settings.weight_decay, settings.weight_decay_convention, settings.learning_rate)
    groups = parameter_groups(model, decay, settings.layer_decay)
    compact, betas = settings.momentum_dtype == "bfloat16", (settings.adam_beta1, settings.adam_beta2)
    if settings.optimizer == "muon":
        matrices, others = split_groups(groups, hidden_matrices(model))
        return MuonWithAdamW(
            matrices, others, settings.learning_rate, settings.momentum, betas, settings.adam_epsilon, fused
        )
    if settings.optimizer == "adamw":
        if compact:
            return CompactAdamW(groups, settings.learning_rate, betas, settings.adam_epsilon)
        return torch.optim.AdamW(groups, settings.learning_rate, betas, settings.adam_epsilon, fused=fused)
    if compact:
        return CompactSGD(groups, settings.learning_rate, settings.momentum)
    return torch.optim.SGD(groups, settings.learning_rate, settings.momentum, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step; that of each group is multiplied by its `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


class _CompactOptimizer(torch.optim.Optimizer):
    """Optimiser with its first moment in bfloat16, as in optax with `accumulator_dtype` or `mu_dtype`.

    optax rounds the decay too: 0.9 becomes 0.8984375. It computes in float32 and rounds the stored moment; the step
    uses the moment before rounding.

    Tested against outputs of optax under `jax.jit` (tests/goldens/training/optimizers.npz).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has two overloads
        """Take one step; `closure` (part of torch's interface) is called first if given."""
        loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; torch casts it to the parameters' dtype, so the first moment is cast back to bfloat16."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in _COMPACT_STATES & state.keys():
                state[name] = state[name].bfloat16()

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: _State, group: _State) -> None:
        raise NotImplementedError


_COMPACT_STATES = {"momentum_buffer", "exp_avg"}


def _to_bfloat16(number: float) -> float:
    return torch.tensor(number, dtype=torch.bfloat16).item()


class CompactSGD(_CompactOptimizer):
    """SGD with bfloat16 momentum, as in the original's fine-tuning (`optax.sgd(accumulator_dtype="bfloat16")`)."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: _State, group: _State) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        velocity = state["momentum_buffer"].to(parameter.dtype).mul_(_to_bfloat16(group["momentum"]))
        velocity.add_(gradient)
        state["momentum_buffer"].copy_(velocity)
        parameter.sub_(velocity, alpha=group["lr"])


class CompactAdamW(_CompactOptimizer):
    """AdamW with bfloat16 first moment, as in big_vision's pre-training (`scale_by_adam(mu_dtype="bfloat16")`).

    Only the decay is rounded: the weight of a new gradient (1 - beta1) and the bias correction use the exact beta1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: _State, group: _State) -> None:
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] = state["step"].cpu() + 1  # a restored one may be on the device, where reading it is slow
        count, (beta1, beta2) = int(state["step"]), group["betas"]
        mean = state["exp_avg"].to(parameter.dtype).mul_(_to_bfloat16(beta1)).add_(gradient, alpha=1 - beta1)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        deviation = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(mean, deviation, value=-group["lr"] / (1 - beta1**count))


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the hidden layers and AdamW for the rest, with one common state and list of groups.

    Muon orthogonalizes the momentum of a matrix before each step (Keller Jordan, 2024,
    https://kellerjordan.github.io/posts/muon/); this is torch's implementation. Its author trains embeddings, head,
    norms and biases with AdamW. The step of an A x B matrix is scaled by 0.2 sqrt(max(A, B)), which makes it about as
    long as AdamW's, so that both share the learning rate and the decay ("Muon is scalable for LLM training", arXiv
    2502.16982, section 2.2).

    The update of a sharded matrix (a DTensor) is that of the whole matrix, up to bfloat16 rounding in another order.

    Args:
        matrices: groups of two-dimensional parameters, for Muon.
        others: groups for AdamW.
        momentum: momentum of Muon.
        betas, eps, fused: arguments of AdamW.
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        lr: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ):
        muon = torch.optim.Muon(matrices, lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        self._parts = [muon]
        self._parts += [torch.optim.AdamW(others, lr, betas, eps, fused=fused)] if others else []
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch has two overloads
        """Take one step; `closure` (part of torch's interface) is called first if given."""
        loss = closure() if closure else None
        for part in self._parts:  # each time, because loading and sharding replace state and groups
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if ("ns_steps" in group) == (part is self._parts[0])
            ]
            part.step()
        return loss


class MovingAverage:
    """Exponential moving average of a model's parameters (Polyak averaging; 0.9999 in Table 2 of the paper)."""

    def __init__(self, parameters: dict[str, torch.Tensor], decay: float):
        self.decay = decay
        self.parameters = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def update(self, parameters: dict[str, torch.Tensor]):
        """Move the average towards the parameters by a share of 1 - decay."""
        latest = [parameters[name].detach() for name in self.parameters]
        torch._foreach_lerp_(list(self.parameters.values()), latest, 1 - self.decay)  # pyright: ignore

    @torch.no_grad()
    def swap(self, parameters: dict[str, torch.Tensor]):
        """Exchange the average and the parameters."""
        for name, average in self.parameters.items():
            average_before = average.clone()
            average.copy_(parameters[name])
            parameters[name].copy_(average_before)
