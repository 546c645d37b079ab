"""A call of `generate` on its way to the journal, and the checks that need neither a model nor an engine."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

import attrs
import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.adapters import AdapterRegistry
from triolet.actors.channels import Channels, WaitCell
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.prompt_adapters import PromptAdapterRegistry
from triolet.actors.tokenizer import ask_tokenizer
from triolet.core.engine_core import OpenOutput
from triolet.core.journal import JournalEntry
from triolet.core.metrics.iteration_stats import StatsAccumulator
from triolet.core.output.output_processor import (
    OutputCollector,
    ParallelCollector,
    RequestProgress,
    collector_of,
)
from triolet.core.request.lora import LoRARequest
from triolet.core.request.param_validation import check_type
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt import ParsedPrompt
from triolet.core.request.prompt_adapter import PromptAdapterRequest, SoftPrompt
from triolet.core.request.request import STATUS_OF_ENDING, FinishReason, Request, RequestStatus, TraceHeaders
from triolet.core.request.request_builder import Need, RequestBuilder
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.errors import InvalidRequest, Overloaded, SnapshotError, WrongTrioRun, shown
from triolet.ipc.snapshot import SavedRequest


@attrs.define(eq=False, kw_only=True)
class Submission:
    """A call of `generate`, before and after its admission."""

    prompt: ParsedPrompt
    params: SamplingParams | None
    request_id: str
    priority: int
    client: str | None
    deadline_s: float
    queue_timeout_s: float
    cache_salt: str | None
    lora: LoRARequest | None = None
    prompt_adapter: PromptAdapterRequest | None = None
    pooling: PoolingParams | None = None  # parameters of a pooled request
    most_tokens: int | None = None  # length to which the prompt of a pooled request is cut, tokens
    keeps_end: bool = False  # True to cut it at its beginning
    trace_headers: TraceHeaders = ()  # headers of the request's trace
    # Name that `Engine.requests` filters by, and that admission and fairness count by before `client`.
    owner: str | None = None
    outputs: tuple[OpenOutput, ...] = ()  # outputs of the answers, by index, once they are in the journal
    # Collector that the reader takes outputs from, once there are any.
    answers: ParallelCollector | OutputCollector | None = None
    reader: WaitCell = attrs.field(factory=WaitCell)  # cell in which the reader waits
    was_aborted: bool = False  # whether it was aborted, perhaps before its admission
    progress: RequestProgress | None = None  # progress that was last returned to a caller
    # Cancel scope of the preparation; cancelled when the engine takes no new requests any more.
    admission: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    saved: SavedRequest | None = None  # state from another engine that had begun the answer
    began_s: float = 0.0  # time at which the admission began, monotonic seconds

    @property
    def account(self) -> str | None:
        """Name under which admission counts the request; see `Request.account`."""
        return self.client if self.owner is None else self.owner

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

    def forget_error(self) -> None:
        """Drop the error once the reader has it: its traceback refers to the stream, which refers to the error."""
        for output in self.outputs:
            output.error = None

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
        endings = {STATUS_OF_ENDING[entry.finish_reason] for entry in entries if entry.finish_reason}
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


def check_truncation(most_tokens: object, side: object) -> None:
    """Check how a long prompt of a pooled request is to be cut.

    Args:
        most_tokens: `truncate_prompt_tokens` of the caller.
        side: `truncation_side` of the caller.
    Raises:
        InvalidRequest: naming the field, the rule and what came.
    """
    if most_tokens is not None:
        field = "truncate_prompt_tokens"
        check_type(field, most_tokens, int, "an integer")
        if most_tokens != -1 and most_tokens < 1:  # type: ignore[operator]
            raise InvalidRequest(
                f"{field} must be -1 or at least 1; got {most_tokens}", field=field, got=most_tokens
            )
    if side not in (None, "left", "right"):
        field = "truncation_side"
        raise InvalidRequest(f"{field} must be left or right; got {shown(side)}", field=field, got=side)


def duration(field: str, value: object) -> float:
    """Return a length of time in seconds; infinity for None.

    Raises:
        InvalidRequest: the value is no number, NaN or below 0.
    """
    duration_s = seconds(field, value)
    if duration_s < 0:
        raise InvalidRequest(
            f"{field} must be at least 0 seconds, got {shown(value)}", field=field, got=value
        )
    return duration_s


def engine_deadline(value: object, opened_s: float) -> float:
    """Return a deadline on the engine's clock; infinity for None.

    Args:
        value: of the caller.
        opened_s: time at which the engine was opened.
    Raises:
        InvalidRequest: the value is no number, or lies before that time.
    """
    deadline_s = seconds("deadline", value)
    if -math.inf < deadline_s < opened_s:  # most likely meant as seconds from now
        raise InvalidRequest(
            f"deadline must be absolute, such as trio.current_time() + {shown(value)}; got a time before the "
            f"engine was opened: {shown(value)}",
            field="deadline",
            got=value,
        )
    return deadline_s


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


T = TypeVar("T")


class RequestPreparation:
    """Turns submissions into requests.

    Args:
        channels: to the tokenizer.
        grammars: compiles grammars.
        adapters: loads LoRA adapters.
        prompt_adapters: loads soft prompts.
    """

    def __init__(
        self,
        builder: RequestBuilder,
        channels: Channels,
        progress: ActorProgress,
        grammars: GrammarRequests,
        adapters: AdapterRegistry,
        prompt_adapters: PromptAdapterRegistry,
    ) -> None:
        self._builder, self._channels, self._progress, self._grammars = builder, channels, progress, grammars
        self._adapters, self._prompt_adapters = adapters, prompt_adapters

    def check(self, submission: Submission) -> SamplingParams:
        """Check the parameters; return them, or the model's own for None. See `RequestBuilder.check`."""
        if submission.pooling is None:
            return self._builder.check(submission.params)
        params, submission.pooling = self._builder.check_pooling(submission.pooling)
        return params

    async def resolve(self, submission: Submission, params: SamplingParams) -> tuple[Request, ...]:
        """Encode and check a submission; return the requests for each of its answers. A checkpoint.

        Raises:
            InvalidRequest: the model cannot serve the request.
        """
        arrival_s = trio.current_time()
        # Not the deadline of the caller's scope: that one may be moved, or left before the answer is read, and it
        # cancels the reader by itself.
        deadline_s = submission.deadline_s
        queue_deadline_s = arrival_s + submission.queue_timeout_s
        await trio.lowlevel.checkpoint()
        adapter = None
        if submission.lora is not None:
            digest = None if submission.saved is None else submission.saved.adapter
            adapter = await self._adapters.resolve(submission.lora, digest=digest)
            if submission.saved is not None and submission.saved.adapter != adapter.digest:
                raise SnapshotError(
                    f"request {shown(submission.request_id)} was answered by other contents of adapter "
                    f"{shown(adapter.name)} than its folder {adapter.path} has now"
                )
        soft_prompt = None
        if submission.prompt_adapter is not None:
            soft_prompt = await self._soft_prompt(submission, submission.prompt_adapter, params)
        if submission.pooling is None:
            tokenized = await self._run(self._builder.tokenize(submission.prompt, params))
        else:
            tokenized = await self._run(
                self._builder.tokenize_pooled(
                    submission.prompt, submission.pooling, submission.most_tokens, submission.keeps_end
                )
            )
        constraint = None
        with trio.move_on_at(min(deadline_s, queue_deadline_s)) as in_time:
            constraint = await self._run(self._builder.constrain(params, tokenized), submission.owner)
        if in_time.cancelled_caught:
            # The time is up before the grammar is compiled. The request must not start without it, so it gets a
            # deadline that has passed, which ends all of its answers. The queue deadline would not count for an answer
            # that waits for no other.
            deadline_s = in_time.deadline
        return self._builder.build(
            submission.request_id,
            params,
            tokenized,
            constraint,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            queue_deadline_s=queue_deadline_s,
            priority=submission.priority,
            client=submission.client,
            owner=submission.owner,
            cache_salt=submission.cache_salt,
            trace_headers=submission.trace_headers,
            pooling=submission.pooling,
            adapter=adapter,
            soft_prompt=soft_prompt,
        )

    async def _soft_prompt(
        self, submission: Submission, wanted: PromptAdapterRequest, params: SamplingParams
    ) -> SoftPrompt:
        if submission.lora is not None:
            raise InvalidRequest("lora must be None with a prompt adapter", field="lora", got=submission.lora)
        if params.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs must be None with a prompt adapter: virtual tokens have none",
                field="prompt_logprobs",
                got=params.prompt_logprobs,
            )
        digest = None if submission.saved is None else submission.saved.adapter
        soft_prompt = await self._prompt_adapters.resolve(wanted, digest=digest)
        if submission.saved is not None and submission.saved.adapter != soft_prompt.digest:
            raise SnapshotError(
                f"request {shown(submission.request_id)} was answered by other contents of prompt adapter "
                f"{shown(soft_prompt.name)} than its folder {soft_prompt.path} has now"
            )
        return soft_prompt

    async def _run(self, steps: Generator[Need, Tokenized | None, T], owner: str | None = None) -> T:
        answer: Tokenized | None = None
        try:
            while True:
                answer = await self._answer(steps.send(answer), owner)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _answer(self, need: Need, owner: str | None) -> Tokenized | None:
        if isinstance(need, Tokenize):
            return await ask_tokenizer(self._channels, self._progress, need)
        await self._grammars.open_grammar(need, owner)
        return None


# Guard against use from another Trio run or from another thread: the tasks of one event loop change an
# engine's state without locks. A call from elsewhere would corrupt it, so every public method checks first;
# the check is one comparison.
class TrioRunGuard:
    """Guard that knows the Trio run in which it was made."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def check(self) -> None:
        """Check that the caller runs in this guard's Trio run.

        Raises:
            WrongTrioRun: it runs in another one, or in none.
        """
        try:
            token = trio.lowlevel.current_trio_token()
        except RuntimeError:  # no Trio in this thread
            raise WrongTrioRun from None
        if token is not self._token:
            raise WrongTrioRun
