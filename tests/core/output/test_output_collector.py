from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.make import make_request, next_token
from triolet.core.journal import Journal, JournalEntry
from triolet.core.output.logprobs import FlatLogprobs, ListPrefix
from triolet.core.output.output_processor import OutputCollector
from triolet.core.output.outputs import CompletionOutput, Logprob
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.request import STATUS_OF_ENDING, FinishReason, RequestMetrics
from triolet.core.step_plan import PromptLogprobs, TokenLogprobs

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


@attrs.define
class Answer:
    """An answer on its way: tokens go into the journal, then with their text into the collector."""

    journal: Journal
    entry: JournalEntry
    collector: OutputCollector

    def give(
        self, text: str, *token_ids: int, logprobs: TokenLogprobs | None = None, now_s: float = 0.0
    ) -> None:
        for token_id in token_ids:
            self.journal.commit(self.entry, next_token(self.entry, token_id, logprobs), now_s)
        self.collector.put(text, len(token_ids))

    def take(self) -> CompletionOutput:
        (completion,) = self.collector.take().outputs
        return completion


def answer(
    kind: RequestOutputKind = CUMULATIVE, *, logprobs: int | None = None, asked: Any = (), **fields: Any
) -> Answer:
    journal = Journal()
    params = SamplingParams(output_kind=kind, logprobs=logprobs, **dict(asked))
    entry = journal.open(make_request((1, 2, 3), params=params, **fields))
    return Answer(
        journal, entry, OutputCollector(entry, lambda token_id, before: f"<{token_id}>", arrival_time=1e9)
    )


# --------------------------------------------------------------------------------- output kinds


@pytest.mark.parametrize(
    ("kind", "outputs"),
    [
        (CUMULATIVE, [("a", (7,)), ("ab", (7, 8)), ("abc", (7, 8, 9))]),
        (DELTA, [("a", (7,)), ("b", (8,)), ("c", (9,))]),
    ],
)
def test_each_output_carries_the_whole_or_what_is_new(
    kind: RequestOutputKind, outputs: list[tuple[str, tuple[int, ...]]]
) -> None:
    story = answer(kind)
    got = []
    for token_id, text in ((7, "a"), (8, "b"), (9, "c")):
        story.give(text, token_id)
        completion = story.take()
        got.append((completion.text, completion.token_ids))
    assert got == outputs


def test_final_only_has_one_output_at_the_end() -> None:
    story = answer(FINAL_ONLY)
    story.give("a", 7)
    assert not story.collector.has_output()
    story.give("b", 8)
    story.collector.finish(FinishReason.LENGTH)
    assert story.collector.has_output()
    completion = story.take()
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("ab", (7, 8), "length")
    assert not story.collector.has_output()


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_there_is_an_output_when_there_is_news(kind: RequestOutputKind) -> None:
    story = answer(kind)
    assert not story.collector.has_output()
    story.give("", 7)  # a token without text yet is news, too
    assert story.collector.has_output()
    story.take()
    assert not story.collector.has_output()
    story.collector.finish(FinishReason.STOP)
    assert story.collector.has_output()


@given(
    kind=st.sampled_from([CUMULATIVE, DELTA]),
    pieces=st.lists(st.tuples(st.text(max_size=3), st.integers(0, 3), st.booleans()), max_size=12),
)
def test_a_reader_that_lags_gets_its_deltas_joined_and_none_lost(
    kind: RequestOutputKind, pieces: list[tuple[str, int, bool]]
) -> None:
    story = answer(kind)
    given_ids = iter(range(100))
    texts: list[str] = []
    token_ids: list[tuple[int, ...]] = []
    for text, num_tokens, is_read in pieces:
        story.give(text, *(next(given_ids) for _ in range(num_tokens)))
        if is_read:
            completion = story.take()
            texts.append(completion.text)
            token_ids.append(tuple(completion.token_ids))
    completion = story.take()
    whole_text, whole_ids = "".join(text for text, _, _ in pieces), tuple(story.entry.output_token_ids)
    if kind is DELTA:
        assert "".join([*texts, completion.text]) == whole_text
        assert sum([*token_ids, tuple(completion.token_ids)], ()) == whole_ids
    else:
        assert (completion.text, completion.token_ids) == (whole_text, whole_ids)
        assert all(whole_text.startswith(text) for text in texts)
    assert story.collector.text == whole_text


def test_an_output_does_not_grow_later() -> None:
    story = answer(CUMULATIVE)
    story.give("a", 7)
    early = story.take()
    story.give("b", 8)
    story.take()
    assert (early.text, early.token_ids) == ("a", (7,))


