"""What a client may ask for: `response.create`, which is also the body of `POST /v1/responses`, and its companions.

Types are strict and unknown keys are let pass. What is known and can not be honoured is refused by name, here: a
request that passes means what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from triolet.core.request.params import MIN_TEMPERATURE, RequestOutputKind, SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.trace_context import TraceHeaders, pick_trace_headers
from triolet.core.tools import ToolPlan
from triolet.errors import InvalidRequest
from triolet.protocol.errors import WireError, of_exception, unsupported, wrong
from triolet.protocol.responses.input_items import Input, Message
from triolet.protocol.structuring import CONVERTER, Wrong, structure
from triolet.protocol.tools import OffersTools

LOGPROBS = "message.output_text.logprobs"  # the one entry of `include` that a text answer can have
MAX_TOP_LOGPROBS = 20
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

# Fields that go into `SamplingParams` under their own names.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)
# Known from OpenAI or vLLM, with a meaning that this server can not give them: ignoring them would be a lie.
_REFUSED = ("prompt", "conversation", "context_management", "lora", "prompt_embeds")


@attrs.frozen
class Strings:
    """One string or several."""

    values: tuple[str, ...]


def _strings(value: Any, _: Any) -> Strings:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(type(item) is str for item in values):
        raise Wrong("a string or a list of strings", value)
    return Strings(tuple(values))


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
        structured_outputs: the form that the answer must have, by vLLM's names.
        client_metadata: what a client says of itself; here only where it carries trace headers, as Codex's does.
        trace_headers: of the trace that it belongs to; by default those of the connection.
    """

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int = 0
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
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Strings | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, Any] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Mapping[str, Any] | None = None
    client_metadata: Any = None
    trace_headers: Mapping[str, str] | None = None

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> CreateResponse:
        """Structure and check a request.

        Raises:
            WireError: names the field, the rule and what came.
        """
        for name in _REFUSED:
            if payload.get(name) is not None:
                raise unsupported(name, f"{name} is not supported by this server")
        request = structure(payload, cls)
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
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise wrong("max_output_tokens", "at least 1", self.max_output_tokens)
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise wrong("top_logprobs", f"from 0 to {MAX_TOP_LOGPROBS}", self.top_logprobs)
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
    def wants_logprobs(self) -> bool:
        """Whether deltas carry log-probabilities."""
        return LOGPROBS in self.include or self.top_logprobs > 0

    def sampling_params(self, defaults: SamplingParams, plan: ToolPlan) -> SamplingParams:
        """The parameters of this request: what it says, and for the rest the model's own wishes.

        Args:
            defaults: those wishes.
            plan: see `plan`.
        Raises:
            WireError: a value out of its range.
        """
        given: dict[str, Any] = {} if plan.skip_special_tokens else {"skip_special_tokens": False}
        given |= {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = self.stop.values
        if self.logit_bias is not None:
            given["logit_bias"] = token_biases(self.logit_bias)
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if self.wants_logprobs:
            given["logprobs"] = self.top_logprobs
        if not self.generate:  # the step that computes the end of the input gives one token in any case
            given |= {"max_tokens": 1, "min_tokens": 0}
        elif plan.structured_outputs is not None:
            given["structured_outputs"] = plan.structured_outputs
        try:
            return sampled(defaults, **given, output_kind=RequestOutputKind.DELTA)
        except InvalidRequest as error:
            raise self.refusal(error) from None

    def form(self) -> StructuredOutputsParams | None:
        """The form that the text of the answer is to have: by `text.format` or by `structured_outputs`.

        Raises:
            WireError: none that is known, or both.
            InvalidRequest: it says nothing.
        """
        form = self.text.form()
        if self.structured_outputs is None:
            return form
        if form is not None:
            rule = "left out beside text.format, which asks for a form of its own"
            raise wrong("structured_outputs", rule, "both")
        return StructuredOutputsParams(**known_fields(self.structured_outputs))

    def refusal(self, error: BaseException) -> WireError:
        """What the client is told about an exception."""
        return of_exception(error)


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


def known_fields(form: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `structured_outputs`, of which each must be one."""
    known = {field.name for field in attrs.fields(StructuredOutputsParams)}
    for name in form:
        if name not in known:
            raise wrong("structured_outputs", "an object of " + ", ".join(sorted(known)), name)
    return dict(form)


def sampled(defaults: SamplingParams, **fields: Any) -> SamplingParams:
    """The model's own wishes, and over them what a client wrote.

    A temperature that is too small to divide by is raised here, without the warning that a programmer gets for it: the
    one who wrote it can not read that.

    Raises:
        InvalidRequest: a value out of its range.
    """
    if 0 < (fields.get("temperature") or 0) < MIN_TEMPERATURE:
        fields["temperature"] = MIN_TEMPERATURE
    return attrs.evolve(defaults, **fields)


def token_biases(written: Mapping[str, Any]) -> dict[int, float]:
    """Token ids as JSON writes them, in strings."""
    biases = {}
    for token_id, bias in written.items():
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 18):
            raise wrong("logit_bias", "an object with token ids as keys", token_id)
        if type(bias) not in (int, float):
            raise wrong(f"logit_bias.{token_id}", "a number", bias)
        biases[int(token_id)] = bias
    return biases


def _tool_choice(value: Any, _: Any) -> str | Mapping[str, Any]:
    if not isinstance(value, str | dict):
        raise Wrong("a string or an object", value)
    return value


CONVERTER.register_structure_hook(Strings, _strings)
CONVERTER.register_structure_hook_func(lambda kind: kind == str | Mapping[str, Any], _tool_choice)
