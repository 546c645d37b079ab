"""Cuts of a model's tensors: which part of each one a rank of a tensor-parallel group reads.

Projections into heads and into the feed-forward block are cut by rows, those out of them by columns; their products
are partial sums, which the group adds up. The head is cut by vocabulary. All else is the same on every rank. Where
there are fewer KV heads than ranks, several ranks have the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import attrs
import torch
from torch import Tensor

from triolet.errors import ConfigError, InvariantViolated
from triolet.model.architectures.decoder_config import DecoderConfig
from triolet.model.architectures.tensor_plans import Shape, TensorPlan
from triolet.model.folder.checkpoint import Checkpoint, Cut

ROWS, COLUMNS = 0, 1


@attrs.frozen
class PartTensor:
    """One tensor of which a part is read."""

    shape: Shape
    num_bytes: int  # of the part


@attrs.frozen(kw_only=True)
class Part:
    """Part of a model that one rank computes.

    Args:
        rank: from 0.
        size: ranks of the group.
    """

    rank: int
    size: int

    def check(self, config: DecoderConfig) -> None:
        """Raise `ConfigError` unless the model can be cut into `size` parts."""

        def refuse(rule: str) -> NoReturn:
            raise ConfigError("tensor_parallel_size", rule, self.size)

        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % self.size:
            refuse(f"a divisor of this model's {heads} attention heads")
        if kv_heads % self.size and self.size % kv_heads:
            refuse(f"a divisor or a multiple of this model's {kv_heads} KV heads")
        if config.intermediate_size % self.size:
            refuse(f"a divisor of this model's intermediate size, {config.intermediate_size}")
        if config.vocab_size % self.size:
            refuse(f"a divisor of this model's vocabulary, {config.vocab_size} tokens")
        if len(config.names.qkv) != 3 or len(config.names.mlp_in) != (2 if config.gated else 1):
            refuse(f"1 for {config.architecture}, whose projections lie joined in its files")
        is_unlike_llama = config.parallel_block or config.qk_norm_of_rows or not config.names.attention_norm
        has_extras = (
            config.names.transposed
            or config.names.sinks
            or config.names.layer_scale
            or config.qk_norm_of_heads
            or config.head_bias
            or not config.has_equal_layers
            or any(layer.moe or layer.latent or layer.recurrent for layer in config.layers)
        )
        if is_unlike_llama or has_extras:
            refuse(f"1 for {config.architecture}: only dense decoders like Llama's are cut")

    def config(self, config: DecoderConfig) -> DecoderConfig:
        """Return the configuration of the layers of this part; the vocabulary stays whole."""
        return attrs.evolve(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=max(1, config.num_kv_heads // self.size),
            intermediate_size=config.intermediate_size // self.size,
        )

    def span(self, length: int) -> tuple[int, int]:
        """Return begin and end of this rank's part of a dimension."""
        each = length // self.size
        return self.rank * each, (self.rank + 1) * each

    def kv_span(self, config: DecoderConfig) -> tuple[int, int]:
        """Return begin and end of this rank's rows of the keys, and of the values."""
        if config.num_kv_heads >= self.size:
            return self.span(config.num_kv_heads * config.head_dim)
        head = self.rank * config.num_kv_heads // self.size
        return head * config.head_dim, (head + 1) * config.head_dim

    def cuts(self, config: DecoderConfig, plans: Mapping[str, TensorPlan]) -> dict[str, Cut]:
        """Return the cut of each stored tensor that is cut, by its name in the checkpoint."""
        cuts: dict[str, Cut] = {}
        for ours, plan in plans.items():
            layer, _, kind = ours.rpartition(".")
            if layer.endswith(".qkv"):
                spans = (self.span(plan.sources[0][1][0]), self.kv_span(config), self.kv_span(config))
                for (name, _shape), span in zip(plan.sources, spans, strict=True):
                    cuts[name] = Cut(ROWS, *span)
            elif layer.endswith("mlp.in") or layer == "head":
                for name, shape in plan.sources:
                    cuts[name] = Cut(ROWS, *self.span(shape[0]))
            elif layer.endswith((".attention_out", "mlp.out")) and kind == "weight":
                for name, shape in plan.sources:
                    cuts[name] = Cut(COLUMNS, *self.span(shape[1]))
        return cuts


def cut_plans(plans: Mapping[str, TensorPlan], cuts: Mapping[str, Cut]) -> dict[str, TensorPlan]:
    """Return the plans with the shapes of the parts."""
    return {
        ours: TensorPlan(tuple((name, _cut_shape(shape, cuts.get(name))) for name, shape in plan.sources))
        for ours, plan in plans.items()
    }


def _cut_shape(shape: Shape, cut: Cut | None) -> Shape:
    if cut is None:
        return shape
    return (*shape[: cut.dim], cut.end - cut.begin, *shape[cut.dim + 1 :])


class PartCheckpoint:
    """Checkpoint of which only a rank's part is read; a `WeightSource`.

    Args:
        whole: a model folder's.
        cuts: by name.
    """

    def __init__(self, whole: Checkpoint, cuts: Mapping[str, Cut]) -> None:
        self._whole, self._cuts = whole, cuts
        self.tensors = {
            name: PartTensor(
                shape := _cut_shape(stored.shape, cuts.get(name)),
                stored.num_bytes // max(1, _count(stored.shape)) * _count(shape),
            )
            for name, stored in whole.tensors.items()
        }
        self.read_bytes = 0
        """Bytes read from the files so far."""

    def dtype_of(self, name: str) -> torch.dtype:
        return self._whole.dtype_of(name)

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        """Read this rank's part of a tensor; see `Checkpoint.read`."""
        tensor = torch.empty(self.tensors[name].shape, dtype=self.dtype_of(name)) if out is None else out
        self.read_bytes += self._whole.read_part(name, tensor, self._cuts.get(name))
        return tensor

    def block_format(self, name: str) -> None:
        """Return None: a plain tensor has no blocks."""

    def read_blocks(self, name: str) -> NoReturn:
        raise InvariantViolated(f"tensor {name!r} has no blocks")

    def map_blocks(self, name: str) -> None:
        """Return None: a plain tensor has no blocks."""


def _count(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
