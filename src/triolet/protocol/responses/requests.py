"""What a client may ask for: `response.create`, which is also the body of `POST /v1/responses`, and its companions.

Types are strict and unknown keys are let pass. What is known and can not be honoured is refused by name, here: a
request that passes means what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from triolet.core.request.param_spec import ApiFamily
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.trace_context import TraceHeaders, pick_trace_headers
from triolet.core.tools import ToolPlan
from triolet.errors import InvalidRequest
from triolet.protocol.errors import FIELD_NAMES, WireError, of_exception, unsupported, wrong
from triolet.protocol.known_fields import structure_request
from triolet.protocol.responses.input_items import Input, Message
from triolet.protocol.sampling import check_object_fields, sampling_params
from triolet.protocol.structuring import CONVERTER, Wrong
from triolet.protocol.tools import OffersTools

LOGPROBS = "message.output_text.logprobs"  # the one entry of `include` that a text answer can have
MAX_STREAM_ID_CHARS = 256
MAX_METADATA_ENTRIES = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = (
    64,
    512,
)  # OpenAI's limits; the values are stored and echoed
MAX_IDENTIFIER_CHARS = 64  # OpenAI's, of the three below
_IDENTIFIERS = ("user", "safety_identifier", "prompt_cache_key")
_METADATA_PREFIX = "ws_request_header_"  # Codex's, for what is a header of each request elsewhere
_STREAM_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


@attrs.frozen(kw_only=True)
class TextConfig:
    """How the text of an answer is to be.

    Args:
        format: `{"type": "text"}`, or a JSON schema.
        verbosity: a hint; echoed.
    """

    format: Mapping[str, Any] = attrs.field(factory=lambda: {"type": "text"})
    verbosity: str | None = None

    def form(self) -> StructuredOutputsParams | None:
        """The form that it asks for; None for plain text.

        Raises:
            WireError: none that is known.
            InvalidRequest: a schema that is none.
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
    """How much a model is to think; models here know at most whether."""

    effort: str | None = None
    summary: str | None = None


