"""The picture of the terminal in the README: a real chat with triolet-nano, in tmux, as SVG.

    python tools/documentation/terminal_picture.py [--output docs/terminal.svg]

Needs tmux. The answers are the most likely ones, and no times are shown, so that the picture is the same each time.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent.parent
PICTURE = ROOT / "docs" / "terminal.svg"
COLUMNS, ROWS = 88, 24
PATIENCE_S = 120.0
PROMPT = "Type a message, or /help"
# What is typed, and what has to be on the screen before the next line is.
TYPED = (
    ("", "/help"),
    ("/set temperature 0", "temperature"),
    ("What is the opposite of hot?", "cold."),
    ("Count from 1 to 20.", "19, 20."),
    ("Name the days of the week.", "Sunday."),
    ("/save counting.json", "counting.json"),
)
# Without fonts from a network and without a frame of another system.
FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img"
 aria-label="A chat in the terminal">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
 line-height: {line_height}px }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Tmux:
    """A terminal of its own server, with a shell that shows `$`."""

    def __init__(self, folder: Path) -> None:
        self._command = ("tmux", "-S", str(folder / "socket"), "-f", "/dev/null")
        program = f"cd {folder} && exec {sys.executable} -m triolet chat --no-stats"
        environment = (
            f"XDG_STATE_HOME={folder}",
            f"PYTHONPATH={ROOT / 'src'}",
            "TRIOLET_URL=",
            f"COLUMNS={COLUMNS}",
        )
        given = [part for one in environment for part in ("-e", one)]
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        self._call("new-session", "-d", *size, *given, "sh", "-c", program)

    def _call(self, *arguments: str) -> str:
        ran = subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=True)
        return ran.stdout

    def type(self, line: str) -> None:
        """Type a line and end it."""
        self._call("send-keys", "-l", line)
        self._call("send-keys", "Enter")

    def screen(self, *flags: str) -> str:
        """Return what is on the screen; with `-e` with its colours."""
        return self._call("capture-pane", "-p", *flags)

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until a text stands on the screen so many times.

        Raises:
            TimeoutError: it does not.
        """
        until_s = time.monotonic() + PATIENCE_S
        while self.screen().count(text) < count:
            if time.monotonic() > until_s:
                raise TimeoutError(f"{text!r} is not {count} times in:\n{self.screen()}")
            time.sleep(0.1)

    def close(self) -> None:
        """End the terminal and what runs in it."""
        self._call("kill-server")


def take() -> str:
    """Return the screen after everything has been typed, with escape sequences."""
    with tempfile.TemporaryDirectory() as folder:
        tmux = Tmux(Path(folder))
        try:
            for line, expected in TYPED:
                before = tmux.screen().count(expected) + line.count(expected)
                if line:
                    tmux.wait_for(PROMPT)
                    tmux.type(line)
                tmux.wait_for(expected, before + 1 if line else 1)
            tmux.wait_for(PROMPT)
            shown = ""
            while shown != (shown := tmux.screen("-e").rstrip()):
                time.sleep(0.5)
            return shown
        finally:
            tmux.close()


def drawn(screen: str) -> str:
    """Return the SVG of a screen with escape sequences."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(screen), end="")
    return console.export_svg(
        title="triolet chat", theme=SVG_EXPORT_THEME, code_format=FORMAT, unique_id="terminal"
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE)
    parser.parse_args().output.write_text(drawn(take()), encoding="utf-8")


if __name__ == "__main__":
    main()
