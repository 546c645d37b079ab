"""How a step is put together: one small story per rule."""

from __future__ import annotations

import pytest

from tests.core.stage import Stage
from triolet.core.kv_cache.cache_groups import CacheGroups
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.scheduling.budget import CostModel
from triolet.core.step_plan import SampledToken, StepResult

# --------------------------------------------------------------------------- one token budget


def test_with_nothing_to_compute_there_is_no_step() -> None:
    stage = Stage()
    assert stage.begin() is None
    assert stage.scheduler.counters.steps == 0


def test_a_short_prompt_is_computed_in_one_step_and_then_decoded() -> None:
    stage = Stage()
    entry = stage.add("a", 5)
    assert [stage.step(a=token_id) for token_id in (7, 8, 9)] == [[("a", 0, 5)], [("a", 5, 1)], [("a", 6, 1)]]
    assert entry.output_token_ids == [7, 8, 9]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    stage = Stage(max_num_batched_tokens=7)
    stage.add("a", 20)
    plans = []
    for _ in range(4):
        plans.append(stage.in_flight())
        stage.end(plans[-1])
    assert [stage.shares(plan) for plan in plans] == [
        [("a", 0, 7)],
        [("a", 7, 7)],
        [("a", 14, 6)],
        [("a", 20, 1)],
    ]
    assert [plan.rows[0].sample for plan in plans] == [False, False, True, True]


def test_a_prompt_as_long_as_the_budget_is_one_chunk() -> None:
    stage = Stage(max_num_batched_tokens=8)
    stage.add("a", 8)
    assert [stage.step(), stage.step()] == [[("a", 0, 8)], [("a", 8, 1)]]


def test_requests_share_a_budget() -> None:
    stage = Stage(max_num_batched_tokens=8)
    for name in "abc":
        stage.add(name, 5)
    assert stage.step() == [("a", 0, 5), ("b", 0, 3)]
    assert stage.step() == [("a", 5, 1), ("b", 3, 2), ("c", 0, 5)]
    assert stage.step() == [("a", 6, 1), ("b", 5, 1), ("c", 5, 1)]


def test_running_requests_go_before_waiting_ones() -> None:
    stage = Stage(max_num_batched_tokens=4)
    stage.add("a", 12)
    assert stage.step() == [("a", 0, 4)]
    stage.add("b", 3)
    assert [stage.step() for _ in range(3)] == [
        [("a", 4, 4)],
        [("a", 8, 4)],
        [("a", 12, 1), ("b", 0, 3)],
    ]


def test_decodes_go_before_chunks_of_prompts() -> None:
    stage = Stage(policy="priority")
    stage.add("a", 4, priority=1)
    assert stage.step() == [("a", 0, 4)]
    stage.add("b", 20, priority=1)
    assert stage.step() == [("a", 4, 1), ("b", 0, 7)]
    stage.add("c", 3, priority=0)
    assert stage.step() == [("c", 0, 3), ("a", 5, 1), ("b", 7, 4)]
    assert stage.step() == [("c", 3, 1), ("a", 6, 1), ("b", 11, 6)]


def test_with_a_small_budget_as_many_run_as_can_all_get_on_at_every_step() -> None:
    stage = Stage(max_num_batched_tokens=2, max_num_seqs=4)
    for name in "abc":
        stage.add(name, 1, max_tokens=6)
    steps = [stage.step() for _ in range(7)]
    assert [[name for name, _, _ in shares] for shares in steps] == [["a", "b"]] * 6 + [["c"]]


def test_a_prompt_beside_decodes_gets_on_with_what_they_leave() -> None:
    stage = Stage(max_num_batched_tokens=3)
    for name in "ab":
        stage.add(name, 1)
    stage.step()
    stage.add("c", 4)
    assert [stage.step()[2:] for _ in range(5)] == [[("c", start, 1)] for start in range(5)]


