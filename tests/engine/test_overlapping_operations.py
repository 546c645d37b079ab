"""Sleep, pauses and exchanges of weights that meet each other, crashes and deadlines: each keeps what it promises."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, VOCAB, answer_of, fake_engine
from tests.core.fake_model import WEIGHTS, next_token
from tests.engine.test_sleep import LOAD_S, Sleeper
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.engine import weights
from triolet.engine.engine import Engine
from triolet.errors import EngineDead, InvalidRequest, ResourceShortage, RunnerDied

NUM_TOKENS = 20


@pytest.fixture(autouse=True)
def _any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No files are looked at: the fake model's weights are the number at the end of the name of a folder."""
    monkeypatch.setattr(weights, "check_folder", lambda current, new: None)


async def read(engine: Engine, outputs: list[RequestOutput], deadline: float | None = None) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=1)
    outputs.append(await engine.complete([1, 2], params, deadline=deadline))


async def first_token(engine: Engine) -> tuple[int, int]:
    """A token, and the version of the weights that it names."""
    [answer] = (await engine.complete([1], SamplingParams(max_tokens=1, seed=0))).outputs
    return answer.token_ids[0], answer.weight_version


def token_of(number: int) -> int:
    """What these weights say."""
    return next_token([1 + number * WEIGHTS], 0, VOCAB)


async def test_weights_that_were_loading_when_others_were_asked_for_are_a_version_of_their_own(
    autojump_clock: MockClock,
) -> None:
    executor = Sleeper()
    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:
        await engine.sleep(1)
        assert await engine.reload_weights("/new-3") == 1
        nursery.start_soon(engine.wake_up)
        await trio.sleep(LOAD_S / 2)
        assert executor.folder == "/new-3"
        nursery.start_soon(engine.reload_weights, "/new-4")
        await trio.sleep(LOAD_S)
        assert (engine.weight_version, engine.weights_folder) == (1, "/new-3")
        assert await first_token(engine) == (token_of(4), 2)
        assert engine.weights_folder == "/new-4"


async def test_an_exchange_that_is_cancelled_while_the_old_weights_are_loaded_changes_nothing(
    autojump_clock: MockClock,
) -> None:
    executor = Sleeper()
    async with fake_engine(executor) as engine:
        await engine.sleep(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.wake_up)
            await trio.sleep(LOAD_S / 4)
            with trio.move_on_after(LOAD_S / 4) as scope:
                await engine.reload_weights("/new-3")
        assert scope.cancelled_caught
        assert await first_token(engine) == (token_of(0), 0)
        assert (engine.weight_version, executor.num_unloads) == (0, 1)


async def test_what_a_cancelled_exchange_had_replaced_is_loaded(autojump_clock: MockClock) -> None:
    outputs = list[RequestOutput]()
    async with fake_engine(Sleeper()) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read, engine, outputs)
        await trio.sleep(2.5 * STEP_S)
        await engine.sleep(1, "keep")
        assert await engine.reload_weights("/new-3", mode="wait") == 1
        nursery.start_soon(engine.wake_up)
        await trio.sleep(LOAD_S / 4)
        with trio.move_on_after(LOAD_S / 4) as scope:
            await engine.reload_weights("/new-4")
        assert scope.cancelled_caught
        assert await first_token(engine) == (token_of(3), 1)
        assert outputs[0].outputs[0].token_ids == answer_of([1, 2], 1, NUM_TOKENS)


@pytest.mark.parametrize("operation", ["sleep", "pause", "reload"])
async def test_what_waits_for_the_live_ones_waits_for_them_also_in_a_pause(
    operation: str, autojump_clock: MockClock
) -> None:
    executor, outputs, ended = Sleeper(), list[RequestOutput](), list[str]()
    async with fake_engine(executor) as engine, trio.open_nursery() as nursery:

        async def wait() -> None:
            if operation == "sleep":
                await engine.sleep(1, "wait")
            elif operation == "pause":
                await engine.pause_generation("wait")
            else:
                await engine.reload_weights("/new-3", mode="wait")
            ended.append(operation)

        nursery.start_soon(read, engine, outputs)
        await trio.sleep(2.5 * STEP_S)
        # of a pause beside a pause there is one; beside a sleep they are two
        await (engine.sleep(0, "keep") if operation == "pause" else engine.pause_generation("keep"))
        nursery.start_soon(wait)
        await trio.sleep(10 * LOAD_S)
        assert not ended and not outputs and executor.num_unloads == 0
        if operation == "pause":
            await engine.wake_up()
        else:
            engine.resume_generation()
        await trio.sleep(2 * LOAD_S)
        assert ended == [operation]
        [output] = outputs
        assert output.outputs[0].token_ids == answer_of([1, 2], 1, NUM_TOKENS)
        assert output.outputs[0].weight_version == 0


async def test_a_sleep_begins_when_the_last_request_that_it_waits_for_ends_by_its_deadline(
    autojump_clock: MockClock,
) -> None:
    outputs = list[RequestOutput]()
    async with fake_engine(Sleeper()) as engine, trio.open_nursery() as nursery:
        await engine.pause_generation("keep")
        nursery.start_soon(read, engine, outputs, trio.current_time() + 1)
        await wait_all_tasks_blocked()
        with trio.fail_after(2):
            await engine.sleep(1, "wait")
        assert engine.is_sleeping
        await wait_all_tasks_blocked()
        assert outputs[0].finish_reason == "deadline"


async def read_from_the_dead(engine: Engine) -> None:
    with pytest.raises(EngineDead):
        await engine.complete([1])


async def test_nothing_wakes_a_dead_engine(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(read_from_the_dead, engine)
        await wait_all_tasks_blocked()
        engine._die(RunnerDied("killed", -9))
        with pytest.raises(EngineDead):
            await engine.wake_up()


async def test_a_shortage_of_processes_refuses_no_weights(autojump_clock: MockClock) -> None:
    executor = Sleeper()
    async with fake_engine(executor) as engine:
        executor.faults = [ResourceShortage("processes or threads", "a process for the model runner")] * 2
        assert await engine.reload_weights("/new-3") == 1
        assert await first_token(engine) == (token_of(3), 1)


async def test_an_update_in_sleep_comes_on_top_of_the_one_before(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[tuple[str, str]]()
    monkeypatch.setattr(
        weights, "write_update", lambda current, new, updates: written.append((str(current), str(new)))
    )
    async with fake_engine(Sleeper()) as engine:
        await engine.sleep(1)
        assert await engine.update_weights({"a": 1}) == await engine.update_weights({"b": 2}) == 1
        assert [current for current, _ in written] == ["/nowhere", written[0][1]]
        for wrong in (5, [1], ["abc"]):
            with pytest.raises(InvalidRequest, match="tensors must be a mapping or pairs"):
                await engine.update_weights(wrong)  # type: ignore[arg-type]
