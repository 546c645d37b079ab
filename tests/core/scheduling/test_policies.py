"""Preemption under `priority` and `fair`, and the accounts of clients."""

from __future__ import annotations

import ast
import math
import re

import attrs
import pytest

from tests.core.stage import Stage
from tests.source_tree import package_files, parse, where
from triolet.config.engine import EngineConfig
from triolet.core.journal import JournalEntry
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.budget import CostModel
from triolet.core.scheduling.policies.fair import MAX_ACCOUNTS, QUANTUM, SLACK, FairQueue
from triolet.core.scheduling.policies.registry import POLICIES


def names(shares: list[tuple[str, int, int]]) -> list[str]:
    return [name for name, _, _ in shares]


def priority_stage(**config: object) -> Stage:
    return Stage(**({"policy": "priority", "priority_aging_s": 10.0, "max_num_seqs": 2} | config))


def fair_stage(**config: object) -> Stage:
    return Stage(**({"policy": "fair", "max_num_seqs": 4, "num_blocks": 64} | config))


def served(stage: Stage, client: str) -> int:
    line = stage.scheduler._queues.waiting
    assert isinstance(line, FairQueue)
    return line.served(client)


# ------------------------------------------------------------------------------------------- registry


def test_every_policy_is_a_choice_of_the_configuration_and_its_help_says_what_it_does() -> None:
    help_text = attrs.fields(EngineConfig).policy.metadata["help"]
    for name, policy in POLICIES.items():
        assert EngineConfig(policy=name).policy == name
        assert f"{name} ({policy.summary})" in help_text


def test_no_module_compares_the_name_of_a_policy() -> None:
    named = [
        path for path in package_files() if re.search("policy|fair|fcfs", path.read_text(encoding="utf-8"))
    ]
    comparisons = [
        where(path, node)
        for path in named
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Compare) and re.search(r"policy\b|['\"](fair|fcfs)['\"]", ast.unparse(node))
    ]
    assert comparisons == []


# ------------------------------------------------------------------------------------------- priority


def test_a_better_priority_takes_the_row_of_the_worst_running_one() -> None:
    stage = priority_stage()
    stage.add("a", 3, priority=1)
    stage.add("b", 3, priority=2)
    stage.step()
    stage.add("c", 3, priority=0)
    assert names(stage.step()) == ["c", "a"]
    assert stage.waiting() == ["b"]


def test_an_equal_priority_takes_no_row() -> None:
    stage = priority_stage()
    for name in "ab":
        stage.add(name, 3, priority=1)
    stage.step()
    stage.add("c", 3, priority=1)
    assert names(stage.step()) == ["a", "b"]
    assert stage.scheduler.counters.num_preemptions == 0


def test_a_request_that_lost_its_row_goes_on_where_it_was_and_finds_its_blocks() -> None:
    stage = priority_stage()
    entry = stage.add("a", 8, priority=1, max_tokens=3)
    stage.step()
    stage.add("b", 3, priority=0, max_tokens=2)
    stage.add("c", 3, priority=0, max_tokens=2)
    stage.step()
    assert stage.waiting() == ["a"]
    stage.step()
    assert stage.step() == [("a", 8, 1)]
    assert entry.output_token_ids == [9, 9]


def test_a_better_priority_takes_blocks_where_rows_are_free() -> None:
    stage = priority_stage(num_blocks=4, max_model_len=16)
    stage.add("a", 8, priority=1)
    stage.step()
    stage.add("b", 9, priority=0)
    assert names(stage.step()) == ["b"]


def long_stage(**config: object) -> Stage:
    """Of 12 blocks a request of the best priority holds 8 soon, and one of a worse priority 2."""
    stage = priority_stage(num_blocks=12, max_model_len=48, max_num_batched_tokens=64, **config)
    stage.add("best", 28, priority=0)
    stage.add("worse", 7, priority=1)
    stage.step()
    return stage


def test_no_request_is_preempted_for_one_that_would_have_too_few_blocks_even_then() -> None:
    stage = long_stage(max_num_seqs=3)
    stage.add("next", 24, priority=0, max_tokens=1)  # 6 blocks
    assert [names(stage.step()) for _ in range(2)] == [["best", "worse"]] * 2
    assert (stage.waiting(), stage.scheduler.counters.num_preemptions) == (["next"], 0)


