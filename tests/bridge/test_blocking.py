"""`triolet.blocking`: the promises of native streams hold in threads; the fake model's answers are the oracle."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import trio

import triolet
from tests.actors.harness import answer_of
from tests.bridge.harness import FastExecutor, engine_thread, no_thread_is_left
from triolet import SamplingParams, blocking
from triolet.blocking import BlockingEngine, BlockingTokenStream
from triolet.errors import (
    ConfigError,
    EngineClosed,
    InvalidRequest,
    StreamMisused,
    UnsupportedFeature,
    WrongEventLoop,
)

LONG = SamplingParams(max_tokens=200, seed=3)


@contextmanager
def opened(executor: FastExecutor | None = None, **fields: object) -> Iterator[BlockingEngine]:
    with no_thread_is_left():
        thread = engine_thread(executor, **fields)
        try:
            yield BlockingEngine(thread, thread.opened.result())
        finally:
            thread.stop()
            thread.finish()


def params(num_tokens: int, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, seed=seed)


def read(stream: BlockingTokenStream) -> tuple[int, ...]:
    token_ids: tuple[int, ...] = ()
    for output in stream:
        token_ids = tuple(output.outputs[0].token_ids)
    return token_ids


def test_a_stream_gives_every_token_in_order() -> None:
    with opened() as engine, engine.generate([1, 2, 3], params(40)) as stream:
        seen = [output.outputs[0].token_ids for output in stream]
        answer = answer_of([1, 2, 3], 3, 40)
        assert all(token_ids == answer[: len(token_ids)] for token_ids in seen)
        assert seen[-1] == answer
        assert stream.text() == "".join(chr(65 + token) for token in answer)


def test_a_whole_answer_is_one_output() -> None:
    with opened() as engine:
        assert engine.complete([5, 6], params(12)).outputs[0].token_ids == answer_of([5, 6], 3, 12)


def test_leaving_the_scope_by_an_error_ends_the_request_first() -> None:
    with opened(FastExecutor(step_s=0.005)) as engine:

        def interrupted() -> None:
            with engine.generate([1], LONG) as stream:
                next(stream)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert engine.statistics().num_requests_live == 0


def test_many_threads_ask_one_engine() -> None:
    with opened(max_num_seqs=8) as engine, ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> None:
            with engine.generate([number], params(20, number)) as stream:
                if number % 3:
                    assert read(stream) == answer_of([number], number, 20)
                else:
                    next(stream)

        list(pool.map(ask, range(40)))
        assert engine.statistics().num_requests_live == 0


def test_a_deadline_is_a_monotonic_time() -> None:
    with opened(FastExecutor(step_s=0.01)) as engine:
        deadline = time.monotonic() + 0.1
        output = engine.complete([1], LONG, deadline=deadline)
        assert output.outputs[0].finish_reason == "deadline"
        assert time.monotonic() >= deadline


def test_a_deadline_does_not_move_while_a_stream_is_not_entered() -> None:
    with opened() as engine:
        stream = engine.generate([1], LONG, deadline=time.monotonic() + 0.5)
        time.sleep(0.6)  # until it is over
        with stream:
            [output] = stream
        assert output.outputs[0].finish_reason == "deadline"
        assert output.outputs[0].token_ids == ()


def test_progress_can_be_followed() -> None:
    prompt = list(range(40))
    with (
        opened(FastExecutor(step_s=0.002)) as engine,
        engine.generate(prompt, params(3)) as stream,
    ):
        computed = [progress.num_computed_tokens for progress in stream.follow()]
        assert computed == sorted(computed)
        assert computed[-1] == 40
        assert read(stream) == answer_of(prompt, 3, 3)


def test_a_follower_that_is_closed_ends_without_an_error() -> None:
    with opened(FastExecutor(step_s=0.005)) as engine:
        follower = engine.follow_restarts()
        assert next(follower) == ()
        follower.close()
        assert list(follower) == [] and engine.is_open


def test_a_drain_returns_what_another_engine_resumes() -> None:
    answer = answer_of([1, 2], 3, 200)
    with opened(FastExecutor(step_s=0.005)) as first, first.generate([1, 2], LONG) as stream:
        next(stream)
        snapshot = first.drain(time.monotonic() + 0.05)
        part = read(stream)
    assert part == answer[: len(part)]
    with opened() as second:
        (resumed,) = second.resume(snapshot).values()
        with resumed:
            assert read(resumed) == answer


def test_a_stream_is_read_inside_of_its_scope_by_one_thread() -> None:
    with opened(FastExecutor(step_s=0.005)) as engine:
        stream = engine.generate([1], LONG)
        with pytest.raises(StreamMisused, match="inside"):
            next(stream)
        with stream:
            reader = threading.Thread(target=lambda: read(stream))
            next(stream)
            stream._is_read = True  # as while another thread waits
            with pytest.raises(StreamMisused, match="one reader"):
                next(stream)
            stream._is_read = False
            reader.start()
            engine.abort(stream.request_id)
            reader.join()
            with pytest.raises(StreamMisused, match="entered once"):
                stream.__enter__()


def test_wrong_arguments_are_told_where_the_scope_is_entered() -> None:
    with opened() as engine:
        with pytest.raises(InvalidRequest, match="prompt"), engine.generate(7):  # type: ignore[arg-type]
            pass
        assert engine.complete([1], params(3)).finished


def test_a_cancelled_call_ends_as_cancelled_and_not_because_the_engine_is_closed() -> None:
    thread = engine_thread()
    thread.opened.result()
    call = thread.submit(trio.sleep_forever)
    call.cancel()
    with pytest.raises(CancelledError):
        call.future.result(timeout=60)
    thread.stop()
    thread.finish()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libraries do not expect a fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_may_leave_the_scopes_of_an_engine_and_not_use_it() -> None:
    fork = multiprocessing.get_context("fork")
    news, told = fork.Pipe(duplex=False)

    def child() -> None:
        calls: list[Callable[[], object]] = [
            engine.statistics,
            lambda: engine.complete([1], params(3)),
            lambda: engine.drain(time.monotonic()),
            engine.follow_restarts,
            lambda: next(stream),
            stream.text,
        ]
        for call in calls:
            with pytest.raises(WrongEventLoop) as caught:
                call()
            told.send(str(caught.value))
        stream.__exit__(None, None, None)
        engine._thread.stop()
        engine._thread.finish()
        told.send("left")

    with opened(FastExecutor(step_s=0.002)) as engine, engine.generate([1], LONG) as stream:
        process = fork.Process(target=child)
        process.start()
        process.join(timeout=300)
        process.kill()  # one that hangs
        answers = [news.recv() for _ in range(7) if news.poll()]
        assert read(stream) == answer_of([1], 3, 200)
    assert answers[6:] == ["left"]
    message = (
        f"an engine must be used in the process in which it was opened, {os.getpid()}; got a call in "
        f"{process.pid}, which is a fork of it"
    )
    assert answers[:6] == [message] * 6


def test_an_engine_is_closed_once_its_scope_has_ended() -> None:
    with opened() as engine:
        pass
    with pytest.raises(EngineClosed):
        engine.statistics()
    with pytest.raises(EngineClosed):
        engine.complete([1], params(3))


def test_opening_tells_of_progress_in_the_callers_thread_and_serves_text() -> None:
    threads = set()

    def note(progress: object) -> None:
        threads.add(threading.current_thread())

    with (
        no_thread_is_left(),
        blocking.open_engine(runner="inline", num_kv_blocks=64, on_progress=note) as engine,
    ):
        assert engine.complete("Once upon", params(4)).outputs[0].text
    assert threads == {threading.current_thread()}


def test_embeddings_come_in_the_order_of_their_prompts() -> None:
    with blocking.open_engine(runner="inline", num_kv_blocks=64, convert="embed") as engine:
        first, second = engine.embed(["Once", "Hello"], deadline=time.monotonic() + 60)
        again = engine.encode_all(["Hello", "Once"])
    assert first.outputs.embedding != second.outputs.embedding
    for output, other in zip((second, first), again, strict=True):
        assert output.outputs.embedding == pytest.approx(other.outputs.data.tolist(), abs=1e-6)


def test_a_beam_search_is_a_method_and_the_function_refuses_the_engine_at_once() -> None:
    asked = triolet.BeamSearchParams(beam_width=2, max_tokens=3)
    with blocking.open_engine(runner="inline", num_kv_blocks=64) as engine:
        found = engine.beam_search("Once upon a time", asked, deadline=time.monotonic() + 60)
        assert [len(beam.output_token_ids) for beam in found.sequences] == [3, 3]
        native: Any = engine
        with pytest.raises(WrongEventLoop, match=r"have a method beam_search$"):
            _ = triolet.beam_search(native, "Once upon a time", asked)


def test_the_stream_of_one_embedding_is_refused_with_what_to_use_instead() -> None:
    with opened() as engine, pytest.raises(UnsupportedFeature, match="encode_all takes a list of prompts"):
        engine.encode("Once upon a time")


def test_an_engine_that_cannot_be_opened_tells_why() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"), blocking.open_engine(max_num_seqs=0):
        pass


async def test_under_trio_a_blocking_engine_is_refused() -> None:
    with pytest.raises(WrongEventLoop, match=r"triolet\.open_engine"), blocking.open_engine():
        pass
