"""What an engine records is what it answered, and alone every request gives the same tokens again."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, fake_engine
from triolet import SamplingParams
from triolet.cli.replay.run import compute
from triolet.compat import LLMEngine
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import StepPlan
from triolet.engine.engine import Engine
from triolet.errors import ConfigError, RunnerDied, UnsupportedFeature
from triolet.ipc import recording
from triolet.ipc.recording import RecordedRequest, departure_of, read_recording
from triolet.recording import recorder
from triolet.recording.model_digest import digest_of_model
from triolet.recording.recorder import open_recorder


def read(path: Path) -> list[RecordedRequest]:
    return read_recording(path.read_bytes().splitlines(keepends=True))


@pytest.mark.parametrize("num_requests", [40, pytest.param(1000, marks=pytest.mark.slow)])
async def test_requests_under_load_give_the_same_tokens_alone(
    num_requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    monkeypatch.setattr(recorder, "digest_of_model", lambda folder, on_chunk: "digest")
    path = tmp_path / "requests.jsonl"
    executor = FakeExecutor(num_blocks=16, block_size=4)
    crash_every = 60 if num_requests == 40 else 1000

    def crash(plan: StepPlan) -> None:
        if len(executor.plans) % crash_every == 0:
            raise RunnerDied("killed", -9)

    executor.before_step = crash
    delivered: dict[str, list[tuple[int, ...]]] = {}

    async def ask(engine: Engine, number: int) -> None:
        dice = random.Random(number)  # of its own: Trio chooses the order of the tasks
        params = SamplingParams(
            max_tokens=40 if number % 11 == 0 else dice.randrange(12, 24),
            seed=None if number % 3 else number,  # the engine draws the others
            temperature=0.8,
            n=1 + (number % 5 == 0),
        )
        prompt = [dice.randrange(50) for _ in range(dice.randrange(1, 20))]
        await trio.sleep(dice.randrange(num_requests) * 2 * STEP_S)
        deadline = trio.current_time() + 20 * STEP_S if number % 11 == 0 else None
        async with engine.generate(prompt, params, request_id=f"r{number}", deadline=deadline) as stream:
            shown = delivered[f"r{number}"] = [()] * params.n
            async for output in stream:
                for one in output.outputs:
                    shown[one.index] = tuple(one.token_ids)
                if number % 4 == 0 and sum(map(len, shown)) > 3:
                    break

    limits: dict[str, Any] = {"max_queued_requests": 2 * num_requests, "step_timeout": None}
    async with fake_engine(executor, record=str(path), **limits) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(num_requests):
                nursery.start_soon(ask, engine, number)
        statistics = engine.statistics()
    assert (statistics.num_lost_records, executor.num_lives > 1) == (0, True)
    assert statistics.num_preemptions > 0
    recorded = read(path)
    assert len(recorded) == num_requests
    reasons = Counter(answer.finish_reason for one in recorded if one.end for answer in one.end.answers)
    assert {"length", "abort", "deadline"} <= reasons.keys()
    async with fake_engine(FakeExecutor(num_blocks=64, block_size=4)) as alone:
        for one in recorded:
            assert one.end is not None
            assert one.obstacle is None
            again = await compute(alone, one)
            for index, answer in enumerate(one.end.answers):
                seed = one.begin.request.answers[index].seed
                whole = answer_of(one.begin.request.prompt_token_ids, seed, 40)
                # What the reader got, and what the model's definition says.
                shown = delivered[one.request_id][index]
                assert answer.token_ids[: len(shown)] == shown
                assert answer.token_ids == whole[: len(answer.token_ids)]
                assert departure_of(index, answer, again[index]) is None


async def test_a_request_of_a_model_without_files_says_that_no_digest_is_known(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "requests.jsonl"
    async with fake_engine(record=str(path)) as engine:
        await engine.complete([1, 2], SamplingParams(max_tokens=8))
    [one] = read(path)
    assert "no digest of the model is known (FileNotFoundError" in str(one.obstacle)


async def test_an_engine_that_ends_at_once_still_gets_the_digest_of_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_digest(folder: str, on_chunk: Callable[[], None]) -> str:
        for _ in range(20):
            time.sleep(0.01)
            on_chunk()
        return "digest"

    monkeypatch.setattr(recorder, "digest_of_model", slow_digest)
    # On a busy machine the 0.2 s of the digest take longer than the engine waits.
    monkeypatch.setattr(recorder, "LAST_DIGEST_S", 300.0)
    path = tmp_path / "requests.jsonl"
    async with fake_engine(record=str(path)) as engine:
        await engine.complete([1, 2], SamplingParams(max_tokens=1))
    [one] = read(path)
    assert one.obstacle is None


async def test_the_end_of_an_engine_does_not_wait_until_a_large_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def endless_digest(folder: str, on_chunk: Callable[[], None]) -> str:
        while True:
            time.sleep(0.01)
            on_chunk()

    monkeypatch.setattr(recorder, "digest_of_model", endless_digest)
    monkeypatch.setattr(recorder, "LAST_DIGEST_S", 0.1)
    path = tmp_path / "requests.jsonl"
    async with fake_engine(record=str(path)) as engine:
        await engine.complete([1, 2], SamplingParams(max_tokens=1))
    [one] = read(path)
    assert "the engine ended before it was computed" in str(one.obstacle)


async def test_engines_append_and_a_line_cut_by_a_kill_is_removed(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "requests.jsonl"
    for number in range(2):
        async with fake_engine(record=str(path)) as engine:
            await engine.complete(
                [1, 2], SamplingParams(max_tokens=3), request_id=f"r{number}", client="secret"
            )
        with path.open("ab") as file:
            file.write(b'{"record":"end","num')
    assert [one.request_id for one in read(path)] == ["r0", "r1"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"secret" not in path.read_bytes()


async def test_a_full_disk_costs_the_recording_one_warning_and_no_request(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    path = tmp_path / "requests.jsonl"
    write = os.write

    def fill(file: int, data: memoryview) -> int:
        if os.fstat(file).st_size + len(data) > 6000:
            write(file, data[:100])  # as far as there is room
            raise OSError(28, "No space left on device")
        return write(file, data)

    async with fake_engine(record=str(path)) as engine:
        monkeypatch.setattr(os, "write", fill)
        for number in range(9):
            output = await engine.complete([1, number], SamplingParams(max_tokens=3, seed=1))
            assert output.outputs[0].token_ids == answer_of([1, number], 1, 3)
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(1)
        num_lost = engine.statistics().num_lost_records
    warnings = [one for one in caplog.records if one.name == "triolet.recording"]
    assert [one.levelno for one in warnings] == [logging.WARNING]
    assert "No space left on device" in warnings[0].getMessage()
    assert num_lost > 0
    assert path.read_bytes().endswith(b"\n")
    assert 1 <= len(read(path)) < 9


async def test_a_shortage_while_a_recording_is_written_ends_the_recording_alone(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    path, is_short = tmp_path / "requests.jsonl", False
    encode = recording.encode

    def fail(record: Any) -> bytes:
        if is_short:
            raise MemoryError
        return encode(record)

    monkeypatch.setattr(recorder, "encode", fail)
    async with fake_engine(record=str(path)) as engine:
        for number in range(3):
            is_short = number == 1
            output = await engine.complete([1, number], SamplingParams(max_tokens=3, seed=1))
            assert output.outputs[0].token_ids == answer_of([1, number], 1, 3)
            await trio.sleep(1)
        assert engine.statistics().num_lost_records > 0
    assert caplog.text.count("misses records from now on") == 1
    assert [one.begin.request.prompt_token_ids for one in read(path)] == [(1, 0)]


async def test_a_shortage_while_a_model_is_digested_costs_the_digest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    def fail(folder: str, on_chunk: Callable[[], None]) -> str:
        raise MemoryError

    monkeypatch.setattr(recorder, "digest_of_model", fail)
    path = tmp_path / "requests.jsonl"
    async with fake_engine(record=str(path)) as engine:
        await engine.complete([1, 2], SamplingParams(max_tokens=8))
        await trio.sleep(1)
    [one] = read(path)
    assert "no digest of the model is known (MemoryError" in str(one.obstacle)


async def test_the_file_of_a_recording_is_closed_although_its_end_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(one: object, number: int) -> None:
        raise MemoryError

    one = open_recorder(str(tmp_path / "requests.jsonl"))
    one._open[1] = (0, ())
    monkeypatch.setattr(recorder.Recorder, "end", fail)
    with pytest.raises(MemoryError):
        await one.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one._file)


async def test_a_queue_that_is_full_loses_records_and_counts_them(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED_TOKENS", 8)
    async with fake_engine(record=str(tmp_path / "requests.jsonl")) as engine:
        await engine.complete([1] * 9, SamplingParams(max_tokens=3))
        await engine.complete([1] * 4, SamplingParams(max_tokens=3))
        assert engine.statistics().num_lost_records == 1
    assert caplog.text.count("misses records from now on") == 1
    assert [len(one.begin.request.prompt_token_ids) for one in read(tmp_path / "requests.jsonl")] == [4]


async def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine\n")
    (tmp_path / "short").write_text("mine")
    executor = FakeExecutor(num_blocks=64, block_size=4)
    for name, rule in (
        (".", r"a file that can be written \(Is a directory\)"),
        ("no/folder", r"a file that can be written \(No such file"),
        ("notes.txt", "a recording or a new file"),
        ("short", "a recording or a new file"),
    ):
        with pytest.raises(ConfigError, match=f"^record must be {rule}"):
            async with fake_engine(executor, record=str(tmp_path / name)):
                pass
    assert executor.num_lives == 0
    assert (tmp_path / "notes.txt").read_text() == "mine\n"
    held = open_recorder(str(tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"^record must be a file that no other engine writes to"):
        open_recorder(str(tmp_path / "one"))
    os.close(held._file)
    with pytest.raises(UnsupportedFeature, match="record is not offered"):
        LLMEngine(attrs.evolve(EngineConfig(), record="file"))


def test_the_digest_follows_from_the_files_of_the_model_alone(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(b"weights")
        (tmp_path / folder / "README.md").write_text(folder)
    first = digest_of_model(str(tmp_path / "a"))
    assert digest_of_model(str(tmp_path / "b")) == first
    (tmp_path / "b" / "model.safetensors").write_bytes(b"Weights")
    assert digest_of_model(str(tmp_path / "b")) != first
    with pytest.raises(FileNotFoundError):
        digest_of_model(str(tmp_path))
