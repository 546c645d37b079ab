"""Typing a message: what the keys do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from triolet.cli.prompt import (
    CommandCompleter,
    Key,
    Prompt,
    history_in,
    is_open,
    message_of,
    without_mark,
)
from triolet.cli.slash import is_command


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as keys:
        yield keys


@pytest.fixture
def prompt(keys: PipeInput) -> Prompt:
    return Prompt(colour=False, commands=("/help", "/set", "/system"), keys=keys, output=DummyOutput())


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello\r", "hello"),
        ("  hello \r", "hello"),
        ("one\\\rtwo\r", "one\ntwo"),
        ('"""one\rtwo"""\r', "one\ntwo"),
        ('"""\rone\r\r  two\r"""\r', "one\n\n  two"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
        ("hellx\x7fo\r", "hello"),
        ("\x03", Key.INTERRUPT),
        ("half a line\x03", Key.INTERRUPT),
        ("\x04", Key.END),
    ],
)
async def test_what_is_typed_becomes_a_message(
    prompt: Prompt, keys: PipeInput, typed: str, message: object
) -> None:
    keys.send_text(typed)
    assert await prompt.ask() == message


@pytest.mark.parametrize(
    ("typed", "offered"), [("/s", ["/set", "/system"]), ("/help", []), ("s", []), ("/set t", [])]
)
def test_only_the_first_word_after_a_slash_is_completed(typed: str, offered: list[str]) -> None:
    completions = CommandCompleter(["/help", "/set", "/system"]).get_completions(
        Document(typed), CompleteEvent()
    )
    assert [completion.text for completion in completions] == offered


async def test_cancelling_ends_the_line_and_leaves_no_thread_behind(prompt: Prompt) -> None:
    with trio.move_on_after(0.05) as scope:
        await prompt.ask()
    assert scope.cancelled_caught
    assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0


async def test_an_interrupt_ends_the_line_and_only_that_one(prompt: Prompt, keys: PipeInput) -> None:
    prompt.interrupt()
    assert await prompt.ask() is Key.INTERRUPT
    keys.send_text("hello\r")
    assert await prompt.ask() == "hello"


@pytest.mark.parametrize("text", ['"""', '"""one', '""""', '  """one\ntwo'])
def test_three_quotes_leave_a_message_open(text: str) -> None:
    assert is_open(text)


@pytest.mark.parametrize("text", ["", "one", 'one """', '"""one"""', '""""""', '"""\n"""'])
def test_closed_or_missing_quotes_do_not(text: str) -> None:
    assert not is_open(text)


@pytest.mark.parametrize("typed", [" /usr is what", '"""/usr is what"""', '"""\n/usr is what\n"""'])
def test_a_line_that_begins_with_a_slash_is_a_message_if_it_is_indented_or_quoted(typed: str) -> None:
    message = message_of(typed)
    assert not is_command(message)
    assert without_mark(message) == "/usr is what"


def test_bytes_that_are_no_text_become_question_marks() -> None:
    assert message_of("caf\udce9") == "caf?"


def test_history_is_kept_in_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history = history_in()
    assert isinstance(history, FileHistory)
    assert Path(str(history.filename)) == tmp_path / "triolet" / "history"


def test_where_no_history_can_be_kept_the_chat_has_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "triolet").write_text("a file where the folder should be")
    assert isinstance(history_in(tmp_path), InMemoryHistory)
