"""A prompt's log-probabilities come in shares, whatever happens between them, and each position counts once."""

from __future__ import annotations

import pytest

from tests.core.make import make_request
from tests.core.stage import BLOCK_SIZE, Stage
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.params import SamplingParams
from triolet.core.step_plan import PromptLogprobs, TokenLogprobs

PROMPT = tuple(range(9))


def share(entry: JournalEntry, start: int, end: int) -> PromptLogprobs:
    """Of the prompt's positions from `start` up to `end`."""
    return PromptLogprobs(
        entry.epoch, start, tuple(TokenLogprobs((place,), (-1.0,), 1) for place in range(start, end))
    )


def entry_of(prompt_logprobs: int | None = 0) -> JournalEntry:
    return Journal().open(make_request(PROMPT, params=SamplingParams(prompt_logprobs=prompt_logprobs)))


def positions(entry: JournalEntry) -> list[int]:
    return [position.token_ids[0] for position in entry.prompt_logprobs]


@pytest.mark.parametrize(
    "shares",
    [
        [(1, 9)],
        [(1, 4), (4, 5), (5, 9)],
        [(1, 4), (1, 3), (3, 9)],  # lost its blocks after the first, and began anew
        [(1, 7), (1, 7), (7, 9)],
    ],
)
def test_shares_make_up_the_whole_prompt_but_its_first_token(shares: list[tuple[int, int]]) -> None:
    entry = entry_of()
    for start, end in shares:
        assert entry.wants_prompt_logprobs
        entry.add_prompt_logprobs(share(entry, start, end), weight_version=0)
    assert positions(entry) == list(range(1, 9))
    assert not entry.wants_prompt_logprobs


def test_a_prompt_of_one_token_has_none_to_wait_for() -> None:
    entry = Journal().open(make_request((5,), params=SamplingParams(prompt_logprobs=0)))
    assert not entry.wants_prompt_logprobs
    assert not entry_of(None).wants_prompt_logprobs


def test_what_is_cached_is_computed_again_until_all_of_them_are_known() -> None:
    stage = Stage(max_num_batched_tokens=64)
    stage.add("a", PROMPT, max_tokens=1)
    stage.step()
    entry = stage.add("b", PROMPT, params={"prompt_logprobs": 0})
    plan = stage.in_flight()
    assert stage.shares(plan) == [("b", 0, 9)]
    assert stage.rows[plan.rows[0].row_id].wants_prompt_logprobs
    stage.end(plan)
    entry.add_prompt_logprobs(share(entry, 1, 9), weight_version=0)
    stage.scheduler._queues.preempt(stage.scheduler._queues.running[0])
    assert stage.step() == [("b", 2 * BLOCK_SIZE, 2)]
    assert not stage.rows[plan.rows[0].row_id].wants_prompt_logprobs


@pytest.mark.parametrize("skips", [True, False, None])
def test_a_request_that_does_not_want_the_cache_does_not_get_it(skips: bool | None) -> None:
    stage = Stage(max_num_batched_tokens=64)
    stage.add("a", PROMPT, max_tokens=1)
    stage.step()
    stage.add("b", PROMPT, params={"skip_reading_prefix_cache": skips})
    assert stage.step() == [("b", 0, 9) if skips else ("b", 8, 1)]
