"""One engine without actors: what goes in by `add`, and what comes out by `advance`."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, cast

import attrs
import pytest

from tests.core.fake_model import FakeModel, expected_answer, expected_vector
from tests.core.make import make_request
from tests.core.stage import make_config
from triolet.core.engine_core import EngineCore, OpenOutput
from triolet.core.journal import Journal, JournalEntry
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import FinishReason, RequestTask
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.core.scheduling.admission import Admission
from triolet.core.scheduling.scheduler import SchedulerConfig
from triolet.core.step_plan import PooledVectors, StepPlan
from triolet.errors import RequestFailed

VOCAB = 50
CONFIG = make_config()


class Driver:
    """The smallest driver of a core: plan, compute, apply, advance."""

    def __init__(self, config: SchedulerConfig = CONFIG) -> None:
        self.finished: list[tuple[int, ...]] = []  # as `on_finish` was told
        self.num_notified = 0
        self.core = EngineCore(Admission(Journal(), 4, 4, 1000), self.finished.append)
        self.config = config
        self.start_over()

    def start_over(self) -> None:
        self.core.is_scheduling = True
        self.core.new_scheduler(self.config)
        self.model = FakeModel(self.config.num_blocks, self.config.block_size, VOCAB)

    def add(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> OpenOutput:
        [output] = self.core.add(
            [make_request(prompt, request_id=name, **fields)], arrival_time=0.0, notify=self._notify
        )
        self.core.add_arrivals()
        return output

    def _notify(self) -> None:
        self.num_notified += 1

    def plan(self) -> StepPlan:
        plan = self.core.plan_step(0.0)
        assert plan is not None
        return plan

    def step(self) -> None:
        self.core.apply(self.model.execute(self.plan()), 0.0)
        self.advance()

    def advance(self) -> None:
        for serial in self.core.take_progress():
            self.core.advance(serial, 0.0)

    def run(self) -> None:
        while self.core.journal:
            self.step()

    def blocks_in_use(self) -> int:
        return self.core.statistics().kv_blocks_in_use


def last(output: OpenOutput) -> RequestOutput:
    return output.processor.collector.take()


def test_what_is_added_is_answered_step_by_step_and_its_reader_is_notified() -> None:
    driver = Driver()
    output = driver.add("r", max_tokens=5)
    for num_tokens in range(1, 6):
        driver.step()
        assert output.processor.collector.num_tokens == num_tokens
        assert driver.num_notified == num_tokens
    assert last(output).outputs[0].token_ids == tuple(expected_answer((1, 2, 3), 0, 5, VOCAB))
    assert (driver.core.outputs, len(driver.core.journal), driver.blocks_in_use()) == ({}, 0, 0)
    assert driver.core.statistics().num_requests_ended == {"length": 1}


POOLING = PoolingParams(task="embed")


def test_a_pooled_request_gets_its_vector_and_no_token_and_is_counted_once() -> None:
    driver = Driver()
    output = driver.add("r", pooling=POOLING)
    assert output.entry.request.task is RequestTask.POOL
    driver.step()
    entry = output.entry
    assert (entry.output_token_ids, entry.finish_reason) == ([], FinishReason.STOP)
    assert [part.values for part in entry.pooled] == [expected_vector((1, 2, 3))]
    stats = driver.core.journal.stats.take()
    assert stats is not None
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (3, 0)
    assert driver.core.statistics().num_requests_ended == {FinishReason.STOP: 1}


def test_a_pooled_request_that_loses_its_scheduler_after_its_result_ends_and_is_not_computed_again() -> None:
    driver = Driver()
    output = driver.add("r", pooling=POOLING)
    result = driver.model.execute(driver.plan())
    [part] = result.rows
    assert isinstance(part, PooledVectors)
    assert driver.core.journal.commit_pooled(
        output.entry, part
    )  # and the scheduler crashes before the request ends
    driver.start_over()
    assert output.entry.finish_reason is FinishReason.STOP
    assert driver.core.plan_step(0.0) is None
    driver.advance()
    stats = driver.core.journal.stats.take()
    assert stats is not None
    assert stats.num_prompt_tokens == 3
    assert len(stats.finished_requests) == 1


def test_a_late_vector_of_an_earlier_residency_is_dropped() -> None:
    driver = Driver()
    output = driver.add("r", pooling=POOLING)
    late = driver.model.execute(driver.plan())
    driver.start_over()
    driver.core.apply(late, 0.0)
    assert not output.entry.pooled
    driver.step()
    assert [part.values for part in output.entry.pooled] == [expected_vector((1, 2, 3))]


def test_no_step_is_planned_while_one_is_in_flight_and_a_late_result_changes_nothing() -> None:
    driver = Driver()
    output = driver.add("r", max_tokens=5)
    late = driver.model.execute(driver.plan())
    assert driver.core.plan_step(0.0) is None
    driver.start_over()
    driver.core.apply(late, 0.0)
    assert output.entry.output_token_ids == []
    driver.run()
    assert output.entry.output_token_ids == expected_answer((1, 2, 3), 0, 5, VOCAB)


def test_the_further_answers_to_a_prompt_wait_for_the_first_token_of_the_first() -> None:
    driver = Driver()
    requests = [make_request((1, 2, 3), request_id=f"{seed}_r", seed=seed, max_tokens=2) for seed in (5, 6)]
    first, second = driver.core.add(requests, arrival_time=0.0)
    driver.core.add_arrivals()
    driver.step()
    assert (len(first.entry.output_token_ids), len(second.entry.output_token_ids)) == (1, 0)
    driver.run()
    assert second.entry.output_token_ids == expected_answer((1, 2, 3), 6, 2, VOCAB)


def test_a_request_that_is_finished_has_given_its_blocks_back_and_what_it_has_is_delivered() -> None:
    driver = Driver()
    output, other = driver.add("r"), driver.add("other", (4, 5), max_tokens=8)
    driver.step()
    driver.core.finish(output.entry.serial, FinishReason.ABORT)
    assert driver.blocks_in_use() == 1
    assert driver.finished == [()]  # the scheduler reports it with its next progress
    driver.core.finish(output.entry.serial, FinishReason.ABORT)
    assert driver.finished == [()]
    driver.advance()
    ended = last(output)
    assert (ended.finish_reason, len(ended.outputs[0].token_ids)) == (FinishReason.ABORT, 1)
    driver.run()
    assert other.entry.finish_reason is FinishReason.LENGTH


def test_blocks_of_the_step_in_flight_are_free_when_it_ends() -> None:
    driver = Driver()
    output = driver.add("r")
    result = driver.model.execute(driver.plan())
    driver.core.finish(output.entry.serial, FinishReason.ABORT)
    assert driver.core.statistics().kv_blocks_quarantined == 1
    driver.core.apply(result, 0.0)
    assert driver.core.statistics().kv_blocks_quarantined == 0
    assert output.entry.output_token_ids == []


def test_what_is_finished_while_there_is_no_scheduler_is_reported_at_once_and_not_queued_again() -> None:
    driver = Driver()
    output, other = driver.add("r"), driver.add("other", max_tokens=2)
    driver.core.is_scheduling = False
    driver.core.finish(output.entry.serial, FinishReason.ABORT)
    assert driver.finished == [(output.entry.serial,)]
    assert driver.core.advance(output.entry.serial, 0.0)
    driver.start_over()
    driver.run()
    assert output.entry.output_token_ids == []
    assert other.entry.finish_reason is FinishReason.LENGTH


def test_a_new_scheduler_goes_on_where_the_journal_is_and_no_token_is_given_twice() -> None:
    driver = Driver()
    outputs = [driver.add(f"r{seed}", (seed, 2), seed=seed, max_tokens=6) for seed in range(3)]
    for _ in range(3):
        driver.step()
    driver.start_over()
    assert driver.blocks_in_use() == 0
    driver.run()
    for seed, output in enumerate(outputs):
        assert output.entry.output_token_ids == expected_answer((seed, 2), seed, 6, VOCAB)


def test_what_a_step_costs_is_known_to_the_next_scheduler() -> None:
    """Otherwise the first steps after a restart have no bound, just when the others of its streams return."""
    driver = Driver()
    driver.core.scheduler._token_budget.costs.token_s = 0.125  # type: ignore[union-attr]
    driver.start_over()
    assert driver.core.scheduler._token_budget.costs.token_s == 0.125  # type: ignore[union-attr]


def test_after_one_crash_everything_is_computed_again() -> None:
    driver = Driver()
    output = driver.add("r", max_tokens=3)
    outcome = driver.core.fail_step(driver.plan(), OSError("planted"))
    assert outcome is not None
    assert outcome.culprit is None
    assert driver.core.recovery.has_runner_failed
    driver.start_over()
    driver.run()
    assert output.entry.finish_reason is FinishReason.LENGTH


def test_a_request_that_crashes_the_runner_each_time_fails_alone_with_the_cause() -> None:
    driver = Driver()
    bad, good = driver.add("bad", (7, 7, 7)), driver.add("good", max_tokens=3)
    crash = OSError("planted")
    for _ in range(10):
        if bad.entry.finish_reason is not None:
            break
        plan = driver.plan()
        ids = {start.request_id for start in plan.starts}
        if "bad" in ids:
            driver.core.fail_step(plan, crash)
            driver.start_over()
        else:
            driver.core.apply(driver.model.execute(plan), 0.0)
    assert bad.entry.finish_reason is FinishReason.ERROR
    assert isinstance(bad.error, RequestFailed)
    assert bad.error.__cause__ is crash
    assert driver.core.take_uncounted_restarts() > 0
    assert driver.core.take_uncounted_restarts() == 0
    driver.run()
    assert good.entry.output_token_ids == expected_answer((1, 2, 3), 0, 3, VOCAB)


def test_a_crash_in_a_plan_that_is_not_in_flight_blames_no_request() -> None:
    driver = Driver()
    driver.add("r")
    plan = driver.plan()
    driver.start_over()
    assert driver.core.fail_step(plan, OSError("planted")) is None


def test_a_request_out_of_time_ends_with_the_next_plan() -> None:
    driver = Driver()
    output = driver.add("r", deadline_s=5.0)
    driver.step()
    assert driver.core.next_look_s() == 5.0
    assert driver.core.plan_step(5.0) is None
    assert output.entry.finish_reason is FinishReason.DEADLINE
    assert driver.core.next_look_s() == float("inf")


def test_an_output_that_fails_raises_the_first_error_and_ends_its_request() -> None:
    driver = Driver()
    output, error = driver.add("r"), RequestFailed("r", "planted")
    driver.step()
    driver.core.fail(output.entry.serial, error, 0.0)
    driver.core.fail(output.entry.serial, RequestFailed("r", "another"), 0.0)
    assert output.error is error
    assert driver.blocks_in_use() == 0
    assert driver.core.statistics().num_requests_ended == {"error": 1}


def test_counts_of_an_engine_are_those_of_its_requests_and_steps() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    for name in ("runs", "waits", "waits too"):
        driver.add(name, max_tokens=3)
    driver.step()
    counts = driver.core.statistics()
    assert (counts.num_requests_running, counts.num_requests_waiting, counts.num_requests_live) == (1, 2, 3)
    assert (counts.num_requests_received, counts.num_requests_deferred, counts.steps) == (3, 0, 1)
    assert driver.core.num_steps_done() == 1
    driver.core.is_scheduling = False
    counts = driver.core.statistics()
    assert (counts.num_requests_running, counts.num_requests_waiting) == (0, 3)


def test_fields_that_only_the_driver_knows_are_empty() -> None:
    counts = Driver().core.statistics()
    assert (counts.num_restarts, counts.restarts, counts.restarting, counts.engine_index) == (0, {}, (), 0)
    assert (counts.longest_task_step_s, counts.num_long_task_steps) == (0.0, 0)
    assert counts == attrs.evolve(counts, engine_index=1, longest_task_step_s=1.0, num_long_task_steps=1)


def test_a_request_is_ended_through_the_scheduler_only_while_that_is_consistent() -> None:
    driver = Driver()
    driver.core.is_scheduling = False
    states = []
    with driver.core.scheduling():
        states.append(driver.core.is_scheduling)
    assert [*states, driver.core.is_scheduling] == [True, False]
    core = EngineCore(Admission(Journal(), 4, 4, 1000))
    assert (core.is_scheduling, core.is_in_flight(StepPlan(1, (), (), ()))) == (False, False)
    core.is_scheduling = True  # and there is no scheduler yet
    [output] = core.add([make_request()], arrival_time=0.0)
    core.finish(output.entry.serial, FinishReason.ABORT)
    assert (len(core.journal), core.new_scheduler(CONFIG)) == (0, core.scheduler)


def test_a_request_that_was_in_a_crash_and_ends_without_a_scheduler_is_forgotten() -> None:
    driver = Driver()
    first, second = driver.add("a"), driver.add("b")
    driver.core.fail_step(driver.plan(), OSError("planted"))
    driver.core.is_scheduling = False
    driver.core.finish(first.entry.serial, FinishReason.ABORT)
    assert driver.core.recovery.poison_bisection.crashed == {second.entry.serial}


def test_a_step_of_a_crashed_scheduler_is_in_flight_no_more_and_its_crash_suspects_no_request() -> None:
    driver = Driver()
    driver.add("r")
    plan = driver.plan()
    assert driver.core.is_in_flight(plan)
    driver.core.is_scheduling = False
    assert not driver.core.is_in_flight(plan)
    assert driver.core.fail_step(plan, OSError("planted")) is None
    assert driver.core.recovery.poison_bisection.crashed == set()


def test_a_stop_string_ends_the_request() -> None:
    driver = Driver()
    driver.core.model.tokenizer = cast(TokenizerInterface, Letters())
    output = driver.add("r", params=SamplingParams(stop=["x"]))
    driver.step()
    assert output.entry.finish_reason is FinishReason.STOP
    assert driver.core.advance(99, 0.0) is False


class Letters:
    """A tokenizer of one letter."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "x" * len(token_ids)


