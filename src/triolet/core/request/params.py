"""What a caller may ask of sampling: `SamplingParams`, its ranges and its messages.

Names, defaults, ranges and messages are vLLM's, so that code written for it keeps its meaning. What this
engine does not honour is not a field here: an unknown keyword is a `TypeError`, never silently ignored.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping
from typing import Any, Self

import attrs

from triolet.core.request import param_validation as checks
from triolet.core.request.param_validation import refuse
from triolet.core.request.repetition_detection import RepetitionDetectionParams
from triolet.core.request.repetition_detection import repetition_detection as _repetition_detection
from triolet.core.request.structured_outputs import StructuredOutputsParams, structured_outputs
from triolet.errors import InvalidParams, shown

MIN_TEMPERATURE = 1e-2  # smaller positive ones overflow the division; vLLM raises them to this, too
MAX_N = 16_384  # vLLM's VLLM_MAX_N_SEQUENCES
FLOAT_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)
NOT_OFFERED = (
    *("watermarking", "prompt_logprob_token_ids", "prompt_logprob_start", "skip_clone"),
    *("routed_experts_prompt_start", "trace_decode_token_ids"),
)
"""Of vLLM's `from_optional`."""


class RequestOutputKind(enum.Enum):
    """How much each output of a stream carries."""

    CUMULATIVE = 0
    """The whole text and all ids so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """One output, at the end."""


@attrs.frozen(kw_only=True, field_transformer=checks.strict_plain_fields)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Args:
        n: answers to one prompt.
        presence_penalty: subtracted once from the logit of every token generated so far; [-2, 2].
        frequency_penalty: subtracted per occurrence of a generated token; [-2, 2].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or
            answer; > 0.
        temperature: divisor of the logits; 0 is greedy; [0, 2].
        top_p: keep the smallest set of tokens whose probabilities reach this; (0, 1].
        top_k: keep the k most likely tokens and their ties; 0 or -1 is off.
        min_p: drop tokens less likely than this share of the likeliest; [0, 1].
        seed: makes the answer reproducible whatever else runs; None or -1 draws one.
        stop: a text, or texts, that end the answer.
        stop_token_ids: token ids that end the answer.
        ignore_eos: go on past the model's end-of-sequence tokens.
        max_tokens: longest answer in tokens; None fills the context.
        min_tokens: tokens before which neither EOS nor a stop can end the answer.
        logprobs: log-probabilities of the chosen and this many likeliest tokens per position; -1 is the whole
            vocabulary.
        prompt_logprobs: the same for every token of the prompt but the first, which nothing comes before; the
            prefix cache is not read.
        flat_logprobs: give log-probabilities as columns (`FlatLogprobs`), which cost less memory.
        logprob_token_ids: log-probabilities of the chosen and exactly these tokens per position, instead of the
            likeliest; at most 128.
        detokenize: False leaves every text empty.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: if special tokens are shown, keep the spaces that the tokenizer puts between
            two of them.
        include_stop_str_in_output: keep the stop text (or the stop token's text) at the end.
        output_kind: what each output of the stream carries.
        stream_interval: tokens from one output of the stream to the next, after the first token's; the engine's own
            is the least there is.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: choose only among these.
        bad_words: texts whose tokens are never completed.
        repetition_detection: end the answer when its end repeats itself like this.
        skip_reading_prefix_cache: compute the whole prompt; done anyway if `prompt_logprobs` are asked for.
        structured_outputs: the form that the answer must have; begins where the reasoning ends, if there is any.
        thinking_token_budget: tokens of reasoning after which it is ended; None or -1 for as many as the model likes.
        extra_args: for plugins, of which there are none here: anything but None is refused.

    Raises:
        InvalidParams: a value of the wrong type or out of range; names the field, the rule and what came.
        TypeError: an unknown keyword.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = attrs.field(default=(), converter=checks.stop)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=checks.stop_token_ids)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = attrs.field(default=None, converter=checks.logprobs)
    prompt_logprobs: int | None = attrs.field(default=None, converter=checks.prompt_logprobs)
    flat_logprobs: bool = False
    logprob_token_ids: tuple[int, ...] = attrs.field(default=(), converter=checks.logprob_token_ids)
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: Mapping[int, float] | None = attrs.field(
        default=None, converter=checks.logit_bias, hash=False
    )
    allowed_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=checks.allowed_token_ids)
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=checks.bad_words)
    repetition_detection: RepetitionDetectionParams | None = attrs.field(
        default=None, converter=_repetition_detection
    )
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputsParams | None = attrs.field(
        default=None, converter=structured_outputs
    )
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, str] | None = attrs.field(default=None, converter=checks.nothing_for_plugins)

    def __new__(cls, **fields: Any) -> Self:
        """Refuse an unknown field in vLLM's words, which programs look for."""
        _refuse_unknown(cls, fields)
        return super().__new__(cls)

    @classmethod
    def from_optional(cls, *, logit_bias: Mapping[Any, Any] | None = None, **fields: Any) -> Self:
        """From the fields of a request, where None means nothing was said; arguments are those of the class.

        `logit_bias` may have texts as keys, and its values are cut to [-100, 100]. What vLLM has and this engine
        does not is let through as long as it has no value.
        """
        offered = {name: value for name, value in fields.items() if value or name not in NOT_OFFERED}
        _refuse_unknown(cls, offered)
        said = {name: value for name, value in offered.items() if value is not None or name == "max_tokens"}
        return cls(logit_bias=checks.clamped_logit_bias(logit_bias), **said)

    def __attrs_post_init__(self) -> None:
        for field in ("seed", "thinking_token_budget"):  # vLLM's words for "draw one" and "no end"
            if getattr(self, field) == -1:
                object.__setattr__(self, field, None)
        self._check_penalties()
        self._check_sampling()
        self._check_lengths()
        if self.temperature == 0.0:
            if self.n > 1:
                raise refuse("n", "must be 1 when using greedy sampling", self.n)
            # Greedy ignores the filters; saying so here lets equal requests compare equal.
            for field, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                object.__setattr__(self, field, neutral)
        elif self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature {self.temperature} is raised to {MIN_TEMPERATURE}", stacklevel=3)
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        for field in FLOAT_FIELDS:
            object.__setattr__(self, field, float(getattr(self, field)))

    def _check_penalties(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= (value := getattr(self, field)) <= 2.0:
                raise refuse(field, "must be in [-2, 2]", value)
        if self.repetition_penalty <= 0.0:
            raise refuse("repetition_penalty", "must be greater than zero", self.repetition_penalty)

    def _check_sampling(self) -> None:
        if self.temperature < 0.0:
            raise refuse("temperature", "must be non-negative", self.temperature)
        if self.temperature > 2.0:
            raise refuse("temperature", "must be in [0, 2]", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise refuse("top_p", "must be in (0, 1]", self.top_p)
        if self.top_k < -1:
            raise refuse("top_k", "must be 0 (disable), or at least 1", self.top_k)
        if not 0.0 <= self.min_p <= 1.0:
            raise refuse("min_p", "must be in [0, 1]", self.min_p)

    def _check_lengths(self) -> None:
        if self.n < 1:
            raise refuse("n", "must be at least 1", self.n)
        if self.n > MAX_N:
            raise refuse("n", f"must be at most {MAX_N}", self.n)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise refuse("max_tokens", "must be at least 1", self.max_tokens)
        if self.min_tokens < 0:
            raise refuse("min_tokens", "must be greater than or equal to 0", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse(
                "min_tokens", f"must be less than or equal to max_tokens={self.max_tokens}", self.min_tokens
            )
        for field in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, field)) is not None and count < -1:
                raise refuse(field, "must be non-negative or -1", count)
        if self.thinking_token_budget is not None and self.thinking_token_budget < 0:
            raise InvalidParams(
                "`thinking_token_budget` must be a non-negative integer or -1 for unlimited. "
                f"Got {shown(self.thinking_token_budget)}.",
                field="thinking_token_budget",
                got=self.thinking_token_budget,
            )
        if self.stream_interval is not None and self.stream_interval < 1:
            raise refuse("stream_interval", "must be at least 1", self.stream_interval)
        if self.stop and not self.detokenize:
            raise InvalidParams(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                field="stop",
                got=self.stop,
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise refuse("output_kind", "must be a RequestOutputKind", self.output_kind)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether outputs carry log-probabilities of the answer."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Hold token ids against the model's vocabulary.

        Args:
            vocab_size: number of token ids of the model.
        Raises:
            InvalidParams: an id is not in [0, vocab_size); no id at all is allowed; `logprobs` is another number than
                that of the `logprob_token_ids`.
        """
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParams(
                "allowed_token_ids is not None and empty!",
                field="allowed_token_ids",
                got=self.allowed_token_ids,
            )
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            self._check_token_ids(field, vocab_size)
        num_named = len(self.logprob_token_ids)
        if num_named and self.logprobs not in (None, num_named):
            raise InvalidParams(
                f"When both logprobs and logprob_token_ids are set, logprobs must equal len(logprob_token_ids). "
                f"Got logprobs={self.logprobs}, len(logprob_token_ids)={num_named}.",
                field="logprob_token_ids",
                got=num_named,
            )

    def _check_token_ids(self, field: str, vocab_size: int) -> None:
        wrong = [token_id for token_id in getattr(self, field) or () if not 0 <= token_id < vocab_size]
        if not wrong:
            return
        sentence = f"token_id(s) {shown(wrong)} in {field} contain out-of-vocab token ids."
        if field == "allowed_token_ids":
            sentence = f"allowed_token_ids contains out-of-vocab token id! Got {shown(wrong)}."
        raise InvalidParams(f"{sentence} Vocabulary size: {vocab_size}", field=field, got=wrong)


def _refuse_unknown(cls: type[SamplingParams], fields: Mapping[str, object]) -> None:
    known = {field.name for field in attrs.fields(cls)}
    if unknown := next((name for name in fields if name not in known), None):
        raise TypeError(f"Unexpected keyword argument {unknown!r}")
