"""Every way out of a stream gives everything back, wherever in its life the request is, and no other request notices.

A scene puts the request into one of four states among neighbours, and afterwards looks at blocks, tasks and the
neighbours' tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
from trio.testing import MockClock, assert_no_checkpoints, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, answer_of, assert_all_blocks_back, fake_engine
from tests.actors.scene import STATES, SUBJECT_TOKENS, Scene, State, neighbours, open_scene, read
from triolet import SamplingParams
from triolet.actors.grammar_requests import GrammarRequests
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason, RequestStatus
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.engine.token_stream import TokenStream
from triolet.errors import EngineClosed


class Planted(Exception):
    pass


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Nothing here may depend on the garbage collector."""
    gc.disable()
    yield
    gc.enable()


async def last_of(stream: TokenStream) -> RequestOutput:
    outputs = [output async for output in stream]
    return outputs[-1]


# ---------------------------------------------------------------- ways out, each a story of its own


async def finished(scene: Scene) -> None:
    async with scene.subject() as stream:
        output = await last_of(stream)
    assert output.outputs[0].token_ids == scene.answer
    assert output.finish_reason is FinishReason.LENGTH


async def break_(scene: Scene) -> None:
    async with scene.subject() as stream:
        if scene.state.num_tokens == 0:  # there is no output to break at
            await scene.in_its_state()
            return
        async for _ in stream:
            await scene.in_its_state()
            break


async def exception_in_the_body(scene: Scene) -> None:
    async def fail() -> None:
        async with scene.subject():
            await scene.in_its_state()
            raise Planted

    with pytest.raises(Planted):
        await fail()


async def exception_kept_alive(scene: Scene) -> None:
    kept: list[Planted] = []
    try:
        async with scene.subject():
            await scene.in_its_state()
            raise Planted
    except Planted as error:
        kept.append(error)  # and with it the traceback, every frame in it, and the stream
    await scene.assert_nothing_is_held()
    assert kept[0].__traceback__ is not None


async def cancelled_while_waiting_for_an_output(scene: Scene) -> None:
    async def wait(*, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with scene.subject() as stream:
                task_status.started(scope)
                await last_of(stream)

    async with trio.open_nursery() as nursery:
        scope = await nursery.start(wait)
        await scene.in_its_state()
        scope.cancel()
    assert scope.cancelled_caught


async def cancelled_while_the_consumer_awaits_elsewhere(scene: Scene) -> None:
    async def stand_still(*, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
        with trio.CancelScope() as scope:
            async with scene.subject() as stream:
                task_status.started(scope)
                if scene.state.num_tokens:
                    await anext(stream)
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        scope = await nursery.start(stand_still)
        await scene.in_its_state()
        scope.cancel()
    assert scope.cancelled_caught


async def timeout(scene: Scene) -> None:
    with trio.CancelScope() as scope:
        async with scene.subject() as stream:
            scope.deadline = trio.current_time() + scene.state.after_s
            await last_of(stream)
    assert scope.cancelled_caught


async def ambient_deadline(scene: Scene) -> None:
    with trio.move_on_after(scene.state.after_s) as scope:
        async with scene.subject() as stream:
            await last_of(stream)
    assert scope.cancelled_caught


async def ambient_deadline_behind_a_shield(scene: Scene) -> None:
    with trio.move_on_after(scene.state.after_s) as scope:
        async with scene.subject() as stream:
            with trio.CancelScope(shield=True):
                output = await last_of(stream)
    assert scope.cancel_called
    assert output.outputs[0].token_ids == scene.answer


async def deadline(scene: Scene) -> None:
    async with scene.subject(deadline=trio.current_time() + scene.state.after_s) as stream:
        output = await last_of(stream)
    scene.assert_ended_early(output, FinishReason.DEADLINE)


async def deadline_while_no_task_reads(scene: Scene) -> None:
    async with scene.subject(deadline=trio.current_time() + scene.state.after_s) as stream:
        await trio.sleep(scene.state.after_s)
        await wait_all_tasks_blocked()
        await scene.assert_nothing_is_held()
        scene.assert_ended_early(await anext(stream), FinishReason.DEADLINE)


async def never_iterated(scene: Scene) -> None:
    async with scene.subject():
        await scene.in_its_state()


async def aborted_by_another_task(scene: Scene) -> None:
    outputs: list[RequestOutput] = []

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, scene.subject(), outputs)
        await scene.in_its_state()
        with assert_no_checkpoints():
            scene.engine.abort("subject")
    scene.assert_ended_early(outputs[0], FinishReason.ABORT)


async def aborted_twice(scene: Scene) -> None:
    async with scene.subject() as stream:
        await scene.in_its_state()
        scene.engine.abort("subject")
        scene.engine.abort("subject")
        scene.assert_ended_early(await last_of(stream), FinishReason.ABORT)
        scene.engine.abort("subject")


WAYS_OUT: list[Callable[[Scene], Awaitable[None]]] = [
    finished,
    break_,
    exception_in_the_body,
    exception_kept_alive,
    cancelled_while_waiting_for_an_output,
    cancelled_while_the_consumer_awaits_elsewhere,
    timeout,
    ambient_deadline,
    ambient_deadline_behind_a_shield,
    deadline,
    deadline_while_no_task_reads,
    never_iterated,
    aborted_by_another_task,
    aborted_twice,
]

in_every_state = pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)