def test_answers_may_be_entered_without_waiting_for_the_first_and_a_failure_names_their_parent() -> None:
    driver = Driver()
    requests = [make_request(request_id=f"{index}_r", parent_id="r", max_tokens=2) for index in range(2)]
    outputs = driver.core.add(requests, arrival_time=0.0, others_wait=False)
    driver.core.add_arrivals()
    assert [output.entry.leader_serial for output in outputs] == [0, 0]
    stats = driver.core.journal.stats
    assert stats.num_received == 2
    driver.core.finish(outputs[1].entry.serial, FinishReason.ABORT)
    for _ in range(2):
        driver.core.fail_step(driver.plan(), OSError("planted"))
        driver.start_over()
    error = outputs[0].error
    assert isinstance(error, RequestFailed)
    assert error.request_id == "r"
    assert outputs[0].entry.failure == "it crashes the model runner, also when computed alone: planted"


def test_a_reader_is_notified_of_an_error() -> None:
    driver = Driver()
    output = driver.add("r")
    driver.core.fail(output.entry.serial, RequestFailed("r", "planted"), 0.0)
    assert driver.num_notified == 1


def test_a_step_waits_for_a_mask_takes_it_and_goes_on() -> None:
    driver = Driver()
    output = driver.add("r", constraint=Constraint())
    assert driver.core.plan_step(0.0) is None
    assert driver.core.masks.take_questions() == (output.entry.serial,)
    assert driver.core.next_look_s() == 0.002
    driver.core.masks.answer(output.entry.serial, TokenMask(0, b"\xff"))
    plan = driver.core.plan_step(0.001)
    assert plan is not None
    assert plan.rows[0].mask == b"\xff"
    assert not driver.core.must_halt


