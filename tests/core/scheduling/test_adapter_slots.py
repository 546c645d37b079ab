"""Slots of LoRA adapters: how many are in a step, which one makes way, and how long an adapter waits at most."""

from __future__ import annotations

import math
from collections import Counter

import attrs
import pytest

from tests.core.make import make_request
from tests.core.stage import Stage
from triolet.core.journal import Journal
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.lora import Adapter
from triolet.core.scheduling.adapter_slots import MAX_WAIT_S, AdapterSlots, adapter_of
from triolet.core.scheduling.sequence import Sequence
from triolet.core.step_plan import AdapterStart, RowFailure, StepPlan, StepResult


def adapter(name: str) -> Adapter:
    return Adapter(name=name, int_id=ord(name), path=f"/{name}", digest=f"digest of {name}")


def stage(num_slots: int) -> Stage:
    return Stage(max_adapters=num_slots, max_num_batched_tokens=64, num_blocks=64, max_num_seqs=8)


def names(there: Stage) -> set[str]:
    """Requests of one whole step."""
    return {name for name, _, _ in there.step()}


def test_a_request_with_an_adapter_without_a_slot_is_overtaken() -> None:
    there = stage(1)
    for request, used in (("a", adapter("x")), ("b", adapter("y")), ("c", None), ("d", adapter("x"))):
        there.add(request, 3, max_tokens=2, adapter=used)
    assert names(there) == {"a", "c", "d"}
    assert names(there) == {"a", "c", "d"}
    assert names(there) == {"b"}


def test_an_adapter_that_still_has_its_slot_is_not_loaded_again() -> None:
    there = stage(2)
    loaded: list[list[tuple[int, str]]] = []
    for used in "xyxzy":
        there.add(used, 3, max_tokens=1, adapter=adapter(used))
        plan = there.begin()
        assert plan is not None
        loaded.append([(start.slot, start.name) for start in plan.adapters])
        there.end(plan)
    # z takes the slot of y, which was used before x was used again
    assert loaded == [[(0, "x")], [(1, "y")], [], [(1, "z")], [(0, "y")]]


def test_rows_name_the_slots_that_the_plan_fills() -> None:
    there = stage(2)
    for used in "xy":
        there.add(used, 3, adapter=adapter(used))
    there.add("plain", 3)
    plan = there.begin()
    assert plan is not None
    slot_of = {start.name: start.slot for start in plan.adapters}
    assert {start.request_id: start.adapter_slot for start in plan.starts} == slot_of | {"plain": None}


def test_an_adapter_gets_a_slot_in_time_although_another_is_asked_for_all_the_time() -> None:
    there = stage(1)
    there.add("x", 3, adapter=adapter("x"))
    names(there)
    there.add("y", 3, max_tokens=1, adapter=adapter("y"))
    assert names(there) == {"x"}
    there.now_s += MAX_WAIT_S / 2
    there.add("z", 3, adapter=adapter("x"))
    assert names(there) == {"x", "z"}
    there.now_s += MAX_WAIT_S / 2
    assert names(there) == {"y"}
    assert names(there) == {"x", "z"}


def test_the_row_of_an_adapter_that_makes_way_is_taken_by_the_one_that_waited() -> None:
    there = Stage(max_adapters=1, max_num_batched_tokens=64, num_blocks=64, max_num_seqs=2)
    there.add("x", 3, adapter=adapter("x"))
    there.add("plain", 3)
    assert names(there) == {"x", "plain"}
    there.add("earlier", 3, max_tokens=1)
    there.add("y", 3, max_tokens=1, adapter=adapter("y"))
    assert names(there) == {"x", "plain"}
    there.now_s += MAX_WAIT_S
    assert names(there) == {"y", "plain"}
    assert names(there) == {"x", "plain"}  # at its old place


def test_a_request_that_takes_the_slot_kept_for_it_takes_its_tokens_from_the_budget_of_the_step() -> None:
    there = Stage(max_adapters=1, max_num_batched_tokens=8, num_blocks=64)
    there.add("x", 3, adapter=adapter("x"))
    there.step()
    there.add("y", 6, adapter=adapter("y"))
    there.add("plain", 40)
    assert there.step() == [("x", 3, 1), ("plain", 0, 7)]
    there.now_s += MAX_WAIT_S
    assert there.step() == [("y", 0, 6), ("plain", 7, 2)]


