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

    def restore(self, *, discard: bool = False) -> None:
        """Put the terminal back into this mode.

        Args:
            discard: True throws away keys that have not been read.
        """
        if sys.platform != "win32" and self.attributes is not None:
            when = termios.TCSAFLUSH if discard else termios.TCSADRAIN
            with contextlib.suppress(termios.error, OSError):  # the terminal itself may be gone
                termios.tcsetattr(sys.stdin.fileno(), when, self.attributes)


@contextlib.contextmanager
def quiet_keyboard() -> Iterator[None]:
    """Switch off echo in this context, of keys and of ^C; keys that are typed in it are read afterwards.

    They stay to be read when the context is left as usual. An exception, as of Ctrl-C, discards them: a message that
    was typed ahead is no command for the shell.
    """
    before = KeyboardMode.current()
    if sys.platform != "win32" and before.attributes is not None:
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, _quiet(before.attributes))
    try:
        yield
    except BaseException:
        before.restore(discard=True)
        raise
    before.restore()


def _quiet(attributes: list[Any]) -> list[Any]:
    """Return a terminal's attributes that give single keys, as they are, without echo; signals stay on."""
    input_modes, output_modes, control_modes, local_modes, input_speed, output_speed, characters = attributes
    characters = [*characters]
    characters[termios.VMIN], characters[termios.VTIME] = 1, 0
    local_modes &= ~(termios.ECHO | termios.ICANON)
    return [
        input_modes & ~termios.ICRNL,  # Enter stays Enter, and Alt-Enter the line break of a message
        output_modes,
        control_modes,
        local_modes | termios.NOFLSH,  # Ctrl-C would otherwise discard what was typed before it
        input_speed,
        output_speed,
        characters,
    ]


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
