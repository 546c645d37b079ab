"""Rows as the device's tables hold them, and the writes that bring them up to date.

The host's table stays the truth. A row goes to the device with all that it is when a step first computes it there, and
with all its blocks; from then on the device's kernels advance it, and only further blocks are sent. A row that was
computed in another way is forgotten here, and sent anew before its next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from triolet.core.request.params import SamplingParams
from triolet.kernels.step.layout import (
    MAX_BIASES,
    MAX_ENDING_IDS,
    MAX_TOP,
    RECORD_WORDS,
    Flag,
    Record,
    RowTables,
)
from triolet.model.input_batch import Row, RowTable
from triolet.model.sampling.logits_processors import LARGE
from triolet.model.sampling.noise import answer_streams
from triolet.model.sampling.sampling_row import SamplingRow
from triolet.model.sampling.top_k_top_p import NO_TOP_P, has_top_k

Int32s = npt.NDArray[np.int32]
Writes = tuple[Int32s, Int32s]  # words of the tables, and what is written there


def can_hold(sampling: SamplingRow, *, is_processed: bool) -> bool:
    """Tell whether the device's tables have room for all that a row's sampling depends on.

    Args:
        sampling: of the row.
        is_processed: whether log-probabilities are told after the edits.
    """
    params = sampling.params
    num_top = params.logprobs or 0
    return (
        not (params.wants_logprobs and is_processed)
        and 0 <= num_top <= MAX_TOP
        and not params.logprob_token_ids
        and len(sampling.ending_token_ids) <= MAX_ENDING_IDS
        and len(params.logit_bias or ()) <= MAX_BIASES
        and all(not before for before, _ in sampling.bad_words)
    )


class DeviceRows:
    """What the device's tables hold.

    Args:
        tables: on the device.
    """

    def __init__(self, tables: RowTables) -> None:
        self.tables = tables
        num_rows = len(tables.records) - 1
        self._held: list[Row | None] = [None] * num_rows
        self._num_blocks = [0] * num_rows  # of each that were sent

    def holds(self, row_id: int, row: Row) -> bool:
        """Tell whether the device has this row, so that further steps advance it there."""
        return self._held[row_id] is row

    def forget(self, row_ids: Iterable[int]) -> None:
        """Note that these rows were computed in another way."""
        for row_id in row_ids:
            self._held[row_id] = None

    def forget_all(self) -> None:
        """Note that nothing is known of the device's tables."""
        self.forget(range(len(self._held)))

    def update(self, row_id: int, row: Row, table: RowTable) -> list[Writes]:
        """Return what brings a row of the device up to date, and note that it is.

        A row with penalties that goes to the device has its counts cleared first.
        """
        writes: list[Writes] = []
        if not self.holds(row_id, row):
            writes.extend(self._all_of(row_id, row.sampling, row))
            self._held[row_id], self._num_blocks[row_id] = row, 0
        first, self._num_blocks[row_id] = self._num_blocks[row_id], row.num_blocks
        if first < row.num_blocks:
            at = self.tables.word_of(self.tables.block_tables, row_id, first)
            writes.append(_in_turn(at, table.blocks_of(row_id, first, row.num_blocks)))
        return writes

    def _all_of(self, row_id: int, sampling: SamplingRow, row: Row) -> list[Writes]:
        tables, params = self.tables, sampling.params
        biases = params.logit_bias or {}
        writes = [_in_turn(tables.word_of(tables.records, row_id, 0), self._record(sampling, row))]
        writes.append(
            _in_turn(tables.word_of(tables.ending_ids, row_id, 0), _int32s(sampling.ending_token_ids))
        )
        if biases:
            values = np.clip(np.array(list(biases.values()), dtype=np.float64), -LARGE, LARGE)
            writes.append(_in_turn(tables.word_of(tables.bias_ids, row_id, 0), _int32s(tuple(biases))))
            at = tables.word_of(tables.biases, row_id, 0)
            writes.append(_in_turn(at, values.astype(np.float32).view(np.int32)))
        if _has_allowed(sampling):
            writes.append(_in_turn(tables.word_of(tables.allowed, row_id, 0), self._allowed(sampling)))
        if sampling.counts is not None:
            tables.counts[row_id].zero_()
            at = tables.word_of(tables.counts, row_id, 0)
            words = 2 * sampling.counts.counts.astype(np.int64) + 1
            writes.append(((sampling.counts.token_ids + at).astype(np.int32), words.astype(np.int32)))
        return writes

    def _record(self, sampling: SamplingRow, row: Row) -> Int32s:
        params, vocab_size = sampling.params, self.tables.vocab_size
        flags = Flag(0)
        if _has_allowed(sampling):
            flags |= Flag.ALLOWED
        if params.logit_bias:
            flags |= Flag.BIAS
        if sampling.counts is not None:
            flags |= Flag.PENALTIES
        record = np.zeros(RECORD_WORDS, dtype=np.int32)
        record[Record.LAST_TOKEN] = row.token(row.num_tokens - 1)
        record[Record.POSITION] = len(sampling.output_token_ids)
        record[Record.FLAGS] = flags
        # A row that is not drawn has no limits, so that nothing is searched for it.
        is_drawn = not params.is_greedy
        record[Record.TOP_K] = params.top_k if is_drawn and has_top_k(params, vocab_size) else vocab_size
        record.view(np.float64)[Record.TOP_P // 2] = (
            params.top_p if is_drawn and params.top_p < 1.0 else NO_TOP_P
        )
        numbers = record.view(np.float32)
        numbers[Record.TEMPERATURE] = params.temperature if is_drawn else 0.0
        # by torch, as for the draws that it makes itself
        numbers[Record.LOG_MIN_P] = torch.tensor(params.min_p, dtype=torch.float64).log().float().item()
        answer = answer_streams(torch.tensor([sampling.seed], dtype=torch.int64))
        record.view(np.int64)[Record.ANSWER // 2] = answer.item()
        numbers[Record.REPETITION] = min(max(params.repetition_penalty, 1 / LARGE), LARGE)
        numbers[Record.FREQUENCY] = params.frequency_penalty
        numbers[Record.PRESENCE] = params.presence_penalty
        record[Record.MIN_TOKENS] = params.min_tokens
        record[Record.NUM_ENDING] = len(sampling.ending_token_ids)
        record[Record.NUM_BIASES] = len(params.logit_bias or ())
        record[Record.NUM_TOP] = num_top_of(params, vocab_size)
        return record

    def _allowed(self, sampling: SamplingRow) -> Int32s:
        bits = np.ones(32 * self.tables.mask_words, dtype=np.uint8)
        if (allowed := sampling.params.allowed_token_ids) is not None:
            bits[:] = 0
            bits[list(allowed)] = 1
        bits[[last for _, last in sampling.bad_words]] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)

    def differences(self, table: RowTable) -> list[str]:
        """Compare the device's rows with the host's; waits for the device.

        Returns:
            What differs, in words; empty if nothing does.
        """
        records = self.tables.records.cpu()
        block_tables = self.tables.block_tables.cpu().numpy()
        found = []
        for row_id, row in enumerate(self._held):
            if row is None or row.num_pending:
                continue
            record = records[row_id].tolist()
            expected = self._record(row.sampling, row).tolist()
            if record != expected:
                found.append(f"record of {row.request_id}: {record} instead of {expected}")
            blocks = table.blocks_of(row_id, 0, self._num_blocks[row_id])
            if not np.array_equal(block_tables[row_id, : len(blocks)], blocks):
                found.append(f"blocks of {row.request_id}")
            if row.sampling.counts is not None and (problem := self._counts_difference(row_id, row)):
                found.append(problem)
        return found

    def _counts_difference(self, row_id: int, row: Row) -> str | None:
        counts = row.sampling.counts
        assert counts is not None
        expected = np.zeros(self.tables.vocab_size, dtype=np.int64)
        expected[counts.token_ids] = 2 * counts.counts.astype(np.int64) + 1
        held = self.tables.counts[row_id].cpu().numpy()
        return None if np.array_equal(held, expected) else f"counts of {row.request_id}"


def num_top_of(params: SamplingParams, vocab_size: int) -> int:
    """Return the number of likeliest tokens to name with log-probabilities; -1 for no log-probabilities."""
    return min(params.logprobs or 0, vocab_size) if params.wants_logprobs else -1


def _has_allowed(sampling: SamplingRow) -> bool:
    return sampling.params.allowed_token_ids is not None or bool(sampling.bad_words)


def _in_turn(first_word: int, values: Int32s) -> Writes:
    return np.arange(first_word, first_word + len(values), dtype=np.int32), values


def _int32s(values: Sequence[int]) -> Int32s:
    return np.array(values, dtype=np.int32)