def test_tokens_that_were_not_put_are_not_shown() -> None:
    story = answer(CUMULATIVE, logprobs=0)
    logprobs = TokenLogprobs((7,), (-1.0,), 1)
    story.give("a", 7, logprobs=logprobs)
    story.journal.commit(story.entry, next_token(story.entry, 8, logprobs), 0.0)  # its text is not known yet
    completion = story.take()
    assert (completion.token_ids, completion.cumulative_logprob) == ((7,), -1.0)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 1


# ------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [(FinishReason.STOP, "def"), (FinishReason.STOP, 7), (FinishReason.DEADLINE, None)],
)
def test_the_last_output_says_why(reason: FinishReason, stop_reason: int | str | None) -> None:
    story = answer(DELTA)
    story.give("a", 7)
    going_on = story.collector.take()
    assert (going_on.finished, going_on.finish_reason, going_on.outputs[0].finished()) == (False, None, False)
    story.collector.finish(reason, stop_reason)
    last = story.collector.take()
    assert (last.finished, last.finish_reason, last.outputs[0].stop_reason) == (True, reason, stop_reason)
    assert (last.outputs[0].finished(), last.text, last.outputs[0].token_ids) == (True, "", ())


def test_the_first_reason_stays() -> None:
    story = answer()
    story.collector.finish(FinishReason.STOP, "def")
    story.take()
    story.collector.finish(FinishReason.ABORT)
    assert not story.collector.has_output()
    assert (story.collector.finish_reason, story.take().stop_reason) == (FinishReason.STOP, "def")


# ------------------------------------------------------------------------------------ logprobs


def test_without_logprobs_there_are_none() -> None:
    story = answer()
    story.give("a", 7)
    completion = story.take()
    assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


@pytest.mark.parametrize(
    ("logprobs", "described"),
    [
        (TokenLogprobs((7,), (-0.5,), 1), {7: Logprob(-0.5, 1, "<7>")}),
        (
            TokenLogprobs((7, 7, 8), (-0.5, -0.5, -1.5), 1),
            {7: Logprob(-0.5, 1, "<7>"), 8: Logprob(-1.5, 2, "<8>")},
        ),
        (
            TokenLogprobs((7, 8, 9), (-4.0, -0.5, -1.5), 31),
            {7: Logprob(-4.0, 31, "<7>"), 8: Logprob(-0.5, 1, "<8>"), 9: Logprob(-1.5, 2, "<9>")},
        ),
        (
            TokenLogprobs((9, 8, 9), (-1.5, -0.5, -1.5), 2),
            {9: Logprob(-1.5, 2, "<9>"), 8: Logprob(-0.5, 1, "<8>")},
        ),
        (
            TokenLogprobs((7, 7, 8), (-0.5, -0.5, -0.5), 2),
            {7: Logprob(-0.5, 1, "<7>"), 8: Logprob(-0.5, 2, "<8>")},
        ),
    ],
    ids=["alone", "likeliest", "unlikely", "second", "one of two equals"],
)
# The last is vLLM's way, too: the rank among the others wins.
def test_the_chosen_token_comes_first_then_the_likeliest(
    logprobs: TokenLogprobs, described: dict[int, Logprob]
) -> None:
    story = answer(logprobs=2)
    story.give("a", logprobs.token_ids[0], logprobs=logprobs)
    completion = story.take()
    assert completion.logprobs == (described,)
    assert list(completion.logprobs[0]) == list(described)
    assert completion.cumulative_logprob == logprobs.logprobs[0]


