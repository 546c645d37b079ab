"""Pack a plan into one array of int32 words; `triolet.kernels.step.layout` says what stands where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from triolet.core.step_plan import PlanRow
from triolet.kernels import paged_attention
from triolet.kernels.step.layout import HEADER_WORDS, Header, num_mask_words
from triolet.model.cuda.device_rows import Int32s, Writes, num_top_of
from triolet.model.input_batch import Row


@attrs.frozen(eq=False)
class Packet:
    """A packed plan."""

    words: Int32s  # what is copied to the device
    query_lens: tuple[int, ...]  # of each sequence
    seq_lens: tuple[int, ...]
    num_tops: tuple[int, ...]  # of each, likeliest tokens to name with log-probabilities; -1 for none

    @property
    def num_top(self) -> int:
        """Return the largest of `num_tops`."""
        return max(self.num_tops)

    @property
    def is_decode(self) -> bool:
        """Return whether each sequence has one token."""
        return len(self.query_lens) == sum(self.query_lens)

    @property
    def has_long_chunks(self) -> bool:
        """Return whether each sequence has one token, or more than attention splits the keys of."""
        return all(
            query_len == 1 or query_len > paged_attention.MAX_FEW_QUERIES for query_len in self.query_lens
        )


def pack(
    planned: Sequence[PlanRow], rows: Sequence[Row], writes: Sequence[Writes], vocab_size: int
) -> Packet:
    """Pack a plan.

    A row that computes the last of its tokens alone has it from the device's tables: the host may not know it yet.

    Args:
        planned: the rows' shares of the step.
        rows: theirs, advanced by it.
        writes: what brings the device's rows up to date.
        vocab_size: of the model.
    """
    words, values = join_writes(writes)
    # A list first: numpy takes many times as long for one number.
    said: list[tuple[int, ...]] = []
    tokens: list[npt.NDArray[np.int64]] = []
    masks: list[Int32s] = []
    num_tokens = num_said = 0
    for share, row in zip(planned, rows, strict=True):
        is_last_alone = share.sample and share.num_tokens == 1
        place = -1 if is_last_alone else num_said
        mask = -1 if share.mask is None else len(masks)
        # in the order of `RowWord`
        said.append(
            (share.row_id, share.start, share.num_tokens, num_tokens, place, int(share.sample), mask, 0)
        )
        num_tokens += share.num_tokens
        if not is_last_alone:
            tokens.append(row.tokens(share.start, share.start + share.num_tokens))
            num_said += share.num_tokens
        if share.mask is not None:
            masks.append(_mask_words(share.mask, vocab_size))
    num_tops = tuple(
        [
            num_top_of(row.sampling.params, vocab_size) if share.sample else -1
            for share, row in zip(planned, rows, strict=True)
        ]
    )
    entries = np.array(said, dtype=np.int32)
    header = np.zeros(HEADER_WORDS, dtype=np.int32)
    header[Header.NUM_ROWS], header[Header.NUM_TOKENS] = len(planned), num_tokens
    header[Header.NUM_WRITES], header[Header.FIRST_WRITE] = len(words), HEADER_WORDS + entries.size
    header[Header.FIRST_TOKEN] = header[Header.FIRST_WRITE] + 2 * len(words)
    header[Header.FIRST_MASK] = header[Header.FIRST_TOKEN] + num_said
    header[Header.NUM_TOP] = max(num_tops)
    parts: list[npt.NDArray[Any]] = [
        header,
        entries.ravel(),
        np.stack((words, values), axis=1).ravel(),
        *tokens,
        *masks,
    ]
    return Packet(
        np.concatenate([part.astype(np.int32, copy=False) for part in parts]),
        tuple([share.num_tokens for share in planned]),
        tuple([share.start + share.num_tokens for share in planned]),
        num_tops,
    )


def pack_writes(writes: Sequence[Writes]) -> Int32s:
    """Pack writes without a step."""
    words, values = join_writes(writes)
    header = np.zeros(HEADER_WORDS, dtype=np.int32)
    header[Header.NUM_WRITES], header[Header.FIRST_WRITE] = len(words), HEADER_WORDS
    return np.concatenate((header, np.stack((words, values), axis=1).ravel()))


def join_writes(writes: Sequence[Writes]) -> Writes:
    """Join writes to one."""
    if not writes:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
    return np.concatenate([words for words, _ in writes]), np.concatenate([values for _, values in writes])


def _mask_words(mask: bytes, vocab_size: int) -> Int32s:
    # Zeros bar the ids past the end of a mask: padding of the vocabulary.
    num_bytes = 4 * num_mask_words(vocab_size)
    return np.frombuffer(mask[:num_bytes].ljust(num_bytes, b"\0"), dtype="<i4")
