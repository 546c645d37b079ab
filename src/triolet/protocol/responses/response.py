"""One response as a state machine: engine outputs in, server events out, and exactly one terminal event.

    state      what comes                          events                                            next
    fresh      begin                               response.created, response.in_progress            running
    running    output, not the last                items opened, deltas                              running
    running    last output: stop                   open item done, response.completed                over
    running    last output: length                 open item done, response.incomplete               over
               (reason max_output_tokens)
    running    last output: abort, deadline        open item done, response.incomplete               over
               (status cancelled)
    running    last output: error, shutdown        response.failed                                   over
    running    last output: shutdown, of one       none                                              left over
               that outlives the server
    running    cancel                              open item done, response.incomplete               over
               (status cancelled, or, of a steer, reason steered)
    running    fail                                response.failed                                   over
    fresh      cancel, fail                        those of begin, then as above                     over
    over       anything                            none

A left-over response continues in the next server, where its history is replayed: its events are the same.

WebSocket and HTTP share this; the transport adds its own fields, such as `stream_id`. A finished response has two keys
that OpenAI's does not have: `finish_reason`, the engine's value, and `metrics`.
"""

from __future__ import annotations

import enum
from typing import Any

import attrs

from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.tools import ToolPlan, plan_tools
from triolet.protocol.errors import WireError
from triolet.protocol.responses.output_items import Event
from triolet.protocol.responses.requests import CreateResponse, RequestEcho
from triolet.protocol.responses.response_items import (
    Message,
    NewId,
    ResponseDelta,
    ResponseHistory,
    ResponseItems,
)
from triolet.protocol.responses.store import (
    BYTES_PER_LOGPROB,
    BYTES_PER_VALUE,
    StoredResponse,
    size_of,
    size_of_chat,
    size_of_event,
)


class EventsGone(WireError):
    """Events that a reader asks for were dropped from the log of a resumable response."""

    def __init__(self) -> None:
        super().__init__(
            "The events after this sequence number are no longer kept: the response exceeded the server's memory for "
            "resumable responses.",
            code="response_not_found",
            status=404,
            param="response_id",
        )


class _State(enum.Enum):
    FRESH = enum.auto()
    RUNNING = enum.auto()
    OVER = enum.auto()


