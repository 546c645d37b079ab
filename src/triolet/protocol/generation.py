"""What a body of `/v1/chat/completions` and one of `/v1/completions` have in common: how to sample, and how to answer.

Types are strict. Keys that nobody knows are let pass, since every client sends some of its own; keys that are known
from OpenAI or vLLM and can not be honoured are refused by name, unless they say what would be done anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import attrs

from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.status import FinishReason
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import InvalidRequest
from triolet.protocol.errors import WireError, of_exception, unsupported, wrong
from triolet.protocol.responses.requests import Strings, known_fields, sampled, token_biases
from triolet.protocol.structuring import structure

MAX_TOP_LOGPROBS = 20
MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's word for "impossible"

# Fields that go into `SamplingParams` under their own names.
_SAMPLING_FIELDS = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
)

# What can not be honoured, and the values of it that ask for nothing.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "allowed_media_domains": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

# Names that a client wrote a field of the engine by.
_WRITTEN = {"max_output_tokens": "max_tokens"}


@attrs.frozen(kw_only=True)
class StreamOptions:
    """How a stream is to be.

    Args:
        include_usage: one more chunk at the end, with the counts of tokens.
    """

    include_usage: bool = False


@attrs.frozen(kw_only=True)
class JsonSchemaFormat:
    """The `json_schema` of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema: Mapping[str, Any] = attrs.field(factory=dict)
    strict: bool | None = None


@attrs.frozen(kw_only=True)
class ResponseFormat:
    """The form that the answer is to have: `text`, `json_object`, or `json_schema` with a schema."""

    type: str = "text"
    json_schema: JsonSchemaFormat | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """What holds the answer to it.

        Raises:
            WireError: there is no such form, or no schema.
            InvalidRequest: the schema is none.
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
    """The fields of both; the last group are vLLM's and this server's own.

    Args:
        model: name of the model.
        n: answers to each prompt.
        stream: in chunks, as they come.
        user: whom the answer is for; it means nothing here.
        timeout: seconds after which the answer ends with what there is.
        priority: lower goes first, under the engine's policy `priority`.
        client: whom the request is counted for.
        cache_salt: prefixes are shared only between requests of the same salt.
    """

    model: str
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, Any] | None = None
    stop: Strings | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat = ResponseFormat()
    user: str | None = None

    timeout: float | None = None
    priority: int = 0
    client: str | None = None
    cache_salt: str | None = None
    structured_outputs: Mapping[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> Self:
        """Structure and check a body.

        Raises:
            WireError: names the field, the rule and what came.
        """
        known = {field.name for field in attrs.fields(cls)}
        for name, harmless in _REFUSED.items():
            if name not in known and (value := payload.get(name)) is not None and value not in harmless:
                raise unsupported(name, f"{name} is not supported by this server")
        request = structure(payload, cls)
        request.check()
        return request

    def check(self) -> None:
        """Hold to their rules what types do not say.

        Raises:
            WireError: names the field, the rule and what came.
        """
        if self.timeout is not None and self.timeout <= 0:
            raise wrong("timeout", "above 0 seconds", self.timeout)
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "left out where stream is false", self.stream_options)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are wanted at each place; None for no log-probabilities at all."""
        return None

    def sampling_params(self, defaults: SamplingParams, **chosen: Any) -> SamplingParams:
        """What the engine is asked with: what the client wrote, and for the rest the model's own wishes.

        Args:
            defaults: those wishes.
            **chosen: what else follows from the request.
        Raises:
            WireError: a value out of its range.
        """
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        if self.stop is not None:
            given["stop"] = self.stop.values
        if self.logit_bias is not None:
            given["logit_bias"] = token_biases(self.logit_bias)
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            return sampled(defaults, **{**given, **chosen}, logprobs=self.num_logprobs(), output_kind=kind)
        except InvalidRequest as error:
            raise self.refusal(error) from None

    def form(self) -> StructuredOutputsParams | None:
        """The form that the text of the answer is to have.

        Raises:
            WireError: none that is known, or two.
            InvalidRequest: it says nothing.
        """
        if self.structured_outputs is None:
            return self.response_format.constraint()
        if self.response_format.type != "text":
            raise wrong("response_format", "left out beside structured_outputs", self.response_format.type)
        return StructuredOutputsParams(**known_fields(self.structured_outputs))

    def refusal(self, error: BaseException) -> WireError:
        """What the client is told about an exception, with the field under the name that it has here."""
        said = of_exception(error)
        said.param = self.written().get(said.param or "", said.param)
        return said

    def written(self) -> Mapping[str, str]:
        """Names of fields in the Responses protocol, and what they are called here."""
        return _WRITTEN


# ------------------------------------------------------------------------------------------- answers


def finish_reason(completion: CompletionOutput) -> tuple[str, str | int | None]:
    """How an answer ended: a word of OpenAI's, and what exactly it was (vLLM's `stop_reason`).

    Raises:
        WireError: it has not been finished.
    """
    match completion.finish_reason:
        case FinishReason.LENGTH:
            return "length", None
        case FinishReason.DEADLINE:
            return "length", "deadline"
        case FinishReason.SHUTDOWN:
            raise WireError(
                "The server is shutting down.", code="service_unavailable", status=503, type="server_error"
            )
        case FinishReason.ABORT:
            raise WireError(
                "The request was aborted.", code="request_aborted", status=503, type="server_error"
            )
        case FinishReason.ERROR:
            raise of_exception(RuntimeError())
        case FinishReason.STOP | None:
            return "stop", completion.stop_reason
        case other:
            return "stop", other.value


@attrs.define(eq=False)
class Usage:
    """Counts the tokens of an answer."""

    _prompt: int = 0
    _cached: int = 0
    _completion: int = 0

    def add(self, output: RequestOutput) -> None:
        """Take the next output of a prompt's answer."""
        self._completion += sum(len(completion.token_ids) for completion in output.outputs)

    def add_prompt(self, output: RequestOutput) -> None:
        """Count a prompt, once."""
        self._prompt += len(output.prompt_token_ids)
        self._cached += output.num_cached_tokens

    def body(self) -> dict[str, Any]:
        """As it is sent."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._completion,
            "total_tokens": self._prompt + self._completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }


def likeliest(logprobs: Mapping[int, Logprob], num_top: int) -> list[Logprob]:
    """The likeliest tokens at one place, the likeliest first."""
    return sorted(logprobs.values(), key=lambda one: -one.logprob)[:num_top]


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, MIN_LOGPROB)
