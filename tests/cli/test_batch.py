"""`triolet run-batch`: answers of the server's routes, interruptions without doubles, wrong files in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
import trio
import trio.testing
from click.testing import CliRunner

from tests.actors.harness import FakeExecutor, assert_all_blocks_back, fake_engine
from tests.server.routes.harness import ChatTokenizer
from triolet.cli import main
from triolet.cli.batch.run import Batch, check_input, finished_ids

COMPLETION = "/v1/completions"


def line(custom_id: str, url: str = COMPLETION, **body: Any) -> str:
    given = {"prompt": f"HELLO {custom_id}", "max_tokens": 2, "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": given}) + "\n"


def answers_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


async def run(source: Path, target: Path) -> None:
    executor = FakeExecutor(num_blocks=512, block_size=4)
    async with fake_engine(executor, ChatTokenizer(), max_num_seqs=32, max_num_batched_tokens=1024) as engine:
        try:
            await Batch(engine, 32, check_input(source)).run(source, target, finished_ids(target))
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(1.0)
            assert_all_blocks_back(engine)


def num_lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def cancel_at(num_answers: float, target: Path, scope: trio.CancelScope) -> None:
    """Interrupt a run when the file has that many answers."""
    for _ in range(100_000):
        if num_lines_in(target) >= num_answers:
            break
        await trio.sleep(0.005)
    scope.cancel()


@pytest.mark.parametrize("num_lines", [100, pytest.param(1000, marks=pytest.mark.slow)])
async def test_a_batch_that_is_interrupted_again_and_again_has_each_answer_once(
    num_lines: int, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    source, target, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    source.write_text("".join(line(str(number)) for number in range(num_lines)), encoding="utf-8")
    for share in (0.1, 0.5, 0.9, 2.0):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_at, share * num_lines, target, nursery.cancel_scope)
            await run(source, target)
            nursery.cancel_scope.cancel()
        assert len(finished_ids(target)) < num_lines or share == 2.0
        if share < 1:
            with target.open("a", encoding="utf-8") as file:  # as after a crash in the middle of a write
                file.write('{"id": "batch_req", "custom_id": "9", "resp')
    found = answers_of(target)
    assert sorted(int(one["custom_id"]) for one in found) == list(range(num_lines))
    assert {one["response"]["status_code"] for one in found} == {200}
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line(str(number)) for number in range(20)), encoding="utf-8")
    await run(few, whole)
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in found}
    for one in answers_of(whole):
        assert one["response"]["body"]["choices"][0]["text"] == texts[one["custom_id"]]


async def test_a_refused_request_is_an_answer_and_the_others_go_on(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = line("chat", "/v1/chat/completions", prompt=None, messages=[{"role": "user", "content": "HELLO"}])
    chat = chat.replace('"prompt": null, ', "")
    source.write_text(line("a", temperature=9) + line("b", model="other") + "\n" + chat, encoding="utf-8")
    await run(source, target)
    found = {one["custom_id"]: one["response"] for one in answers_of(target)}
    assert [found[name]["status_code"] for name in ("a", "b", "chat")] == [400, 404, 200]
    assert found["a"]["body"]["error"]["param"] == "temperature"
    assert found["chat"]["body"]["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (line("a") + line("a"), "in.jsonl:2: custom_id must be unique; 'a' is in line 1, too"),
        ("{", "in.jsonl:1: the line must be JSON; "),
        ("{}", "in.jsonl:1: the line must have the fields custom_id, method, url and body; got {}"),
        (line("a", "/v1/files"), "in.jsonl:1: url must be one of /v1/chat/completions"),
        (line("a", stream=True), "in.jsonl:1: body.stream must be left out or false; got True"),
        (line("a").replace("POST", "GET"), "in.jsonl:1: method must be POST; got 'GET'"),
        (line("\ud800"), "in.jsonl:1: custom_id must have no lone surrogates; got "),
        ("[" * 100_000, "in.jsonl:1: the line must be JSON; "),
    ],
    ids=range(8),
)
def test_a_wrong_file_is_refused_before_the_model_is_loaded(tmp_path: Path, text: str, sentence: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text, encoding="utf-8")
    result = CliRunner().invoke(main, ["run-batch", str(source), str(target)])
    assert sentence in result.stderr and result.stderr.count("\n") == 1
    assert result.exit_code == 1 and not target.exists()


def test_a_batch_that_cannot_be_read_twice_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, line("a").encode())
    os.close(writer)
    result = CliRunner().invoke(main, ["run-batch", f"/dev/fd/{reader}", str(tmp_path / "out.jsonl")])
    os.close(reader)
    assert f"/dev/fd/{reader} must be a file that can be read twice" in result.stderr
    assert result.exit_code == 1 and not (tmp_path / "out.jsonl").exists()


async def test_long_lines_of_a_batch_are_answered_whatever_a_server_would_allow_one_client(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    padding = "x" * 4 * 2**20  # of an unknown field, which is ignored
    lines = [line(str(number), padding=padding) for number in range(5)]
    lines.append(
        line("many values", logit_bias={str(number): 1 for number in range(50)}, padding=[[]] * 3000)
    )
    source.write_text("".join(lines), encoding="utf-8")
    await run(source, target)
    assert [answer["response"]["status_code"] for answer in answers_of(target)] == [200] * 6


async def test_a_batch_that_has_lost_requests_since_it_was_checked_fails(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a") + line("b"), encoding="utf-8")
    num_lines = check_input(source)
    source.write_text(line("b"), encoding="utf-8")
    async with fake_engine(FakeExecutor(num_blocks=512, block_size=4), ChatTokenizer()) as engine:
        with pytest.raises(click.ClickException, match="it had 2 requests, and then 1"):
            await Batch(engine, 32, num_lines).run(source, target, set())
    assert finished_ids(target) == {"b"}


ANSWER = '{"id": "batch_req", "custom_id": "9", "response": {}, "error": null}\n'


@pytest.mark.parametrize(
    ("content", "wrong_line"),
    [
        ("my notes\nand more", 1),
        ("my only note", 1),
        (line("a").removesuffix("\n"), 1),  # a request is no answer
        (line("a"), 1),
        ('{"custom_id": "a"}\n', 1),
        (ANSWER.replace('"9"', "9"), 1),
        (ANSWER + "and more", 2),
        (ANSWER + '{"id": "batch_req", "cus\n', 2),  # it has its end
        (ANSWER + "[" * 100_000, 2),
    ],
    ids=range(9),
)
def test_a_file_that_is_no_output_of_a_batch_stays_as_it_is(
    tmp_path: Path, content: str, wrong_line: int
) -> None:
    target = tmp_path / "notes.txt"
    target.write_text(content, encoding="utf-8")
    rule = rf"notes\.txt:{wrong_line}: the line must be an answer of a batch"
    with pytest.raises(click.ClickException, match=rule):
        finished_ids(target)
    assert target.read_text(encoding="utf-8") == content


@pytest.mark.parametrize("length", [1, len('{"id": "batch_'), len(ANSWER) - 2])
def test_only_the_beginning_of_an_answer_is_cut_off(tmp_path: Path, length: int) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(ANSWER + ANSWER[:length], encoding="utf-8")
    assert finished_ids(target) == {"9"}
    assert target.read_text(encoding="utf-8") == ANSWER


def test_an_answer_in_a_line_that_has_lost_its_end_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(ANSWER + ANSWER.replace("9", "10").removesuffix("\n"), encoding="utf-8")
    assert finished_ids(target) == {"9", "10"}
    assert target.read_text(encoding="utf-8") == ANSWER + ANSWER.replace("9", "10")


def test_the_output_of_a_batch_must_be_another_file_than_its_input(tmp_path: Path) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    content = line("a") + line("b").removesuffix("\n")
    source.write_text(content, encoding="utf-8")
    link.symlink_to(source)
    for target in (source, link):
        result = CliRunner().invoke(main, ["run-batch", str(source), str(target)])
        assert "OUT.jsonl must be another file than IN.jsonl; got" in result.stderr
        assert result.exit_code == 2 and source.read_text(encoding="utf-8") == content
