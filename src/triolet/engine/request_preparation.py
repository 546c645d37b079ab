"""From what a caller wrote to what the scheduler needs: everything about a request is checked here, once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import cast

import attrs
import trio

from triolet.actors.channels import Stream, Wiring
from triolet.actors.detokenizer import deliver
from triolet.actors.tokenizer import ask_tokenizer
from triolet.actors.wait_cell import WaitCell
from triolet.config.engine import EngineConfig
from triolet.core.output.output_processor import OutputProcessor
from triolet.core.output.stop_strings import HoldBack
from triolet.core.request.grammar_state import Constraint, ThinkingRules
from triolet.core.request.params import SamplingParams
from triolet.core.request.prompt import ParsedPrompt, check_prompt
from triolet.core.request.request import Request, fan_out
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.tools.detection import reasoning_parser_named
from triolet.core.tools.reasoning import REASONING_FORMATS, ReasoningFormat
from triolet.engine.snapshot import fill_in, goes_on
from triolet.engine.submission import Submission
from triolet.errors import UnsupportedFeature

# --------------------
# What bounds the form of a request's answer, worked out before it is let in: a wrong grammar is its caller's error.


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
    name = reasoning_parser_named(config.reasoning_parser, wiring.tokenizer)
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
    assert wiring.tokenizer is not None, "a parser is told from a tokenizer"
    tail = wiring.tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
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


async def resolve(
    submission: Submission, params: SamplingParams, wiring: Wiring, config: EngineConfig, seeds: Random
) -> Request:
    """Tokenise a submission and hold it against the model.

    Args:
        submission: from the caller.
        params: its own, or the model's wishes.
        wiring: of the engine; its model is loaded.
        config: of the engine.
        seeds: where the seed of a request that brings none is drawn from.
    Raises:
        InvalidRequest: the model can not serve it.
    """
    assert wiring.model_info is not None
    arrival_s = trio.current_time()
    deadline_s = min(submission.deadline_s, trio.current_effective_deadline())
    queue_deadline_s = arrival_s + submission.queue_timeout_s
    info, limit = wiring.model_info, wiring.model_info.max_model_len
    params.check_vocabulary(info.vocab_size)
    for field, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        if texts and wiring.tokenizer is None:
            raise UnsupportedFeature(
                f"{field} must be empty: the model has no tokenizer", field=field, got=texts
            )
    tokenized = await _tokenize(wiring, submission.prompt, params)
    check_prompt(tokenized.token_ids, vocab_size=info.vocab_size, max_model_len=limit)
    config.request_limits.check_prompt(params, len(tokenized.token_ids), info.vocab_size)
    constraint = None
    with trio.move_on_at(min(deadline_s, queue_deadline_s)) as in_time:
        constraint = await resolve_constraint(wiring, config, params, tokenized.token_ids)
    if in_time.cancelled_caught:  # no answer may start unbound, not even one that waits for no other
        deadline_s = in_time.deadline
    room = limit - len(tokenized.token_ids)
    return Request(
        request_id=submission.request_id,
        prompt=tokenized.text,
        prompt_token_ids=tokenized.token_ids,
        params=params,
        seed=seeds.getrandbits(63) if params.seed is None else params.seed,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        eos_token_ids=info.generation.eos_token_ids,
        bad_words_token_ids=tokenized.bad_words_token_ids,
        priority=submission.priority,
        stream_interval=max(params.stream_interval or 1, config.stream_interval),
        constraint=constraint,
        client=submission.client,
        cache_salt=submission.cache_salt,
        trace_headers=submission.trace_headers,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        queue_deadline_s=queue_deadline_s,
    )


def open_streams(
    submission: Submission, request: Request, wiring: Wiring, config: EngineConfig, seeds: Random
) -> None:
    """Enter a request in the journal, with a stream for each of its answers. No checkpoint.

    Args:
        submission: what it was asked with.
        request: resolved, and let in.
        wiring: of the engine.
        config: of the engine.
        seeds: where the seeds of further answers are drawn from.
    """
    reader, arrival_time, saved = WaitCell(), time.time(), submission.saved
    streams: list[Stream] = []
    requests = fan_out(request, lambda: seeds.getrandbits(63))
    others_wait = saved is None or not any(answer.has_begun for answer in saved.answers)
    for one in goes_on(requests, saved) if saved else requests:
        entry = wiring.journal.open(
            one, after=streams[0].processor.entry if streams and others_wait else None
        )
        processor = OutputProcessor.open(
            entry, wiring.tokenizer, arrival_time=arrival_time, hold_back=cast("HoldBack", config.hold_back)
        )
        streams.append(Stream(processor, reader=reader))
        wiring.open_stream(entry.serial, streams[-1])
    submission.open(tuple(streams))
    for stream, answer in zip(streams, saved.answers if saved else (), strict=False):
        fill_in(wiring, stream, answer)
        deliver(wiring, stream.processor.entry.serial)


async def _tokenize(wiring: Wiring, prompt: ParsedPrompt, params: SamplingParams) -> Tokenized:
    if prompt.token_ids is not None and not params.bad_words:
        await trio.lowlevel.checkpoint()
        return Tokenized(prompt.text, prompt.token_ids, ())
    answer = await ask_tokenizer(wiring, Tokenize(prompt.content, params.bad_words))
    if prompt.token_ids is None:
        return answer
    return attrs.evolve(answer, text=prompt.text, token_ids=prompt.token_ids)
