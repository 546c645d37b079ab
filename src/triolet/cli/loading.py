"""Progress of loading a model: a bar on a terminal with colours, otherwise at most one line."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

import attrs

import triolet
from triolet.cli.screen import Screen
from triolet.config.engine import EngineConfig

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from triolet.core.load_progress import LoadProgress
    from triolet.engine.engine import Engine

QUIET_FOR_S: Final = 2.0
"""Without a terminal, a load that takes no longer than this is not reported."""


async def opened(stack: AsyncExitStack, config: EngineConfig) -> Engine:
    """Open an engine that closes with `stack`, and show the progress of loading."""
    loading = Loading(config.model_name)
    with loading.shown():
        return await stack.enter_async_context(triolet.open_engine(config, on_progress=loading.update))


@attrs.define
class Loading:
    """Progress display of one model's loading, on stderr."""

    model: str  # name to show
    _bar: Progress | None = None
    _task: TaskID | None = None
    _began: float | None = None
    _said: bool = False

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the progress in this context; a terminal is cleared of it at the end."""
        if sys.stderr is None or not Screen.of(sys.stderr).colour:
            yield
            return
        self._bar = _bar()
        with self._bar:  # redrawn by a thread of its own, so that it also moves while torch is being imported
            self._task = self._bar.add_task(f"loading {self.model}", total=None, size="")
            yield
        self._bar = None

    def update(self, progress: LoadProgress) -> None:
        """Show a progress report of the engine."""
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                description=f"loading {self.model} · {progress.stage}",
                completed=progress.done_bytes,
                total=progress.total_bytes or None,
                size=_size(progress),
            )
        elif not self._said:
            self._say_once(progress)

    def _say_once(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        self._began = self._began or now
        if now - self._began > QUIET_FOR_S:
            self._said = True
            print(f"triolet: loading {self.model} {_size(progress)}".rstrip(), file=sys.stderr, flush=True)


def _size(progress: LoadProgress) -> str:
    unit, divisor = ("GB", 1e9) if progress.total_bytes >= 1e9 else ("MB", 1e6)
    done, total = progress.done_bytes / divisor, progress.total_bytes / divisor
    return f"({done:.1f} of {total:.1f} {unit})" if progress.total_bytes else ""  # 0: not known


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    return Progress(
        SpinnerColumn(style="dim"),
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("[dim]{task.fields[size]}"),
        console=Console(stderr=True, highlight=False),
        transient=True,
    )
