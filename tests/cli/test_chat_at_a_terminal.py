"""`triolet chat` as a person sees it, on an engine that answers from a script."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal, terminal
from tests.scale import one_in

CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
PROMPT = "› "
START = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[START]:
    with ExitStack() as stack:

        def chat(*arguments: str, **environ: str) -> Terminal:
            program = terminal("tests.cli.fake_engine", "chat", *arguments, home=tmp_path, **environ)
            return stack.enter_context(program)

        yield chat


@pytest.fixture
def chat(start: START) -> Terminal:
    chat = start()
    chat.expect(PROMPT)
    return chat


def test_the_first_line_says_which_model_runs_how_and_where(start: START) -> None:
    chat = start()
    assert "triolet-nano · native · float32 · cpu · 1024 tokens" in chat.expect(PROMPT)


def test_a_reply_streams_and_ends_in_one_dim_line_of_figures(chat: Terminal) -> None:
    chat.type("hello" + ENTER)
    chat.expect("You said: hello\n")
    chat.expect(PROMPT)
    assert re.search(r"\x1b\[2mTTFT (\d+ ms|\d+\.\d\d s) · 4 tok · 92\.3 tok/s · prompt 10\x1b\[0m", chat.raw)


@pytest.mark.slow
def test_a_spinner_turns_until_the_first_token(chat: Terminal) -> None:
    chat.type("wait" + ENTER)
    chat.expect("⠙")
    chat.expect("reading the prompt 40 %")
    chat.expect("2 s")


def test_the_spinner_tells_of_a_restart(chat: Terminal) -> None:
    chat.type("wait for the restart" + ENTER)
    chat.expect("the engine restarts")


def test_ctrl_c_stops_the_reply_and_keeps_what_there_is_of_it(chat: Terminal) -> None:
    chat.type("tell me a story" + ENTER)
    chat.expect("fox")
    chat.type(CTRL_C)
    chat.expect("Stopped; what there is of the reply stays in the conversation.")
    chat.expect(PROMPT)
    assert "^C" not in chat.text
    chat.type("hello" + ENTER)
    chat.expect("prompt 30")  # three messages: question, partial reply, question
    chat.expect(PROMPT)


def test_ctrl_c_before_the_first_token_takes_the_message_back(chat: Terminal) -> None:
    chat.type("wait" + ENTER)
    chat.expect("⠙")
    chat.type(CTRL_C)
    chat.expect("Stopped before the first word.")
    chat.expect(PROMPT)
    chat.type("hello" + ENTER)
    chat.expect("prompt 10")


@pytest.mark.parametrize("question", one_in(2, ["tell me a stubborn story", "tell me a story"]))
def test_one_more_ctrl_c_leaves_with_130_even_if_the_reply_does_not_stop(
    chat: Terminal, question: str
) -> None:
    chat.type(question + ENTER)
    chat.expect("fox")
    assert chat.press_until_exit(CTRL_C) == 130
    assert chat.mode() == chat.mode_before


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave(chat: Terminal) -> None:
    chat.type("half a sent" + CTRL_C)
    chat.expect("Ctrl-C again, or Ctrl-D, leaves.")
    chat.expect(PROMPT)
    chat.type("hello" + ENTER)
    chat.expect("You said: hello\n")


@pytest.mark.slow
def test_two_ctrl_c_at_the_prompt_leave_with_130(chat: Terminal) -> None:
    chat.type(CTRL_C + CTRL_C)
    assert chat.expect_exit() == 130
    assert chat.mode() == chat.mode_before


def test_an_interrupt_from_outside_counts_like_the_key(chat: Terminal) -> None:
    chat.process.send_signal(signal.SIGINT)
    chat.expect("Ctrl-C again, or Ctrl-D, leaves.")


@pytest.mark.parametrize("typed", one_in(3, [CTRL_D, "/exit" + ENTER, "/bye" + ENTER]))
def test_leaving_by_ones_own_will_is_0(chat: Terminal, typed: str) -> None:
    chat.type(typed)
    assert chat.expect_exit() == 0
    assert chat.mode() == chat.mode_before


@pytest.mark.parametrize("typed", one_in(2, ["tell me a story" + ENTER, ""]))
def test_sigterm_ends_the_chat_and_gives_the_terminal_back(chat: Terminal, typed: str) -> None:
    chat.type(typed)
    chat.expect("fox" if typed else "Type a message")
    chat.process.send_signal(signal.SIGTERM)
    assert chat.expect_exit() == 143
    assert chat.mode() == chat.mode_before
    assert "Traceback" not in chat.text


def test_ctrl_c_while_the_model_loads_leaves_with_130(start: START) -> None:
    chat = start("--model", "endless")
    chat.expect("loading endless")
    chat.type(CTRL_C)
    assert chat.expect_exit() == 130


@pytest.mark.parametrize("typed", one_in(3, ['"""one\rtwo"""\r', "one\\\rtwo\r", "one\x1b\rtwo\r"]))
def test_a_message_may_have_several_lines(chat: Terminal, typed: str) -> None:
    chat.type(typed)
    chat.expect("You said: one\ntwo\n")


@pytest.mark.slow
def test_a_conversation_that_has_outgrown_the_context_goes_on(chat: Terminal) -> None:
    chat.type("this is too long" + ENTER)
    chat.expect("1100 tokens, and the context has 1024. /clear")
    chat.expect(PROMPT)
    chat.type("hello" + ENTER)
    chat.expect("You said: hello\n")


def test_a_reply_that_fails_is_taken_back_and_the_chat_goes_on(chat: Terminal) -> None:
    chat.type("please fail now" + ENTER)
    chat.expect("request r-1 failed: a step failed twice")
    chat.expect("Your message was taken back")
    chat.type("hello" + ENTER)
    chat.expect("prompt 10")


def test_a_file_goes_with_the_message_that_is_sent_after_one_that_failed(
    chat: Terminal, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("alpha\n", encoding="utf-8")
    chat.type(f"/read {tmp_path}/a.txt" + ENTER)
    chat.expect(" characters, goes")
    chat.type("please fail now" + ENTER)
    chat.expect("its files go with")
    chat.type("hello" + ENTER)
    chat.expect("alpha")
    chat.expect("hello")


def test_a_preset_that_is_wrong_is_told_of_and_the_chat_goes_on(start: START, tmp_path: Path) -> None:
    (presets := tmp_path / "presets.toml").write_text("[presets.wrong]\nmodel = 1\n")
    chat = start(TRIOLET_CONFIG=str(presets))
    chat.expect(PROMPT)
    chat.type("/model wrong" + ENTER)
    chat.expect("non-empty")  # without what a line break may stand in
    chat.type("hello" + ENTER)
    chat.expect("You said: hello\n")


def test_an_edited_message_that_gets_no_answer_leaves_the_exchange_that_it_was_to_replace(
    start: START, tmp_path: Path
) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'please fail now' > $1\n")
    editor.chmod(0o755)
    chat = start(VISUAL=str(editor))
    chat.expect(PROMPT)
    chat.type("hello" + ENTER)
    chat.expect("prompt 10")
    chat.type("/edit" + ENTER)
    chat.expect("please fail now")
    chat.type(ENTER)
    chat.expect("a step failed twice")
    chat.expect("The exchange that it was to replace stays.")
    chat.type("/undo" + ENTER)
    chat.expect("Took back: hello")


@pytest.mark.slow
def test_a_dead_engine_ends_the_chat_with_one_line(chat: Terminal) -> None:
    chat.type("kill the engine" + ENTER)
    chat.expect("triolet: error: the engine gave up after 3 crashes\n")
    assert chat.expect_exit() == 1
    assert "Traceback" not in chat.text


@pytest.mark.parametrize(
    ("question", "partial"), [("please kill the engine", ""), ("please die midway", "You said:")]
)
def test_a_conversation_that_a_dead_engine_ends_is_saved_and_the_next_chat_goes_on_with_it(
    start: START, tmp_path: Path, question: str, partial: str
) -> None:
    first = start()
    first.expect(PROMPT)
    first.type("hello" + ENTER)
    first.expect("prompt 10")
    first.type(question + ENTER)
    first.expect("the conversation, 2 exchanges, is saved; in the next chat ")
    load = first.expect(" goes on with it")
    first.expect("triolet: error: the engine gave up after 3 crashes\n")
    assert first.expect_exit() == 1
    path = Path(load.removeprefix("/load "))
    assert path.parent == tmp_path / "triolet"
    assert json.loads(path.read_text())["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "You said: hello"},
        {"role": "user", "content": question},
        {"role": "assistant", "content": partial},
    ]
    second = start()
    second.expect(PROMPT)
    second.type(load + ENTER)
    second.expect("Loaded 2 exchanges")
    second.type("hello again" + ENTER)
    second.expect("prompt 50")


def test_a_chat_that_ends_before_its_first_message_leaves_no_file(start: START, tmp_path: Path) -> None:
    chat = start("--model", "missing")
    chat.expect("neither a folder")
    assert chat.expect_exit() == 1
    assert not (tmp_path / "triolet").exists()


def test_regen_answers_the_same_conversation_again(chat: Terminal) -> None:
    chat.type("hello" + ENTER)
    chat.expect("prompt 10")
    chat.type("/regen" + ENTER)
    chat.expect("You said: hello\n")
    chat.expect("prompt 10")


@pytest.mark.slow
def test_a_message_is_answered_twice_at_once_and_the_conversation_goes_on_with_one(chat: Terminal) -> None:
    chat.type("hello" + ENTER)
    chat.expect("prompt 10")
    chat.type("/fork" + ENTER)
    chat.expect("1. You said: hello")
    chat.expect("2. You said: hello")
    chat.expect("/pick N takes another one.")
    chat.type("/pick 2" + ENTER)
    chat.expect("The conversation goes on with reply 2.")


@pytest.mark.slow
def test_history_outlives_the_chat(start: START, tmp_path: Path) -> None:
    first = start()
    first.expect(PROMPT)
    first.type("a memorable line" + ENTER)
    first.expect("You said")
    first.type("/bye" + ENTER)
    assert first.expect_exit() == 0
    second = start()
    second.expect(PROMPT)
    second.type("\x1b[A\x1b[A" + ENTER)
    second.expect("You said: a memorable line\n")
    assert (tmp_path / "triolet" / "history").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_what_is_typed_during_a_reply_is_not_echoed_into_it_and_is_sent_after_it(chat: Terminal) -> None:
    chat.type("slowly count to 30" + ENTER)
    chat.expect("4, 5")
    chat.type("hello" + ENTER)
    assert "hello" not in chat.expect("prompt 10")
    chat.expect("You said: hello\n")


@pytest.mark.parametrize(
    ("typed", "sent"), [("hello", "hello"), ("one\x1b\rtwo", "one\ntwo"), ("hello" + ENTER, "hello")]
)
def test_what_is_typed_before_ctrl_c_stops_a_reply_is_in_the_next_prompt(
    chat: Terminal, typed: str, sent: str
) -> None:
    chat.type("tell me a story" + ENTER)
    chat.expect("fox")
    chat.type(typed + CTRL_C)
    chat.expect("Stopped;")
    chat.expect(PROMPT)
    if not typed.endswith(ENTER):
        chat.type(ENTER)
    chat.expect(f"You said: {sent}\n")


@pytest.mark.slow
def test_an_alt_enter_that_is_typed_during_a_reply_is_a_line_break_of_the_next_message(
    chat: Terminal,
) -> None:
    chat.type("slowly count to 30" + ENTER)
    chat.expect("4, 5")
    chat.type("one\x1b\rtwo" + ENTER)
    chat.expect("You said: one\ntwo\n")


def test_what_was_typed_ahead_is_no_command_for_the_shell_after_ctrl_c_has_ended_the_chat(
    chat: Terminal,
) -> None:
    chat.type("tell me a stubborn story" + ENTER)
    chat.expect("fox")
    chat.type("rm everything" + ENTER)
    assert chat.press_until_exit(CTRL_C) == 130
    assert chat.num_unread() == 0


def test_without_colour_nothing_is_painted_and_nothing_turns(start: START) -> None:
    chat = start(NO_COLOR="1")
    chat.expect(PROMPT)
    chat.type("tell me a story slowly" + ENTER)
    chat.expect("fox")
    chat.type(CTRL_C)
    chat.expect("Stopped;")
    chat.expect(PROMPT)
    assert not re.search("[⠋⠙⠹]", chat.text)
    assert "\x1b[2m" not in chat.raw


def test_one_answer_at_a_terminal_is_the_reply_and_nothing_else(start: START) -> None:
    chat = start("-q", "count to 3")
    assert chat.expect_exit() == 0
    assert chat.text.strip().endswith("1, 2, 3.")
    assert "TTFT" not in chat.text
