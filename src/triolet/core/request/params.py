"""Sampling parameters: the fields of `SamplingParams`, their ranges, and the table that describes them.

Names, defaults, ranges and messages are vLLM's, so that code written for it keeps its meaning. A parameter that this
engine does not honour is not a field here: an unknown keyword is a `TypeError`, never silently ignored.

Each field carries a `ParameterSpec`: its name on every route, its flag, its documentation. Whatever else must know of
sampling parameters is derived from that (`SAMPLING_PARAMETERS`).
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any, NoReturn, Self

import attrs

from triolet.core.request import param_validation as checks
from triolet.core.request.param_validation import ApiFamily, PageControl, refuse, table_of
from triolet.core.request.param_validation import sampling_parameter as described
from triolet.core.request.repetition_detection import RepetitionDetectionParams
from triolet.core.request.repetition_detection import repetition_detection as _repetition_detection
from triolet.core.request.structured_outputs import StructuredOutputsParams, structured_outputs
from triolet.errors import InvalidParams, UnsupportedFeature, shown

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
    *("watermarking", "prompt_logprob_token_ids", "prompt_logprob_start"),
    *("routed_experts_prompt_start", "trace_decode_token_ids"),
)
"""Arguments of vLLM's that have no field here; they are accepted as long as they have no value."""
NO_DIFFERENCE = "skip_clone"  # parameters cannot be changed, and are never copied


CHAT, RESPONSES = ApiFamily.CHAT, ApiFamily.RESPONSES
PROGRAMS_ONLY = "of use to programs"


class RequestOutputKind(enum.Enum):
    """Content of each output of a stream."""

    CUMULATIVE = 0
    """The whole text and all ids so far."""
    DELTA = 1
    """Text and ids since the last output."""
    FINAL_ONLY = 2
    """One output, at the end."""


