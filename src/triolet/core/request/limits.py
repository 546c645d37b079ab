"""Limits of one request, set by the operator of an engine; narrower than the ranges of `SamplingParams`."""

from __future__ import annotations

import attrs

from triolet.core.request.param_validation import refuse, too_many
from triolet.core.request.params import SamplingParams
from triolet.errors import InvalidParams

MAX_PROMPT_ENTRIES = 2**22
"""Log-probabilities kept of one prompt, some 200 bytes each; at 20 per token they suffice for 200,000 tokens."""


@attrs.frozen(kw_only=True)
class RequestLimits:
    """Limits of one engine, under the names of the fields of `EngineConfig`, which errors name.

    Args:
        max_n: answers to one prompt.
        max_logprobs: most likely tokens per position; -1 is the whole vocabulary.
        max_stop_strings: entries of `stop`.
        max_logit_bias: entries of `logit_bias`.
        max_bad_words: entries of `bad_words`.
    """

    max_n: int
    max_logprobs: int
    max_stop_strings: int
    max_logit_bias: int
    max_bad_words: int

    def check(self, params: SamplingParams, vocab_size: int) -> None:
        """Check the parameters of a request against the limits.

        Args:
            params: of the request.
            vocab_size: of the model; the number that -1 log-probabilities stand for.
        Raises:
            InvalidParams: a value exceeds its limit; names the field, the limit and the value.
        """
        if params.n > self.max_n:
            raise refuse("n", f"must be at most {self.max_n} (max_n)", params.n)
        for field, limit in (
            ("stop", "max_stop_strings"),
            ("logit_bias", "max_logit_bias"),
            ("bad_words", "max_bad_words"),
        ):
            count = len(getattr(params, field) or ())
            if count > getattr(self, limit):
                raise too_many(field, getattr(self, limit), count, limit)
        self._check_logprobs("logprobs", "sample", params.logprobs, vocab_size)
        self._check_logprobs("prompt_logprobs", "prompt", params.prompt_logprobs, vocab_size)

    def check_prompt(self, params: SamplingParams, num_prompt_tokens: int, vocab_size: int) -> None:
        """Check the number of log-probabilities of a prompt against the limit.

        Raises:
            InvalidParams: the prompt is too long for that many per token.
        """
        if params.prompt_logprobs is None:
            return
        per_token = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs + 1
        if per_token * num_prompt_tokens > MAX_PROMPT_ENTRIES:
            most = max(MAX_PROMPT_ENTRIES // num_prompt_tokens - 1, 0)
            raise refuse(
                "prompt_logprobs",
                f"must be at most {most} for a prompt of {num_prompt_tokens} tokens",
                params.prompt_logprobs,
            )

    def _check_logprobs(self, field: str, kind: str, wanted: int | None, vocab_size: int) -> None:
        most = vocab_size if self.max_logprobs == -1 else self.max_logprobs
        count = vocab_size if wanted == -1 else wanted or 0
        if count > most:
            raise InvalidParams(
                f"Requested {kind} logprobs of {count}, which is greater than max allowed: {most} (max_logprobs)",
                field=field,
                got=wanted,
            )
