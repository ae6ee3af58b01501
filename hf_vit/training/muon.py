"""Muon for the matrices of the hidden layers, AdamW for the rest, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it takes a step (Keller Jordan, 2024,
https://kellerjordan.github.io/posts/muon/); torch has it. Its author leaves embeddings, the head, norms and biases to
AdamW. The step of a matrix of A x B is 0.2 sqrt(max(A, B)) times the learning rate, about as long as AdamW's, so that
both share the rate and the decay ("Muon is scalable for LLM training", arXiv 2502.16982, section 2.2).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimisers of torch that share one state and one list of groups.

    A matrix that is spread over processes (a DTensor) is updated as a whole; the sums of its iteration in bfloat16 are
    then rounded in another order.

    Args:
        matrices: groups of two-dimensional parameters, for Muon.
        others: groups for AdamW.
        momentum: of Muon.
        betas, eps, fused: of AdamW.
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
        """Take one step; `closure` is for torch's interface and is called first when given."""
        loss = closure() if closure else None
        for part in self._parts:  # loading and sharding replace state and groups, so they are handed on each time
            part.state = self.state
            part.param_groups = [
                group for group in self.param_groups if ("ns_steps" in group) == (part is self._parts[0])
            ]
            part.step()
        return loss
