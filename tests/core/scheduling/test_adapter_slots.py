"""Slots of LoRA adapters: how many are in a step, which one makes way, and how long an adapter waits at most."""

from __future__ import annotations

import pytest

from tests.core.stage import Stage
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request.lora import Adapter
from triolet.core.scheduling.adapter_slots import MAX_WAIT_S
from triolet.core.step_plan import RowFailure, StepResult


def adapter(name: str) -> Adapter:
    return Adapter(name=name, int_id=ord(name), path=f"/{name}", digest=f"digest of {name}")


def stage(num_slots: int) -> Stage:
    return Stage(max_adapters=num_slots, max_num_batched_tokens=64, num_blocks=64, max_num_seqs=8)


def names(there: Stage) -> set[str]:
    """Requests of one whole step."""
    return {name for name, _, _ in there.step()}


def test_a_request_whose_adapter_has_no_slot_is_overtaken() -> None:
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
