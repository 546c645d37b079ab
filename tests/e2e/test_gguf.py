"""A GGUF file as the only thing that an engine is given: tokens of transformers, in every runner, through a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

import triolet
from tests.e2e.server import serve
from tests.model.gguf.test_gguf_models import PROMPT, generated, with_weights_of
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.tiny import make_model
from triolet import EngineConfig, RequestOutputKind, SamplingParams
from triolet.kernels.cpu import library
from triolet.model import loading
from triolet.nano import PATH

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model("qwen3", tmp_path_factory.mktemp("model"), with_tokenizer=True)
    write_gguf(path, path / "model.gguf", "Q8_0", with_tokenizer=True)
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    torch.set_num_threads(1)
    return generated(with_weights_of(folder / "model.gguf", folder))


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder / "model.gguf"), num_kv_blocks=64, dtype="float32")


@pytest.mark.parametrize(
    ("runner", "is_compiled"),
    [
        ("thread", True),
        pytest.param("thread", False, marks=pytest.mark.slow),
        ("process", True),
        pytest.param("process", False, marks=pytest.mark.slow),
    ],
)
async def test_every_runner_gives_the_tokens_of_transformers(
    runner: str, is_compiled: bool, folder: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setenv("TRIOLET_CPU_TARGET", "off")
        for module in (library, loading.decoder, loading.runner):  # this process has loaded them already
            monkeypatch.setattr(module, "kernels", lambda: None)
    async with triolet.open_engine(config_of(folder), runner=runner) as engine:
        output = await engine.complete(PROMPT, GREEDY)
        if not is_compiled:
            assert engine.model_info.cpu_kernels is None
    assert list(output.outputs[0].token_ids) == expected


@pytest.mark.slow
async def test_a_process_that_is_killed_goes_on_with_the_next_token(
    folder: Path, expected: list[int]
) -> None:
    tokens: list[int] = []
    async with triolet.open_engine(config_of(folder), runner="process") as engine:
        async with engine.generate(PROMPT, GREEDY) as stream:
            async for output in stream:
                if not tokens:
                    assert engine.model_info.process_id is not None
                    os.kill(engine.model_info.process_id, signal.SIGKILL)
                tokens += output.outputs[0].token_ids
        assert engine.statistics().num_restarts == 1
    assert tokens == expected


async def test_a_conversation_is_answered_as_with_the_folder(folder: Path) -> None:
    conversation = [{"role": "user", "content": "Hé 👍"}]
    answers = []
    write_gguf(folder, folder / "float.gguf", with_tokenizer=True)
    for model in (folder / "float.gguf", folder):
        config = EngineConfig(model=str(model), num_kv_blocks=64, dtype="float32")
        async with triolet.open_engine(config) as engine:
            output = await engine.complete(conversation, GREEDY)
            answers.append((output.prompt_token_ids, output.outputs[0].text, engine.model_info.generation))
    assert answers[0] == answers[1]


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags for triolet-nano in Q8_0; its pre-tokenizer has no name in GGUF, so its folder lends the tokenizer."""
    path = tmp_path_factory.mktemp("nano") / "nano.gguf"
    write_gguf(Path(PATH), path, "Q8_0", metadata=lambda writer: writer.add_eos_token_id(4))
    return ["--model", str(path), "--tokenizer", str(PATH), "--num-kv-blocks", "64"]


@pytest.mark.slow
def test_a_file_answers_in_the_terminal(nano: list[str]) -> None:
    command = [sys.executable, "-m", "triolet", "chat", "-q", "Count from 3 to 9, please.", *nano]
    done = subprocess.run([*command, "--temperature", "0"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3, 4, 5, 6, 7, 8, 9."


@pytest.mark.slow
def test_a_file_is_served_over_http(nano: list[str]) -> None:
    body = {"model": "nano.gguf", "messages": [{"role": "user", "content": "Spell tree"}], "temperature": 0}
    with serve(*nano) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] == "t-r-e-e."
    assert answer["model"] == "nano.gguf"


@pytest.mark.slow
def test_the_command_line_takes_a_file(folder: Path) -> None:
    command = [sys.executable, "-m", "triolet", "generate", "--model", str(folder / "model.gguf"), "--json"]
    flags = ["--prompt", "Hello", "--max-tokens", "5", "--temperature", "0", "--num-kv-blocks", "64"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)
