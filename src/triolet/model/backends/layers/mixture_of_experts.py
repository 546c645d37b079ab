"""Mixture of experts: a router picks a few feed-forward blocks for each token; the output is their weighted sum.

Source: Mixtral of Experts, arXiv 2401.04088; Qwen3 technical report, arXiv 2505.09388; gpt-oss, arXiv 2508.10925;
DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels.linear.grouped import ExpertTiles, StackedWeights, grouped_linear, longest_of_tiles
from triolet.model.architectures.decoder_config import GroupedRouting
from triolet.model.architectures.weight_map import WeightReader
from triolet.model.backends.quant_method import UNQUANTIZED

GROUPED_DEVICES = ("cuda",)
"""Devices whose kernels compute all experts of a layer at once."""


class ExpertRouter(Protocol):
    """Choice of experts for each token."""

    @property
    def experts_per_token(self) -> int:
        """Return how many are chosen."""
        ...

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose for x, [num_tokens, hidden].

        Returns:
            The chosen experts' weights, dtype of x, and indices, int64; both [num_tokens, experts_per_token].
        """
        ...


@attrs.frozen(eq=False)
class GroupedExperts:
    """All experts of a layer, in two launches that the host does not wait for."""

    project_in: StackedWeights
    project_out: StackedWeights
    activation: Callable[[Tensor], Tensor]
    numbers: Tensor  # [num_experts] int64, from 0 on

    def __call__(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]
        tiles = ExpertTiles.of(chosen, self.numbers, x.itemsize)
        inner = self.activation(grouped_linear(x, self.project_in, tiles, None))
        outputs = grouped_linear(inner, self.project_out, tiles, shares)
        total: Tensor = outputs.unflatten(0, chosen.shape).sum(dim=1)
        return total


@attrs.frozen(eq=False)
class MixtureOfExperts:
    """Feed-forward block of which each token uses a part."""

    router: ExpertRouter
    # [any number of tokens, hidden] to the same, for each expert; or all at once
    experts: tuple[Callable[[Tensor], Tensor], ...] | GroupedExperts
    shared: Callable[[Tensor], Tensor] | None = None  # the expert of all tokens
    shared_gate: Callable[[Tensor], Tensor] | None = None  # [num_tokens, hidden] to [num_tokens, 1]

    def __call__(self, x: Tensor, routed_by: Tensor | None = None) -> Tensor:
        # [num_tokens, hidden] -> [num_tokens, hidden]; `routed_by` is the router's input where it is not x
        shares, chosen = self.router(x if routed_by is None else routed_by)
        if isinstance(self.experts, GroupedExperts):
            total = self.experts(x, shares, chosen)
        else:
            total = _one_by_one(self.experts, x, shares, chosen)
        if self.shared is not None:
            output = self.shared(x)
            total += output if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * output
        return total

    @property
    def is_capturable(self) -> bool:
        """True if it waits for nothing on a GPU."""
        return isinstance(self.experts, GroupedExperts)

    @property
    def tile_lengths(self) -> tuple[int, ...]:
        """Return numbers of tokens of steps that together launch all kernels that any step launches."""
        if not isinstance(self.experts, GroupedExperts):
            return ()
        return longest_of_tiles(len(self.experts.numbers), self.router.experts_per_token)


@attrs.frozen(eq=False, kw_only=True)
class DenseBesideExperts:
    """A dense feed-forward block and a mixture of experts, each with norms of its own."""

    dense: Callable[[Tensor], Tensor]
    post_dense_norm: Callable[[Tensor], Tensor]
    mixture: MixtureOfExperts
    router_norm: Callable[[Tensor], Tensor]
    experts_norm: Callable[[Tensor], Tensor]
    post_experts_norm: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        # [num_tokens, hidden] each: the dense block's input, and the residual stream
        mixed = self.mixture(self.experts_norm(residual), self.router_norm(residual))
        return self.post_dense_norm(self.dense(x)) + self.post_experts_norm(mixed)


