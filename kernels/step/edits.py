"""Edit the logits of a step's rows, and find the largest of each: all that happens before a draw.

The order is that of `triolet.model.sampling.sampler`: the mask of a grammar; then what is allowed, min_tokens, biases,
and penalties. Whether a row has them stands in its record, so that one launch does for any mixture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from triolet.kernels._triton import kernel, next_power_of_2, unfused_kernel
from triolet.kernels.step.layout import (
    HEADER_WORDS,
    ROW_WORDS,
    Flag,
    Header,
    Record,
    RowTables,
    RowWord,
    Status,
    StepBuffers,
)

if TYPE_CHECKING:
    import triton.language as tl

TILE = 1024
"""Tokens of one program."""
LARGE = 1e30
"""Penalties move a logit no further than this."""


# A fused multiplication and addition would round a penalty otherwise than torch does.
@unfused_kernel
def _edits_kernel(
    logits_ptr,  # [num_seqs, vocab_size]
    packet_ptr,  # see `Header`
    records_ptr, ending_ids_ptr, bias_ids_ptr, biases_ptr, allowed_ptr, counts_ptr,  # see `RowTables`
    work_ptr,  # out: [num_seqs, vocab_size] float32, of the drawn rows only
    raw_maxima_ptr,  # out: [num_seqs, num_tiles] float32, before the edits but for the mask; NaN if there is one
    maxima_ptr,  # out: the same after the edits
    ids_ptr,  # out: [num_seqs, num_tiles] int32, the first token that has the latter
    logits_stride, work_stride, vocab_size, mask_words, spare_row,
    MAX_ENDING: tl.constexpr, MAX_BIASES: tl.constexpr, LARGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    RECORD: tl.constexpr = 24
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    entry = packet_ptr + 8 + sequence * 8
    is_live = sequence < tl.load(packet_ptr)
    row = tl.load(entry, mask=is_live, other=0)
    row = tl.where(is_live, row, spare_row).to(tl.int64)
    mask_index = tl.load(entry + 6, mask=is_live, other=-1).to(tl.int64)
    record_ptr = records_ptr + row * RECORD
    token_id = tile * TILE + tl.arange(0, TILE)
    live = token_id < vocab_size

    x = tl.load(logits_ptr + sequence * logits_stride + token_id, mask=live, other=float("-inf")).to(
        tl.float32
    )
    if mask_index >= 0:
        mask_ptr = packet_ptr + tl.load(packet_ptr + 5) + mask_index * mask_words
        bits = tl.load(mask_ptr + token_id // 32, mask=live, other=0)
        x = tl.where(((bits >> (token_id % 32)) & 1) == 0, float("-inf"), x)
    has_nan = tl.max((live & (x != x)).to(tl.int32), axis=0) > 0
    out = sequence * tl.num_programs(1) + tile
    raw_max = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    tl.store(raw_maxima_ptr + out, tl.where(has_nan, float("nan"), raw_max))

    flags = tl.load(record_ptr + 2)
    if flags & 1:
        bits = tl.load(allowed_ptr + row * mask_words + token_id // 32, mask=live, other=0)
        x = tl.where(((bits >> (token_id % 32)) & 1) == 0, float("-inf"), x)
    if tl.load(record_ptr + 1) < tl.load(record_ptr + 13):
        for place in range(tl.load(record_ptr + 14)):
            ending_id = tl.load(ending_ids_ptr + row * MAX_ENDING + place)
            x = tl.where(token_id == ending_id, float("-inf"), x)
    if flags & 2:
        for place in range(tl.load(record_ptr + 15)):
            bias_id = tl.load(bias_ids_ptr + row * MAX_BIASES + place)
            bias = tl.load(biases_ptr + row * MAX_BIASES + place)
            x = tl.where(token_id == bias_id, x + bias, x)
    if flags & 4:
        repetition = tl.load(record_ptr + 10).to(tl.float32, bitcast=True)
        frequency = tl.load(record_ptr + 11).to(tl.float32, bitcast=True)
        presence = tl.load(record_ptr + 12).to(tl.float32, bitcast=True)
        seen = tl.load(counts_ptr + row * vocab_size + token_id, mask=live, other=0)
        count = (seen >> 1).to(tl.float32)
        scores = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)  # towards less likely
        scores = scores - frequency * count
        scores = scores - presence * (count > 0).to(tl.float32)
        bounded = tl.minimum(tl.maximum(scores, -LARGE), LARGE)
        scores = tl.where(scores != scores, scores, bounded)
        is_changed = (seen != 0) & (x != float("-inf"))  # what was barred stays barred
        x = tl.where(is_changed, scores, x)
    if tl.load(record_ptr + 3) != 0:  # bits of the temperature: a drawn row
        tl.store(work_ptr + sequence * work_stride + token_id, x, mask=live)
    has_nan = tl.max((live & (x != x)).to(tl.int32), axis=0) > 0
    largest = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    first_id = tl.min(tl.where(live & (x == largest), token_id, vocab_size - 1), axis=0)
    tl.store(maxima_ptr + out, tl.where(has_nan, float("nan"), largest))
    tl.store(ids_ptr + out, first_id)


@kernel
def _largest_kernel(
    raw_maxima_ptr, maxima_ptr, ids_ptr,  # see `_edits_kernel`
    max_logits_ptr,  # out: [num_seqs] float32
    token_ids_ptr,  # out: [num_seqs] int64
    statuses_ptr,  # out: [num_seqs] int32
    num_tiles, vocab_size,
    PADDED_TILES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED_TILES)
    live = tile < num_tiles
    at = sequence * num_tiles + tile
    raw = tl.load(raw_maxima_ptr + at, mask=live, other=float("-inf"))
    x = tl.load(maxima_ptr + at, mask=live, other=float("-inf"))
    token_id = tl.load(ids_ptr + at, mask=live, other=0)
    raw_has_nan = tl.max((raw != raw).to(tl.int32), axis=0) > 0
    has_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    raw_largest = tl.max(tl.where(raw != raw, float("-inf"), raw), axis=0)
    largest = tl.max(tl.where(x != x, float("-inf"), x), axis=0)
    first_id = tl.min(tl.where(live & (x == largest), token_id, vocab_size - 1), axis=0)
    status = tl.where(largest == float("-inf"), 2, 0)
    status = tl.where(has_nan | (largest == float("inf")), 1, status)
    status = tl.where(raw_largest == float("-inf"), 2, status)
    status = tl.where(raw_has_nan | (raw_largest == float("inf")), 1, status)
    tl.store(max_logits_ptr + sequence, tl.where(has_nan, float("nan"), largest))
    tl.store(token_ids_ptr + sequence, first_id.to(tl.int64))
    tl.store(statuses_ptr + sequence, status)


@attrs.frozen(eq=False)
class EditedRows:
    """What is known of a step's rows when their logits are edited."""

    max_logits: Tensor  # [num_seqs] float32, the largest after the edits; NaN if there is one
    token_ids: Tensor  # [num_seqs] int64, the first token that has it; any if the row failed
    statuses: Tensor  # [num_seqs] int32, see `Status`


