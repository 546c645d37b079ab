"""What an operator does to a simulated engine between its requests: sleep and wake, pause and resume, new weights."""

from __future__ import annotations

import random
from typing import Literal

import attrs

from tests.actors.harness import weights_of

OPERATION_POINTS = ("weights.check", "weights.load")
LONG_S = 0.4

Kind = Literal["sleep", "pause", "reload"]


@attrs.frozen(kw_only=True)
class Operation:
    """One thing that is done to the engine, and what ends it.

    Args:
        number: names it; also of the weights that it brings, which no other operation brings.
        at_s: when it begins.
        kind: of its call.
        mode: what happens to live requests.
        level: of sleep.
        clear_cache: of a pause.
        lasts_s: time from the end of the first call to the one that takes it back, seconds.
        parts: tags that are woken one after the other, before everything is.
        cancel_after_s: its first call has a time limit.
        is_broken: its weights pass the check, and can never be loaded.
    """

    number: int
    at_s: float
    kind: Kind
    mode: str
    level: int = 1
    clear_cache: bool = True
    lasts_s: float = 0.0
    parts: tuple[tuple[str, ...], ...] = ()
    cancel_after_s: float | None = None
    is_broken: bool = False

    @property
    def folder(self) -> str:
        """Of its weights."""
        return f"/weights-{self.number}"


def draw_operations(rng: random.Random, moments: list[float]) -> tuple[Operation, ...]:
    """Draw a few, many of them at about the moments that are given.

    Args:
        moments: times of the clients' arrivals, seconds.
    """
    return tuple(_draw_operation(rng, number, moments) for number in range(1, rng.randint(2, 6)))


def _draw_operation(rng: random.Random, number: int, moments: list[float]) -> Operation:
    kind: Kind = rng.choice(("sleep", "pause", "reload"))
    at_s = rng.choice(moments) + rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 0.5)))
    return Operation(
        number=number,
        at_s=at_s,
        kind=kind,
        mode=rng.choices(("keep", "wait", "abort"), (5, 3, 2))[0],
        level=rng.choice((0, 1, 1, 2)),
        clear_cache=rng.random() < 0.5,
        lasts_s=rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, LONG_S))),
        parts=rng.choice(((), (), (("weights",),), (("kv_cache",), ("weights",)), (("scheduling",),))),
        cancel_after_s=rng.uniform(0, 0.1) if rng.random() < 0.2 else None,
        is_broken=rng.random() < 0.15,
    )


@attrs.define(eq=False)
class Weights:
    """What the runner really holds, and what has been said of it.

    Args:
        loaded: number of the weights of the model that the runner holds; None while it holds none.
        begun: numbers whose load has begun.
        of_version: numbers, by the version that the engine gave them.
        withdrawn: numbers that must not be loaded: the call was cancelled before its load began.
        promised: number that the last exchange has promised; None if another one has begun since.
        num_exits: ends of a life of the runner by an error.
        has_crashed: the runner has ended by an error, and holds no model again yet.
        not_for: requests that were to finish before, by the number of the weights.
        is_pending: an exchange was asked for while the engine slept, or goes on after its call was cancelled.
    """

    loaded: int | None = None
    begun: set[int] = attrs.field(factory=set)
    of_version: dict[int, int] = attrs.field(factory=dict)
    withdrawn: set[int] = attrs.field(factory=set)
    promised: int | None = None
    num_exits: int = 0
    has_crashed: bool = False
    is_pending: bool = False
    not_for: dict[int, set[int]] = attrs.field(factory=dict)

    def begin(self, folder: str | None) -> None:
        """Note that the runner loads a folder."""
        self.begun.add(weights_of(folder))

    def name(self, version: int) -> list[str]:
        """Note the version that the loaded weights have got; returns the rules that this breaks."""
        number = self.loaded
        assert number is not None
        broken = []
        if self.of_version.setdefault(version, number) != number:
            broken.append(
                f"weights {number} are called version {version}, as {self.of_version[version]} were"
            )
        if number in self.withdrawn:
            broken.append(f"weights {number} were loaded after their exchange was taken back")
        return broken


@attrs.define(eq=False)
class Operations:
    """What all operations of one run know of each other.

    Args:
        still: by what nothing may be computed now: `sleep`, `pause`.
        num_begun: operations that have begun.
        num_live: operations of each kind that have begun and not ended.
        num_calls: calls that put to sleep, wake, pause or resume.
        num_aborting: calls under way that end live requests.
    """

    still: set[str] = attrs.field(factory=set)
    num_begun: int = 0
    num_live: dict[str, int] = attrs.field(factory=lambda: {"sleep": 0, "pause": 0, "reload": 0})
    num_calls: dict[str, int] = attrs.field(factory=lambda: {"sleep": 0, "wake": 0, "pause": 0, "resume": 0})
    num_aborting: int = 0
