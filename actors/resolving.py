"""From what a caller wrote to what the scheduler needs: everything about a request is checked here, once."""

from __future__ import annotations

import time
from random import Random
from typing import cast

import attrs
import trio

from triolet.actors.constraining import resolve_constraint
from triolet.actors.detokenizer import deliver
from triolet.actors.doorbell import Doorbell
from triolet.actors.handover import fill_in, goes_on
from triolet.actors.submission import Submission
from triolet.actors.tokenizer import ask_tokenizer
from triolet.actors.wiring import Stream, Wiring
from triolet.config import EngineConfig
from triolet.core.fan_out import fan_out
from triolet.core.feed import Feed
from triolet.core.messages import Tokenize, Tokenized
from triolet.core.params import SamplingParams
from triolet.core.prompt import ParsedPrompt, check_prompt
from triolet.core.request import Request
from triolet.core.stop import HoldBack
from triolet.errors import UnsupportedFeature


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
        if texts and wiring.codec is None:
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
    reader, arrival_time, saved = Doorbell(), time.time(), submission.saved
    streams: list[Stream] = []
    requests = fan_out(request, lambda: seeds.getrandbits(63))
    others_wait = saved is None or not any(answer.has_begun for answer in saved.answers)
    for one in goes_on(requests, saved) if saved else requests:
        entry = wiring.journal.open(one, after=streams[0].feed.entry if streams and others_wait else None)
        feed = Feed.open(
            entry, wiring.codec, arrival_time=arrival_time, hold_back=cast("HoldBack", config.hold_back)
        )
        streams.append(Stream(feed, reader=reader))
        wiring.open_stream(entry.serial, streams[-1])
    submission.open(tuple(streams))
    for stream, answer in zip(streams, saved.answers if saved else (), strict=False):
        fill_in(wiring, stream, answer)
        deliver(wiring, stream.feed.entry.serial)


async def _tokenize(wiring: Wiring, prompt: ParsedPrompt, params: SamplingParams) -> Tokenized:
    if prompt.token_ids is not None and not params.bad_words:
        await trio.lowlevel.checkpoint()
        return Tokenized(prompt.text, prompt.token_ids, ())
    answer = await ask_tokenizer(wiring, Tokenize(prompt.content, params.bad_words))
    if prompt.token_ids is None:
        return answer
    return attrs.evolve(answer, text=prompt.text, token_ids=prompt.token_ids)
