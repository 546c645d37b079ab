"""Block tables of the rows of a runner, and where a step's tokens are in the KV cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from triolet.core.kv_cache.cache_groups import HOLE
from triolet.errors import InvariantViolated
from triolet.kernels.attention_metadata import AttentionMetadata

Int64s = npt.NDArray[np.int64]


class BlockTables:
    """Blocks of each row, for each cache group.

    Args:
        num_groups: cache groups; a plan has a block of each for the same tokens.
        num_rows: rows.
        max_model_len: longest sequence, tokens.
        num_blocks: of the KV cache.
        block_size: tokens in a block.
        device: where step inputs go.
        has_holes: whether a group has a window, so that plans may name holes.
    """

    def __init__(
        self,
        *,
        num_groups: int,
        num_rows: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        has_holes: bool,
    ) -> None:
        self._num_blocks, self._block_size, self._device = num_blocks, block_size, device
        self._lowest = HOLE if has_holes else 0
        self._ids = np.zeros((num_groups, num_rows, -(-max_model_len // block_size)), dtype=np.int32)

    def of_row(self, row_id: int, first: int, end: int) -> npt.NDArray[np.int32]:
        """Return the blocks at places `first : end` of a row's table, of the first group."""
        return self._ids[0, row_id, first:end]

    def add(self, row_id: int, first: int, block_ids: tuple[int, ...], request_id: str) -> int:
        """Write the blocks of a plan at places from `first` on, and return the place after them.

        Raises:
            InvariantViolated: they are too many, or no blocks of the cache.
        """
        num_groups, _, most = self._ids.shape
        end = first + len(block_ids) // num_groups
        if end > most:
            raise InvariantViolated(f"{request_id} must have at most {most} blocks; got {end}")
        if len(block_ids) % num_groups:
            raise InvariantViolated(
                f"{request_id} must have blocks of all {num_groups} groups; got {block_ids}"
            )
        if not self._lowest <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise InvariantViolated(
                f"block ids of {request_id} must be in [0, {self._num_blocks}); got {block_ids}"
            )
        # Any block stands for a hole: it is not read.
        new = np.maximum(np.array(block_ids, dtype=np.int32), 0).reshape(-1, num_groups)
        self._ids[:, row_id, first:end] = new.T
        return end

    def attention(
        self,
        row_ids: Int64s,
        places: Int64s,
        positions: Int64s,
        num_blocks: int,
        *,
        cu_query_lens: torch.Tensor,
        seq_lens: npt.NDArray[np.int32],
        query_lens_host: tuple[int, ...],
        seq_lens_host: tuple[int, ...],
    ) -> list[AttentionMetadata]:
        """Return the sequences of a step with their blocks, for each cache group.

        Args:
            row_ids: [num_seqs].
            places: [num_tokens], each token's sequence.
            positions: [num_tokens].
            num_blocks: length of the block tables.
        """
        size, found, lengths = self._block_size, [], torch.from_numpy(seq_lens).to(self._device)
        for ids in self._ids:
            block_tables = ids[row_ids, :num_blocks]
            slots = block_tables[places, positions // size].astype(np.int64) * size + positions % size
            found.append(
                AttentionMetadata(
                    cu_query_lens=cu_query_lens,
                    seq_lens=lengths,
                    block_tables=torch.from_numpy(block_tables).to(self._device),
                    slot_mapping=torch.from_numpy(slots).to(self._device),
                    query_lens_host=query_lens_host,
                    seq_lens_host=seq_lens_host,
                )
            )
        return found