@pytest.mark.parametrize("is_async", [False, True])
def test_adapters_take_turns_also_where_the_policy_keeps_one_of_them_waiting(is_async: bool) -> None:
    there = Stage(
        policy="fair",
        fair_ttft_factor=2.0,
        max_adapters=1,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        num_blocks=600,
        max_model_len=600,
        async_scheduling=is_async,
    )
    in_flight: list[StepPlan] = []

    def computed(seconds: float) -> Counter[str]:
        """Rows of the steps of some time, in which each row takes a hundredth of a second."""
        found, until_s = Counter[str](), there.now_s + seconds
        while there.now_s < until_s:
            while there.scheduler.may_plan and (plan := there.begin()) is not None:
                found.update(name for name, _, _ in there.shares(plan))
                in_flight.append(plan)
            done = in_flight.pop(0)
            elapsed_s = 0.01 + 0.01 * len(done.rows)
            there.now_s += elapsed_s
            there.scheduler.apply(attrs.evolve(there.result(done), elapsed_s=elapsed_s), there.now_s)
        return found

    for number in range(12):  # so many that they fill the time that is theirs beside a client with few
        there.add(f"many {number}", 3, max_tokens=500, client="many")
        computed(0.05)
    there.add("x", 3, max_tokens=500, client="few", adapter=adapter("x"))
    computed(1.0)
    there.add("y", 3, max_tokens=500, client="many", adapter=adapter("y"))
    turns = [computed(MAX_WAIT_S) for _ in range(6)]
    assert all(turn["x"] + turn["y"] > 10 for turn in turns)  # the slot is always used
    assert min(sum(turn[name] for turn in turns) for name in "xy") > 30


def test_no_adapter_makes_way_for_requests_that_a_pause_holds_back() -> None:
    there = stage(1)
    first = there.add("x", 3, max_tokens=4, adapter=adapter("x"))
    assert names(there) == {"x"}
    there.add("y", 3, max_tokens=1, adapter=adapter("y"))
    there.scheduler.last_serial = first.serial
    for _ in range(3):
        there.now_s += 2 * MAX_WAIT_S
        assert names(there) == {"x"}  # which the pause waits for
    assert first.finish_reason is not None
    assert names(there) == set()
    there.scheduler.last_serial = math.inf
    assert names(there) == {"y"}


def test_no_adapter_makes_way_for_requests_that_wait_for_the_end_of_a_bisection() -> None:
    there = stage(1)
    first, second = there.add("x", 3, adapter=adapter("x")), there.add("y", 3, adapter=adapter("y"))
    bisection = there.scheduler.recovery.poison_bisection
    for _ in range(2):
        bisection.step_failed({first.serial: 30, second.serial: 30}, num_rows=2)
    assert (bisection.may_run(first.serial), bisection.may_run(second.serial)) == (True, False)
    for _ in range(3):
        assert names(there) == {"x"}
        there.now_s += 2 * MAX_WAIT_S


def test_no_adapter_makes_way_for_a_request_without_its_mask() -> None:
    there = stage(1)
    there.add("x", 3, adapter=adapter("x"))
    assert names(there) == {"x"}
    bound = there.add("y", 3, adapter=adapter("y"), constraint=Constraint())
    for _ in range(2):
        there.now_s += 2 * MAX_WAIT_S
        assert names(there) == {"x"}
    there.scheduler.guide(bound.serial, TokenMask(0))
    assert names(there) == {"x"}  # its wait begins
    there.now_s += MAX_WAIT_S
    assert names(there) == {"y"}


@pytest.mark.parametrize("has_left", [False, True])
def test_an_adapter_that_could_not_be_loaded_is_loaded_anew_for_the_next_request(has_left: bool) -> None:
    there = stage(1)
    entry = there.add("a", 3, adapter=adapter("x"))
    plan = there.in_flight()
    [start] = plan.starts
    if has_left:  # before it was told of the failure
        there.scheduler.abort(entry.serial)
    there.scheduler.apply(StepResult(plan.step_id, (RowFailure("a", start.epoch, "no such file"),)), 0.0)
    there.add("b", 3, adapter=adapter("x"))
    again = there.begin()
    assert again is not None
    assert [start.name for start in again.adapters] == ["x"]


def test_equal_prompts_share_blocks_only_with_equal_adapters() -> None:
    there = stage(4)
    prompt = range(100, 117)
    computed = []
    for name, used in (
        ("a", None),
        ("b", adapter("x")),
        ("c", adapter("y")),
        ("d", adapter("x")),
        ("e", None),
    ):
        namespace = CacheNamespace(adapter=None if used is None else used.digest)
        there.add(name, prompt, max_tokens=1, adapter=used, cache_namespace=namespace)
        computed.append(sum(num_tokens for _, _, num_tokens in there.step()))
    assert computed == [17, 17, 17, 1, 1]


# ------------------------------------------------------------------------------- slots without a scheduler


