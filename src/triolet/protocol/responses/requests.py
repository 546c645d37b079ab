"""Requests of the Responses protocol: `response.create`, also the body of `POST /v1/responses`, and the other messages.

Types are strict and unknown keys are ignored. Known fields that are not supported are refused by name, so that an
accepted request is served as written.

A WebSocket message is parsed and checked before anything acts on it. Parsing needs no state of the session, so a long
message can be parsed in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs

from triolet.core import json_text
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.request import TraceHeaders, pick_trace_headers
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import ToolPlan
from triolet.core.tools.answer import EFFORTS, effort_values
from triolet.errors import InvalidRequest
from triolet.protocol.errors import FIELD_NAMES, WireError, model_not_found, of_exception, unsupported, wrong
from triolet.protocol.field_limits import INCLUDABLE, SUMMARIES, VERBOSITIES, check_choice, check_labels
from triolet.protocol.json.encoding import EncodedItems, EncodedObject, EncodedText
from triolet.protocol.json.parsing import JsonLimits, parse_object, structured_object
from triolet.protocol.json.structuring import CONVERTER, Wrong, structure
from triolet.protocol.responses.response_items import Input, Message, NewId
from triolet.protocol.responses.store import size_of
from triolet.protocol.sampling import OffersTools, check_object_fields, sampling_params, structure_request

LOGPROBS = "message.output_text.logprobs"  # the one entry of `include` that a text answer can have
MAX_STREAM_ID_CHARS = 256
# Longest steer that is given back whole where it fails: events are written and framed in the event loop.
MAX_GIVEN_BACK_BYTES = 2**14
# Longest `tool_choice`, and form beside its schema, as JSON: room for OpenAI's 128 tools with names of 64 characters.
MAX_ECHO_CHARS = 2**15
_METADATA_PREFIX = "ws_request_header_"  # Codex's, for the headers that an HTTP request would have
_STREAM_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


@attrs.frozen(kw_only=True)
class TextConfig:
    """Form of the text of an answer."""

    # `{"type": "text"}`, or a JSON schema.
    format: Mapping[str, Any] = attrs.field(factory=lambda: {"type": "text"})
    verbosity: str | None = None  # echoed, without effect

    def form(self) -> StructuredOutputsParams | None:
        """Return the structured output that the form asks for; None for plain text.

        Raises:
            WireError: an unknown form.
            InvalidRequest: an invalid schema.
        """
        match self.format.get("type", "text"):
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "json_schema":
                if not isinstance(self.format.get("schema"), dict):
                    raise wrong("text.format.schema", "a JSON schema", self.format.get("schema"))
                return StructuredOutputsParams(json=self.format["schema"])
            case kind:
                raise wrong("text.format.type", "text, json_object or json_schema", kind)


@attrs.frozen(kw_only=True)
class ReasoningConfig:
    """Settings of the model's reasoning; an effort switches it on, and `none` or `minimal` off, where templates can."""

    effort: str | None = None
    summary: str | None = None


