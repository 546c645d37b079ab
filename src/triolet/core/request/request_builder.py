"""Construction of a `Request` from a prompt and its parameters, with every check of a request.

Two steps need a tokenizer or a compiler of grammars, which may be in other threads or processes. So these steps are
generators: they yield what they need, a `Tokenize` or a grammar to compile, and are sent the result. The driver decides
how it is computed, and whether to wait for it.

`RequestLimits` are set by the operator of an engine; they are narrower than the ranges of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

import attrs

from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request.grammar_state import Constraint, ThinkingRules
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import LoadedModel, ModelInfo
from triolet.core.request.param_validation import refuse, too_many
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import (
    EMBED,
    GENERATE,
    POOLED,
    POOLED_WITHOUT_CACHE,
    TOKEN_EMBED,
    PoolingInfo,
    PoolingParams,
    check_size,
    check_task,
    resolved,
)
from triolet.core.request.prompt import ChatPrompt, ParsedPrompt, TextPair, check_prompt
from triolet.core.request.prompt_adapter import SoftPrompt
from triolet.core.request.request import Request, TraceHeaders, fan_out
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.request.tokenizer_interface import MAX_LISTED_TOKENS, Tokenize, Tokenized
from triolet.core.tools.answer import TemplateOwner, reasoning_parser_named
from triolet.core.tools.harmony import opens_final
from triolet.core.tools.reasoning import HARMONY, REASONING_FORMATS, ReasoningFormat, ReasoningState
from triolet.errors import InvalidParams, InvalidPrompt, PromptTooLong, UnsupportedFeature

MAX_PROMPT_ENTRIES = 2**22
"""Log-probabilities kept of one prompt, some 200 bytes each; at 20 per token they suffice for 200,000 tokens."""


@attrs.frozen(kw_only=True)
class RequestLimits:
    """Limits of one engine, under the names of the fields of `EngineConfig`, which errors name."""

    max_n: int  # answers to one prompt
    max_logprobs: int  # most likely tokens per position; -1 is the whole vocabulary
    max_stop_strings: int  # entries of `stop`
    max_logit_bias: int  # entries of `logit_bias`
    max_bad_words: int  # entries of `bad_words`

    def check(self, params: SamplingParams, vocab_size: int) -> None:
        """Check the parameters of a request against the limits.

        Args:
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
        # The token that stands there comes on top of the likeliest.
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


Need = Tokenize | StructuredOutputsParams
"""Texts to encode, answered with a `Tokenized`, or a grammar to compile, answered with None."""

TAIL_TOKENS = 64  # of a prompt: mostly enough for the mark that begins reasoning, and what comes after it
NEVER = float("inf")


class RequestConfig(Protocol):
    """Fields of an `EngineConfig` that limit or shape a request."""

    @property
    def request_limits(self) -> RequestLimits:
        """Limits of the parameters."""
        ...

    @property
    def stream_interval(self) -> int:
        """Tokens from one output of a stream to the next."""
        ...

    @property
    def max_grammar_bytes(self) -> int:
        """Longest grammar, bytes."""
        ...

    @property
    def reasoning_parser(self) -> str:
        """Format of reasoning, `auto` or `none`."""
        ...

    @property
    def model_name(self) -> str:
        """Name under which the model is shown."""
        ...


