"""What one engine leaves unfinished another one finishes, as if there had been no break."""

from __future__ import annotations

import gc
import math
from typing import Any

import attrs
import msgpack
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import (
    STEP_S,
    VOCAB,
    FakeExecutor,
    answer_of,
    assert_all_blocks_back,
    fake_engine,
)
from triolet import SamplingParams, Snapshot
from triolet.actors.grammar_requests import GrammarRequests
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.request import FinishReason
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.step_plan import TokenLogprobs
from triolet.engine.engine import Engine
from triolet.errors import RequestIdInUse, SnapshotError
from triolet.ipc.snapshot import SavedAnswer, SavedRequest


async def ask(engine: Engine, prompt: list[int], params: SamplingParams, arguments: dict[str, Any]) -> None:
    await engine.complete(prompt, params, **arguments)


async def interrupted(
    after_s: float, *params: SamplingParams, grace_s: float | None = None, **arguments: Any
) -> Snapshot:
    """The bytes of what an engine had not finished after a while, in another process."""
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        for number, one in enumerate(params):
            nursery.start_soon(ask, engine, [number + 1] * 3, one, {"request_id": f"r{number}", **arguments})
        await trio.sleep(after_s)
        if grace_s is None:
            snapshot = engine.snapshot()
            nursery.cancel_scope.cancel()
        else:
            snapshot = await engine.drain(trio.current_time() + grace_s)
    return Snapshot.from_bytes(snapshot.to_bytes())


async def finished(engine: Engine, snapshot: Snapshot) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}

    async def read(name: str, stream: Any) -> None:
        async with stream:
            outputs[name] = [output async for output in stream]

    async with trio.open_nursery() as nursery:
        for name, stream in engine.resume(snapshot).items():
            nursery.start_soon(read, name, stream)
    return outputs


def text_of(token_ids: tuple[int, ...]) -> str:
    return "".join(chr(65 + token_id) for token_id in token_ids)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5, 11, 19])
async def test_answers_are_the_ones_of_an_unbroken_engine(num_steps: int, autojump_clock: MockClock) -> None:
    params = [SamplingParams(max_tokens=20) for _ in range(6)]  # with seeds that the engine drew
    snapshot = await interrupted((num_steps + 0.5) * STEP_S, *params)
    assert len(snapshot) == 6
    async with fake_engine(FakeExecutor(num_blocks=32, block_size=2), max_num_seqs=3) as engine:
        outputs = await finished(engine, snapshot)
        assert_all_blocks_back(engine)
    for saved in snapshot.requests:
        (answer,) = saved.answers
        whole = answer_of(saved.prompt_token_ids, answer.seed, 20)
        last = outputs[saved.request_id][-1]
        assert (last.outputs[0].token_ids, last.text) == (whole, text_of(whole))
        assert answer.output_token_ids == whole[: len(answer.output_token_ids)]


async def test_a_drain_gives_what_its_deadline_left_and_its_readers_get_what_there_was(
    autojump_clock: MockClock,
) -> None:
    short, long = SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=200, seed=2)
    snapshot = await interrupted(STEP_S / 2, short, long, grace_s=10 * STEP_S)
    assert [saved.request_id for saved in snapshot.requests] == ["r1"]
    async with fake_engine() as engine:
        outputs = await finished(engine, snapshot)
    assert outputs["r1"][-1].outputs[0].token_ids == answer_of([2] * 3, 2, 200)


async def test_a_drain_that_lets_all_finish_leaves_nothing(autojump_clock: MockClock) -> None:
    snapshot = await interrupted(STEP_S / 2, SamplingParams(max_tokens=3), grace_s=math.inf)
    assert len(snapshot) == 0


async def test_the_first_output_brings_what_there_was_at_once(autojump_clock: MockClock) -> None:
    params = SamplingParams(max_tokens=20, seed=5, output_kind=RequestOutputKind.DELTA)
    saved = SavedRequest(
        request_id="r",
        prompt="A text",
        prompt_token_ids=(1, 2),
        params=params,
        answers=(SavedAnswer(seed=5, output_token_ids=answer_of([1, 2], 5, 8)),),
    )
    async with fake_engine() as engine:
        outputs = (await finished(engine, snapshot_of(saved)))["r"]
    assert outputs[0].outputs[0].token_ids == answer_of([1, 2], 5, 8)
    assert outputs[0].prompt == "A text"
    whole = [token_id for output in outputs for token_id in output.outputs[0].token_ids]
    assert tuple(whole) == answer_of([1, 2], 5, 20)
    assert len(outputs) > 10


