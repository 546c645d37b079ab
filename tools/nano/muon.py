"""The Muon optimizer, whose products the processes of a training share."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial that drives all singular values towards 1; from Keller Jordan's description of Muon."""


def orthogonalised(gradient: Tensor, steps: int = 5) -> Tensor:
    """Return the matrix with nearly the same singular vectors, and singular values of about 1, by Newton and Schulz's iteration.

    Args:
        gradient: [rows, columns], in the dtype to compute in.
    """
    a, b, c = _COEFFICIENTS
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.T if is_tall else gradient
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Update matrices by their orthogonalised momentum.

    Like `torch.optim.Muon`, but in a dtype of one's choice: that one always multiplies in bfloat16, which takes several
    times as long where it is emulated. Each process orthogonalises a share of the matrices; the updates are summed.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update all matrices from their gradients, which are the same in every process."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            params: list[Tensor] = group["params"]
            updates = torch.zeros(sum(p.numel() for p in params), device=params[0].device)
            shares = updates.split([p.numel() for p in params])
            for number, (param, share) in enumerate(zip(params, shares, strict=True)):
                assert param.grad is not None
                state = self.state[param]
                average = state.setdefault("momentum_buffer", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - group["momentum"])
                if number % world == rank:
                    nesterov = param.grad.lerp(average, group["momentum"])
                    share.copy_(orthogonalised(nesterov.to(self.dtype)).flatten())
            if world > 1:
                dist.all_reduce(updates)
            for param, share in zip(params, shares, strict=True):
                rows, columns = param.shape
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(share.view_as(param), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)