@pytest.mark.parametrize(
    ("kind", "starts", "token_ids", "ranks"),
    [
        # as recorded from vLLM 0.32.0
        (CUMULATIVE, (0, 3), (7, 7, 8, 5, 8, 9), (1, 1, 2, 31, 1, 2)),
        (DELTA, (0,), (5, 8, 9), (31, 1, 2)),
    ],
)
def test_each_position_of_the_columns_has_the_chosen_token_and_all_others(
    kind: RequestOutputKind, starts: tuple[int, ...], token_ids: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    story = answer(kind, logprobs=2, asked={"flat_logprobs": True})
    story.give("a", 7, logprobs=TokenLogprobs((7, 7, 8), (-0.5, -0.5, -1.5), 1))
    story.take()
    story.give("b", 5, logprobs=TokenLogprobs((5, 8, 9), (-4.0, -0.5, -1.5), 31))
    flat = story.take().logprobs
    assert isinstance(flat, FlatLogprobs)
    assert tuple(flat.start_indices) == starts
    assert tuple(flat.token_ids) == token_ids
    assert tuple(flat.ranks) == ranks
    assert [list(position) for position in flat] == [list(dict.fromkeys(p)) for p in _in_threes(token_ids)]


def _in_threes(token_ids: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [token_ids[first : first + 3] for first in range(0, len(token_ids), 3)]


def test_named_tokens_have_their_places_as_ranks() -> None:
    story = answer(asked={"logprob_token_ids": [4, 9]})
    story.give("a", 7, logprobs=TokenLogprobs((7, 4, 9), (-0.5, -7.9, -7.6), 1))
    [position] = story.take().logprobs or ()
    assert {token_id: entry.rank for token_id, entry in position.items()} == {7: 1, 4: 1, 9: 2}


def test_deltas_of_logprobs_are_new_and_their_sum_is_of_all() -> None:
    story = answer(DELTA, logprobs=0)
    got = []
    for token_id, logprob in ((7, -1.0), (8, -2.0), (9, -4.0)):
        story.give("a", token_id, logprobs=TokenLogprobs((token_id,), (logprob,), 1))
        completion = story.take()
        assert completion.logprobs is not None
        got.append(([list(position) for position in completion.logprobs], completion.cumulative_logprob))
    assert got == [([[7]], -1.0), ([[8]], -3.0), ([[9]], -7.0)]


# ------------------------------------------------------------------------------ request and times


def test_every_output_names_its_request_and_prompt() -> None:
    story = answer(request_id="mine", prompt="one two three")
    story.entry.num_cached_tokens = 2
    story.give("a", 7)
    output = story.collector.take()
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("mine", "one two three", (1, 2, 3))
    assert (output.num_cached_tokens, output.text) == (2, "a")


def test_the_metrics_are_the_journals() -> None:
    story = answer(arrival_s=2.0)
    assert story.collector.take().metrics == RequestMetrics(arrival_time=1e9, queued_ts=2.0)
    story.entry.num_preemptions = 3
    story.journal.scheduled(story.entry, 4.0)
    story.give("ab", 7, 8, now_s=5.0)
    story.give("c", 9, now_s=7.0)
    metrics = story.collector.take().metrics
    assert metrics == RequestMetrics(
        num_generation_tokens=3,
        num_preemptions=3,
        arrival_time=1e9,
        queued_ts=2.0,
        scheduled_ts=4.0,
        first_token_ts=5.0,
        last_token_ts=7.0,
    )
    assert metrics.first_token_latency == 3.0


def test_before_the_first_token_there_is_no_latency() -> None:
    assert RequestMetrics(queued_ts=2.0).first_token_latency == 0.0


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, "completed"),
        (FinishReason.LENGTH, "completed"),
        (FinishReason.ERROR, "failed"),
        (FinishReason.ABORT, "cancelled"),
        (FinishReason.DEADLINE, "cancelled"),
        (FinishReason.SHUTDOWN, "cancelled"),
    ],
)
def test_every_ending_leaves_a_status_behind(reason: FinishReason, status: str) -> None:
    assert STATUS_OF_ENDING[reason] == status


# ------------------------------------------------------------------- what was handed out, and what it costs


def test_an_output_keeps_what_it_had() -> None:
    story = answer(CUMULATIVE, logprobs=0)
    outputs = []
    for token_id in range(5):
        story.give("x", token_id, logprobs=TokenLogprobs((token_id,), (-1.0,), 1))
        outputs.append(story.take())
    for place, output in enumerate(outputs):
        assert output.token_ids == tuple(range(place + 1))
        assert output.logprobs is not None
        assert [list(position) for position in output.logprobs] == [
            [token_id] for token_id in range(place + 1)
        ]
        assert output.cumulative_logprob == -1.0 * (place + 1)


def test_a_cumulative_stream_copies_no_tokens_and_describes_each_logprob_once() -> None:
    decoded: list[int] = []

    def decode(token_id: int, before: Sequence[int]) -> str:
        decoded.append(token_id)
        return "x"

    story = answer(CUMULATIVE, logprobs=1)
    story.collector.decode_token = decode
    outputs = []
    for token_id in range(50):
        story.give("x", token_id, logprobs=TokenLogprobs((token_id, 99), (-1.0, -2.0), 1))
        outputs.append(story.take())
    assert len(decoded) == 2 * 50
    assert all(isinstance(output.token_ids, ListPrefix) for output in outputs)
    story.collector.finish(FinishReason.LENGTH)
    assert story.take().token_ids == tuple(range(50))