def test_a_request_that_cannot_have_room_yet_does_not_keep_the_next_step_from_being_planned_ahead() -> None:
    stage = long_stage(max_num_seqs=3, async_scheduling=True)
    stage.add("next", 24, priority=0, max_tokens=1)
    scheduler = stage.scheduler
    assert scheduler.plan_step(1.0) is not None
    assert scheduler.may_plan
    ahead = scheduler.plan_step(1.0)
    assert ahead is not None
    assert ahead.is_ahead


def test_all_that_make_way_are_preempted_where_their_blocks_together_are_room_enough() -> None:
    stage = priority_stage(num_blocks=12, max_model_len=48, max_num_batched_tokens=64, max_num_seqs=4)
    for name in "abc":
        stage.add(name, 12, priority=1)
    stage.step()
    stage.add("next", 24, priority=0)
    assert names(stage.step()) == ["next", "a"]
    assert stage.waiting() == ["b", "c"]


@pytest.mark.parametrize(
    ("num_tokens", "starts_alike", "num_preempted"),
    [
        pytest.param(33, False, 0, id="nine blocks, of which seven can be free"),
        pytest.param(25, False, 2, id="seven blocks"),
        pytest.param(29, True, 0, id="the same beginning, and five others, of which four can be free"),
        pytest.param(25, True, 2, id="the same beginning, and four others"),
    ],
)
def test_a_block_that_several_share_is_room_once_and_only_if_all_of_them_make_way(
    num_tokens: int, starts_alike: bool, num_preempted: int
) -> None:
    stage = priority_stage(num_blocks=12, max_model_len=48, max_num_batched_tokens=64, max_num_seqs=4)
    beginning = list(range(100, 112))  # three blocks
    stage.add("best", 17, priority=0)  # five blocks
    stage.add("a", [*beginning, 1], priority=1)
    stage.step()
    stage.add("b", [*beginning, 2], priority=1)
    stage.step()
    assert stage.scheduler.cache.pool.num_available == 2
    stage.add("next", [*(beginning if starts_alike else ()), *range(200, 248)][:num_tokens], priority=0)
    stage.step()
    assert stage.scheduler.counters.num_preemptions == num_preempted


def test_a_better_priority_goes_before_the_prompts_of_others() -> None:
    stage = priority_stage(max_num_batched_tokens=4)
    stage.add("a", 12, priority=1)
    stage.step()
    stage.add("b", 3, priority=0)
    assert stage.step() == [("b", 0, 3), ("a", 4, 1)]


def test_no_request_makes_way_for_a_prompt_that_the_step_has_no_time_for() -> None:
    stage = priority_stage(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=64, max_prefill_delay_s=2.0)
    for name in "abc":
        stage.add(name, 3, priority=1)
    stage.step()
    stage.scheduler._token_budget.costs = CostModel(row_s=1.0, token_s=0.125)
    for name in "xy":
        stage.add(name, 30, priority=0)
    assert stage.step() == [("x", 0, 16), ("a", 3, 1), ("b", 3, 1)]  # 16 tokens take the 2 seconds
    assert stage.waiting() == ["y", "c"]


def test_a_prompt_of_a_better_priority_may_take_all_the_time_that_a_step_has_for_prompts() -> None:
    stage = priority_stage(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=64, max_prefill_delay_s=2.0)
    stage.add("decodes", 3, priority=1)
    stage.step()
    stage.scheduler._token_budget.costs = CostModel(row_s=1.0, token_s=0.125)  # 16 tokens take the 2 seconds
    stage.add("worse", 30, priority=1)
    assert stage.step() == [("decodes", 3, 1), ("worse", 0, 16)]
    stage.add("better", 20, priority=0)
    assert stage.step() == [("better", 0, 16), ("decodes", 4, 1)]
    assert stage.step() == [("decodes", 5, 1), ("better", 16, 4), ("worse", 16, 12)]


def test_a_request_that_loses_its_blocks_to_itself_takes_none_of_others() -> None:
    stage = priority_stage(num_blocks=3, max_model_len=12)
    stage.add("worse", range(7), priority=1)
    stage.step(worse=7)
    stage.step(worse=8)  # its two blocks are full now
    stage.add("better", range(9), priority=0)
    assert stage.step() == [("better", 8, 1)]  # it shares them, so that none of them got free
    assert stage.waiting() == ["worse"]
    assert stage.pool.num_available == 0


