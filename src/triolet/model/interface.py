"""What the runner asks of a model, whichever backend brings it: native decoder or transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

if TYPE_CHECKING:
    from triolet.kernels.attention_metadata import AttentionMetadata


@attrs.frozen(kw_only=True)
class LayerCacheSpec:
    """What one attention layer keeps per token: keys and values, each `num_kv_heads` * `head_dim` numbers."""

    num_kv_heads: int
    head_dim: int


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Facts about a loaded model that the engine, the sampler and the KV cache are built from.

    Args:
        architecture: name from the folder's config.json, such as `LlamaForCausalLM`.
        backend: `native` or `transformers`.
        vocab_size: rows of the output head; token ids are below it.
        max_position: longest sequence that the position encoding covers, tokens.
        cache_layers: one entry per attention layer, in order.
        dtype: of weights, activations and KV.
    """

    architecture: str
    backend: str
    vocab_size: int
    max_position: int
    cache_layers: tuple[LayerCacheSpec, ...]
    dtype: torch.dtype

    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes in all layers together."""
        numbers = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.cache_layers)
        return numbers * self.dtype.itemsize


@attrs.frozen(eq=False)
class LayerCache:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], contiguous."""

    keys: Tensor
    values: Tensor


class CausalModel(Protocol):
    """A decoder that reads and writes a paged KV cache."""

    @property
    def spec(self) -> ModelSpec:
        """What the engine is built from."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: tuple[LayerCache, ...],
        attention: AttentionMetadata,
        logits_indices: Tensor,
    ) -> Tensor:
        """Compute one step: write the KV of every token, return the logits of some.

        Args:
            token_ids: [num_tokens] int64, the chunks of all sequences end to end.
            positions: [num_tokens] int64, each token's index in its sequence.
            cache: one entry per attention layer; written in place at `attention.slot_mapping`.
            attention: where each sequence's chunk and blocks are.
            logits_indices: [num_logits] int64, the tokens whose logits are wanted.
        Returns:
            [num_logits, vocab_size] in the model's dtype.
        """
        ...


@runtime_checkable
class GreedyModel(CausalModel, Protocol):
    """A model that can choose the likeliest tokens itself, which is less work than to tell all logits."""

    def wake(self) -> None:
        """A step is about to be asked for; nothing has to be done."""
        ...

    def forward_greedy(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: tuple[LayerCache, ...],
        attention: AttentionMetadata,
        logits_indices: Tensor,
    ) -> tuple[list[float], list[int]]:
        """`forward`, and for each row of logits the largest and the first token that has it; NaN, if any is."""
        ...


@attrs.frozen
class GreedyStep:
    """What `forward_greedy` gives, and how long it took, seconds."""

    max_logits: list[float]
    token_ids: list[int]
    elapsed_s: float


class GreedyRun(Protocol):
    """Steps that are being computed."""

    def steps(self, count: int) -> list[GreedyStep]:
        """The next ones that are over.

        Args:
            count: as `done_fd` says: nothing is told of a step before it does.
        """
        ...

    @property
    def is_over(self) -> bool:
        """Whether no others follow those that were told of."""
        ...

    def halt(self) -> None:
        """Let it end after the step that is being computed."""
        ...


@runtime_checkable
class BackgroundModel(GreedyModel, Protocol):
    """One that can do so while its caller goes on."""

    def begin_greedy(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: tuple[LayerCache, ...],
        attention: AttentionMetadata,
        logits_indices: Tensor,
        *,
        num_steps: int,
        done_fd: int,
    ) -> GreedyRun:
        """Begin a `forward_greedy`, or several: each sequence has one token, and goes on with the one that it gets.

        Nothing else may be asked for until the run is over. `positions`, `token_ids` and what `attention` says of
        lengths and slots go on with it; its block tables must be long enough.

        Args:
            num_steps: how many at most; a step whose logits are NaN is the last.
            done_fd: an eventfd; it counts those that are over.
        Returns:
            What it gives; it must be kept until it is over.
        """
        ...

    def prepare(self) -> None:
        """`begin_greedy` will be called soon; nothing has to be done."""
        ...
