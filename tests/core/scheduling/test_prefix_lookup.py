"""Requests that begin alike and come together: one computes the beginning, the others find it a step later."""

from __future__ import annotations

import pytest

from tests.core.stage import Stage
from triolet.core.kv_cache.prefix_cache import CacheNamespace

BEGINNING = list(range(100, 112))  # three blocks


def wide_stage(**config: object) -> Stage:
    return Stage(**{"max_num_batched_tokens": 64, "num_blocks": 64} | config)


def test_a_beginning_that_several_have_is_computed_once() -> None:
    stage = wide_stage()
    for name, end in (("a", 1), ("b", 2), ("c", 3)):
        stage.add(name, [*BEGINNING, end])
    assert stage.step() == [("a", 0, 13)]
    assert stage.step() == [("a", 13, 1), ("b", 12, 1), ("c", 12, 1)]


def test_who_begins_otherwise_is_let_in_past_those_that_wait_for_a_beginning() -> None:
    stage = wide_stage()
    stage.add("a", [*BEGINNING, 1])
    stage.add("b", [*BEGINNING, 2])
    stage.add("c", 9)
    assert stage.step() == [("a", 0, 13), ("c", 0, 9)]
    assert stage.step() == [("a", 13, 1), ("c", 9, 1), ("b", 12, 1)]


@pytest.mark.parametrize(("num_own_tokens", "waits"), [(12, True), (13, False)])
def test_nobody_waits_to_save_less_than_half_of_its_work(num_own_tokens: int, waits: bool) -> None:
    stage = wide_stage()
    stage.add("a", [*BEGINNING, 1])
    stage.add("b", [*BEGINNING, *range(200, 200 + num_own_tokens)])
    assert [name for name, _, _ in stage.step()] == (["a"] if waits else ["a", "b"])


def test_those_that_wait_for_a_beginning_are_counted_as_deferred_and_those_that_wait_for_room_are_not() -> (
    None
):
    stage = wide_stage(max_num_seqs=1)
    stage.add("a", [*BEGINNING, 1])
    stage.add("room", 9)
    stage.in_flight()
    assert (stage.scheduler.num_waiting, stage.scheduler.num_deferred) == (1, 0)
    stage = wide_stage()
    for name, end in (("a", 1), ("b", 2), ("c", 3)):
        stage.add(name, [*BEGINNING, end])
    stage.in_flight()
    assert (stage.scheduler.num_waiting, stage.scheduler.num_deferred) == (2, 2)


def test_a_beginning_of_exactly_one_block_is_waited_for() -> None:
    stage = wide_stage()
    stage.add("a", BEGINNING[:4])
    stage.add("b", [*BEGINNING[:4], 2])
    assert stage.step() == [("a", 0, 4)]
    assert stage.step() == [("a", 4, 1), ("b", 4, 1)]


def test_a_long_beginning_is_waited_for_chunk_by_chunk() -> None:
    stage = wide_stage(max_num_batched_tokens=20, max_model_len=64)
    long = list(range(100, 132))
    stage.add("a", [*long, 1])
    stage.add("b", [*long, 2])
    assert stage.step() == [("a", 0, 20)]
    assert stage.step() == [("a", 20, 13)]  # the budget has room for b, which would compute the same again
    assert stage.step() == [("a", 33, 1), ("b", 32, 1)]


def test_who_waits_for_a_beginning_computes_it_when_the_other_one_is_gone() -> None:
    stage = wide_stage()
    first = stage.add("a", [*BEGINNING, 1])
    stage.add("b", [*BEGINNING, 2])
    plan = stage.in_flight()
    stage.scheduler.abort(first.serial)
    stage.end(plan)
    assert stage.step() == [("b", 0, 13)]


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        pytest.param({"enable_prefix_caching": False}, {}, id="nothing is cached"),
        pytest.param({}, {"cache_namespace": CacheNamespace(salt="mine")}, id="another salt"),
        pytest.param({}, {"params": {"prompt_logprobs": 1}}, id="the cache must not be read"),
    ],
)
def test_nobody_waits_for_what_it_could_not_find(
    config: dict[str, object], fields: dict[str, object]
) -> None:
    stage = wide_stage(**config)
    stage.add("a", [*BEGINNING, 1])
    stage.add("b", [*BEGINNING, 2], **fields)  # type: ignore[arg-type]
    assert stage.step() == [("a", 0, 13), ("b", 0, 13)]


def test_who_may_overtake_waits_for_a_beginning_and_preempts_nobody_meanwhile() -> None:
    stage = wide_stage(policy="priority", max_num_seqs=2)
    stage.add("worse", 9, priority=5)
    stage.step()
    stage.add("a", [*BEGINNING, 1], priority=0)
    stage.add("b", [*BEGINNING, 2], priority=0)
    assert stage.step() == [("a", 0, 13), ("worse", 9, 1)]
    assert stage.scheduler.counters.num_preemptions == 0
    assert stage.step() == [("a", 13, 1), ("b", 12, 1)]
    assert stage.scheduler.counters.num_preemptions == 1


@pytest.mark.parametrize(("owner_of_flood", "stays"), [("modest", False), ("greedy", True)])
def test_what_one_key_computes_does_not_evict_the_beginning_of_another_one(
    owner_of_flood: str, stays: bool
) -> None:
    stage = Stage(num_blocks=16, max_num_batched_tokens=64)
    stage.add("first", [*BEGINNING, 1], max_tokens=1, owner="modest")
    assert stage.step() == [("first", 0, 13)]
    for number in range(10):
        start = 1000 + 20 * number
        stage.add(f"flood{number}", range(start, start + 20), max_tokens=1, owner=owner_of_flood)
        stage.step()
    stage.add("second", [*BEGINNING, 2], owner="modest")
    assert stage.step() == [("second", 12 if stays else 0, 1 if stays else 13)]
