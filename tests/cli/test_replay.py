"""`triolet replay`: what it says of a recording, and its exit status."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result
from trio.testing import MockClock

import triolet
from tests.actors.harness import answer_of, fake_engine
from triolet import SamplingParams
from triolet.cli import main
from triolet.cli.replay import run as replay_run
from triolet.config.engine import EngineConfig
from triolet.core.request.request import FinishReason
from triolet.engine.engine import Engine
from triolet.ipc.recording import EndedAnswer, EndRecord, EngineRecord, RequestRecord, WeightsRecord, encode
from triolet.ipc.snapshot import SavedAnswer, SavedRequest


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)])


def write(path: Path, *, digest: str | None = "ours", version: str = triolet.__version__) -> None:
    """Two requests that a fake engine answered, and one whose answer was another model's."""
    records: list[Any] = [
        EngineRecord(format=1, version=version, architecture="Fake", vocab_size=50, config={}),
        WeightsRecord(version=0, folder="/theirs", digest=digest),
    ]
    for number, (length, reason) in enumerate([(6, "length"), (2, "abort"), (6, "length")], 1):
        tokens = list(answer_of([number], 7, length))
        if number == 3:
            tokens[4] = (tokens[4] + 1) % 50
        saved = SavedRequest(
            request_id=f"r{number}",
            prompt_token_ids=(number,),
            params=SamplingParams(max_tokens=6),
            answers=(SavedAnswer(seed=7),),
        )
        answer = EndedAnswer(token_ids=tuple(tokens), finish_reason=FinishReason(reason))
        records.append(RequestRecord(number=number, weight_version=0, request=saved))
        records.append(EndRecord(number=number, weight_version=0, answers=(answer,)))
    path.write_bytes(b"".join(map(encode, records)))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def engine() -> AsyncGenerator[Engine]:
        async with fake_engine() as opened:
            yield opened

    async def opened(stack: AsyncExitStack, config: object) -> Engine:
        return await stack.enter_async_context(engine())

    monkeypatch.setattr(replay_run, "opened", opened)
    monkeypatch.setattr(replay_run, "digest_of_model", lambda folder: "ours")


@pytest.mark.usefixtures("fake")
def test_the_exit_status_is_that_of_the_answers_and_a_departure_is_named(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    write(path)
    expected = answer_of([3], 7, 6)[4]
    called = replay(path)
    assert called.exit_code == 1, called.output
    assert called.stdout.splitlines() == [
        "r1: equal, 6 tokens",
        "r2: equal, 2 tokens",
        f"r3: departs at 4: expected token {(expected + 1) % 50}, got token {expected}",
        "2 equal, 1 departed, 0 not replayed",
    ]
    called = replay(path, "r2")
    assert (called.exit_code, called.stdout.splitlines()[0]) == (0, "r2: equal, 2 tokens")


async def test_a_replay_takes_what_rounds_the_numbers_of_the_model_from_the_recording(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    path = tmp_path / "requests.jsonl"
    rounding = {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "fp8", "lora_dtype": "float32"}
    fields: dict[str, Any] = {**rounding, "enable_lora": True}
    async with fake_engine(record=str(path), **fields) as engine:
        await engine.complete([1, 2, 3])
    [recorded] = replay_run.chosen_requests(path, None)
    config = replay_run.replay_config(EngineConfig(), recorded.engine)
    rounding["dtype"] = engine.model_info.dtype  # as resolved
    assert {name: getattr(config, name) for name in rounding} == rounding


@pytest.mark.usefixtures("fake")
def test_another_model_or_version_is_said_first(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    write(path, digest="theirs", version="0.0.9")
    lines = replay(path, "r1").stdout.splitlines()
    assert lines[0] == f"version differs: recorded with triolet 0.0.9, this is {triolet.__version__}"
    assert lines[1].startswith(
        "model differs: recorded with digest theirs of /theirs (weights version 0), this"
    )
    assert lines[2] == "r1: equal, 6 tokens"


def test_a_file_that_cannot_be_replayed_ends_with_status_2(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    called = replay(path)
    assert (called.exit_code, called.stderr) == (
        2,
        f"triolet: error: {path} must be a readable file; No such file or directory\n",
    )
    path.write_text("{}\n")
    called = replay(path)
    assert called.exit_code == 2
    assert f"{path}:1: record must be one of engine, weights, request, end; got None" in called.stderr
    write(path, digest=None)
    called = replay(path, "r9")
    assert called.exit_code == 2
    assert "must hold the request 'r9'; got 3 others" in called.stderr
    called = replay(path)
    assert called.exit_code == 2
    assert called.stdout.startswith("r1: not replayed: no digest of the model is known")
    assert "no request could be replayed" in called.stderr
    called = replay(path, "--record", path)
    assert called.exit_code == 2
    assert "--record must be another file than the one that is replayed" in called.stderr


@pytest.mark.slow
def test_answers_of_triolet_nano_under_load_and_kills_are_equal_alone(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def ask(engine: Engine, number: int, begun: trio.Event) -> None:
        params = SamplingParams(max_tokens=8 + number, temperature=0.9 if number % 2 else 0.0)
        async with engine.generate(f"Once upon {number} times there was", params) as stream:
            async for output in stream:
                begun.set()
                if number % 5 == 0 and len(output.outputs[0].token_ids) > 4:
                    break

    async def serve() -> None:
        fields: dict[str, Any] = {"runner": "process", "num_kv_blocks": 24, "max_num_seqs": 8}
        async with triolet.open_engine(**fields, record=str(path)) as engine:
            begun = trio.Event()
            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(ask, engine, number, begun)
                await begun.wait()
                assert engine.model_info.process_id is not None
                os.kill(engine.model_info.process_id, signal.SIGKILL)
            assert engine.statistics().num_restarts == 1

    trio.run(serve)
    called = replay(path)
    assert called.exit_code == 0, called.output
    assert called.stdout.splitlines()[-1] == "12 equal, 0 departed, 0 not replayed"
    lines = path.read_text().splitlines()
    assert sum(json.loads(line)["record"] == "end" for line in lines) == 12
