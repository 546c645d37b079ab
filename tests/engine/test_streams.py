"""What a reader gets: everything once, however slowly it reads, and nothing of its neighbours' troubles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import (
    STEP_S,
    FakeExecutor,
    LetterTokenizer,
    Panic,
    answer_of,
    assert_all_blocks_back,
    fake_engine,
)
from triolet import RequestOutputKind, SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason, RequestStatus
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import RequestFailed

PROMPT, SEED, NUM_TOKENS = [1, 2, 3], 8, 20
ANSWER = answer_of(PROMPT, SEED, NUM_TOKENS)
TEXT = "".join(chr(65 + token_id) for token_id in ANSWER)
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind


def ask(engine: Engine, **fields: object) -> TokenStream:
    return engine.generate(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, seed=SEED, **fields))  # type: ignore[arg-type]


async def read(stream: TokenStream, pause_s: float) -> list[RequestOutput]:
    """Read to the end, and rest after every output."""
    outputs = []
    async for output in stream:
        outputs.append(output)
        await trio.sleep(pause_s)
    return outputs


# ----------------------------------------------------------------------------------- fast and slow


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("pause_steps", [0, 0.5, 1, 3.7, 100])
async def test_a_reader_loses_nothing_however_slow_it_is(
    pause_steps: float, kind: RequestOutputKind, autojump_clock: MockClock
) -> None:
    async with fake_engine() as engine, ask(engine, output_kind=kind) as stream:
        outputs = await read(stream, pause_steps * STEP_S)
    pieces = [tuple(output.outputs[0].token_ids) for output in outputs]
    if kind is DELTA:
        assert sum(pieces, ()) == ANSWER
        assert "".join(output.text for output in outputs) == TEXT
    else:
        assert all(ANSWER[: len(piece)] == piece for piece in pieces)
        assert pieces == sorted(pieces, key=len)
        assert (pieces[-1], outputs[-1].text) == (ANSWER, TEXT)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is FINAL_ONLY:
        assert len(outputs) == 1
    elif pause_steps == 100:
        assert len(outputs) == 2, "what came during the first rest is joined"
    elif pause_steps <= 0.5:
        assert len(outputs) == NUM_TOKENS


async def test_a_slow_reader_holds_up_no_other_one(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, ask(engine) as slow:
        await trio.sleep(STEP_S)
        async with ask(engine) as fast:
            began_s = trio.current_time()
            await fast.text()
        assert trio.current_time() - began_s <= (NUM_TOKENS + 2) * STEP_S
        assert await slow.text() == TEXT


class Wakings(trio.abc.Instrument):
    """Counts how often the task that makes it goes on."""

    def __init__(self) -> None:
        self.count, self._task = 0, trio.lowlevel.current_task()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


@pytest.mark.parametrize(("kind", "num_outputs"), [(DELTA, NUM_TOKENS), (FINAL_ONLY, 1)])
async def test_a_reader_is_woken_for_outputs_and_for_nothing_else(
    kind: RequestOutputKind, num_outputs: int, autojump_clock: MockClock
) -> None:
    async with fake_engine() as engine, ask(engine, output_kind=kind) as stream:
        wakings = Wakings()
        trio.lowlevel.add_instrument(wakings)
        outputs = [output async for output in stream]
        trio.lowlevel.remove_instrument(wakings)
    assert (len(outputs), wakings.count) == (num_outputs, num_outputs + 1)  # the end is one, too


async def test_an_output_never_changes_after_it_was_read(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, ask(engine) as stream:
        seen = [(output, repr(output)) async for output in stream]
    assert [repr(output) for output, _ in seen] == [shown for _, shown in seen]
    assert len({shown for _, shown in seen}) == NUM_TOKENS


async def test_text_is_the_whole_text_whatever_was_read_before(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, ask(engine, output_kind=DELTA) as stream:
        for _ in range(3):
            await anext(stream)
        assert await stream.text() == TEXT
        assert await stream.text() == TEXT


async def test_an_output_tells_where_the_time_went(autojump_clock: MockClock) -> None:
    async with fake_engine(max_num_seqs=1) as engine, ask(engine) as first:
        await trio.sleep(3.5 * STEP_S)
        async with engine.generate([4], SamplingParams(max_tokens=2, seed=1)) as second:
            await first.text()
            output = (await read(second, 0))[-1]
    metrics = output.metrics
    assert metrics.queued_ts == pytest.approx(3.5 * STEP_S)
    assert metrics.scheduled_ts == pytest.approx(NUM_TOKENS * STEP_S)
    assert metrics.first_token_ts == pytest.approx((NUM_TOKENS + 1) * STEP_S)
    assert metrics.last_token_ts == pytest.approx((NUM_TOKENS + 2) * STEP_S)
    assert metrics.num_generation_tokens == 2


# ------------------------------------------------------------------------------------ its own ends


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_request_and_frees_its_blocks(
    include: bool, autojump_clock: MockClock
) -> None:
    stop = TEXT[6:9]
    assert TEXT.index(stop) == 6
    async with fake_engine() as engine:
        async with ask(engine, stop=[stop], include_stop_str_in_output=include) as stream:
            output = (await read(stream, 0))[-1]
            await trio.sleep(2 * STEP_S)
            assert_all_blocks_back(engine)
            assert engine.status(stream.request_id) is RequestStatus.COMPLETED
    assert output.text == TEXT[: 9 if include else 6]
    assert output.outputs[0].token_ids == ANSWER[:9]
    assert (output.finish_reason, output.outputs[0].stop_reason) == (FinishReason.STOP, stop)


async def test_text_that_may_begin_a_stop_string_is_shown_when_it_did_not(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, ask(engine, output_kind=DELTA, stop=[TEXT[2:5] + "~"]) as stream:
        texts = [output.text for output in await read(stream, 0)]
    assert texts[:6] == [TEXT[0], TEXT[1], "", "", "", TEXT[2:6]]
    assert "".join(texts) == TEXT


async def test_a_stop_token_ends_the_request_and_says_which(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, ask(engine, stop_token_ids=[ANSWER[4]]) as stream:
        output = (await read(stream, 0))[-1].outputs[0]
    place = ANSWER.index(ANSWER[4])
    assert output.token_ids == ANSWER[: place + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, ANSWER[4])


async def test_without_detokenizing_there_are_tokens_and_no_text(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, ask(engine, detokenize=False) as stream:
        outputs = await read(stream, 0)
    assert {output.text for output in outputs} == {""}
    assert outputs[-1].outputs[0].token_ids == ANSWER


# ---------------------------------------------------------------------------------------- failures


async def test_a_request_without_a_token_fails_at_its_reader_and_at_no_other_one(
    autojump_clock: MockClock,
) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor) as engine, ask(engine) as neighbour:
        executor.model.failing.add("bad")
        async with engine.generate([4, 5], SamplingParams(seed=1), request_id="bad") as stream:
            with pytest.raises(RequestFailed, match="request bad failed: planted"):
                await stream.text()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert engine.status("bad") is RequestStatus.FAILED
        with pytest.raises(RequestFailed):
            await engine.complete([4, 5], request_id="bad")
        assert await neighbour.text() == TEXT
        assert engine.statistics().num_restarts == 0
        assert_all_blocks_back(engine)


async def test_a_request_that_fails_later_has_its_first_tokens_read(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor) as engine:
        outputs = []
        async with engine.generate([4], SamplingParams(seed=1), request_id="bad") as stream:
            outputs.append(await anext(stream))
            executor.model.failing.add("bad")
            with pytest.raises(RequestFailed):
                await stream.text()
        assert outputs[0].outputs[0].token_ids == answer_of([4], 1, 1)


async def test_a_request_with_tokens_that_can_not_be_decoded_fails_alone(autojump_clock: MockClock) -> None:
    fragile = ANSWER[5]
    neighbour_prompt, neighbour_seed = [4, 5], 2
    expected = answer_of(neighbour_prompt, neighbour_seed, 9)
    assert fragile not in ANSWER[:5] and fragile not in (*PROMPT, *neighbour_prompt, *expected)

    class FragileTokenizer(LetterTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            if fragile in token_ids:
                raise Panic("in foreign code")
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    async with fake_engine(tokenizer=FragileTokenizer()) as engine:
        params = SamplingParams(max_tokens=9, seed=neighbour_seed)
        async with (
            engine.generate(neighbour_prompt, params) as neighbour,
            ask(engine, output_kind=DELTA) as stream,
        ):
            with pytest.raises(RequestFailed, match="could not be decoded") as caught:
                await stream.text()
            assert isinstance(caught.value.__cause__, Panic)
            await trio.sleep(2 * STEP_S)
            assert engine.status(stream.request_id) is RequestStatus.FAILED
            assert (await read(neighbour, 0))[-1].outputs[0].token_ids == expected
        assert engine.statistics().num_restarts == 0
        assert_all_blocks_back(engine)
