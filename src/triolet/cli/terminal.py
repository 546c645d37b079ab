"""Mode of the terminal's keyboard: echo, and the handling of keys that the program has not read yet."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import attrs

if sys.platform != "win32":
    import termios
    import tty


@attrs.frozen
class KeyboardMode:
    """Saved mode of stdin's terminal."""

    # Of the terminal, as `termios` gives them; None where stdin is not one, and on Windows.
    attributes: list[Any] | None

    @classmethod
    def current(cls) -> KeyboardMode:
        """Return the present mode."""
        if sys.platform == "win32":
            return cls(None)
        try:
            return cls(termios.tcgetattr(sys.stdin.fileno()))
        # no terminal; a closed stdin, which Python sets to None; or a replacement in a test
        except (termios.error, OSError, ValueError, AttributeError):
            return cls(None)

    def restore(self) -> None:
        """Put the terminal back into this mode."""
        if sys.platform != "win32" and self.attributes is not None:
            with contextlib.suppress(termios.error, OSError):  # the terminal itself may be gone
                termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self.attributes)


@contextlib.contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Switch off echo in this context, of keys and of ^C; keys that are typed in it are read afterwards."""
    before = KeyboardMode.current()
    if sys.platform != "win32" and before.attributes is not None:
        tty.setcbreak(sys.stdin.fileno(), termios.TCSANOW)  # signals stay on, unlike in raw mode
    try:
        yield
    finally:
        before.restore()


def show_cursor() -> None:
    """Begin a new line with a visible cursor, in case something is left that had hidden it."""
    if sys.stderr is not None and sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr, flush=True)


def at_a_terminal() -> bool:
    """Return True if stdin and stdout are a terminal that can move its cursor, as a conversation needs."""
    closed = sys.stdin is None or sys.stdout is None
    return (
        not closed
        and sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM") not in ("dumb", "unknown")
    )
