"""Preparation of a request in the engine: `RequestBuilder` decides, and the actors tokenize and compile grammars."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.tokenizer import ask_tokenizer
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import Request
from triolet.core.request.request_builder import Need, RequestBuilder
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.engine.submission import Submission

T = TypeVar("T")


class RequestPreparation:
    """Turns submissions into requests.

    Args:
        builder: of the engine.
        channels: to the tokenizer.
        progress: of the actors.
        grammars: compiles grammars.
    """

    def __init__(
        self, builder: RequestBuilder, channels: Channels, progress: ActorProgress, grammars: GrammarRequests
    ) -> None:
        self._builder, self._channels, self._progress, self._grammars = builder, channels, progress, grammars

    def check(self, params: SamplingParams | None) -> SamplingParams:
        """Check parameters; return them, or the model's own for None. See `RequestBuilder.check`."""
        return self._builder.check(params)

    async def resolve(self, submission: Submission, params: SamplingParams) -> tuple[Request, ...]:
        """Encode and check a submission; return the requests for each of its answers. A checkpoint.

        Raises:
            InvalidRequest: the model cannot serve the request.
        """
        arrival_s = trio.current_time()
        deadline_s = min(submission.deadline_s, trio.current_effective_deadline())
        queue_deadline_s = arrival_s + submission.queue_timeout_s
        await trio.lowlevel.checkpoint()
        tokenized = await self._run(self._builder.tokenize(submission.prompt, params))
        constraint = None
        with trio.move_on_at(min(deadline_s, queue_deadline_s)) as in_time:
            constraint = await self._run(self._builder.constrain(params, tokenized.token_ids))
        if in_time.cancelled_caught:
            # The time is up before the grammar is compiled. The request must not start without it, so it gets a
            # deadline that has passed, which ends all of its answers. The queue deadline would not count for an answer
            # that waits for no other.
            deadline_s = in_time.deadline
        return self._builder.build(
            submission.request_id,
            params,
            tokenized,
            constraint,
            arrival_s=arrival_s,
            deadline_s=deadline_s,
            queue_deadline_s=queue_deadline_s,
            priority=submission.priority,
            client=submission.client,
            cache_salt=submission.cache_salt,
            trace_headers=submission.trace_headers,
        )

    async def _run(self, steps: Generator[Need, Tokenized | None, T]) -> T:
        answer: Tokenized | None = None
        try:
            while True:
                answer = await self._answer(steps.send(answer))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _answer(self, need: Need) -> Tokenized | None:
        if isinstance(need, Tokenize):
            return await ask_tokenizer(self._channels, self._progress, need)
        await self._grammars.open_grammar(need)
        return None