def test_no_more_requests_run_than_there_are_rows() -> None:
    stage = Stage(max_num_seqs=2)
    for name in "abc":
        stage.add(name, 1)
    assert stage.step() == [("a", 0, 1), ("b", 0, 1)]
    assert (stage.scheduler.num_running, stage.scheduler.num_waiting) == (2, 1)


# ------------------------------------------------------------------------------- what is let in


def test_first_come_first_served() -> None:
    stage = Stage(max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        stage.add(name, 2, priority=priority)  # which fcfs does not look at
    assert stage.waiting() == ["a", "b", "c"]


def test_under_priority_lower_numbers_go_first_and_of_equals_the_earlier() -> None:
    stage = Stage(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0), ("e", -5)):
        stage.add(name, 2, priority=priority)
    assert stage.waiting() == ["e", "b", "d", "c", "a"]


def test_admission_needs_room_for_all_known_tokens_not_for_the_first_chunk() -> None:
    stage = Stage(num_blocks=4, max_num_batched_tokens=4, max_model_len=16)
    stage.add("a", 4)
    stage.add("b", 16)
    assert stage.step() == [("a", 0, 4)]
    assert stage.step() == [("a", 4, 1)]  # 3 tokens of the budget are left, 2 blocks are free, b needs 4
    assert stage.pool.num_free == 2


def test_a_request_that_fits_exactly_is_let_in() -> None:
    stage = Stage(num_blocks=4, max_model_len=16)
    stage.add("a", 4)
    stage.add("b", 12)
    assert stage.step() == [("a", 0, 4), ("b", 0, 4)]


def test_a_request_that_waits_for_room_is_not_overtaken() -> None:
    stage = Stage(num_blocks=4, max_model_len=16)
    stage.add("a", 4)
    stage.add("b", 14)
    stage.add("c", 1)
    assert stage.step() == [("a", 0, 4)]
    assert stage.waiting() == ["b", "c"]


def test_all_blocks_of_a_prompt_come_with_its_first_chunk() -> None:
    stage = Stage(max_num_batched_tokens=4)
    stage.add("a", 10)
    new_block_ids = []
    for _ in range(6):
        plan = stage.in_flight()
        new_block_ids.append(plan.rows[0].new_block_ids)
        stage.end(plan)
    # 10 tokens are 3 blocks; the fourth comes with token 12.
    assert [len(block_ids) for block_ids in new_block_ids] == [3, 0, 0, 0, 0, 1]


def test_a_row_start_says_all_that_the_answer_depends_on() -> None:
    stage = Stage()
    entry = stage.add(
        "a",
        [1, 2, 3],
        params={"temperature": 0.5, "min_tokens": 2, "stop_token_ids": [6], "bad_words": ["no"]},
        seed=77,
        eos_token_ids=(4, 5),
        bad_words_token_ids=((8, 9),),
    )
    (start,) = stage.in_flight().starts
    assert (start.request_id, start.epoch, start.seed) == ("a", entry.epoch, 77)
    assert (start.prompt_token_ids, start.output_token_ids) == ((1, 2, 3), ())
    assert start.params is entry.request.params
    assert start.ending_token_ids == {4, 5, 6}  # what the sampler masks while there are fewer than min_tokens
    assert start.bad_words_token_ids == ((8, 9),)


def test_an_ignored_end_of_sequence_is_masked_before_min_tokens_as_in_vllm() -> None:
    stage = Stage()
    stage.add("a", 3, params={"ignore_eos": True, "stop_token_ids": [6]}, eos_token_ids=(4, 5))
    (start,) = stage.in_flight().starts
    assert start.ending_token_ids == {4, 5, 6}


# --------------------------------------------------------------------------------- preemption


def full_house(policy: str = "fcfs", **priorities: int) -> Stage:
    """Two requests of 7 tokens in 4 blocks; when each has 8 computed, a ninth has no room."""
    stage = Stage(num_blocks=4, max_num_batched_tokens=16, max_model_len=16, policy=policy)
    for name in "ab":
        stage.add(name, 7, priority=priorities.get(name, 0))
    assert sorted(stage.step(a=1, b=2)) == [("a", 0, 7), ("b", 0, 7)]
    assert sorted(stage.step(a=3, b=4)) == [("a", 7, 1), ("b", 7, 1)]
    assert stage.pool.num_available == 0
    return stage