@in_every_state
@pytest.mark.parametrize("way_out", WAYS_OUT, ids=lambda way_out: way_out.__name__)
async def test_every_way_out_gives_everything_back(
    way_out: Callable[[Scene], Awaitable[None]], state: State, autojump_clock: MockClock, no_gc: None
) -> None:
    async with open_scene(state) as scene:
        await way_out(scene)
        await scene.assert_nothing_is_held()


@in_every_state
async def test_leaving_is_not_a_checkpoint(state: State, autojump_clock: MockClock) -> None:
    async with open_scene(state) as scene:
        stream = scene.subject()
        await stream.__aenter__()
        await scene.in_its_state()
        with assert_no_checkpoints():
            await stream.__aexit__(None, None, None)
        await scene.assert_nothing_is_held()


@pytest.mark.parametrize("state", [state for state in STATES if state.name in ("prefilling", "decoding")])
async def test_what_a_step_works_on_is_quarantined_until_it_ends(
    state: State, autojump_clock: MockClock
) -> None:
    async with open_scene(state) as scene:
        async with scene.subject():
            await scene.in_its_state()
            sequence = scene.sequence()
            assert sequence is not None
            num_blocks = len(sequence.block_table)
        assert scene.engine.statistics().kv_blocks_quarantined == num_blocks
        await scene.assert_nothing_is_held()


# -------------------------------------------------------------------------- ways on, and other ends


@in_every_state
async def test_a_timeout_around_one_output_does_not_end_the_stream(
    state: State, autojump_clock: MockClock
) -> None:
    num_timeouts = 0
    outputs: list[RequestOutput] = []
    async with open_scene(state) as scene, scene.subject() as stream:
        while not (outputs and outputs[-1].finished):
            with trio.move_on_after(0.4 * STEP_S) as scope:
                outputs.append(await anext(stream))
            num_timeouts += scope.cancelled_caught
        assert outputs[-1].outputs[0].token_ids == scene.answer
    assert num_timeouts > SUBJECT_TOKENS


@in_every_state
async def test_a_deadline_around_the_entering_of_a_stream_does_not_end_the_answer(
    state: State, autojump_clock: MockClock
) -> None:
    async with open_scene(state) as scene:
        stream = scene.subject()
        with trio.fail_after(state.after_s):
            await stream.__aenter__()
        assert (await last_of(stream)).outputs[0].token_ids == scene.answer
        stream.close()


async def test_a_scope_with_a_deadline_moved_in_time_does_not_end_the_answer(
    autojump_clock: MockClock,
) -> None:
    outputs: list[RequestOutput] = []
    async with fake_engine() as engine:
        with trio.move_on_after(3 * STEP_S) as scope:
            async with engine.generate([1, 2, 3], SamplingParams(max_tokens=9)) as stream:
                async for output in stream:
                    outputs.append(output)
                    scope.deadline = trio.current_time() + 3 * STEP_S
        assert not scope.cancelled_caught
        assert outputs[-1].finish_reason is FinishReason.LENGTH


@in_every_state
async def test_queue_timeout_ends_only_a_request_that_was_never_scheduled(
    state: State, autojump_clock: MockClock
) -> None:
    async with open_scene(state) as scene:
        async with scene.subject(queue_timeout=state.after_s) as stream:
            output = await last_of(stream)
        if state.name == "queued":
            scene.assert_ended_early(output, FinishReason.DEADLINE)
            await scene.assert_nothing_is_held()
        else:
            assert output.outputs[0].token_ids == scene.answer


async def test_a_deadline_behind_the_queue_timeout_still_counts(autojump_clock: MockClock) -> None:
    state = next(state for state in STATES if state.name == "decoding")
    async with open_scene(state) as scene:
        deadline_s = trio.current_time() + state.after_s
        async with scene.subject(queue_timeout=2 * STEP_S, deadline=deadline_s) as stream:
            scene.assert_ended_early(await last_of(stream), FinishReason.DEADLINE)