def sequence_with(used: str | None) -> Sequence:
    """A request with an adapter of this name."""
    entry = Journal().open(make_request(adapter=None if used is None else adapter(used)))
    return Sequence(entry, (0.0, entry.serial))


class Slots:
    """Slots; running and waiting requests are given by the names of their adapters."""

    def __init__(self, num_slots: int) -> None:
        self.slots = AdapterSlots(num_slots)

    def begin(
        self, now_s: float, running: str = "", waiting: str = "", *, may_preempt: bool = True
    ) -> str | None:
        """Begin a step; return the name of the adapter that must make way."""
        victim = self.slots.begin_step(
            [sequence_with(None), *map(sequence_with, running)],
            [sequence_with(None), *map(sequence_with, waiting)],
            now_s,
            may_preempt=may_preempt,
        )
        return None if victim is None else victim.removeprefix("digest of ")

    def may_start(self, names: str) -> str:
        """The names of the adapters that may be admitted."""
        return "".join(name for name in names if self.slots.may_start(adapter(name)))

    def take(self, names: str) -> list[int]:
        return [self.slots.take(adapter(name)) for name in names]

    def starts(self) -> list[tuple[int, str]]:
        return [(start.slot, start.name) for start in self.slots.take_starts()]


def full(num_slots: int = 2) -> Slots:
    """Slots that were taken by x and, a second later, by y."""
    there = Slots(num_slots)
    there.begin(0.0)
    there.take("x")
    there.begin(1.0, "x")
    there.take("y")
    return there


def test_a_request_has_an_adapter_or_none() -> None:
    assert adapter_of(sequence_with("x")) == adapter("x")
    assert adapter_of(sequence_with(None)) is None


def test_adapters_may_start_while_a_slot_is_free_and_those_with_a_slot_always() -> None:
    there = Slots(2)
    there.begin(0.0)
    assert there.may_start("xyz") == "xyz"
    assert there.take("xx") == [0, 0]
    assert there.may_start("xyz") == "xyz"
    assert there.take("y") == [1]
    assert there.may_start("xyz") == "xy"


def test_requests_that_run_when_the_first_step_begins_use_slots() -> None:
    there = Slots(1)
    assert there.begin(1.0, "x", "y") is None
    assert there.may_start("xy") == "x"
    assert there.begin(6.0, "x", "y") == "x"


def test_new_slots_are_free_and_nothing_is_to_be_loaded() -> None:
    there = Slots(1)
    assert (there.may_start("x"), there.starts()) == ("x", [])
    assert there.take("x") == [0]
    assert (there.may_start("xy"), there.starts()) == ("x", [(0, "x")])


def test_a_start_names_the_slot_the_folder_and_the_contents_and_is_told_once() -> None:
    there = Slots(1)
    there.begin(0.0)
    there.take("x")
    expected = AdapterStart(slot=0, name="x", path="/x", digest="digest of x")
    assert there.slots.take_starts() == (expected,)
    assert there.slots.take_starts() == ()


def test_starts_of_a_step_that_was_not_planned_to_its_end_are_dropped() -> None:
    there = Slots(1)
    there.begin(0.0)
    there.take("x")
    there.begin(1.0)
    assert there.starts() == []


def test_a_slot_in_use_is_never_cleared_for_another_adapter() -> None:
    there = full(3)
    there.begin(2.0, "xy")
    there.take("z")
    there.begin(3.0, "xz")
    there.starts()
    assert there.take("w") == [1]
    assert there.starts() == [(1, "w")]


def test_a_slot_that_is_used_again_is_kept_longest() -> None:
    there = full()
    there.begin(2.0)
    there.take("x")
    there.begin(3.0)
    assert there.take("z") == [1]  # y was used before x was used again
    there.begin(4.0)
    assert there.take("x") == [0]
    assert there.starts() == []


def test_the_slots_of_adapters_without_running_requests_are_free() -> None:
    there = full()
    there.begin(2.0, "y")
    assert there.may_start("xyz") == "xyz"


@pytest.mark.parametrize(("waited_s", "victim"), [(4.9, None), (5.0, "x"), (6.0, "x")])
def test_an_adapter_that_has_waited_for_five_seconds_gets_the_slot_that_was_taken_first(
    waited_s: float, victim: str | None
) -> None:
    there = full()
    assert there.begin(10.0, "xy", "z") is None
    assert there.begin(10.0 + waited_s, "yx", "z") == victim
    assert there.may_start("wz") == ("" if victim is None else "z")


def test_the_slot_of_an_adapter_that_runs_on_is_the_older_one_however_often_it_is_used() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    there.take("x")
    assert there.begin(7.0, "xy", "z") == "x"


