"""`/v1/completions`: its body, and the objects that answer it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.param_spec import ApiFamily
from triolet.core.request.params import SamplingParams
from triolet.errors import InvalidRequest
from triolet.protocol.errors import unsupported
from triolet.protocol.generation import GenerationRequest, finish_reason, finite, likeliest
from triolet.protocol.structuring import CONVERTER, Wrong

DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's
MAX_PROMPTS = 128

Choice = dict[str, Any]
"""An entry of `choices`."""


@attrs.frozen
class Prompts:
    """One prompt or several, each a text or token ids."""

    prompts: tuple[str | list[int], ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Prompts:
        """Structure them: a text, a list of texts, a list of token ids, or a list of those."""
        if isinstance(value, str) or (isinstance(value, list) and value and _are(int, value)):
            return cls((value,))
        if isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS and _are_prompts(value):
            return cls(tuple(value))
        raise Wrong(f"a text, token ids, or a list of at most {MAX_PROMPTS} of either", value)


def _are(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _are_prompts(values: list[Any]) -> bool:
    return _are(str, values) or all(isinstance(value, list) and _are(int, value) for value in values)


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationRequest):
    """A body of `/v1/completions`.

    Args:
        prompt: what is to be continued.
        echo: begin each answer with its prompt.
    """

    FAMILY = ApiFamily.COMPLETIONS

    prompt: Prompts
    echo: bool = False

    def check(self) -> None:
        """See `GenerationRequest`."""
        super().check()
        if self.echo and self.num_logprobs() is not None:
            raise unsupported("logprobs", "logprobs of an echoed prompt are not supported by this server")

    def num_logprobs(self) -> int | None:
        """See `GenerationRequest`."""
        return self.sampling.get("logprobs")

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """See `GenerationRequest.sampling_params`."""
        defaults = attrs.evolve(defaults, max_tokens=DEFAULT_MAX_TOKENS, min_tokens=0)
        try:
            return self.sampling_params(defaults, structured_outputs=self.form())
        except InvalidRequest as error:
            raise self.refusal(error) from None


@attrs.define(eq=False, kw_only=True)
class TextChoice:
    """One of the answers on its way: outputs of the engine in, choices out.

    Args:
        index: among the answers to all prompts.
        num_top: likeliest tokens at each place; None for no log-probabilities.
        echo: what it begins with.
    """

    index: int
    num_top: int | None
    echo: str = ""
    _num_chars: int = attrs.field(default=0, init=False)

    def add(self, completion: CompletionOutput) -> Choice:
        """The engine has something new: of kind DELTA, or all at once.

        Raises:
            WireError: it could not be finished.
        """
        text, self.echo = self.echo + completion.text, ""
        reason, detail = (None, None) if completion.finish_reason is None else finish_reason(completion)
        return {
            "index": self.index,
            "text": text,
            "logprobs": None if self.num_top is None else self._logprobs(completion, self.num_top),
            "finish_reason": reason,
            "stop_reason": detail,
        }

    def _logprobs(self, completion: CompletionOutput, num_top: int) -> dict[str, list[Any]]:
        tokens, offsets = [], []
        for token_id, at in zip(completion.token_ids, completion.logprobs or (), strict=False):
            tokens.append(at[token_id])
            offsets.append(self._num_chars)
            self._num_chars += len(at[token_id].decoded_token or "")
        return {
            "tokens": [one.decoded_token or "" for one in tokens],
            "token_logprobs": [finite(one.logprob) for one in tokens],
            "top_logprobs": [
                {one.decoded_token or "": finite(one.logprob) for one in likeliest(at, num_top)}
                for at in completion.logprobs or ()
            ],
            "text_offset": offsets,
        }


def text_completion(
    *,
    answer_id: str,
    created: int,
    model: str,
    choices: list[Choice],
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole answer, or one chunk of a stream: they have the same form."""
    body = {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "system_fingerprint": None,
    }
    return body if usage is None else {**body, "usage": dict(usage)}


CONVERTER.register_structure_hook(Prompts, Prompts.of)
