"""States of a request: where it is, why it ended, and its times."""

from __future__ import annotations

import enum

import attrs


class FinishReason(enum.StrEnum):
    """Why an answer ended; the values are what goes on the wire."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop text."""
    LENGTH = "length"
    """`max_tokens`, or the context is full."""
    ABORT = "abort"
    """The reader left, or somebody aborted it."""
    ERROR = "error"
    """It failed; the stream raises `RequestFailed`."""
    DEADLINE = "deadline"
    """Its time was up; what there was so far was delivered."""
    SHUTDOWN = "shutdown"
    """The engine closed."""
    REPETITION = "repetition"
    """It went round in circles, and `repetition_detection` was asked for."""


class RequestStatus(enum.StrEnum):
    """Where a request is, as far as its caller cares."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @classmethod
    def of_ending(cls, reason: FinishReason) -> RequestStatus:
        """The status that an ending leaves behind."""
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH | FinishReason.REPETITION:
                return cls.COMPLETED
            case FinishReason.ERROR:
                return cls.FAILED
            case FinishReason.ABORT | FinishReason.DEADLINE | FinishReason.SHUTDOWN:
                return cls.CANCELLED


@attrs.frozen(kw_only=True)
class RequestMetrics:
    """Where a request's time went. `arrival_time` is wall clock, the `_ts` are monotonic; all in seconds.

    Args:
        num_generation_tokens: tokens generated so far.
        num_preemptions: times its blocks were taken back.
        arrival_time: when it came, seconds since the epoch.
        queued_ts: when the scheduler had it.
        scheduled_ts: when its first step was planned; 0.0 before.
        first_token_ts: when its first token was known; 0.0 before.
        last_token_ts: when its latest token was known; 0.0 before.
    """

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the queue to the first token; 0.0 before it."""
        return self.first_token_ts - self.queued_ts if self.first_token_ts else 0.0

    @property
    def queued_time(self) -> float:
        """Seconds from the queue to the first step; 0.0 before it."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else 0.0

    @property
    def prefill_time(self) -> float:
        """Seconds from the first step to the first token; 0.0 before it."""
        return self.first_token_ts - self.scheduled_ts if self.first_token_ts else 0.0

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the latest; 0.0 before the first."""
        return self.last_token_ts - self.first_token_ts if self.first_token_ts else 0.0

    @property
    def inference_time(self) -> float:
        """Seconds from the first step to the latest token, time spent preempted included; 0.0 before the first."""
        return self.last_token_ts - self.scheduled_ts if self.first_token_ts else 0.0
