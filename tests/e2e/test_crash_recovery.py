"""A real model in a process that is killed with -9, again and again: its answers show no sign of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import trio

import triolet
from tests.model.tiny import change_json, make_model
from tests.source_tree import ROOT, SRC
from triolet import Engine, EngineConfig, RequestOutputKind, SamplingParams
from triolet.errors import ConfigError, ModelFileError, ModelNotFound, WeightsMismatch

NUM_STREAMS, NUM_TOKENS = 8, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


def params_of(index: int) -> SamplingParams:
    """Half of them greedy, half with a seed."""
    return SamplingParams(
        temperature=0.9 if index % 2 else 0.0,
        seed=index,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


@attrs.define
class Readers:
    """Streams that are read at once, delta by delta.

    Args:
        kill_at: the runner is killed each time that so many tokens have been read.
    """

    engine: Engine
    kill_at: list[int] = attrs.field(factory=list)
    answers: dict[int, list[int]] = attrs.field(factory=dict)

    async def read_all(self) -> list[list[int]]:
        async with trio.open_nursery() as nursery:
            for index in range(NUM_STREAMS):
                nursery.start_soon(self.read, index)
        return [self.answers[index] for index in range(NUM_STREAMS)]

    async def read(self, index: int) -> None:
        self.answers[index] = []
        prompt = [index + 1] * (3 * index + 1)
        async with self.engine.generate(prompt, params_of(index)) as stream:
            async for output in stream:
                self.answers[index] += output.outputs[0].token_ids
                self.kill_if_due()

    def kill_if_due(self) -> None:
        if self.kill_at and sum(map(len, self.answers.values())) >= self.kill_at[0]:
            del self.kill_at[0]
            assert self.engine.model_info.process_id is not None
            os.kill(self.engine.model_info.process_id, signal.SIGKILL)


async def test_eight_streams_survive_three_kills_token_for_token(folder: Path) -> None:
    config = EngineConfig(model=str(folder), num_kv_blocks=256, dtype="float32")
    async with triolet.open_engine(config, runner="inline") as engine:
        undisturbed = await Readers(engine).read_all()
    async with triolet.open_engine(config, runner="process") as engine:
        first = engine.model_info.process_id
        answers = await Readers(engine, [1, 300, 600]).read_all()
        statistics = engine.statistics()
        assert engine.model_info.process_id != first != os.getpid()
    assert [len(answer) for answer in answers] == [NUM_TOKENS] * NUM_STREAMS
    assert answers == undisturbed
    assert statistics.num_restarts == 3
    assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total


def without_weights(folder: Path) -> EngineConfig:
    (folder / "model.safetensors").write_bytes(b"nonsense")
    return EngineConfig(model=str(folder))


def with_another_shape(folder: Path) -> EngineConfig:
    change_json(folder / "config.json", intermediate_size=100)
    return EngineConfig(model=str(folder))


@pytest.mark.parametrize(
    ("error", "spoil"),
    [
        pytest.param(
            ModelNotFound,
            lambda folder: EngineConfig(model=str(folder / "elsewhere")),
            marks=pytest.mark.slow,
        ),
        pytest.param(ModelFileError, without_weights, marks=pytest.mark.slow),
        pytest.param(WeightsMismatch, with_another_shape, marks=pytest.mark.slow),
        pytest.param(
            ConfigError,
            lambda folder: EngineConfig(model=str(folder), max_model_len=10_000),
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_model_that_can_not_be_loaded_is_refused_with_the_same_words_as_in_a_thread(
    error: type[Exception], spoil: Callable[[Path], EngineConfig], tmp_path: Path
) -> None:
    config = spoil(make_model("qwen3", tmp_path / "model"))
    texts = []
    for runner in ("thread", "process"):
        with pytest.raises(error) as caught:
            async with triolet.open_engine(config, runner=runner):
                pytest.fail("it has started")
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_the_example_kills_its_runner_and_prints_four_unbroken_stories() -> None:
    ran = subprocess.run(
        [sys.executable, ROOT / "examples/crash.py"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "was killed by SIGKILL" in ran.stderr
    assert "Traceback" not in ran.stderr
    killed, now = re.findall(r"kill -9 (\d+)|runner is now process (\d+)", ran.stdout)
    assert killed[0] != now[1]
    assert "restarts: 1;" in ran.stdout
    stories = re.findall(
        r"^> Tell me a story about a (\w+)\.\n(.+?)\n\n(?=>|told again)", ran.stdout, re.MULTILINE | re.DOTALL
    )
    assert [hero for hero, _ in stories] == ["dog", "fox", "boat", "king"]
    assert all(len(story.split()) > 10 for _, story in stories)
    assert ran.stdout.rstrip().endswith("told again in peace, word for word the same: yes")