@attrs.define(eq=False, kw_only=True)
class ResponseBuilder:
    """Builder of one response and its events; see the table in the module.

    Args:
        response_id: such as `resp_...`.
        request: what was asked for.
        params: with what it is sampled.
        model: name of the model, or of the adapter.
        created_at: seconds since the epoch.
        new_id: names items.
        plan: how it is read.
        echo: what its events repeat of the request.
        adapter: name of the adapter that computes it; None for the model alone.
        chat: what it answers, less its instructions: with its own messages, what later turns continue.
        survives_restart: the next server goes on with it, if this one cannot finish it.
    """

    response_id: str
    request: CreateResponse
    params: SamplingParams
    model: str
    created_at: int
    new_id: NewId
    plan: ToolPlan = attrs.field(factory=plan_tools)
    echo: RequestEcho = attrs.field()
    adapter: str | None = None
    chat: tuple[Message, ...] = ()
    survives_restart: bool = False
    is_handed_over: bool = attrs.field(default=False, init=False)
    _state: _State = attrs.field(default=_State.FRESH, init=False)
    _num_events: int = attrs.field(default=0, init=False)
    _items: ResponseItems = attrs.field(init=False)
    _pieces: list[ResponseDelta] = attrs.field(factory=list, init=False)
    _finish_reason: FinishReason | None = attrs.field(default=None, init=False)
    _last_output: RequestOutput | None = attrs.field(default=None, init=False)
    _num_output_tokens: int = attrs.field(default=0, init=False)
    _ending: dict[str, Any] = attrs.field(factory=dict, init=False)
    # Events of a resumable response from this number on; those before it were dropped.
    _log: list[Event] = attrs.field(factory=list, init=False)
    _log_start: int = attrs.field(default=0, init=False)
    _keeps_history: bool = attrs.field(default=True, init=False)
    # Memory of a resumable response: its request, log and history, estimated; it only grows.
    num_bytes: int = attrs.field(default=0, init=False)
    # Output that a resumable response took last, if it has added text and tokens alone; a reader may take it away.
    plain_output: CompletionOutput | None = attrs.field(default=None, init=False)

    @echo.default
    def _make_echo(self) -> RequestEcho:
        return RequestEcho.of(self.request)

    def __attrs_post_init__(self) -> None:
        self._items = ResponseItems(self.new_id, self.plan)

    @property
    def is_over(self) -> bool:
        """True once its terminal event was made."""
        return self._state is _State.OVER

    @property
    def can_be_continued(self) -> bool:
        """True if it is over and later turns can continue it."""
        return self._ending.get("status") in ("completed", "incomplete", "cancelled")

    # -------------------------------------------------------------------------------------- what comes

    def begin(self) -> list[Event]:
        """Return the first events: the request was admitted."""
        if self._state is not _State.FRESH:
            return []
        self._state = _State.RUNNING
        if self.request.resumable:
            self.num_bytes += size_of(self.response()) + self.echo.num_bytes + size_of_chat(self.chat)
        return [
            self.numbered({"type": "response.created", "response": self.response()}),
            self.numbered({"type": "response.in_progress", "response": self.response()}),
        ]

    def add(self, output: RequestOutput, now: int) -> list[Event]:
        """Add an engine output; return its events.

        Args:
            output: of kind DELTA.
            now: seconds since the epoch.
        """
        if self.is_over:
            return []
        completion = output.outputs[0]
        if self.survives_restart and completion.finish_reason is FinishReason.SHUTDOWN:
            # No event: the next server emits the rest, and the client has seen no end.
            self.is_handed_over = True
            return []
        piece = ResponseDelta.of(completion, self.request.num_top)
        return self._take(piece, output, completion.finish_reason, now)

    def replay(self, history: ResponseHistory) -> None:
        """Replay the history of a saved response, without emitting its events again.

        `new_id` must give its items the same ids.
        """
        self.begin()
        for number, piece in enumerate(history.pieces, start=1):
            assert history.output is not None, "a piece is a piece of an output"
            reason = history.finish_reason if number == len(history.pieces) else None
            self._take(piece, history.output, reason, history.completed_at)
        self.plain_output = None

    def history(self) -> ResponseHistory | None:
        """Return the history for `replay`; None if the response has not begun or was not ended by the engine."""
        was_finished = self._finish_reason is not None and self.can_be_continued
        if self._state is _State.FRESH or (self.is_over and not was_finished) or not self._keeps_history:
            return None
        return ResponseHistory(
            pieces=tuple(self._pieces),
            item_ids=self._items.ids,
            output=self._last_output,
            finish_reason=self._finish_reason,
            completed_at=self._ending.get("completed_at", 0),
        )

    @property
    def item_ids(self) -> tuple[str, ...]:
        """Ids of the items so far, in the order in which they were made."""
        return self._items.ids

    def growth(
        self, num_known: int
    ) -> tuple[list[ResponseDelta], RequestOutput | None, FinishReason | None, int]:
        """Return the deltas after the first `num_known`, the last output, why it ended, and when."""
        return (
            self._pieces[num_known:],
            self._last_output,
            self._finish_reason,
            self._ending.get("completed_at", 0),
        )

    @property
    def num_events(self) -> int:
        """Number of events that were made."""
        return self._num_events

    def _take(
        self, piece: ResponseDelta, output: RequestOutput, reason: FinishReason | None, now: int
    ) -> list[Event]:
        events = self.begin()
        keeps = self.request.resumable and self._keeps_history
        num_items = len(self._items.items)
        if keeps:
            self._pieces.append(piece)
            self.num_bytes += _size_of_piece(piece)
            if self._last_output is None:
                self.num_bytes += BYTES_PER_TOKEN * len(output.prompt_token_ids)
        self._last_output, self._finish_reason = output, reason
        if self.request.generate:
            self._num_output_tokens += piece.num_tokens
            grown = self._items.add(piece, output.prompt, is_last=reason is not None)
            events += map(self.numbered, grown)
        [completion], has_new_item = output.outputs, len(self._items.items) != num_items
        is_plain = keeps and reason is None and completion.logprobs is None and not has_new_item
        self.plain_output = completion if is_plain else None
        if reason is not None:
            events += self._finish(reason, now)
        return events

    def cancel(self, now: int, *, steered: bool = False) -> list[Event]:
        """Cancel the response; it ends with the output so far."""
        if self.is_over:
            return []
        ending: dict[str, Any] = {"status": "cancelled", "finish_reason": "abort"}
        if steered:
            ending |= {"status": "incomplete", "incomplete_details": {"reason": "steered"}}
        return [*self.begin(), *self._end("response.incomplete", "incomplete", ending, now)]

    def fail(self, error: WireError, now: int) -> list[Event]:
        """End the response with an error."""
        if self.is_over:
            return []
        is_shutdown = error.code == "service_unavailable"
        reason = FinishReason.SHUTDOWN if is_shutdown else FinishReason.ERROR
        return [*self.begin(), *self._fail(error, reason, now)]

    # ------------------------------------------------------------------------------------- what it is

    def response(self) -> dict[str, Any]:
        """Return the response object; strict clients require every key."""
        request, params = self.request, self.params
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": None,
            "status": "in_progress",
            "model": self.model,
            "output": self._items.snapshot(),
            "error": None,
            "incomplete_details": None,
            "instructions": self.echo.instructions,
            "metadata": dict(request.metadata),
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "top_logprobs": request.top_logprobs,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "tool_choice": self.echo.tool_choice,
            "tools": self.echo.tools,
            "text": self.echo.text,
            "truncation": request.truncation,
            "reasoning": None if request.reasoning is None else attrs.asdict(request.reasoning),
            "store": request.store,
            "background": False,
            "service_tier": request.service_tier or "default",
            "user": request.user,
            "safety_identifier": request.safety_identifier,
            "prompt_cache_key": request.prompt_cache_key,
            "usage": self._usage(),
            **self._ending,
        }

    def messages(self) -> list[Message]:
        """Return the answer as chat messages for the next turn."""
        return self._items.messages()

    def stored(self, owner: str | None) -> StoredResponse:
        """Return what is stored of the finished response."""
        return StoredResponse.of(
            response=self.response(),
            messages=(*self.chat, *self.messages()),
            num_input=len(self.chat),
            owner=owner,
        )

    # ---------------------------------------------------------------------------------------- endings

    def _finish(self, reason: FinishReason, now: int) -> list[Event]:
        ending: dict[str, Any] = {"finish_reason": reason.value}
        match reason:
            case FinishReason.STOP:
                return self._end("response.completed", "completed", {**ending, "status": "completed"}, now)
            case FinishReason.LENGTH if not self.request.generate:  # its one token is not sent
                ending = {"finish_reason": "stop", "status": "completed"}
                return self._end("response.completed", "completed", ending, now)
            case FinishReason.LENGTH:
                ending |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            case FinishReason.REPETITION:
                ending["status"] = "incomplete"  # OpenAI's reasons have none for it
            case FinishReason.ABORT | FinishReason.DEADLINE:
                ending["status"] = "cancelled"
            case FinishReason.SHUTDOWN:
                return self._fail(WireError("The server is shutting down.", code="server_error"), reason, now)
            case _:
                return self._fail(WireError("The server failed.", code="server_error"), reason, now)
        return self._end("response.incomplete", "incomplete", ending, now)

    def _end(self, kind: str, item_status: str, ending: dict[str, Any], now: int) -> list[Event]:
        is_whole = kind == "response.completed" and self.request.generate
        events = self._items.end(item_status, is_whole=is_whole)
        return [*map(self.numbered, events), self._over(kind, ending, now)]

    def _fail(self, error: WireError, reason: FinishReason, now: int) -> list[Event]:
        code = error.code if error.code in ("rate_limit_exceeded", "invalid_prompt") else "server_error"
        ending = {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "finish_reason": reason.value,
        }
        self._items.end("incomplete", is_whole=False)  # no events: response.failed is the only one
        return [self._over("response.failed", ending, now)]

    def _over(self, kind: str, ending: dict[str, Any], now: int) -> Event:
        self._state = _State.OVER
        self._ending = {**ending, "metrics": self._metrics()}
        # OpenAI: null for a response that ended in any other way.
        if ending["status"] == "completed":
            self._ending["completed_at"] = now
        return self.numbered({"type": kind, "response": self.response()})

    def numbered(self, event: Event) -> Event:
        """Give an event the next sequence number."""
        event["sequence_number"] = self._num_events
        self._num_events += 1
        if self.request.resumable:
            self._log.append(event)
            self.num_bytes += size_of_event(event)
        return event

    def events_after(self, sequence_number: int, max_events: int | None = None) -> list[Event]:
        """Return the events after a sequence number; of a resumable response only.

        Raises:
            EventsGone: some of them were dropped.
        """
        # -1, the client's "from the beginning", is one before the first number.
        start = max(sequence_number + 1, 0) - self._log_start
        if start < 0:
            raise EventsGone
        return self._log[start:] if max_events is None else self._log[start : start + max_events]

    def drop_history(self) -> None:
        """Stop being resumable by the next server: free what only its replay needs."""
        self._keeps_history = self.survives_restart = False
        self._pieces.clear()

    def drop_events(self) -> None:
        """Free all events logged so far."""
        self._log_start += len(self._log)
        self._log.clear()

    # ---------------------------------------------------------------------------------------- numbers

    def _usage(self) -> dict[str, Any] | None:
        # Counts that still change would be wrong in the first events.
        if self._last_output is None or not self._ending:
            return None
        num_input, num_output = len(self._last_output.prompt_token_ids), self._num_output_tokens
        cached = self._last_output.num_cached_tokens
        written = self._last_output.num_cache_creation_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": min(self._items.num_reasoning_tokens, num_output)},
            "total_tokens": num_input + num_output,
        }

    def _metrics(self) -> dict[str, float] | None:
        """Return latencies in seconds; unknown ones are left out."""
        if self._last_output is None:
            return None
        metrics = self._last_output.metrics
        times = {}
        if metrics.scheduled_ts:
            times["queue_s"] = metrics.scheduled_ts - metrics.queued_ts
        if metrics.first_token_ts:
            times["ttft_s"] = metrics.first_token_ts - metrics.queued_ts
            times["decode_s"] = metrics.last_token_ts - metrics.first_token_ts
        return {name: round(time, 6) for name, time in times.items()}


BYTES_PER_TOKEN = 40  # of a prompt: a place in a tuple, and an integer


def _size_of_piece(piece: ResponseDelta) -> int:
    num_logprobs = sum(1 + len(position["top_logprobs"]) for position in piece.logprobs)
    return 4 * BYTES_PER_VALUE + size_of(piece.text) + BYTES_PER_LOGPROB * num_logprobs
