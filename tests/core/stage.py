"""A scheduler on a stage of its own: the model answers what the test says, and every count is checked at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.core.make import make_request
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.params import SamplingParams
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import (
    PlanRow,
    RowFailure,
    RowResult,
    RowStart,
    SampledToken,
    StepPlan,
    StepResult,
)

BLOCK_SIZE = 4
NOTHING: Mapping[str, int] = {}

Share = tuple[str, int, int]  # whose, from which token on, how many tokens


def make_config(**fields: Any) -> SchedulerConfig:
    defaults: dict[str, Any] = {
        "num_blocks": 16,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
        "cache_key": b"secret",
    }
    return SchedulerConfig(**(defaults | fields))


class Stage:
    """One scheduler, and what a runner would remember of its plans."""

    def __init__(self, **config: Any) -> None:
        self.journal = Journal()
        self.scheduler = Scheduler(make_config(**config), self.journal)
        self.pool = self.scheduler.pool
        self.rows: dict[int, RowStart] = {}
        self.now_s = 0.0

    def add(
        self,
        name: str,
        prompt: int | Sequence[int],
        *,
        max_tokens: int = 32,
        params: dict[str, Any] | None = None,
        **fields: Any,
    ) -> JournalEntry:
        """Queue a request; a prompt given by its length has nothing in common with any other."""
        if isinstance(prompt, int):
            first = 1000 * (len(self.journal) + 1) + 100 * len(name) + ord(name[0])
            prompt = range(first, first + prompt)
        request = make_request(
            prompt,
            request_id=name,
            params=SamplingParams(**{"max_tokens": max_tokens} | (params or {})),
            max_tokens=max_tokens,
            **fields,
        )
        entry = self.journal.open(request)
        self.scheduler.add_arrivals()
        return entry

    def begin(self) -> StepPlan | None:
        """Plan a step, and follow it as a runner does: forget rows, then fill rows that must be free."""
        plan = self.scheduler.plan_step(self.now_s)
        self.scheduler.check()
        if plan is not None:
            for row_id in plan.ended:
                self.rows.pop(row_id, None)
            for start in plan.starts:
                assert start.row_id not in self.rows, "a row is filled that was not emptied"
                self.rows[start.row_id] = start
        return plan

    def name(self, row: PlanRow) -> str:
        return self.rows[row.row_id].request_id

    def shares(self, plan: StepPlan | None) -> list[Share]:
        return [] if plan is None else [(self.name(row), row.start, row.num_tokens) for row in plan.rows]

    def result(
        self, plan: StepPlan, tokens: Mapping[str, int] = NOTHING, *, failing: Sequence[str] = ()
    ) -> StepResult:
        """What the model makes of a plan: the token ids that the test says, or 9."""
        results: list[RowResult] = []
        for row in plan.rows:
            start = self.rows[row.row_id]
            if row.sample and start.request_id in failing:
                results.append(RowFailure(start.request_id, start.epoch, "planted"))
            elif row.sample:
                position = row.start + row.num_tokens - len(start.prompt_token_ids)
                token_id = tokens.get(start.request_id, 9)
                results.append(SampledToken(start.request_id, start.epoch, position, token_id))
        return StepResult(plan.step_id, tuple(results))

    def end(
        self, plan: StepPlan, tokens: Mapping[str, int] = NOTHING, *, failing: Sequence[str] = ()
    ) -> None:
        self.scheduler.apply(self.result(plan, tokens, failing=failing), self.now_s)
        self.scheduler.check()

    def step(self, **tokens: int) -> list[Share]:
        """Run one whole step; return the requests that it computed."""
        plan = self.begin()
        if plan is not None:
            self.end(plan, tokens)
        return self.shares(plan)

    def in_flight(self) -> StepPlan:
        """Begin a step that has something to do."""
        plan = self.begin()
        assert plan is not None
        return plan

    def waiting(self) -> list[str]:
        return [sequence.entry.request.request_id for sequence in self.scheduler._queues.waiting]


def crowded_stage() -> Stage:
    """Two requests that run, and one that waits for room in a step."""
    stage = Stage(max_num_seqs=3, max_num_batched_tokens=10)
    for name in "abc":
        stage.add(name, 2 if name == "c" else 5)
    stage.step()
    assert stage.waiting() == ["c"]
    return stage