@pytest.mark.parametrize(
    ("policy", "priorities", "survivor", "victim"),
    [
        ("fcfs", {}, "a", "b"),
        ("fcfs", {"a": 1, "b": 0}, "a", "b"),
        ("priority", {}, "a", "b"),
        ("priority", {"a": 0, "b": 1}, "a", "b"),
        ("priority", {"a": 1, "b": 0}, "b", "a"),
    ],
)
def test_without_a_block_the_newest_or_the_least_important_loses_its_own(
    policy: str, priorities: dict[str, int], survivor: str, victim: str
) -> None:
    stage = full_house(policy, **priorities)
    entries = {entry.request.request_id: entry for entry in stage.journal}
    assert stage.step() == [(survivor, 8, 1)]
    assert stage.waiting() == [victim]
    assert entries[victim].num_preemptions == 1
    assert entries[survivor].num_preemptions == 0
    assert stage.scheduler.counters.num_preemptions == 1


def test_a_request_can_be_its_own_victim() -> None:
    stage = Stage(num_blocks=4, max_num_batched_tokens=16, max_model_len=16)
    stage.add("a", 6)
    stage.add("b", 7)
    stage.step()
    stage.step()
    assert stage.step() == [("a", 7, 1)]  # b needs a third block and is the newest itself
    assert stage.waiting() == ["b"]


def test_the_preempted_request_starts_again_with_its_answer_so_far() -> None:
    stage = full_house()
    a, b = stage.journal
    epoch = b.epoch
    stage.step()
    assert b.epoch != epoch
    stage.scheduler.abort(a.serial)
    plan = stage.in_flight()
    (start,) = plan.starts
    assert (start.request_id, start.epoch, start.output_token_ids) == ("b", b.epoch, (2, 4))
    assert stage.shares(plan) == [("b", 4, 5)]  # its first block was still in the cache, the second evicted
    stage.end(plan, {"b": 5})
    assert b.output_token_ids == [2, 4, 5]


def test_a_step_that_preempted_admits_no_request() -> None:
    stage = full_house()
    stage.add("c", 1)
    assert stage.step() == [("a", 8, 1)]  # one block of b's two is free, and c would fit
    assert stage.pool.num_available == 1
    assert stage.waiting() == ["b", "c"]


def test_a_preempted_request_returns_to_its_place_before_later_ones() -> None:
    stage = full_house()
    stage.add("c", 1)
    a, _, _ = stage.journal
    stage.step()
    stage.scheduler.abort(a.serial)
    assert [name for name, _, _ in stage.step()] == ["b", "c"]


def test_under_priority_a_preempted_request_waits_behind_better_ones() -> None:
    stage = full_house("priority", a=0, b=2)
    stage.add("c", 1, priority=3)
    stage.add("d", 1, priority=2)
    stage.step()
    assert stage.waiting() == ["b", "d", "c"]


def test_a_result_of_a_stay_before_the_preemption_is_late() -> None:
    stage = full_house()
    a, b = stage.journal
    late = SampledToken("b", b.epoch, len(b.output_token_ids), 99)
    stage.step()
    stage.scheduler.abort(a.serial)
    plan = stage.in_flight()
    stage.scheduler.apply(StepResult(plan.step_id, (late,)), 0.0)
    assert 99 not in b.output_token_ids


# ------------------------------------------------------------------------------ the prefix cache


def test_a_running_neighbours_beginning_is_found() -> None:
    stage = Stage(max_num_batched_tokens=16)
    stage.add("a", range(9))
    first = stage.in_flight()
    stage.end(first)
    entry = stage.add("b", range(9))
    plan = stage.in_flight()
    assert stage.shares(plan) == [("a", 9, 1), ("b", 8, 1)]
    assert plan.rows[1].new_block_ids[:2] == first.rows[0].new_block_ids[:2]
    assert entry.num_cached_tokens == 8
    counters = stage.scheduler.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (18, 8)


