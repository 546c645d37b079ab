"""Calls of a runner's worker between two steps: what they are called in messages, and what comes of them."""

from __future__ import annotations

from typing import Any

import pytest

from triolet.core.worker_call import WorkerCall, outcome_of
from triolet.errors import UnknownWorkerMethod


def times_two(number: int) -> int:
    return 2 * number


class Bound:
    def __call__(self) -> None: ...


class Runner:
    """A runner whose worker has functions only."""

    def call(self, call: WorkerCall) -> Any:
        assert callable(call.target)
        return call.target(*call.args)

    def execute(self, *arguments: Any) -> Any: ...

    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("target", "name"),
    [("reset", "reset"), (times_two, "times_two"), (Bound.__call__, "Bound.__call__"), (Bound(), "Bound")],
)
def test_a_call_is_named_by_its_target(target: Any, name: str) -> None:
    assert WorkerCall(target).name == name


def test_a_call_goes_to_the_worker_has_no_arguments_and_changes_nothing_unless_it_says_so() -> None:
    call = WorkerCall("reset")
    assert (call.is_on_model, call.args, call.kwargs, call.invalidates) == (False, (), {}, False)


def test_calls_are_told_apart_by_their_arguments_and_hashed_whatever_these_are() -> None:
    calls = [WorkerCall("scale", kwargs={"factors": [number]}) for number in (1, 2, 1)]
    assert (calls[0] == calls[1], calls[0] == calls[2]) == (False, True)
    assert len(set(calls)) == 2


def test_what_a_call_returns_or_raises_is_its_outcome() -> None:
    outcome = outcome_of(Runner(), WorkerCall(times_two, args=(21,)))
    assert (outcome.value, outcome.error) == (42, None)
    refused = outcome_of(Runner(), WorkerCall(times_two, args=()))
    assert refused.value is None and isinstance(refused.error, TypeError)


def test_an_exit_is_an_outcome_and_the_operators_interrupt_is_not() -> None:
    def leave(error: BaseException) -> None:
        raise error

    outcome = outcome_of(Runner(), WorkerCall(leave, args=(SystemExit(3),)))
    assert isinstance(outcome.error, SystemExit)
    with pytest.raises(KeyboardInterrupt):
        outcome_of(Runner(), WorkerCall(leave, args=(KeyboardInterrupt(),)))


def test_a_runner_without_a_worker_is_named_in_the_error() -> None:
    outcome = outcome_of(object(), WorkerCall("reset"))
    assert isinstance(outcome.error, UnknownWorkerMethod)
    assert "reset" in str(outcome.error) and "a object has no worker" in str(outcome.error)