@pytest.mark.parametrize(
    ("interval", "lengths"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 3, 5, 7]), (5, [1, 6, 7]), (9, [1, 7])]
)
def test_outputs_come_with_the_first_token_and_then_at_intervals(interval: int, lengths: list[int]) -> None:
    story = answer(CUMULATIVE, stream_interval=interval)
    got = []
    for token_id in range(7):
        story.give("x", token_id)
        if token_id == 6:
            story.collector.finish(FinishReason.LENGTH)
        if story.collector.has_output():
            got.append(len(story.take().token_ids))
    assert got == lengths


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_columns_have_what_mappings_have(kind: RequestOutputKind) -> None:
    stories = []
    for is_flat in (False, True):
        story = answer(kind, logprobs=1)
        params = attrs.evolve(story.entry.request.params, flat_logprobs=is_flat)
        story.entry.request = attrs.evolve(story.entry.request, params=params)
        outputs = []
        for token_id in range(5):
            story.give("x", token_id, logprobs=TokenLogprobs((token_id, 99), (-1.0, -2.0), 1))
            outputs.append(story.take().logprobs)
        stories.append(outputs)
    mappings, columns = stories
    assert all(isinstance(flat, FlatLogprobs) for flat in columns)
    assert columns == mappings


def test_deltas_can_be_put_together_again() -> None:
    story = answer(DELTA, logprobs=0)
    outputs = []
    for token_id in range(4):
        story.give("abcd"[token_id], token_id, logprobs=TokenLogprobs((token_id,), (-1.0,), 1))
        outputs.append(story.collector.take())
    whole, other = attrs.evolve(outputs[0]), attrs.evolve(outputs[0])
    for output in outputs[1:]:
        assert whole.add(output, aggregate=True) is whole  # in place, as in vLLM
    assert (whole.text, whole.outputs[0].token_ids) == ("abcd", (0, 1, 2, 3))
    assert whole.outputs[0].logprobs is not None
    assert len(whole.outputs[0].logprobs) == 4
    assert [output.text for output in outputs] == list("abcd")
    other.add(outputs[1], aggregate=False)
    assert (other.text, other.outputs[0].token_ids) == ("b", (1,))


def test_a_token_is_described_after_the_four_before_it() -> None:
    seen: list[tuple[int, ...]] = []

    def decode(token_id: int, before: Sequence[int]) -> str:
        seen.append(tuple(before))
        return ""

    story = answer(CUMULATIVE, logprobs=0)
    story.collector.decode_token = decode
    for token_id in range(10, 16):
        story.give("", token_id, logprobs=TokenLogprobs((token_id,), (-1.0,), 1))
    story.take()
    assert seen == [(), (10,), (10, 11), (10, 11, 12), (10, 11, 12, 13), (11, 12, 13, 14)]


def prompted(kind: RequestOutputKind = DELTA, length: int = 7, **asked: Any) -> OutputCollector:
    params = SamplingParams(output_kind=kind, prompt_logprobs=0, **asked)
    entry = Journal().open(make_request(range(length), params=params))
    return OutputCollector(entry, lambda token_id, before: str(list(before)))


def tell_prompt(collector: OutputCollector) -> None:
    entry = collector.entry
    every = [TokenLogprobs((token_id,), (-1.0,), 1) for token_id in entry.request.prompt_token_ids[1:]]
    entry.add_prompt_logprobs(PromptLogprobs(entry.epoch, 1, tuple(every)), weight_version=0)


def test_a_token_of_the_prompt_is_described_after_the_four_before_it_without_the_first_of_all() -> None:
    collector = prompted()
    tell_prompt(collector)
    told = collector.prompt_logprobs()
    assert told is not None
    befores = [position[place].decoded_token for place, position in enumerate(told) if position]
    assert befores == ["[]", "[1]", "[1, 2]", "[1, 2, 3]", "[1, 2, 3, 4]", "[2, 3, 4, 5]"]


def test_columns_of_a_prompt_have_an_empty_first_position() -> None:
    collector = prompted(length=3, flat_logprobs=True)
    tell_prompt(collector)
    flat = collector.prompt_logprobs()
    assert isinstance(flat, FlatLogprobs)
    assert (tuple(flat.start_indices), tuple(flat.token_ids)) == ((0, 0, 1), (1, 2))


def test_log_probabilities_of_a_prompt_are_told_when_all_are_known_and_in_a_delta_stream_in_one_output() -> (
    None
):
    collector = prompted()
    collector.put("", 0)
    assert [collector.take().prompt_logprobs, collector.take().prompt_logprobs] == [None, None]
    assert answer().collector.prompt_logprobs() is None
    collector = prompted()
    tell_prompt(collector)
    assert [len(collector.take().prompt_logprobs or ()) for _ in range(2)] == [7, 0]
    collector = prompted(CUMULATIVE)
    tell_prompt(collector)
    assert [len(collector.take().prompt_logprobs or ()) for _ in range(2)] == [7, 7]


def test_without_a_wall_clock_the_arrival_time_is_zero() -> None:
    assert prompted().metrics().arrival_time == 0.0
