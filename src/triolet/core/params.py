"""What a caller may ask of sampling: `SamplingParams`, its ranges and its messages.

Names, defaults, ranges and messages are vLLM's, so that code written for it keeps its meaning. What this
engine does not honour is not a field here: an unknown keyword is a `TypeError`, never silently ignored.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from triolet.errors import InvalidParams, shown

GREEDY_BELOW = 1e-5  # a temperature below this is 0: vLLM's _SAMPLING_EPS
MIN_TEMPERATURE = 1e-2  # smaller positive ones overflow the division; vLLM raises them to this, too
MAX_N = 16_384  # vLLM's VLLM_MAX_N_SEQUENCES
MAX_LOGPROBS = 20  # vLLM's max_logprobs
MAX_STOP_STRINGS = 128
MAX_STOP_STRING_CHARS = 4_096
MAX_TOKEN_LIST = 65_536  # entries of stop_token_ids, logit_bias or allowed_token_ids
MAX_BAD_WORDS = 128  # vLLM's VLLM_MAX_NUM_BAD_WORDS
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
FLOAT_FIELDS = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "min_p",
)


class RequestOutputKind(enum.Enum):
    """How much each output of a stream carries."""

    CUMULATIVE = 0
    """The whole text and all ids so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """One output, at the end."""


def _refuse(field: str, sentence: str, got: object) -> InvalidParams:
    return InvalidParams(f"{field} {sentence}, got {shown(got)}.", field=field, got=got)


def _number(value: Any, field: attrs.Attribute[Any]) -> float:
    """A finite number as it came: a message about its range shows what the caller wrote."""
    _finite(field.name, value)
    return cast("float", value)


