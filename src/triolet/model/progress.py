"""Who is told how far the loading of a model has come."""

from __future__ import annotations

from collections.abc import Callable

from triolet.core.progress import LoadProgress

OnProgress = Callable[[LoadProgress], None]
