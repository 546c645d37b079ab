"""`triolet generate` and one-shot `triolet chat`, on an engine that answers from a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.exceptions import Exit
from click.testing import CliRunner, Result

import triolet
from tests.cli.fake_engine import FakeEngine, open_fake_engine
from tests.source_tree import ROOT, SRC
from triolet.cli import failures, main, options
from triolet.cli.terminal import KeyboardMode
from triolet.core.request.params import SamplingParams
from triolet.errors import ConfigError, EngineDead

RUN = Callable[..., Result]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """Every engine that was opened during the test."""
    engines: list[FakeEngine] = []

    def open_engine(*args: Any, **kwargs: Any) -> Any:
        return open_fake_engine(*args, opened=engines, **kwargs)

    monkeypatch.setitem(vars(triolet), "open_engine", open_engine)
    return engines


@pytest.fixture
def run(engines: list[FakeEngine]) -> RUN:
    def invoke(*arguments: str, **options: Any) -> Result:
        return CliRunner().invoke(main, arguments, **options)

    return invoke


def test_generate_prints_the_text_and_nothing_else(run: RUN, engines: list[FakeEngine]) -> None:
    result = run("generate", "--prompt", "count to 5")
    assert (result.stdout, result.stderr, result.exit_code) == ("1, 2, 3, 4, 5.\n", "", 0)
    assert engines[0].asked == ["count to 5"]


@pytest.mark.parametrize("model", [["mine"], ["--model", "mine"], ["mine", "-m", "mine"]], ids=str)
@pytest.mark.parametrize("command", [["generate", "-p", "count to 2"], ["chat", "-q", "count to 2"]], ids=str)
def test_the_model_may_be_named_without_its_flag(
    run: RUN, engines: list[FakeEngine], command: list[str], model: list[str]
) -> None:
    assert run(*command, *model).exit_code == 0
    assert engines[0].config.model == "mine"


def test_a_temperature_that_is_raised_is_warned_of_in_one_plain_line(
    run: RUN, engines: list[FakeEngine]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run("generate", "-p", "count to 2", "--temperature", "1e-5")
    assert result.stderr == "triolet: warning: temperature 1e-05 is raised to 0.01\n"
    assert (result.exit_code, engines[0].params[0].temperature) == (0, 0.01)


def test_generate_reads_its_prompt_from_stdin(run: RUN, engines: list[FakeEngine]) -> None:
    assert run("generate", "-p", "-", input="count to 2\n").stdout == "1, 2.\n"
    assert engines[0].asked == ["count to 2"]


def test_generate_json_is_one_object(run: RUN) -> None:
    result = run("generate", "-p", "count to 9", "--max-tokens", "3", "--json", "--served-model-name", "ours")
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["text"], answer["finish_reason"]) == ("ours", "1, 2, 3,", "length")
    assert answer["token_ids"] == [0, 1, 2]
    assert answer["usage"] == {"prompt_tokens": 57, "completion_tokens": 3, "cached_tokens": 48}
    assert answer["metrics"].keys() == {"ttft_s", "total_s", "tokens_per_s"}


def test_sampling_flags_are_laid_over_the_models_defaults(run: RUN, engines: list[FakeEngine]) -> None:
    run(
        "chat",
        "-q",
        "hi",
        "--temperature",
        "0.3",
        "--seed",
        "7",
        "--stop",
        "a",
        "--stop",
        "b",
        "--top-k",
        "5",
    )
    params = engines[0].params[0]
    expected = SamplingParams(temperature=0.3, top_p=0.9, max_tokens=None, seed=7, stop=("a", "b"), top_k=5)
    assert (params.temperature, params.top_p, params.seed) == (
        expected.temperature,
        expected.top_p,
        expected.seed,
    )
    assert (params.stop, params.top_k, params.max_tokens) == (
        expected.stop,
        expected.top_k,
        expected.max_tokens,
    )


def test_engine_flags_reach_the_engine(run: RUN, engines: list[FakeEngine]) -> None:
    run("chat", "-q", "hi", "--block-size", "32", "--no-enable-prefix-caching", env={"TRIOLET_DEVICE": "cpu"})
    config = engines[0].config
    assert (config.block_size, config.enable_prefix_caching, config.device) == (32, False, "cpu")


@pytest.mark.parametrize("arguments", [["chat", "-q", "-"], ["chat"]])
def test_without_a_terminal_stdin_is_one_question(
    run: RUN, engines: list[FakeEngine], arguments: list[str]
) -> None:
    result = run(*arguments, input="count\nto 20\n")
    assert result.stdout == ", ".join(map(str, range(1, 21))) + ".\n"
    assert result.stderr == ""
    assert engines[0].asked == [[{"role": "user", "content": "count\nto 20"}]]


def test_a_question_may_be_put_together_of_a_text_and_stdin(run: RUN, engines: list[FakeEngine]) -> None:
    run("chat", "-q", "Summarize this.", "-q", "-", input="one\ntwo\n")
    assert engines[0].asked == [[{"role": "user", "content": "Summarize this.\n\none\ntwo"}]]


def test_a_question_may_have_a_system_prompt(run: RUN, engines: list[FakeEngine]) -> None:
    run("chat", "-q", "hi", "--system", "Be brief.")
    assert engines[0].asked == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ]


def test_timings_of_one_answer_go_to_stderr(run: RUN) -> None:
    result = run("chat", "-q", "hi", "--stats")
    assert result.stdout == "You said: hi\n"
    assert result.stderr.startswith("TTFT ")
    assert result.stderr.count("\n") == 1


def test_an_answer_that_is_cut_off_is_told_of_on_stderr_and_is_a_failure_where_a_form_was_asked_for(
    run: RUN,
) -> None:
    asked = ("chat", "-q", "count to 9", "--max-tokens", "3")
    plain, formed = run(*asked), run(*asked, "--format", "json")
    assert [one.stdout.strip() for one in (plain, formed)] == ["1, 2, 3,"] * 2
    sentence = "the reply was cut off after 3 tokens (length)"
    assert (plain.exit_code, plain.stderr) == (0, f"triolet: warning: {sentence}\n")
    assert (formed.exit_code, formed.stderr) == (
        1,
        f"triolet: error: {sentence}, and its form is not complete\n",
    )
    whole = run("chat", "-q", "count to 2", "--max-tokens", "30", "--format", "json")
    assert (whole.exit_code, whole.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["chat", "-q", "hi", "-m", "missing"], "missing: neither a folder with a config.json"),
        (
            ["chat", "-q", "this is too long"],
            "This model's maximum context length is 1024 tokens. However, your prompt has 1100 tokens",
        ),
        (["generate", "-p", "kill the engine"], "the engine gave up after 3 crashes"),
    ],
)
def test_an_error_is_one_line_and_1(run: RUN, arguments: list[str], line: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"triolet: error: {line}")
    assert result.stderr.count("\n") == 1


def test_triolet_debug_adds_the_traceback(run: RUN) -> None:
    result = run("generate", "-p", "kill the engine", env={"TRIOLET_DEBUG": "1"})
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("triolet: error: the engine gave up after 3 crashes\n")


@pytest.mark.parametrize(
    ("error", "exit_code", "message"),
    [
        (
            ConfigError("max_model_len", "at most 2048 for this model", 4096),
            2,
            "--max-model-len must be at most 2048",
        ),
        (BaseExceptionGroup("", [ExceptionGroup("", [EngineDead("gone")])]), 1, "gone"),
        (ZeroDivisionError("division by zero"), 1, "ZeroDivisionError: division by zero"),
        (RuntimeError("several\n  lines"), 1, "RuntimeError: several lines"),
    ],
)
def test_every_exception_has_its_exit_code_and_line(
    error: BaseException, exit_code: int, message: str
) -> None:
    ending = failures.ending(error)
    assert isinstance(ending, click.ClickException)
    assert ending.exit_code == exit_code
    assert message in ending.message


def test_an_interrupt_before_anything_has_begun_is_130() -> None:
    ending = failures.ending(KeyboardInterrupt())
    assert isinstance(ending, Exit)
    assert ending.exit_code == 130


def program(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(ROOT)])}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with program("-m", "tests.cli.fake_engine", "chat", "-q", "a story") as story:
        assert story.stdout is not None and story.stderr is not None
        assert story.stdout.read(4) == "Once"
        story.stdout.close()
        assert story.stderr.read() == ""
        assert story.wait() == 0


def test_help_and_wrong_flags_need_neither_torch_nor_trio() -> None:
    script = """
import sys
from click.testing import CliRunner
from triolet.cli import main
assert CliRunner().invoke(main, ["chat", "--help"]).exit_code == 0
assert CliRunner().invoke(main, ["chat", "-q", "hi", "--top-p", "7"]).exit_code == 2
print(*{"torch", "transformers", "trio", "rich", "prompt_toolkit"} & sys.modules.keys())
"""
    with program("-c", script) as help_reader:
        out, err = help_reader.communicate()
    assert (out.strip(), err) == ("", "")


def test_a_closed_stdin_is_no_keyboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert KeyboardMode.current() == KeyboardMode(None)


def test_without_a_stdout_there_is_nothing_to_answer_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(click.UsageError, match="stdout must be open; got none"):
        options.text_or_stdin("a question", "--question")
