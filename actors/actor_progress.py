"""Recent progress of the actors, for health checks and the watchdog, and the events of a step."""

from __future__ import annotations

from collections import Counter

import attrs
import trio

from triolet.core.profile import StepRecorder


@attrs.define(eq=False)
class ActorProgress:
    """Progress of the actors of one engine. Times are `trio.current_time()`.

    Args:
        is_runner_ready: the model is loaded, and the runner computes plans.
        progressed_s: when the last step finished, or when work began after there had been none.
        asked_s: time since which each question to the tokenizer waits, oldest first.
        num_crashes: times that the tokenizer has died of each of those questions.
        num_tokenizing: threads that work on a question.
        num_read: messages that each actor has read.
        stepped: parks tasks until the next step, or the end of a request.
        idle: parks tasks until no request is live.
        runner_held: parks the model runner until a hold, or its own state, has changed.
        profile: records the steps of a profile that is being made.
        restarted: parks tasks until an actor has ended or serves again, or the engine has ended.
        replicas: progress of the actors of each replica; empty if the engine has only one.
    """

    is_runner_ready: bool = False
    progressed_s: float = 0.0
    asked_s: dict[object, float] = attrs.field(factory=dict)
    num_crashes: Counter[object] = attrs.field(factory=Counter)
    num_tokenizing: int = 0
    num_read: Counter[str] = attrs.field(factory=Counter)
    stepped: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    idle: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    runner_held: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    profile: StepRecorder | None = None
    restarted: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    replicas: tuple[ActorProgress, ...] = ()

    def of_replica(self) -> ActorProgress:
        """Return the progress of a replica, whose steps are steps of the engine."""
        return ActorProgress(stepped=self.stepped, idle=self.idle, restarted=self.restarted)

    def count_crash(self, question: object) -> None:
        """Note that the tokenizer has died of a question, if that still waits for its answer."""
        if question in self.asked_s:
            self.num_crashes[question] += 1
