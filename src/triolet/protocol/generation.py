"""Fields and answers that `/v1/chat/completions` and `/v1/completions` have in common.

Types are strict. Unknown keys are ignored, since every client sends some of its own. Keys of OpenAI or vLLM that are
not supported are refused by name, unless their value asks for what is done anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs

from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.request import FinishReason
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import InvalidRequest
from triolet.protocol.errors import FIELD_NAMES, WireError, of_exception, wrong
from triolet.protocol.field_limits import check_labels
from triolet.protocol.sampling import check_object_fields, sampling_params, structure_request

STREAM_END = b"data: [DONE]\n\n"  # of every stream over HTTP
MIN_LOGPROB = -9999.0  # OpenAI's value for "impossible", since JSON has no infinity


@attrs.frozen(kw_only=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool = False  # True to send one more chunk at the end, with the counts of tokens
    # With `include_usage`, True to send the counts so far with every chunk.
    continuous_usage_stats: bool = False
    # OpenAI's padding of chunks against eavesdroppers; accepted, and not added.
    include_obfuscation: bool = False


@attrs.frozen(kw_only=True)
class JsonSchemaFormat:
    """Schema of a `response_format`, its field `json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: Mapping[str, Any] = attrs.field(factory=dict)
    strict: bool | None = None


@attrs.frozen(kw_only=True)
class ResponseFormat:
    """Form of the answer: `text`, `json_object`, or `json_schema` with a schema."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """Return the structured output that the form asks for; None for plain text.

        Raises:
            WireError: an unknown form, or no schema.
            InvalidRequest: an invalid schema.
        """
        match self.type:
            case "text":
                return None
            case "json_object":
                return StructuredOutputsParams(json_object=True)
            case "json_schema" if self.json_schema is not None:
                return StructuredOutputsParams(json=self.json_schema.schema)
            case "json_schema":
                raise wrong("response_format.json_schema", "given with this type", None)
        raise wrong("response_format.type", "text, json_object or json_schema", self.type)


@attrs.frozen(kw_only=True)
class GenerationRequest:
    """Fields that bodies of both routes have, beside the sampling parameters."""

    FAMILY: ClassVar[ApiFamily]

    model: str = ""  # name of the model; empty for the first one of the server
    stream: bool = False  # True to send the answer in chunks, as they are generated
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat = ResponseFormat()
    # What a client labels its requests with; has no effect.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    store: bool = False

    timeout: float | None = None  # seconds after which the answer ends with what it has
    # True to send the ids of the prompt's and the answer's tokens, as vLLM does.
    return_token_ids: bool = False
    # True to show a token as `token_id:ID`, in place of its text, where log-probabilities name it.
    return_tokens_as_token_ids: bool = False
    # True to send chunks without choices too, that say in `triolet` what the answer waits for.
    triolet_events: bool = False
    priority: int = 0  # lower runs first under the engine's `priority` policy
    client: str | None = None  # name under which admission and fairness count the request
    cache_salt: str | None = None  # prefixes are shared only between requests of the same salt
    # Sampling parameters of the body, by field of `SamplingParams`.
    sampling: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Self:
        """Build and check the request from its body.

        Raises:
            WireError: names the field, the rule and the value.
        """
        request = structure_request(payload, cls, cls.FAMILY)
        request.check()
        return request

    def check(self) -> None:
        """Check the rules that the types of the fields do not express.

        Raises:
            WireError: names the field, the rule and the value.
        """
        check_labels(self)
        if self.timeout is not None and self.timeout <= 0:
            raise wrong("timeout", "above 0 seconds", self.timeout)
        if (token_ids := self.sampling.get("logprob_token_ids")) and self.num_logprobs() is None:
            raise wrong("logprob_token_ids", "left out where logprobs are not asked for", token_ids)
        if self.stream_options is not None and not self.stream:
            asked = attrs.asdict(self.stream_options, filter=lambda field, value: value is True)
            raise wrong("stream_options", "left out where stream is false", asked)
        if self.triolet_events and not self.stream:
            raise wrong("triolet_events", "left out where stream is false", True)

    @property
    def includes_usage(self) -> bool:
        """True if a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_usage_in_chunks(self) -> bool:
        """True if every chunk of a stream carries the counts of tokens so far, as in vLLM."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats

    @property
    def n(self) -> int:
        """Number of answers to each prompt."""
        n: int = self.sampling.get("n", 1)
        return n

    def num_logprobs(self) -> int | None:
        """Return the number of most likely tokens per position; None for no log-probabilities."""
        return None

    @property
    def num_top(self) -> int | None:
        """Entries per position that the answer shows: -1 for all; None for no log-probabilities."""
        return -1 if self.sampling.get("logprob_token_ids") else self.num_logprobs()

    def sampling_params(self, defaults: SamplingParams, **chosen: Any) -> SamplingParams:
        """Return the parameters for the engine: those of the client, and the model's defaults for the rest.

        Args:
            **chosen: further parameters that follow from the request.
        Raises:
            WireError: a value out of its range.
        """
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        # Named tokens take the place of the most likely ones, as in vLLM.
        num_logprobs = None if self.sampling.get("logprob_token_ids") else self.num_logprobs()
        given = {**self.sampling, "logprobs": num_logprobs, **chosen, "output_kind": kind}
        try:
            return sampling_params(defaults, **given)
        except InvalidRequest as error:
            raise self.refusal(error) from None

    def form(self) -> StructuredOutputsParams | None:
        """Return the form that the text of the answer must have; None for any text.

        Raises:
            WireError: an unknown form, or two.
            InvalidRequest: an invalid grammar or schema.
        """
        asked = self.sampling.get("structured_outputs")
        if asked is None:
            return self.response_format.constraint()
        if self.response_format.type != "text":
            raise wrong("response_format", "left out beside structured_outputs", self.response_format.type)
        return StructuredOutputsParams(
            **check_object_fields("structured_outputs", asked, StructuredOutputsParams)
        )

    def refusal(self, error: BaseException) -> WireError:
        """Return the error to send for an exception, with the field under the name that the client wrote."""
        return of_exception(error, {**FIELD_NAMES[self.FAMILY], **self.names()})

    def names(self) -> Mapping[str, str]:
        """Return the names of engine fields for which this body has other names than the rest of its family."""
        if "structured_outputs" in self.sampling:
            return {}
        if self.response_format.type == "text":  # the form can come only from the tools
            return {"structured_outputs.json": "tools"}
        return {"structured_outputs.json": "response_format.json_schema.schema"}


# ------------------------------------------------------------------------------------------- answers


def finish_reason(completion: CompletionOutput) -> tuple[str, str | int | None]:
    """Return OpenAI's `finish_reason` of an answer, and vLLM's `stop_reason`.

    Raises:
        WireError: the answer failed or was aborted.
    """
    match completion.finish_reason:
        case FinishReason.LENGTH:
            return "length", None
        case FinishReason.DEADLINE:
            return "length", "deadline"
        case FinishReason.SHUTDOWN:
            return "length", "shutdown"
        case FinishReason.ABORT:
            raise WireError(
                "The request was aborted.", code="request_aborted", status=503, type="server_error"
            )
        case FinishReason.ERROR:
            raise of_exception(RuntimeError())
        case FinishReason.REPETITION:  # vLLM's
            return "repetition", completion.stop_reason
        case FinishReason.STOP | None:
            return "stop", completion.stop_reason


@attrs.define(eq=False)
class Usage:
    """Token counts of an answer."""

    _prompt: int = 0
    _cached: int = 0
    _completion: int = 0

    def add(self, output: RequestOutput) -> None:
        """Count the tokens of the next output."""
        self._completion += sum(len(completion.token_ids) for completion in output.outputs)

    def add_prompt(self, output: RequestOutput) -> None:
        """Count a prompt, once."""
        self._prompt += len(output.prompt_token_ids)
        self._cached += output.num_cached_tokens

    @property
    def num_completion_tokens(self) -> int:
        return self._completion

    def body(self) -> dict[str, Any]:
        """Return the object `usage` of the answer."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def likeliest(logprobs: Mapping[int, Logprob], num_top: int) -> list[int]:
    """Return the ids of the most likely tokens of one position in descending order; all of them if `num_top` is -1."""
    falling = sorted(logprobs, key=lambda token_id: -logprobs[token_id].logprob)
    return falling if num_top == -1 else falling[:num_top]


def shown_token(token_id: int, text: str | None, *, as_id: bool) -> str:
    """Return what stands for a token where log-probabilities name it: its text, or vLLM's form of its id."""
    return f"token_id:{token_id}" if as_id else text or ""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, MIN_LOGPROB)