def test_a_new_scheduler_reports_every_open_output_and_takes_the_arrivals() -> None:
    driver = Driver()
    output = driver.add("r")
    driver.core.take_progress()
    driver.start_over()
    assert driver.core.take_progress() == (output.entry.serial,)
    assert driver.core.journal.take_arrivals() == []


@pytest.mark.parametrize("is_scheduling", [True, False])
def test_of_answers_that_can_not_all_be_entered_none_is(
    is_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, opened = Driver(), OutputProcessor.open
    driver.core.is_scheduling = is_scheduling

    def fail_for_the_second(entry: JournalEntry, *arguments: Any, **keywords: Any) -> OutputProcessor:
        if entry.request.request_id == "1_r":
            raise MemoryError("planted")
        return opened(entry, *arguments, **keywords)

    monkeypatch.setattr(OutputProcessor, "open", staticmethod(fail_for_the_second))
    with pytest.raises(MemoryError, match="planted"):
        driver.core.add([make_request(request_id=f"{index}_r") for index in range(2)], arrival_time=0.0)
    assert (len(driver.core.journal), driver.core.outputs) == (0, {})
    assert driver.core.statistics().num_requests_received == 0
    driver.core.add_arrivals()
    assert driver.core.plan_step(0.0) is None


def test_what_a_scheduler_has_ended_and_not_reported_is_told_when_it_goes() -> None:
    driver = Driver()
    output, _ = driver.add("r"), driver.add("other")
    serial = output.entry.serial
    with driver.core.scheduling():
        driver.core.finish(serial, FinishReason.ABORT)
        assert driver.finished == [()]
    assert driver.finished == [(), (serial,)]
    assert driver.core.advance(serial, 0.0)
    with driver.core.scheduling():
        pass
    assert driver.finished == [(), (serial,)]


def test_requests_past_their_deadlines_end_also_while_there_is_no_scheduler() -> None:
    driver = Driver()
    late, later, free = driver.add("a", deadline_s=5.0), driver.add("b", deadline_s=7.0), driver.add("c")
    entries = [output.entry for output in (late, later, free)]
    assert (tuple(driver.core.unscheduled()), driver.core.expire_unscheduled(9.0)) == ((), inf)
    driver.core.is_scheduling = False
    assert list(driver.core.unscheduled()) == entries
    assert driver.core.expire_unscheduled(4.9) == 5.0
    assert driver.core.expire_unscheduled(5.0) == 7.0
    assert [entry.finish_reason for entry in entries] == [FinishReason.DEADLINE, None, None]
    assert driver.core.expire_unscheduled(7.0) == inf
    assert [entry.finish_reason for entry in entries] == [FinishReason.DEADLINE, FinishReason.DEADLINE, None]
