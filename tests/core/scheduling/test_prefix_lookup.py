"""Requests that begin alike and come together: one computes the beginning, the others find it a step later."""

from __future__ import annotations

import pytest

from tests.core.make import make_request
from tests.core.stage import Stage
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.scheduling.admission import MAX_HELD, PrefixesInStep, find_computed, has_room
from triolet.core.scheduling.sequence import Sequence

BEGINNING = list(range(100, 112))  # three blocks


def wide_stage(**config: object) -> Stage:
    return Stage(**{"max_num_batched_tokens": 64, "num_blocks": 64} | config)


def test_a_beginning_that_several_have_is_computed_once() -> None:
    stage = wide_stage()
    for name, end in (("a", 1), ("b", 2), ("c", 3)):
        stage.add(name, [*BEGINNING, end])
    assert stage.step() == [("a", 0, 13)]
    assert stage.step() == [("a", 13, 1), ("b", 12, 1), ("c", 12, 1)]


def test_a_request_that_begins_otherwise_is_let_in_past_those_that_wait_for_a_beginning() -> None:
    stage = wide_stage()
    stage.add("a", [*BEGINNING, 1])
    stage.add("b", [*BEGINNING, 2])
    stage.add("c", 9)
    assert stage.step() == [("a", 0, 13), ("c", 0, 9)]
    assert stage.step() == [("a", 13, 1), ("c", 9, 1), ("b", 12, 1)]


@pytest.mark.parametrize(("num_own_tokens", "waits"), [(12, True), (13, False)])
def test_no_request_waits_to_save_less_than_half_of_its_work(num_own_tokens: int, waits: bool) -> None:
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


def test_a_request_that_a_step_has_no_token_left_for_is_not_deferred() -> None:
    stage = wide_stage(max_num_batched_tokens=len(BEGINNING) + 1)
    for name, end in (("a", 1), ("b", 2)):
        stage.add(name, [*BEGINNING, end])
    stage.in_flight()
    assert (stage.scheduler.num_waiting, stage.scheduler.num_deferred) == (1, 0)


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


def test_a_request_that_waits_for_a_beginning_computes_it_when_the_other_one_is_gone() -> None:
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
def test_no_request_waits_for_what_it_could_not_find(
    config: dict[str, object], fields: dict[str, object]
) -> None:
    stage = wide_stage(**config)
    stage.add("a", [*BEGINNING, 1])
    stage.add("b", [*BEGINNING, 2], **fields)  # type: ignore[arg-type]
    assert stage.step() == [("a", 0, 13), ("b", 0, 13)]


def test_a_request_that_may_overtake_waits_for_a_beginning_and_preempts_none_meanwhile() -> None:
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


def test_a_request_waits_for_the_part_of_a_beginning_that_it_could_find_and_for_nothing_else() -> None:
    stage = wide_stage()
    stage.add("a", [*BEGINNING, 1])
    stage.add("nine", BEGINNING[:9])  # two blocks of the three
    stage.add("four", BEGINNING[:4])  # its last token is computed anyway, and no block but that one
    assert stage.step() == [("a", 0, 13), ("four", 0, 4)]
    assert ("nine", 8, 1) in stage.step()


@pytest.mark.parametrize(
    ("num_same", "num_own", "waits"),
    [(20, 1, True), (20, 12, True), (20, 13, False), (12, 4, True), (12, 9, False)],
)
def test_what_is_cached_already_counts_neither_as_work_nor_as_saved(
    num_same: int, num_own: int, waits: bool
) -> None:
    stage = wide_stage(max_model_len=128)
    long = list(range(100, 120))
    stage.add("earlier", [*long[:8], 5], max_tokens=1)
    stage.step()
    stage.add("a", [*long, 1])
    stage.add("b", [*long[:num_same], *range(200, 200 + num_own)])
    assert [(name, start) for name, start, _ in stage.step()] == [("a", 8), *([] if waits else [("b", 8)])]


