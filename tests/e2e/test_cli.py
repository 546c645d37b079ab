"""The `triolet` command on real models: a small random one, and the triolet-nano that ships with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner, Result

import triolet
from tests.cli.terminal import terminal
from tests.model.tiny import make_model
from tests.source_tree import SRC
from triolet.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    make_model("llama-plain", path, with_tokenizer=True)
    return path


def run(*arguments: object, **options: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], **options)


def completed(model: Path, prompt: str, params: triolet.SamplingParams) -> triolet.RequestOutput:
    async def complete() -> triolet.RequestOutput:
        async with triolet.open_engine(model=str(model)) as engine:
            return await engine.complete(prompt, params)

    return trio.run(complete)


def test_generate_gives_the_tokens_that_a_program_gets(model: Path) -> None:
    result = run(
        "generate",
        "-m",
        model,
        "-p",
        "Hello!",
        "--temperature",
        "1",
        "--seed",
        "7",
        "--max-tokens",
        "12",
        "--json",
    )
    answer = json.loads(result.stdout)
    expected = completed(model, "Hello!", triolet.SamplingParams(temperature=1.0, seed=7, max_tokens=12))
    assert answer["token_ids"] == list(expected.outputs[0].token_ids)
    assert answer["text"] == expected.text
    assert answer["finish_reason"] == expected.finish_reason
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_the_streamed_text_is_the_text_of_the_json(model: Path) -> None:
    generate = partial(
        run, "generate", "-m", model, "-p", "Hello!", "--temperature", "0", "--max-tokens", "40"
    )
    streamed, whole = generate(), generate("--json")
    text = json.loads(whole.stdout_bytes)["text"]
    assert streamed.stdout_bytes.decode().removesuffix("\n") == text.removesuffix("\n")
    assert streamed.stderr == whole.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "exit_code", "line"),
    [
        (["-p", ""], 1, "triolet: error: The decoder prompt cannot be empty"),
        (["-p", "x" * 600], 1, "triolet: error: This model's maximum context length is 256 tokens."),
        (["-p", "x", "--max-model-len", "100000"], 2, "--max-model-len must be at most 256"),
    ],
)
def test_what_only_the_engine_can_tell_is_one_clear_line(
    model: Path, arguments: list[str], exit_code: int, line: str
) -> None:
    result = run("generate", "-m", model, *arguments)
    assert (result.exit_code, result.stdout) == (exit_code, "")
    assert line in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_folder_that_is_not_there_is_an_error_that_names_it(runner: str) -> None:
    result = run("chat", "-q", "hi", "-m", "/no/such/model", "--runner", runner)
    assert result.exit_code == 1
    assert "/no/such/model" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_nano_counts_from_1_to_20() -> None:
    command = [sys.executable, "-m", "triolet", "chat", "-q", "-"]
    environ = {**os.environ, "PYTHONPATH": str(SRC)}
    counted = subprocess.run(
        command, check=False, input="count from 1 to 20\n", capture_output=True, text=True, env=environ
    )
    assert counted.returncode == 0
    assert [word.strip(",.") for word in counted.stdout.split() if word.strip(",.").isdigit()] == [
        str(number) for number in range(1, 21)
    ]
    assert counted.stderr == ""


@pytest.mark.slow
def test_a_conversation_with_nano_can_be_interrupted_and_goes_on(tmp_path: Path) -> None:
    with terminal("triolet", "chat", home=tmp_path) as chat:
        assert "triolet-nano · native · " in chat.expect("› ")
        chat.type("count from 1 to 200\r")
        chat.expect("12")
        chat.type("\x03")
        chat.expect("Stopped; what there is of the reply stays in the conversation.")
        chat.expect("› ")
        chat.type("hello\r")
        chat.expect(" cached)")  # this prompt begins with the first one, whose blocks are still there
        chat.expect("› ")
        chat.type("\x04")
        assert chat.expect_exit() == 0
        assert chat.mode() == chat.mode_before


def test_bench_prints_the_figures_of_the_work_it_was_given(model: Path) -> None:
    result = run("bench", "--model", model, *"--num-prompts 3 --input-len 8 --output-len 5 --json".split())
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["output_tokens"] == 15
    assert figures["concurrency"] == 3
    assert figures["output_throughput"] == pytest.approx(15 / figures["duration_s"], rel=0.02)
    assert set(figures["ttft_ms"]) == {"p50", "p90", "p99"}


def test_a_prompt_of_the_bench_that_the_model_has_no_room_for_is_refused(model: Path) -> None:
    result = run("bench", "--model", model, "--input-len", 100_000)
    assert result.exit_code == 1
    assert "maximum context length" in result.stderr
