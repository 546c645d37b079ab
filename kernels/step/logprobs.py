"""Log-probabilities of a step's tokens and of the likeliest ones, for the rows that ask.

Each row asks for a number of likeliest tokens; of equally likely ones those with lower ids come first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.kernels._triton import kernel, next_power_of_2
from triolet.kernels.step.edits import packet_rows
from triolet.kernels.step.layout import MAX_TOP, Header, Record, RowTables
from triolet.kernels.step.results import RESULT_WORDS

if TYPE_CHECKING:
    import triton.language as tl

TILE = 2048


@kernel
def _tiles_kernel(
    logits_ptr,  # [num_seqs, vocab_size]
    packet_ptr,  # see `Header`
    records_ptr,  # [num_rows, RECORD_WORDS] int32
    results_ptr,  # [num_seqs, 2] int32: the tokens
    sums_ptr,  # out: [num_seqs, num_tiles, 3] float32: largest logit, sum of exponentials below it, tokens as likely
    top_ptr,  # out: [num_seqs, num_tiles, MAX_TOP] float32, the largest logits in falling order
    top_ids_ptr,  # out: the same of int32, their tokens; vocab_size behind the last
    logits_stride, vocab_size, mask_words, spare_row,
    MAX_TOP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find what a tile of the vocabulary contributes."""
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    entry = packet_ptr + 8 + sequence * 8
    is_live = sequence < tl.load(packet_ptr)
    row = tl.load(entry, mask=is_live, other=0)
    row = tl.where(is_live, row, spare_row).to(tl.int64)
    num_top = tl.load(records_ptr + row * 24 + 16)
    chosen = tl.load(results_ptr + 2 * sequence)
    if num_top < 0:
        return
    if chosen < 0:
        return
    mask_index = tl.load(entry + 6, mask=is_live, other=-1).to(tl.int64)
    token_id = tile * TILE + tl.arange(0, TILE)
    live = token_id < vocab_size
    row_ptr = logits_ptr + sequence * logits_stride
    x = tl.load(row_ptr + token_id, mask=live, other=float("-inf")).to(tl.float32)
    own = tl.load(row_ptr + chosen).to(tl.float32)
    if mask_index >= 0:
        mask_ptr = packet_ptr + tl.load(packet_ptr + 5) + mask_index * mask_words
        bits = tl.load(mask_ptr + token_id // 32, mask=live, other=0)
        x = tl.where(((bits >> (token_id % 32)) & 1) == 0, float("-inf"), x)
    largest = tl.max(x, axis=0)
    anchor = tl.where(largest == float("-inf"), 0.0, largest)
    out = sequence * tl.num_programs(1) + tile
    tl.store(sums_ptr + out * 3, largest)
    tl.store(sums_ptr + out * 3 + 1, tl.sum(tl.where(live, tl.exp(x - anchor), 0.0), axis=0))
    tl.store(sums_ptr + out * 3 + 2, tl.sum((live & (x >= own)).to(tl.int32), axis=0).to(tl.float32))
    is_left = live
    for place in range(num_top):
        left = tl.where(is_left, x, float("-inf"))
        best = tl.max(left, axis=0)
        best_id = tl.min(tl.where(is_left & (x == best), token_id, vocab_size), axis=0)
        tl.store(top_ptr + out * MAX_TOP + place, best)
        tl.store(top_ids_ptr + out * MAX_TOP + place, best_id)
        is_left = is_left & (token_id != best_id)


@kernel
def _joined_kernel(
    logits_ptr,  # [num_seqs, vocab_size]
    packet_ptr, records_ptr, results_ptr, sums_ptr, top_ptr, top_ids_ptr,  # see `_tiles_kernel`
    out_ptr,  # out: [num_seqs, 2 + 2 * Header.NUM_TOP] int32: log-probability, rank, likeliest tokens, theirs
    logits_stride, vocab_size, num_tiles, spare_row,
    NORMALISED: tl.constexpr, MAX_TOP: tl.constexpr, PADDED_TILES: tl.constexpr,
):  # fmt: skip
    """Join the tiles of a row."""
    sequence = tl.program_id(0).to(tl.int64)
    is_live = sequence < tl.load(packet_ptr)
    row = tl.load(packet_ptr + 8 + sequence * 8, mask=is_live, other=0)
    row = tl.where(is_live, row, spare_row).to(tl.int64)
    num_top = tl.load(records_ptr + row * 24 + 16)
    chosen = tl.load(results_ptr + 2 * sequence)
    if num_top < 0:
        return
    if chosen < 0:
        return
    most = tl.load(packet_ptr + 6)
    tile = tl.arange(0, PADDED_TILES)
    live = tile < num_tiles
    at = (sequence * num_tiles + tile) * 3
    maxima = tl.load(sums_ptr + at, mask=live, other=float("-inf"))
    largest = tl.max(maxima, axis=0)
    factor = tl.where(maxima == float("-inf"), 0.0, tl.exp(maxima - largest))
    total = tl.sum(tl.load(sums_ptr + at + 1, mask=live, other=0.0) * factor, axis=0)
    rank = tl.sum(tl.load(sums_ptr + at + 2, mask=live, other=0.0).to(tl.int32), axis=0)
    log_total = tl.log(total)
    if not NORMALISED:
        largest = largest * 0.0
        log_total = log_total * 0.0
    row_ptr = out_ptr + sequence * (2 + 2 * most)
    own = tl.load(logits_ptr + sequence * logits_stride + chosen).to(tl.float32)
    tl.store(row_ptr, (own - largest - log_total).to(tl.int32, bitcast=True))
    tl.store(row_ptr + 1, rank)
    # [PADDED_TILES, MAX_TOP]: what each tile has found
    place = tl.arange(0, MAX_TOP)
    candidate = ((sequence * num_tiles + tile) * MAX_TOP)[:, None] + place[None, :]
    is_left = live[:, None] & (place[None, :] < num_top)
    x = tl.load(top_ptr + candidate, mask=is_left, other=float("-inf"))
    token_id = tl.load(top_ids_ptr + candidate, mask=is_left, other=vocab_size)
    is_left = is_left & (token_id < vocab_size)
    for nth in range(num_top):
        best = tl.max(tl.max(tl.where(is_left, x, float("-inf")), axis=1), axis=0)
        ids = tl.where(is_left & (x == best), token_id, vocab_size)
        best_id = tl.min(tl.min(ids, axis=1), axis=0)
        tl.store(row_ptr + 2 + nth, best_id)
        tl.store(row_ptr + 2 + most + nth, (best - largest - log_total).to(tl.int32, bitcast=True))
        is_left = is_left & (token_id != best_id)


def note_logprobs(
    logits: Tensor, packet: Tensor, tables: RowTables, results: Tensor, out: Tensor, *, is_normalised: bool
) -> None:
    """Write the log-probabilities of the rows that have a token and ask for them.

    Args:
        logits: [num_seqs, vocab_size] of any floating dtype, before the edits.
        packet: the step, whose masks apply.
        tables: what each row asks for.
        results: [num_seqs, RESULT_WORDS] int32, the tokens.
        out: [at least num_seqs * (2 + 2 * MAX_TOP)] int32; row i begins at i times the width that the packet's number
            of likeliest tokens makes: log-probability, rank, tokens, and their log-probabilities.
        is_normalised: whether they are log-probabilities; else logits.
    """
    launch = note_logprobs_triton if logits.is_cuda else note_logprobs_reference
    launch(logits, packet, tables, results, out, is_normalised=is_normalised)


def note_logprobs_triton(
    logits: Tensor, packet: Tensor, tables: RowTables, results: Tensor, out: Tensor, *, is_normalised: bool
) -> None:
    """`note_logprobs` in Triton."""
    num_seqs, vocab_size = logits.shape
    tile = min(TILE, max(16, next_power_of_2(vocab_size)))
    num_tiles = -(-vocab_size // tile)
    sums = torch.empty(num_seqs, num_tiles, 3, dtype=torch.float32, device=logits.device)
    top = torch.empty(num_seqs, num_tiles, MAX_TOP, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(num_seqs, num_tiles, MAX_TOP, dtype=torch.int32, device=logits.device)
    _tiles_kernel[num_seqs, num_tiles](
        logits, packet, tables.records, results, sums, top, top_ids, logits.stride(0), vocab_size,
        tables.mask_words, tables.spare_row, MAX_TOP=MAX_TOP, TILE=tile,
    )  # fmt: skip
    _joined_kernel[num_seqs,](
        logits, packet, tables.records, results, sums, top, top_ids, out, logits.stride(0), vocab_size, num_tiles,
        tables.spare_row, NORMALISED=is_normalised, MAX_TOP=MAX_TOP, PADDED_TILES=next_power_of_2(num_tiles),
    )  # fmt: skip


def note_logprobs_reference(
    logits: Tensor, packet: Tensor, tables: RowTables, results: Tensor, out: Tensor, *, is_normalised: bool
) -> None:
    """`note_logprobs` in torch, a row at a time."""
    most = int(packet[Header.NUM_TOP])
    width = RESULT_WORDS + 2 * most
    for sequence, (row, mask) in enumerate(packet_rows(packet, int(packet[Header.NUM_ROWS]), tables)):
        num_top, chosen = int(tables.records[row, Record.NUM_TOP]), int(results[sequence, 0])
        if num_top < 0 or chosen < 0:
            continue
        x = logits[sequence].float()
        if mask is not None:
            places = torch.arange(len(x))
            barred = ((mask[places // 32] >> (places % 32).int()) & 1) == 0
            x = x.masked_fill(barred, -math.inf)
        told = x.log_softmax(dim=0) if is_normalised else x
        values, ids = told.sort(descending=True, stable=True)
        numbers = torch.zeros(width, dtype=torch.float32)
        numbers[0] = told[chosen]
        numbers[2 + most : 2 + most + num_top] = values[:num_top]
        words = numbers.view(torch.int32)
        words[1] = int((x >= x[chosen]).sum())
        words[2 : 2 + num_top] = ids[:num_top].int()
        out[sequence * width : (sequence + 1) * width] = words