def edit_logits(logits: Tensor, packet: Tensor, tables: RowTables, buffers: StepBuffers) -> EditedRows:
    """Edit the logits of all rows, and leave those of drawn rows in `buffers.work`.

    Args:
        logits: [num_seqs, vocab_size] of any floating dtype, last dim contiguous; stay as they are.
        packet: the step, see `Header`.
        tables: of all rows.
        buffers: of this many sequences.
    """
    launch = edit_logits_triton if logits.is_cuda else edit_logits_reference
    return launch(logits, packet, tables, buffers)


def edit_logits_triton(logits: Tensor, packet: Tensor, tables: RowTables, buffers: StepBuffers) -> EditedRows:
    """`edit_logits` in Triton."""
    num_seqs, vocab_size = logits.shape
    tile = min(TILE, max(16, next_power_of_2(vocab_size)))
    num_tiles = -(-vocab_size // tile)
    raw_maxima, maxima = (
        torch.empty(num_seqs, num_tiles, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    ids = torch.empty(num_seqs, num_tiles, dtype=torch.int32, device=logits.device)
    _edits_kernel[num_seqs, num_tiles](
        logits, packet, tables.records, tables.ending_ids, tables.bias_ids, tables.biases, tables.allowed,
        tables.counts, buffers.work, raw_maxima, maxima, ids, logits.stride(0), buffers.work.stride(0), vocab_size,
        tables.mask_words, tables.spare_row, MAX_ENDING=tables.ending_ids.shape[1],
        MAX_BIASES=tables.bias_ids.shape[1], LARGE=LARGE, TILE=tile,
    )  # fmt: skip
    max_logits = torch.empty(num_seqs, dtype=torch.float32, device=logits.device)
    token_ids = torch.empty(num_seqs, dtype=torch.int64, device=logits.device)
    statuses = torch.empty(num_seqs, dtype=torch.int32, device=logits.device)
    _largest_kernel[num_seqs,](
        raw_maxima, maxima, ids, max_logits, token_ids, statuses, num_tiles, vocab_size,
        PADDED_TILES=next_power_of_2(num_tiles),
    )  # fmt: skip
    return EditedRows(max_logits, token_ids, statuses)


def edit_logits_reference(
    logits: Tensor, packet: Tensor, tables: RowTables, buffers: StepBuffers
) -> EditedRows:
    """`edit_logits` in torch, a row at a time."""
    num_seqs = len(logits)
    max_logits = torch.empty(num_seqs, dtype=torch.float32)
    token_ids = torch.empty(num_seqs, dtype=torch.int64)
    statuses = torch.empty(num_seqs, dtype=torch.int32)
    for sequence, (row, mask) in enumerate(packet_rows(packet, num_seqs, tables)):
        raw = logits[sequence].float()
        if mask is not None:
            raw = raw.masked_fill(~_bits(mask, tables.vocab_size), -math.inf)
        edited = _edited(raw, row, tables)
        if float(tables.records[row].view(torch.float32)[Record.TEMPERATURE]) > 0:
            buffers.work[sequence] = edited
        largest, token_id = edited.max(dim=0)  # NaN is larger than everything
        max_logits[sequence], token_ids[sequence] = largest, token_id
        statuses[sequence] = _status(float(raw.max())) or _status(float(largest))
    return EditedRows(max_logits, token_ids, statuses)


def packet_rows(packet: Tensor, num_seqs: int, tables: RowTables) -> list[tuple[int, Tensor | None]]:
    """Return the row and the mask of each sequence of a step; for the references."""
    words = packet.tolist()
    rows: list[tuple[int, Tensor | None]] = []
    for sequence in range(num_seqs):
        at = HEADER_WORDS + ROW_WORDS * sequence
        if sequence >= words[Header.NUM_ROWS]:
            rows.append((tables.spare_row, None))
            continue
        index = words[at + RowWord.MASK]
        first = words[Header.FIRST_MASK] + index * tables.mask_words
        rows.append((words[at], None if index < 0 else packet[first : first + tables.mask_words]))
    return rows


def _bits(mask: Tensor, vocab_size: int) -> Tensor:
    # [mask_words] int32 to [vocab_size] bool
    places = torch.arange(32, dtype=torch.int32)
    return (((mask[:, None] >> places) & 1) != 0).flatten()[:vocab_size]


def _edited(raw: Tensor, row: int, tables: RowTables) -> Tensor:
    x = raw.clone()
    record = tables.records[row].tolist()
    flags = Flag(record[Record.FLAGS])
    if Flag.ALLOWED in flags:
        x.masked_fill_(~_bits(tables.allowed[row], tables.vocab_size), -math.inf)
    if record[Record.POSITION] < record[Record.MIN_TOKENS]:
        x[tables.ending_ids[row, : record[Record.NUM_ENDING]].long()] = -math.inf
    if Flag.BIAS in flags:
        count = record[Record.NUM_BIASES]
        x[tables.bias_ids[row, :count].long()] += tables.biases[row, :count]
    if Flag.PENALTIES in flags:
        numbers = tables.records[row].view(torch.float32)
        repetition, frequency, presence = numbers[Record.REPETITION : Record.PRESENCE + 1]
        seen = tables.counts[row]
        counts = (seen >> 1).float()
        scores = torch.where(x > 0, x / repetition, x * repetition)
        scores = scores - frequency * counts - presence * (counts > 0)
        x = torch.where((seen != 0) & (x != -math.inf), scores.clamp(-LARGE, LARGE), x)
    return x


def _status(max_logit: float) -> Status:
    if math.isfinite(max_logit):
        return Status.CHOSEN
    return Status.NOTHING_ALLOWED if max_logit == -math.inf else Status.NOT_NUMBERS
