"""Streams that are read at the same time, again and again while something is killed, and the answers they gave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable

import attrs
import trio

from triolet import Engine, RequestOutputKind, SamplingParams


async def nothing() -> None:
    """Return at once: every stream is read once."""
    await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class Crowd:
    """Streams of one engine; half of them are greedy, half draw with a seed.

    Args:
        on_token: called with the number of a stream and the id of its request when an output of it has come.
    """

    engine: Engine
    num_streams: int
    num_tokens: int  # of every answer
    on_token: Callable[[int, str], None] = lambda index, request_id: None
    answers: dict[int, list[tuple[int, ...]]] = attrs.field(factory=lambda: defaultdict(list), init=False)
    _is_over: bool = attrs.field(default=False, init=False)

    async def read_all(self, kill_all: Callable[[], Awaitable[None]] = nothing) -> None:
        """Read every stream; one that ends before `kill_all` has returned is requested again."""
        async with trio.open_nursery() as nursery:
            for index in range(self.num_streams):
                nursery.start_soon(self._read, index)
            await kill_all()
            self._is_over = True

    async def _read(self, index: int) -> None:
        while not (self.answers[index] and self._is_over):
            self.answers[index].append(await self._answer(index))

    async def _answer(self, index: int) -> tuple[int, ...]:
        params = SamplingParams(
            temperature=0.9 if index % 2 else 0.0,
            seed=index,
            max_tokens=self.num_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        token_ids: list[int] = []
        async with self.engine.generate([index + 1] * (index % 40 + 1), params) as stream:
            async for output in stream:
                token_ids += output.outputs[0].token_ids
                self.on_token(index, stream.request_id)
        return tuple(token_ids)

    def compared_with(self, other: Crowd) -> list[bool]:
        """Return, for every answer, whether it is the first one of the same stream of another crowd."""
        return [answer == other.answers[index][0] for index in self.answers for answer in self.answers[index]]
