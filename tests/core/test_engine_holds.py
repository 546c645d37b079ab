"""Core of an engine under holds: what is still computed, when the runner gives up its model, and what it loads."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from tests.core.fake_model import FakeModel
from tests.core.make import make_request
from tests.core.stage import make_config
from triolet.core.engine_core import EngineCore, OpenOutput
from triolet.core.journal import Journal
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.model_info import GenerationDefaults, ModelInfo
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.admission import Admission
from triolet.core.sleep import PAUSE, SLEEP, WEIGHTS, RunnerPhase
from triolet.core.step_plan import StepPlan
from triolet.errors import RequestFailed

CONFIG = make_config(num_blocks=16)
INFO = ModelInfo(
    folder="/model",
    architecture="Tiny",
    backend="native",
    vocab_size=50,
    max_position=64,
    max_model_len=64,
    num_kv_blocks=16,
    block_size=4,
    dtype="float32",
    device="cpu",
)
AWAY = [RunnerPhase.LEAVING, RunnerPhase.UNLOADED, RunnerPhase.LOADING, RunnerPhase.LOADED]


class Engine:
    """A core with a scheduler that is driven by hand."""

    def __init__(self, **config: Any) -> None:
        self.finished: list[tuple[int, ...]] = []
        self.config = attrs.evolve(CONFIG, **config)
        self.core = EngineCore(Admission(Journal(), 4, 4, 1000), self.finished.append)
        self.core.is_scheduling = True
        self.core.new_scheduler(self.config)
        self.model = FakeModel(self.config.num_blocks, self.config.block_size)

    def add(self, name: str = "r", **fields: Any) -> OpenOutput:
        [output] = self.core.add([make_request(request_id=name, **fields)], arrival_time=0.0)
        self.core.add_arrivals()
        return output

    def plan(self, now_s: float = 0.0) -> StepPlan:
        plan = self.core.plan_step(now_s)
        assert plan is not None
        return plan

    def step(self) -> list[str]:
        """Run a step; return the requests that began in it."""
        plan = self.plan()
        self.core.apply(self.model.execute(plan), 0.0)
        return [start.request_id for start in plan.starts]

    def phase(self) -> RunnerPhase:
        return self.core.sleep.phase

    def follow(self) -> bool:
        return self.core.follow_runner(lambda: self.config)


# ------------------------------------------------------------------------------------ what is computed


def test_an_engine_without_a_hold_is_neither_frozen_nor_settled() -> None:
    there = Engine()
    assert (there.core.is_frozen, there.core.has_settled, there.core.must_halt) == (False, False, False)
    assert (there.core.must_unload, there.core.may_exchange, there.follow()) == (False, False, False)


def test_requests_up_to_the_limit_of_a_hold_are_computed_and_later_ones_wait() -> None:
    there = Engine()
    first = there.add("a", max_tokens=1)
    there.add("b")
    there.core.sleep.hold(PAUSE, first.entry.serial)
    assert not there.core.is_frozen
    assert there.step() == ["a"]
    assert (there.core.is_frozen, there.core.must_halt) == (True, True)
    assert there.core.plan_step(0.0) is None
    there.core.sleep.release(PAUSE)
    assert there.step() == ["b"]


def test_a_live_request_counts_if_its_serial_is_at_most_the_limit() -> None:
    there = Engine()
    assert not there.core.has_live(math.inf)
    there.add("a")
    assert [there.core.has_live(limit) for limit in (0, 1, 2)] == [False, True, True]
    there.core.finish(1, FinishReason.ABORT)
    there.add("b")
    assert [there.core.has_live(limit) for limit in (1, 2)] == [False, True]


def test_a_frozen_engine_has_settled_when_no_step_is_in_flight() -> None:
    there = Engine()
    there.add()
    plan = there.plan()
    there.core.sleep.hold(PAUSE)
    assert (there.core.is_frozen, there.core.has_settled, there.core.must_halt) == (True, False, True)
    there.core.apply(there.model.execute(plan), 0.0)
    assert there.core.has_settled


@pytest.mark.parametrize("phase", AWAY)
def test_nothing_is_computed_while_the_model_is_away(phase: RunnerPhase) -> None:
    there = Engine()
    there.add()
    there.core.sleep.enter(phase)
    assert there.core.is_frozen
    assert there.core.plan_step(0.0) is None


def test_a_multi_step_plan_ends_early_for_what_the_scheduler_waits_for() -> None:
    there = Engine(num_scheduler_steps=4)
    there.add()
    there.step()
    assert there.plan().num_steps == 4
    assert not there.core.must_halt
    there.core.reset_prefix_cache(reset_running_requests=True)
    assert there.core.must_halt


@pytest.mark.parametrize("is_async", [False, True])
def test_another_step_may_be_planned_beside_one_in_flight_only_where_steps_overlap(is_async: bool) -> None:
    there = Engine(async_scheduling=is_async)
    there.add()
    assert there.core.may_plan
    there.plan()
    assert there.core.may_plan is is_async
    assert (there.core.plan_step(0.0) is not None) is is_async


def test_all_requests_wait_for_a_mask_but_not_for_long() -> None:
    there = Engine()
    there.add("bound", constraint=Constraint())
    there.add("free")
    assert there.core.plan_step(1.0) is None
    assert there.core.plan_step(1.0019) is None
    assert [start.request_id for start in there.plan(1.002).starts] == ["free"]


# ----------------------------------------------------------------------------- an engine that is idle


def test_an_engine_that_is_idle_falls_asleep_with_a_plan_and_the_next_request_wakes_it() -> None:
    there = Engine()
    there.core.sleep.set_sleep_after(5.0)
    assert there.core.next_look_s() == math.inf
    there.core.plan_step(1.0)
    assert there.core.next_look_s() == 6.0
    there.core.plan_step(6.0)
    assert there.core.statistics().sleep_level == 1
    there.add()
    there.core.plan_step(7.0)
    assert there.core.statistics().sleep_level is None


def test_the_next_look_is_at_whatever_comes_first() -> None:
    there = Engine()
    there.core.sleep.set_sleep_after(5.0)
    output = there.add(constraint=Constraint(), deadline_s=3.0)
    assert there.core.next_look_s() == 3.0
    assert there.core.plan_step(1.0) is None
    assert there.core.next_look_s() == 1.002  # the end of the wait for a mask
    there.core.masks.answer(output.entry.serial, TokenMask(0, None))
    assert there.core.next_look_s() == 3.0


def test_an_engine_that_never_sleeps_does_not_count_its_idleness() -> None:
    there = Engine()
    there.core.plan_step(1.0)
    there.core.sleep.set_sleep_after(5.0)
    assert there.core.next_look_s() == math.inf
    there.core.plan_step(2.0)
    assert there.core.next_look_s() == 7.0


# ---------------------------------------------------------------------------- the model of the runner


def test_the_model_is_given_up_when_what_sleep_lets_finish_has_finished() -> None:
    there = Engine()
    there.add("a", max_tokens=1)
    there.add("b")
    there.core.sleep.sleep(1, 1)
    assert (there.core.must_unload, there.follow()) == (False, False)
    there.step()
    assert (there.core.must_unload, there.follow()) == (True, True)
    assert there.phase() is RunnerPhase.LEAVING
    assert there.follow() is False  # it has been told


def test_the_model_is_not_given_up_while_a_step_is_in_flight() -> None:
    there = Engine()
    there.add()
    plan = there.plan()
    there.core.sleep.sleep(1)
    assert there.core.must_unload
    assert there.follow() is False
    there.core.apply(there.model.execute(plan), 0.0)
    assert there.follow() is True


def test_sleep_of_level_0_keeps_the_model() -> None:
    there = Engine()
    there.core.sleep.sleep(0)
    assert (there.core.is_frozen, there.core.must_unload, there.follow()) == (True, False, False)


def test_blocks_are_lost_with_the_model_and_the_requests_wait() -> None:
    there = Engine()
    output = there.add()
    there.step()
    assert there.core.statistics().kv_blocks_in_use == 1
    there.core.sleep.sleep(1)
    there.follow()
    counts = there.core.statistics()
    assert (counts.kv_blocks_in_use, counts.num_requests_running, counts.num_requests_waiting) == (0, 0, 1)
    assert output.entry.output_token_ids != []


def test_a_new_scheduler_computes_what_waits_when_the_runner_has_loaded_the_model_again() -> None:
    there = Engine()
    there.add()
    there.core.note_loaded(INFO)
    assert there.phase() is RunnerPhase.SERVING
    there.core.sleep.sleep(1)
    there.follow()
    there.core.sleep.enter(RunnerPhase.UNLOADED)
    there.core.sleep.wake()
    there.core.note_loaded(INFO)
    before = there.core.scheduler
    assert there.phase() is RunnerPhase.LOADED
    assert there.follow() is False
    assert there.phase() is RunnerPhase.SERVING
    assert there.core.scheduler is not before
    assert there.step() == ["r"]


def test_an_engine_that_is_to_sleep_again_when_its_model_is_loaded_gives_it_up_again() -> None:
    there = Engine()
    there.core.sleep.enter(RunnerPhase.LOADED)
    there.core.sleep.sleep(1)
    assert there.follow() is True


# ------------------------------------------------------------------------------------- other weights


def test_other_weights_are_loaded_when_the_requests_of_the_old_ones_have_ended() -> None:
    there = Engine()
    there.core.note_loaded(INFO)
    there.add("a", max_tokens=1)
    there.core.weights.request("/new")
    there.core.sleep.hold(WEIGHTS, 1)
    assert (there.core.may_exchange, there.core.begin_load()) == (False, None)
    there.step()
    assert (there.core.may_exchange, there.follow()) == (True, True)
    assert there.core.begin_load() == "/new"
    there.core.note_loaded(attrs.evolve(INFO, folder="/new", num_kv_blocks=5))
    assert (there.core.weights.version, there.core.journal.weight_version) == (1, 1)
    assert there.core.sleep.limit_of(WEIGHTS) == math.inf
    assert there.core.begin_load() == "/new"  # also after a crash
    assert there.core.may_exchange is False


def test_facts_of_new_weights_come_with_the_folder_and_defaults_that_the_engine_was_opened_with() -> None:
    there = Engine()
    defaults = GenerationDefaults(temperature=0.5)
    there.core.note_loaded(attrs.evolve(INFO, generation=defaults))
    there.core.note_loaded(attrs.evolve(INFO, folder="/new", num_kv_blocks=5))
    assert there.core.model.info == attrs.evolve(INFO, generation=defaults, num_kv_blocks=5)


def test_a_model_that_is_loaded_while_other_weights_are_requested_keeps_the_hold_for_these() -> None:
    there = Engine()
    there.core.weights.request("/new")
    there.core.sleep.hold(WEIGHTS, 1)
    there.add()
    there.core.begin_load()
    there.core.note_loaded(INFO)
    assert (there.core.sleep.limit_of(WEIGHTS), there.core.weights.version) == (1, 0)


def test_a_load_of_the_model_that_is_in_use_changes_no_version_and_ends_no_other_hold() -> None:
    there = Engine()
    there.core.sleep.hold(PAUSE, 3)
    there.core.note_loaded(INFO)
    assert (there.core.sleep.limit_of(PAUSE), there.core.sleep.limit_of(SLEEP)) == (3, math.inf)
    assert (there.core.weights.version, there.core.journal.weight_version) == (0, 0)
    assert there.core.statistics().is_paused


def test_a_load_changes_nothing_of_an_engine_that_serves_and_holds_nothing() -> None:
    there = Engine()
    changes: list[str] = []
    there.core.sleep.on_change = lambda: changes.append("told")
    there.core.note_loaded(INFO)
    assert changes == []


# -------------------------------------------------------------------- outputs, crashes and whereabouts


def test_a_request_that_fails_ends_with_an_error() -> None:
    there = Engine()
    output = there.add()
    there.core.fail(output.entry.serial, RequestFailed("r", "planted"), 0.0)
    assert output.entry.finish_reason is FinishReason.ERROR
    assert there.core.outputs == {}
    there.core.fail(99, RequestFailed("r", "planted"), 0.0)
    assert there.finished == [()]


def test_an_output_is_closed_once() -> None:
    there = Engine()
    output = there.add()
    assert there.core.close_output(1, FinishReason.ABORT, 0.0) is output
    assert there.core.close_output(1, FinishReason.ABORT, 0.0) is None
    assert there.core.statistics().num_requests_ended == {"abort": 1}


def test_advance_tells_whether_an_answer_is_complete() -> None:
    there = Engine()
    output = there.add(max_tokens=2)
    told = []
    for _ in range(2):
        there.step()
        assert there.core.take_progress() == (1,)
        told.append(there.core.advance(1, 0.0))
    assert told == [False, True]
    assert output.processor.collector.take().finished


def test_a_reader_is_notified_only_of_something_to_read() -> None:
    there = Engine()
    notified: list[str] = []
    there.core.add([make_request()], arrival_time=0.0, notify=lambda: notified.append("r"))
    there.core.add_arrivals()
    assert there.core.advance(1, 0.0) is False
    assert notified == []
    there.step()
    there.core.advance(1, 0.0)
    assert notified == ["r"]


def test_a_crash_fails_the_request_that_was_alone_twice_also_if_its_output_is_closed() -> None:
    there = Engine()
    output = there.add()
    there.core.close_output(1, FinishReason.ERROR, 0.0)
    for _ in range(2):
        there.core.fail_step(there.plan(), OSError("planted"))
        there.core.new_scheduler(there.config)
    assert output.entry.finish_reason is FinishReason.ERROR
    assert output.error is None


def test_the_first_crash_counts_and_a_second_that_names_the_culprit_uncounts_both() -> None:
    there = Engine()
    assert there.core.take_uncounted_restarts() == 0
    there.add()
    numbers = []
    for _ in range(2):
        there.core.fail_step(there.plan(), OSError("planted"))
        there.core.new_scheduler(there.config)
        numbers.append(there.core.take_uncounted_restarts())
    assert numbers == [0, 2]


def test_uncounted_crashes_add_up_until_they_are_taken() -> None:
    there = Engine()
    there.core.recovery.num_uncounted = 5
    there.add()
    for _ in range(2):
        there.core.fail_step(there.plan(), OSError("planted"))
        there.core.new_scheduler(there.config)
    assert [there.core.take_uncounted_restarts(), there.core.take_uncounted_restarts()] == [7, 0]


def test_a_new_output_has_neither_an_error_nor_a_crash() -> None:
    output = Engine().add()
    assert (output.error, output.num_crashes) == (None, 0)


def test_a_core_has_the_limits_and_the_journal_that_it_was_given() -> None:
    admission = Admission(Journal(), 4, 4, 1000)
    core = EngineCore(admission)
    assert (core.admission, core.journal) == (admission, admission.journal)


def test_no_step_is_in_flight_before_there_is_a_scheduler() -> None:
    core = EngineCore(Admission(Journal(), 4, 4, 1000))
    with core.scheduling():
        assert not core.is_in_flight(StepPlan(1, (), (), ()))


def test_whereabouts_and_steps_are_nothing_without_a_scheduler() -> None:
    core = EngineCore(Admission(Journal(), 4, 4, 1000))
    core.abandon_step()
    core.on_finish(())
    assert (core.whereabouts(1), core.is_step_in_flight) == ((0, 0, 0), False)


def test_whereabouts_of_a_request_are_its_place_in_the_queue_its_tokens_and_its_blocks() -> None:
    there = Engine(max_num_seqs=1)
    for name in ("a", "b", "c"):
        there.add(name)
    there.step()
    assert [there.core.whereabouts(serial) for serial in (1, 2, 3)] == [(0, 3, 1), (0, 0, 0), (1, 0, 0)]


def test_a_step_that_is_abandoned_is_in_flight_no_more() -> None:
    there = Engine()
    there.add()
    there.plan()
    assert there.core.is_step_in_flight
    there.core.abandon_step()
    assert not there.core.is_step_in_flight


def test_the_prefix_cache_is_reset_at_once_only_while_no_block_is_in_use() -> None:
    there = Engine()
    assert there.core.reset_prefix_cache() is True
    there.add()
    there.step()
    assert there.core.reset_prefix_cache() is False
    assert there.core.reset_prefix_cache(reset_running_requests=True) is True


def test_further_answers_are_not_queued_in_a_new_scheduler_while_they_are_held() -> None:
    there = Engine()
    requests = [make_request(request_id=f"{number}_r", seed=number) for number in range(2)]
    there.core.add(requests, arrival_time=0.0)
    there.core.new_scheduler(there.config)
    assert there.step() == ["0_r"]


def test_arrivals_that_a_new_scheduler_has_queued_do_not_arrive_again() -> None:
    there = Engine()
    there.core.add([make_request()], arrival_time=0.0)
    there.core.new_scheduler(there.config)
    assert there.core.journal.arrivals == ()
    assert there.step() == ["r"]


def test_a_waiting_request_that_a_rule_defers_is_counted() -> None:
    there = Engine()
    there.add(constraint=Constraint())
    counts = there.core.statistics()
    assert (counts.num_requests_deferred, counts.num_requests_waiting) == (1, 1)
    there.core.is_scheduling = False
    assert there.core.statistics().num_requests_waiting == 1


def test_no_more_requests_are_deferred_than_wait() -> None:
    there = Engine()
    there.add("a")
    ended = there.add("b", constraint=Constraint())
    there.core.plan_step(0.0)
    there.plan(1.0)
    there.core.journal.close(ended.entry)  # the scheduler has not noticed it yet
    counts = there.core.statistics()
    assert (counts.num_requests_running, counts.num_requests_waiting) == (1, 0)
    assert counts.num_requests_deferred == 0


def test_counts_of_a_hundred_drafts_are_those_of_the_counters() -> None:
    there = Engine()
    counters = there.core.counters
    counters.num_drafts, counters.num_draft_tokens = 100, 250
    counters.num_accepted_tokens_per_pos[:] = [70, 30]
    counts = there.core.statistics()
    assert (counts.spec_decode_num_drafts, counts.spec_decode_num_draft_tokens) == (100, 250)
    assert counts.spec_decode_num_accepted_tokens == 100
    assert counts.spec_decode_num_accepted_tokens_per_pos == (70, 30)