@attrs.frozen(eq=False)
class RequestBuilder:
    """Builder of the requests of one engine, with their checks."""

    config: RequestConfig
    model: LoadedModel  # model and tokenizer; loaded before the first request
    draw_seed: Callable[[], int]  # draws a seed for an answer where the caller gave none
    _limits: RequestLimits = attrs.field(init=False)

    @_limits.default
    def _request_limits(self) -> RequestLimits:
        return self.config.request_limits

    @property
    def _info(self) -> ModelInfo:
        assert self.model.info is not None, "the model is loaded before requests are admitted"
        return self.model.info

    def check(self, params: SamplingParams | None) -> SamplingParams:
        """Check parameters against the engine and the model; return them, by default the model's own.

        Raises:
            InvalidRequest: names the parameter, the limit and the value.
        """
        if not self._info.generates:
            check_task(GENERATE, self._info.tasks)
        params = params or self._info.generation.sampling_params()
        vocab_size = self._info.vocab_size
        self._limits.check(params, vocab_size)
        params.check_vocabulary(vocab_size)
        for field, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts and self.model.tokenizer is None:
                raise UnsupportedFeature(
                    f"{field} must be empty: the model has no tokenizer", field=field, got=texts
                )
        return params

    def check_pooling(self, params: PoolingParams) -> tuple[SamplingParams, PoolingParams]:
        """Check the parameters of a pooled request against the model.

        Returns:
            What stands in the place of sampling parameters, and the parameters with their task filled in.
        Raises:
            InvalidRequest: names the parameter, the rule and the value.
        """
        info = self._info
        pooling = resolved(params, info.pooling, info.tasks, self.config.model_name, info.vocab_size)
        assert info.pooling is not None and pooling.task is not None
        reads_cache = info.pooling.reads_prefix_cache(pooling.task)
        return POOLED if reads_cache else POOLED_WITHOUT_CACHE, pooling

    def tokenize_pooled(
        self, prompt: ParsedPrompt, params: PoolingParams, most_tokens: int | None, keeps_end: bool = False
    ) -> Generator[Need, Tokenized | None, Tokenized]:
        """Encode the prompt of a pooled request, and check it against the model.

        Args:
            most_tokens: length to which a longer prompt is cut; -1 is the longest that fits.
            keeps_end: True to cut it at its beginning, False at its end.
        Raises:
            InvalidRequest: the model cannot serve it.
        """
        info, content, adds = self._info, prompt.content, prompt.add_special_tokens
        assert info.pooling is not None
        empty: str | ChatPrompt = ""
        if isinstance(content, str) and params.task in (EMBED, TOKEN_EMBED):
            content, empty = _embedded(info.pooling, content), _embedded(info.pooling, "")
        if prompt.token_ids is not None:
            tokenized = Tokenized(prompt.text, prompt.token_ids, ())
        else:
            is_cut = most_tokens is not None
            longest = max(info.max_model_len, MAX_LISTED_TOKENS) if is_cut else info.max_model_len
            message = Tokenize(content, add_special_tokens=adds, max_tokens=longest)
            tokenized = yield from self._encoded(message)
            if (num_tokens := tokenized.num_unlisted) and is_cut:
                rule = f"must have at most {longest} tokens for truncate_prompt_tokens to cut it"
                shown_number = tokenized.shown_num_tokens
                raise InvalidPrompt(f"prompt {rule}; got {shown_number}", field="prompt", got=num_tokens)
            if num_tokens:
                raise PromptTooLong(
                    num_tokens, info.max_model_len, has_answer=False, is_estimate=tokenized.is_estimate
                )
        most = info.max_model_len if most_tokens == -1 else most_tokens
        if most is not None and (num_cut := len(tokenized.token_ids) - most) > 0 and keeps_end:
            # The second text of a pair moves with the tokens.
            start = params.token_type_start if prompt.token_ids is not None else tokenized.token_type_start
            start = None if start is None else max(0, start - num_cut)
            tokenized = attrs.evolve(
                tokenized, token_ids=tokenized.token_ids[num_cut:], token_type_start=start
            )
        elif most is not None and num_cut > 0:
            kept: tuple[int, ...] = ()
            if prompt.token_ids is None:
                # The tokens that stand after every text stay: the last one is what LAST pooling takes.
                around = (yield from self._encoded(Tokenize(empty, add_special_tokens=adds))).token_ids
                kept = _common_ending(around, tokenized.token_ids)
            cut = tokenized.token_ids[: max(0, most - len(kept))] + kept[len(kept) - min(most, len(kept)) :]
            tokenized = attrs.evolve(tokenized, token_ids=cut)
        check_prompt(
            tokenized.token_ids,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            has_answer=False,
        )
        check_size(params, info.pooling, len(tokenized.token_ids))
        # most models see a pair as one text
        return tokenized if info.pooling.takes_token_types else attrs.evolve(tokenized, token_type_start=None)

    def tokenize(
        self, prompt: ParsedPrompt, params: SamplingParams
    ) -> Generator[Need, Tokenized | None, Tokenized]:
        """Encode a prompt, and check it against the model.

        Raises:
            InvalidRequest: the model cannot serve it.
        """
        if isinstance(prompt.content, TextPair):
            raise InvalidPrompt("text_pair must be left out: an answer continues one text", field="text_pair")
        info = self._info
        if prompt.token_ids is not None and not params.bad_words:
            tokenized = Tokenized(prompt.text, prompt.token_ids, ())
        else:
            message = Tokenize(
                prompt.content,
                params.bad_words,
                add_special_tokens=prompt.add_special_tokens,
                max_tokens=info.max_model_len,
            )
            tokenized = yield from self._encoded(message)
            if tokenized.num_unlisted:
                raise PromptTooLong(
                    tokenized.num_tokens, info.max_model_len, is_estimate=tokenized.is_estimate
                )
            if prompt.token_ids is not None:
                tokenized = attrs.evolve(tokenized, text=prompt.text, token_ids=prompt.token_ids)
        token_ids = tokenized.token_ids
        check_prompt(token_ids, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        self._limits.check_prompt(params, len(token_ids), info.vocab_size)
        return tokenized

    def _encoded(self, message: Tokenize) -> Generator[Need, Tokenized | None, Tokenized]:
        if self.model.tokenizer is None:
            raise UnsupportedFeature("prompt must be token ids: the model has no tokenizer", field="prompt")
        tokenized = yield message
        assert tokenized is not None, "a Tokenize is answered with a Tokenized"
        return tokenized

    def constrain(
        self, params: SamplingParams, prompt: Tokenized
    ) -> Generator[Need, Tokenized | None, Constraint | None]:
        """Have the grammar of an answer compiled, and find the rules of its reasoning.

        Raises:
            InvalidParams: the grammar is too large, or cannot be compiled.
            UnsupportedFeature: the model has no tokenizer that grammars work with, or no known format of reasoning.
        """
        grammar, budget = params.structured_outputs, params.thinking_token_budget
        if budget == -1:
            budget = None
        if grammar is None and budget is None:
            return None
        if grammar is not None and grammar.covers_reasoning:
            self._check_covered(budget, prompt)
            thinking = None
        else:
            thinking = yield from self._thinking_rules(budget, prompt, is_bound=grammar is not None)
        if grammar is not None:
            grammar.check_size(self.config.max_grammar_bytes)
            yield grammar
        return Constraint(grammar=grammar, thinking=thinking)

    def _check_covered(self, budget: int | None, prompt: Tokenized) -> None:
        """Refuse what a form of reasoning and answer together leaves no room for."""
        if budget is not None:
            raise UnsupportedFeature(
                "thinking_token_budget must be None beside calls of tools that follow their schemas: with this model "
                "(tool_parser) their form is that of the reasoning, too",
                field="thinking_token_budget",
                got=budget,
            )
        if opens_final(self._end_of(prompt, REASONING_FORMATS[HARMONY])):
            raise UnsupportedFeature(
                "continue_final_message must be false beside calls of tools that follow their schemas: with this model "
                "(tool_parser) their form is that of a whole answer",
                field="continue_final_message",
                got=True,
            )

    def _end_of(self, prompt: Tokenized, marks: ReasoningFormat) -> str:
        """Return the text of a prompt, or of its end, as much as decides whether it ends amid reasoning."""
        tokenizer, token_ids = self.model.tokenizer, prompt.token_ids
        if prompt.text is not None or tokenizer is None:
            return prompt.text or ""
        num_tokens = TAIL_TOKENS
        while True:
            text = tokenizer.decode(token_ids[-num_tokens:], skip_special_tokens=False)
            if num_tokens >= len(token_ids) or marks.is_decided_by(text):
                return text
            num_tokens *= 4

    def _thinking_rules(
        self, budget: int | None, prompt: Tokenized, *, is_bound: bool
    ) -> Generator[Need, Tokenized | None, ThinkingRules | None]:
        tokenizer = self.model.tokenizer
        name = reasoning_parser_named(self.config.reasoning_parser, tokenizer)
        if name is None:
            if budget is not None:
                raise UnsupportedFeature(
                    "thinking_token_budget must be None: how this model marks its reasoning is not known "
                    "(reasoning_parser)",
                    field="thinking_token_budget",
                    got=budget,
                )
            return None
        marks = REASONING_FORMATS[name]
        if tokenizer is None:
            raise UnsupportedFeature(
                "structured_outputs and thinking_token_budget must be None: the model has no tokenizer",
                field="thinking_token_budget" if budget is not None else "structured_outputs",
            )
        state = marks.state_after(self._end_of(prompt, marks))
        if state is ReasoningState.BEHIND:  # such as of a template that was told not to let the model think
            return None
        is_open = state is ReasoningState.INSIDE
        # A template that opens reasoning itself has done so if there is to be any, unless a budget is given for it.
        opens_itself = (
            isinstance(tokenizer, TemplateOwner)
            and marks.state_after(tokenizer.thinking_prompt) is ReasoningState.INSIDE
        )
        if is_bound and budget is None and opens_itself and not is_open:
            return None
        texts = (*marks.marks, marks.certain, marks.lead, *marks.freeing)
        ids = yield from self._encoded(Tokenize(None, marks=texts))
        opening, closing, certain, lead, *freeing = ids.marks_token_ids
        # The tokens of a beginning are no beginning of a mark that is a token of its own.
        is_beginning = len(certain) < len(closing) and closing[: len(certain)] == certain
        return ThinkingRules(
            opening_token_ids=opening,
            closing_token_ids=closing,
            is_open=is_open,
            budget=budget,
            num_certain=len(certain) if is_beginning else None,
            lead_token_ids=lead,
            freeing_token_ids=tuple(freeing),
        )

    def build(
        self,
        request_id: str,
        params: SamplingParams,
        tokenized: Tokenized,
        constraint: Constraint | None,
        *,
        arrival_s: float,
        deadline_s: float = NEVER,
        queue_deadline_s: float = NEVER,
        priority: int = 0,
        client: str | None = None,
        owner: str | None = None,
        cache_salt: str | None = None,
        trace_headers: TraceHeaders = (),
        pooling: PoolingParams | None = None,
        adapter: Adapter | None = None,
        soft_prompt: SoftPrompt | None = None,
    ) -> tuple[Request, ...]:
        """Return the requests for each of the n answers.

        Args:
            request_id: the caller's.
            params: checked by `check`.
            tokenized: from `tokenize`.
            constraint: from `constrain`.
            arrival_s: field of `Request`, as are the following ones.
        Raises:
            PromptTooLong: the prompt leaves no room for an answer.
        """
        token_ids, digest = tokenized.token_ids, None if adapter is None else adapter.digest
        if soft_prompt is not None:
            # Any token would do: its embedding, or its keys and values, are replaced.
            token_ids, digest = (0,) * soft_prompt.num_virtual_tokens + token_ids, soft_prompt.digest
            check_prompt(token_ids, vocab_size=self._info.vocab_size, max_model_len=self._info.max_model_len)
        room = self._info.max_model_len - len(token_ids)
        has_answer = pooling is None
        if room < has_answer:  # the model was loaded again since `tokenize`, with fewer blocks
            raise PromptTooLong(len(token_ids), self._info.max_model_len, has_answer=has_answer)
        if pooling is not None and tokenized.token_type_start is not None:
            pooling = attrs.evolve(pooling, token_type_start=tokenized.token_type_start)
        request = Request(
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=token_ids,
            params=params,
            seed=self.draw_seed() if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            pooling=pooling,
            eos_token_ids=self._info.generation.eos_token_ids,
            bad_words_token_ids=tokenized.bad_words_token_ids,
            priority=priority,
            stream_interval=max(params.stream_interval or 1, self.config.stream_interval),
            constraint=constraint,
            client=client,
            owner=owner,
            cache_namespace=CacheNamespace(salt=cache_salt, adapter=digest),
            adapter=adapter,
            soft_prompt=soft_prompt,
            trace_headers=trace_headers,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            queue_deadline_s=queue_deadline_s,
        )
        return fan_out(request, self.draw_seed)


def _embedded(pooling: PoolingInfo, text: str) -> str | ChatPrompt:
    """Return what is encoded for a text that is embedded."""
    if not pooling.is_rendered:
        return pooling.default_prompt + text
    # As in sentence-transformers: the prompt has a message of its own, and no answer is begun.
    prompt = [{"role": "system", "content": pooling.default_prompt}] if pooling.default_prompt else []
    return ChatPrompt(messages=[*prompt, {"role": "user", "content": text}], add_generation_prompt=False)


def _common_ending(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the longest ending that both have."""
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return first[len(first) - count :]
