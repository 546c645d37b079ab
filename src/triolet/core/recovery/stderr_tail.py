"""Last lines that a process wrote to stderr, reduced to the few that say why it died.

Usually those are the last ones. A process that a signal ends under Python's `faulthandler` writes much more: the error,
the frames of all threads, one by one, and a list of extension modules. Of that are kept the first line, the innermost
frames of the thread that failed, and the lines written just before.

    terminate called after throwing an instance of 'std::length_error'
    Fatal Python error: Aborted

    Thread 0x00007f5d2cbff6c0 (most recent call first):
      File "threading.py", line 331 in wait
    Current thread 0x00007f5d8a3b4740 (most recent call first):
      File "attention.py", line 12 in attend
      ...
    Extension modules: numpy.core._multiarray_umath, ... (total: 40)
"""

from __future__ import annotations

from collections import deque

import attrs

NUM_LINES = 5
NUM_LINES_BEFORE, NUM_FRAMES = 2, 3  # around the line that says what happened
MAX_LINE_CHARS = 200

Line = tuple[float, str]


@attrs.define(eq=False)
class StderrTail:
    """Bounded store of stderr lines: few of them, and of each only the first `MAX_LINE_CHARS`."""

    _recent: deque[Line] = attrs.field(factory=lambda: deque(maxlen=NUM_LINES), init=False)
    _fatal: list[Line] = attrs.field(factory=list, init=False)
    _num_frames: int = attrs.field(default=0, init=False)
    _is_among_frames: bool = attrs.field(default=False, init=False)

    def hear(self, line: str, now: float) -> None:
        """Take a line.

        Args:
            line: not empty.
            now: seconds, any monotonic clock.
        """
        said = (now, line.strip()[:MAX_LINE_CHARS])
        if line.startswith("Fatal Python error:"):
            self._fatal = [*list(self._recent)[-NUM_LINES_BEFORE:], said]
            self._num_frames, self._is_among_frames = 0, False
        elif self._fatal:
            self._hear_frames(line, said)
        self._recent.append(said)

    def _hear_frames(self, line: str, said: Line) -> None:
        if self._is_among_frames and line.startswith("  File ") and self._num_frames < NUM_FRAMES:
            self._fatal.append(said)
            self._num_frames += 1
        else:
            is_own = line.startswith("Current thread ") and "(most recent call first)" in line
            self._is_among_frames = is_own and self._num_frames == 0

    def since(self, then: float) -> list[str]:
        """Return the lines that say why, among those no older than `then`."""
        fatal = [text for said_s, text in self._fatal if said_s >= then]
        return fatal or [text for said_s, text in self._recent if said_s >= then]
