"""A call of `generate` on its way to the journal, and the checks that need neither a model nor an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio

from triolet.actors.wait_cell import WaitCell
from triolet.core.engine_core import OpenOutput
from triolet.core.journal import JournalEntry
from triolet.core.metrics.iteration_stats import StatsAccumulator
from triolet.core.output.output_collector import OutputCollector
from triolet.core.output.parallel_sampling import ParallelCollector, collector_of
from triolet.core.output.request_status import RequestProgress
from triolet.core.request.params import SamplingParams
from triolet.core.request.prompt import ParsedPrompt
from triolet.core.request.status import FinishReason, RequestStatus
from triolet.core.request.trace_context import TraceHeaders
from triolet.errors import InvalidRequest, Overloaded, shown
from triolet.ipc.snapshot import SavedRequest


@attrs.define(eq=False, kw_only=True)
class Submission:
    """A call of `generate`, before and after its admission.

    Args:
        trace_headers: headers of the request's trace.
        owner: name that `Engine.requests` filters by.
        outputs: outputs of the answers, by index, once they are in the journal.
        answers: collector that the reader takes outputs from, once there are any.
        reader: cell in which the reader waits.
        was_aborted: whether it was aborted, perhaps before its admission.
        progress: progress that was last returned to a caller.
        admission: cancel scope of the preparation; cancelled when the engine takes no new requests any more.
        saved: state from another engine that had begun the answer.
        began_s: time at which the admission began, monotonic seconds.
    """

    prompt: ParsedPrompt
    params: SamplingParams | None
    request_id: str
    priority: int
    client: str | None
    deadline_s: float
    queue_timeout_s: float
    cache_salt: str | None
    trace_headers: TraceHeaders = ()
    owner: str | None = None
    outputs: tuple[OpenOutput, ...] = ()
    answers: ParallelCollector | OutputCollector | None = None
    reader: WaitCell = attrs.field(factory=WaitCell)
    was_aborted: bool = False
    progress: RequestProgress | None = None
    admission: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    saved: SavedRequest | None = None
    began_s: float = 0.0

    @property
    def is_live(self) -> bool:
        """True if the request waits for its admission, or has not ended since."""
        return not self.outputs or any(entry.finish_reason is None for entry in self.entries)

    @property
    def entries(self) -> list[JournalEntry]:
        """Journal entries of the answers, once there are any."""
        return [output.entry for output in self.outputs]

    @property
    def error(self) -> BaseException | None:
        """Error that the reader gets instead of a next output."""
        for output in self.outputs:
            if output.error is not None:
                return output.error
        return None

    @property
    def has_failed(self) -> bool:
        """True if the reader gets an error in the end."""
        was_refused = any(entry.finish_reason is FinishReason.ERROR for entry in self.entries)
        return was_refused or self.error is not None

    def num_places(self, num_answers: int) -> int:
        """Return the number of places that the answers take; those that another engine has finished take none."""
        return num_answers if self.saved is None else self.saved.num_unfinished

    def open(self, outputs: tuple[OpenOutput, ...]) -> None:
        """Set the outputs, once the request is in the journal."""
        self.outputs = outputs
        self.answers = collector_of([output.processor.collector for output in outputs])

    def status(self) -> RequestStatus:
        """Return the status of the answer that is furthest; the request has ended when all answers have."""
        entries = self.entries
        if not any(entry.scheduled_s is not None or entry.finish_reason for entry in entries):
            return RequestStatus.WAITING
        if self.is_live:
            return RequestStatus.RUNNING
        endings = {RequestStatus.of_ending(entry.finish_reason) for entry in entries if entry.finish_reason}
        worst_first = (RequestStatus.FAILED, RequestStatus.CANCELLED, RequestStatus.COMPLETED)
        return next(status for status in worst_first if status in endings)


@contextmanager
def counted_admission(stats: StatsAccumulator) -> Iterator[None]:
    """Scope of an admission, which counts a rejection, or a caller that leaves before the end."""
    try:
        yield
    except trio.Cancelled:
        stats.withdrawn()
        raise
    except BaseException as error:
        stats.rejected(error.limit if isinstance(error, Overloaded) else None)
        raise


def check_type(field: str, value: object, kind: type, rule: str) -> None:
    """Refuse an argument of another type.

    Raises:
        InvalidRequest: naming the field, the rule and what came.
    """
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(f"{field} must be {rule}, got {type(value).__name__}", field=field, got=value)


def seconds(field: str, value: object) -> float:
    """Return a time in seconds; infinity for None.

    Raises:
        InvalidRequest: the value is no number, or NaN.
    """
    if value is None:
        return math.inf
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(
            f"{field} must be a number of seconds, got {shown(value)}", field=field, got=value
        )
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        return math.inf if value > 0 else -math.inf
    if math.isnan(number):  # every comparison with it is False: no deadline would ever pass
        raise InvalidRequest(
            f"{field} must be a number of seconds, got {shown(value)}", field=field, got=value
        )
    return number
