"""n answers to one prompt: n requests in the journal, and one stream of outputs."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.core.make import make_request, next_token
from tests.core.stage import BLOCK_SIZE, Stage
from triolet.core.journal import Journal
from triolet.core.output.output_processor import OutputCollector, ParallelCollector, collector_of
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.param_validation import MAX_INT64
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.request import FinishReason, Request, fan_out
from triolet.core.step_plan import PromptLogprobs, TokenLogprobs

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def children(seed: int | None = 7, n: int = 3, **params: object) -> tuple[Request, ...]:
    asked = SamplingParams(n=n, seed=seed, prompt_logprobs=2, **params)  # type: ignore[arg-type]
    draws = count(100)
    request = make_request(
        request_id="r", params=asked, seed=50 if seed is None else seed, queue_deadline_s=5.0
    )
    return fan_out(request, lambda: next(draws))


# ------------------------------------------------------------------------------------------ fan-out


def test_each_answer_is_a_request_of_its_own_with_the_next_seed() -> None:
    requests = children()
    assert [request.request_id for request in requests] == ["0_r", "1_r", "2_r"]
    assert [(request.parent_id, request.index) for request in requests] == [("r", 0), ("r", 1), ("r", 2)]
    assert [request.seed for request in requests] == [7, 8, 9]
    assert {request.params.n for request in requests} == {1}


def test_without_a_seed_each_answer_draws_one() -> None:
    assert [request.seed for request in children(seed=None)] == [50, 100, 101]


def test_seeds_stay_within_64_bits() -> None:
    assert [request.seed for request in children(seed=MAX_INT64)] == [MAX_INT64, -(2**63), -(2**63) + 1]


def test_the_prompt_is_told_of_once_and_the_queue_waited_in_once() -> None:
    requests = children()
    assert [request.params.prompt_logprobs for request in requests] == [2, None, None]
    assert [request.queue_deadline_s for request in requests] == [5.0, float("inf"), float("inf")]


def test_one_answer_is_the_request_itself() -> None:
    request = make_request(params=SamplingParams(seed=3))
    assert fan_out(request, lambda: 0) == (request,)


# ------------------------------------------------------------------------------------- in the journal


def test_the_others_arrive_with_the_first_ones_first_token() -> None:
    journal = Journal()
    first = journal.open(make_request(request_id="0_r"))
    others = [journal.open(make_request(request_id=f"{i}_r"), after=first) for i in (1, 2)]
    assert journal.take_arrivals() == [first]
    assert all(journal.is_held(other) for other in others)
    assert len(journal) == 3
    journal.commit(first, next_token(first, 5), 0.0)
    assert journal.take_arrivals() == others
    assert not any(journal.is_held(other) for other in others)
    journal.check()


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR])
def test_the_others_end_with_the_first_one_if_it_has_no_token(reason: FinishReason) -> None:
    journal = Journal()
    first = journal.open(make_request(request_id="0_r"))
    other = journal.open(make_request(request_id="1_r"), after=first)
    first.failure = "why"
    first.finish(reason)
    assert journal.close(first) == [first.serial, other.serial]
    assert (other.finish_reason, other.failure) == (reason, "why")
    assert (len(journal), journal.num_queued_tokens, journal.take_arrivals()) == (0, 0, [])
    journal.check()


def test_one_that_ended_while_it_was_held_does_not_arrive() -> None:
    journal = Journal()
    first = journal.open(make_request(request_id="0_r"))
    other = journal.open(make_request(request_id="1_r"), after=first)
    other.finish(FinishReason.ABORT)
    journal.close(other)
    journal.take_arrivals()
    journal.commit(first, next_token(first, 5), 0.0)
    assert journal.take_arrivals() == []
    journal.check()


# --------------------------------------------------------------------------- the prompt is computed once


def shares_of_three(prompt_len: int, **config: bool) -> list[tuple[str, int, int]]:
    """What is computed of the prompt of three answers, and of their first tokens."""
    stage = Stage(max_num_batched_tokens=64, num_blocks=32, **config)
    prompt = tuple(range(prompt_len))
    first = stage.journal.open(make_request(prompt, request_id="0_r", max_tokens=3))
    for index in (1, 2):
        stage.journal.open(make_request(prompt, request_id=f"{index}_r", max_tokens=3), after=first)
    stage.scheduler.add_arrivals()
    assert stage.step() == [("0_r", 0, prompt_len)]
    shares = stage.step()
    assert stage.pool.num_in_use < 3 * len(first.request.prompt_token_ids) // BLOCK_SIZE
    while stage.step():
        pass
    assert stage.pool.num_in_use == 0
    return shares


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_others_take_the_full_blocks_of_the_prompt(is_cached: bool) -> None:
    shares = shares_of_three(2 * BLOCK_SIZE + 3, enable_prefix_caching=is_cached)
    assert shares == [("0_r", 11, 1), ("1_r", 8, 3), ("2_r", 8, 3)]


@pytest.mark.parametrize("is_cached", [True, False])
def test_all_full_blocks_before_the_last_token_are_taken(is_cached: bool) -> None:
    shares = shares_of_three(2 * BLOCK_SIZE + 1, enable_prefix_caching=is_cached)
    assert shares == [("0_r", 9, 1), ("1_r", 8, 1), ("2_r", 8, 1)]


@pytest.mark.parametrize("is_cached", [True, False])
def test_the_last_block_is_computed_again_if_the_prompt_fills_it(is_cached: bool) -> None:
    """Its last token's logits are needed, and logits are not kept."""
    shares = shares_of_three(3 * BLOCK_SIZE, enable_prefix_caching=is_cached)
    assert shares == [("0_r", 12, 1), ("1_r", 8, 4), ("2_r", 8, 4)]


