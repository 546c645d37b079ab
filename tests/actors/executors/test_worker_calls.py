"""Calls into the worker, on every executor: what they return and raise, and that the runner outlives them."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
import trio

from tests.actors.executors.fake_worker import Misbehaving, OwnError
from tests.actors.executors.harness import executor_that, ignore
from tests.actors.harness import LetterTokenizer, answer_of
from triolet import SamplingParams
from triolet.actors.executors import call_frames, process
from triolet.actors.executors.call_frames import packed_call
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.in_process import InlineExecutor, ThreadExecutor
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import StepRunner
from triolet.core.worker_call import WorkerCall
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.errors import (
    EngineUnhealthy,
    InvalidRequest,
    ResourceShortage,
    RunnerDied,
    UnknownWorkerMethod,
    UnsupportedFeature,
    WorkerCallError,
    WorkerCallTimeout,
)
from triolet.ipc.failures import rebuild_call_error
from triolet.ipc.messages import HEADER_BYTES, REPLIES, REQUESTS, CallAnswer, CallWorker, Way
from triolet.workers import runner

RUNNERS = ["inline", "thread", "process"]


def make(runner: str) -> Executor:
    if runner == "process":
        return executor_that()
    kind = InlineExecutor if runner == "inline" else ThreadExecutor
    return kind(partial(Misbehaving().load, EngineConfig(model="nowhere")))


@pytest.mark.parametrize("runner", RUNNERS)
async def test_a_call_returns_and_raises_what_its_method_does_and_the_runner_goes_on(runner: str) -> None:
    executor = make(runner)

    async def call(method: str | Any, *args: Any, **kwargs: Any) -> Any:
        outcome = await executor.call(WorkerCall(method, False, args, kwargs), 30.0)
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    async with executor.running():
        await executor.start(ignore)
        values = (
            None,
            True,
            -(2**63),
            2**64 - 1,
            1.5,
            "\u00e9\ud800",
            b"\xff",
            [1, (2, {"a": ()})],
            {3: [None]},
        )
        assert await call("echo", *values, text="x") == (list(values), {"text": "x"})
        for method, error in {"refuse": KeyError, "unheard_of": UnknownWorkerMethod}.items():
            with pytest.raises(error, match=r"planted|echo"):
                await call(method)
        with pytest.raises(OwnError if runner != "process" else WorkerCallError, match="planted"):
            await call("own_error")
        with pytest.raises(SystemExit if runner != "process" else WorkerCallError, match="3"):
            await call("leave")
        if runner == "process":
            with pytest.raises(UnsupportedFeature, match="code does not cross its pipe"):
                await call(os.getpid)
            for wrong in ({1}, 2**64, object()):
                with pytest.raises(InvalidRequest, match="plain values and tensors"):
                    await call("echo", wrong)
            with pytest.raises(TypeError, match="the result of a_set must be plain values"):
                await call("a_set")
        else:
            assert isinstance(await call(lambda worker, x: (worker, x)[1], 5), int)
        assert await call("echo") == ([], {})


async def test_a_result_that_cannot_be_read_is_the_calls_error_and_the_process_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(answer: object) -> object:
        raise error

    executor, echo = executor_that(), WorkerCall("echo")
    async with executor.running():
        await executor.start(ignore)
        first = executor._process
        for error in (KeyError("no such dtype"), MemoryError()):
            with monkeypatch.context() as patch:
                patch.setattr(process, "value_of", fail)
                assert (await executor.call(echo, 30.0)).error is error
        assert (await executor.call(echo, 30.0)).value == ([], {})
        assert executor._process is first


async def test_the_message_of_a_call_is_packed_once_at_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[str] = []

    def pack(way: Way[Any], message: Any) -> bytes:
        packed.append(type(message).__name__)
        return pack_message(way, message)

    pack_message = Way.pack
    monkeypatch.setattr(Way, "pack", pack)
    executor = make("process")
    async with executor.running():
        await executor.start(ignore)
        packed.clear()
        outcome = await executor.call(WorkerCall("echo", False, ("x",), {}), 30.0)
        assert (outcome.value, packed) == ((["x"], {}), ["CallWorker"])
    packed.clear()
    told(Misbehaving().load(EngineConfig(model="nowhere"), ignore)[0], packed_call(WorkerCall("echo")))
    assert packed == ["CallWorker", "CallAnswer"]


def told(worker: StepRunner, frame: bytes) -> CallAnswer:
    """Return the answer of a runner to the frame of a call."""
    request = REQUESTS.unpack(frame[HEADER_BYTES:])
    assert isinstance(request, CallWorker)
    answer = REPLIES.unpack(runner._answer(worker, request)[HEADER_BYTES:])
    assert isinstance(answer, CallAnswer)
    return answer


def tensors_without_plain_bytes() -> dict[str, torch.Tensor]:
    return {
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "nested": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        "quantized": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    }


@pytest.mark.parametrize("kind", ["sparse", "meta", "nested", "quantized"])
@pytest.mark.filterwarnings("ignore")
async def test_a_tensor_that_cannot_cross_the_pipe_is_the_calls_error(kind: str) -> None:
    tensor = tensors_without_plain_bytes()[kind]
    with pytest.raises(InvalidRequest, match="args and kwargs must be plain values and tensors"):
        packed_call(WorkerCall("echo", False, (tensor,)))

    class Returning(Misbehaving):
        def call(self, call: WorkerCall) -> Any:
            return tensor

    answer = told(Returning(), packed_call(WorkerCall("a_tensor")))
    assert answer.failure is not None and answer.failure.kind == "TypeError"
    assert "the result of a_tensor must be plain values and tensors" in answer.failure.message


async def test_a_call_for_which_there_is_no_memory_is_a_shortage_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError

    request = packed_call(WorkerCall("echo"))
    for module in (call_frames, runner):
        monkeypatch.setattr(module, "pack_value", fail)
    with pytest.raises(ResourceShortage, match="memory for a call into the worker"):
        packed_call(WorkerCall("echo"))
    answer = told(Misbehaving().load(EngineConfig(model="nowhere"), ignore)[0], request)
    assert answer.failure is not None and answer.failure.kind == "ResourceShortage"
    assert isinstance(rebuild_call_error(answer.failure), ResourceShortage)


@pytest.mark.parametrize(
    ("method", "limit_s"),
    [
        ("hang", 0.5),
        pytest.param("hang", None, marks=pytest.mark.slow),  # as long as a step may take
        pytest.param("exit", 30.0, marks=pytest.mark.slow),
    ],
)
async def test_a_call_that_hangs_or_dies_ends_its_process_and_the_streams_go_on(
    method: str, limit_s: float | None
) -> None:
    config = EngineConfig(runner="process", max_num_seqs=4, max_num_batched_tokens=16, step_timeout=2.0)
    params = SamplingParams(max_tokens=60, seed=5)
    async with run_engine(config, executor_that(), LetterTokenizer) as engine:
        with trio.fail_after(300):
            async with engine.generate([5] * 5, params) as stream:
                await stream.__anext__()
                error = WorkerCallTimeout if method == "hang" else RunnerDied
                with pytest.raises(error, match=method if method == "hang" else "exit status 3"):
                    await engine.collective_rpc(method, timeout=limit_s)
                text = await stream.text()
            assert [ord(char) - 65 for char in text] == list(answer_of([5] * 5, 5, 60))
            assert engine.statistics().num_restarts == 1
            assert await engine.collective_rpc("echo", args=(1,), kwargs={"a": 2}) == [([1], {"a": 2})]


async def test_a_caller_stops_waiting_in_time_and_the_thread_ends_the_call_before_the_next() -> None:
    is_released, ended = threading.Event(), []

    def dawdle(runner: object) -> None:
        is_released.wait(60)
        ended.append(runner)

    async with run_engine(EngineConfig(runner="thread"), make("thread"), LetterTokenizer) as engine:
        with pytest.raises(TimeoutError, match=r"dawdle must end within 0\.01 s"):
            await engine.collective_rpc(dawdle, timeout=0.01)
        is_released.set()
        assert await engine.collective_rpc("echo") == [([], {})]
        assert len(ended) == 1
        assert engine.statistics().num_restarts == 0


async def test_a_call_that_hangs_in_a_thread_makes_the_engine_unhealthy_until_it_ends() -> None:
    is_released = threading.Event()
    config = EngineConfig(runner="thread", step_timeout=0.2)
    async with (
        run_engine(config, make("thread"), LetterTokenizer) as engine,
        engine.generate([5] * 5, SamplingParams(max_tokens=60, seed=5)) as stream,
        trio.open_nursery() as nursery,
    ):
        await stream.__anext__()
        nursery.start_soon(engine.apply_model, lambda model: is_released.wait(60))
        with trio.fail_after(300):
            while is_healthy(engine):  # noqa: ASYNC110 - health is asked for, and tells of no change
                await trio.sleep(0.01)
            is_released.set()
            text = await stream.text()
        assert [ord(char) - 65 for char in text] == list(answer_of([5] * 5, 5, 60))
        assert is_healthy(engine)
        assert engine.statistics().num_restarts == 0


def is_healthy(engine: Engine) -> bool:
    try:
        engine.check_health()
    except EngineUnhealthy:
        return False
    return True
