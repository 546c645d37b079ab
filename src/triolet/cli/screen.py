"""Output on the terminal: replies as they stream, dim remarks, and a spinner before the first text.

Only on a terminal are there colours, a spinner and wrapped lines, and control characters are removed; a pipe or a file
gets the reply as it is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import Final, TextIO

import attrs
import trio
from prompt_toolkit.utils import get_cwidth

DIM: Final = "2"
RED: Final = "31"
ERASE_LINE: Final = "\r\x1b[K"
SPINNER_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
SPINNER_STEP_S: Final = 0.08
MIN_COLUMN_CHARS: Final = 30
TAB_COLUMNS: Final = 4  # a tab goes to the next multiple of it: most models indent code by four
SHOW_SECONDS_AFTER_S: Final = 2.0
SHOW_REASON_AFTER_S: Final = 0.4  # most replies begin before there is time to read it


@attrs.define
class Wrapping:
    """Word wrap of streamed text: a word that reaches the margin moves to the next line as a whole."""

    # Text is written at once, so the beginning of a word may have to be erased from the line where it does not fit.

    _column: int = 0
    _word: str = ""  # part of the current word that is on the screen

    def feed(self, text: str, width: int) -> str:
        """Return the characters to write for the next piece of text.

        Args:
            text: next piece, cut anywhere between characters.
            width: columns of the terminal.
        """
        used = max(width, 2) - 1  # the last column stays free
        return "".join(self._place(character, used) for character in text)

    def _place(self, character: str, width: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return "\n"
        if character == "\t":
            return self._tab(width)
        cells = get_cwidth(character)
        if character == " ":
            self._word = ""
            return self._break() if self._column + cells > width else self._advance(character, cells)
        moved = self._move_word() if self._column + cells > width else ""
        self._word += character
        return moved + self._advance(character, cells)

    def _tab(self, width: int) -> str:
        self._word = ""
        cells = TAB_COLUMNS - self._column % TAB_COLUMNS
        return self._break() if self._column + cells > width else self._advance(" " * cells, cells)

    def _advance(self, character: str, cells: int) -> str:
        self._column += cells
        return character

    def _break(self) -> str:
        # A line break takes the place of the space that does not fit.
        self._column = 0
        return "\n"

    def _move_word(self) -> str:
        """Return the characters that move the current word to the next line."""
        word_cells = get_cwidth(self._word)
        if word_cells == self._column:  # the word fills the line, so it is cut here
            self._column, self._word = 0, ""
            return "\n"
        self._column = word_cells
        back = f"\x1b[{word_cells}D\x1b[K" if word_cells else ""
        return f"{back}\n{self._word}"


@attrs.define
class Screen:
    """Terminal, file or pipe to write to."""

    out: TextIO  # stream to write to
    live: bool  # True if it is a terminal that can move its cursor
    colour: bool  # True if it may also have colours and a spinner
    _wrapping: Wrapping = attrs.field(factory=Wrapping, init=False)
    _at_line_start: bool = attrs.field(default=True, init=False)

    @classmethod
    def of(cls, out: TextIO) -> Screen:
        """Return the screen of a standard stream."""
        if (reconfigure := getattr(out, "reconfigure", None)) is not None:
            reconfigure(errors="replace")  # in an ASCII locale a "?" is better than no reply
        live = out.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        return cls(out, live=live, colour=live and not os.environ.get("NO_COLOR"))

    def reply(self, text: str, *, style: str | None = None) -> None:
        """Write the next piece of a reply, plain or in a style such as `DIM`."""
        if not text:
            return
        self._at_line_start = text.endswith("\n")
        written = self._wrapped(text, self._wrapping)
        self._write(self._painted(written, style) if style else written)

    def end_reply(self) -> None:
        """Finish the reply's last line."""
        if not self._at_line_start:
            self._write("\n")
        self._at_line_start, self._wrapping = True, Wrapping()

    def say(self, text: str) -> None:
        """Write a line that is no part of a reply."""
        self._write(self._wrapped(text) + "\n")

    def remark(self, text: str) -> None:
        """Write a line in dim text."""
        self._write(self._painted(self._wrapped(text), DIM) + "\n")

    def complain(self, text: str) -> None:
        """Write an error line."""
        self._write(self._painted(self._wrapped(text), RED) + "\n")

    def columns(self, texts: Sequence[str]) -> None:
        """Write texts side by side on a terminal that is wide enough, and otherwise one below the other."""
        width = shutil.get_terminal_size().columns
        if not self.live or width < MIN_COLUMN_CHARS * len(texts):
            for text in texts:
                self.say(text + "\n")
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2), expand=True)
        for _ in texts:
            table.add_column(ratio=1)
        table.add_row(*(Text(_printable(text)) for text in texts))
        Console(file=self.out, width=width - 1, highlight=False).print(table)

    def spinner(self, nursery: trio.Nursery) -> Spinner:
        """Start a spinner, if this screen shows one."""
        spinner = Spinner(self)
        if self.colour:
            nursery.start_soon(spinner.spin)
        return spinner

    def _wrapped(self, text: str, wrapping: Wrapping | None = None) -> str:
        if not self.live:
            return text
        return (wrapping or Wrapping()).feed(_printable(text), shutil.get_terminal_size().columns)

    def _painted(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour else text

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


@attrs.define
class Spinner:
    """Spinner on the line where the reply will appear."""

    _screen: Screen
    # Asked for at each frame: why the reply has not begun; empty for nothing to tell.
    reason: Callable[[], str] = lambda: ""
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)
    _visible: bool = attrs.field(default=False, init=False)

    async def spin(self) -> None:
        """Draw frames until stopped; after a while, with the reason and the elapsed seconds."""
        began = trio.current_time()
        with self._scope:
            while not self._scope.cancel_called:  # it may have been stopped before its first turn
                elapsed_s = trio.current_time() - began
                frame = SPINNER_FRAMES[int(elapsed_s / SPINNER_STEP_S) % len(SPINNER_FRAMES)]
                seconds = f"{elapsed_s:.0f} s" if elapsed_s >= SHOW_SECONDS_AFTER_S else ""
                reason = self.reason() if elapsed_s >= SHOW_REASON_AFTER_S else ""
                line = " ".join(filter(None, (frame, reason, seconds)))
                self._screen._write(ERASE_LINE + self._screen._painted(line, DIM))
                self._visible = True
                await trio.sleep(SPINNER_STEP_S)

    def stop(self) -> None:
        """Leave the line empty; nothing is drawn after this."""
        self._scope.cancel()
        if self._visible:
            self._visible = False
            self._screen._write(ERASE_LINE)


def _printable(text: str) -> str:
    # Control characters in an answer could move the cursor or rename the window.
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c <= "\x9f"))
