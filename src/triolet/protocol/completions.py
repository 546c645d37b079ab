"""Request body and answer objects of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from triolet.core.json_text import giving_way
from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import SamplingParams
from triolet.core.request.prompt import Prompt, TokenIds
from triolet.errors import InvalidRequest
from triolet.protocol.errors import wrong
from triolet.protocol.generation import GenerationRequest, finish_reason, finite, likeliest, shown_token
from triolet.protocol.json.structuring import CONVERTER, Wrong

DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's
MAX_PROMPTS = 128

Choice = dict[str, Any]
"""Entry of `choices`."""


@attrs.frozen
class Prompts:
    """One prompt or several, each a text or token ids."""

    prompts: tuple[str | TokenIds, ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> Prompts:
        """Build the prompts from a text, a list of texts, a list of token ids, or a list of such lists."""
        if isinstance(value, str):
            return cls((value,))
        if isinstance(value, list) and value and _are(int, value):
            return cls((TokenIds(value),))
        if isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS and _are_prompts(value):
            return cls(tuple(one if isinstance(one, str) else TokenIds(one) for one in value))
        raise Wrong(f"a text, token ids, or a list of at most {MAX_PROMPTS} of either", value)


def _are(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in giving_way(values))


def _are_prompts(values: list[Any]) -> bool:
    return _are(str, values) or all(isinstance(value, list) and _are(int, value) for value in values)


@attrs.frozen(kw_only=True)
class CompletionRequest(GenerationRequest):
    """Body of `/v1/completions`."""

    FAMILY = ApiFamily.COMPLETIONS

    prompt: Prompts  # one prompt or several, each with answers of its own
    # True to begin each answer with its prompt; with `logprobs`, also with those of its tokens.
    echo: bool = False
    # False to leave out the special tokens that the tokenizer puts around a text, such as its first token.
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.triolet_events and len(self.prompt.prompts) > 1:
            raise wrong("triolet_events", "left out beside several prompts", True)

    def num_logprobs(self) -> int | None:
        return self.sampling.get("logprobs")

    @property
    def engine_prompts(self) -> tuple[Prompt, ...]:
        """Prompts for `Engine.generate`."""
        if self.add_special_tokens:
            return self.prompt.prompts
        return tuple(
            {"prompt": one, "add_special_tokens": False} if isinstance(one, str) else one
            for one in self.prompt.prompts
        )

    @property
    def generates(self) -> bool:
        """False if only the prompt is wanted back: `echo` with `max_tokens` 0."""
        return not (self.echo and self.sampling.get("max_tokens") == 0)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters for the engine: those of the client, and the model's defaults for the rest.

        Raises:
            WireError: a value out of its range.
        """
        defaults = attrs.evolve(defaults, max_tokens=DEFAULT_MAX_TOKENS, min_tokens=0)
        chosen: dict[str, Any] = {}
        if self.echo:
            chosen["prompt_logprobs"] = self.num_logprobs()
        if not self.generates:
            # The step that computes the log-probabilities of the prompt samples a token in any case.
            chosen |= {"max_tokens": 1, "min_tokens": 0}
        try:
            return self.sampling_params(defaults, structured_outputs=self.form(), **chosen)
        except InvalidRequest as error:
            raise self.refusal(error) from None


@attrs.frozen(kw_only=True)
class Echo:
    """Prompt at the beginning of an answer."""

    text: str = ""
    tokens: tuple[str, ...] = ()  # text of each token, if log-probabilities were requested
    token_ids: tuple[int, ...] = ()  # ids of these
    # Per token, None for the first one; None if they were not requested.
    logprobs: Sequence[Mapping[int, Logprob] | None] | None = None

    @classmethod
    def of(cls, output: RequestOutput, decode: Callable[[Sequence[int]], str]) -> Echo:
        """Return the echo of a prompt.

        Args:
            output: first one of the answer, with the log-probabilities of the prompt if they were requested.
            decode: returns the text of token ids, special tokens included.
        """
        text = decode(output.prompt_token_ids) if output.prompt is None else output.prompt
        if output.prompt_logprobs is None:
            return cls(text=text)
        positions: Sequence[Mapping[int, Logprob] | None] = output.prompt_logprobs
        tokens = [
            decode([token_id]) if position is None else position[token_id].decoded_token or ""
            for token_id, position in zip(output.prompt_token_ids, positions, strict=True)
        ]
        return cls(
            text=text, tokens=tuple(tokens), token_ids=tuple(output.prompt_token_ids), logprobs=positions
        )


