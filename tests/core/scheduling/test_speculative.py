"""What a row tries beyond its next token, out of what is left, and what becomes of it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests.core.fake_model import CIRCLE, REPETITIVE, expected_answer
from tests.core.scheduling.test_scheduler_walk import VOCAB, Walk, make_config
from triolet.core.journal import JournalEntry
from triolet.core.kv_cache.cache_groups import CacheGroups
from triolet.core.request.grammar_state import Constraint, TokenMask
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.scheduling.step_planner import MAX_FOLLOWED_TOKENS
from triolet.core.step_plan import PlanRow, SampledToken, StepPlan, StepResult


def make_walk(**fields: Any) -> Walk:
    defaults: dict[str, Any] = {
        "num_blocks": 40,
        "max_num_batched_tokens": 32,
        "max_model_len": 160,
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
    }
    return Walk(make_config(**(defaults | fields)))


def ask(
    walk: Walk, prompt: tuple[int, ...] = CIRCLE * 2, max_tokens: int = 30, **fields: Any
) -> JournalEntry:
    """A request whose answer repeats itself."""
    params = SamplingParams(max_tokens=max_tokens, **fields.pop("params", {}))
    request = Request(
        request_id=f"r{len(walk.entries)}",
        prompt_token_ids=prompt,
        params=params,
        seed=REPETITIVE + fields.pop("seed", 0),
        max_tokens=max_tokens,
        **fields,
    )
    walk.entries.append(walk.journal.open(request))
    walk.scheduler.add_arrivals()
    return walk.entries[-1]


def plan(walk: Walk) -> StepPlan:
    found = walk.scheduler.plan_step(0.0)
    assert found is not None
    return found


def step(walk: Walk) -> tuple[PlanRow, ...]:
    """One whole step; its rows."""
    planned = plan(walk)
    walk.scheduler.apply(walk.model.execute(planned), 0.0)
    walk.scheduler.check()
    return planned.rows


def drafts(rows: tuple[PlanRow, ...]) -> list[int]:
    return [len(row.draft_token_ids) for row in rows]


def test_an_answer_that_repeats_itself_takes_fewer_steps_and_is_the_same() -> None:
    walk, plain = make_walk(), make_walk(num_speculative_tokens=0)
    for one in (walk, plain):
        for seed in range(4):
            ask(one, seed=seed)
        one.run()
        one.check()
    assert [entry.output_token_ids for entry in walk.entries] == [
        entry.output_token_ids for entry in plain.entries
    ]
    assert walk.scheduler.counters.steps < 0.7 * plain.scheduler.counters.steps
    assert plain.scheduler.counters.num_drafts == 0


def test_what_came_true_is_counted_by_its_place() -> None:
    walk = make_walk()
    entry = ask(walk)
    walk.run()
    counters = walk.scheduler.counters
    num_right = sum(counters.num_accepted_tokens_per_pos)
    assert len(entry.output_token_ids) == counters.steps + num_right
    assert 0 < num_right <= counters.num_draft_tokens <= 4 * counters.num_drafts
    assert counters.num_accepted_tokens_per_pos == sorted(counters.num_accepted_tokens_per_pos, reverse=True)
    assert len(counters.num_accepted_tokens_per_pos) == 4


def test_a_guess_comes_after_the_last_known_token_and_goes_on_with_the_text() -> None:
    walk = make_walk()
    entry = ask(walk)
    step(walk)
    [row] = plan(walk).rows
    last = entry.output_token_ids[-1]
    assert last == 1  # after CIRCLE * 2 comes its beginning
    assert (row.start, row.num_tokens, row.sample) == (12, 5, True)
    assert row.draft_token_ids == CIRCLE[1:5]


def test_guesses_take_what_is_left_of_the_budget_after_waiting_prompts() -> None:
    walk = make_walk(max_num_batched_tokens=14)
    ask(walk)
    step(walk)
    ask(walk, prompt=(9, 8, 7) * 6)
    assert [(row.num_tokens, len(row.draft_token_ids)) for row in step(walk)] == [(1, 0), (13, 0)]
    [decode, chunk] = step(walk)
    assert (chunk.num_tokens, decode.num_tokens, len(decode.draft_token_ids)) == (5, 5, 4)


def test_the_drafts_of_a_step_share_what_is_left_of_its_budget() -> None:
    walk = make_walk(max_num_batched_tokens=24, num_speculative_tokens=16, enable_prefix_caching=False)
    ask(walk)
    ask(walk, seed=1)
    assert drafts(step(walk)) == [0, 0]
    assert drafts(plan(walk).rows) == [16, 24 - 2 - 16]


def test_a_scheduler_that_is_built_anew_counts_accepted_tokens_at_the_same_places() -> None:
    walk = make_walk()
    ask(walk)
    walk.run()
    counters = walk.scheduler.counters
    accepted = list(counters.num_accepted_tokens_per_pos)
    Scheduler(walk.config, walk.journal, counters)
    assert counters.num_accepted_tokens_per_pos == accepted
    assert len(accepted) == walk.config.num_speculative_tokens


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_guess_leaves_every_row_the_blocks_that_it_may_need_next(num_groups: int) -> None:
    walk = make_walk(enable_prefix_caching=False, groups=CacheGroups((None,) * num_groups))
    ask(walk)
    ask(walk, seed=1)
    step(walk)  # three full blocks each, in every group
    pool = walk.scheduler.pool
    taken = pool.allocate(pool.num_available - 4 * num_groups)
    assert drafts(plan(walk).rows) == [3, 3]  # as far as the block goes that its next token needs
    assert pool.num_available == 2 * num_groups
    pool.release(taken, step_id=None)


def test_a_block_that_one_draft_takes_is_there_for_no_other_one() -> None:
    walk = make_walk(enable_prefix_caching=False)
    ask(walk)
    ask(walk, seed=1)
    step(walk)  # three full blocks each
    pool = walk.scheduler.pool
    # Each row has one for its next token and one for the step after it, and there is one more.
    taken = pool.allocate(pool.num_available - 5)
    assert drafts(plan(walk).rows) == [4, 3]
    assert pool.num_available == 2
    pool.release(taken, step_id=None)


@pytest.mark.parametrize(("max_tokens", "num_drafted"), [(2, 0), (3, 1), (5, 3), (6, 4), (7, 4)])
def test_a_draft_is_as_long_as_the_answer_may_get_without_the_token_after_it(
    max_tokens: int, num_drafted: int
) -> None:
    walk = make_walk()
    ask(walk, max_tokens=max_tokens)
    step(walk)  # its first token
    assert drafts(plan(walk).rows) == [num_drafted]


def test_a_pooled_prompt_has_no_draft() -> None:
    walk = make_walk(max_num_batched_tokens=12)
    ask(walk, prompt=CIRCLE * 2 + CIRCLE[:1], pooling=PoolingParams(task="embed"))
    assert [(row.num_tokens, row.draft_token_ids) for row in step(walk)] == [(12, ())]
    assert [(row.num_tokens, row.draft_token_ids) for row in plan(walk).rows] == [(1, ())]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_no_more_is_tried_than_the_answer_may_have(max_tokens: int) -> None:
    walk = make_walk()
    entry = ask(walk, max_tokens=max_tokens)
    planned: list[PlanRow] = []
    while walk.journal:
        planned += step(walk)
    assert len(entry.output_token_ids) == max_tokens
    assert entry.finish_reason is FinishReason.LENGTH
    assert (
        max(row.start + row.num_tokens for row in planned) < len(entry.request.prompt_token_ids) + max_tokens
    )


def test_tokens_after_the_end_of_an_answer_are_dropped() -> None:
    walk = make_walk()
    entry = ask(walk, eos_token_ids=(6,))
    step(walk)
    planned = plan(walk)
    tokens = tuple(
        SampledToken("r0", entry.epoch, 1 + i, token_id) for i, token_id in enumerate((4, 6, 5, 2, 0))
    )
    walk.scheduler.apply(StepResult(planned.step_id, tokens), 0.0)
    walk.scheduler.check()
    assert entry.output_token_ids == [1, 4, 6]
    assert entry.finish_reason is FinishReason.STOP
    assert walk.scheduler.pool.num_in_use == 0


def test_a_failure_counts_only_after_a_guess_that_was_right() -> None:
    walk = make_walk()
    entry = ask(walk)
    step(walk)
    planned = plan(walk)
    epoch = entry.epoch
    tokens = (SampledToken("r0", epoch, 1, 4), SampledToken("r0", epoch, 2, 6))
    walk.scheduler.apply(StepResult(planned.step_id, tokens), 0.0)
    walk.scheduler.check()
    assert entry.output_token_ids == [1, 4, 6]
    [row] = plan(walk).rows
    assert row.start == 14  # prompt, 1 and 4; 6 is to be computed


def test_a_wrong_guess_is_written_over_and_never_published() -> None:
    walk = make_walk(block_size=2)
    entry = ask(walk)
    step(walk)
    planned = plan(walk)
    walk.model.execute(planned)
    wrong = SampledToken("r0", entry.epoch, 1, 33)
    walk.scheduler.apply(StepResult(planned.step_id, (wrong,)), 0.0)
    published = [tuple(array("q", one.content)) for one in walk.scheduler.cache._by_hash.values()]
    assert (1, 4) not in published[6:] and len(published) == 6  # those of the prompt
    [row] = plan(walk).rows
    assert (row.start, row.new_block_ids) == (13, ())


def test_where_guesses_are_wrong_they_become_short() -> None:
    walk = make_walk()
    entry = ask(walk)
    step(walk)
    lengths = []
    for _ in range(3):
        planned = plan(walk)
        lengths.append(drafts(planned.rows)[0])
        # the text goes on in another circle, in which the guesses are wrong again
        position, token_id = len(entry.output_token_ids), CIRCLE[-1 - len(entry.output_token_ids) % 6]
        walk.scheduler.apply(
            StepResult(planned.step_id, (SampledToken("r0", entry.epoch, position, token_id),)), 0.0
        )
    assert lengths[0] == 4 and max(lengths[1:]) <= 1


def test_a_draft_is_at_most_twice_as_long_and_one_token_as_what_was_right_of_the_last_one() -> None:
    walk = make_walk(prompt_lookup_min=1)
    entry = ask(walk)
    step(walk)
    lengths = []
    # Of the first draft one token is right, of the second none; after a token of the circle there always is a guess.
    for token_ids in ((CIRCLE[1], CIRCLE[0]), (CIRCLE[0],), (CIRCLE[0],)):
        planned = plan(walk)
        lengths += drafts(planned.rows)
        position = len(entry.output_token_ids)
        sampled = [
            SampledToken("r0", entry.epoch, position + i, token_id) for i, token_id in enumerate(token_ids)
        ]
        walk.scheduler.apply(StepResult(planned.step_id, tuple(sampled)), 0.0)
    assert lengths == [4, 3, 1]
    assert walk.scheduler.counters.num_drafts == 3


def test_an_answer_bound_to_a_form_tries_nothing() -> None:
    walk = make_walk()
    entry = ask(walk, constraint=Constraint(grammar=StructuredOutputsParams(regex="a*")))
    tried = []
    while len(entry.output_token_ids) < 8:
        walk.scheduler.guide(entry.serial, TokenMask(len(entry.output_token_ids)))
        tried += drafts(step(walk))
    assert set(tried) == {0}


def test_a_request_of_a_step_that_crashed_tries_nothing_any_more() -> None:
    walk = make_walk()
    entry = ask(walk)
    step(walk)
    crashed = plan(walk)
    assert drafts(crashed.rows) == [4]
    dead = walk.scheduler
    dead.recovery.poison_bisection.step_failed(dead.marks(), num_rows=1)
    walk.scheduler = Scheduler(walk.config, walk.journal, dead.counters, dead.recovery)
    walk.scheduler.add(entry)
    other = ask(walk, seed=1)
    rows = [row for _ in range(25) for row in step(walk)]
    assert len({row.row_id for row in rows}) == 2
    assert len({row.row_id for row in rows if row.draft_token_ids}) == 1
    walk.run()
    assert [entry.output_token_ids, other.output_token_ids] == [walk.answer(entry), walk.answer(other)]
    assert entry.serial not in walk.scheduler.recovery.poison_bisection.crashed


def test_a_long_prompt_is_looked_at_bit_by_bit() -> None:
    length = MAX_FOLLOWED_TOKENS + 200
    walk = make_walk(num_blocks=400, max_num_batched_tokens=2000, max_model_len=1600)
    ask(walk, prompt=(CIRCLE * 300)[:length])
    assert [drafts(step(walk)) for _ in range(3)] == [[0], [0], [4]]


@pytest.mark.parametrize(("num_more", "num_drafted"), [(0, 4), (1, 0)])
def test_a_step_looks_at_as_many_tokens_as_it_may_and_at_none_more(num_more: int, num_drafted: int) -> None:
    walk = make_walk(num_blocks=400, max_num_batched_tokens=2000, max_model_len=1600)
    length = MAX_FOLLOWED_TOKENS - 1 + num_more  # and the first token of the answer
    ask(walk, prompt=(CIRCLE * 300)[-length:])
    step(walk)
    assert drafts(plan(walk).rows) == [num_drafted]


def test_the_prompts_of_a_step_share_the_tokens_that_are_looked_at() -> None:
    length = 6 * (MAX_FOLLOWED_TOKENS // 9)  # of whole circles; more than half of what is looked at
    walk = make_walk(
        num_blocks=400, max_num_batched_tokens=2000, max_model_len=1600, enable_prefix_caching=False
    )
    for _ in range(2):
        ask(walk, prompt=(CIRCLE * 300)[:length])
    assert [drafts(step(walk)) for _ in range(2)] == [[0, 0], [4, 0]]
    assert drafts(step(walk))[1] == 4


def test_a_prompt_of_one_token_tries_nothing_in_its_first_step() -> None:
    walk = make_walk()
    ask(walk, prompt=CIRCLE[:1])
    assert drafts(step(walk)) == [0]


def test_n_answers_each_try_their_own() -> None:
    walk = make_walk()
    first = ask(walk, params={"n": 2})
    request = Request(
        request_id="second",
        prompt_token_ids=first.request.prompt_token_ids,
        params=first.request.params,
        seed=REPETITIVE + 7,
        max_tokens=20,
        index=1,
    )
    walk.entries.append(walk.journal.open(request, after=first))
    walk.run()
    for entry in walk.entries:
        whole = expected_answer(
            entry.request.prompt_token_ids, entry.request.seed, entry.request.max_tokens, VOCAB
        )
        assert entry.output_token_ids == whole
    assert walk.scheduler.counters.num_drafts > 4