async def test_a_stop_string_may_lie_across_the_break(autojump_clock: MockClock) -> None:
    whole = answer_of([1] * 3, 7, 20)
    stop = text_of(whole[8:12])
    params = SamplingParams(max_tokens=20, seed=7, stop=stop)
    snapshot = await interrupted(10.5 * STEP_S, params)
    assert 8 < len(snapshot.requests[0].answers[0].output_token_ids) < 12
    async with fake_engine() as engine:
        (output,) = (await finished(engine, snapshot))["r0"][-1:]
    assert (output.finish_reason, output.text) == (FinishReason.STOP, text_of(whole).partition(stop)[0])


async def test_several_answers_to_one_prompt_go_on_each_where_it_was(autojump_clock: MockClock) -> None:
    params = SamplingParams(n=3, max_tokens=20, seed=3, output_kind=RequestOutputKind.FINAL_ONLY)
    for num_steps in (0, 1, 6):
        snapshot = await interrupted((num_steps + 0.5) * STEP_S, params)
        async with fake_engine() as engine:
            (output,) = (await finished(engine, snapshot))["r0"]
        assert [one.token_ids for one in output.outputs] == [answer_of([1] * 3, 3 + i, 20) for i in range(3)]


async def test_an_answer_that_had_ended_beside_others_is_not_computed_again(
    autojump_clock: MockClock,
) -> None:
    ended = SavedAnswer(
        seed=3, output_token_ids=answer_of([1], 3, 4), finish_reason=FinishReason.STOP, stop_reason=9
    )
    saved = SavedRequest(
        request_id="r",
        prompt_token_ids=(1,),
        params=SamplingParams(n=2, max_tokens=10, seed=3, output_kind=RequestOutputKind.FINAL_ONLY),
        answers=(ended, SavedAnswer(seed=4)),
    )
    async with fake_engine() as engine:
        (output,) = (await finished(engine, snapshot_of(saved)))["r"]
        assert_all_blocks_back(engine)
    first, second = output.outputs
    assert (first.token_ids, first.finish_reason, first.stop_reason) == (
        ended.output_token_ids,
        FinishReason.STOP,
        9,
    )
    assert second.token_ids == answer_of([1], 4, 10)


async def test_an_engine_takes_up_whatever_an_equal_one_has_held(autojump_clock: MockClock) -> None:
    """Answers that have ended took no place there any more, and take none here."""
    answers = [SavedAnswer(seed=seed, output_token_ids=(), finish_reason=None) for seed in range(2)]
    ended = SavedAnswer(seed=2, output_token_ids=answer_of((1, 2), 2, 4), finish_reason=FinishReason.LENGTH)
    saved = SavedRequest(
        request_id="r",
        prompt_token_ids=(1, 2),
        params=SamplingParams(n=3, max_tokens=4),
        answers=(*answers, ended),
    )
    async with fake_engine(max_num_seqs=1, max_queued_requests=1) as engine:
        (outputs,) = (await finished(engine, snapshot_of(saved))).values()
    reasons = {
        new.index: new.finish_reason for output in outputs for new in output.outputs if new.finish_reason
    }
    assert reasons == dict.fromkeys(range(3), FinishReason.LENGTH)


async def test_what_has_failed_is_not_handed_over_also_if_another_answer_goes_on(
    autojump_clock: MockClock,
) -> None:
    executor = FakeExecutor(num_blocks=32, block_size=2)
    async with fake_engine(executor) as engine:
        executor.model.failing.add("1_r")
        async with engine.generate([1, 2, 3], SamplingParams(n=2, max_tokens=20), request_id="r"):
            await trio.sleep(5.5 * STEP_S)
            assert engine.statistics().num_requests_live == 1
            assert len(engine.snapshot()) == 0


