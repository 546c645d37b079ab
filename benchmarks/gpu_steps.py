"""Kernels of a step on the GPU against their references in torch: inputs, edits, results and log-probabilities."""

from __future__ import annotations

import random

import torch
from gpu_place import Figures, Place
from torch import Tensor

from triolet.kernels.step.edits import edit_logits_reference, edit_logits_triton
from triolet.kernels.step.inputs import make_inputs_reference, make_inputs_triton
from triolet.kernels.step.layout import Flag, Header
from triolet.kernels.step.logprobs import note_logprobs_reference, note_logprobs_triton
from triolet.kernels.step.results import RESULT_WORDS, note_results_reference, note_results_triton

ALL_FLAGS = Flag.ALLOWED | Flag.BIAS | Flag.PENALTIES


def compare_step_kernels(place: Place, dtype: torch.dtype) -> Figures:
    """Compute a decode step of rows of all kinds in both ways: integers and edited logits must be equal to the bit."""
    from tests.kernels.step.rows import BLOCK_SIZE, make_buffers, make_step

    num_rows, vocab_size = (6, 300) if place.dry_run else (200, 20_000)
    lens = [(7 * row % 150, 1) for row in range(num_rows)]
    step = make_step(random.Random(3), lens, vocab_size, flags=ALL_FLAGS, num_top=5)
    there = step.copy(place.device)
    expected, buffers = (make_buffers(num_rows, num_rows, vocab_size, each) for each in ("cpu", place.device))
    make_inputs_reference(step.packet, step.tables, expected, block_size=BLOCK_SIZE, is_decode=True)
    make_inputs_triton(there.packet, there.tables, buffers, block_size=BLOCK_SIZE, is_decode=True)
    logits = (torch.randn(num_rows, vocab_size) * 4).to(dtype)
    on_device = logits.to(place.device)
    truth = edit_logits_reference(logits, step.packet, step.tables, expected)
    edited = edit_logits_triton(on_device, there.packet, there.tables, buffers)
    results, ours = (
        torch.zeros(num_rows, RESULT_WORDS, dtype=torch.int32, device=each) for each in ("cpu", place.device)
    )
    drawn = truth.token_ids
    note_results_reference(step.packet, step.tables, truth, drawn, results)
    note_results_triton(there.packet, there.tables, edited, drawn.to(place.device), ours)
    width = RESULT_WORDS + 2 * int(step.packet[Header.NUM_TOP])
    told, our_told = (
        torch.zeros(num_rows, width, dtype=torch.int32, device=each) for each in ("cpu", place.device)
    )
    note_logprobs_reference(logits, step.packet, step.tables, results, told.view(-1), is_normalised=True)
    note_logprobs_triton(on_device, there.packet, there.tables, ours, our_told.view(-1), is_normalised=True)
    names = ("token_ids", "positions", "slots", "seq_lens", "block_tables", "answers", "work")
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        name: (getattr(buffers, name), getattr(expected, name)) for name in names
    }
    pairs |= {"tokens": (ours, results), "tables": (there.tables.words, step.tables.words)}
    other = [name for name, (each, wanted) in pairs.items() if not torch.equal(each.cpu(), wanted)]
    numbers, wanted = our_told.cpu().view(torch.float32)[:, 0], told.view(torch.float32)[:, 0]
    error = (numbers - wanted).abs().max().item()
    return {"rows": num_rows, "differ": other, "logprob_error": error, "passed": not other and error < 1e-4}
