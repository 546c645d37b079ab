"""Prompts in vLLM's forms, among them mappings that carry a `cache_salt`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NotRequired, TypedDict

import attrs

from triolet.core.request.grammar_state import Constraint
from triolet.core.request.lora import LoRARequest
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.tokenizer_interface import Tokenized
from triolet.errors import InvalidPrompt, InvalidRequest, shown


class TextPrompt(TypedDict):
    """Prompt that is a text; a plain mapping, as in vLLM."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Prompt that is token ids; a plain mapping, as in vLLM."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  # text of the ids; shown in the output, and not checked
    cache_salt: NotRequired[str]


@attrs.define
class EngineCoreRequest:
    """Request in the form in which vLLM's front hands it to its core: a prompt that brings its own parameters.

    Args:
        request_id: the id; that of the call counts.
        prompt_token_ids: the prompt.
        mm_features: None: there are no inputs but texts and tokens.
        sampling_params: of a request that generates.
        pooling_params: of a pooled request.
        arrival_time: not used: a request arrives when it is added.
        lora_request: LoRA adapter that computes the answer.
        cache_salt: see `triolet.Engine.generate`.
        data_parallel_rank: 0, or None.
        prompt_embeds: None: prompts are token ids.
        priority: lower goes first under the `priority` policy.
        trace_headers: of the trace that it belongs to.
    """

    request_id: str
    prompt_token_ids: Sequence[int] | None
    mm_features: None = None
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    arrival_time: float | None = None
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: None = None
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None

    @property
    def params(self) -> SamplingParams | PoolingParams | None:
        """Parameters of either kind."""
        return self.pooling_params if self.sampling_params is None else self.sampling_params

    def fill(self, **given: Any) -> tuple[Any, ...]:
        """Return the arguments of a call with this prompt, in their order: those without a value are the request's.

        Args:
            **given: arguments of the call, by the names here.
        Raises:
            InvalidRequest: it has inputs beside token ids, or no token ids.
        """
        for name in ("mm_features", "prompt_embeds"):
            if getattr(self, name):
                raise InvalidRequest(f"{name} must be None: prompts are token ids", field=name)
        if self.prompt_token_ids is None:
            raise InvalidPrompt(
                "prompt_token_ids must be a list of integers; got None", field="prompt_token_ids"
            )
        return tuple(value or getattr(self, name) for name, value in given.items())


@attrs.frozen
class PreparedPrompt:
    """Prompt that has been encoded and checked, together with its parameters; made by `LLMEngine.prepare`."""

    tokenized: Tokenized
    constraint: Constraint | None  # what its parameters bind the answer to; the grammar has been compiled
    cache_salt: str | None


def check_max_log_len(value: Any) -> int | None:
    """Check the length of prompts in the log, and return it.

    Raises:
        InvalidRequest: it is neither None nor a number of at least 0.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise InvalidRequest(
            f"max_log_len must be None or a number of at least 0; got {shown(value)}",
            field="max_log_len",
            got=value,
        )
    return value


ENGINE_INPUTS: Final = ("token", "text")


def split_prompt(
    prompt: Any, prompt_token_ids: Sequence[int] | None = None, cache_salt: str | None = None
) -> tuple[Any, str | None]:
    """Return the prompt as `Engine.generate` takes it, and its salt.

    Args:
        prompt: of any form; None beside `prompt_token_ids`.
        prompt_token_ids: the ids, if they were given as an argument of their own.
        cache_salt: the salt, if it was given as an argument of its own.
    Raises:
        InvalidPrompt: two salts, a salt that is no string, or a prompt beside ids that is no text.
    """
    if isinstance(prompt, Mapping) and prompt.get("type") in ENGINE_INPUTS:
        # vLLM's `EngineInput`: a prompt that its renderer has made. When it came counts from its admission here.
        prompt = {key: value for key, value in prompt.items() if key not in ("type", "arrival_time")}
    if isinstance(prompt, Mapping) and "cache_salt" in prompt:
        if cache_salt is not None:
            raise InvalidPrompt("cache_salt must be given once", field="cache_salt", got=cache_salt)
        prompt, cache_salt = {k: v for k, v in prompt.items() if k != "cache_salt"}, prompt["cache_salt"]
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise InvalidPrompt("cache_salt must be a string", field="cache_salt", got=cache_salt)
    if prompt_token_ids is None:
        return prompt, cache_salt
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidPrompt("prompt must be a text beside prompt_token_ids", field="prompt", got=type(prompt))
    beside = {} if prompt is None else {"prompt": prompt}
    return {"prompt_token_ids": prompt_token_ids, **beside}, cache_salt
