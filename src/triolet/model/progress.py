"""How far the loading of a model has come."""

from __future__ import annotations

from collections.abc import Callable

import attrs


@attrs.frozen
class LoadProgress:
    """One report; each stage counts from zero.

    Args:
        stage: `download` or `weights`.
        done_bytes: so far.
        total_bytes: in all, as far as is known yet.
    """

    stage: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[LoadProgress], None]
