"""Driving a `CausalModel` by hand: a paged cache, scattered blocks, chunks of any length."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import CausalModel, ForwardBatch, LayerCache, LayerCacheSpec
from triolet.model.memory.kv_cache import allocate_layer


@attrs.define
class PagedSequence:
    """One sequence: the blocks it may use, in order, and how many of its tokens are in the cache."""

    block_table: list[int]
    length: int = 0


class PagedDriver:
    """A model with a cache of its own, whose unwritten slots hold NaN.

    With several cache groups the layers belong to them in turn, and each has other blocks for the same tokens.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        seed: int = 0,
        num_groups: int = 1,
    ) -> None:
        self.model, self.block_size = model, block_size
        self._num_blocks = num_blocks
        self.cache = tuple(
            attrs.evolve(self._unwritten(layer), group=index % num_groups)
            for index, layer in enumerate(model.spec.cache_layers)
        )
        generator = torch.Generator().manual_seed(seed)
        self._free_blocks: list[int] = torch.randperm(num_blocks, generator=generator).tolist()
        # Of each further group, its blocks by those of the first one.
        self._blocks_of_groups = [
            torch.randperm(num_blocks, generator=generator) for _ in range(1, num_groups)
        ]

    def _unwritten(self, layer: LayerCacheSpec) -> LayerCache:
        def room(shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
            value = 0 if dtype == torch.int32 else math.nan  # lengths, which say what is written
            return torch.full(shape, value, dtype=dtype or self.model.spec.dtype)

        dtype = self.model.spec.dtype
        return allocate_layer(
            attrs.evolve(layer, is_latent=False), self._num_blocks, self.block_size, dtype, room
        )

    def sequence(self, max_len: int) -> PagedSequence:
        """A new sequence with blocks for `max_len` tokens."""
        count = -(-max_len // self.block_size)
        taken, self._free_blocks = self._free_blocks[:count], self._free_blocks[count:]
        assert len(taken) == count, "the driver is out of blocks"
        return PagedSequence(taken)

    def free(self, *sequences: PagedSequence) -> None:
        """Take the sequences' blocks back; what they hold stays, as it would in an engine."""
        for sequence in sequences:
            self._free_blocks += sequence.block_table

    def step(
        self,
        chunks: Sequence[tuple[PagedSequence, Sequence[int]]],
        *,
        logits_indices: Sequence[int] | None = None,
        adapter_slots: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """One forward pass over a chunk of each sequence, with the adapters of these slots.

        Returns:
            The logits of all tokens, one tensor per sequence; with `logits_indices` those of these rows, in one.
        """
        token_ids, positions, slots = [], [], []
        for sequence, tokens in chunks:
            for token in tokens:
                block = sequence.block_table[sequence.length // self.block_size]
                token_ids.append(token)
                positions.append(sequence.length)
                slots.append(block * self.block_size + sequence.length % self.block_size)
                sequence.length += 1
        query_lens = [len(tokens) for _, tokens in chunks]
        seq_lens = [sequence.length for sequence, _ in chunks]
        width = max(len(sequence.block_table) for sequence, _ in chunks)
        tables = [sequence.block_table + [0] * (width - len(sequence.block_table)) for sequence, _ in chunks]
        metadata = AttentionMetadata(
            cu_query_lens=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
        )
        further_metadata = tuple(
            attrs.evolve(
                metadata,
                block_tables=blocks.int()[metadata.block_tables],
                slot_mapping=blocks[metadata.slot_mapping // self.block_size] * self.block_size
                + metadata.slot_mapping % self.block_size,
            )
            for blocks in self._blocks_of_groups
        )
        wanted = range(len(token_ids)) if logits_indices is None else logits_indices
        logits = self.model.forward_logits(
            ForwardBatch(
                token_ids=torch.tensor(token_ids),
                positions=torch.tensor(positions),
                cache=self.cache,
                attention=metadata,
                further_attention=further_metadata,
                logits_indices=torch.tensor(wanted, dtype=torch.int64),
                adapter_slots=None
                if adapter_slots is None
                else torch.tensor(adapter_slots).repeat_interleave(torch.tensor(query_lens)),
            )
        )
        return list(logits.split(query_lens)) if logits_indices is None else [logits]

    def feed(self, sequence: PagedSequence, tokens: Sequence[int], *, chunk: int | None = None) -> Tensor:
        """[len(tokens), vocab_size] logits of one sequence's next tokens, computed in chunks."""
        size = chunk or len(tokens)
        pieces = [tokens[start : start + size] for start in range(0, len(tokens), size)]
        return torch.cat([self.step([(sequence, piece)])[0] for piece in pieces])

    def once(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocab_size] logits of a sequence that is computed in one step and forgotten."""
        sequence = self.sequence(len(tokens))
        logits = self.feed(sequence, tokens)
        self.free(sequence)
        return logits

    def greedy(self, prompt: Sequence[int], num_tokens: int, *, chunk: int | None = None) -> list[int]:
        """The likeliest continuation, token by token."""
        sequence = self.sequence(len(prompt) + num_tokens)
        output = [int(self.feed(sequence, prompt, chunk=chunk)[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.feed(sequence, output[-1:])[-1].argmax()))
        self.free(sequence)
        return output
