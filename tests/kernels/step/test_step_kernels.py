"""Kernels of a step in Triton against their references in torch."""

from __future__ import annotations

import math
import random

import attrs
import pytest
import torch
from torch import Tensor

from tests.kernels.step.rows import BLOCK_SIZE, make_buffers, make_step
from tests.kernels.targets import Target, on_every_triton_target
from triolet.kernels.step.edits import (
    EditedRows,
    edit_logits_reference,
    edit_logits_triton,
    packet_rows,
)
from triolet.kernels.step.inputs import make_inputs_reference, make_inputs_triton
from triolet.kernels.step.layout import Flag, Header, Record, StepBuffers
from triolet.kernels.step.logprobs import note_logprobs_reference, note_logprobs_triton
from triolet.kernels.step.results import note_results_reference, note_results_triton
from triolet.kernels.step.writes import apply_writes_reference, apply_writes_triton

pytest.importorskip("triton")
ALL_FLAGS = Flag.ALLOWED | Flag.BIAS | Flag.PENALTIES
DECODES = [(start, 1) for start in (0, 3, 4, 7, 150)]
MIXED = [(0, 3), (17, 1), (5, 140), (8, 8), (0, 1)]


def assert_same(ours: StepBuffers, theirs: StepBuffers) -> None:
    for field in attrs.fields(StepBuffers):
        torch.testing.assert_close(
            getattr(ours, field.name).cpu(), getattr(theirs, field.name), rtol=0, atol=0, msg=field.name
        )


@on_every_triton_target
@pytest.mark.parametrize("num_padded", [0, 1, 3])
@pytest.mark.parametrize("lens", [DECODES, DECODES[:1], MIXED], ids=["decodes", "one", "mixed"])
def test_inputs_are_those_of_the_reference(
    target: Target, lens: list[tuple[int, int]], num_padded: int
) -> None:
    step = make_step(random.Random(len(lens) + num_padded), lens, 50)
    is_decode = lens is not MIXED
    num_tokens = sum(query_len for _, query_len in lens) + num_padded * (1 if is_decode else 50)
    sizes = num_tokens, len(lens) + num_padded, 50
    theirs, ours = make_buffers(*sizes), make_buffers(*sizes, target.device)
    make_inputs_reference(step.packet, step.tables, theirs, block_size=BLOCK_SIZE, is_decode=is_decode)
    there = step.copy(target.device)
    make_inputs_triton(there.packet, there.tables, ours, block_size=BLOCK_SIZE, is_decode=is_decode)
    assert_same(ours, theirs)


def test_inputs_of_known_rows_are_these() -> None:
    step = make_step(random.Random(1), [(6, 1), (2, 3)], 50)
    buffers = make_buffers(6, 3, 50)
    make_inputs_reference(step.packet, step.tables, buffers, block_size=BLOCK_SIZE, is_decode=False)
    tables, (first, second) = step.tables, step.row_ids
    said = step.packet[int(step.packet[Header.FIRST_TOKEN]) :]
    last_token = int(tables.records[first, Record.LAST_TOKEN])
    assert buffers.token_ids.tolist() == [last_token, *said[1:4].tolist(), 0, 0]
    assert buffers.positions.tolist() == [6, 2, 3, 4, 0, 0]
    blocks = tables.block_tables.tolist()
    slots = [(blocks[first][1], 2), (blocks[second][0], 2), (blocks[second][0], 3), (blocks[second][1], 0)]
    assert buffers.slots.tolist() == [4 * block + offset for block, offset in slots] + [999 * 4] * 2
    assert buffers.cu_query_lens.tolist() == [0, 1, 4, 4]
    assert buffers.seq_lens.tolist() == [7, 5, 0]
    assert buffers.last_tokens.tolist() == [0, 3, 3]


@on_every_triton_target
@pytest.mark.parametrize("num_writes", [0, 1, 300, 5000])
def test_writes_change_their_words_and_no_other(target: Target, num_writes: int) -> None:
    step = make_step(random.Random(num_writes), [(0, 1)], 2500)
    before = step.tables.words.clone()
    words = torch.randperm(len(before))[:num_writes].int()
    values = torch.randint(-(2**31), 2**31 - 1, (num_writes,)).int()
    header = torch.zeros(8, dtype=torch.int32)
    header[Header.NUM_WRITES], header[Header.FIRST_WRITE] = num_writes, 8
    packet = torch.cat([header, torch.stack([words, values], dim=1).flatten()])
    expected = before.clone()
    expected[words.long()] = values
    there = step.copy(target.device)
    apply_writes_triton(packet.to(target.device), there.tables)
    apply_writes_reference(packet, step.tables)
    assert torch.equal(there.tables.words.cpu(), expected)
    assert torch.equal(step.tables.words, expected)


def make_logits(num_seqs: int, vocab_size: int, target: Target) -> Tensor:
    logits = (torch.randn(num_seqs, vocab_size) * 4).to(target.dtype)
    logits[::2] = logits[::2].round()  # ties
    logits[0, 0] = math.nan
    if num_seqs > 3:
        logits[1] = -math.inf
        logits[2, -1] = math.inf
    padded = torch.full((num_seqs, vocab_size + 3), math.nan, dtype=target.dtype)
    padded[:, :vocab_size] = logits
    return padded.to(target.device)[:, :vocab_size]


