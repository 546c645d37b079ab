"""What the actors have done lately: the facts that health checks and the watchdog go by, and the events of a step."""

from __future__ import annotations

from collections import Counter

import attrs
import trio


@attrs.define(eq=False)
class ActorProgress:
    """Progress of the actors of one engine. Times are `trio.current_time()`.

    Args:
        is_runner_ready: the model is loaded, and the runner computes plans.
        progressed_s: when the last step finished, or when work began after there had been none.
        asked_s: since when each question to the tokenizer waits, oldest first.
        num_crashes: how often the tokenizer has died of each of those questions.
        num_tokenizing: threads that work on one.
        num_read: messages that each actor has read.
        stepped: where tasks wait for the next step, or for the end of a request.
        idle: where tasks wait until no request is live.
    """

    is_runner_ready: bool = False
    progressed_s: float = 0.0
    asked_s: dict[object, float] = attrs.field(factory=dict)
    num_crashes: Counter[object] = attrs.field(factory=Counter)
    num_tokenizing: int = 0
    num_read: Counter[str] = attrs.field(factory=Counter)
    stepped: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    idle: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    def count_crash(self, question: object) -> None:
        """Note that the tokenizer has died of a question, if that still waits for its answer."""
        if question in self.asked_s:
            self.num_crashes[question] += 1
