"""An engine is healthy while steps finish or no request waits; otherwise it names what the requests wait for."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import FakeExecutor, answer_of, fake_engine
from triolet import SamplingParams
from triolet.actors import detokenizer, supervision_tree, watchdog
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.registry import EXECUTORS, open_executor
from triolet.config.choices import RUNNERS
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import StepPlan, StepResult
from triolet.engine.engine import Engine
from triolet.errors import EngineClosed, EngineDead, EngineUnhealthy

LIMIT_S = 10.0


class SlowExecutor(FakeExecutor):
    """Step `slow_step` takes `slow_s` and ends in a crash; every life but the first takes `start_s` to begin."""

    def __init__(self, slow_step: int = 0, slow_s: float = 0.0, start_s: float = 0.0) -> None:
        super().__init__(num_blocks=64, block_size=4)
        self.slow_step, self.slow_s, self.start_s = slow_step, slow_s, start_s

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.num_lives:
            await trio.sleep(self.start_s)
        return await super().start(on_progress)

    async def compute(self, plan: StepPlan) -> StepResult:
        result = await super().compute(plan)
        if len(self.plans) == self.slow_step:
            await trio.sleep(self.slow_s)
            raise TimeoutError("planted")
        return result


async def assert_stuck_then_well(engine: Engine, actor: str, stuck_s: float) -> None:
    """A request stands still for `stuck_s`: well until the limit, unhealthy from then on, well at its end."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=20, seed=3)
    async with engine.generate(prompt, params) as stream:
        began_s = trio.current_time()
        while trio.current_time() < began_s + LIMIT_S - 1:
            await trio.sleep(0.5)
            engine.check_health()
        await trio.sleep(2)
        while trio.current_time() < began_s + stuck_s - 1:
            with pytest.raises(EngineUnhealthy, match=f"^{actor} is stuck: requests are waiting") as caught:
                engine.check_health()
            assert caught.value.actor == actor
            assert caught.value.waiting_s == pytest.approx(trio.current_time() - began_s, abs=0.5)
            await trio.sleep(0.5)
        outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].token_ids == answer_of(prompt, 3, 20)
    engine.check_health()


async def test_an_idle_engine_is_well_for_ever(autojump_clock: MockClock) -> None:
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        await trio.sleep(1000)
        engine.check_health()
        await engine.complete([1], SamplingParams(max_tokens=5))
        await trio.sleep(1000)
        engine.check_health()


async def test_an_engine_that_makes_steps_is_well_however_long_it_takes(autojump_clock: MockClock) -> None:
    async with fake_engine(step_timeout=0.05) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(engine.complete, [1], SamplingParams(max_tokens=100))
        for _ in range(20):
            await trio.sleep(0.04)
            engine.check_health()
        assert engine.statistics().num_requests_live == 1


async def test_a_step_that_hangs_is_the_runners_until_it_is_mended(autojump_clock: MockClock) -> None:
    async with fake_engine(SlowExecutor(slow_step=4, slow_s=50), step_timeout=LIMIT_S) as engine:
        await assert_stuck_then_well(engine, "model_runner", 50)


async def test_a_long_restart_is_the_runners(autojump_clock: MockClock) -> None:
    async with fake_engine(SlowExecutor(slow_step=4, start_s=50), step_timeout=LIMIT_S) as engine:
        await assert_stuck_then_well(engine, "model_runner", 50)


async def test_a_restart_while_no_request_waits_is_no_illness(autojump_clock: MockClock) -> None:
    executor = SlowExecutor(slow_step=1, start_s=50)
    async with fake_engine(executor, step_timeout=LIMIT_S) as engine:
        async with engine.generate([1], SamplingParams(max_tokens=5)):
            await trio.sleep(LIMIT_S + 5)
            with pytest.raises(EngineUnhealthy):
                engine.check_health()
        engine.check_health()
        await trio.sleep(20)
        assert executor.num_lives == 1
        engine.check_health()


