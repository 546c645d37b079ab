"""Where a Ctrl-C goes."""

from __future__ import annotations

import pytest
import trio

from triolet.cli.failures import INTERRUPTED, TERMINATED
from triolet.cli.interrupts import Interrupts


def test_outside_of_a_conversation_it_leaves() -> None:
    interrupts = Interrupts()
    interrupts.interrupt(now=0.0)
    assert interrupts.exit_code == INTERRUPTED


async def test_during_a_reply_it_stops_the_reply_only() -> None:
    interrupts, reply = Interrupts(), trio.CancelScope()
    with interrupts.stopping(reply):
        interrupts.interrupt(now=0.0)
    assert reply.cancel_called
    assert interrupts.exit_code is None


async def test_a_second_one_leaves_however_late_if_the_reply_has_not_stopped() -> None:
    interrupts = Interrupts(conversing=True)
    with interrupts.stopping(trio.CancelScope()):
        interrupts.interrupt(now=0.0)
        interrupts.interrupt(now=60.0)
    assert interrupts.exit_code == INTERRUPTED


@pytest.mark.parametrize(("gap_s", "second"), [(0.9, True), (1.1, False)])
async def test_one_at_the_prompt_is_the_second_if_it_comes_within_a_second_of_any_other(
    gap_s: float, second: bool
) -> None:
    interrupts = Interrupts(conversing=True)
    with interrupts.stopping(trio.CancelScope()):
        interrupts.interrupt(now=100.0)
    assert interrupts.is_second(now=100.0 + gap_s) is second


def test_the_first_one_at_the_prompt_is_not_the_second() -> None:
    assert not Interrupts(conversing=True).is_second(now=0.0)


def test_a_signal_at_the_prompt_is_handed_to_the_prompt() -> None:
    interrupts, woken = Interrupts(conversing=True), list[str]()
    with interrupts.waking(lambda: woken.append("prompt")):
        interrupts.interrupt(now=0.0)
    assert woken == ["prompt"]
    assert interrupts.exit_code is None


async def test_one_between_prompt_and_reply_stops_the_reply_that_follows() -> None:
    interrupts, first, second = Interrupts(conversing=True), trio.CancelScope(), trio.CancelScope()
    interrupts.interrupt(now=0.0)
    with interrupts.stopping(first):
        pass
    with interrupts.stopping(second):
        pass
    assert (first.cancel_called, second.cancel_called) == (True, False)


def test_one_between_reply_and_prompt_goes_to_the_prompt_that_follows() -> None:
    interrupts, woken = Interrupts(conversing=True), list[str]()
    interrupts.interrupt(now=0.0)
    with interrupts.waking(lambda: woken.append("prompt")):
        pass
    assert woken == ["prompt"]


def test_the_first_reason_to_leave_is_the_exit_code_and_everything_is_cancelled() -> None:
    interrupts = Interrupts()

    async def body(interrupts: Interrupts) -> None:
        interrupts.leave(TERMINATED)
        interrupts.leave(INTERRUPTED)
        await trio.sleep_forever()

    with pytest.raises(SystemExit) as left:
        interrupts.run(body)
    assert left.value.code == TERMINATED