async def test_a_deadline_goes_on_from_where_it_was(autojump_clock: MockClock) -> None:
    deadline = trio.current_time() + 10 * STEP_S
    snapshot = await interrupted(4.5 * STEP_S, SamplingParams(max_tokens=100, seed=1), deadline=deadline)
    assert snapshot.requests[0].time_left_s == pytest.approx(5.5 * STEP_S)
    await trio.sleep(100)
    async with fake_engine() as engine:
        began_s = trio.current_time()
        (output,) = (await finished(engine, snapshot))["r0"][-1:]
        assert output.finish_reason is FinishReason.DEADLINE
        assert trio.current_time() - began_s == pytest.approx(5.5 * STEP_S)


async def test_no_answer_that_is_resumed_starts_unbound_when_its_form_is_late(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async def slow_form(
        self: GrammarRequests, params: StructuredOutputsParams, owner: str | None = None
    ) -> None:
        await trio.sleep(100 * STEP_S)

    monkeypatch.setattr(GrammarRequests, "open_grammar", slow_form)
    saved = SavedRequest(
        request_id="r",
        prompt_token_ids=(1, 2),
        params=SamplingParams(
            n=2,
            max_tokens=4,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=StructuredOutputsParams(regex="A*"),
        ),
        answers=(
            SavedAnswer(seed=3),
            SavedAnswer(seed=4, output_token_ids=(7,)),
        ),  # which waits for no other one
        queue_time_left_s=5 * STEP_S,
    )
    async with fake_engine() as engine:
        (output,) = (await finished(engine, snapshot_of(saved)))["r"]
        assert engine.statistics().steps == 0
        assert_all_blocks_back(engine)
    assert [one.finish_reason for one in output.outputs] == [FinishReason.DEADLINE] * 2
    assert [one.token_ids for one in output.outputs] == [(), (7,)]


async def test_answers_that_had_not_begun_wait_for_the_first_one_and_end_with_it_as_before(
    autojump_clock: MockClock,
) -> None:
    saved = SavedRequest(
        request_id="r",
        prompt_token_ids=(1, 2),
        params=SamplingParams(n=3, max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY),
        answers=(SavedAnswer(seed=3), SavedAnswer(seed=4), SavedAnswer(seed=5)),
        queue_time_left_s=5 * STEP_S,
    )
    async with fake_engine(max_num_seqs=1) as engine, engine.generate([3], SamplingParams(max_tokens=20)):
        (output,) = (await finished(engine, snapshot_of(saved)))["r"]
    assert [(one.finish_reason, one.token_ids) for one in output.outputs] == [(FinishReason.DEADLINE, ())] * 3


async def test_names_of_resumed_requests_are_given_to_no_other_one(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, engine.generate([1]) as stream:
        snapshot = engine.snapshot()
        with pytest.raises(RequestIdInUse):
            async with engine.resume(snapshot)[stream.request_id]:
                pass
    async with fake_engine() as engine:
        streams = engine.resume(snapshot)
        assert engine.generate([1]).request_id not in streams


async def test_a_name_is_free_again_when_its_resumed_stream_is_dropped(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, engine.generate([1]) as stream:
        snapshot, name = engine.snapshot(), stream.request_id
    async with fake_engine() as engine:
        assert [*engine.resume(snapshot)] == [name]
        gc.collect()
        assert engine.generate([1]).request_id == name


# -------------------------------------------------------------------------------------- the bytes


def snapshot_of(*saved: SavedRequest) -> Snapshot:
    return Snapshot(architecture="Fake", vocab_size=VOCAB, requests=saved)


FULL = SavedRequest(
    request_id="any \ud800 text",
    prompt="two",
    prompt_token_ids=(1, 2),
    params=SamplingParams(
        n=2,
        max_tokens=7,
        logprobs=1,
        prompt_logprobs=0,
        logit_bias={3: 1.5},
        stop=["x"],
        structured_outputs=StructuredOutputsParams(regex="[ab]+"),
    ),
    answers=(
        SavedAnswer(
            seed=2**63 - 1,
            output_token_ids=(4,),
            output_logprobs=(TokenLogprobs((4, 1), (-0.5, -1.0), 1),),
            prompt_logprobs=(TokenLogprobs((2,), (-2.5,), 4),),
            finish_reason=FinishReason.STOP,
            stop_reason="x",
        ),
        SavedAnswer(seed=-(2**63)),
    ),
    priority=-3,
    client="somebody",
    cache_salt="salt",
    time_left_s=2.5,
    queue_time_left_s=0.0,
)


def test_what_is_written_can_be_read() -> None:
    snapshot = snapshot_of(FULL, attrs.evolve(FULL, request_id="other", prompt=None))
    assert Snapshot.from_bytes(snapshot.to_bytes()) == snapshot


def test_anything_else_is_refused_with_what_is_wrong() -> None:
    good = msgpack.unpackb(snapshot_of(FULL).to_bytes(), strict_map_key=False, unicode_errors="surrogatepass")
    for wrong, problem in (
        ({**good, "version": 2}, "must be of version 1; got 2"),
        ({**good, "vocab_size": "50"}, "must be int, got str"),
        ({**good, "extra": 1}, "extra"),
        ({key: value for key, value in good.items() if key != "requests"} | {"requests": 3}, "TypeError"),
        ([1, 2], "must be what `to_bytes` wrote"),
    ):
        with pytest.raises(SnapshotError, match=problem):
            Snapshot.from_bytes(msgpack.packb(wrong, unicode_errors="surrogatepass"))
    whole = snapshot_of(FULL).to_bytes()
    for length in range(len(whole)):
        with pytest.raises(SnapshotError):
            Snapshot.from_bytes(whole[:length])


async def test_what_another_model_began_is_refused(autojump_clock: MockClock) -> None:
    answer = SavedAnswer(seed=1, output_token_ids=(VOCAB,))
    plain = SavedRequest(request_id="r", prompt_token_ids=(1,), params=SamplingParams(), answers=(answer,))
    asking = attrs.evolve(plain, prompt_token_ids=(3, 1, 2), params=SamplingParams(prompt_logprobs=0))

    def told(*token_ids: int) -> SavedAnswer:
        return SavedAnswer(
            seed=1, prompt_logprobs=tuple(TokenLogprobs((one,), (-1.0,), 1) for one in token_ids)
        )

    async with fake_engine() as engine:
        for wrong, problem in (
            (attrs.evolve(snapshot_of(), vocab_size=3), "Fake with 50 tokens; got Fake with 3"),
            (snapshot_of(attrs.evolve(FULL, answers=())), "must have 2 answers; got 0"),
            (snapshot_of(plain), r"tokens in \[0, 50\)"),
            (
                snapshot_of(
                    attrs.evolve(
                        plain,
                        params=SamplingParams(logprobs=1),
                        answers=(attrs.evolve(answer, output_token_ids=(1,)),),
                    )
                ),
                "must have logprobs for 1 tokens; got 0",
            ),
            (snapshot_of(attrs.evolve(asking, answers=(told(1),))), "prompt logprobs for 2 tokens; got 1"),
            (snapshot_of(attrs.evolve(asking, answers=(told(1, 1),))), "the chosen one first"),
            (snapshot_of(attrs.evolve(plain, answers=(told(2),))), "prompt logprobs for 0 tokens; got 1"),
        ):
            with pytest.raises(SnapshotError, match=problem):
                engine.resume(wrong)


@pytest.mark.parametrize("min_tokens", [0, 20])
async def test_an_answer_is_as_long_as_it_would_have_been_in_an_engine_with_a_longer_context(
    min_tokens: int, autojump_clock: MockClock
) -> None:
    params = SamplingParams(seed=5, max_tokens=None, min_tokens=min_tokens)
    async with fake_engine(FakeExecutor(num_blocks=3, block_size=4)) as small, trio.open_nursery() as nursery:
        nursery.start_soon(ask, small, [1, 2, 3], params, {"request_id": "r"})
        await trio.sleep(3 * STEP_S)
        snapshot = Snapshot.from_bytes(small.snapshot().to_bytes())
        nursery.cancel_scope.cancel()
    async with fake_engine(FakeExecutor(num_blocks=64, block_size=4)) as large:
        outputs = await finished(large, snapshot)
    assert outputs["r"][-1].outputs[0].token_ids == answer_of([1, 2, 3], 5, 12 - 3)