async def test_a_deadline_that_has_passed_starts_no_prefill(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        await trio.sleep(2)
        async with engine.generate([1, 2, 3], deadline=trio.current_time() - 1) as stream:
            output = await last_of(stream)
        assert output.finish_reason is FinishReason.DEADLINE
        assert (output.outputs[0].token_ids, engine.statistics().steps) == ((), 0)


@in_every_state
async def test_a_closed_engine_gives_its_readers_what_there_is(
    state: State, autojump_clock: MockClock
) -> None:
    outputs: list[RequestOutput] = []
    num_tasks = trio.lowlevel.current_statistics().tasks_living
    async with trio.open_nursery() as readers:
        async with state.open_engine() as engine:
            for stream in neighbours(engine):
                readers.start_soon(read, stream, outputs)
            await wait_all_tasks_blocked()
            scene = Scene(engine, state)
            readers.start_soon(read, scene.subject(), outputs)
            await scene.in_its_state()
    (subject,) = [output for output in outputs if output.request_id == "subject"]
    scene.assert_ended_early(subject, FinishReason.SHUTDOWN)
    assert [output.finish_reason for output in outputs] == [FinishReason.SHUTDOWN] * 3
    assert engine.statistics().kv_blocks_in_use == engine.statistics().num_requests_live == 0
    assert engine.status("subject") is RequestStatus.CANCELLED
    assert trio.lowlevel.current_statistics().tasks_living == num_tasks
    with pytest.raises(EngineClosed, match="scope has ended"):
        await engine.complete([1])


async def test_a_stream_that_is_never_entered_was_never_asked_for(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        before = engine.statistics()
        engine.generate([1, 2, 3], request_id="idle")
        await trio.sleep(1)
        assert engine.statistics() == before
        assert engine.status("idle") is None


# ------------------------------------------------------------------------------------------- aborts


async def test_an_abort_flushes_the_text_that_was_held_back(autojump_clock: MockClock) -> None:
    prompt, seed = [1, 2, 3], 5
    text = "".join(chr(65 + token_id) for token_id in answer_of(prompt, seed, 4))
    params = SamplingParams(seed=seed, max_tokens=9, stop=[text[1:] + "~"])
    async with fake_engine() as engine, engine.generate(prompt, params, request_id="r") as stream:
        await trio.sleep(4.5 * STEP_S)
        assert (await anext(stream)).text == text[:1]
        engine.abort("r")
        output = await anext(stream)
    assert (output.text, output.finish_reason) == (text, FinishReason.ABORT)


async def test_aborting_an_unknown_request_does_nothing(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        before = engine.statistics()
        engine.abort("unknown")
        await wait_all_tasks_blocked()
        assert engine.statistics() == before
        assert engine.status("unknown") is None


async def test_a_request_that_is_aborted_before_its_first_step_gets_none(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        async with engine.generate([1, 2, 3], request_id="r") as stream:
            engine.abort("r")
            output = await last_of(stream)
        assert (output.finish_reason, output.outputs[0].token_ids) == (FinishReason.ABORT, ())
        assert engine.statistics().steps == 0


async def test_a_request_that_is_aborted_while_its_prompt_is_tokenised_ends_at_once(
    autojump_clock: MockClock,
) -> None:
    outputs: list[RequestOutput] = []
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read, engine.generate("HELLO", request_id="r"), outputs)
        while engine.status("r") is None:
            await trio.lowlevel.checkpoint()
        assert engine.statistics().num_requests_live == 0
        engine.abort("r")
    assert (outputs[0].finish_reason, outputs[0].text) == (FinishReason.ABORT, "")


async def test_an_abort_after_the_finish_changes_nothing(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        params = SamplingParams(max_tokens=3, seed=1)
        async with engine.generate([1, 2, 3], params, request_id="r") as stream:
            await trio.sleep(1)
            engine.abort("r")
            output = await last_of(stream)
        engine.abort("r")
        assert output.finish_reason is FinishReason.LENGTH
        assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, 3)
        assert engine.status("r") is RequestStatus.COMPLETED


@pytest.mark.parametrize("limit", ["deadline", "queue_timeout"])
async def test_a_request_without_its_form_in_time_ends_then_and_is_never_computed(
    limit: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async def slow_form(
        self: GrammarRequests, params: StructuredOutputsParams, owner: str | None = None
    ) -> None:
        await trio.sleep(100 * STEP_S)

    monkeypatch.setattr(GrammarRequests, "open_grammar", slow_form)
    async with fake_engine() as engine:
        began_s = trio.current_time()
        params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex="A*"))
        in_time = {"deadline": began_s + 5 * STEP_S, "queue_timeout": 5 * STEP_S}[limit]
        output = await engine.complete([1, 2, 3], params, **{limit: in_time})
        assert trio.current_time() == pytest.approx(began_s + 5 * STEP_S)
        assert (output.finish_reason, output.outputs[0].token_ids) == (FinishReason.DEADLINE, ())
        assert engine.statistics().steps == 0
        assert_all_blocks_back(engine)