def _one_by_one(
    experts: tuple[Callable[[Tensor], Tensor], ...], x: Tensor, shares: Tensor, chosen: Tensor
) -> Tensor:
    top_k = chosen.shape[1]
    by_expert = chosen.flatten().argsort(stable=True)  # [num_tokens * top_k] places, expert after expert
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    total = torch.zeros_like(x)
    for expert, places in zip(experts, by_expert.split(counts), strict=True):
        if len(places):
            tokens = places // top_k
            total.index_add_(0, tokens, expert(x[tokens]) * shares.flatten()[places, None])
    return total


def read_experts(
    names: Sequence[str], weights: WeightReader, activation: Callable[[Tensor], Tensor]
) -> GroupedExperts | None:
    """Read the experts of a layer, one by one, into tensors of all of them.

    Args:
        names: of each expert, such as `layers.0.experts.3`.
        weights: of the model.
        activation: between the two linear layers of an expert.
    Returns:
        None on a device without kernels for them, or for weights that stay packed.
    """
    if weights.device.type not in GROUPED_DEVICES:
        return None
    parts = []
    for part in ("in", "out"):
        if UNQUANTIZED.read_packed(weights, f"{names[0]}.{part}") is not None:
            return None
        parts.append(_read_stacked([f"{name}.{part}" for name in names], weights))
    project_in, project_out = parts
    numbers = torch.arange(len(names), device=weights.device)
    return GroupedExperts(project_in, project_out, activation, numbers)


def _read_stacked(names: Sequence[str], weights: WeightReader) -> StackedWeights:
    stacked = StackedWeights(torch.empty(0))
    for number, name in enumerate(names):
        one = UNQUANTIZED.read(weights, name)
        if number == 0:
            bias = None if one.bias is None else one.bias.new_empty(len(names), len(one.bias))
            stacked = StackedWeights(one.weight.new_empty(len(names), *one.weight.shape), bias)
        stacked.weight.select(0, number).copy_(one.weight)
        if stacked.bias is not None and one.bias is not None:
            stacked.bias.select(0, number).copy_(one.bias)
    return stacked


@attrs.frozen(eq=False)
class SoftmaxRouter:
    """Router that picks the best experts of a softmax over all of them."""

    linear: Callable[[Tensor], Tensor]  # [num_tokens, hidden] to [num_tokens, num_experts]
    experts_per_token: int
    normalize: bool  # the chosen experts' probabilities are scaled to a sum of one
    scales: Tensor | None = None  # [num_experts] float32: then multiplied by these

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' weights and indices; see `ExpertRouter`."""
        probabilities = self.linear(x).softmax(dim=-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(self.experts_per_token, dim=-1)
        if self.normalize:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        if self.scales is not None:
            shares = shares * self.scales[chosen]
        return shares.to(x.dtype), chosen


@attrs.frozen(eq=False)
class GroupedRouter:
    """Router that looks for experts in the best groups only; computed in float32, whatever the model's dtype is."""

    weight: Tensor  # [num_experts, hidden] float32
    correction: Tensor | None  # [num_experts] float32: added to the scores for the choice alone
    routing: GroupedRouting
    experts_per_token: int
    normalize: bool  # the chosen experts' scores are scaled to a sum of one

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen experts' weights and indices; see `ExpertRouter`."""
        logits = functional.linear(x.float(), self.weight)
        scores = logits.sigmoid() if self.routing.is_sigmoid else logits.softmax(dim=-1)
        ranks = scores if self.correction is None else scores + self.correction
        chosen = self._in_best_groups(ranks).topk(self.experts_per_token, dim=-1).indices
        shares = scores.gather(1, chosen)
        if self.normalize:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20)
        return (shares * self.routing.scale).to(x.dtype), chosen

    def _in_best_groups(self, ranks: Tensor) -> Tensor:
        """Return the ranks of the experts, [num_tokens, num_experts], -inf outside of each token's best groups."""
        routing = self.routing
        if routing.takes_all_groups:
            return ranks
        groups = ranks.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(routing.group_top, dim=-1).values.sum(dim=-1)
        chosen = best.topk(routing.groups_per_token, dim=-1).indices
        is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, chosen, True)
        kept: Tensor = groups.masked_fill(~is_chosen[..., None], float("-inf"))
        return kept.flatten(1)