def test_what_is_computed_in_this_very_step_is_not_found_yet() -> None:
    stage = Stage(max_num_batched_tokens=32)
    stage.add("a", range(9))
    stage.add("b", [*range(4), 50, 51, 52, 53, 54])
    assert stage.step() == [("a", 0, 9), ("b", 0, 9)]


@pytest.mark.parametrize(("num_tokens", "start"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_a_hit_leaves_a_token_to_compute(num_tokens: int, start: int) -> None:
    stage = Stage(max_num_batched_tokens=16)
    stage.add("a", range(9), max_tokens=1)
    stage.step()
    stage.add("b", range(num_tokens))
    assert stage.step() == [("b", start, num_tokens - start)]


def test_a_block_is_found_as_soon_as_it_is_full() -> None:
    stage = Stage(max_num_batched_tokens=16)
    stage.add("a", range(8), max_tokens=1)
    stage.step()
    stage.add("b", range(9))
    assert stage.step() == [("b", 8, 1)]


def test_only_blocks_that_are_full_and_computed_are_found() -> None:
    stage = Stage(max_num_batched_tokens=6)
    stage.add("a", range(12))
    stage.step()  # 6 of 12 tokens: one block is full
    stage.scheduler.abort(1)
    stage.add("b", range(12))
    assert stage.step() == [("b", 4, 6)]


def test_the_answer_is_found_like_a_prompt() -> None:
    stage = Stage(max_num_batched_tokens=16)
    stage.add("a", range(6), max_tokens=4)
    for token_id in (6, 7, 8, 9):
        stage.step(a=token_id)
    stage.add("b", range(12))
    assert stage.step() == [("b", 8, 4)]


def test_a_salt_keeps_prefixes_apart() -> None:
    stage = Stage(max_num_batched_tokens=32)
    stage.add("a", range(9), cache_namespace=CacheNamespace(salt="one"), max_tokens=1)
    stage.step()
    stage.add("b", range(9), cache_namespace=CacheNamespace(salt="two"))
    stage.add("c", range(9))
    stage.add("d", range(9), cache_namespace=CacheNamespace(salt="one"))
    assert stage.step() == [("b", 0, 9), ("c", 0, 9), ("d", 8, 1)]


def test_switched_off_nothing_is_found_and_nothing_counted() -> None:
    stage = Stage(enable_prefix_caching=False, max_num_batched_tokens=16)
    stage.add("a", range(9), max_tokens=1)
    stage.step()
    assert stage.pool.num_cached == 0
    stage.add("b", range(9))
    assert stage.step() == [("b", 0, 9)]
    assert stage.scheduler.counters.prefix_cache_queries == 0


def test_reviving_cached_blocks_counts_as_taking_room() -> None:
    # 4 blocks: 2 are cached, 2 in use by b. c would find the 2 cached ones and needs a third.
    stage = Stage(num_blocks=4, max_num_batched_tokens=16, max_model_len=16)
    stage.add("a", range(8), max_tokens=1)
    stage.step()
    stage.add("b", 7)
    stage.step()
    stage.add("c", range(9))
    assert stage.step() == [("b", 7, 1)]
    assert stage.waiting() == ["c"]


def test_after_a_preemption_cached_tokens_are_still_those_of_the_first_admission() -> None:
    stage = full_house()
    a, b = stage.journal
    stage.step()
    stage.scheduler.abort(a.serial)
    assert stage.step() == [("b", 4, 5)]
    assert b.num_cached_tokens == 0


def test_what_may_be_computed_in_a_step_is_enough_for_all_that_decode() -> None:
    stage = Stage(max_num_batched_tokens=64, num_sure_tokens=2, max_prefill_delay_s=1.0)
    stage.scheduler._token_budget.costs.token_s = 0.001
    for name in "abcd":
        stage.add(name, 3)
    stage.step()
    stage.scheduler._token_budget.costs.token_s = 10.0
    assert [share[2] for share in stage.step()] == [1, 1, 1, 1]


def test_when_requests_lose_their_rows_in_their_turn_others_have_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(num_blocks=4, max_model_len=16, max_num_batched_tokens=16)
    for name in "ab":
        stage.add(name, 8)
    stage.step()
    line = stage.scheduler._queues.waiting
    turns = iter([slice(-1, None), slice(None)])  # the last one's, then that of all
    monkeypatch.setattr(line, "taking_part", lambda order: order[next(turns)])
    assert stage.pool.num_available == 0
    assert stage.shares(stage.begin()) == [("a", 8, 1)]


def test_prompts_beside_a_decode_share_the_time_that_they_may_take_and_a_running_one_goes_first() -> None:
    stage = Stage(max_num_batched_tokens=64, num_blocks=64, max_prefill_delay_s=2.0)
    stage.add("decodes", 3)
    stage.step()
    stage.scheduler._token_budget.costs = CostModel(row_s=1.0, token_s=0.125)
    stage.add("a", 30)
    stage.add("b", 30)
    assert stage.step() == [("decodes", 3, 1), ("a", 0, 16)]
    assert stage.step() == [("decodes", 4, 1), ("a", 16, 14), ("b", 0, 2)]


def test_prompts_where_no_request_decodes_take_the_whole_budget() -> None:
    stage = Stage(max_num_batched_tokens=20, num_blocks=64, max_prefill_delay_s=0.5)
    stage.scheduler._token_budget.costs = CostModel(row_s=1.0, token_s=0.125)
    stage.add("a", 30)
    assert [stage.step(), stage.step()] == [[("a", 0, 20)], [("a", 20, 10)]]


def test_decodes_are_served_before_prompts_that_came_earlier() -> None:
    stage = Stage(max_num_batched_tokens=64, num_blocks=64, max_prefill_delay_s=0.5)
    stage.add("first", 3)
    stage.step()
    stage.scheduler._token_budget.costs = CostModel(row_s=1.0, token_s=0.125)
    stage.add("prompt", 18)
    stage.add("decode", 1)
    assert stage.step() == [("first", 3, 1), ("prompt", 0, 16), ("decode", 0, 1)]
    assert stage.step() == [("first", 4, 1), ("decode", 1, 1), ("prompt", 16, 2)]


# --------------------------------------------------------------------------- windows


def test_a_prompt_that_its_window_holds_gets_all_its_blocks_when_it_is_admitted() -> None:
    stage = Stage(groups=CacheGroups((20,)), max_num_batched_tokens=4)
    stage.add("a", 16)
    assert stage.step() == [("a", 0, 4)]
    assert stage.pool.num_in_use == 4


def test_a_longer_prompt_gets_as_many_blocks_as_its_window_keeps_and_gives_back_what_it_has_passed() -> None:
    stage = Stage(groups=CacheGroups((5,)), max_num_batched_tokens=4)
    stage.add("a", 40)
    assert stage.step() == [("a", 0, 4)]
    assert stage.pool.num_in_use == 2  # the token's own, and one that the four tokens before it fill
    for start in range(4, 40, 4):
        assert stage.step() == [("a", start, 4)]
        assert stage.pool.num_in_use <= 2


def test_what_another_replica_computed_is_measured_by_all_that_will_decode() -> None:
    """A single request that decodes would otherwise keep a crowd waiting, a block at a time."""
    stage = Stage(num_blocks=200, max_num_seqs=10, max_num_batched_tokens=300, max_model_len=400)
    stage.add("a", 3)
    stage.step()
    costs = CostModel(fixed_s=0.0, row_s=1.0, token_s=0.05)
    stage.scheduler._token_budget.costs = costs
    for name in "bcdefghij":
        stage.add(name, 100).num_moved_tokens = 100
    # 10 decodes will take 10 seconds; in 2 fifths of that 80 tokens are computed
    assert stage.step() == [("a", 3, 1), ("b", 0, 80)]
    stage.scheduler.abort(1)
    assert stage.step()[:2] == [("b", 80, 20), ("c", 0, 100)]