@attrs.frozen(kw_only=True)
class CreateResponse(OffersTools):
    """Request `response.create`: start an answer.

    The fields of the first group are OpenAI's, those of the second belong to the WebSocket, and those of the third are
    this server's own, most of them with vLLM's names.
    """

    input: Input  # new items of the conversation
    model: str = ""  # name of the model; empty for the first one of the server
    instructions: str | None = None  # system message before the conversation; not inherited by later turns
    max_tool_calls: int | None = None
    include: tuple[str, ...] = ()
    text: TextConfig = TextConfig()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig | None = None
    previous_response_id: str | None = None  # response to continue: its input, its output, then this input
    store: bool = True  # True to keep the response beyond this connection
    stream: bool = False
    background: bool = False
    # `auto` leaves the oldest messages out when the chat is too long; `disabled` refuses it.
    truncation: str = "disabled"
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    stream_id: str | None = None  # name of the turn queue
    generate: bool = True  # False for a response without output, which only stores the input to continue from

    timeout: float | None = None  # seconds after which the answer ends with what it has
    resumable: bool = False  # True to keep the answer running for a while if the connection is lost
    # True to send events named `triolet:...` too: place in the queue, progress of the prompt, restarts of the engine.
    triolet_events: bool = False
    priority: int = 0  # lower runs first under the engine's `priority` policy
    client: str | None = None  # name under which admission and fairness count the request
    cache_salt: str | None = None  # prefixes are shared only between requests of the same salt
    # Further values for the chat template.
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    # Sampling parameters of the body, by field of `SamplingParams`.
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    client_metadata: Any = None  # only the trace headers in it are read, as Codex sends them
    # Trace context of the request; by default that of the connection.
    trace_headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> CreateResponse:
        """Build and check the request from its body.

        Raises:
            WireError: names the field, the rule and the value.
        """
        request = structure_request(payload, cls, ApiFamily.RESPONSES)
        request._check()
        return request

    def traced_by(self, headers: TraceHeaders) -> CreateResponse:
        """Return the request with the trace headers of its connection, if it has none of its own."""
        # A value of another type is ignored: it has no effect on the answer.
        if isinstance(self.client_metadata, Mapping):
            headers = pick_trace_headers(self.client_metadata, _METADATA_PREFIX) or headers
        if self.trace_headers is not None:
            headers = pick_trace_headers(self.trace_headers)
        return attrs.evolve(self, trace_headers=dict(headers))

    def _check(self) -> None:
        if (max_tokens := self.max_output_tokens) is not None and max_tokens < 1:
            raise wrong("max_output_tokens", "at least 1", max_tokens)
        if self.truncation not in ("disabled", "auto"):
            raise wrong("truncation", "disabled or auto", self.truncation)
        if self.timeout is not None and self.timeout <= 0:
            raise wrong("timeout", "above 0 seconds", self.timeout)
        for entry in self.include:
            check_choice("include", entry, INCLUDABLE)
        check_choice("text.verbosity", self.text.verbosity, VERBOSITIES)
        if self.reasoning is not None:
            check_choice("reasoning.effort", self.reasoning.effort, tuple(EFFORTS))
            check_choice("reasoning.summary", self.reasoning.summary, SUMMARIES)
        check_labels(self)
        self._check_lengths()
        if self.background:
            raise unsupported("background", "background responses are not supported; stream instead")
        check_stream_id(self.stream_id)

    def _check_lengths(self) -> None:
        """Check what the events of the response repeat: each is written in the event loop."""
        form, beside = self.text.format, ""
        if form.get("type") == "json_schema":  # whose schema has a limit of its own
            form = {name: value for name, value in form.items() if name != "schema"}
            beside = " beside its schema"
        for field, value, rest in (("text.format", form, beside), ("tool_choice", self.tool_choice, "")):
            # A word, or a type alone, is one of a few, which is checked by itself.
            is_short = isinstance(value, str) or value.keys() <= {"type"}
            if not is_short and json_text.is_longer(value, MAX_ECHO_CHARS):
                rule = f"must have at most {MAX_ECHO_CHARS} characters as JSON{rest}"
                raise WireError(f"{field} {rule}, got more", param=field)

    def prompt(
        self,
        messages: list[Message],
        plan: ToolPlan,
        thinking_switch: str | None = None,
        efforts: Mapping[str, str] | None = None,
    ) -> Prompt:
        """Return the prompt for `Engine.generate`.

        Args:
            messages: of the chat, with the instructions.
            thinking_switch: value of the chat template that the effort sets; None for none.
            efforts: what the chat template takes as `reasoning_effort`, by effort; empty or None for no such value.
        """
        effort = self.reasoning.effort if self.reasoning else None
        values = {**effort_values(effort, thinking_switch, efforts or {}), **self.chat_template_kwargs}
        if not values and plan.template_tools is None:
            return messages
        return {"messages": messages, "tools": plan.template_tools, "chat_template_kwargs": values}

    @property
    def max_output_tokens(self) -> int | None:
        """Most tokens of the answer; None if the client gave no limit."""
        return self.sampling.get("max_tokens")

    @property
    def top_logprobs(self) -> int:
        """Number of most likely tokens per position."""
        num_top: int = self.sampling.get("logprobs", 0)
        return num_top

    @property
    def wants_logprobs(self) -> bool:
        """True if deltas carry log-probabilities."""
        return self.num_top is not None

    @property
    def num_top(self) -> int | None:
        """Entries per position that the answer shows: -1 for all; None for no log-probabilities."""
        if self.sampling.get("logprob_token_ids"):
            return -1
        return self.top_logprobs if LOGPROBS in self.include or self.top_logprobs != 0 else None

    def sampling_params(self, defaults: SamplingParams, plan: ToolPlan) -> SamplingParams:
        """Return the parameters for the engine: those of the client, and the model's defaults for the rest.

        Raises:
            WireError: a value out of its range.
        """
        given: dict[str, Any] = {} if plan.skip_special_tokens else {"skip_special_tokens": False}
        given |= self.sampling
        # Named tokens take the place of the most likely ones, as in vLLM.
        given["logprobs"] = None if self.sampling.get("logprob_token_ids") else self.num_top
        given["structured_outputs"] = plan.structured_outputs
        if not self.generate:  # the step that computes the end of the input samples a token in any case
            given |= {"max_tokens": 1, "min_tokens": 0, "structured_outputs": None}
        try:
            return sampling_params(defaults, **given, output_kind=RequestOutputKind.DELTA)
        except InvalidRequest as error:
            raise self.refusal(error) from None

    def form(self) -> StructuredOutputsParams | None:
        """Return the form that the text of the answer must have, from `text.format` or `structured_outputs`.

        Raises:
            WireError: an unknown form, or both fields.
            InvalidRequest: an invalid grammar or schema.
        """
        form = self.text.form()
        asked = self.sampling.get("structured_outputs")
        if asked is None:
            return form
        if form is not None:
            rule = "left out beside text.format, which asks for a form of its own"
            raise wrong("structured_outputs", rule, asked)
        return StructuredOutputsParams(
            **check_object_fields("structured_outputs", asked, StructuredOutputsParams)
        )

    def refusal(self, error: BaseException) -> WireError:
        """Return the error to send for an exception, with the field under the name that the client wrote."""
        names = dict(FIELD_NAMES[ApiFamily.RESPONSES])
        if "structured_outputs" not in self.sampling:
            is_text = self.text.format.get("type", "text") == "text"
            names["structured_outputs.json"] = "tools" if is_text else "text.format.schema"
        return of_exception(error, names)


