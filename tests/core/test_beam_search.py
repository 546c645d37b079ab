"""Beam search without a model: which beams go on, which answers are complete, and how they compare."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from triolet.core.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from triolet.core.output.logprobs import Logprob
from triolet.core.request.request import FinishReason
from triolet.errors import InvalidParams

EOS = 9


def choices(logprobs: Mapping[int, float]) -> dict[int, Logprob]:
    return {token_id: Logprob(logprob) for token_id, logprob in logprobs.items()}


def search(beam_width: int = 2, *, length_penalty: float = 0.0, **params: Any) -> BeamSearch:
    """A search behind a prompt of two tokens; without a length penalty, unless a test is about it."""
    parameters = BeamSearchParams(beam_width, 8, length_penalty=length_penalty, **params)
    return BeamSearch(parameters, [EOS], [1, 2])


def answers(beams: list[BeamSearchSequence]) -> list[tuple[int, ...]]:
    return [beam.output_token_ids for beam in beams]


# ---------------------------------------------------------------------------------- parameters


def test_a_search_with_defaults_is_greedy_and_divides_by_the_length() -> None:
    params = BeamSearchParams(2, 8)
    assert (params.temperature, params.length_penalty) == (0.0, 1.0)
    assert (params.ignore_eos, params.include_stop_str_in_output, params.skip_special_tokens) == (
        False,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("beam_width", (1, 1024)),
        ("max_tokens", (1, 100_000)),
        ("temperature", (0.0, 2.0)),
        ("length_penalty", (-16.0, 16.0)),
    ],
)
def test_the_ends_of_a_range_are_taken(field: str, values: tuple[float, float]) -> None:
    fields: dict[str, Any] = {"beam_width": 2, "max_tokens": 8}
    assert [getattr(BeamSearchParams(**fields | {field: value}), field) for value in values] == [*values]


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("beam_width", 0, r"must be in \[1, 1024\], got 0"),
        ("beam_width", 1025, r"must be in \[1, 1024\], got 1025"),
        ("beam_width", True, "must be an integer, got bool"),
        ("max_tokens", 0, "must be at least 1, got 0"),
        ("max_tokens", "8", "must be an integer, got str"),
        ("temperature", -0.01, r"must be in \[0, 2\]"),
        ("temperature", 2.01, r"must be in \[0, 2\]"),
        ("length_penalty", -16.5, r"must be in \[-16.0, 16.0\]"),
        ("length_penalty", 16.5, r"must be in \[-16.0, 16.0\]"),
        ("ignore_eos", 1, "must be True or False"),
        ("structured_outputs", {}, "beams follow no grammar"),
        ("watermarking", False, "there are no watermarks"),
    ],
)
def test_a_parameter_out_of_its_range_is_refused_by_name(field: str, value: object, rule: str) -> None:
    fields: dict[str, Any] = {"beam_width": 2, "max_tokens": 8}
    with pytest.raises(InvalidParams, match=f"^{field} .*{rule}") as caught:
        BeamSearchParams(**fields | {field: value})
    assert caught.value.field == field


# ---------------------------------------------------------------------------------- the search


def test_a_search_begins_with_the_prompt_alone() -> None:
    (root,) = search().live
    assert (root.tokens, root.output_token_ids, root.num_prompt_tokens) == ((1, 2), (), 2)
    assert (root.cum_logprob, root.logprobs, root.finish_reason, root.stop_reason) == (0.0, (), None, None)


def test_the_best_of_all_continuations_go_on() -> None:
    beams = search(beam_width=2)
    beams.advance([choices({3: -1.0, 4: -3.0, 5: -2.0})])
    assert answers(beams.live) == [(3,), (5,)]
    beams.advance([choices({6: -4.0, 7: -8.0}), choices({6: -0.5, 8: -2.0})])
    assert answers(beams.live) == [(5, 6), (5, 8)]
    assert [beam.cum_logprob for beam in beams.live] == [-2.5, -4.0]
    assert [beam.finish_reason for beam in beams.live] == [None, None]


def test_a_beam_keeps_what_it_could_choose_from_at_each_token() -> None:
    beams = search(beam_width=1)
    first, second = choices({3: -1.0, 4: -3.0}), choices({5: -1.0, 6: -0.5})
    beams.advance([first])
    beams.advance([second])
    assert beams.live[0].logprobs == (first, second)


@pytest.mark.parametrize("num_positions", [0, 2])
def test_each_live_beam_needs_its_choices(num_positions: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        search().advance([choices({3: -1.0})] * num_positions)


def test_an_end_of_sequence_completes_a_beam_and_is_not_shown() -> None:
    beams = search(beam_width=2)
    beams.advance([choices({EOS: -0.5, 3: -1.0, 4: -2.0})])
    assert answers(beams.live) == [(3,), (4,)]
    best, second = beams.end()
    assert (best.tokens, best.cum_logprob) == ((1, 2), -0.5)
    assert (best.finish_reason, best.stop_reason, len(best.logprobs)) == (FinishReason.STOP, EOS, 1)
    assert (second.tokens, second.finish_reason, second.stop_reason) == ((1, 2, 3), FinishReason.LENGTH, None)


def test_the_end_of_sequence_is_shown_if_asked_for() -> None:
    beams = search(include_stop_str_in_output=True)
    beams.advance([choices({EOS: -0.5, 3: -1.0})])
    assert answers(beams.end()) == [(EOS,), (3,)]


def test_a_search_that_ignores_ends_goes_on_behind_them() -> None:
    beams = search(beam_width=1, ignore_eos=True)
    beams.advance([choices({EOS: -0.5, 3: -1.0})])
    assert answers(beams.live) == [(EOS,)]
    assert [(one.finish_reason, one.stop_reason) for one in beams.end()] == [(FinishReason.LENGTH, None)]


def test_a_search_with_ended_beams_only_has_none_to_continue() -> None:
    beams = search(beam_width=2)
    beams.advance([choices({EOS: -0.5})])
    assert beams.live == []
    assert answers(beams.end()) == [()]


def test_the_best_answers_are_given_best_first_whether_complete_or_cut_off() -> None:
    beams = search(beam_width=3)
    beams.advance([choices({EOS: -4.0, 3: -1.0, 4: -2.0})])
    beams.advance([choices({EOS: -2.5, 5: -3.5}), choices({6: -0.25})])
    found = beams.end()
    assert [(one.output_token_ids, one.cum_logprob) for one in found] == [
        ((4, 6), -2.25),
        ((3,), -3.5),
        ((), -4.0),
    ]
    assert [one.finish_reason for one in found] == ["length", "stop", "stop"]


@pytest.mark.parametrize(
    ("length_penalty", "score"), [(0.0, -6.0), (1.0, -2.0), (2.0, -6.0 / 9), (-1.0, -18.0)]
)
def test_a_score_is_the_sum_over_a_power_of_the_length_with_the_prompt(
    length_penalty: float, score: float
) -> None:
    beam = BeamSearchSequence(tokens=(1, 2, 3), num_prompt_tokens=2, cum_logprob=-6.0)
    assert beam.score(length_penalty) == pytest.approx(score)


@pytest.mark.parametrize(("length_penalty", "best"), [(0.0, ()), (1.0, (3,)), (2.0, (3,))])
def test_a_length_penalty_above_zero_prefers_longer_answers(
    length_penalty: float, best: tuple[int, ...]
) -> None:
    # -1.0 with two tokens, the end not counted, against -1.2 with three
    beams = search(beam_width=1, length_penalty=length_penalty)
    beams.advance([choices({EOS: -1.0, 3: -1.2})])
    assert answers(beams.end()) == [best]


@pytest.mark.parametrize("shows_end", [False, True])
@pytest.mark.parametrize("prompt", [[1, 2], [1, EOS]])
def test_a_score_of_a_beam_does_not_count_the_end_token(shows_end: bool, prompt: list[int]) -> None:
    params = BeamSearchParams(1, 8, include_stop_str_in_output=shows_end)
    beams = BeamSearch(params, [EOS], prompt)
    # -2.0 / 2 for the end against -2.7 / 3: an end that counts as length would win with -2.0 / 3
    beams.advance([choices({EOS: -2.0, 3: -2.7})])
    (best,) = beams.end()
    assert best.output_token_ids == (3,)
    assert best.score(1.0) == pytest.approx(-2.7 / 3)


@pytest.mark.parametrize(("tokens", "length"), [((1, 2, 3), 3), ((1, 2, 3, EOS), 3)], ids=["hidden", "shown"])
def test_an_end_is_no_length_whether_it_is_shown_or_not(tokens: tuple[int, ...], length: int) -> None:
    ended = BeamSearchSequence(
        tokens=tokens, num_prompt_tokens=2, cum_logprob=-6.0, logprobs=({}, {}), stop_reason=EOS
    )
    assert ended.score(1.0) == -6.0 / length


def test_an_answer_that_is_only_the_end_has_the_length_of_its_prompt() -> None:
    beams = search(beam_width=1, include_stop_str_in_output=True)
    beams.advance([choices({EOS: -3.0})])
    (only,) = beams.end()
    assert (only.output_token_ids, only.score(1.0)) == ((EOS,), -1.5)


def test_a_search_keeps_no_more_answers_than_it_gives_and_the_same_as_if_it_kept_all() -> None:
    rng = Random(7)
    beams, ended = search(2, length_penalty=1.0), list[tuple[float, tuple[int, ...]]]()
    for _ in range(30):
        steps = [{token_id: -rng.random() for token_id in (EOS, 3, 4, 5)} for _ in beams.live]
        ended += [
            ((beam.cum_logprob + step[EOS]) / len(beam.tokens), beam.output_token_ids)
            for beam, step in zip(beams.live, steps, strict=True)
        ]
        beams.advance([choices(step) for step in steps])
    cut = [(beam.cum_logprob / len(beam.tokens), beam.output_token_ids) for beam in beams.live]
    best = sorted([*ended, *cut], key=lambda answer: answer[0], reverse=True)[:2]
    assert answers(beams.end()) == [token_ids for _, token_ids in best]
    gc.collect()
    kept = [
        one for one in gc.get_objects() if isinstance(one, BeamSearchSequence) and one.tokens[:2] == (1, 2)
    ]
    assert len(kept) <= 2 + 2
