"""Typing a message: what the keys do."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from prompt_toolkit.application import Application
from prompt_toolkit.application.current import set_app
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.data_structures import Size
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import to_plain_text
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.search import SearchDirection, start_search

from triolet.cli.conversation import state_folder
from triolet.cli.prompt import (
    CommandCompleter,
    KeptHistory,
    Key,
    Prompt,
    history_in,
    is_open,
    merge_runs,
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
    history = history_in(state_folder())
    assert isinstance(history, FileHistory)
    assert Path(str(history.filename)) == tmp_path / "triolet" / "history"


def test_where_no_history_can_be_kept_the_chat_has_one_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "triolet").write_text("a file where the folder should be")
    assert isinstance(history_in(tmp_path / "triolet"), InMemoryHistory)


@pytest.mark.parametrize("marks", [("", ""), ("\x1b[200~", "\x1b[201~")])
async def test_a_long_paste_is_one_key_whether_the_terminal_marks_it_or_not(
    prompt: Prompt, keys: PipeInput, marks: tuple[str, str]
) -> None:
    presses = 0

    def count(_: object) -> None:
        nonlocal presses
        presses += 1

    prompt._session.app.key_processor.after_key_press += count
    text = "word " * 800
    async with trio.open_nursery() as nursery:
        # The pipe is smaller than the paste, so it is filled while it is read.
        nursery.start_soon(trio.to_thread.run_sync, keys.send_text, marks[0] + text + marks[1] + "\r")
        assert await prompt.ask() == text.strip()
    assert presses < 50  # one for each read, and not one for each of 4,000 characters


def test_short_runs_and_keys_between_them_stay_as_they_are() -> None:
    typed = [KeyPress(letter, letter) for letter in "hello"] + [KeyPress(Keys.ControlM, "\r")]
    assert merge_runs(typed * 2) == typed * 2
    pasted = [KeyPress("x", "x")] * 40
    merged = merge_runs([*typed, *pasted, typed[-1]])
    assert (merged[:6], merged[7:]) == (typed, [typed[-1]])
    assert (merged[6].key, merged[6].data) == (Keys.BracketedPaste, "x" * 40)


def test_a_search_in_the_history_shows_no_placeholder_behind_its_match(prompt: Prompt) -> None:
    with set_app(prompt._session.app):
        shown = to_plain_text(prompt._session.placeholder)
        start_search(direction=SearchDirection.BACKWARD)
        assert (shown, to_plain_text(prompt._session.placeholder)) == ("Type a message, or /help", "")


async def test_enter_in_a_search_of_the_history_takes_what_was_found(keys: PipeInput) -> None:
    history = InMemoryHistory(["tell me a story", "count"])
    prompt = Prompt(colour=False, keys=keys, output=DummyOutput(), history=history)
    keys.send_text("\x12tell\r\r")
    assert await prompt.ask() == "tell me a story"


async def test_ctrl_z_suspends_the_program_and_is_no_character_of_the_message(
    prompt: Prompt, keys: PipeInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended: list[Application[object]] = []

    def suspend(app: Application[object]) -> None:
        suspended.append(app)

    monkeypatch.setattr(Application, "suspend_to_background", suspend)
    keys.send_text("abc\x1adef\r")
    assert await prompt.ask() == "abcdef"
    assert suspended == [prompt._session.app]


async def test_a_message_that_the_history_has_no_room_for_is_sent_all_the_same(
    keys: PipeInput, tmp_path: Path
) -> None:
    history = KeptHistory(str(tmp_path / "gone" / "history"))
    prompt = Prompt(colour=False, keys=keys, output=DummyOutput(), history=history)
    for message in ("first", "second"):
        keys.send_text(f"{message}\r")
        assert await prompt.ask() == message
    assert history.get_strings()[-2:] == ["first", "second"]


async def test_a_tab_of_a_pasted_text_is_shown_as_columns(keys: PipeInput) -> None:
    screen = io.StringIO()
    prompt = Prompt(colour=False, keys=keys, output=Vt100_Output(screen, lambda: Size(rows=40, columns=100)))
    keys.send_text("\x1b[200~if x:\n\ty\x1b[201~\r")
    assert await prompt.ask() == "if x:\n\ty"
    assert "^I" not in screen.getvalue()


async def test_ctrl_g_opens_the_line_in_an_editor_and_edit_begins_there(
    keys: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf '\\nadded\\n' >> $1\n")
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    screen = io.StringIO()
    prompt = Prompt(colour=False, keys=keys, output=Vt100_Output(screen, lambda: Size(rows=40, columns=100)))

    async def press_enter_when_edited() -> None:
        while "added" not in prompt._session.default_buffer.text:  # noqa: ASYNC110
            await trio.sleep(0.005)
        keys.send_text("\r")

    for begin, in_editor in (("", False), ("draft", True)):
        if not in_editor:
            keys.send_text("draft\x07")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(press_enter_when_edited)
            assert await prompt.ask(begin, in_editor=in_editor) == "draft\nadded"
        prompt._session.default_buffer.reset()


def test_files_are_completed_for_commands_that_take_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    completer = CommandCompleter(["/read"])
    document = Document(f"/read {tmp_path}/no")
    assert [one.text for one in completer.get_completions(document, CompleteEvent())] == ["tes.txt"]