def test_the_time_of_a_slot_begins_anew_when_no_request_used_it_in_between() -> None:
    there = full()
    there.begin(2.0, "y")
    there.take("x")
    there.begin(3.0, "xy", "z")
    assert there.begin(8.0, "xy", "z") == "y"


def test_the_slot_of_a_victim_that_may_not_be_preempted_yet_stays_in_use() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    assert there.begin(7.0, "xy", "z", may_preempt=False) == "x"
    assert (there.may_start("xyzw"), there.slots.reserved) == ("xy", None)
    assert there.begin(8.0, "xy", "z") == "x"
    assert (there.may_start("xyzw"), there.slots.reserved) == ("yz", "digest of z")
    there.take("z")
    assert there.slots.reserved is None


def test_a_free_slot_is_kept_for_the_adapter_that_has_waited_too_long() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    assert there.begin(7.0, "y", "z") is None
    assert there.may_start("xyzw") == "yz"
    assert there.take("z") == [0]
    assert there.starts() == [(0, "z")]


def test_a_slot_beside_the_one_that_is_kept_may_be_taken() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    assert there.begin(7.0, "", "z") is None
    assert there.may_start("wz") == "wz"
    there.take("w")
    assert there.may_start("vwz") == "wz"


def test_a_slot_is_kept_no_longer_when_its_adapter_has_started() -> None:
    there = full(3)
    there.begin(2.0, "xy")
    there.take("w")
    there.begin(3.0, "xyw", "z")
    assert there.begin(8.0, "x", "z") is None
    there.take("z")
    assert there.may_start("v") == "v"


def test_the_adapter_that_has_waited_longest_comes_first() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    there.begin(4.0, "xy", "az")
    assert there.begin(9.5, "xy", "az") == "x"
    assert there.may_start("az") == "z"
    there.take("z")
    assert there.begin(9.6, "zy", "a") == "y"
    assert there.may_start("az") == "az"


def test_an_adapter_that_waits_no_longer_begins_anew() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    there.begin(3.0, "xy")
    there.begin(4.0, "xy", "z")
    assert there.begin(8.0, "xy", "z") is None
    assert there.begin(9.0, "xy", "z") == "x"


def test_a_slot_that_was_free_for_a_moment_does_not_begin_the_wait_anew() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    there.begin(3.0, "x", "z")
    there.take("w")
    assert there.begin(7.0, "xw", "z") == "x"


def test_adapters_do_not_wait_while_a_slot_is_free() -> None:
    there = Slots(2)
    there.begin(0.0)
    there.take("x")
    there.begin(1.0, "x", "z")
    there.take("y")
    there.begin(6.0, "xy", "z")
    assert there.begin(10.9, "xy", "z") is None
    assert there.begin(11.0, "xy", "z") == "x"


def test_an_adapter_in_use_waits_for_no_slot() -> None:
    there = full()
    there.begin(2.0, "xy", "xy")
    assert there.begin(9.0, "xy", "xyz") is None
    assert there.begin(13.9, "xy", "xyz") is None
    assert there.begin(14.0, "xy", "xyz") == "x"


def test_the_wait_of_an_adapter_ends_when_it_takes_a_slot() -> None:
    there = full()
    there.begin(2.0, "xy", "z")
    assert there.begin(7.0, "xy", "z") == "x"
    there.take("z")
    # Its request has ended in this step, and x has taken the slot again: another request with z waits from now on.
    assert there.begin(8.0, "xy", "z") is None
    assert there.begin(12.9, "xy", "z") is None
    assert there.begin(13.0, "xy", "z") == "y"


def test_an_adapter_is_loaded_anew_after_a_failed_load_into_its_slot() -> None:
    there = full()
    there.slots.load_again(sequence_with("y"))
    there.slots.load_again(sequence_with(None))
    there.slots.load_again(sequence_with("w"))
    there.begin(2.0)
    assert there.take("xy") == [0, 1]
    assert there.starts() == [(1, "y")]
    there.begin(3.0)
    there.take("y")
    assert there.starts() == []


def test_an_adapter_that_has_lost_its_slot_since_its_load_failed_is_loaded_once() -> None:
    there = Slots(1)
    there.begin(0.0)
    there.take("x")
    there.slots.load_again(sequence_with("x"))
    there.begin(1.0)
    assert there.take("y") == [0]
    there.begin(2.0)
    assert there.take("x") == [0]
    assert there.starts() == [(0, "x")]
    there.begin(3.0)
    assert there.take("x") == [0]
    assert there.starts() == []


def test_an_adapter_that_never_had_a_slot_is_not_to_be_loaded_again() -> None:
    there = Slots(1)
    there.slots.load_again(sequence_with("x"))
    there.begin(0.0)
    there.take("xx")
    assert there.starts() == [(0, "x")]
