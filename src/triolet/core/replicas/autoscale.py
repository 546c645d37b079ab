"""Number of replicas that an engine should have, from how many requests wait.

One more replica is asked for when requests have waited for a row without a break for `GROW_S`, and all replicas that
were asked for compute: a longer queue asks no sooner, since the next replica shows first what the last one changed. One
fewer is needed when all live requests have fitted into `FILL` of the rows of the others for `SHRINK_S`. To load a model
takes up to minutes, so shrinking is slow, and what was asked for but has not come is called off as slowly.
"""

from __future__ import annotations

from typing import Final

import attrs

GROW_S: Final = 2.0  # a prefill of a few thousand tokens makes others wait for as long on a CPU
SHRINK_S: Final = 60.0  # about the load of a model, which a new burst would wait for
FILL: Final = 0.5  # of the rows of the others; at 1 a replica that has just gone would be asked for again


@attrs.frozen
class ReplicaLoad:
    """Requests and replicas of an engine at one moment."""

    num_live: int  # requests, running or waiting
    num_waiting: int  # requests without a row
    num_living: int  # replicas that compute, also those that finish what they have


@attrs.define(eq=False)
class AutoscalePolicy:
    """Decide how many replicas an engine should have.

    Args:
        min_replicas: the least of them; at the beginning there are as many.
        max_replicas: the most of them.
        num_rows: requests that one replica computes together.
        grow_s: see `GROW_S`.
        shrink_s: see `SHRINK_S`.
    """

    min_replicas: int
    max_replicas: int
    num_rows: int
    grow_s: float = GROW_S
    shrink_s: float = SHRINK_S
    target: int = attrs.field(init=False)
    _waiting_since_s: float | None = attrs.field(default=None, init=False)
    _spare_since_s: float | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.target = self.min_replicas

    def decide(self, load: ReplicaLoad, now_s: float) -> int:
        """Return how many replicas there should be now.

        Args:
            load: at this moment.
            now_s: monotonic seconds.
        """
        is_short = load.num_waiting > 0 and load.num_living >= self.target < self.max_replicas
        is_spare = (
            self.target > self.min_replicas and load.num_live <= FILL * (self.target - 1) * self.num_rows
        )
        self._waiting_since_s = _since(self._waiting_since_s, now_s, holds=is_short)
        self._spare_since_s = _since(self._spare_since_s, now_s, holds=is_spare)
        if self._waiting_since_s is not None and now_s - self._waiting_since_s >= self.grow_s:
            self._change(1)
        elif self._spare_since_s is not None and now_s - self._spare_since_s >= self.shrink_s:
            self._change(-1)
        return self.target

    def _change(self, number: int) -> None:
        self.target += number
        self._waiting_since_s = self._spare_since_s = None


def _since(began_s: float | None, now_s: float, *, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if began_s is None else began_s
