"""States of a request, reasons for its end, and its times."""

from __future__ import annotations

import enum

import attrs


class FinishReason(enum.StrEnum):
    """Reason for the end of an answer; the values go on the wire."""

    STOP = "stop"
    """An end-of-sequence token, a stop token id or a stop text."""
    LENGTH = "length"
    """`max_tokens`, or the context is full."""
    ABORT = "abort"
    """The stream was closed, or the request was aborted."""
    ERROR = "error"
    """It failed; the stream raises `RequestFailed`."""
    DEADLINE = "deadline"
    """The deadline passed; the tokens so far were delivered."""
    SHUTDOWN = "shutdown"
    """The engine closed."""
    REPETITION = "repetition"
    """The answer repeated a pattern, and `repetition_detection` was set."""


class RequestStatus(enum.StrEnum):
    """State of a request as its caller sees it."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @classmethod
    def of_ending(cls, reason: FinishReason) -> RequestStatus:
        """Return the status of a request that ended for a reason."""
        match reason:
            case FinishReason.STOP | FinishReason.LENGTH | FinishReason.REPETITION:
                return cls.COMPLETED
            case FinishReason.ERROR:
                return cls.FAILED
            case FinishReason.ABORT | FinishReason.DEADLINE | FinishReason.SHUTDOWN:
                return cls.CANCELLED


@attrs.frozen(kw_only=True)
class RequestMetrics:
    """Counts and times of a request; `arrival_time` is wall clock, the `_ts` are monotonic, all in seconds.

    Args:
        num_generation_tokens: tokens generated so far.
        num_preemptions: times that the request was preempted.
        arrival_time: when the request arrived, seconds since the epoch.
        queued_ts: when the scheduler received it.
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
