"""Note the tokens of a step in the tables of rows, and put together what the host reads of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.kernels._triton import kernel
from triolet.kernels.step.edits import EditedRows, packet_rows
from triolet.kernels.step.layout import (
    HEADER_WORDS,
    ROW_WORDS,
    Flag,
    Header,
    Record,
    RowTables,
    RowWord,
    Status,
)

if TYPE_CHECKING:
    import triton.language as tl

RESULT_WORDS = 2
"""Words that the host reads of each row: its token, -1 for none, and its `Status`."""


@kernel
def _results_kernel(
    packet_ptr,  # see `Header`
    records_ptr,  # [num_rows, RECORD_WORDS] int32
    counts_ptr,  # [num_rows, vocab_size] int32
    largest_ids_ptr, drawn_ids_ptr,  # [num_seqs] int64
    statuses_ptr,  # [num_seqs] int32
    out_ptr,  # out: [num_seqs, 2] int32
    vocab_size, spare_row,
):  # fmt: skip
    RECORD: tl.constexpr = 24
    sequence = tl.program_id(0).to(tl.int64)
    entry = packet_ptr + 8 + sequence * 8
    is_live = sequence < tl.load(packet_ptr)
    row = tl.load(entry, mask=is_live, other=0)
    row = tl.where(is_live, row, spare_row).to(tl.int64)
    is_sampled = tl.load(entry + 5, mask=is_live, other=0) != 0
    record_ptr = records_ptr + row * RECORD
    status = tl.load(statuses_ptr + sequence)
    is_drawn = tl.load(record_ptr + 3) != 0
    token_id = tl.load(largest_ids_ptr + sequence)
    token_id = tl.where(is_drawn, tl.load(drawn_ids_ptr + sequence), token_id)
    tl.store(out_ptr + 2 * sequence, tl.where(is_sampled, token_id, -1).to(tl.int32))
    tl.store(out_ptr + 2 * sequence + 1, tl.where(is_sampled, status, 0))
    is_kept = is_sampled & (status == 0)
    if is_kept:
        tl.store(record_ptr, token_id.to(tl.int32))
        tl.store(record_ptr + 1, tl.load(record_ptr + 1) + 1)
        if tl.load(record_ptr + 2) & 4:
            seen_ptr = counts_ptr + row * vocab_size + token_id
            tl.store(seen_ptr, (tl.load(seen_ptr) | 1) + 2)


def note_results(
    packet: Tensor, tables: RowTables, edited: EditedRows, drawn_ids: Tensor, out: Tensor
) -> None:
    """Write each row's token into its record, its counts and the results.

    Args:
        packet: the step, see `Header`.
        tables: the rows of the step that did not fail go on by a token.
        edited: largest logits and failures.
        drawn_ids: [num_seqs] int64, tokens of the drawn rows; of other rows anything.
        out: [num_seqs, RESULT_WORDS] int32, is written.
    """
    launch = note_results_triton if packet.is_cuda else note_results_reference
    launch(packet, tables, edited, drawn_ids, out)


def note_results_triton(
    packet: Tensor, tables: RowTables, edited: EditedRows, drawn_ids: Tensor, out: Tensor
) -> None:
    """`note_results` in Triton."""
    _results_kernel[len(out),](
        packet, tables.records, tables.counts, edited.token_ids, drawn_ids, edited.statuses, out,
        tables.vocab_size, tables.spare_row, num_warps=1,
    )  # fmt: skip


def note_results_reference(
    packet: Tensor, tables: RowTables, edited: EditedRows, drawn_ids: Tensor, out: Tensor
) -> None:
    """`note_results` in torch, a row at a time."""
    num_rows = int(packet[Header.NUM_ROWS])
    out[:, 0], out[:, 1] = -1, 0
    for sequence, (row, _) in enumerate(packet_rows(packet, num_rows, tables)):
        if not packet[HEADER_WORDS + ROW_WORDS * sequence + RowWord.IS_SAMPLED]:
            continue
        record = tables.records[row]
        token_ids = drawn_ids if record[Record.TEMPERATURE] else edited.token_ids
        token_id, status = int(token_ids[sequence]), int(edited.statuses[sequence])
        out[sequence] = torch.tensor((token_id, status), dtype=torch.int32)
        if status != Status.CHOSEN:
            continue
        record[Record.LAST_TOKEN] = token_id
        record[Record.POSITION] += 1
        if Flag.PENALTIES in Flag(int(record[Record.FLAGS])):
            tables.counts[row, token_id] = (int(tables.counts[row, token_id]) | 1) + 2
