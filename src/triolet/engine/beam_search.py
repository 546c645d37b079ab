"""Beam search over the engine's own interface: each next token of a beam is a request of its own.

The beams share their KV through the prefix cache.

Source: vLLM's `LLM.beam_search`; scores and results are the same.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

import attrs
import trio

from triolet.actors.supervisor import root_cause
from triolet.config.engine import EngineConfig
from triolet.core.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from triolet.core.output.logprobs import Position
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.param_validation import refuse
from triolet.core.request.params import SamplingParams
from triolet.core.request.prompt import Prompt
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.errors import PromptTooLong, RequestFailed, WrongEventLoop


class Completes(Protocol):
    """Parts of an `Engine` that a beam search uses; the engine has it as a method, and so cannot be imported here."""

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""
        ...

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the model."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence, tokens."""
        ...

    @property
    def tokenizer(self) -> TokenizerInterface | None:
        """Tokenizer of the model."""
        ...

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **arguments: Any
    ) -> RequestOutput:
        """Return the whole answer to a prompt."""
        ...


def beam_search(
    engine: Completes, prompt: Prompt, params: BeamSearchParams, **arguments: Any
) -> Coroutine[Any, Any, BeamSearchOutput]:
    """Find the likeliest answers to a prompt by beam search.

    Args:
        engine: computes the beams.
        prompt: as for `Engine.generate`.
        params: width and length of the search.
        **arguments: of `Engine.generate`, for every request: `priority`, `client`, `deadline`, `cache_salt`.
    Returns:
        The best `beam_width` answers, best first.
    Raises:
        InvalidRequest: a wrong argument; the engine's `max_logprobs` limits the width.
        RequestFailed: a beam could not be computed, or not before its deadline.
        Overloaded: the engine has no places for `beam_width` requests.
        WrongEventLoop: the caller does not run on Trio; raised by the call, which need not be awaited for it.
    """
    if not trio.lowlevel.in_trio_run():
        raise WrongEventLoop(
            "triolet.beam_search needs Trio's event loop and an engine of triolet.open_engine; "
            "those of triolet.aio and triolet.blocking have a method beam_search"
        )
    return _search(engine, prompt, params, **arguments)


async def _search(
    engine: Completes, prompt: Prompt, params: BeamSearchParams, **arguments: Any
) -> BeamSearchOutput:
    # Twice the width, as in vLLM: choices that end an answer leave the beam.
    num_choices = min(2 * params.beam_width, engine.model_info.vocab_size)
    most = engine.config.max_logprobs
    if most != -1 and num_choices > most:
        raise refuse("beam_width", f"must be at most {most // 2} (half of max_logprobs)", params.beam_width)
    asked = SamplingParams(
        max_tokens=1, logprobs=num_choices, temperature=params.temperature, detokenize=False
    )
    first = await engine.complete(prompt, asked, **arguments)
    beams = BeamSearch(params, engine.model_info.generation.eos_token_ids, first.prompt_token_ids)
    beams.advance([_choices(first)])
    room = engine.max_model_len - len(first.prompt_token_ids)
    for _ in range(min(params.max_tokens, room) - 1):
        if not beams.live:
            break
        prompts = [beam.tokens for beam in beams.live]
        try:
            outputs = await _complete_all(engine, prompts, asked, arguments)
        except PromptTooLong:  # the virtual tokens of a prompt adapter take places, too
            break
        beams.advance(list(map(_choices, outputs)))
    tokenizer, is_plain = engine.tokenizer, params.skip_special_tokens
    decoded = [
        attrs.evolve(
            beam, text=tokenizer.decode(beam.tokens, skip_special_tokens=is_plain) if tokenizer else None
        )
        for beam in beams.end()
    ]
    return BeamSearchOutput(tuple(decoded))


async def _complete_all(
    engine: Completes, prompts: list[tuple[int, ...]], params: SamplingParams, arguments: dict[str, Any]
) -> list[RequestOutput]:
    """Complete the prompts at the same time; if one fails, cancel the others and raise its error without a group."""
    outputs: dict[int, RequestOutput] = {}

    async def complete(place: int) -> None:
        outputs[place] = await engine.complete(prompts[place], params, **arguments)

    try:
        async with trio.open_nursery() as nursery:
            for place in range(len(prompts)):
                nursery.start_soon(complete, place)
    except ExceptionGroup as group:
        raise root_cause(group) from group
    return [outputs[place] for place in range(len(prompts))]


def _choices(output: RequestOutput) -> Position:
    [answer] = output.outputs
    # Its deadline may have ended it before its first step.
    if not answer.logprobs:
        raise RequestFailed(output.request_id, f"a beam got no token before it ended: {answer.finish_reason}")
    return answer.logprobs[0]
