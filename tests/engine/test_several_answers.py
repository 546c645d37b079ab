"""n answers to one prompt: asked for once, given back at once."""

from __future__ import annotations

import pytest
import trio

from tests.actors.harness import (
    STEP_S,
    FakeExecutor,
    LetterTokenizer,
    answer_of,
    assert_all_blocks_back,
    fake_engine,
)
from triolet import RequestOutputKind, RequestStatus, SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import InvalidParams, Overloaded, RequestFailed

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = [3, 1, 4, 1, 5]


def params(
    n: int = 3, max_tokens: int = 6, kind: RequestOutputKind = DELTA, **fields: object
) -> SamplingParams:
    return SamplingParams(n=n, seed=20, max_tokens=max_tokens, output_kind=kind, **fields)  # type: ignore[arg-type]


def answers(max_tokens: int = 6, n: int = 3) -> list[tuple[int, ...]]:
    return [answer_of(PROMPT, 20 + index, max_tokens) for index in range(n)]


async def read(stream: TokenStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def test_every_answer_has_its_own_seed_and_all_come_in_one_output(
    autojump_clock: trio.abc.Clock,
) -> None:
    async with fake_engine() as engine:
        output = await engine.complete(PROMPT, params(), request_id="mine")
        assert [(answer.index, answer.token_ids) for answer in output.outputs] == list(enumerate(answers()))
        assert {answer.finish_reason for answer in output.outputs} == {"length"}
        assert (output.request_id, output.finished) == ("mine", True)
        assert engine.status("mine") is RequestStatus.COMPLETED
        assert_all_blocks_back(engine)


async def test_an_answer_is_what_it_is_alone(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine() as engine:
        for index in range(3):
            alone = await engine.complete(PROMPT, SamplingParams(seed=20 + index, max_tokens=6))
            assert alone.outputs[0].token_ids == answers()[index]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
async def test_streamed_answers_come_in_turns_and_end_together(
    kind: RequestOutputKind, autojump_clock: trio.abc.Clock
) -> None:
    async with fake_engine() as engine, engine.generate(PROMPT, params(kind=kind)) as stream:
        outputs = await read(stream)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert all(len(output.outputs) == 1 for output in outputs)
    joined: dict[int, tuple[int, ...]] = {}
    for [answer] in (output.outputs for output in outputs):
        before = joined.get(answer.index, ()) if kind is DELTA else ()
        joined[answer.index] = (*before, *answer.token_ids)
    assert joined == dict(enumerate(answers()))
    assert len(outputs) == 3 * 6


async def test_the_prompt_is_computed_once(autojump_clock: trio.abc.Clock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor) as engine:
        output = await engine.complete(list(range(15)), params(n=4, max_tokens=2))
        assert len(output.outputs) == 4
    num_prompt_tokens = sum(row.num_tokens for plan in executor.plans for row in plan.rows if row.start < 15)
    assert num_prompt_tokens == 15 + 3 * 3  # three full blocks are shared, the rest of the last one is not


async def test_an_abort_ends_all_of_them(autojump_clock: trio.abc.Clock) -> None:
    async with (
        fake_engine() as engine,
        engine.generate(PROMPT, params(max_tokens=200), request_id="r") as stream,
    ):
        await stream.__anext__()
        await trio.sleep(10 * STEP_S)
        engine.abort("r")
        engine.abort("r")
        outputs = await read(stream)
        last = {output.outputs[0].index: output.finish_reason for output in outputs}
        assert last == dict.fromkeys(range(3), "abort")
        assert outputs[-1].finished
        assert engine.status("r") is RequestStatus.CANCELLED
        await trio.sleep(STEP_S)
        assert_all_blocks_back(engine)


@pytest.mark.parametrize("delay_s", [0.0, STEP_S / 2, STEP_S, 1.5 * STEP_S, 20 * STEP_S])
async def test_leaving_the_scope_gives_all_of_it_back(delay_s: float, autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine() as engine:
        with trio.move_on_after(delay_s):
            async with engine.generate(PROMPT, params(max_tokens=200)) as stream:
                await read(stream)
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)
        again = await engine.complete(PROMPT, params())
        assert [answer.token_ids for answer in again.outputs] == answers()


async def test_places_are_taken_for_all_answers_or_for_none(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine(max_num_seqs=2, max_queued_requests=3) as engine:
        async with engine.generate(PROMPT, params(max_tokens=200)):
            with pytest.raises(Overloaded, match="max_queued_requests=3"):
                await engine.complete(PROMPT, params())
            assert engine.statistics().num_requests_live == 3
            output = await engine.complete(PROMPT, params(n=2))
            assert [answer.token_ids for answer in output.outputs] == answers(n=2)
        assert (await engine.complete(PROMPT, params(n=5))).finished
        with pytest.raises(
            InvalidParams, match=r"n must be at most 5 \(max_num_seqs \+ max_queued_requests\), got 6"
        ):
            await engine.complete(PROMPT, params(n=6))
        with pytest.raises(InvalidParams, match=r"n must be at most 128 \(max_n\), got 129"):
            await engine.complete(PROMPT, params(n=129))
        assert_all_blocks_back(engine)


async def test_a_deadline_ends_all_of_them_with_what_they_have(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine() as engine:
        deadline = trio.current_time() + 10.5 * STEP_S
        output = await engine.complete(PROMPT, params(max_tokens=200), deadline=deadline)
        assert {answer.finish_reason for answer in output.outputs} == {"deadline"}
        assert all(answer.token_ids for answer in output.outputs)
        await trio.sleep(STEP_S)
        assert_all_blocks_back(engine)


async def test_a_wait_that_is_too_long_ends_all_of_them(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine(max_num_seqs=1) as engine:
        async with engine.generate(PROMPT, SamplingParams(max_tokens=200)):
            output = await engine.complete(PROMPT, params(), queue_timeout=5 * STEP_S)
            assert [answer.finish_reason for answer in output.outputs] == ["deadline"] * 3
            assert engine.statistics().num_requests_live == 1


async def test_a_drain_lets_those_finish_that_have_not_begun(autojump_clock: trio.abc.Clock) -> None:
    outputs: list[RequestOutput] = []

    async def ask(engine: Engine) -> None:
        outputs.append(await engine.complete(PROMPT, params(max_tokens=1)))

    async with fake_engine(max_num_seqs=1) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine)
        await trio.sleep(STEP_S / 2)
        await engine.drain(trio.current_time() + 100)
    assert [answer.finish_reason for answer in outputs[0].outputs] == ["length"] * 3


async def test_closing_the_engine_ends_all_of_them(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine() as engine:
        stream = engine.generate(PROMPT, params(max_tokens=200, kind=FINAL_ONLY))
        await stream.__aenter__()
        await trio.sleep(STEP_S / 2)
    outputs = await read(stream)
    await stream.__aexit__(None, None, None)
    assert [answer.finish_reason for answer in outputs[0].outputs] == ["shutdown"] * 3


@pytest.mark.parametrize("at_step", [1, 2, 3, 5])
async def test_a_crash_costs_no_answer_a_token(at_step: int, autojump_clock: trio.abc.Clock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)

    def crash_once(plan: object) -> None:
        if len(executor.plans) == at_step:
            raise RuntimeError("planted")

    executor.before_step = crash_once
    async with fake_engine(executor) as engine:
        output = await engine.complete(PROMPT, params())
        assert [answer.token_ids for answer in output.outputs] == answers()
        assert engine.statistics().num_restarts >= 1
        assert_all_blocks_back(engine)


async def test_one_that_can_not_be_finished_fails_the_request(autojump_clock: trio.abc.Clock) -> None:
    class StubTokenizer(LetterTokenizer):
        def decode(self, token_ids: object, *, skip_special_tokens: bool) -> str:
            text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)  # type: ignore[arg-type]
            if list(answers()[1][:3]) == list(token_ids)[-3:]:  # type: ignore[call-overload]
                raise RuntimeError("a panic in foreign code")
            return text

    async with fake_engine(tokenizer=StubTokenizer()) as engine:
        with pytest.raises(RequestFailed):
            await engine.complete(PROMPT, params())
        await trio.sleep(2 * STEP_S)
        assert_all_blocks_back(engine)


async def test_a_reader_that_lags_loses_nothing_of_any_answer(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine() as engine, engine.generate(PROMPT, params()) as stream:
        await trio.sleep(100 * STEP_S)
        outputs = await read(stream)
        assert [(output.outputs[0].index, output.outputs[0].token_ids) for output in outputs] == list(
            enumerate(answers())
        )
        assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}


async def test_an_interval_leaves_outputs_out_but_no_tokens(autojump_clock: trio.abc.Clock) -> None:
    async with fake_engine(stream_interval=2) as engine:
        for wanted, lengths in ((None, [1, 2, 2, 2, 1]), (1, [1, 2, 2, 2, 1]), (3, [1, 3, 3, 1])):
            asked = SamplingParams(max_tokens=8, seed=20, output_kind=DELTA, stream_interval=wanted)
            async with engine.generate(PROMPT, asked) as stream:
                outputs = await read(stream)
            assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