def _finite(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _refuse(name, "must be a number", value)
    try:
        number = float(value)
    except OverflowError:
        raise _refuse(name, "must be finite", value) from None
    if not math.isfinite(number):
        raise _refuse(name, "must be finite", value)
    return number


def _integer(value: Any, field: attrs.Attribute[Any]) -> int:
    return _int64(field.name, value)


def _int64(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParams(f"{name} must be an integer, got {type(value).__name__}", field=name, got=value)
    if not MIN_INT64 <= value <= MAX_INT64:
        raise _refuse(name, "must fit in 64 bits", value)
    return value


def _integer_or_none(value: Any, field: attrs.Attribute[Any]) -> int | None:
    return None if value is None else _integer(value, field)


def _flag(value: Any, field: attrs.Attribute[Any]) -> bool:
    if not isinstance(value, bool):
        raise _refuse(field.name, "must be True or False", value)
    return value


def _logprobs(value: int | None) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None
    return None if value is None else _int64("logprobs", value)


def _items(name: str, value: object, limit: int) -> tuple[Any, ...]:
    """A list of at most `limit` entries; a str is not a list here."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise _refuse(name, "must be a list", value)
    if len(value) > limit:
        raise InvalidParams(
            f"{name} must have at most {limit} entries, got {len(value)}.", field=name, got=len(value)
        )
    return tuple(value)


def _stop(value: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = (
        (value,)
        if isinstance(value, str)
        else ()
        if value is None
        else _items("stop", value, MAX_STOP_STRINGS)
    )
    for string in strings:
        if not isinstance(string, str):
            raise _refuse("stop", "must contain only strings", value)
        if not string:
            raise InvalidParams("stop cannot contain an empty string.", field="stop", got=value)
        if len(string) > MAX_STOP_STRING_CHARS:
            raise _refuse(
                "stop", f"must contain strings of at most {MAX_STOP_STRING_CHARS} characters", len(string)
            )
    return strings


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    token_ids = _items(name, value, MAX_TOKEN_LIST)
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in token_ids):
        raise _refuse(name, "must contain only integers", value)
    return tuple(dict.fromkeys(token_ids))


def _stop_token_ids(value: Sequence[int] | None) -> tuple[int, ...]:
    return () if value is None else _token_ids("stop_token_ids", value)


def _allowed_token_ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if value is None else _token_ids("allowed_token_ids", value)


def _bad_words(value: Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    words = _items("bad_words", value, MAX_BAD_WORDS)
    if any(not isinstance(word, str) for word in words):
        raise _refuse("bad_words", "must contain only strings", value)
    if any(not word for word in words):
        raise InvalidParams(
            f"bad_words cannot contain an empty string. Got bad_words={shown(list(words))}",
            field="bad_words",
            got=value,
        )
    if longest := max((len(word) for word in words if len(word) > MAX_STOP_STRING_CHARS), default=0):
        raise _refuse(
            "bad_words", f"must contain words of at most {MAX_STOP_STRING_CHARS} characters", longest
        )
    return words


def _logit_bias(value: Mapping[int, float] | None) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", "must be a mapping from token id to bias", value)
    if len(value) > MAX_TOKEN_LIST:
        raise InvalidParams(
            f"logit_bias must have at most {MAX_TOKEN_LIST} entries, got {len(value)}.",
            field="logit_bias",
            got=len(value),
        )
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in value):
        raise _refuse("logit_bias", "must have integer token ids as keys", list(value))
    return {token_id: _finite("logit_bias", bias) for token_id, bias in value.items()}


def _strict_plain_fields(_cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """Give every plain number and flag the strict converter of its type, which names the field in its message."""
    converters: dict[str, Callable[[Any, attrs.Attribute[Any]], Any]] = {
        "int": _integer,
        "int | None": _integer_or_none,
        "float": _number,
        "bool": _flag,
    }
    return [
        field.evolve(converter=attrs.Converter(converters[str(field.type)], takes_field=True))
        if field.converter is None and str(field.type) in converters
        else field
        for field in fields
    ]


@attrs.frozen(kw_only=True, field_transformer=_strict_plain_fields)
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
        detokenize: False leaves every text empty.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop text (or the stop token's text) at the end.
        output_kind: what each output of the stream carries.
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: choose only among these.
        bad_words: texts whose tokens are never completed.

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
    stop: tuple[str, ...] = attrs.field(default=(), converter=_stop)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_stop_token_ids)
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = attrs.field(default=None, converter=_logprobs)
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = attrs.field(default=None, converter=_logit_bias, hash=False)
    allowed_token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_allowed_token_ids)
    bad_words: tuple[str, ...] = attrs.field(default=(), converter=_bad_words)

    def __attrs_post_init__(self) -> None:
        if self.seed == -1:  # vLLM's word for "draw one"
            object.__setattr__(self, "seed", None)
        self._check_penalties()
        self._check_sampling()
        self._check_lengths()
        if self.temperature < GREEDY_BELOW:
            if self.n > 1:
                raise _refuse("n", "must be 1 when using greedy sampling", self.n)
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
                raise _refuse(field, "must be in [-2, 2]", value)
        if self.repetition_penalty <= 0.0:
            raise _refuse("repetition_penalty", "must be greater than zero", self.repetition_penalty)

    def _check_sampling(self) -> None:
        if self.temperature < 0.0:
            raise _refuse("temperature", "must be non-negative", self.temperature)
        if self.temperature > 2.0:
            raise _refuse("temperature", "must be in [0, 2]", self.temperature)
        if not 0.0 < self.top_p <= 1.0:
            raise _refuse("top_p", "must be in (0, 1]", self.top_p)
        if self.top_k < -1:
            raise _refuse("top_k", "must be 0 (disable), or at least 1", self.top_k)
        if not 0.0 <= self.min_p <= 1.0:
            raise _refuse("min_p", "must be in [0, 1]", self.min_p)

    def _check_lengths(self) -> None:
        if self.n < 1:
            raise _refuse("n", "must be at least 1", self.n)
        if self.n > MAX_N:
            raise _refuse("n", f"must be at most {MAX_N}", self.n)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _refuse("max_tokens", "must be at least 1", self.max_tokens)
        if self.min_tokens < 0:
            raise _refuse("min_tokens", "must be greater than or equal to 0", self.min_tokens)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse(
                "min_tokens", f"must be less than or equal to max_tokens={self.max_tokens}", self.min_tokens
            )
        if self.logprobs is not None and self.logprobs < -1:
            raise _refuse("logprobs", "must be non-negative or -1", self.logprobs)
        if self.stop and not self.detokenize:
            raise InvalidParams(
                "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
                field="stop",
                got=self.stop,
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _refuse("output_kind", "must be a RequestOutputKind", self.output_kind)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Hold what depends on the model's vocabulary against it: token ids, and how many are asked for.

        Args:
            vocab_size: number of token ids of the model.
        Raises:
            InvalidParams: an id is not in [0, vocab_size), no id at all is allowed, or more than `MAX_LOGPROBS`
                log-probabilities are wanted per position.
        """
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParams(
                "allowed_token_ids is not None and empty!",
                field="allowed_token_ids",
                got=self.allowed_token_ids,
            )
        num_logprobs = vocab_size if self.logprobs == -1 else self.logprobs or 0
        if num_logprobs > MAX_LOGPROBS:
            raise InvalidParams(
                f"Requested sample logprobs of {num_logprobs}, which is greater than max allowed: {MAX_LOGPROBS}",
                field="logprobs",
                got=self.logprobs,
            )
        for field, token_ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", self.logit_bias or ()),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidParams(
                        f"{field} contains out-of-vocab token id! All must be in [0, {vocab_size}), "
                        f"got {shown(token_id)}.",
                        field=field,
                        got=token_id,
                    )
