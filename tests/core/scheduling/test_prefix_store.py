"""What plans say to a prefix store: each computed block once, and the blocks that a row's next tokens fill."""

from __future__ import annotations

import random

import pytest

from tests.core.scheduling.test_scheduler_walk import VOCAB, Walk, make_config
from triolet.core.kv_cache.cache_groups import CacheGroups
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.scheduling import step_planner
from triolet.core.scheduling.admission import stored_blocks
from triolet.core.step_plan import BlockLoad, StepPlan

PROMPT = tuple(range(22))


def storing_walk(store: dict[bytes, list[int]], **fields: object) -> Walk:
    walk = Walk(make_config(stores_blocks=True, **fields))
    walk.model.store = store
    return walk


def plans_of(walk: Walk) -> list[StepPlan]:
    plans = []
    while (plan := walk.scheduler.plan_step(0.0)) is not None:
        plans.append(plan)
        walk.scheduler.apply(walk.model.execute(plan), 0.0)
    return plans


def test_every_full_block_is_saved_once_after_it_was_computed() -> None:
    store: dict[bytes, list[int]] = {}
    walk = storing_walk(store)
    entry = walk.add(PROMPT, 8)
    plans = plans_of(walk)
    saved = [save.key for plan in plans for save in plan.saves]
    tokens = [*PROMPT, *entry.output_token_ids]
    assert len(saved) == len(set(saved)) == (len(tokens) - 1) // 4
    assert [store[key] for key in saved] == [
        tokens[start : start + 4] for start in range(0, len(tokens) - 4, 4)
    ]


def test_a_later_life_loads_what_an_earlier_one_computed() -> None:
    store: dict[bytes, list[int]] = {}
    for life in range(2):
        walk = storing_walk(store)
        entry = walk.add(PROMPT, 8)
        walk.run()
        assert entry.output_token_ids == walk.answer(entry)
        # The prompt's last two tokens are in no full block; of a step that is loaded whole, the last token is computed.
        hits = walk.scheduler.counters.external_prefix_cache_hits
        assert 18 <= hits <= 20 if life else hits == 0


def test_the_store_is_asked_for_the_tokens_of_all_full_blocks_of_a_prompt_without_its_last_token() -> None:
    for length, num_tokens in ((22, 20), (9, 8), (8, 4), (3, 0)):
        walk = storing_walk({})
        walk.add(PROMPT[:length], 1)
        walk.run()
        assert walk.scheduler.counters.external_prefix_cache_queries == num_tokens


def test_a_plan_that_only_saves_blocks_is_one_step() -> None:
    walk = storing_walk({})
    walk.add(PROMPT, 1)
    last = plans_of(walk)[-1]
    assert last.saves
    assert (last.rows, last.num_steps) == ((), 1)


def test_a_part_of_a_prompt_ends_where_the_next_one_can_be_loaded() -> None:
    walk = storing_walk({}, max_num_batched_tokens=9)
    walk.add(PROMPT, 1)
    # The last plan saves what the others computed, and computes nothing.
    plans = plans_of(walk)
    assert [(plan.step_id, plan.num_tokens) for plan in plans] == [(1, 8), (2, 8), (3, 6), (4, 0)]
    assert [len(plan.loads) for plan in plans_of(storing_walk_with(PROMPT))] == [2, 2, 1, 0]


def storing_walk_with(prompt: tuple[int, ...], **fields: object) -> Walk:
    walk = storing_walk({})
    walk.add(prompt, 1, **fields)
    return walk


def test_without_a_store_plans_name_no_blocks() -> None:
    walk = Walk(make_config())
    walk.add(PROMPT, 8)
    assert [plan for plan in plans_of(walk) if plan.saves or plan.loads] == []


def test_nothing_is_loaded_across_namespaces() -> None:
    store: dict[bytes, list[int]] = {}
    for namespace in (CacheNamespace(), CacheNamespace(salt="a"), CacheNamespace(adapter="b")):
        walk = storing_walk(store)
        walk.add(PROMPT, 8, cache_namespace=namespace)
        walk.run()
        assert walk.scheduler.counters.external_prefix_cache_hits == 0


def test_nothing_is_loaded_that_other_weights_computed() -> None:
    store: dict[bytes, list[int]] = {}
    for version in range(3):
        walk = storing_walk(store, weight_version=version)
        walk.add(PROMPT, 8)
        walk.run()
        assert walk.scheduler.counters.external_prefix_cache_hits == 0


WINDOWS: list[tuple[int | None, ...]] = [(None,), (5,), (None, 5), (None, 6, 6)]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("ahead", [False, True])
def test_the_blocks_of_all_groups_are_saved_and_loaded_together(
    windows: tuple[int | None, ...], ahead: bool
) -> None:
    store: dict[bytes, list[int]] = {}
    prompt = tuple(position % VOCAB for position in range(38))
    for life in range(2):
        walk = storing_walk(
            store,
            num_blocks=40,
            groups=CacheGroups(windows),
            max_num_batched_tokens=9,
            async_scheduling=ahead,
        )
        entry = walk.add(prompt, 8)
        walk.run()
        walk.check()
        assert entry.output_token_ids == walk.answer(entry)
        assert {len(blocks) for blocks in store.values()} == {4 * len(windows)}
        hits = walk.scheduler.counters.external_prefix_cache_hits
        # Nine blocks, two in each step; of those that are loaded whole the fake model computes the last token.
        assert hits == (9 * 4 - 4 if life else 0)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("seed", range(8))
def test_answers_are_the_same_with_a_store_that_forgets_at_random(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    dice = random.Random(seed)
    store: dict[bytes, list[int]] = {}
    hits = 0
    for _ in range(6):
        walk = storing_walk(
            store,
            num_blocks=16 * len(windows),
            groups=CacheGroups(windows),
            max_num_batched_tokens=dice.randint(3, 20),
        )
        for _ in range(8):
            walk.add(
                PROMPT[: dice.randint(1, 22)] + tuple(dice.choices(range(VOCAB), k=dice.randint(0, 8))), 9
            )
        walk.run()
        walk.check()
        hits += walk.scheduler.counters.external_prefix_cache_hits
        for key in [*store]:
            if dice.random() < 0.3:
                del store[key]
    assert hits > 0


def test_a_block_under_a_wrong_key_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: object) -> list[BlockLoad]:
        loads = stored_blocks(*arguments)  # type: ignore[arg-type]
        keys = [load.key for load in loads]
        return [
            BlockLoad(load.row_id, load.block_ids, key)
            for load, key in zip(loads, keys[1:] + keys[:1], strict=True)
        ]

    monkeypatch.setattr(step_planner, "stored_blocks", shifted)
    store: dict[bytes, list[int]] = {}

    def live() -> None:
        walk = storing_walk(store)
        entry = walk.add(PROMPT, 8)
        walk.run()
        assert entry.output_token_ids == walk.answer(entry)

    live()
    with pytest.raises(AssertionError):
        live()
