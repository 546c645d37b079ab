"""Interface between the runner and a model of any backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

if TYPE_CHECKING:
    from triolet.kernels.attention_metadata import AttentionMetadata

NUM_VERSIONS = 2
"""Versions of a block's state: what a step reads, and what it writes."""

STATE_WINDOW = 2
"""Window of a layer that keeps states alone: it reads the one after the token before, in the block of that token."""


@attrs.frozen(kw_only=True)
class LayerStateSpec:
    """Shape of what a recurrent layer keeps of a sequence, whatever its length; each block has two versions of it."""

    convolution: tuple[int, int]  # tokens, channels; in the model's dtype
    recurrent: tuple[int, ...]  # float32

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of both versions of a block, but for those of their lengths."""
        state = math.prod(self.convolution) * dtype.itemsize
        return NUM_VERSIONS * (state + math.prod(self.recurrent) * torch.float32.itemsize)


@attrs.frozen(kw_only=True)
class LayerCacheSpec:
    """Shape of one layer's cache.

    That of an attention layer holds keys and values of each token, each `num_kv_heads` * `head_dim` numbers; that of a
    recurrent one holds states of each block, and keys of no heads if it does not attend as well.
    """

    num_kv_heads: int
    head_dim: int
    is_latent: bool = (
        False  # a value is a part of its key: one tensor holds both (multi-head latent attention)
    )
    state: LayerStateSpec | None = None  # of a recurrent layer
    # Tokens that it sees at most, if its model reads nothing behind them: those may be another sequence's by then.
    window: int | None = None

    @property
    def numbers_per_token(self) -> int:
        """Numbers that the cache keeps for a token."""
        return (1 if self.is_latent else 2) * self.num_kv_heads * self.head_dim


@attrs.frozen(kw_only=True)
class ModelSpec:
    """Facts about a loaded model that the engine, the sampler and the KV cache are built from."""

    architecture: str  # name from the folder's config.json, such as `LlamaForCausalLM`
    backend: str  # `native` or `transformers`
    vocab_size: int  # rows of the output head; token ids are below it
    max_position: int  # longest sequence that the position encoding covers, tokens
    cache_layers: tuple[LayerCacheSpec, ...]  # one entry per layer with a cache, in order
    dtype: torch.dtype  # of weights, activations and states
    hidden_size: int = 0  # numbers of a hidden state
    # Whether a step may have a block table for each cache group; otherwise there is one for all layers.
    takes_cache_groups: bool = False
    kv_dtype: torch.dtype | None = None  # of keys and values; None for `dtype`
    # Whether embeddings may be given in the place of tokens; not where a token has rows in other tables, too.
    takes_embeddings: bool = True
    given_embedding_scale: float = (
        1.0  # embeddings that are given in the place of tokens are multiplied by it
    )

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the cache."""
        return self.kv_dtype or self.dtype

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of keys and values of one token, all layers together."""
        return sum(layer.numbers_per_token for layer in self.cache_layers) * self.cache_dtype.itemsize

    @property
    def is_recurrent(self) -> bool:
        """True if a layer keeps a state in place of keys and values, or beside them."""
        return any(layer.state is not None for layer in self.cache_layers)

    def state_bytes_per_block(self) -> int:
        """Return the bytes of the states of one block, all layers together."""
        return sum(
            layer.state.num_bytes(self.dtype) for layer in self.cache_layers if layer.state is not None
        )

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of a block of so many tokens, all layers together."""
        return block_size * self.kv_bytes_per_token() + self.state_bytes_per_block()


@attrs.frozen(eq=False)
class LayerStates:
    """States of one recurrent layer, two versions for each block; zeros before anything is written."""

    convolution: Tensor  # [num_blocks, 2, tokens, channels] in the model's dtype
    recurrent: Tensor  # [num_blocks, 2, ...] float32
    lengths: Tensor  # [num_blocks, 2] int32: tokens that a version is the state after; 0 for none


@attrs.frozen(eq=False)
class LayerCache:
    """Keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim], contiguous.

    They are the same tensor in a latent cache, and empty in that of a recurrent layer that does not attend.
    """

    keys: Tensor
    values: Tensor
    states: LayerStates | None = None  # of a recurrent layer
    group: int = 0  # cache group of the layer, see `core.kv_cache.cache_groups`

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors that hold memory; the first dimension of each is that of the blocks."""
        held = (self.keys,) if self.values is self.keys else (self.keys, self.values)
        if (states := self.states) is not None:
            of_states = (states.convolution, states.recurrent, states.lengths)
            return (*held, *of_states) if self.keys.numel() else of_states
        return held


@attrs.frozen(eq=False)
class InputEmbeddings:
    """Inputs of the first layer in the place of tokens' embeddings; the scale of the embedding is not applied."""

    tokens: Tensor  # [n] int64, places in the step, rising
    values: Tensor  # [n, hidden_size] in the model's dtype


@attrs.frozen(eq=False, kw_only=True)
class ForwardBatch:
    """Input of one forward pass, on the model's device."""

    token_ids: Tensor  # [num_tokens] int64, the chunks of all sequences end to end
    positions: Tensor  # [num_tokens] int64, each token's index in its sequence
    # One entry per layer with a cache; written in place at `attention.slot_mapping`.
    cache: tuple[LayerCache, ...]
    attention: AttentionMetadata  # each sequence's chunk and blocks
    logits_indices: Tensor  # [num_logits] int64, the tokens after which logits are wanted
    # [num_tokens] int64, 1 for the second text of a pair; None for a model that does not tell the texts apart so.
    token_type_ids: Tensor | None = None
    # [num_tokens] int64 on the CPU, the slot of each token's LoRA adapter, negative for none; None if no token has one.
    adapter_slots: Tensor | None = None
    embeddings: InputEmbeddings | None = None  # of virtual tokens; None if the step has none
    # Blocks of the layers of the second cache group and those after it; `attention` has those of the first one.
    further_attention: tuple[AttentionMetadata, ...] = ()


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
    lacks_memory: bool = False  # there was none for it: nothing else here holds, and the run is over


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
