"""Steps that a worker has handed to its device, and whose results it tells in their order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import attrs
import pytest

from triolet.core.step_plan import StepPlan, StepResult
from triolet.workers.step_pipeline import StepPipeline


@attrs.define(eq=False)
class Step:
    """A step of a device that is done when it is told so."""

    number: int
    is_done: bool = False
    error: Exception | None = None
    done: threading.Event = attrs.field(factory=threading.Event)

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error

    def result(self) -> StepResult:
        self.wait()
        return StepResult(self.number, ())


class Device:
    """A runner whose steps are those that it is given."""

    def __init__(self, *steps: Step | Exception) -> None:
        self.steps = list(steps)

    def submit(self, plan: StepPlan) -> Step:
        step = self.steps[plan.step_id - 1]
        if isinstance(step, Exception):
            raise step
        return step

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


def pipeline_of(*steps: Step | Exception) -> tuple[StepPipeline, Callable[[], None]]:
    """A pipeline with these steps, all of them submitted, and what waits until it wakes its reader."""
    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    pipeline = StepPipeline(Device(*steps), lambda: woken.put(None))
    for number in range(1, len(steps) + 1):
        pipeline.submit(StepPlan(number, (), (), ()))
    return pipeline, lambda: woken.get(timeout=60)


def ids(results: object) -> list[int]:
    return [result.step_id for result in results]  # type: ignore[attr-defined]


def test_results_come_when_the_device_is_done_and_in_their_order() -> None:
    first, second = Step(1), Step(2)
    pipeline, woken = pipeline_of(first, second)
    assert ids(pipeline.finished()) == []
    second.done.set()  # it is not looked at before the first
    first.done.set()
    woken()
    woken()
    assert ids(pipeline.finished()) == [1, 2]


def test_a_step_that_was_computed_at_once_is_finished_without_a_thread_but_not_before_the_one_before_it() -> (
    None
):
    first, second = Step(1), Step(2, is_done=True)
    second.done.set()
    pipeline, woken = pipeline_of(first, second)
    assert ids(pipeline.finished()) == []
    first.done.set()
    woken()
    assert ids(pipeline.finished()) == [1, 2]
    alone = Step(1, is_done=True)
    alone.done.set()
    before = set(threading.enumerate())
    assert ids(pipeline_of(alone)[0].finished()) == [1]
    assert set(threading.enumerate()) <= before  # those of earlier tests may end


def test_all_steps_can_be_waited_for() -> None:
    steps = [Step(1), Step(2)]
    pipeline, _ = pipeline_of(*steps)
    for step in steps:
        step.done.set()
    assert ids(pipeline.drain()) == [1, 2]
    assert ids(pipeline.drain()) == ids(pipeline.finished()) == []


def test_without_a_thread_a_step_is_waited_for_where_it_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    steps = [Step(1), Step(2), Step(3)]
    for step in steps[:2]:
        step.done.set()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        pipeline, woken = pipeline_of(*steps[:2])
    assert ids(pipeline.finished()) == [1, 2]
    pipeline._runner.steps.append(steps[2])  # type: ignore[attr-defined]
    pipeline.submit(StepPlan(3, (), (), ()))  # when there are threads again
    assert ids(pipeline.finished()) == []
    steps[2].done.set()
    woken()
    assert ids(pipeline.finished()) == [3]


def test_an_error_of_the_device_is_raised_in_its_turn() -> None:
    first, second = Step(1), Step(2, error=RuntimeError("planted"))
    pipeline, woken = pipeline_of(first, second, ValueError("not taken"))
    first.done.set()
    second.done.set()
    woken()
    woken()
    results = pipeline.finished()
    assert next(results).step_id == 1
    with pytest.raises(RuntimeError, match="planted"):
        next(results)
    with pytest.raises(ValueError, match="not taken"):
        list(pipeline.finished())