def test_a_decode_that_fills_a_block_is_not_waited_for() -> None:
    stage = wide_stage()
    stage.add("a", BEGINNING[:11])
    stage.step(a=111)  # the 12th token, computed in the next step
    stage.add("b", [*BEGINNING[:11], 111, 1])
    assert stage.step() == [("a", 11, 1), ("b", 8, 5)]


def sequence_of(stage: Stage, token_ids: list[int]) -> Sequence:
    entry = stage.journal.open(make_request(token_ids))
    sequence = Sequence(entry, (0.0, entry.serial))
    find_computed(stage.scheduler.cache, sequence, None)
    return sequence


def test_only_what_the_step_computes_of_a_beginning_is_waited_for() -> None:
    stage = wide_stage()
    prefixes = PrefixesInStep(stage.scheduler.cache)
    long = list(range(100, 132))
    first, other = sequence_of(stage, [*long, 1]), sequence_of(stage, [*long, 2])
    prefixes.add(first, 12)
    assert not prefixes.holds(other, ([], []))  # 12 of 33
    prefixes.begin_step()
    prefixes.add(first, 20)
    assert prefixes.holds(other, ([], []))
    assert prefixes.held == {other.entry.serial}


def test_at_most_256_requests_wait_for_the_beginnings_of_a_step() -> None:
    prefixes = PrefixesInStep(wide_stage().scheduler.cache)
    prefixes.held.update(range(255))
    assert not prefixes.is_full
    prefixes.held.add(255)
    assert prefixes.is_full


@pytest.mark.parametrize(("num_deferred", "is_admitted"), [(MAX_HELD - 1, True), (MAX_HELD, False)])
def test_a_step_that_defers_as_many_requests_as_it_may_looks_at_no_other_one(
    num_deferred: int, is_admitted: bool
) -> None:
    stage = wide_stage()
    for name in ("first", *("deferred",) * num_deferred):
        stage.add(name, BEGINNING)
    stage.add("other", 1)
    assert stage.step() == [("first", 0, 12), ("other", 0, 1)][: 1 + is_admitted]


def test_room_is_needed_for_the_blocks_that_are_missing_and_for_those_that_would_be_revived() -> None:
    stage = wide_stage(num_blocks=16)
    cache, pool = stage.scheduler.cache, stage.pool
    entry = stage.journal.open(make_request(range(9)))  # three blocks
    table = pool.allocate(15)
    for block_id in table[:2]:
        pool.keep(block_id)
    assert has_room(cache, entry, table[:2])  # both are in use: one is missing, and one is free
    assert not has_room(cache, entry, table[:1])
    pool.release(table[:2])
    other = pool.allocate(1)
    assert not has_room(cache, entry, table[:2])  # two are revived, and none is left for the third
    pool.release(other)
    assert has_room(cache, entry, table[:2])


@pytest.mark.parametrize(("num_tokens", "start"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8)])
def test_without_a_cache_an_answer_takes_the_full_blocks_of_its_prompt_from_the_first_one_but_the_last_token(
    num_tokens: int, start: int
) -> None:
    stage = wide_stage(enable_prefix_caching=False)
    first = stage.add("first", range(num_tokens))
    stage.journal.open(make_request(range(num_tokens), request_id="second", index=1), after=first)
    assert stage.step() == [("first", 0, num_tokens)]
    assert stage.step() == [("first", num_tokens, 1), ("second", start, num_tokens - start)]


def test_tokens_of_a_prompt_left_in_the_cache_are_counted_once_and_without_those_found_there() -> None:
    stage = wide_stage(max_num_batched_tokens=8)
    first = stage.add("a", [*BEGINNING, 1])
    counts = []
    for _ in range(6):
        stage.step()
        counts.append(first.num_cache_creation_tokens)
    assert counts == [8, 12, 12, 12, 12, 12]  # a block of the answer is none of the prompt
    second = stage.add("b", [*BEGINNING, *range(200, 208)])
    stage.step()
    stage.step()
    assert (second.num_cached_tokens, second.num_cache_creation_tokens) == (12, 8)