async def test_no_plan_is_the_schedulers_fault(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, begins_s = Scheduler.plan_step, 40.0

    def plan_late(self: Scheduler, now_s: float) -> StepPlan | None:
        return original(self, now_s) if now_s >= began_s + begins_s else None

    async with fake_engine(step_timeout=LIMIT_S) as engine, trio.open_nursery() as nursery:
        began_s = trio.current_time()
        monkeypatch.setattr(Scheduler, "plan_step", plan_late)
        nursery.start_soon(wake_after, engine, begins_s)
        await assert_stuck_then_well(engine, "scheduler", begins_s)


async def wake_after(engine: Engine, seconds: float) -> None:
    await trio.sleep(seconds)
    engine._channels.wake_scheduler()


async def test_unread_progress_is_the_detokenizers_fault(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, lives = detokenizer.detokenizer_actor, []

    async def late(*args: object, task_status: trio.TaskStatus[None]) -> None:
        lives.append(args)
        if len(lives) == 1:
            task_status.started()
            await trio.sleep(40)
        await original(*args, task_status=task_status)  # type: ignore[arg-type]

    monkeypatch.setattr(supervision_tree, "detokenizer_actor", late)
    monkeypatch.setattr(watchdog, "MAX_SILENCE_S", LIMIT_S)  # health speaks before the watchdog acts
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        await assert_stuck_then_well(engine, "detokenizer", 1.25 * LIMIT_S)  # then its watchdog has come
    assert len(lives) == 2


async def test_text_that_was_not_delivered_at_all_is_the_detokenizers_fault(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: object, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep_forever()

    monkeypatch.setattr(supervision_tree, "detokenizer_actor", never)
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        async with engine.generate([1], SamplingParams(max_tokens=1)):
            await trio.sleep(LIMIT_S + 1)
            assert engine.statistics().num_requests_live == 0
            with pytest.raises(EngineUnhealthy, match="detokenizer is stuck"):
                engine.check_health()


async def test_a_question_without_an_answer_is_the_tokenizers_fault(
    autojump_clock: MockClock, stuck_tokenizer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "MAX_SILENCE_S", LIMIT_S)  # health speaks before the watchdog acts
    async with fake_engine(step_timeout=LIMIT_S) as engine:
        with trio.move_on_after(LIMIT_S + 5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine.complete, "AB")
                await trio.sleep(LIMIT_S - 1)
                engine.check_health()
                await trio.sleep(2)
                with pytest.raises(EngineUnhealthy, match=r"tokenizer is stuck: .* for 11\.0 s"):
                    engine.check_health()
                await trio.sleep_forever()
        engine.check_health()


async def test_without_a_limit_nothing_takes_too_long(autojump_clock: MockClock) -> None:
    async with fake_engine(SlowExecutor(slow_step=4, slow_s=1e6), step_timeout=None) as engine:
        async with engine.generate([1], SamplingParams(max_tokens=5)):
            await trio.sleep(1e4)
            engine.check_health()


async def test_an_engine_that_has_closed_serves_no_request_and_one_that_drains_still_does(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine() as engine:
        await engine.drain(trio.current_time())
        engine.check_health()
    with pytest.raises(EngineClosed, match="scope has ended"):
        engine.check_health()


async def test_a_dead_engine_says_that_it_is_dead(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)

    def crash(plan: StepPlan) -> None:
        raise TimeoutError("planted")

    executor.before_step = crash
    async with fake_engine(executor) as engine:
        with pytest.raises(EngineDead):
            await engine.complete([1], SamplingParams(max_tokens=5))
        with pytest.raises(EngineDead, match="planted"):
            engine.check_health()


@pytest.mark.parametrize(
    ("runner", "kind"), [("thread", ThreadExecutor), ("process", ProcessExecutor), ("inline", InlineExecutor)]
)
def test_the_configuration_names_the_executor(runner: str, kind: type) -> None:
    with open_executor(EngineConfig(runner=runner)) as executor:
        assert type(executor) is kind


def test_every_runner_of_the_configuration_has_an_executor() -> None:
    assert {*EXECUTORS, "auto"} == set(RUNNERS)
