"""Kernels of a step on the GPU: inputs, edits, draws, results and log-probabilities, right and fast."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import torch
from gpu_place import Figures, Place
from torch import Tensor

from triolet.kernels.step.edits import edit_logits_reference, edit_logits_triton
from triolet.kernels.step.inputs import make_inputs_reference, make_inputs_triton
from triolet.kernels.step.layout import HEADER_WORDS, ROW_WORDS, Flag, Header, Record, RowWord
from triolet.kernels.step.logprobs import note_logprobs_reference, note_logprobs_triton
from triolet.kernels.step.results import RESULT_WORDS, note_results_reference, note_results_triton
from triolet.model.sampling.random_draw import draw_columns
from triolet.model.sampling.top_k_top_p import NO_TOP_P

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


@attrs.frozen
class Draw:
    """How the rows of a step are drawn."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None


def sampling_of(place: Place, logits: Tensor, draw: Draw) -> Callable[[], None]:
    """Return a function that hands the device the sampling of a decode step, as `DeviceSteps` does.

    Args:
        place: the device.
        logits: [num_rows, vocab_size], of the step.
        draw: the same for all rows.
    """
    from tests.kernels.step.rows import BLOCK_SIZE, make_buffers, make_step

    num_rows, vocab_size = logits.shape
    made = make_step(random.Random(5), [(10, 1)] * num_rows, vocab_size)
    records = made.tables.records
    records[:, Record.TOP_K] = vocab_size if draw.top_k is None else draw.top_k
    records.view(torch.float32)[:, Record.TEMPERATURE] = draw.temperature
    records.view(torch.float32)[:, Record.LOG_MIN_P] = -torch.inf
    records.view(torch.float64)[:, Record.TOP_P // 2] = NO_TOP_P if draw.top_p is None else draw.top_p
    rows = made.packet[HEADER_WORDS : HEADER_WORDS + ROW_WORDS * num_rows].view(num_rows, ROW_WORDS)
    rows[:, RowWord.MASK], rows[:, RowWord.IS_SAMPLED] = -1, 1
    step = made.copy(place.device)
    buffers = make_buffers(num_rows, num_rows, vocab_size, place.device)
    make_inputs_triton(step.packet, step.tables, buffers, block_size=BLOCK_SIZE, is_decode=True)
    results = torch.zeros(num_rows, RESULT_WORDS, dtype=torch.int32, device=place.device)

    def sample() -> None:
        edited = edit_logits_triton(logits, step.packet, step.tables, buffers)
        drawn_ids = draw_columns(
            buffers.work, edited.max_logits, temperature=buffers.temperature, log_min_p=buffers.log_min_p,
            top_k=buffers.top_k, top_p=buffers.top_p, answers=buffers.answers, positions=buffers.answer_positions,
        )  # fmt: skip
        note_results_triton(step.packet, step.tables, edited, drawn_ids, results)

    return sample