def test_where_the_budget_is_used_up_a_better_priority_takes_a_token_of_it() -> None:
    stage = Stage(policy="priority", max_num_batched_tokens=2)
    for name in "ab":
        stage.add(name, 1, priority=1)
    stage.step()
    stage.add("c", 1, priority=0)
    assert names(stage.step()) == ["c", "a"]


def test_waiting_makes_up_for_a_worse_priority() -> None:
    stage = priority_stage()
    for name in "ab":
        stage.add(name, 3, priority=0, max_tokens=2)
    stage.step()
    stage.add("old", 3, priority=2, arrival_s=0.0)
    stage.add("new", 3, priority=0, arrival_s=19.0)
    stage.add("newer", 3, priority=0, arrival_s=21.0)
    assert stage.waiting() == ["new", "old", "newer"]


def test_a_better_priority_does_not_take_the_row_of_one_that_has_aged_past_it() -> None:
    stage = priority_stage()
    stage.add("a", 3, priority=1, arrival_s=0.0)
    stage.add("b", 3, priority=0, arrival_s=100.0)
    stage.step()
    stage.add("c", 3, priority=0, arrival_s=100.0)
    assert names(stage.step()) == ["a", "b"]


def test_without_aging_priorities_are_strict() -> None:
    stage = Stage(policy="priority", priority_aging_s=math.inf)
    stage.add("old", 3, priority=1, arrival_s=0.0)
    stage.add("new", 3, priority=0, arrival_s=1e9)
    assert stage.waiting() == ["new", "old"]


# ----------------------------------------------------------------------------------------------- fair


def test_one_client_may_use_everything_while_it_is_alone() -> None:
    stage = fair_stage()
    for number in range(5):
        stage.add(f"a{number}", 1, client="a")
    assert names(stage.step()) == ["a0", "a1", "a2", "a3"]


def test_a_newcomer_gets_a_row_at_once_and_no_more_than_half_of_them() -> None:
    stage = fair_stage()
    for number in range(6):
        stage.add(f"a{number}", 1, client="a")
    stage.step()
    for number in range(4):
        stage.add(f"b{number}", 1, client="b")
    rows = names(stage.step())
    assert sorted(rows) == ["a0", "a1", "b0", "b1"]
    assert sorted(names(stage.step())) == sorted(rows)


def test_a_request_that_makes_way_sits_out_the_step_in_which_the_other_one_begins() -> None:
    stage = fair_stage()
    for number in range(6):
        stage.add(f"a{number}", 1, client="a")
    stage.step()
    stage.add("b", 6, client="b")
    assert names(stage.step()) == ["b"]
    assert sorted(names(stage.step())) == ["a0", "a1", "a2", "b"]


def test_tokens_are_charged_once_and_cached_ones_never() -> None:
    stage = fair_stage(max_num_seqs=1)
    stage.add("a", range(9), client="a", max_tokens=2)
    stage.add("b", range(9), client="b", max_tokens=20)
    stage.add("c", [7], client="c")
    stage.step()
    assert served(stage, "a") == 8  # the budget of a step
    stage.step()
    stage.step()
    assert served(stage, "a") == 10
    stage.step()
    assert (stage.waiting(), served(stage, "b")) == (["c"], 1)


def test_what_is_computed_again_is_not_charged_again() -> None:
    stage = fair_stage(num_blocks=6, max_model_len=24, enable_prefix_caching=False)
    a = stage.add("a", 8, client="a", max_tokens=16)
    b = stage.add("b", 8, client="b", max_tokens=16)
    stage.add("z", 20, client="z")
    before = {}
    while not stage.scheduler.counters.num_preemptions:
        stage.step()
        before = {name: served(stage, name) for name in "ab"}
    for _ in range(2):
        stage.step()
    again = a if a.num_preemptions else b
    name = again.request.request_id
    assert served(stage, name) <= before[name] + 1


