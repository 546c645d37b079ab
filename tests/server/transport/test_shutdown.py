"""Signals of a program that serves, and the times of its grace period."""

from __future__ import annotations

import os
import signal

import pytest
import trio
import trio.testing

from triolet.config.server import GatewayConfig
from triolet.server.transport.shutdown import StopSignals, drain_deadlines


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_the_first_signal_lets_a_program_end_and_the_second_one_ends_it_with_its_code(
    second: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    ended = trio.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    signals = StopSignals()
    async with trio.open_nursery() as nursery:
        await nursery.start(signals.watch)
        signal.raise_signal(signal.SIGTERM)
        with trio.fail_after(300):
            await signals.came.wait()
        assert codes == []
        signal.raise_signal(second)
        with trio.fail_after(300):
            await ended.wait()
        nursery.cancel_scope.cancel()
    assert codes == [code]


def test_a_program_that_ctrl_c_ended_exits_with_130_and_one_that_sigterm_ended_with_0() -> None:
    StopSignals(first=signal.SIGTERM).raise_for_interrupt()
    with pytest.raises(SystemExit) as caught:
        StopSignals(first=signal.SIGINT).raise_for_interrupt()
    assert caught.value.code == 130


@pytest.mark.parametrize(
    ("grace_s", "close_s", "expected"), [(25.0, 2.0, (21.0, 23.0)), (2.0, 2.0, (1.0, 1.5))]
)
async def test_the_rest_of_the_grace_period_is_for_closing_and_at_most_half_of_it(
    grace_s: float,
    close_s: float,
    expected: tuple[float, float],
    autojump_clock: trio.testing.MockClock,
) -> None:
    deadlines = drain_deadlines(GatewayConfig(grace_period=grace_s, close_timeout=close_s))
    assert tuple(one - trio.current_time() for one in deadlines) == pytest.approx(expected)