# ------------------------------------------------------------------------------------- one stream again


class Trio:
    """Three answers on their way to one reader."""

    def __init__(self, kind: RequestOutputKind, **params: Any) -> None:
        self.journal = Journal()
        asked = SamplingParams(n=3, output_kind=kind, seed=1, **params)
        request = make_request((7, 8), params=asked)
        self.entries = [self.journal.open(one) for one in fan_out(request, lambda: 0)]
        self.collectors = [
            OutputCollector(entry, lambda token_id, before: str(token_id)) for entry in self.entries
        ]
        self.answers = ParallelCollector(self.collectors)

    def say(self, index: int, text: str) -> None:
        for _ in text:
            self.journal.commit(self.entries[index], next_token(self.entries[index], index), 0.0)
        self.collectors[index].put(text, len(text))

    def end(self, index: int, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.collectors[index].finish(reason)

    def read(self) -> list[RequestOutput]:
        outputs = []
        while self.answers.has_output():
            outputs.append(self.answers.take())
        return outputs


def test_streamed_outputs_carry_one_answer_each_in_turns_under_the_parents_name() -> None:
    trio = Trio(DELTA)
    for index in (0, 1, 2):
        trio.say(index, "ab")
    outputs = trio.read()
    assert [(output.request_id, output.outputs[0].index, output.text) for output in outputs] == [
        ("r", 0, "ab"),
        ("r", 1, "ab"),
        ("r", 2, "ab"),
    ]
    trio.say(0, "c")
    trio.say(2, "c")
    assert [output.outputs[0].index for output in trio.read()] == [0, 2]
    for index in (0, 1):
        trio.say(index, "d")
    assert [output.outputs[0].index for output in trio.read()] == [0, 1]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_only_the_last_output_is_finished(kind: RequestOutputKind) -> None:
    trio = Trio(kind)
    trio.end(1)
    assert [output.finished for output in trio.read()] == [False]
    trio.say(0, "a")
    trio.end(0)
    trio.end(2)
    outputs = trio.read()
    assert [(output.finished, output.outputs[0].finish_reason) for output in outputs] == [
        (False, "length"),
        (True, "length"),
    ]


def test_a_final_output_has_all_answers_by_index() -> None:
    trio = Trio(FINAL_ONLY)
    for index in (2, 0, 1):
        assert not trio.answers.has_output()
        trio.say(index, "abc"[index])
        trio.end(index)
    [output] = trio.read()
    assert [(answer.index, answer.text) for answer in output.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    assert output.finished


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        # as recorded from vLLM 0.32.0: what was told already is an empty list there, and not None
        (DELTA, {0: [2, 0], 1: [2, 0], 2: [2, 0]}),
        (CUMULATIVE, {0: [2, 2], 1: [2, 2], 2: [2, 2]}),
        (FINAL_ONLY, {0: [2]}),
    ],
)
def test_each_answers_outputs_tell_the_log_probabilities_of_the_prompt(
    kind: RequestOutputKind, told: dict[int, list[int]]
) -> None:
    trio = Trio(kind, prompt_logprobs=0)
    first = trio.entries[0]
    share = PromptLogprobs(first.epoch, 1, (TokenLogprobs((8,), (-1.0,), 1),))
    first.add_prompt_logprobs(share, weight_version=0)
    counts: dict[int, list[int]] = {}
    for is_last in (False, True):
        for index in range(3):
            trio.say(index, "a")
            if is_last:
                trio.end(index)
        for output in trio.read():
            assert output.prompt_logprobs is not None
            counts.setdefault(output.outputs[0].index, []).append(len(output.prompt_logprobs))
    assert counts == told


def test_an_answer_that_failed_is_known_to_the_reader() -> None:
    trio = Trio(DELTA)
    assert trio.answers.failed is None
    trio.end(1, FinishReason.ERROR)
    assert trio.answers.failed is trio.entries[1]


def test_turns_begin_with_the_first_answer_and_go_on_behind_the_last_one_taken() -> None:
    trio = Trio(DELTA)
    for index in (0, 1, 2):
        trio.say(index, "a")
    order = [trio.answers.take().outputs[0].index]
    trio.say(0, "b")
    order += [trio.answers.take().outputs[0].index for _ in range(3)]
    assert order == [0, 1, 2, 0]


def test_the_text_of_several_answers_is_that_of_the_first_and_one_answer_is_read_as_it_is() -> None:
    trio = Trio(DELTA)
    trio.say(0, "ab")
    trio.say(1, "c")
    assert trio.answers.text == "ab"
    assert collector_of(trio.collectors[1:2]) is trio.collectors[1]
    assert isinstance(collector_of(trio.collectors), ParallelCollector)