def test_a_newcomer_starts_level_with_the_least_served_that_waits() -> None:
    stage = fair_stage(max_num_seqs=1, max_num_batched_tokens=64)
    stage.add("a0", 30, client="a", max_tokens=1)
    stage.add("a1", 30, client="a", max_tokens=1)
    stage.add("a2", 30, client="a", max_tokens=1)
    stage.step()
    stage.add("b0", 3, client="b", max_tokens=1)
    assert served(stage, "b") == served(stage, "a") == 30
    stage.step()
    stage.add("b1", 3, client="b", max_tokens=1)
    assert served(stage, "b") >= 30


def test_a_client_that_was_served_more_still_owes_it_when_it_comes_back() -> None:
    stage = fair_stage(max_num_seqs=2, max_num_batched_tokens=64)
    for name in ("a0", "a1", "a2"):
        stage.add(name, 3, client="a", max_tokens=30)
    stage.add("b", 40, client="b", max_tokens=1)
    stage.step()
    assert served(stage, "b") == 40
    stage.step()
    stage.add("b again", 3, client="b")
    assert served(stage, "b") == 40


def test_when_no_request_waits_all_accounts_are_closed() -> None:
    stage = fair_stage()
    stage.add("a", 3, client="a")
    stage.step()
    stage.step()
    assert served(stage, "a") == 4
    stage.add("b", 3, client="b")
    stage.step()
    assert (served(stage, "a"), served(stage, "b")) == (0, 3)  # since b was let in


def test_with_more_clients_than_rows_a_long_answer_makes_way_after_a_quantum() -> None:
    stage = fair_stage(
        max_num_seqs=1, num_blocks=2 * QUANTUM, max_model_len=4 * QUANTUM, max_num_batched_tokens=64
    )
    stage.add("a", 1, client="a", max_tokens=2 * QUANTUM)
    stage.step()
    stage.add("b", 1, client="b", max_tokens=1)
    for _ in range(QUANTUM + 2):
        if names(stage.step()) == ["b"]:
            break
    else:
        pytest.fail("b was never let in")
    assert names(stage.step()) == ["a"]


def test_no_client_makes_way_for_a_request_that_needs_blocks_which_would_be_freed_for_another_one() -> None:
    stage = fair_stage(num_blocks=27, max_model_len=96, max_num_batched_tokens=96, max_num_seqs=16)
    for client, num_tokens in (*(("many", 2),) * 4, *(("big", 11),) * 3, *(("poor", 1),) * 2, ("other", 30)):
        stage.add(client, num_tokens, client=client)
    stage.step()  # 4, 9, 2 and 8 blocks; 4 are free
    stage.add("poor waits", 32, client="poor")  # may take a block of `many`, and would need three more
    stage.add("other waits", 32, client="other")  # may take three of `big`
    assert sorted(names(stage.step())) == sorted(["many"] * 4 + ["big"] * 3 + ["poor"] * 2 + ["other"])
    assert stage.scheduler.counters.num_preemptions == 0


def test_no_client_makes_way_for_a_request_that_needs_more_blocks_than_it_has_to_free() -> None:
    stage = fair_stage(num_blocks=12, max_model_len=48, max_num_batched_tokens=64)
    for client, num_tokens in (*(("big", 10),) * 3, ("light", 1)):
        stage.add(client, num_tokens, client=client)
    stage.step()  # 9 blocks and 1
    # 2 are free, and 3 would be, if one of the others made way: those that are left are no two rows more.
    stage.add("light waits", 30, client="light")  # 8 blocks
    assert sorted(names(stage.step())) == ["big", "big", "big", "light"]
    assert stage.scheduler.counters.num_preemptions == 0


def test_within_a_client_priorities_count() -> None:
    stage = fair_stage(max_num_seqs=1)
    stage.add("a", 1, client="a", max_tokens=1)
    stage.add("b", 1, client="a", max_tokens=1, priority=1)
    stage.add("c", 1, client="a", max_tokens=1)
    assert [names(stage.step()) for _ in range(3)] == [["a"], ["c"], ["b"]]


def test_requests_without_a_client_are_one_client() -> None:
    stage = fair_stage()
    for number in range(6):
        stage.add(f"n{number}", 1)
    stage.step()
    stage.add("a", 1, client="a")
    assert "a" in names(stage.step())


