"""Handling of Ctrl-C and SIGTERM: one watcher receives the signals of the whole program and decides on each.

The first Ctrl-C stops a reply in progress. A second one, while the first is still stopping or within a second of it,
leaves the program by cancelling everything. A further one while the program is leaving exits at once. SIGTERM leaves
the program immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import attrs
import trio

from triolet.cli.failures import INTERRUPTED, TERMINATED
from triolet.cli.terminal import KeyboardMode, show_cursor

TWICE_WITHIN_S: Final = 1.0


@attrs.define
class Interrupts:
    """Receiver of signals; `now` is always seconds on a monotonic clock."""

    # True if a Ctrl-C outside of a reply goes to the prompt rather than ending the program.
    conversing: bool = False
    exit_code: int | None = None  # of a program that is leaving; None before
    _program: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _reply: trio.CancelScope | None = attrs.field(default=None, init=False)
    _wake_prompt: Callable[[], None] | None = attrs.field(default=None, init=False)
    # A Ctrl-C came between prompt and reply; the next of them handles it.
    _pending: bool = attrs.field(default=False, init=False)
    _last: float = attrs.field(default=-float("inf"), init=False)

    def run(self, body: Callable[[Interrupts], Awaitable[None]]) -> None:
        """Run `body` under the watcher, in a Trio loop of its own.

        Raises:
            SystemExit: a signal ended the program; with the exit code of the signal.
        """
        keyboard = KeyboardMode.current()
        try:
            trio.run(self._run, body, keyboard, restrict_keyboard_interrupt_to_checkpoints=True)
        finally:
            if self.exit_code is not None:
                # A Ctrl-C that comes too late must not change the exit code.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            keyboard.restore()
        if self.exit_code is not None:
            raise SystemExit(self.exit_code)

    def interrupt(self, now: float) -> None:
        """Handle a Ctrl-C that came as a signal."""
        if self._reply is not None and not self._reply.cancel_called:
            self._last = now
            self._reply.cancel()
        elif self._reply is None and self._wake_prompt is not None:
            self._wake_prompt()  # the same as the key pressed at the prompt, which counts it
        elif self._reply is None and self.conversing and not self._pending:
            self._pending = True
        else:
            self.leave(INTERRUPTED)

    def is_second(self, now: float) -> bool:
        """Count a Ctrl-C at the prompt; return True if it came within a second of another one."""
        close, self._last = now - self._last <= TWICE_WITHIN_S, now
        return close

    def leave(self, exit_code: int) -> None:
        """Cancel everything; `run` raises `SystemExit` with this code when all has ended."""
        if self.exit_code is None:
            self.exit_code = exit_code
        self._program.cancel()

    @contextlib.contextmanager
    def stopping(self, reply: trio.CancelScope) -> Iterator[None]:
        """Let a Ctrl-C cancel `reply` in this context."""
        self._reply = reply
        if self._taken():
            reply.cancel()
        try:
            yield
        finally:
            self._reply = None

    @contextlib.contextmanager
    def waking(self, wake_prompt: Callable[[], None]) -> Iterator[None]:
        """Let a Ctrl-C call `wake_prompt` in this context."""
        self._wake_prompt = wake_prompt
        if self._taken():
            wake_prompt()
        try:
            yield
        finally:
            self._wake_prompt = None

    def _taken(self) -> bool:
        pending, self._pending = self._pending, False
        return pending

    async def _run(self, body: Callable[[Interrupts], Awaitable[None]], keyboard: KeyboardMode) -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch, keyboard)
            with self._program:
                await body(self)
            nursery.cancel_scope.cancel()

    async def _watch(self, keyboard: KeyboardMode, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if self.exit_code is not None:  # another signal while leaving: do not wait for the rest
                    keyboard.restore(discard=True)
                    show_cursor()
                    os._exit(self.exit_code)
                if number == signal.SIGTERM:
                    self.leave(TERMINATED)
                else:
                    self.interrupt(trio.current_time())