@attrs.frozen(kw_only=True)
class CancelResponse:
    """Request `response.cancel`: end a response now."""

    response_id: str | None = None  # by default the active response of the turn queue
    stream_id: str | None = None  # name of the turn queue; by default the one without a name


@attrs.frozen(kw_only=True)
class SteerResponse:
    """Request `response.steer`: end an active response where it is, and continue it with more input."""

    previous_response_id: str
    input: Input


@attrs.frozen(kw_only=True)
class ResumeResponse:
    """Request `response.resume`: read the rest of a resumable response on another connection."""

    response_id: str
    starting_after: int = -1  # last sequence number that was received; -1 for none
    stream_id: str | None = None  # name of the turn queue for its further events


def check_stream_id(stream_id: object) -> None:
    """Check the name of a turn queue.

    Raises:
        WireError: `invalid_stream_id`.
    """
    if stream_id is None:
        return
    is_name = isinstance(stream_id, str) and 0 < len(stream_id) <= MAX_STREAM_ID_CHARS
    if not is_name or not _STREAM_ID_CHARS.issuperset(stream_id):  # type: ignore[arg-type]
        rule = f"1 to {MAX_STREAM_ID_CHARS} characters of A-Z, a-z, 0-9, _, . and -"
        raise wrong("stream_id", rule, stream_id, code="invalid_stream_id")


def _tool_choice(value: Any, _: Any) -> str | Mapping[str, Any]:
    if not isinstance(value, str | dict):
        raise Wrong("a string or an object", value)
    return value


CONVERTER.register_structure_hook_func(lambda kind: kind == str | Mapping[str, Any], _tool_choice)


Body = CreateResponse | CancelResponse | SteerResponse | ResumeResponse


@attrs.frozen
class RequestEcho:
    """Parts of a request that may be long and stand in several events of its response, encoded once.

    A request is read in a thread if it is long, and its events are made in the event loop.
    """

    instructions: EncodedText | None
    text: EncodedObject
    tool_choice: str | EncodedObject
    tools: EncodedItems  # with their defaults
    num_bytes: int  # of the request's own tools, estimated

    @classmethod
    def of(cls, request: CreateResponse) -> Self:
        """Encode the parts of a request."""
        tools = ({"description": None, "parameters": {}, "strict": False, **tool} for tool in request.tools)
        said, choice = request.instructions, request.tool_choice
        text = attrs.asdict(request.text, recurse=False)
        return cls(
            instructions=None if said is None else EncodedText(said),
            text=EncodedObject.of({name: value for name, value in text.items() if value is not None}),
            tool_choice=choice if isinstance(choice, str) else EncodedObject.of(choice),
            tools=EncodedItems.of(tools),
            num_bytes=size_of(request.tools),
        )


