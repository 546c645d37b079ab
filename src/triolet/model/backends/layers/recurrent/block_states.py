"""Which states of the cache a step reads and writes.

Theory of operation
-------------------
A recurrent layer's state is paged as keys and values are: the entry of a block is the state after the last computed
token of that block. A step that computes a sequence's tokens from position p on reads the entry of the block that holds
token p - 1, and starts from zeros where p is 0; it writes an entry for every block that its tokens touch. So a full
block has the state after its last token for as long as it has their keys and values, and a request that finds blocks
in the prefix cache finds a state at their end.

A step may be computed twice, when memory ran out in its middle or when it is computed again after an error. What it
reads must then still be there, although the first attempt wrote into the same block. So a block has two versions of its
entry, each with the number of tokens that it is the state after. A step reads the version of its number, and writes the
other one. Where a step begins a block it marks the other version as empty: its number may be that of a sequence to
which the block belonged before. No sequence goes on after 0 tokens, so 0 marks what is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from triolet.errors import InvariantViolated
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import LayerStates


@attrs.frozen(eq=False, kw_only=True)
class StateBatch:
    """Sequences of a step that are computed together: one with a chunk of tokens, or all that have one token."""

    tokens: Tensor  # [num_tokens] int64, places in the step
    ends: tuple[int, ...]  # of a chunk: after how many of its tokens a state is written
    read_blocks: Tensor  # [num_seqs] int64; any for a sequence that begins
    read_lengths: Tensor  # [num_seqs] int64: tokens before the step
    # Of each write, [num_writes]; those of sequences with one token are in their order.
    written_blocks: Tensor  # int64
    written_lengths: Tensor  # int64: tokens that it is the state after
    goes_on: Tensor  # bool: the block is the one that was read

    @property
    def is_chunk(self) -> bool:
        """True for one sequence with several tokens."""
        return len(self.read_blocks) == 1 and len(self.tokens) > 1


def state_batches(attention: AttentionMetadata, block_size: int) -> tuple[StateBatch, ...]:
    """Divide the sequences of a step; the first layer that asks computes it.

    Args:
        attention: of the step.
        block_size: tokens in a block.
    """
    found: tuple[StateBatch, ...] | None = attention.launches.get((StateBatch, block_size))
    if found is None:
        found = attention.launches[StateBatch, block_size] = _divided(attention, block_size)
    return found


def _divided(attention: AttentionMetadata, block_size: int) -> tuple[StateBatch, ...]:
    lengths = attention.query_lens_host
    single = [index for index, length in enumerate(lengths) if length == 1]
    groups = [single] if single else []
    groups += [[index] for index, length in enumerate(lengths) if length > 1]
    return tuple([_batch_of(attention, group, block_size) for group in groups])


def _batch_of(attention: AttentionMetadata, sequences: Sequence[int], block_size: int) -> StateBatch:
    device = attention.block_tables.device
    ends = [attention.seq_lens_host[index] for index in sequences]
    starts = [end - attention.query_lens_host[index] for end, index in zip(ends, sequences, strict=True)]
    # Of each write: place of the sequence here, and the number of tokens that it is the state after.
    writes = [
        (place, length)
        for place, (start, end) in enumerate(zip(starts, ends, strict=True))
        for length in (*range(start // block_size * block_size + block_size, end, block_size), end)
    ]
    read_places = [max(0, start - 1) // block_size for start in starts]
    written_places = [(length - 1) // block_size for _, length in writes]

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    rows = tensor(sequences)
    firsts = attention.cu_query_lens[rows].long()
    num_tokens = attention.query_lens_host[sequences[0]]
    goes_on = [
        starts[place] > 0 and written == read_places[place]
        for (place, _), written in zip(writes, written_places, strict=True)
    ]
    written_rows = tensor([sequences[place] for place, _ in writes])
    return StateBatch(
        tokens=(firsts[:, None] + torch.arange(num_tokens, device=device)).flatten(),
        ends=tuple([length - starts[place] for place, length in writes]),
        read_blocks=attention.block_tables[rows, tensor(read_places)].long(),
        read_lengths=tensor(starts),
        written_blocks=attention.block_tables[written_rows, tensor(written_places)].long(),
        written_lengths=tensor([length for _, length in writes]),
        goes_on=torch.tensor(goes_on, device=device),
    )


@attrs.frozen(eq=False)
class FoundStates:
    """States before a step."""

    versions: Tensor  # [num_seqs] int64, where they were
    convolution: Tensor  # [num_seqs, kernel_size - 1, channels]
    recurrent: Tensor  # [num_seqs, ...] float32


def read_states(states: LayerStates, batch: StateBatch) -> FoundStates:
    """Read the states before a batch's tokens, zeros for a sequence that begins.

    Raises:
        InvariantViolated: a block has no state after that many tokens; found on a CPU alone, elsewhere it is not looked
            at, since the host would wait.
    """
    is_there = states.lengths[batch.read_blocks] == batch.read_lengths[:, None]
    begins = batch.read_lengths == 0
    if begins.device.type == "cpu" and not bool((is_there.any(dim=1) | begins).all()):
        found = states.lengths[batch.read_blocks].tolist()
        raise InvariantViolated(f"blocks must have states after {batch.read_lengths.tolist()}; got {found}")
    versions = is_there[:, 1].long()
    convolution = states.convolution[batch.read_blocks, versions]
    recurrent = states.recurrent[batch.read_blocks, versions]
    return FoundStates(versions, _zeroed(convolution, begins), _zeroed(recurrent, begins))


def _zeroed(values: Tensor, rows: Tensor) -> Tensor:
    return values.masked_fill(rows.view(-1, *[1] * (values.ndim - 1)), 0.0)


def write_states(
    states: LayerStates, batch: StateBatch, found: FoundStates, convolution: Tensor, recurrent: Tensor
) -> None:
    """Write the states that follow from a batch.

    Args:
        states: of the layer.
        batch: what was computed.
        found: what was read for it.
        convolution: [num_writes, kernel_size - 1, channels].
        recurrent: [num_writes, ...] float32.
    """
    blocks = batch.written_blocks
    versions = torch.where(batch.goes_on, 1 - found.versions, 0)
    states.convolution[blocks, versions] = convolution
    states.recurrent[blocks, versions] = recurrent
    lengths = batch.written_lengths.to(states.lengths.dtype)
    # A block that was begun before the step keeps what was read, a new one has nothing else.
    kept = torch.where(batch.goes_on, states.lengths[blocks, 1 - versions], 0)
    states.lengths[blocks, versions] = lengths
    states.lengths[blocks, 1 - versions] = kept
