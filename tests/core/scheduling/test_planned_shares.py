"""Steps where a planner has to divide what there is: too few rows, blocks, slots, or tokens of a budget."""

from __future__ import annotations

from tests.core.stage import Stage
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request.lora import Adapter


def adapter(name: str) -> Adapter:
    return Adapter(name=name, int_id=ord(name), path=f"/{name}", digest=f"digest of {name}")


def test_where_fewer_rows_fit_into_memory_the_last_requests_lose_theirs() -> None:
    stage = Stage(max_num_batched_tokens=32)
    for name in "abc":
        stage.add(name, 3)
    stage.step()
    stage.scheduler.recovery.memory.step_did_not_fit([5, 4])
    assert stage.step() == [("a", 3, 1)]
    assert stage.waiting() == ["b", "c"]


def test_a_part_of_a_prompt_that_ends_amid_a_block_is_cut_to_its_beginning_if_there_is_a_store() -> None:
    stage = Stage(stores_blocks=True, max_num_batched_tokens=3)
    stage.add("a", 9)
    steps = [stage.step() for _ in range(4)]
    assert steps == [[("a", 0, 3)], [("a", 3, 1)], [("a", 4, 3)], [("a", 7, 2)]]


def test_a_step_ahead_that_lacks_a_block_leaves_no_request_with_a_share() -> None:
    stage = Stage(async_scheduling=True, num_blocks=3, max_num_batched_tokens=16, max_model_len=12)
    stage.add("a", 2)
    stage.add("b", 8)
    plan = stage.in_flight()
    assert stage.shares(plan) == [("a", 0, 2), ("b", 0, 8)]
    assert stage.begin() is None
    assert [one.num_scheduled_tokens for one in stage.scheduler._queues.running] == [0, 0]
    stage.end(plan)
    assert stage.step() == [("a", 2, 1)]
    assert stage.waiting() == ["b"]


def test_a_step_is_planned_ahead_for_requests_with_adapters_too() -> None:
    stage = Stage(async_scheduling=True, max_adapters=1)
    stage.add("a", 3, adapter=adapter("x"))
    stage.in_flight()
    assert stage.shares(stage.begin()) == [("a", 3, 1)]


def test_a_step_ahead_takes_no_slot_from_another_adapter() -> None:
    stage = Stage(async_scheduling=True, max_adapters=1)
    stage.add("a", 3, adapter=adapter("x"))
    stage.add("b", 3, adapter=adapter("y"))
    assert stage.shares(stage.in_flight()) == [("a", 0, 3)]
    assert stage.shares(stage.begin()) == [("a", 3, 1)]
    assert stage.waiting() == ["b"]


def test_only_the_requests_of_an_adapter_that_gives_its_slot_away_lose_their_rows() -> None:
    stage = Stage(max_adapters=2, max_num_batched_tokens=64, num_blocks=64, max_num_seqs=8)
    for name, used in (("a", adapter("x")), ("b", adapter("y")), ("c", None)):
        stage.add(name, 3, adapter=used)
    stage.step()
    stage.add("d", 3, adapter=adapter("z"))
    stage.step()
    stage.now_s = 1000.0
    running = {name for name, _, _ in stage.step()}
    assert {"c", "d"} <= running
    assert len(running & {"a", "b"}) == 1
    assert sum(entry.num_preemptions for entry in stage.journal) == 1


def test_a_pause_holds_requests_with_an_adapter_in_a_slot_as_well() -> None:
    stage = Stage(max_adapters=2)
    first = stage.add("a", 3, adapter=adapter("x"))
    stage.add("b", 3, adapter=adapter("x"))
    stage.scheduler.last_serial = first.serial
    assert stage.step() == [("a", 0, 3)]
    assert stage.step() == [("a", 3, 1)]
    assert stage.waiting() == ["b"]


def test_of_long_prompts_a_thousand_tokens_together_are_looked_at_in_a_step() -> None:
    stage = Stage(
        num_blocks=32,
        block_size=256,
        max_model_len=2048,
        max_num_batched_tokens=4096,
        num_speculative_tokens=1,
    )
    stage.add("a", 700)
    stage.add("b", 700)
    stage.step()
    stage.step()
    drafters = stage.scheduler._speculative._drafters.values()
    assert [drafter.index.num_tokens for drafter in drafters] == [701, 1024 - 701]


def test_prefixes_of_different_adapters_are_computed_apart() -> None:
    stage = Stage(max_adapters=2, max_num_batched_tokens=64)
    for name, used in (("a", adapter("x")), ("b", adapter("y")), ("c", adapter("x"))):
        stage.add(name, range(9), adapter=used, cache_namespace=CacheNamespace(adapter=used.digest))
        stage.step()
    hits = [entry.num_cached_tokens for entry in stage.journal]
    assert hits == [0, 0, 8]
