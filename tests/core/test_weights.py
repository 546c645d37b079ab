"""Weights that are exchanged: what is tried again, what is refused, and what the versions count."""

from __future__ import annotations

from triolet.core.weights import MAX_FAILED_STARTS, WeightsState


def loading(folder: str = "new") -> WeightsState:
    state = WeightsState()
    state.request(folder)
    state.loading = folder
    return state


def test_weights_that_cannot_be_loaded_are_refused_at_once() -> None:
    state, error = loading(), ValueError("no such tensor")
    assert state.refuse(error, is_death=False)
    assert (state.requested, state.refusal, state.loading, state.version) == (None, error, None, 0)


def test_weights_with_which_the_runner_dies_are_tried_again_until_it_has_died_too_often() -> None:
    state, error = loading(), RuntimeError("killed")
    for _ in range(MAX_FAILED_STARTS - 1):
        assert not state.refuse(error, is_death=True)
        assert (state.requested, state.refusal) == ("new", None)
        state.loading = "new"
    assert state.refuse(error, is_death=True)
    assert (state.requested, state.refusal) == (None, error)


def test_a_failure_of_the_weights_in_use_refuses_nothing() -> None:
    state = WeightsState()
    state.request("new")
    assert not state.refuse(RuntimeError("killed"), is_death=True)
    assert (state.requested, state.refusal) == ("new", None)


def test_what_was_requested_meanwhile_is_not_refused_with_the_weights_before() -> None:
    state = loading("first")
    state.request("second")
    assert state.refuse(ValueError("no such tensor"), is_death=False)
    assert (state.requested, state.refusal) == ("second", None)


def test_accepted_weights_are_those_in_use_and_have_the_next_version() -> None:
    state = loading("new")
    state.accept()
    assert (state.folder, state.requested, state.loading, state.version) == ("new", None, None, 1)


def test_a_request_that_is_withdrawn_gives_way_to_the_one_before() -> None:
    state = loading("first")
    state.request("second")
    state.withdraw("first")
    assert state.requested == "first"


def test_a_request_that_is_withdrawn_leaves_none_if_the_one_before_is_in_use() -> None:
    state = loading("first")
    state.request("second")
    state.accept()
    assert state.requested == "second"
    state.withdraw("first")
    assert state.requested is None
