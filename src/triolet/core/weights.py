"""Weights of one engine: those that it computes with, and those that the runner should load instead.

New weights are requested, and either accepted, once the runner has loaded them, or refused: then the runner loads the
old ones again. A version counts the exchanges; tokens, and the roots of the prefix cache, bear it.
"""

from __future__ import annotations

import attrs

MAX_FAILED_STARTS = 2
"""Runners that may die while they load new weights, before these are refused."""


@attrs.define(eq=False)
class WeightsState:
    """Weights in use and weights requested.

    Args:
        version: number of the weights in use; 0 for those that the engine was opened with.
        folder: of the weights in use; None for the configuration's model.
        requested: folder of the weights that the runner should load.
        loading: folder of the new weights that the runner loads now; others may be requested meanwhile.
        refusal: error of the last weights that were refused.
    """

    version: int = 0
    folder: str | None = None
    requested: str | None = None
    refusal: BaseException | None = None
    loading: str | None = None
    _num_deaths: int = 0

    def request(self, folder: str) -> None:
        """Ask for other weights."""
        self.requested, self.refusal, self._num_deaths = folder, None, 0

    def withdraw(self, former: str | None) -> None:
        """Ask again for what was asked for before the last `request`, unless that is in use by now."""
        self.requested = None if former == self.folder else former

    def accept(self) -> None:
        """Note that the runner has loaded new weights."""
        if self.requested == self.loading:
            self.requested = None
        self.folder, self.loading, self.version = self.loading, None, self.version + 1

    def refuse(self, error: BaseException, *, is_death: bool) -> bool:
        """Note that weights could not be loaded.

        Args:
            error: of the load.
            is_death: whether the runner died of something that may be no fault of the weights.
        Returns:
            False if they should be tried once more, or if they are those in use.
        """
        loading, self.loading = self.loading, None
        if loading is None:
            return False
        if loading != self.requested:  # others were requested meanwhile, or none
            return True
        self._num_deaths += is_death
        if is_death and self._num_deaths < MAX_FAILED_STARTS:
            return False
        self.requested, self.refusal = None, error
        return True
