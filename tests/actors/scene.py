"""A request among neighbours, at a chosen point of its life; whatever happens to it, the neighbours must not notice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, assert_all_blocks_back, check, fake_engine
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason
from triolet.core.scheduling.sequence import Sequence
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream

NUM_NEIGHBOURS, NEIGHBOUR_TOKENS = 2, 25
SEED, SUBJECT_TOKENS = 77, 24


@attrs.frozen(kw_only=True)
class State:
    """A point in a request's life, and how it is brought about.

    Args:
        name: of the state.
        after_s: seconds from its admission until it surely is in this state, and stays for a few steps more.
        num_tokens: answer tokens it has by then.
        prompt: of the request.
        max_num_seqs: rows; the engine's, like the fields that follow.
        max_num_batched_tokens: token budget.
        num_blocks: blocks.
    """

    name: str
    after_s: float
    num_tokens: int = 0
    prompt: list[int] = attrs.field(factory=lambda: [1, 2, 3, 4, 5, 6])
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 32
    num_blocks: int = 64

    def open_engine(self) -> AbstractAsyncContextManager[Engine]:
        """An engine in which a request comes into this state."""
        return fake_engine(
            FakeExecutor(self.num_blocks, block_size=4),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


STATES = [
    State(name="queued", max_num_seqs=2, after_s=4.5 * STEP_S),
    State(name="prefilling", prompt=[9] * 60, max_num_batched_tokens=8, after_s=4.5 * STEP_S),
    State(name="decoding", after_s=5.5 * STEP_S, num_tokens=4),
    State(name="preempted", num_blocks=16, after_s=17.5 * STEP_S, num_tokens=14),
]


@attrs.define(eq=False)
class Scene:
    """An engine, its neighbours at work, and the request that the story is about."""

    engine: Engine
    state: State
    due_s: float = attrs.field(default=0.0, init=False)

    def subject(self, **arguments: Any) -> TokenStream:
        """The request, to be entered at once."""
        self.due_s = trio.current_time() + self.state.after_s
        params = SamplingParams(max_tokens=SUBJECT_TOKENS, seed=SEED)
        return self.engine.generate(self.state.prompt, params, request_id="subject", **arguments)

    @property
    def answer(self) -> tuple[int, ...]:
        """What the request would be answered, if it were left alone."""
        return answer_of(self.state.prompt, SEED, SUBJECT_TOKENS)

    async def in_its_state(self) -> None:
        """Wait until the request is where this scene wants it, in the middle of a step."""
        await trio.sleep_until(self.due_s)
        sequence = self.sequence()
        assert sequence is not None, "it has ended"
        assert _name_of_state(sequence) == self.state.name
        assert len(sequence.entry.output_token_ids) == self.state.num_tokens

    def sequence(self) -> Sequence | None:
        scheduler = self.engine._core.scheduler
        assert scheduler is not None
        sequences = scheduler._queues.live.values()
        return next((s for s in sequences if s.entry.request.request_id == "subject"), None)

    async def assert_nothing_is_held(self) -> None:
        """At the next step boundary only the neighbours hold blocks."""
        assert self.sequence() is None
        await trio.sleep(STEP_S)  # the step in flight has ended
        await wait_all_tasks_blocked()
        scheduler, statistics = self.engine._core.scheduler, self.engine.statistics()
        assert scheduler is not None
        check(self.engine)
        tables = [sequence.block_table for sequence in scheduler._queues.running]
        assert statistics.kv_blocks_in_use == len({block_id for table in tables for block_id in table})
        assert statistics.kv_blocks_quarantined == 0
        assert (
            statistics.num_requests_live == statistics.num_requests_running + statistics.num_requests_waiting
        )

    def assert_ended_early(self, output: RequestOutput, reason: FinishReason) -> None:
        """The last output says why, and brings what there was."""
        assert (output.finished, output.finish_reason) == (True, reason)
        token_ids = output.outputs[0].token_ids
        assert token_ids == self.answer[: self.state.num_tokens]
        assert output.text == "".join(chr(65 + token_id) for token_id in token_ids)


def _name_of_state(sequence: Sequence) -> str:
    if sequence.row_id is None:
        return "preempted" if sequence.entry.num_preemptions else "queued"
    return "decoding" if sequence.entry.output_token_ids else "prefilling"


@asynccontextmanager
async def open_scene(state: State) -> AsyncGenerator[Scene]:
    """Afterwards all blocks are back, no task is left, and every neighbour has its own answer."""
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    outputs: list[RequestOutput] = []
    async with state.open_engine() as engine:
        async with trio.open_nursery() as nursery:
            for stream in neighbours(engine):
                nursery.start_soon(read, stream, outputs)
            await wait_all_tasks_blocked()
            yield Scene(engine, state)
        assert_all_blocks_back(engine)
    for output in outputs:
        expected = answer_of(output.prompt_token_ids, output.prompt_token_ids[0], NEIGHBOUR_TOKENS)
        assert output.outputs[0].token_ids == expected
    assert len(outputs) == NUM_NEIGHBOURS
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks


def neighbours(engine: Engine) -> Iterator[TokenStream]:
    """Requests that keep the engine busy; the seed of each is its prompt's first token."""
    for seed in range(10, 10 + NUM_NEIGHBOURS):
        yield engine.generate([seed] * 6, SamplingParams(max_tokens=NEIGHBOUR_TOKENS, seed=seed))


async def read(stream: TokenStream, outputs: list[RequestOutput]) -> None:
    """Read to the end; note the last output."""
    async with stream:
        outputs.append([output async for output in stream][-1])
