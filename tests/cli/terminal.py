"""A program in a pseudo-terminal, as a person at one has it: typed at, looked at, interrupted."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.source_tree import ROOT, SRC

PATIENCE_S = 60.0  # on a busy machine; nothing waits this long when all is well
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


class Terminal:
    """One program and the terminal it runs in.

    Args:
        module: what `python -m` runs.
        arguments: of the command line.
        home: folder for the state that the program keeps.
        environ: variables on top of this process's.
    """

    def __init__(self, module: str, *arguments: str, home: Path, environ: Mapping[str, str]) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        self.mode_before = self.mode()
        own = {
            "TERM": "xterm-256color",
            "PYTHONPATH": os.pathsep.join([str(SRC), str(ROOT)]),
            "XDG_STATE_HOME": str(home),
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nothing here answers where the cursor is
        }
        # The terminal's size is the one set above, whatever pytest runs in.
        others = ("NO_COLOR", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in others}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**inherited, **own, **environ},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C becomes a signal
        )
        self.raw = ""
        self._seen = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end amid a character

    def type(self, keys: str) -> None:
        """Press keys; `\\x03` is Ctrl-C."""
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> str:
        """Wait until `text` appears after what was expected before; what stood before it."""
        until = time.monotonic() + PATIENCE_S
        while (at := self.text.find(text, self._seen)) < 0:
            assert time.monotonic() < until, f"{text!r} did not appear after {self.text[self._seen :]!r}"
            assert self._read() or self.process.poll() is None, f"it ended without {text!r}: {self.text!r}"
        before, self._seen = self.text[self._seen : at], at + len(text)
        return before

    def expect_exit(self) -> int:
        """Wait until the program has ended; its exit code."""
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it did not end after {self.text[self._seen :]!r}"
            self._read()
        while self._read():
            pass
        return self.process.returncode

    def press_until_exit(self, key: str) -> int:
        """Press a key again and again until the program has ended; its exit code.

        Signals that come faster than they are handled become one, so pressing a fixed number of times is not enough.
        """
        until = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it did not end after {self.text[self._seen :]!r}"
            self.type(key)
            time.sleep(0.1)
        return self.expect_exit()

    @property
    def text(self) -> str:
        """Everything that was written, without its escape sequences."""
        return ESCAPE.sub("", self.raw)

    def mode(self) -> list[object]:
        """The terminal's mode, as `termios` gives it."""
        return termios.tcgetattr(self._slave)

    def num_unread(self) -> int:
        """Bytes that were typed and that nothing has read: the shell's next input, once the program has ended."""
        return int.from_bytes(fcntl.ioctl(self._slave, termios.FIONREAD, bytes(4)), sys.byteorder)

    def close(self) -> None:
        """End the program, if it has not ended, and give back the terminal."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], 0.05)[0]:
            return False
        self.raw += self._decoder.decode(os.read(self._master, 65536))
        return True


@contextlib.contextmanager
def terminal(module: str, *arguments: str, home: Path, **environ: str) -> Iterator[Terminal]:
    """A program in a terminal, for the length of a test."""
    opened = Terminal(module, *arguments, home=home, environ=environ)
    try:
        yield opened
    finally:
        opened.close()
