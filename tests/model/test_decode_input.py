"""The short way to the input of a step of decodes gives what the long way gives."""

from __future__ import annotations

import pytest
import torch

from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PlanRow, RowStart, StepPlan
from triolet.model import input_batch
from triolet.model.input_batch import RowTable, StepInput


def make_table(lengths: list[int]) -> tuple[RowTable, list[StepPlan]]:
    """A table of rows with prompts of these lengths, and plans: a prefill, and forty decodes of most of them."""
    table = RowTable(
        num_blocks=512,
        block_size=4,
        max_num_seqs=8,
        max_model_len=100,
        vocab_size=1000,
        device=torch.device("cpu"),
    )
    blocks = {row: tuple(range(40 * row, 40 * row + 25)) for row in range(len(lengths))}
    starts = tuple(
        RowStart(
            row_id=row,
            request_id=f"r{row}",
            epoch=row + 1,
            prompt_token_ids=tuple(range(row, row + length)),
            output_token_ids=(),
            params=SamplingParams(),
            seed=row,
            ending_token_ids=frozenset(),
        )
        for row, length in enumerate(lengths)
    )
    prefill = tuple(PlanRow(row, 0, length, blocks[row], True) for row, length in enumerate(lengths))
    plans = [StepPlan(1, (), starts, prefill)]
    for step in range(40):
        rows = (row for row in range(len(lengths)) if row != 1 or step < 20)
        decodes = tuple(PlanRow(row, lengths[row] + step, 1, (), True) for row in rows)
        plans.append(StepPlan(2 + step, (), (), decodes))
    return table, plans


def inputs_of(lengths: list[int]) -> list[StepInput]:
    """Step by step, each sampled row getting some token."""
    table, plans = make_table(lengths)
    inputs = []
    for plan in plans:
        inputs.append(table.take(plan))
        for row in inputs[-1].sampled:
            row.append((7 * plan.step_id + row.epoch) % 1000)
    return inputs


def parts(step: StepInput) -> list[object]:
    """What a model and the runner read of it."""
    attention = step.attention
    tensors = (
        *(step.token_ids, step.positions, step.logits_indices, attention.cu_query_lens),
        *(attention.seq_lens, attention.block_tables, attention.slot_mapping),
    )
    values: list[object] = [(tensor.dtype, tensor.tolist()) for tensor in tensors]
    names = [row.request_id for row in step.sampled]
    return [*values, attention.query_lens_host, attention.seq_lens_host, names, step.prompted]


@pytest.mark.parametrize("lengths", [[5], [1, 9, 30, 4]])
def test_the_short_way_gives_what_the_long_way_gives(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = list(map(parts, inputs_of(lengths)))
    monkeypatch.setattr(input_batch, "_is_plain_decode", lambda planned, row: False)
    assert short == list(map(parts, inputs_of(lengths)))
