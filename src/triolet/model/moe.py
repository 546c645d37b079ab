"""Mixture of experts: a router picks a few feed-forward blocks for each token."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from triolet.model.model_config import MoeConfig


@attrs.frozen(eq=False)
class MixtureOfExperts:
    """Each token goes through the experts its router likes best; their outputs are added, weighted by that liking.

    Args:
        router: [num_tokens, hidden] to [num_tokens, num_experts].
        experts: [any number of tokens, hidden] to the same.
        config: how many are picked, and whether their weights add up to one.

    Source: Mixtral of Experts, arXiv 2401.04088; Qwen3 technical report, arXiv 2505.09388.
    """

    router: Callable[[Tensor], Tensor]
    experts: tuple[Callable[[Tensor], Tensor], ...]
    config: MoeConfig

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] to [num_tokens, hidden]."""
        shares, chosen = self._route(x)
        top_k = self.config.experts_per_token
        by_expert = chosen.flatten().argsort(stable=True)  # [num_tokens * top_k] places, expert after expert
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        total = torch.zeros_like(x)
        for expert, places in zip(self.experts, by_expert.split(counts), strict=True):
            if len(places):
                tokens = places // top_k
                total.index_add_(0, tokens, expert(x[tokens]) * shares.flatten()[places, None])
        return total

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts' shares, in the dtype of `x`, and their indices, each [num_tokens, experts_per_token]."""
        probabilities = self.router(x).softmax(dim=-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.normalize:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return shares.to(x.dtype), chosen
