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
        is_loading: whether the runner loads the requested weights, or has loaded them.
        refusal: error of the last weights that were refused.
    """

    version: int = 0
    folder: str | None = None
    requested: str | None = None
    refusal: BaseException | None = None
    is_loading: bool = False
    _num_deaths: int = 0

    def request(self, folder: str) -> None:
        """Ask for other weights."""
        self.requested, self.refusal, self.is_loading, self._num_deaths = folder, None, False, 0

    def withdraw(self) -> None:
        """Ask for no other weights."""
        self.requested, self.is_loading = None, False

    def begin_load(self, *, may_exchange: bool) -> str | None:
        """Return the folder that a runner that starts now loads, while weights are requested.

        Args:
            may_exchange: whether the requested weights may be loaded: no request is to be finished with the old ones.
        """
        self.is_loading = self.requested is not None and may_exchange
        return self.requested if self.is_loading else self.folder

    def accept(self) -> None:
        """Note that the runner has loaded the requested weights."""
        self.is_loading = False
        self.folder, self.requested, self.version = self.requested, None, self.version + 1

    def refuse(self, error: BaseException, *, is_death: bool) -> bool:
        """Note that the requested weights could not be loaded.

        Args:
            error: of the load.
            is_death: whether the runner died of something that may be no fault of the weights.
        Returns:
            False if they should be tried once more, or if the runner loaded others.
        """
        self._num_deaths += is_death
        if not self.is_loading or (is_death and self._num_deaths < MAX_FAILED_STARTS):
            return False
        self.requested, self.is_loading, self.refusal = None, False, error
        return True