@on_every_triton_target
@pytest.mark.parametrize(("vocab_size", "num_seqs"), [(20, 12), (1024, 5), (3003, 5), (300, 16)])
def test_edits_are_those_of_the_reference_to_the_bit(target: Target, vocab_size: int, num_seqs: int) -> None:
    step = make_step(random.Random(vocab_size), [(4, 1)] * (num_seqs - 2), vocab_size, flags=ALL_FLAGS)
    logits = make_logits(num_seqs, vocab_size, target)
    theirs, ours = (make_buffers(num_seqs, num_seqs, vocab_size, each) for each in ("cpu", target.device))
    expected = edit_logits_reference(logits.cpu(), step.packet, step.tables, theirs)
    there = step.copy(target.device)
    edited = edit_logits_triton(logits, there.packet, there.tables, ours)
    torch.testing.assert_close(ours.work.cpu(), theirs.work, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(edited.max_logits.cpu(), expected.max_logits, rtol=0, atol=0, equal_nan=True)
    assert edited.statuses.tolist() == expected.statuses.tolist()
    live = expected.statuses == 0
    assert live.any()
    assert torch.equal(edited.token_ids.cpu()[live], expected.token_ids[live])
    assert edited.token_ids.min() >= 0
    assert edited.token_ids.max() < vocab_size


@on_every_triton_target
def test_results_and_the_tables_after_them_are_those_of_the_reference(target: Target) -> None:
    vocab_size, num_seqs = 40, 30
    step = make_step(random.Random(5), [(4, 1)] * (num_seqs - 2), vocab_size, flags=ALL_FLAGS)
    there = step.copy(target.device)
    largest, drawn = torch.randint(vocab_size, (2, num_seqs))
    edited = EditedRows(torch.randn(num_seqs), largest, torch.randint(3, (num_seqs,)).int())
    on_device = EditedRows(*(each.to(target.device) for each in attrs.astuple(edited, recurse=False)))
    theirs, ours = (torch.full((num_seqs, 2), 77, dtype=torch.int32) for _ in range(2))
    ours = ours.to(target.device)
    before = step.tables.words.clone()
    note_results_reference(step.packet, step.tables, edited, drawn, theirs)
    note_results_triton(there.packet, there.tables, on_device, drawn.to(target.device), ours)
    assert torch.equal(ours.cpu(), theirs)
    assert torch.equal(there.tables.words.cpu(), step.tables.words)
    num_chosen = int(((theirs[:, 0] >= 0) & (theirs[:, 1] == 0)).sum())
    assert num_chosen > 5
    assert not torch.equal(before, step.tables.words)


@on_every_triton_target
@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize(("vocab_size", "num_seqs", "num_top"), [(20, 9, 3), (5000, 4, 5), (50, 2, 32)])
def test_logprobs_are_those_of_the_reference(
    target: Target, vocab_size: int, num_seqs: int, num_top: int, is_normalised: bool
) -> None:
    roll = random.Random(num_top)
    step = make_step(roll, [(4, 1)] * num_seqs, vocab_size, num_top=num_top)
    there = step.copy(target.device)
    logits = (torch.randn(num_seqs, vocab_size) * 3).to(target.dtype)
    logits[::2] = logits[::2].round()
    results = torch.zeros(num_seqs, 2, dtype=torch.int32)
    for sequence, (_, mask) in enumerate(packet_rows(step.packet, num_seqs, step.tables)):
        words = [-1] * step.tables.mask_words if mask is None else mask.tolist()
        allowed = [
            i for i in range(vocab_size) if words[i // 32] >> (i % 32) & 1
        ]  # what is sampled is allowed
        results[sequence, 0] = roll.choice([-1, *allowed])
    most = int(step.packet[Header.NUM_TOP])
    assert most == num_top
    theirs, ours = (torch.full((num_seqs, 2 + 2 * most), 77, dtype=torch.int32) for _ in range(2))
    there_out = ours.to(target.device)
    note_logprobs_reference(
        logits, step.packet, step.tables, results, theirs.view(-1), is_normalised=is_normalised
    )
    note_logprobs_triton(
        logits.to(target.device), there.packet, there.tables, results.to(target.device), there_out.view(-1),
        is_normalised=is_normalised,
    )  # fmt: skip
    ours = there_out.cpu()
    for row, found, expected in zip(step.row_ids, ours, theirs, strict=True):
        asked = int(step.tables.records[row, Record.NUM_TOP])
        if int(expected[1]) == 77:
            assert torch.equal(found, expected)  # nothing is written for a row that does not ask
            continue
        assert found[1 : 2 + asked].tolist() == expected[1 : 2 + asked].tolist()
        numbers, truth = found.view(torch.float32), expected.view(torch.float32)
        places = [0, *range(2 + most, 2 + most + asked)]
        torch.testing.assert_close(numbers[places], truth[places], rtol=2e-6, atol=2e-6)
    assert (theirs[:, 1] != 77).any()
