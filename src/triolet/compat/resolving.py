"""From a prompt and its parameters to a request, without Trio: what `engine.request_preparation` is for an `Engine`."""

from __future__ import annotations

from random import Random
from typing import Any

import attrs

from triolet.compat.guided import InProcessGrammars
from triolet.config.engine import EngineConfig
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import SamplingParams
from triolet.core.request.prompt import check_prompt, parse_prompt
from triolet.core.request.request import Request
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized, TokenizerInterface
from triolet.errors import UnsupportedFeature


@attrs.frozen(eq=False)
class Resolver:
    """Holds requests against one engine.

    Args:
        config: of the engine.
        info: of its model.
        tokenizer: its tokenizer.
        grammars: compile what bounds an answer.
        seeds: where the seed of a request that brings none is drawn from.
    """

    config: EngineConfig
    info: ModelInfo
    tokenizer: TokenizerInterface | None
    grammars: InProcessGrammars
    seeds: Random

    def resolve(self, request_id: str, prompt: Any, params: SamplingParams, arrival_s: float) -> Request:
        """Tokenise a prompt, and check everything.

        Raises:
            InvalidRequest: the model can not serve it.
        """
        info, limit = self.info, self.info.max_model_len
        params.check_vocabulary(info.vocab_size)
        self.config.request_limits.check(params, info.vocab_size)
        tokenized = self._tokenized(prompt, params)
        check_prompt(tokenized.token_ids, vocab_size=info.vocab_size, max_model_len=limit)
        room = limit - len(tokenized.token_ids)
        return Request(
            request_id=request_id,
            prompt=tokenized.text,
            prompt_token_ids=tokenized.token_ids,
            params=params,
            seed=self.seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_ids=info.generation.eos_token_ids,
            bad_words_token_ids=tokenized.bad_words_token_ids,
            stream_interval=max(params.stream_interval or 1, self.config.stream_interval),
            constraint=self.grammars.constrain(params),
            arrival_s=arrival_s,
        )

    def _tokenized(self, prompt: Any, params: SamplingParams) -> Tokenized:
        parsed = parse_prompt(prompt)
        if self.tokenizer is None and (parsed.token_ids is None or params.bad_words or params.stop):
            raise UnsupportedFeature(
                "prompt must be token ids, without stop or bad_words: the model has no tokenizer",
                field="prompt",
            )
        if self.tokenizer is None or (parsed.token_ids is not None and not params.bad_words):
            return Tokenized(parsed.text, parsed.token_ids or (), ())
        tokenized = self.tokenizer.tokenize(Tokenize(parsed.content, params.bad_words))
        if parsed.token_ids is None:
            return tokenized
        return attrs.evolve(tokenized, text=parsed.text, token_ids=parsed.token_ids)