@attrs.define(eq=False, kw_only=True)
class TextChoice:
    """Builder of one entry of `choices` from the outputs of the engine."""

    index: int  # among the answers to all prompts
    num_top: int | None  # most likely tokens per position, -1 for all; None for no log-probabilities
    echo: Echo = Echo()  # prompt that the answer begins with
    generates: bool = True  # False if the answer is only the prompt
    shows_ids: bool = (
        False  # True to show `token_id:ID` in place of a token's text, beside its log-probability
    )
    # Ids of the prompt, to send with the first piece, and those of the answer with each; None to send no ids.
    prompt_token_ids: Sequence[int] | None = None
    _num_chars: int = attrs.field(default=0, init=False)

    def add(self, completion: CompletionOutput) -> Choice:
        """Return the entry for an output, of kind DELTA or the only one.

        Raises:
            WireError: the answer could not be finished.
        """
        echo, self.echo = self.echo, Echo()
        reason, detail = (None, None) if completion.finish_reason is None else finish_reason(completion)
        if not self.generates:
            completion = attrs.evolve(completion, text="", token_ids=(), logprobs=())
            # Nothing is generated, so this reason says nothing; only the end of the server means a missing prompt.
            reason, detail = reason and "length", detail if detail == "shutdown" else None
        return {
            "index": self.index,
            "text": echo.text + completion.text,
            "logprobs": None if self.num_top is None else self._logprobs(echo, completion, self.num_top),
            "finish_reason": reason,
            "stop_reason": detail,
            **self._ids(completion),
        }

    def _ids(self, completion: CompletionOutput) -> dict[str, list[int]]:
        prompt = self.prompt_token_ids
        if prompt is None:
            return {}
        self.prompt_token_ids = ()
        of_prompt = {"prompt_token_ids": list(prompt)} if prompt else {}
        return {**of_prompt, "token_ids": list(completion.token_ids)}

    def _logprobs(self, echo: Echo, completion: CompletionOutput, num_top: int) -> dict[str, list[Any]]:
        texts = list(echo.tokens)
        positions = list(zip(echo.token_ids, echo.logprobs or (), strict=True))
        for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=False):
            texts.append(position[token_id].decoded_token or "")
            positions.append((token_id, position))
        return {
            "tokens": [
                shown_token(token_id, text, as_id=self.shows_ids)
                for (token_id, _), text in zip(positions, texts, strict=True)
            ],
            "token_logprobs": [at and finite(at[token_id].logprob) for token_id, at in positions],
            "top_logprobs": [
                at and _top_logprobs(token_id, at, num_top, as_ids=self.shows_ids)
                for token_id, at in positions
            ],
            "text_offset": self._offsets(texts, echo.text),
        }

    def _offsets(self, tokens: Sequence[str], text: str) -> list[int]:
        """Return where each token begins in the whole text, characters."""
        offsets = []
        for place, token in enumerate(tokens):
            offsets.append(self._num_chars)
            # A token that begins every prompt, such as <s>, is not part of a text that the client wrote.
            if place > 0 or not text or text.startswith(token):
                self._num_chars += len(token)
        return offsets


def _top_logprobs(
    chosen: int, position: Mapping[int, Logprob], num_top: int, *, as_ids: bool
) -> dict[str, float]:
    """Return the most likely tokens of a position by their text or id, and the chosen one with them, as OpenAI does."""
    top: dict[str, float] = {}
    for token_id in (*likeliest(position, num_top), chosen):
        one = position[token_id]
        # Of tokens with the same text, the most likely one stays.
        top.setdefault(shown_token(token_id, one.decoded_token, as_id=as_ids), finite(one.logprob))
    return top


def text_completion(
    *,
    answer_id: str,
    created: int,
    model: str,
    choices: list[Choice],
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the whole answer, or a chunk of a stream, which has the same form."""
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
