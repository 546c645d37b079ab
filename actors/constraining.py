"""What bounds the form of a request's answer, worked out before it is let in: a wrong grammar is its caller's error."""

from __future__ import annotations

from collections.abc import Sequence

from triolet.actors.tokenizer import ask_tokenizer
from triolet.actors.wiring import Wiring
from triolet.config import EngineConfig
from triolet.core.guidance import Constraint, ThinkingRules
from triolet.core.messages import Tokenize
from triolet.core.params import SamplingParams
from triolet.core.tools.detection import reasoning_parser_named
from triolet.core.tools.reasoning import REASONING_FORMATS, ReasoningFormat
from triolet.errors import UnsupportedFeature

TAIL_TOKENS = 64  # of a prompt: enough for the mark that begins reasoning, and what templates put behind it


async def resolve_constraint(
    wiring: Wiring, config: EngineConfig, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> Constraint | None:
    """Have the grammar compiled, and find out where the answer's reasoning ends.

    Args:
        wiring: of the engine; its tokenizer is loaded.
        config: of the engine.
        params: of the request.
        prompt_token_ids: likewise.
    Raises:
        InvalidParams: the grammar is too large, or can not be compiled.
        UnsupportedFeature: the model has no tokenizer that grammars work with, or no reasoning that is known of.
    """
    grammar, budget = params.structured_outputs, params.thinking_token_budget
    if budget == -1:
        budget = None
    if grammar is None and budget is None:
        return None
    thinking = await _thinking_rules(wiring, config, budget, prompt_token_ids)
    if grammar is not None:
        grammar.check_size(config.max_grammar_bytes)
        await wiring.guidance.open_grammar(grammar)
    return Constraint(grammar=grammar, thinking=thinking)


async def _thinking_rules(
    wiring: Wiring, config: EngineConfig, budget: int | None, prompt_token_ids: Sequence[int]
) -> ThinkingRules | None:
    name = reasoning_parser_named(config.reasoning_parser, wiring.codec)
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
    assert wiring.codec is not None, "a parser is told from a tokenizer"
    tail = wiring.codec.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    if tail.rstrip().endswith(marks.closing):  # a template that was told not to let it think
        return None
    ids = await ask_tokenizer(wiring, Tokenize(None, marks=(marks.opening, marks.closing)))
    opening, closing = ids.marks_token_ids
    return ThinkingRules(
        opening_token_ids=opening,
        closing_token_ids=closing,
        is_open=_is_open(marks, tail),
        budget=budget,
    )


def _is_open(marks: ReasoningFormat, tail: str) -> bool:
    return marks.is_implied or marks.is_open_after(tail)
