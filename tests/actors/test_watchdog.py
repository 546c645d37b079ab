"""A process that hangs is killed and restarted; a request that crashes it each time fails alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.actors.harness import answer_of, assert_all_blocks_back, fake_engine
from triolet import SamplingParams
from triolet.actors import detokenizer, tokenizer
from triolet.actors.actor_progress import ActorProgress
from triolet.actors.channels import Channels, TokenizeRequest
from triolet.core.engine_core import EngineCore
from triolet.core.request.request import FinishReason
from triolet.engine import open_engine
from triolet.engine.engine import Engine
from triolet.errors import EngineUnhealthy, InvalidPrompt, RequestFailed, ResourceShortage

LIMIT_S = 1.9
NUM_TOKENS = 20


class HangingOnce:
    """An inbox that never gives the n-th message to the task that waits for it; the message stays where it is."""

    def __init__(self, inbox: Any, nth: int, told: list[int] | None = None) -> None:
        self._inbox, self._nth = inbox, nth
        self._told = [0] if told is None else told

    def clone(self) -> HangingOnce:
        return HangingOnce(self._inbox.clone(), self._nth, self._told)

    async def receive(self) -> Any:
        self._told[0] += 1
        if self._told[0] == self._nth:
            await trio.sleep_forever()
        return await self._inbox.receive()

    def __aiter__(self) -> HangingOnce:
        return self

    async def __anext__(self) -> Any:
        return await self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._inbox.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inbox, name)


async def ask(engine: Engine, seed: int, prompt: str | list[int], told: dict[int, Any]) -> None:
    try:
        output = await engine.complete(prompt, SamplingParams(max_tokens=NUM_TOKENS, seed=seed))
        told[seed] = tuple(output.outputs[0].token_ids)
    except (InvalidPrompt, RequestFailed) as error:
        told[seed] = error


async def ask_all(engine: Engine, prompts: Sequence[str | list[int]]) -> dict[int, Any]:
    """What each was told, by its place in the list, which is its seed."""
    told: dict[int, Any] = {}
    with trio.fail_after(20 * LIMIT_S):
        async with trio.open_nursery() as nursery:
            for seed, prompt in enumerate(prompts):
                nursery.start_soon(ask, engine, seed, prompt, told)
    assert_all_blocks_back(engine)
    return told


def right_answers(num_prompts: int) -> dict[int, Any]:
    """Of prompts `[1, 2, 3]`."""
    return {seed: answer_of([1, 2, 3], seed, NUM_TOKENS) for seed in range(num_prompts)}


@pytest.mark.parametrize("actor", ["scheduler", "detokenizer"])
@pytest.mark.parametrize("nth", [1, 2, 5, 15])
async def test_an_actor_that_waits_for_ever_is_named_and_healed_and_the_streams_go_on(
    actor: str, nth: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HangingChannels(Channels):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            inbox = HangingOnce(getattr(self, f"{actor}_inbox"), nth)
            setattr(self, f"{actor}_inbox", inbox)

    named: list[str] = []

    async def look(engine: Engine) -> None:
        while True:
            try:
                engine.check_health()
            except EngineUnhealthy as error:
                named.append(error.actor)
            await trio.sleep(0.1)

    monkeypatch.setattr(open_engine, "Channels", HangingChannels)
    async with fake_engine(step_timeout=LIMIT_S) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(look, engine)
        assert await ask_all(engine, [[1, 2, 3]] * 4) == right_answers(4)
        assert engine.statistics().num_restarts == 1
        assert trio.current_time() < 1.6 * LIMIT_S
        engine.check_health()
        nursery.cancel_scope.cancel()
    assert set(named) == {actor}


@pytest.mark.parametrize("actor", ["scheduler", "detokenizer"])
async def test_an_actor_that_hangs_is_healed_within_seconds_however_long_a_step_may_take(
    actor: str, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    class HangingChannels(Channels):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            setattr(self, f"{actor}_inbox", HangingOnce(getattr(self, f"{actor}_inbox"), 5))

    monkeypatch.setattr(open_engine, "Channels", HangingChannels)
    async with fake_engine(step_timeout=60.0) as engine:
        assert await ask_all(engine, [[1, 2, 3]] * 4) == right_answers(4)
        assert engine.statistics().num_restarts == 1
        assert trio.current_time() < 4.0


async def test_an_actor_that_cannot_run_because_a_task_blocks_the_loop_does_not_hang(
    autojump_clock: MockClock,
) -> None:
    async def block(engine: Engine) -> None:
        while True:
            await trio.sleep(0.0)
            autojump_clock.jump(100.0)  # as if every other step of a task took so long

    async with fake_engine(step_timeout=60.0) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(block, engine)
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=NUM_TOKENS, seed=0))
        assert tuple(output.outputs[0].token_ids) == answer_of([1, 2, 3], 0, NUM_TOKENS)
        assert engine.statistics().num_restarts == 0
        nursery.cancel_scope.cancel()


Answer = Callable[[Any, TokenizeRequest, Any], Awaitable[None]]


def misbehave_at(
    monkeypatch: pytest.MonkeyPatch, prompt: str, misdeed: Callable[[], Awaitable[None]], num_times: int
) -> None:
    """The tokenizer does something else with a prompt, so many times."""
    original: Answer = tokenizer._answer
    times: list[str] = []

    async def answer(tokenizer: Any, request: TokenizeRequest, run: Any) -> None:
        if request[0].prompt == prompt and len(times) < num_times:
            times.append(prompt)
            with request[1]:
                await misdeed()
        await original(tokenizer, request, run)

    monkeypatch.setattr(tokenizer, "_answer", answer)


async def crash() -> None:
    await trio.lowlevel.checkpoint()
    raise TimeoutError("planted")


@pytest.mark.parametrize("misdeed", [trio.sleep_forever, crash])
async def test_a_question_that_the_tokenizer_does_not_survive_is_asked_once_more(
    misdeed: Callable[[], Awaitable[None]], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    misbehave_at(monkeypatch, "BCD", misdeed, num_times=1)
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        assert await ask_all(engine, ["BCD"] * 3) == right_answers(3)
        assert engine.statistics().num_restarts == 1
        engine.check_health()


@pytest.mark.parametrize("misdeed", [trio.sleep_forever, crash])
async def test_a_prompt_that_the_tokenizer_never_survives_fails_alone_after_the_second_time(
    misdeed: Callable[[], Awaitable[None]], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    misbehave_at(monkeypatch, "BAD", misdeed, num_times=1000)
    async with fake_engine(step_timeout=LIMIT_S, max_num_seqs=6) as engine:
        told = await ask_all(engine, ["BCD"] * 4 + ["BAD"])
        with pytest.raises(InvalidPrompt, match="the tokenizer dies of it each time"):
            raise told.pop(4)
        assert told == right_answers(4)
        await trio.testing.wait_all_tasks_blocked()  # it is told at once, and its supervisor a moment later
        assert engine.statistics().num_restarts == 2
        assert not engine._progress.num_crashes


async def test_a_question_that_a_thread_works_on_is_no_hang(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_engine(step_timeout=LIMIT_S) as engine:

        async def think() -> None:
            engine._progress.num_tokenizing += 1
            await trio.sleep(5 * LIMIT_S)
            engine._progress.num_tokenizing -= 1

        original: Answer = tokenizer._answer

        async def answer(tokenizer: Any, request: TokenizeRequest, run: Any) -> None:
            await think()
            await original(tokenizer, request, run)

        monkeypatch.setattr(tokenizer, "_answer", answer)
        assert await ask_all(engine, ["BCD"]) == right_answers(1)
        assert engine.statistics().num_restarts == 0


@pytest.mark.parametrize("num_times", [1, 1000])
async def test_a_stream_that_the_detokenizer_dies_of_twice_fails_alone(
    num_times: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, times = detokenizer.deliver, list[int]()

    def deliver(core: EngineCore, progress: ActorProgress, serial: int, now_s: float) -> None:
        output = core.outputs.get(serial)
        is_far = output is not None and len(output.entry.output_token_ids) > 4
        if serial == 2 and is_far and len(times) < num_times:
            times.append(serial)
            raise TimeoutError("planted")
        original(core, progress, serial, now_s)

    monkeypatch.setattr(detokenizer, "deliver", deliver)
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        told = await ask_all(engine, [[1, 2, 3]] * 4)
        expected = right_answers(4)
        if num_times > 1:
            [failed] = [seed for seed, answer in told.items() if isinstance(answer, RequestFailed)]
            error = told.pop(failed)
            del expected[failed]
            assert "crashes the detokenizer each time" in str(error)
            assert isinstance(error.__cause__, TimeoutError)
        assert told == expected
        assert engine.statistics().num_restarts == 1
        assert engine.statistics().num_requests_ended.get(FinishReason.ERROR, 0) == (num_times > 1)


async def test_a_prompt_that_finds_no_thread_fails_alone_and_is_not_blamed(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tokenizer._tokenize

    def tokenize(of: Any, message: Any) -> Any:
        if message.prompt == "AB":
            raise RuntimeError("can't start new thread")
        return original(of, message)

    monkeypatch.setattr(tokenizer, "_tokenize", tokenize)
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        with pytest.raises(ResourceShortage, match="processes or threads for tokenizing the prompt"):
            await engine.complete("AB")
        output = await engine.complete("ABC", SamplingParams(max_tokens=3))
        assert len(output.outputs[0].token_ids) == 3
        assert engine.statistics().num_restarts == 0


async def test_a_tokenizer_that_finds_no_thread_to_be_read_in_is_a_shortage(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    with pytest.raises(ResourceShortage, match="processes or threads for loading the tokenizer"):
        async with fake_engine(runner="thread"):
            pass


async def test_an_idle_engine_is_left_alone(autojump_clock: MockClock) -> None:
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        await trio.sleep(100 * LIMIT_S)
        assert await ask_all(engine, [[1, 2, 3]] * 2) == right_answers(2)
        assert engine.statistics().num_restarts == 0
