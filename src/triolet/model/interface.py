"""Interface between the runner and a model of any backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

if TYPE_CHECKING:
    from triolet.kernels.attention_metadata import AttentionMetadata


@attrs.frozen(kw_only=True)
class LayerCacheSpec:
    """Shape of one attention layer's cache per token: keys and values, each `num_kv_heads` * `head_dim` numbers."""

    num_kv_heads: int
    head_dim: int


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Facts about a loaded model that the engine, the sampler and the KV cache are built from."""

    architecture: str  # name from the folder's config.json, such as `LlamaForCausalLM`
    backend: str  # `native` or `transformers`
    vocab_size: int  # rows of the output head; token ids are below it
    max_position: int  # longest sequence that the position encoding covers, tokens
    cache_layers: tuple[LayerCacheSpec, ...]  # one entry per attention layer, in order
    dtype: torch.dtype  # of weights, activations and KV
    hidden_size: int = 0  # numbers of a hidden state

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of one token, all layers together."""
        numbers = sum(2 * layer.num_kv_heads * layer.head_dim for layer in self.cache_layers)
        return numbers * self.dtype.itemsize


@attrs.frozen(eq=False)
class LayerCache:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], contiguous."""

    keys: Tensor
    values: Tensor


@attrs.frozen(eq=False)
class InputEmbeddings:
    """Inputs of the first layer that take the place of tokens' embeddings; a scale of the embedding is not applied."""

    tokens: Tensor  # [n] int64, places in the step, rising
    values: Tensor  # [n, hidden_size] in the model's dtype


@attrs.frozen(eq=False, kw_only=True)
class ForwardBatch:
    """Input of one forward pass, on the model's device."""

    token_ids: Tensor  # [num_tokens] int64, the chunks of all sequences end to end
    positions: Tensor  # [num_tokens] int64, each token's index in its sequence
    # One entry per attention layer; written in place at `attention.slot_mapping`.
    cache: tuple[LayerCache, ...]
    attention: AttentionMetadata  # each sequence's chunk and blocks
    logits_indices: Tensor  # [num_logits] int64, the tokens after which logits are wanted
    # [num_tokens] int64, 1 for the second text of a pair; None for a model that does not tell the texts apart so.
    token_type_ids: Tensor | None = None
    # [num_tokens] int64 on the CPU, the slot of each token's LoRA adapter, negative for none; None if no token has one.
    adapter_slots: Tensor | None = None
    embeddings: InputEmbeddings | None = None  # of virtual tokens; None if the step has none


class CausalModel(Protocol):
    """A decoder that reads and writes a paged KV cache."""

    @property
    def spec(self) -> ModelSpec:
        """Facts that the engine is built from."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute one step: write the KV of every token, return the hidden states.

        Returns:
            [num_tokens, hidden_size] in the model's dtype: the input of the head, after the final norm.
        """
        ...

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Apply the head to some tokens.

        Args:
            hidden: [num_tokens, hidden_size], from `forward`.
            rows: [num_logits] int64, indices into `hidden`.
        Returns:
            [num_logits, vocab_size] in the model's dtype.
        """
        ...

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        """Compute one step and the logits at `batch.logits_indices`.

        The same as `compute_logits(forward(batch), batch.logits_indices)`, in one call, so that a backend may leave out
        what only the hidden states of other tokens need.
        """
        ...


@runtime_checkable
class GreedyModel(CausalModel, Protocol):
    """Model that computes the argmax of the logits itself, without storing all logits."""

    def wake(self) -> None:
        """Announce a step."""
        ...  # worker threads wake up while the caller prepares the input

    def forward_greedy(self, batch: ForwardBatch) -> tuple[list[float], list[int]]:
        """Compute one step; for each row of logits return the largest logit and the first token that has it.

        A row that holds a NaN gives NaN.
        """
        ...


@runtime_checkable
class PartialModel(CausalModel, Protocol):
    """Model that several processes compute together, each with the logits of a part of the vocabulary.

    `forward_logits` and `compute_logits` give the logits of all of it, in each process.
    """

    @property
    def first_id(self) -> int:
        """First token of this process's part."""
        ...

    def forward_part(self, batch: ForwardBatch) -> Tensor:
        """Compute one step and the logits of this process's part, [num_logits, part_size]; see `forward_logits`."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all processes, [num_processes, ...] in the order of their parts."""
        ...


@attrs.frozen
class GreedyStep:
    """Result of one step of a `GreedyRun`."""

    max_logits: list[float]  # the largest logit of each row; NaN if any logit is
    token_ids: list[int]  # the first token that has it
    elapsed_s: float  # duration of the step, seconds


class GreedyRun(Protocol):
    """One or several steps that are computed in the background."""

    def steps(self, count: int) -> list[GreedyStep]:
        """Return the next `count` steps, which `done_fd` must have counted as over."""
        ...

    @property
    def is_over(self) -> bool:
        """True when the steps returned so far are all that this run computes."""
        ...

    def halt(self) -> None:
        """End the run after the step that is being computed."""
        ...


@runtime_checkable
class BackgroundModel(GreedyModel, Protocol):
    """Greedy model that computes steps in the background."""

    def begin_greedy(self, batch: ForwardBatch, *, num_steps: int, done_fd: int) -> GreedyRun:
        """Begin one or several `forward_greedy` steps; each sequence has one token, and goes on with the one it gets.

        No other call may be made until the run is over. The run advances `positions`, `token_ids` and the lengths and
        slots of `attention` in place; the block tables must cover all steps.

        Args:
            batch: input of the first step.
            num_steps: how many at most; a step with a logit that is NaN is the last.
            done_fd: an eventfd, incremented after each step.
        Returns:
            The run; keep it until it is over, since it owns the memory that the steps write to.
        """
        ...

    def prepare(self) -> None:
        """Announce a `begin_greedy`."""
        ...  # as `GreedyModel.wake`