@attrs.frozen(kw_only=True)
class CreateResponse(OffersTools):
    """`response.create`: start an answer.

    The first group are OpenAI's fields, the second what a WebSocket adds, the third this server's own (most of them
    vLLM's, with their meaning in `SamplingParams`).

    Args:
        model: name of the model.
        input: what is new.
        instructions: a system message before everything; not inherited by later turns.
        previous_response_id: continue that response: its input, its output, then this input.
        store: remember the response beyond this connection.
        truncation: `auto` leaves the oldest messages out when the chat is too long; `disabled` refuses it.
        generate: false only takes the input in: a response without output, to continue from.
        stream_id: the lane.
        timeout: seconds after which the answer ends with what there is.
        resumable: keep the answer going for a while if the connection is lost.
        priority: lower goes first, under the engine's policy `priority`.
        client: whom the request is counted for.
        cache_salt: prefixes are shared only between requests of the same salt.
        chat_template_kwargs: further values for the chat template.
        sampling: sampling parameters that the body has, by field of `SamplingParams`.
        client_metadata: what a client says of itself; here only where it carries trace headers, as Codex's does.
        trace_headers: of the trace that it belongs to; by default those of the connection.
    """

    model: str
    input: Input
    instructions: str | None = None
    max_tool_calls: int | None = None
    include: tuple[str, ...] = ()
    text: TextConfig = TextConfig()
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    background: bool = False
    truncation: str = "disabled"
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    stream_id: str | None = None
    generate: bool = True

    timeout: float | None = None
    resumable: bool = False
    priority: int = 0
    client: str | None = None
    cache_salt: str | None = None
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    client_metadata: Any = None
    trace_headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> CreateResponse:
        """Structure and check a request.

        Raises:
            WireError: names the field, the rule and what came.
        """
        request = structure_request(payload, cls, ApiFamily.RESPONSES)
        request._check()
        return request

    def traced_by(self, headers: TraceHeaders) -> CreateResponse:
        """The same with the trace headers of what it came over, if it brings none itself."""
        if isinstance(self.client_metadata, Mapping):  # no wrong one is a reason to refuse anything
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
        if len(self.metadata) > MAX_METADATA_ENTRIES:
            raise wrong("metadata", f"at most {MAX_METADATA_ENTRIES} entries", len(self.metadata))
        self._check_lengths()
        if self.background:
            raise unsupported("background", "background responses are not supported; stream instead")
        check_stream_id(self.stream_id)

    def _check_lengths(self) -> None:
        for key, value in self.metadata.items():
            if len(key) > MAX_METADATA_KEY_CHARS:
                raise wrong(
                    "metadata", f"an object with keys of at most {MAX_METADATA_KEY_CHARS} characters", key
                )
            if len(value) > MAX_METADATA_VALUE_CHARS:
                raise wrong(f"metadata.{key}", f"at most {MAX_METADATA_VALUE_CHARS} characters long", value)
        for name in _IDENTIFIERS:
            if len(getattr(self, name) or "") > MAX_IDENTIFIER_CHARS:
                raise wrong(name, f"at most {MAX_IDENTIFIER_CHARS} characters long", getattr(self, name))

    def prompt(self, messages: list[Message], plan: ToolPlan, reasoning_parser: str | None = None) -> Prompt:
        """What `Engine.generate` is asked with.

        Args:
            messages: of the chat, with the instructions.
            plan: see `plan`.
            reasoning_parser: as there; the templates of some models can be told not to think.
        """
        values = dict(self.chat_template_kwargs)
        if reasoning_parser == "qwen3" and self.reasoning is not None and self.reasoning.effort == "none":
            values.setdefault("enable_thinking", False)
        if not values and plan.template_tools is None:
            return messages
        return {"messages": messages, "tools": plan.template_tools, "chat_template_kwargs": values}

    @property
    def max_output_tokens(self) -> int | None:
        """Most tokens of the answer; None if the client did not say."""
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
        """The parameters of this request: what it says, and for the rest the model's own wishes.

        Args:
            defaults: those wishes.
            plan: see `plan`.
        Raises:
            WireError: a value out of its range.
        """
        given: dict[str, Any] = {} if plan.skip_special_tokens else {"skip_special_tokens": False}
        given |= self.sampling
        # Named tokens take the place of the most likely ones, as in vLLM.
        given["logprobs"] = None if self.sampling.get("logprob_token_ids") else self.num_top
        given["structured_outputs"] = plan.structured_outputs
        if not self.generate:  # the step that computes the end of the input gives one token in any case
            given |= {"max_tokens": 1, "min_tokens": 0, "structured_outputs": None}
        try:
            return sampling_params(defaults, **given, output_kind=RequestOutputKind.DELTA)
        except InvalidRequest as error:
            raise self.refusal(error) from None

    def form(self) -> StructuredOutputsParams | None:
        """The form that the text of the answer is to have: by `text.format` or by `structured_outputs`.

        Raises:
            WireError: none that is known, or both.
            InvalidRequest: it says nothing.
        """
        form = self.text.form()
        asked = self.sampling.get("structured_outputs")
        if asked is None:
            return form
        if form is not None:
            rule = "left out beside text.format, which asks for a form of its own"
            raise wrong("structured_outputs", rule, "both")
        return StructuredOutputsParams(
            **check_object_fields("structured_outputs", asked, StructuredOutputsParams)
        )

    def refusal(self, error: BaseException) -> WireError:
        """Return the error that the client is told, with the field under the name that the client wrote."""
        names = dict(FIELD_NAMES[ApiFamily.RESPONSES])
        if "structured_outputs" not in self.sampling:
            is_text = self.text.format.get("type", "text") == "text"
            names["structured_outputs.json"] = "tools" if is_text else "text.format.schema"
        return of_exception(error, names)


@attrs.frozen(kw_only=True)
class CancelResponse:
    """`response.cancel`: end a response now.

    Args:
        response_id: which; by default the active one of the lane.
        stream_id: the lane; by default the one without a name.
    """

    response_id: str | None = None
    stream_id: str | None = None


@attrs.frozen(kw_only=True)
class SteerResponse:
    """`response.steer`: end an active response where it is, and continue it with more input."""

    previous_response_id: str
    input: Input


@attrs.frozen(kw_only=True)
class ResumeResponse:
    """`response.resume`: go on reading a resumable response, on another connection than the one it began on.

    Args:
        response_id: which.
        starting_after: the last sequence number that was received; -1 for none.
        stream_id: the lane for its events from now on.
    """

    response_id: str
    starting_after: int = -1
    stream_id: str | None = None


def check_stream_id(stream_id: object) -> None:
    """Hold the name of a lane to its rule.

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