@attrs.frozen
class SamplingPlan:
    """Sampling parameters of a request, the tool plan that they follow from, and what its model gives."""

    params: SamplingParams
    tools: ToolPlan
    echo: RequestEcho
    model: str | None = None  # name of the model that it was made for; None for the server's first one
    adapter: str | None = None  # name of the adapter that the request asks for; it is `model`, too
    defaults: SamplingParams = attrs.field(factory=SamplingParams)  # of the model
    new_id: NewId | None = None  # makes ids that the model takes; None for those of the server's first one

    def for_successor(self, request: CreateResponse) -> SamplingPlan:
        """Return the plan of a request of the same model, with the same instructions and tools.

        Raises:
            WireError: a value out of its range.
        """
        return attrs.evolve(self, params=request.sampling_params(self.defaults, self.tools))


@attrs.frozen(kw_only=True)
class ClientEvent:
    """Parsed message of a client."""

    num_bytes: int  # length of the message
    type: str | None = None  # type of the event; None if it is unknown
    stream_id: str | None = None  # its lane; None also for an invalid name
    steer: Mapping[str, Any] = attrs.field(factory=dict)  # what is given back of a steer that fails
    body: Body | None = None  # the structured event, if it is valid
    planned: SamplingPlan | None = None  # sampling parameters and tool plan of a `response.create`
    error: WireError | None = None  # why it is invalid

    def traced_by(self, headers: TraceHeaders) -> ClientEvent:
        """Return the event with the connection's trace headers, if it starts a response and has none itself."""
        if not isinstance(self.body, CreateResponse):
            return self
        return attrs.evolve(self, body=self.body.traced_by(headers))


def read_event(
    raw: str | bytes,
    serves: Callable[[str], bool],
    plan_of: Callable[[CreateResponse], SamplingPlan],
    limits: JsonLimits | None = None,
) -> ClientEvent:
    """Parse and check a message; errors are returned in the event.

    Args:
        serves: tells whether the model, or an adapter of it, has a name.
        plan_of: returns the sampling parameters and the tool plan of a request; raises WireError.
        limits: on the shape of the JSON.
    """
    try:
        return structured_object(
            [parse_object(raw, limits)], lambda payload: _event_of(payload, len(raw), serves, plan_of)
        )
    except WireError as error:
        return ClientEvent(num_bytes=len(raw), error=error)


def _event_of(
    payload: dict[str, Any],
    num_bytes: int,
    serves: Callable[[str], bool],
    plan_of: Callable[[CreateResponse], SamplingPlan],
) -> ClientEvent:
    kind, stream_id = payload.get("type"), _lane_of(payload)
    facts: dict[str, Any] = {"num_bytes": num_bytes, "stream_id": stream_id}
    if kind == "response.steer":
        facts["steer"] = _given_back(payload, is_short=num_bytes <= MAX_GIVEN_BACK_BYTES)
    if not isinstance(kind, str) or kind not in _READERS:
        rule = "one of " + ", ".join(_READERS)
        return ClientEvent(**facts, error=wrong("type", rule, kind, code="unknown_event_type"))
    try:
        body = _READERS[kind](payload)
        if not isinstance(body, SteerResponse):
            check_stream_id(body.stream_id)
        planned = None
        if isinstance(body, CreateResponse):
            if body.model and not serves(body.model):
                raise model_not_found(body.model)
            planned = plan_of(body)
    except WireError as error:
        error.__cause__ = error.__context__ = None
        # The frames where it arose refer to the object, and the event is kept.
        return ClientEvent(**facts, type=kind, error=error.with_traceback(None))
    return ClientEvent(**facts, type=kind, body=body, planned=planned)


def _given_back(payload: Mapping[str, Any], *, is_short: bool) -> dict[str, Any]:
    """Return the fields of a steer for its error, of a long message without its input."""
    response_id, text = payload.get("previous_response_id"), payload.get("input")
    is_id = isinstance(response_id, str) and len(response_id) <= MAX_STREAM_ID_CHARS
    return {
        "previous_response_id": response_id if is_short or is_id else None,
        "input": text if is_short else None,
    }


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Body]] = {
    "response.create": CreateResponse.of,
    "response.cancel": lambda payload: structure(payload, CancelResponse),
    "response.steer": lambda payload: structure(payload, SteerResponse),
    "response.resume": lambda payload: structure(payload, ResumeResponse),
}


def _lane_of(payload: Mapping[str, Any]) -> str | None:
    """Return the lane of a message; None, the lane without a name, if the name is invalid."""
    stream_id = payload.get("stream_id")
    try:
        check_stream_id(stream_id)
    except WireError:
        return None
    return stream_id
