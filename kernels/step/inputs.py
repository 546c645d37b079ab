"""Make the inputs of a step from a packet and the tables of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.kernels._triton import kernel
from triolet.kernels.step.layout import (
    HEADER_WORDS,
    ROW_WORDS,
    Header,
    Record,
    RowTables,
    RowWord,
    StepBuffers,
)

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 128


@kernel
def _inputs_kernel(
    packet_ptr,  # see `Header`
    records_ptr,  # [num_rows, RECORD_WORDS] int32
    doubles_ptr,  # the same as float64
    longs_ptr,  # the same as int64
    tables_ptr,  # [num_rows, max_blocks] int32
    token_ids_ptr, positions_ptr, slots_ptr, cu_query_lens_ptr, seq_lens_ptr, block_tables_ptr, last_tokens_ptr,
    temperature_ptr, log_min_p_ptr, top_k_ptr, top_p_ptr, answers_ptr, answer_positions_ptr,  # out: `StepBuffers`
    num_seqs, num_tokens, max_blocks, spare_row,
    BLOCK_SIZE: tl.constexpr, PADDING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Fill in one sequence; the last program fills in the tokens that belong to none.

    PADDING: tokens of a sequence that the packet does not have, 1 where each sequence has one, else 0.
    """
    HEADER: tl.constexpr = 8
    ROW: tl.constexpr = 8
    RECORD: tl.constexpr = 24
    sequence = tl.program_id(0)
    num_rows = tl.load(packet_ptr)
    num_live_tokens = tl.load(packet_ptr + 1)
    tile = tl.arange(0, TILE)
    spare_slot = tl.load(tables_ptr + spare_row.to(tl.int64) * max_blocks).to(tl.int64) * BLOCK_SIZE
    if sequence == num_seqs:
        first = num_live_tokens
        if PADDING:
            first = num_tokens
        tl.store(cu_query_lens_ptr + sequence, first)
        for at in range(first, num_tokens, TILE):
            token = at + tile
            live = token < num_tokens
            tl.store(token_ids_ptr + token, tl.zeros([TILE], tl.int64), mask=live)
            tl.store(positions_ptr + token, tl.zeros([TILE], tl.int64), mask=live)
            tl.store(slots_ptr + token, tl.zeros([TILE], tl.int64) + spare_slot, mask=live)
        return
    is_live = sequence < num_rows
    entry = packet_ptr + HEADER + sequence * ROW
    row = tl.load(entry, mask=is_live, other=0)
    row = tl.where(is_live, row, spare_row).to(tl.int64)
    start = tl.load(entry + 1, mask=is_live, other=0)
    query_len = tl.load(entry + 2, mask=is_live, other=PADDING)
    first = tl.load(entry + 3, mask=is_live, other=0)
    first = tl.where(is_live, first, num_live_tokens + (sequence - num_rows) * PADDING)
    tokens = tl.load(entry + 4, mask=is_live, other=-1)
    record_ptr = records_ptr + row * RECORD
    tokens_ptr = packet_ptr + tl.load(packet_ptr + 4)
    table_ptr = tables_ptr + row * max_blocks

    tl.store(cu_query_lens_ptr + sequence, first)
    tl.store(seq_lens_ptr + sequence, start + query_len)
    tl.store(last_tokens_ptr + sequence, tl.maximum(first + query_len - 1, 0).to(tl.int64))
    num_blocks = (start + query_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for at in range(0, num_blocks, TILE):
        place = at + tile
        live = place < num_blocks
        block = tl.load(table_ptr + place, mask=live, other=0)
        tl.store(block_tables_ptr + sequence.to(tl.int64) * max_blocks + place, block, mask=live)

    temperature = tl.load(record_ptr + 3)
    tl.store(temperature_ptr + sequence, temperature.to(tl.float32, bitcast=True))
    tl.store(log_min_p_ptr + sequence, tl.load(record_ptr + 4).to(tl.float32, bitcast=True))
    tl.store(top_k_ptr + sequence, tl.load(record_ptr + 5).to(tl.int64))
    tl.store(top_p_ptr + sequence, tl.load(doubles_ptr + (row * RECORD + 6) // 2))
    tl.store(answers_ptr + sequence, tl.load(longs_ptr + (row * RECORD + 8) // 2))
    tl.store(answer_positions_ptr + sequence, tl.load(record_ptr + 1).to(tl.int64))
    # Last, because nothing of it is needed elsewhere: before the rest, it takes more registers than a program has.
    last_token = tl.load(record_ptr)
    for at in range(0, query_len, TILE):
        token = at + tile
        live = token < query_len
        said = tl.load(tokens_ptr + tokens + token, mask=live & (tokens >= 0), other=0)
        token_id = tl.where(tokens >= 0, said, last_token)
        position = start + token
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        tl.store(token_ids_ptr + first + token, token_id.to(tl.int64), mask=live)
        tl.store(positions_ptr + first + token, position.to(tl.int64), mask=live)
        tl.store(slots_ptr + first + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)


def make_inputs(
    packet: Tensor, tables: RowTables, buffers: StepBuffers, *, block_size: int, is_decode: bool
) -> None:
    """Fill in the buffers of a step.

    A token that belongs to no sequence goes to the spare row's first slot. A row that computes its last token has it
    from the tables, and the plan does not say it.

    Args:
        packet: [any] int32, see `Header`.
        tables: of all rows.
        buffers: of as many tokens and sequences as the step is padded to.
        block_size: tokens of a block.
        is_decode: whether each sequence has one token, and padding is sequences of one token; else padding is
            sequences of none.
    """
    launch = make_inputs_triton if packet.is_cuda else make_inputs_reference
    launch(packet, tables, buffers, block_size=block_size, is_decode=is_decode)


def make_inputs_triton(
    packet: Tensor, tables: RowTables, buffers: StepBuffers, *, block_size: int, is_decode: bool
) -> None:
    """`make_inputs` in Triton."""
    num_seqs = len(buffers.seq_lens)
    _inputs_kernel[num_seqs + 1,](
        packet, tables.records, tables.records.view(torch.float64), tables.records.view(torch.int64),
        tables.block_tables, buffers.token_ids, buffers.positions, buffers.slots, buffers.cu_query_lens,
        buffers.seq_lens, buffers.block_tables, buffers.last_tokens, buffers.temperature, buffers.log_min_p,
        buffers.top_k, buffers.top_p, buffers.answers, buffers.answer_positions,
        num_seqs, len(buffers.token_ids), tables.block_tables.shape[1], tables.spare_row,
        BLOCK_SIZE=block_size, PADDING=int(is_decode), TILE=_TILE,
    )  # fmt: skip


def make_inputs_reference(
    packet: Tensor, tables: RowTables, buffers: StepBuffers, *, block_size: int, is_decode: bool
) -> None:
    """`make_inputs` in torch, a sequence at a time."""
    num_rows, num_tokens = int(packet[Header.NUM_ROWS]), int(packet[Header.NUM_TOKENS])
    said = packet[int(packet[Header.FIRST_TOKEN]) :]
    spare_slot = int(tables.block_tables[tables.spare_row, 0]) * block_size
    buffers.token_ids[num_tokens:] = 0
    buffers.positions[num_tokens:] = 0
    buffers.slots[num_tokens:] = spare_slot
    entries = packet[HEADER_WORDS:][: num_rows * ROW_WORDS].view(num_rows, ROW_WORDS).tolist()
    for sequence in range(len(buffers.seq_lens)):
        if sequence < num_rows:
            entry = entries[sequence]
        else:
            first = num_tokens + (sequence - num_rows) * is_decode
            entry = [tables.spare_row, 0, int(is_decode), first, -1]
        row, start, query_len, first, tokens = entry[: RowWord.TOKENS + 1]
        record = tables.records[row]
        buffers.cu_query_lens[sequence] = first
        buffers.seq_lens[sequence] = start + query_len
        buffers.last_tokens[sequence] = max(first + query_len - 1, 0)
        place = slice(first, first + query_len)
        positions = torch.arange(start, start + query_len, device=packet.device)
        blocks = tables.block_tables[row][positions // block_size].long()
        buffers.token_ids[place] = (
            record[Record.LAST_TOKEN] if tokens < 0 else said[tokens : tokens + query_len].long()
        )
        buffers.positions[place] = positions
        buffers.slots[place] = blocks * block_size + positions % block_size
        num_blocks = -(-(start + query_len) // block_size)
        buffers.block_tables[sequence, :num_blocks] = tables.block_tables[row, :num_blocks]
        buffers.temperature[sequence] = record.view(torch.float32)[Record.TEMPERATURE]
        buffers.log_min_p[sequence] = record.view(torch.float32)[Record.LOG_MIN_P]
        buffers.top_k[sequence] = record[Record.TOP_K]
        buffers.top_p[sequence] = record.view(torch.float64)[Record.TOP_P // 2]
        buffers.answers[sequence] = record.view(torch.int64)[Record.ANSWER // 2]
        buffers.answer_positions[sequence] = record[Record.POSITION]
    buffers.cu_query_lens[-1] = len(buffers.token_ids) if is_decode else num_tokens
