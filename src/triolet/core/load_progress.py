"""Progress reports of loading a model."""

from __future__ import annotations

from collections.abc import Callable

import attrs

IMPORTS = "imports"  # stage that only shows that a process is alive; callers of the engine are not told of it


@attrs.frozen
class LoadProgress:
    """One progress report.

    Args:
        stage: current stage, such as `download` or `weights`.
        done_bytes: bytes of this stage that are done.
        total_bytes: bytes of this stage; 0 while that is not known.
    """

    stage: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[LoadProgress], None]
"""Callback for progress reports."""
