"""Requests that a worker reads, and what it does for them without a thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import attrs
import pytest

from tests.actors.harness import model_info
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult, StepRunner
from triolet.ipc.messages import REQUESTS, Halt, Ping, Pong, PrepareAdapter, Request
from triolet.workers import runner
from triolet.workers.runner import LONG_BYTES, READ_BYTES, SHORT_BYTES, FdTransport


@pytest.fixture
def ends() -> Iterator[tuple[FdTransport, int]]:
    """A transport, and the end that the engine writes to."""
    reading, writing = os.pipe()
    transport = FdTransport(reading, writing)
    yield transport, writing
    for fd in (reading, *transport._wakes):
        os.close(fd)


def test_short_requests_are_read_into_little_memory_and_long_ones_in_few_reads(
    ends: tuple[FdTransport, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(fd: int, num_bytes: int) -> bytes:
        sizes.append(num_bytes)
        return read_bytes(fd, num_bytes)

    (transport, writing), sizes, read_bytes = ends, list[int](), os.read
    monkeypatch.setattr(os, "read", read)
    requests = transport.requests()
    asked: list[tuple[Request, int]] = [
        (Halt(), 1),
        (PrepareAdapter("x" * 40_000, "digest", False), 2),
        (Ping(), 1),
    ]
    for request, num_reads in asked:
        sizes.clear()
        os.write(writing, REQUESTS.pack(request))
        assert next(requests) == request
        assert sizes == [SHORT_BYTES, READ_BYTES][:num_reads]
    frame = REQUESTS.pack(PrepareAdapter("", "", False))
    exact = PrepareAdapter(
        "x" * (SHORT_BYTES - len(frame) - 2), "", False
    )  # two more bytes for the longer length
    assert len(REQUESTS.pack(exact)) == SHORT_BYTES
    os.write(writing, REQUESTS.pack(exact))
    assert next(requests) == exact  # without a wait for more
    os.close(writing)
    assert list(requests) == []


def test_a_long_request_is_read_in_few_reads_of_bounded_memory(
    ends: tuple[FdTransport, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = PrepareAdapter("x" * 2**22, "digest", False)
    (transport, writing), sizes, frame = ends, list[int](), bytearray(REQUESTS.pack(request))

    def read(fd: int, num_bytes: int) -> bytes:
        sizes.append(num_bytes)
        data = bytes(frame[:num_bytes])
        del frame[:num_bytes]
        return data

    os.write(writing, b"readable")
    monkeypatch.setattr(os, "read", read)
    assert next(transport.requests()) == request
    monkeypatch.undo()
    assert max(sizes) == LONG_BYTES and len(sizes) == 6  # 4 MiB


@attrs.define(eq=False)
class Adapting:
    """A runner that notes the adapters that it prepares."""

    prepared: list[str] = attrs.field(factory=list)

    def load(self, config: EngineConfig, on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        return self, model_info(64, 4)

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step_id, ())

    def reset(self) -> None:
        raise NotImplementedError

    def prepare_adapter(self, path: str, digest: str, *, is_pinned: bool) -> None:
        self.prepared.append(path)


def test_without_a_thread_an_adapter_is_left_to_the_step_that_needs_it(
    ends: tuple[FdTransport, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    adapting, (transport, writing) = Adapting(), ends
    monkeypatch.setattr(threading.Thread, "start", fail)
    monkeypatch.setattr(
        runner, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None)
    )  # of the tests
    for request in (EngineConfig(model="nowhere"), PrepareAdapter("folder", "digest", False), Ping()):
        os.write(writing, REQUESTS.pack(request))
    os.close(writing)
    replies = [type(reply) for reply in runner._replies(adapting.load, transport)]
    assert replies == [ModelInfo, Pong]
    assert adapting.prepared == []
