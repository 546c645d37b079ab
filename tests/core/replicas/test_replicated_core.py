"""Engine of several replicas: which scheduler ends a request, when a life ends, and what the sums are."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from tests.core.fake_model import FakeModel, expected_answer
from tests.core.make import make_request
from tests.core.stage import make_config
from triolet.core.engine_core import OpenOutput
from triolet.core.journal import Journal
from triolet.core.metrics.iteration_stats import ReplicaStatistics
from triolet.core.replicas.autoscale import ReplicaLoad
from triolet.core.replicas.replicated_core import ABSENCE_S, ReplicaCore, ReplicatedCore
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.admission import Admission
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import StepPlan

VOCAB = 50
CONFIG = make_config(num_blocks=16, max_num_seqs=2)
INFO = ModelInfo(
    folder="/model",
    architecture="Tiny",
    backend="native",
    vocab_size=VOCAB,
    max_position=64,
    max_model_len=64,
    num_kv_blocks=16,
    block_size=4,
    dtype="float32",
    device="cpu",
    process_id=77,
)


class Engine:
    """Replicas over fake models, driven by hand."""

    def __init__(self, num_replicas: int = 2, *, num_living: int | None = None) -> None:
        self.finished: list[tuple[int, tuple[int, ...]]] = []
        self.woken: list[int] = []
        self.core = ReplicatedCore(
            Admission(Journal(), 8, 8, 1000),
            num_replicas,
            4,
            lambda replica, serials: self.finished.append((replica, serials)),
            self.woken.append,
        )
        self.lives: dict[int, Any] = {}
        self.models: dict[int, FakeModel] = {}
        for replica in range(num_replicas if num_living is None else num_living):
            self.begin(replica)

    def begin(self, replica: int) -> None:
        """Let a replica compute, with an empty cache."""
        one = self.core.replicas[replica]
        assert one.new_scheduler(CONFIG) is one.scheduler
        self.models[replica] = FakeModel(CONFIG.num_blocks, CONFIG.block_size, VOCAB)
        self.lives[replica] = one.scheduling()
        self.lives[replica].__enter__()

    def end(self, replica: int) -> None:
        """Let the scheduler of a replica end; its runner has no model."""
        self.lives.pop(replica).__exit__(None, None, None)

    def add(self, name: str = "r", length: int = 6, **fields: Any) -> OpenOutput:
        prompt = [len(self.core.journal) + 3, *range(length - 1)]
        [output] = self.core.add([make_request(prompt, request_id=name, **fields)], arrival_time=0.0)
        self.core.table.dispatch()
        self.core.table.check()
        return output

    def plan(self, replica: int) -> StepPlan:
        one = self.core.replicas[replica]
        one.add_arrivals()
        plan = one.plan_step(0.0)
        assert plan is not None
        return plan

    def step(self, replica: int, now_s: float = 0.0) -> None:
        self.core.replicas[replica].apply(self.models[replica].execute(self.plan(replica)), now_s)

    def replica(self, number: int) -> ReplicaCore:
        return self.core.replicas[number]

    def scheduler(self, number: int) -> Scheduler:
        scheduler = self.core.replicas[number].scheduler
        assert scheduler is not None
        return scheduler

    def suspect(self, replica: int) -> None:
        """Let the runner of a replica crash in a step of its requests, and the replica end."""
        self.replica(replica).fail_step(self.plan(replica), OSError("planted"))
        self.end(replica)


# ----------------------------------------------------------------------------------- lives


def test_a_new_engine_has_replicas_that_do_not_live_and_are_not_parked() -> None:
    core = Engine(2, num_living=0).core
    assert [(one.replica, one.is_runner_alive, one.is_parked) for one in core.replicas] == [
        (0, False, False),
        (1, False, False),
    ]
    assert (core.is_step_in_flight, core.num_steps_done(), core.load()) == (False, 0, ReplicaLoad(0, 0, 0))


def test_each_replica_answers_its_own_requests_and_shares_journal_outputs_and_recovery_with_the_engine() -> (
    None
):
    there = Engine()
    first, second = there.add("a", max_tokens=2), there.add("b", max_tokens=2)
    assert (first.entry.replica, second.entry.replica) == (0, 1)
    for _ in range(2):
        there.step(0)
    assert first.entry.output_token_ids == expected_answer([3, 0, 1, 2, 3, 4], 0, 2, VOCAB)
    assert second.entry.output_token_ids == []
    for one in there.core.replicas:
        assert one.outputs is there.core.outputs
        assert one.recovery.poison_bisection is there.core.table.bisection(one.replica)


def test_the_blocks_that_a_replica_publishes_attract_equal_prompts() -> None:
    there = Engine(2)
    prompt = tuple(range(1, 10))
    there.core.table.draining.add(0)
    first = there.add("a", 1)
    there.core.finish(first.entry.serial, FinishReason.ABORT)
    [output] = there.core.add([make_request(prompt, max_tokens=1)], arrival_time=0.0)
    there.core.table.dispatch()
    assert output.entry.replica == 1
    for _ in range(2):  # of eight tokens each
        there.step(1, now_s=0.001)
    there.core.table.draining.clear()
    [again] = there.core.add([make_request(prompt, max_tokens=1)], arrival_time=0.0)
    there.core.table.dispatch()
    assert again.entry.replica == 1


def test_a_replica_takes_requests_only_while_it_schedules() -> None:
    there = Engine(1, num_living=0)
    output = there.add()
    assert (output.entry.replica, there.core.table.living) == (None, ())
    there.begin(0)
    assert (output.entry.replica, there.core.table.living, there.woken) == (0, (0,), [0])
    there.end(0)
    assert (output.entry.replica, there.core.table.living) == (None, ())


def test_a_scheduler_that_is_restarted_alone_keeps_its_requests_until_the_runner_ends_too() -> None:
    there = Engine(2)
    output = there.add()
    with there.replica(0).computing():
        assert there.replica(0).is_runner_alive
        there.end(0)
        assert (output.entry.replica, there.core.table.living) == (0, (0, 1))
    assert not there.replica(0).is_runner_alive
    assert (output.entry.replica, there.core.table.living) == (1, (1,))


def test_a_runner_that_ends_before_its_scheduler_leaves_the_requests_to_that() -> None:
    there = Engine(2)
    output = there.add()
    with pytest.raises(OSError, match="planted"), there.replica(0).computing():
        raise OSError("planted")
    assert not there.replica(0).is_runner_alive
    assert output.entry.replica == 0
    there.end(0)
    assert output.entry.replica == 1


def test_a_replica_lives_no_longer_when_its_scheduler_crashes() -> None:
    there = Engine(2)
    output = there.add()
    context = there.lives.pop(0)
    with pytest.raises(OSError, match="planted"):
        context.gen.throw(OSError("planted"))
    assert (there.replica(0).is_scheduling, output.entry.replica) == (False, 1)


def test_a_replica_that_begins_to_compute_gets_its_part_of_what_waits_at_the_others() -> None:
    there = Engine(2, num_living=1)
    outputs = [there.add(name) for name in "abcdef"]
    there.step(0)  # two of them have a row
    there.begin(1)
    there.core.table.check()
    assert [output.entry.replica for output in outputs] == [0, 0, 1, 1, 1, 0]
    assert there.scheduler(0).num_running == 2
    assert there.scheduler(0).num_waiting == 0  # until it takes the last one again
    there.plan(0)
    assert there.scheduler(0).num_waiting == 1


def test_a_replica_that_has_no_scheduler_yet_has_nothing_to_give_up_or_to_report() -> None:
    there = Engine(2, num_living=0)
    with there.replica(1).scheduling():
        there.begin(0)
        output = there.add()
        assert output.entry.replica == 0
        there.end(0)
        assert (output.entry.replica, there.finished) == (1, [])


def test_what_an_ended_replica_has_not_reported_another_one_reports() -> None:
    there = Engine(2)
    output = there.add()
    there.step(0)
    there.finished.clear()
    there.end(0)
    assert there.finished == [(1, ())]
    assert there.replica(1).take_progress() == (output.entry.serial,)


def test_where_no_replica_is_left_nothing_is_reported() -> None:
    there = Engine(1)
    there.add()
    there.finished.clear()
    there.end(0)
    assert there.finished == []


# ----------------------------------------------------------------------------------- endings


def test_a_request_is_ended_by_the_scheduler_of_its_replica() -> None:
    there = Engine(2)
    there.add("a")
    output = there.add("b")
    there.plan(1)
    there.core.finish(output.entry.serial, FinishReason.ABORT)
    assert there.finished == [(1, ())]
    assert there.scheduler(1).num_running == 0
    assert there.replica(1).take_progress() == (output.entry.serial,)
    there.core.finish(output.entry.serial, FinishReason.STOP)  # no longer live
    assert there.finished == [(1, ())]
    assert output.entry.finish_reason is FinishReason.ABORT


def test_a_request_of_a_replica_that_does_not_schedule_is_ended_by_another_one() -> None:
    there = Engine(3)
    output = there.add()
    with there.replica(0).computing():
        there.end(0)
        assert output.entry.replica == 0
        there.finished.clear()
        there.core.finish(output.entry.serial, FinishReason.ABORT)
    assert there.finished[0] == (1, ())
    assert there.replica(1).take_progress() == (output.entry.serial,)
    assert len(there.core.table.shares[0]) == 0
    there.core.table.check()


def test_a_request_that_ends_while_no_replica_computes_is_reported_by_the_first_at_once() -> None:
    there = Engine(2, num_living=0)
    output, other = there.add(), there.add()
    there.core.finish(output.entry.serial, FinishReason.ABORT)
    assert there.finished == [(0, (output.entry.serial,))]
    assert output.entry.finish_reason is FinishReason.ABORT
    assert list(there.core.journal) == [other.entry]
    assert list(there.core.table._unplaced) == [other.entry.serial]


# -------------------------------------------------------------------- replicas that are away or given up


def test_a_replica_is_given_up_only_while_another_one_lives() -> None:
    there = Engine(2)
    output = there.add()
    there.end(1)
    there.suspect(0)
    assert there.core.give_up(0) is True
    assert output.entry.replica == 0
    there.begin(1)
    assert output.entry.replica == 0
    assert there.core.give_up(0) is False
    assert output.entry.replica == 1


def test_a_replica_alone_is_not_given_up_while_it_lives() -> None:
    there = Engine(2, num_living=1)
    assert there.core.give_up(0) is True
    assert there.core.table.living == (0,)


def test_a_replica_that_still_schedules_is_not_ended_by_giving_it_up() -> None:
    there = Engine(2)
    output = there.add()
    assert there.core.give_up(0) is False
    assert (output.entry.replica, there.core.table.living) == (0, (0, 1))


def test_a_replica_that_is_given_up_without_a_scheduler_ends_although_its_runner_has_a_model() -> None:
    there = Engine(2)
    output = there.add()
    with there.replica(0).computing():
        there.end(0)
        assert there.core.give_up(0) is False
        assert (output.entry.replica, there.core.table.living) == (1, (1,))


def absent_engine() -> tuple[Engine, OpenOutput]:
    """An engine with a dead replica 0 that has a suspect; its death was noticed at 100 s."""
    there = Engine(2)
    output = there.add()
    there.suspect(0)
    there.core.give_up_absent(100.0)
    return there, output


def test_suspects_wait_for_their_replica_for_half_a_minute() -> None:
    there, output = absent_engine()
    there.core.give_up_absent(129.9)
    assert output.entry.replica == 0
    there.core.give_up_absent(130.0)
    assert output.entry.replica == 1


def test_an_absence_that_ended_does_not_count_in_the_next() -> None:
    there, output = absent_engine()
    there.begin(0)
    there.core.give_up_absent(110.0)
    there.end(0)
    there.core.give_up_absent(120.0)
    there.core.give_up_absent(149.9)
    assert output.entry.replica == 0
    there.core.give_up_absent(150.0)
    assert output.entry.replica == 1


def test_absences_are_counted_for_each_replica_also_behind_one_that_lives() -> None:
    there = Engine(2)
    there.add("a")
    output = there.add("b")
    assert output.entry.replica == 1
    there.suspect(1)
    there.core.give_up_absent(0.0)
    there.core.give_up_absent(ABSENCE_S)
    assert output.entry.replica == 0


def test_a_replica_without_requests_is_not_given_up() -> None:
    there = Engine(3)
    there.end(0)
    given_up: list[int] = []
    there.core.give_up = given_up.append  # type: ignore[method-assign,assignment]
    for now_s in (0.0, ABSENCE_S, 2 * ABSENCE_S):
        there.core.give_up_absent(now_s)
    assert given_up == []


def test_a_replica_that_retires_is_parked_and_its_suspects_go_to_the_others() -> None:
    there = Engine(2)
    output = there.add()
    there.suspect(0)
    there.core.table.draining.add(0)
    there.core.retire(0)
    assert (there.replica(0).is_parked, output.entry.replica) == (True, 1)
    assert there.core.table.draining == set()
    assert [part.is_parked for part in there.core.statistics().replicas] == [True, False]


def test_a_replica_that_retires_with_a_runner_leaves_the_living() -> None:
    there = Engine(2)
    with there.replica(0).computing():
        there.end(0)
        there.core.retire(0)
        assert there.core.table.living == (1,)


# -------------------------------------------------------------------------------------------- masks


def test_a_mask_goes_to_the_replica_of_its_request() -> None:
    there = Engine(2)
    first, second = there.add(constraint=Constraint()), there.add(constraint=Constraint())
    for one in there.core.replicas:
        one.add_arrivals()
        assert one.plan_step(0.0) is None
    assert there.core.masks.take_questions() == (first.entry.serial, second.entry.serial)
    there.core.masks.answer(second.entry.serial, TokenMask(0, b"\xff"))
    there.core.masks.answer(first.entry.serial, TokenMask(0, b"\x0f"))
    assert there.plan(0).rows[0].mask == b"\x0f"
    assert there.plan(1).rows[0].mask == b"\xff"


def test_questions_of_any_replica_are_questions_of_all() -> None:
    there = Engine(2)
    output = there.add(constraint=Constraint())
    masks = there.replica(0).masks
    masks.ask([], 0.0)
    assert not there.replica(1).masks.has_questions
    masks.ask([output.entry.serial, output.entry.serial], 1.0)
    assert masks.has_questions
    assert there.core.masks.unanswered() == ((output.entry.serial, 1.0),)
    assert masks.step_waits(1.0)
    assert not there.replica(1).masks.step_waits(1.0)


@pytest.mark.parametrize("is_answered", [False, True])
def test_nothing_is_kept_of_the_masks_of_requests_that_have_ended(is_answered: bool) -> None:
    there = Engine(2)
    ended = list[int]()
    for _ in range(20):
        output = there.add(constraint=Constraint())
        serial = output.entry.serial
        for one in there.core.replicas:
            one.add_arrivals()
            assert one.plan_step(0.0) is None
        if is_answered:
            there.core.masks.answer(serial, TokenMask(0, None))
        there.core.finish(serial, FinishReason.ABORT)
        ended.append(serial)
    there.core.masks.sort(there.core.masks.take_questions())
    for one in there.core.replicas:
        one.plan_step(1.0)
    for masks in (there.core.masks, *(one.masks for one in there.core.replicas)):
        kept = (masks._asked, masks._asked_s, masks._answers, masks._thinking)
        assert [set(each).intersection(ended) for each in kept] == [set()] * 4


def test_a_replica_may_ask_for_the_masks_of_some_of_its_requests() -> None:
    there = Engine(1)
    outputs = [there.add(constraint=Constraint()) for _ in range(2)]
    first, second = (output.entry.serial for output in outputs)
    for serial in (first, second):
        there.core.masks.answer(serial, TokenMask(0, None))
    masks = there.replica(0).masks
    assert masks.take_answers({second}) == {second: TokenMask(0, None)}
    assert masks.take_answers() == {first: TokenMask(0, None)}


# ---------------------------------------------------------------------------------- facts and sums


def test_the_least_of_the_replicas_limits_the_requests() -> None:
    there = Engine(3)
    there.replica(1).note_loaded(attrs.evolve(INFO, num_kv_blocks=12, max_model_len=40))
    assert there.core.model.info == attrs.evolve(INFO, num_kv_blocks=12, max_model_len=40, process_id=None)
    there.replica(0).note_loaded(attrs.evolve(INFO, num_kv_blocks=9, max_model_len=64, folder="/other"))
    assert there.core.model.info == attrs.evolve(INFO, num_kv_blocks=9, max_model_len=40, process_id=None)
    assert there.replica(0).model.info == attrs.evolve(INFO, num_kv_blocks=9, folder="/other")


def busy_engine() -> Engine:
    """Replica 0 runs two requests of 6 tokens, one waits there; 1 runs one; 2 does not live."""
    there = Engine(3, num_living=2)
    for name in "abc":
        there.add(name, max_tokens=20)
    there.core.table.draining.add(1)
    there.add("d", max_tokens=20)
    assert [len(share) for share in there.core.table.shares] == [3, 1, 0]
    there.step(0)
    there.step(0)
    there.step(1)
    return there


def test_counts_of_the_engine_are_the_sums_over_its_replicas() -> None:
    there = busy_engine()
    counts = there.core.statistics()
    assert (counts.num_requests_live, counts.num_requests_running, counts.num_requests_waiting) == (4, 3, 1)
    assert (counts.kv_blocks_total, counts.kv_blocks_in_use, counts.steps) == (32, 6, 3)
    assert counts.kv_blocks_free + counts.kv_blocks_cached == 26
    assert (there.core.num_steps_done(), counts.num_moved_requests) == (3, 0)
    assert there.core.load() == ReplicaLoad(4, 1, 2)


def test_counts_of_each_replica_are_told() -> None:
    there = busy_engine()
    first, second, third = there.core.statistics().replicas
    assert attrs.evolve(first, prefix_cache_queries=0) == ReplicaStatistics(
        replica=0,
        is_living=True,
        is_parked=False,
        num_requests_running=2,
        num_requests_waiting=1,
        kv_blocks_total=16,
        kv_blocks_in_use=4,
        steps=2,
        num_preemptions=0,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
    )
    assert (second.replica, second.num_requests_running, second.num_requests_waiting) == (1, 1, 0)
    assert (third.is_living, third.num_requests_running, third.kv_blocks_total) == (False, 0, 0)


def test_a_replica_without_a_scheduler_has_free_blocks_only_and_a_parked_one_none() -> None:
    there = busy_engine()
    there.end(1)
    ended = there.replica(1).statistics()
    assert (ended.kv_blocks_total, ended.kv_blocks_free, ended.kv_blocks_cached) == (16, 16, 0)
    assert (ended.kv_blocks_in_use, ended.kv_blocks_quarantined) == (0, 0)
    part = there.replica(1).statistics_of_replica()
    assert (part.is_living, part.num_requests_running, part.kv_blocks_total, part.kv_blocks_in_use) == (
        False,
        0,
        0,
        0,
    )
    assert there.core.statistics().num_moved_requests == 1
    there.core.retire(1)
    parked = there.replica(1).statistics()
    assert (parked.kv_blocks_total, parked.kv_blocks_free) == (0, 0)
    assert there.core.statistics().kv_blocks_total == 16


def test_blocks_of_an_ended_replica_are_not_in_use_although_its_scheduler_has_not_returned_them() -> None:
    there = busy_engine()
    plan = there.plan(0)
    there.core.finish(next(iter(there.core.table.shares[0])).serial, FinishReason.ABORT)
    assert there.replica(0).statistics().kv_blocks_quarantined == 2
    assert there.replica(0).is_in_flight(plan)
    there.end(0)
    counts = there.replica(0).statistics()
    assert (counts.kv_blocks_total, counts.kv_blocks_free, counts.kv_blocks_quarantined) == (16, 16, 0)


def test_counts_are_there_as_soon_as_one_replica_has_a_scheduler() -> None:
    there = Engine(2, num_living=0)
    there.begin(1)
    counts = there.core.statistics()
    assert (counts.kv_blocks_total, [part.is_living for part in counts.replicas]) == (16, [False, True])


def test_accepted_drafts_are_summed_position_by_position() -> None:
    there = Engine(3)
    for replica, accepted in enumerate(([5, 3, 1], [2], [4, 2])):
        there.replica(replica).counters.num_accepted_tokens_per_pos[:] = accepted
    counts = there.core.statistics()
    assert counts.spec_decode_num_accepted_tokens_per_pos == (11, 5, 1)
    assert counts.spec_decode_num_accepted_tokens == 17


def test_the_place_of_a_request_is_told_by_its_replica() -> None:
    there = busy_engine()
    entries = list(there.core.journal)
    assert there.core.whereabouts(entries[1].serial) == (0, 6, 2)
    assert there.core.whereabouts(there.add("e").entry.serial) == (1, 0, 0)  # behind d
    assert there.core.whereabouts(99) == (0, 0, 0)
    there.core.table.draining |= {0, 1}
    assert there.core.whereabouts(there.add("f").entry.serial) == (0, 0, 0)


@pytest.mark.parametrize(("busy", "is_reset"), [((), True), ((0,), False), ((1,), False), ((0, 1), False)])
def test_the_prefix_cache_is_reset_if_all_replicas_can_reset_theirs(
    busy: tuple[int, ...], is_reset: bool
) -> None:
    there = Engine(3, num_living=2)
    for name in "ab":
        there.add(name)
    for replica in busy:
        there.step(replica)
    assert there.core.reset_prefix_cache() is is_reset
    assert there.core.reset_prefix_cache(reset_running_requests=True) is True


def test_steps_are_in_flight_while_any_replica_has_one_and_all_are_abandoned() -> None:
    there = Engine(2)
    there.add("a")
    there.add("b")
    there.plan(1)
    assert there.core.is_step_in_flight
    there.plan(0)
    there.core.abandon_step()
    assert not there.core.is_step_in_flight
