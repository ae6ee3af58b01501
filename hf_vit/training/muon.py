"""Muon for the matrices of the hidden layers and AdamW for the rest, as one optimiser.

Muon orthogonalises the momentum of a matrix before each step (Keller Jordan, 2024,
https://kellerjordan.github.io/posts/muon/); this is torch's implementation. Its author trains embeddings, head, norms
and biases with AdamW. The step of an A x B matrix is scaled by 0.2 sqrt(max(A, B)), which makes it about as long as
AdamW's, so that both share the learning rate and the decay ("Muon is scalable for LLM training", arXiv 2502.16982,
section 2.2).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW of torch, with one common state and list of groups.

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