def test_accounts_are_kept_for_a_bounded_number_of_clients() -> None:
    stage = fair_stage(max_num_seqs=1, max_num_batched_tokens=64)
    stage.add("hog", 1, client="hog", max_tokens=1)
    stage.add("hog too", 1, client="hog", max_tokens=60)
    for number in range(MAX_ACCOUNTS + 50):
        entry = stage.add(f"r{number}", [number], client=f"client {number}")
        stage.scheduler.abort(entry.serial)
    line = stage.scheduler._queues.waiting
    assert isinstance(line, FairQueue)
    assert len(line._served) <= MAX_ACCOUNTS + 1


def fair_queue(stage: Stage) -> FairQueue:
    queue = stage.scheduler._queues.waiting
    assert isinstance(queue, FairQueue)
    return queue


def test_the_last_row_is_lost_at_a_gap_of_exactly_a_quantum() -> None:
    queue = fair_queue(fair_stage())
    queue._served.update(a=QUANTUM - 1)
    assert not queue._makes_way("a", "b", queue._num_rows)
    queue._served.update(a=QUANTUM)
    assert queue._makes_way("a", "b", queue._num_rows)


def test_waiting_requests_count_until_they_are_removed() -> None:
    stage = fair_stage()
    entries = [stage.add(f"a{number}", 1, client="a") for number in range(4)]
    stage.add("b", 1, client="b")
    assert fair_queue(stage)._active.with_many() == ["a"]
    stage.scheduler.abort(entries[0].serial)
    assert fair_queue(stage)._active.with_many() == []


def test_a_client_is_throttled_until_it_is_behind_every_client_with_few_requests_by_more_than_the_slack() -> (
    None
):
    queue = fair_queue(fair_stage())
    for client, number in (("many", 8), ("least", 1), ("most", 1)):
        queue._active.set_num_requests(client, number)
    queue._served.update(many=1000, least=1000 + SLACK, most=5000)
    assert queue._is_throttled("many")
    queue._served.update(many=999)
    assert not queue._is_throttled("many")


def test_a_client_that_waits_or_runs_is_not_idle() -> None:
    stage = fair_stage(max_num_seqs=1)
    stage.add("runs", 1, client="a")
    stage.step()
    stage.add("waits", 1, client="b")
    assert [fair_queue(stage)._is_idle(client) for client in "abc"] == [False, False, True]


def test_when_the_accounts_are_closed_clients_start_at_no_tokens() -> None:
    queue = fair_queue(fair_stage())
    queue._floor = 40
    queue._close_accounts()
    assert queue.served("newcomer") == 0


# --------------------------------------------------------------------------- positions, and the cache


def positions(stage: Stage) -> dict[str, int]:
    return {entry.request.request_id: stage.scheduler.whereabouts(entry.serial)[0] for entry in stage.journal}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_position_is_the_number_of_requests_that_go_before(policy: str) -> None:
    stage = Stage(policy=policy, max_num_seqs=1)
    for name in "abcd":
        stage.add(name, 1, max_tokens=2)
    stage.step()
    assert positions(stage) == {"a": 0, "b": 0, "c": 1, "d": 2}


def test_under_fair_a_position_counts_a_turn_for_every_client() -> None:
    stage = fair_stage(max_num_seqs=1)
    for name in ("a0", "a1", "a2", "a3"):
        stage.add(name, 1, client="a", max_tokens=20)
    stage.step()
    stage.add("b0", 1, client="b")
    stage.add("b1", 1, client="b")
    # a was served, so every round begins with b: b0 a1 b1 a2 a3
    assert positions(stage) == {"a0": 0, "b0": 0, "a1": 1, "b1": 2, "a2": 3, "a3": 4}


def test_a_reset_is_refused_while_blocks_are_in_use_unless_running_requests_may_be_preempted() -> None:
    stage = Stage()
    entry: JournalEntry = stage.add("a", 8, max_tokens=4)
    stage.step()
    assert not stage.scheduler.reset_prefix_cache()
    plan = stage.in_flight()
    assert stage.scheduler.reset_prefix_cache(reset_running_requests=True)
    stage.end(plan)
    assert stage.step() == [("a", 0, 8)]  # from the beginning
    while stage.step():
        pass
    assert entry.finish_reason is FinishReason.LENGTH
    assert stage.pool.num_cached > 0
    assert stage.scheduler.reset_prefix_cache()
    assert stage.pool.num_cached == 0