@attrs.frozen(kw_only=True, field_transformer=checks.strict_plain_fields)
class SamplingParams:
    """Sampling parameters and stop conditions of one request; `SAMPLING_PARAMETERS` documents each field.

    Raises:
        InvalidParams: a value has the wrong type or is out of range; names the field, the rule and the value.
        TypeError: an unknown keyword.
    """

    n: int = attrs.field(
        default=1,
        metadata=described(
            "Number of answers to one prompt.",
            refused={RESPONSES: "a response is one answer"},
            no_flag="a terminal shows one answer",
        ),
    )
    temperature: float = attrs.field(
        default=1.0,
        metadata=described(
            "Divisor of the logits, from 0 to 2; 0 always takes the most likely token.",
            per_row=True,
            control=PageControl(label="Temperature", kind="range", minimum=0, maximum=2, step=0.05),
        ),
    )
    top_p: float = attrs.field(
        default=1.0,
        metadata=described(
            "Keep the smallest set of most likely tokens with at least this total probability; above 0, at most 1.",
            per_row=True,
            control=PageControl(label="Top p", kind="range", minimum=0.05, maximum=1, step=0.05),
        ),
    )
    top_k: int = attrs.field(
        default=0,
        metadata=described(
            "Keep the k most likely tokens and their ties; 0 or -1 keeps all.",
            per_row=True,
            control=PageControl(label="Top k", kind="number", minimum=0, step=1),
        ),
    )
    min_p: float = attrs.field(
        default=0.0,
        metadata=described(
            "Drop tokens less likely than this share of the most likely one; from 0 to 1.",
            per_row=True,
            control=PageControl(label="Min p", kind="range", minimum=0, maximum=1, step=0.01),
        ),
    )
    repetition_penalty: float = attrs.field(
        default=1.0,
        metadata=described(
            "Divide positive and multiply negative logits of tokens in prompt or answer; above 0.",
            per_row=True,
            control=PageControl(label="Repetition penalty", kind="range", minimum=0.8, maximum=2, step=0.05),
        ),
    )
    presence_penalty: float = attrs.field(
        default=0.0,
        metadata=described(
            "Subtract once from the logit of every generated token; from -2 to 2.",
            per_row=True,
            control=PageControl(label="Presence penalty", kind="range", minimum=-2, maximum=2, step=0.1),
        ),
    )
    frequency_penalty: float = attrs.field(
        default=0.0,
        metadata=described(
            "Subtract from the logit of a token once per time that it was generated; from -2 to 2.",
            per_row=True,
            control=PageControl(label="Frequency penalty", kind="range", minimum=-2, maximum=2, step=0.1),
        ),
    )
    max_tokens: int | None = attrs.field(
        default=16,
        metadata=described(
            "Most tokens of the answer; None: as many as the context has room for.",
            named={RESPONSES: "max_output_tokens"},
            control=PageControl(label="Longest answer, tokens", kind="number", minimum=1, step=1),
        ),
    )
    min_tokens: int = attrs.field(
        default=0,
        metadata=described(
            "Tokens before which neither end-of-sequence nor a stop may end the answer.",
            per_row=True,
            no_flag=PROGRAMS_ONLY,
        ),
    )
    seed: int | None = attrs.field(
        default=None,
        metadata=described(
            "Seed of the random draws: the same seed gives the same answer; None or -1: a new one.",
            per_row=True,
            control=PageControl(label="Seed", kind="number", step=1),
        ),
    )
    stop: tuple[str, ...] = attrs.field(
        default=(),
        converter=checks.stop,
        metadata=described(
            "Text, or list of texts, that ends the answer, which is cut before it.",
            may_be_single=True,
            control=PageControl(label="Stop at", kind="line"),
        ),
    )
    stop_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=checks.stop_token_ids,
        metadata=described("Token ids that end the answer.", no_flag=PROGRAMS_ONLY),
    )
    ignore_eos: bool = attrs.field(
        default=False,
        metadata=described("Go on past the model's end-of-sequence tokens.", no_flag=PROGRAMS_ONLY),
    )
    include_stop_str_in_output: bool = attrs.field(
        default=False,
        metadata=described(
            "Keep the stop text, or the text of the stop token, at the end.", no_flag=PROGRAMS_ONLY
        ),
    )
    repetition_detection: RepetitionDetectionParams | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(_repetition_detection),
        metadata=described(
            "End the answer when its last tokens are one pattern, repeated.", no_flag=PROGRAMS_ONLY
        ),
    )
    thinking_token_budget: int | None = attrs.field(
        default=None,
        metadata=described(
            "Most tokens of reasoning, after which it is ended; None or -1: no limit.", no_flag=PROGRAMS_ONLY
        ),
    )
    structured_outputs: StructuredOutputsParams | None = attrs.field(
        default=None,
        converter=attrs.converters.optional(structured_outputs),
        metadata=described(
            "Form that the answer must have; it begins after the reasoning, if there is any.",
            no_flag=PROGRAMS_ONLY,
        ),
    )
    logit_bias: Mapping[int, float] | None = attrs.field(
        default=None,
        converter=checks.logit_bias,
        hash=False,
        metadata=described("Number to add to the logit, per token id.", per_row=True, no_flag=PROGRAMS_ONLY),
    )
    allowed_token_ids: tuple[int, ...] | None = attrs.field(
        default=None,
        converter=checks.allowed_token_ids,
        metadata=described("Choose only among these tokens.", per_row=True, no_flag=PROGRAMS_ONLY),
    )
    bad_words: tuple[str, ...] = attrs.field(
        default=(),
        converter=checks.bad_words,
        metadata=described("Texts that the answer never completes.", per_row=True, no_flag=PROGRAMS_ONLY),
    )
    logprobs: int | None = attrs.field(
        default=None,
        converter=checks.logprobs,
        metadata=described(
            "Log-probabilities of the chosen and this many most likely tokens per position; -1: the whole vocabulary.",
            per_row=True,
            named={CHAT: "top_logprobs", RESPONSES: "top_logprobs"},
            no_flag=PROGRAMS_ONLY,
        ),
    )
    prompt_logprobs: int | None = attrs.field(
        default=None,
        converter=checks.prompt_logprobs,
        metadata=described(
            "The same for every prompt token but the first; the prefix cache is not read.",
            per_row=True,
            refused="answers have no place for them; Completions give them with echo and logprobs",
            no_flag=PROGRAMS_ONLY,
        ),
    )
    logprob_token_ids: tuple[int, ...] = attrs.field(
        default=(),
        converter=checks.logprob_token_ids,
        metadata=described(
            "Log-probabilities of the chosen and exactly these tokens, instead of the most likely; at most 128.",
            per_row=True,
            no_flag=PROGRAMS_ONLY,
        ),
    )
    flat_logprobs: bool = attrs.field(
        default=False,
        metadata=described(
            "Give log-probabilities as columns (`FlatLogprobs`), which take less memory.",
            refused="JSON has one form of log-probabilities",
            no_flag=PROGRAMS_ONLY,
        ),
    )
    detokenize: bool = attrs.field(
        default=True,
        metadata=described(
            "False leaves every text empty.", refused="answers are texts", no_flag="a terminal shows text"
        ),
    )
    skip_special_tokens: bool = attrs.field(
        default=True, metadata=described("Leave special tokens out of the text.", no_flag=PROGRAMS_ONLY)
    )
    spaces_between_special_tokens: bool = attrs.field(
        default=True,
        metadata=described(
            "Keep the tokenizer's spaces between special tokens, if those are shown.", no_flag=PROGRAMS_ONLY
        ),
    )
    output_kind: RequestOutputKind = attrs.field(
        default=RequestOutputKind.CUMULATIVE,
        metadata=described(
            "Content of each output of the stream.",
            refused="stream decides it",
            no_flag="a terminal shows text as it comes",
        ),
    )
    stream_interval: int | None = attrs.field(
        default=None,
        metadata=described(
            "Tokens from one output of the stream to the next, after the first; the engine's own is the smallest.",
            no_flag="--stream-interval is the engine's",
        ),
    )
    skip_reading_prefix_cache: bool | None = attrs.field(
        default=None,
        metadata=described(
            "Compute the whole prompt; always so with `prompt_logprobs`.", no_flag=PROGRAMS_ONLY
        ),
    )
    extra_args: Mapping[str, str] | None = attrs.field(
        default=None,
        converter=checks.nothing_for_plugins,
        metadata=described(
            "Arguments of plugins, which this engine does not have: anything but None is refused.",
            refused="this engine has no plugins",
            no_flag="this engine has no plugins",
        ),
    )

    def __new__(cls, **fields: Any) -> Self:
        """Refuse an unknown field in vLLM's words, which programs look for."""
        _refuse_unknown(cls, _offered(fields))
        return super().__new__(cls)

    @classmethod
    def from_optional(cls, *, logit_bias: Mapping[Any, Any] | None = None, **fields: Any) -> Self:
        """Build the parameters from the fields of a request, where None means that nothing was given.

        `logit_bias` may have strings as keys, and its values are cut to [-100, 100]. Names that vLLM has and this
        engine does not are accepted as long as they have no value.
        """
        offered = _offered(fields)
        _refuse_unknown(cls, offered)
        # None is a value of `max_tokens`: no limit. Elsewhere it means that nothing was given.
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
            # All answers would be the same.
            if self.n > 1:
                raise refuse("n", "must be 1 when using greedy sampling", self.n)
            # Greedy sampling ignores the filters; neutral values let equal requests compare equal.
            for field, neutral in (("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
                object.__setattr__(self, field, neutral)
        elif self.temperature < MIN_TEMPERATURE:
            warnings.warn(f"temperature {self.temperature} is raised to {MIN_TEMPERATURE}", stacklevel=4)
            object.__setattr__(self, "temperature", MIN_TEMPERATURE)
        # 1 and 1.0 are the same parameter, and whatever computes with it gets a float.
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
        # Also refuses nan, which no comparison accepts.
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
        # Stop strings are looked for in the text.
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
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        """True if outputs carry log-probabilities of the answer."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def num_logprobs(self) -> int | None:
        """Number of log-probabilities at each token of the answer; None for none."""
        return self.logprobs if self.logprobs is not None else len(self.logprob_token_ids or ()) or None

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Tokens that end the answer, without the model's own, which the engine adds where they are not ignored."""
        return set(self.stop_token_ids)

    def clone(self) -> Self:
        """Return the parameters themselves, which nothing can change; vLLM's return a copy."""
        return self

    def verify(self, *arguments: object, **keywords: object) -> NoReturn:
        """Refuse the call: parameters are checked when they are made, and by the engine against its model.

        Raises:
            UnsupportedFeature: always.
        """
        raise UnsupportedFeature(
            "verify is not offered: parameters are checked when they are made, and when a request is",
            field="verify",
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check token ids against the model's vocabulary.

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


def _offered(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments without those of vLLM's that ask for nothing."""
    if not _THEIRS & fields.keys():
        return fields
    left_out = {name for name in _THEIRS if name == NO_DIFFERENCE or not fields.get(name)}
    return {name: value for name, value in fields.items() if name not in left_out}


_THEIRS = frozenset((*NOT_OFFERED, NO_DIFFERENCE))


def _refuse_unknown(cls: type[SamplingParams], fields: Mapping[str, object]) -> None:
    known = {field.name for field in attrs.fields(cls)}
    if unknown := next((name for name in fields if name not in known), None):
        raise TypeError(f"Unexpected keyword argument {unknown!r}")


# attrs makes an `__init__` of the fields alone, and has no place for arguments that are taken and not kept.
_of_fields = SamplingParams.__init__


@wraps(_of_fields)
def _init(self: SamplingParams, **fields: Any) -> None:
    _of_fields(self, **_offered(fields))


SamplingParams.__init__ = _init  # type: ignore[method-assign]

SAMPLING_PARAMETERS = table_of(SamplingParams)
"""All fields with their names and documentation; routes, command line, docs and page are derived from it."""
