"""Each program in examples/, run as a person would run it, on triolet-nano."""

from __future__ import annotations

import functools
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from triolet.errors import ModelNotFound

# These need packages that triolet does not; tests/docs/test_homes.py and test_ray_serve.py run them.
IN_OTHER_PROGRAMS = ("fastapi_app.py", "job_queue.py", "ray_serve.py")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name not in IN_OTHER_PROGRAMS]

Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs an example, by name, with arguments; returns what it printed."""

    def run_example(name: str, *arguments: object) -> str:
        path = ROOT / "examples" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def numbers(pattern: str, text: str) -> tuple[int, ...]:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern!r} in {text!r}"
    return tuple(map(int, found.groups()))


def test_embed_prints_a_story(run: Run) -> None:
    assert len(run("embed").split()) > 10


def test_embeddings_rank_texts_while_a_story_is_told(run: Run) -> None:
    text = run("embeddings", "A fox lives in the forest.")
    assert numbers(r"(\d+) numbers for each of 4 texts", text)[0] > 0
    assert "meanwhile: " in text
    ranked = re.findall(r"^(-?\d\.\d{3})  (.+)$", text, re.MULTILINE)
    assert [score for score, _ in ranked] == sorted((score for score, _ in ranked), key=float, reverse=True)
    assert ranked[0] == ("1.000", "A fox lives in the forest.")


def test_lora_answers_with_the_model_and_with_each_adapter(run: Run) -> None:
    answers = dict(line.split(": ", 1) for line in run("lora").splitlines())
    assert answers.keys() == {"no adapter", "random-1", "random-2"}
    assert len(set(answers.values())) == 3


def test_rerank_puts_the_text_that_was_asked_for_first(run: Run) -> None:
    ranked = re.findall(r"^(-?\d\.\d{3})  (.+)$", run("rerank", "Two and two are four."), re.MULTILINE)
    assert [score for score, _ in ranked] == sorted((score for score, _ in ranked), key=float, reverse=True)
    assert len(ranked) == 3
    assert ranked[0] == ("1.000", "Two and two are four.")


@pytest.mark.slow
def test_streaming_prints_the_answer_piece_by_piece_and_its_times(run: Run) -> None:
    text, _, report = run("streaming", "List the days of the week.").partition("\n\n")
    assert "Monday, Tuesday, Wednesday" in text
    num_tokens, num_outputs = numbers(r"(\d+) tokens in (\d+) outputs, ended by stop", report)
    assert num_tokens >= num_outputs > 1
    assert numbers(r"first token after (\d+) ms, the last (\d+) ms later", report)


def test_structured_json_follows_its_schema_and_a_wrong_one_is_told(run: Run) -> None:
    text = run("structured_json")
    pet, end = json.JSONDecoder().raw_decode(text)
    assert list(pet) == ["name", "kind", "age", "likes"]
    assert pet["kind"] in ("cat", "dog", "bird")
    assert "ended by stop" in text[end:]
    assert "structured_outputs.json must be a grammar that can be compiled: Invalid type: pet" in text[end:]


def test_tools_calls_the_function_with_numbers_of_the_model(run: Run) -> None:
    text = run("tools")
    call, arguments, result = re.match(r"calls (\w+) with (.*)\nwhich gives (\d+)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert call == "add"
    assert sum(json.loads(arguments).values()) == int(result)


@pytest.mark.slow
def test_concurrent_requests_share_their_steps(run: Run) -> None:
    text = run("concurrent_requests")
    assert "List the days of the week.\n  The days of the week are Monday, Tuesday" in text
    num_answers, num_tokens, num_steps = numbers(r"(\d+) answers, (\d+) tokens, (\d+) steps", text)
    assert num_answers == 8
    assert num_steps < num_tokens / 1.5


@pytest.mark.slow
def test_a_deadline_ends_an_answer_and_leaves_what_there_is_of_it(run: Run) -> None:
    text = run("deadline", "--seconds", 0.5)
    assert re.search(r"move_on_after: cancelled=True, kept \d+ characters", text)
    assert re.search(r"deadline=: finish_reason=deadline, kept \d+ characters", text)
    assert "requests still alive: 0" in text


@pytest.mark.slow
def test_cancelling_gives_every_block_back(run: Run) -> None:
    counts = r"requests (\d+)   blocks: (\d+) in use, (\d+) quarantined, (\d+) of (\d+) available"
    seen = {line[:28].strip(): numbers(counts, line) for line in run("cancel").splitlines()}
    total = seen["before"][-1]
    # One block of the two is what the next steps will fill.
    assert seen["in the middle of the answer"] == (1, 2, 0, total - 2, total)
    assert seen["four readers in a nursery"][0] == 4
    for when in ("before", "one step later", "after the nursery's cancel", "after an exception"):
        assert seen[when] == (0, 0, 0, total, total)


def test_a_chat_answers_every_question_and_reuses_what_was_computed(run: Run) -> None:
    text = run("chat")
    answers = re.findall(r"^> .+\n(.+)\n  \(prompt: ", text, re.MULTILINE)
    assert len(answers) == 3
    cached = [int(number) for number in re.findall(r"(\d+) of them cached", text)]
    assert cached[0] == 0 < cached[1] <= cached[2]


def test_a_batch_answers_every_line_and_says_which_can_not_be_answered(run: Run, tmp_path: Path) -> None:
    prompts = ["List the days of the week.", "again " * 3000, "Hello!", "What is your name?"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts), encoding="utf-8")
    lines = map(json.loads, run("batch", "--workers", 2, tmp_path / "prompts.txt").splitlines())
    results = {result["line"]: result for result in lines}
    assert [results[line]["prompt"] for line in (1, 2, 3, 4)] == prompts
    assert "Monday, Tuesday, Wednesday" in results[1]["answer"]
    assert "maximum context length is 2048 tokens. However, " in results[2]["error"]
    assert results[3]["finish_reason"] == results[4]["finish_reason"] == "stop"


@pytest.mark.slow
def test_an_urgent_request_overtakes_those_that_wait(run: Run) -> None:
    lines = re.findall(r"(background \d|urgent) +priority +\d+   waited +(\d+) ms", run("priorities"))
    waited_ms = {name: int(waited) for name, waited in lines}
    assert len(waited_ms) == 7
    assert all(waited_ms["urgent"] < waited_ms[f"background {number}"] for number in (3, 4, 5, 6))


@pytest.mark.slow
def test_several_answers_share_a_prompt_and_are_not_the_same(run: Run) -> None:
    answers, _, report = run("several_answers", "-n", 4).partition("\n\n")
    lines = re.findall(r"^(\d) \((?:stop|length)\): (.+)$", answers, re.MULTILINE)
    assert sorted(index for index, _ in lines) == ["0", "1", "2", "3"]
    assert len({text for _, text in lines}) > 1
    num_answers, num_tokens, num_shared = numbers(
        r"(\d) answers to a prompt of (\d+) tokens, (\d+) of", report
    )
    assert num_answers == 4
    assert num_tokens > num_shared > 0


def test_an_app_of_ones_own_has_the_model_below_its_routes(run: Run) -> None:
    assert re.search(r"said over HTTP: \w+", run("mounted_app"))


def test_two_lanes_of_a_websocket_answer_and_one_is_cancelled(run: Run) -> None:
    text = run("websocket_client")
    assert re.search(r"^a, completed: 1, 2, 3", text, re.MULTILINE)
    assert re.search(r"^b, (cancelled|completed): \w+", text, re.MULTILINE)


def test_the_official_client_talks_over_http_and_over_a_websocket(run: Run) -> None:
    pytest.importorskip("openai")
    count, *answers = run("openai_client").splitlines()
    assert "1, 2, 3" in count
    assert len(answers) == 2
    assert all(answers)


def test_an_offline_batch_is_answered_in_its_order(run: Run) -> None:
    lines = run("offline").splitlines()
    assert len(lines) == 8
    assert re.match(r"What is the opposite of hot\?  .*cold", lines[0])


@pytest.mark.slow
def test_a_light_client_does_not_wait_for_many_long_requests(run: Run) -> None:
    text = run("fair")
    positions = [int(position) for position in re.findall(r"position (\d+)", text)]
    assert positions == sorted(positions, reverse=True)
    assert positions[-1] == 0
    (num_done,) = numbers(r"(\d+) of 12 long requests were done before", text)
    assert num_done < 6


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_takes_a_model_and_has_a_test(run: Run, path: Path) -> None:
    with pytest.raises(ModelNotFound, match="/no/such/model"):
        run(path.stem, "--model", "/no/such/model")
    assert f'run("{path.stem}"' in text_of_tests() or f"examples/{path.name}" in text_of_tests()


@functools.cache
def text_of_tests() -> str:
    """All tests, one behind the other: megabytes, which are read once."""
    return "".join(test.read_text(encoding="utf-8") for test in (ROOT / "tests").rglob("test_*.py"))
