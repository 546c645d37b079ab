"""Outputs of a stream: what an output says of its first answer, and how a later output joins an earlier one."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.output.logprobs import Logprob, Position
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.request import FinishReason, RequestMetrics

A: Position = {1: Logprob(-1.0)}
B: Position = {2: Logprob(-2.0)}


def answer(
    index: int = 0, text: str = "", token_ids: tuple[int, ...] = (), **fields: Any
) -> CompletionOutput:
    return CompletionOutput(index=index, text=text, token_ids=token_ids, **fields)


def output(*answers: CompletionOutput, finished: bool = False, **fields: Any) -> RequestOutput:
    defaults: dict[str, Any] = {
        "request_id": "r",
        "prompt": "p",
        "prompt_token_ids": (7,),
        "metrics": RequestMetrics(),
    }
    return RequestOutput(outputs=answers, finished=finished, **(defaults | fields))


# ------------------------------------------------------------------------------------ one output


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_an_answer_has_ended_once_it_has_a_reason(reason: FinishReason | None) -> None:
    assert answer(finish_reason=reason).finished() is (reason is not None)


def test_an_output_speaks_for_its_first_answer() -> None:
    both = output(answer(0, "a", finish_reason=FinishReason.STOP), answer(1, "b"))
    assert (both.text, both.finish_reason) == ("a", "stop")
    assert (output(answer(1, "b")).text, output(answer(1, "b")).finish_reason) == ("b", None)


def test_an_output_owes_nothing_to_a_cache_or_to_new_weights_unless_it_says_so() -> None:
    plain = output(answer())
    assert (plain.num_cached_tokens, plain.num_cache_creation_tokens) == (0, 0)
    assert plain.outputs[0].weight_version == 0


# -------------------------------------------------------------------------------- joined outputs


def test_deltas_join_to_the_whole_answer() -> None:
    whole = output(answer(0, "ab", (1, 2), logprobs=[A, B]))
    whole.add(output(answer(0, "c", (3,), logprobs=[A], finish_reason=FinishReason.STOP)), aggregate=True)
    (joined,) = whole.outputs
    assert (joined.text, list(joined.token_ids)) == ("abc", [1, 2, 3])
    assert joined.logprobs is not None
    assert list(joined.logprobs) == [A, B, A]
    assert joined.finish_reason == "stop"


@pytest.mark.parametrize(
    ("earlier", "later", "joined"),
    [(None, None, None), (None, [B], [B]), ([A], None, None), ([A], [], [A]), ([], [B], [B])],
)
def test_log_probabilities_are_joined_if_the_later_delta_has_some(
    earlier: list[Position] | None, later: list[Position] | None, joined: list[Position] | None
) -> None:
    whole = output(answer(0, "a", (1,), logprobs=earlier))
    whole.add(output(answer(0, "b", (2,), logprobs=later)), aggregate=True)
    found = whole.outputs[0].logprobs
    assert (None if found is None else list(found)) == joined


def test_all_that_is_not_joined_is_the_later_deltas() -> None:
    whole = output(answer(0, "a", (1,), cumulative_logprob=-1.0, weight_version=1))
    later = answer(0, "b", (2,), cumulative_logprob=-3.0, weight_version=2, stop_reason="x")
    whole.add(output(later), aggregate=True)
    (joined,) = whole.outputs
    assert (joined.cumulative_logprob, joined.weight_version, joined.stop_reason) == (-3.0, 2, "x")


def test_a_cumulative_answer_replaces_the_earlier_one() -> None:
    whole = output(answer(0, "a", (1,)))
    whole.add(output(answer(0, "ab", (1, 2))), aggregate=False)
    assert whole.outputs == (answer(0, "ab", (1, 2)),)


@pytest.mark.parametrize("aggregate", [True, False])
def test_answers_that_the_later_output_does_not_have_stay_in_the_order_of_their_index(
    aggregate: bool,
) -> None:
    whole = output(answer(2, "c"), answer(0, "a"))
    whole.add(output(answer(1, "b")), aggregate)
    assert whole.outputs == (answer(0, "a"), answer(1, "b"), answer(2, "c"))


def test_the_first_delta_of_an_answer_is_taken_as_it_is() -> None:
    whole = output(answer(0, "a", (1,)))
    whole.add(output(answer(1, "b", (2,)), answer(0, "c", (3,))), aggregate=True)
    assert [(one.text, tuple(one.token_ids)) for one in whole.outputs] == [("ac", (1, 3)), ("b", (2,))]


@pytest.mark.parametrize(
    ("earlier", "later", "joined"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_a_joined_output_is_the_last_if_either_is(earlier: bool, later: bool, joined: bool) -> None:
    whole = output(answer(), finished=earlier)
    whole.add(output(answer(), finished=later), aggregate=True)
    assert whole.finished is joined


@pytest.mark.parametrize(
    ("earlier", "later", "joined"),
    [
        (None, None, None),
        ([None, A], None, [None, A]),
        (None, [None, B], [None, B]),
        ([None, A], [None, B], [None, B]),
    ],
)
def test_the_log_probabilities_of_the_prompt_are_the_latest_that_came(
    earlier: list[Position | None] | None, later: list[Position | None] | None, joined: object
) -> None:
    whole = output(answer(), prompt_logprobs=earlier)
    whole.add(output(answer(), prompt_logprobs=later), aggregate=True)
    assert whole.prompt_logprobs == joined


@pytest.mark.parametrize("aggregate", [True, False])
def test_the_earlier_output_changes_in_place_and_the_later_one_does_not(aggregate: bool) -> None:
    whole = output(answer(0, "a", (1,)), num_cached_tokens=1)
    later = output(answer(0, "b", (2,)), num_cached_tokens=5, metrics=RequestMetrics(num_preemptions=3))
    assert whole.add(later, aggregate) is whole
    assert (whole.num_cached_tokens, whole.metrics.num_preemptions) == (5, 3)
    assert later.outputs == (answer(0, "b", (2,)),)
