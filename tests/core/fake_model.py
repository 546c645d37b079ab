"""A model without numbers: its KV cache holds token ids, so that a wrong block, slot or position shows as a
wrong token.

The next token is a hash of everything the request's block table leads to. Whoever frees a block too early,
shares the wrong one, skips a token or computes one twice gets a different answer than `expected_answer`,
which looks at no block at all.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence

import attrs

from triolet.core.plan import PlanRow, RowFailure, RowStart, SampledToken, StepPlan, StepResult

POISON = -1


def next_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    digest = hashlib.blake2b(array("q", [seed, *token_ids]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_answer(
    prompt: Sequence[int], seed: int, num_tokens: int, vocab_size: int, ending: Iterable[int] = ()
) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed, vocab_size))
        if tokens[-1] in set(ending):
            break
    return tokens[len(prompt) :]


@attrs.define
class _Row:
    start: RowStart
    tokens: list[int]
    block_table: list[int]


class FakeModel:
    """Executes plans the way a runner does; `cache[block_id][offset]` is a token id."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int = 50) -> None:
        self.cache = [[POISON] * block_size for _ in range(num_blocks)]
        self.block_size, self.vocab_size = block_size, vocab_size
        self.rows: dict[int, _Row] = {}
        self.failing: set[str] = set()
        self.most_tokens: int | None = None  # a step with more finds no memory

    def execute(self, plan: StepPlan) -> StepResult:
        for row_id in plan.ended:
            self.rows.pop(row_id, None)
        for start in plan.starts:
            self.rows[start.row_id] = _Row(start, [*start.prompt_token_ids, *start.output_token_ids], [])
        for planned in plan.rows:
            self.rows[planned.row_id].block_table += planned.new_block_ids
        if self.most_tokens is not None and plan.num_tokens > self.most_tokens:
            return StepResult(plan.step_id, (), out_of_memory="planted")
        for row in plan.rows:
            self._write(row)
        sampled = [self._sample(self.rows[planned.row_id]) for planned in plan.rows if planned.sample]
        tokens = tuple(token for token in sampled if isinstance(token, SampledToken))
        failures = tuple(failure for failure in sampled if isinstance(failure, RowFailure))
        return StepResult(plan.step_id, tokens, failures)

    def _write(self, planned: PlanRow) -> None:
        row = self.rows[planned.row_id]
        assert planned.num_tokens > 0
        for position in range(planned.start, planned.start + planned.num_tokens):
            self.cache[row.block_table[position // self.block_size]][position % self.block_size] = row.tokens[
                position
            ]

    def _sample(self, row: _Row) -> SampledToken | RowFailure:
        start = row.start
        if start.request_id in self.failing:
            return RowFailure(start.request_id, start.epoch, "planted")
        size = self.block_size
        read = [self.cache[row.block_table[p // size]][p % size] for p in range(len(row.tokens))]
        token_id = next_token(read, start.seed, self.vocab_size)
        position = len(row.tokens) - len(start.prompt_token_ids)
        row.tokens.append(token_id)
        return SampledToken(start.request_id, start.epoch, position, token_id)
