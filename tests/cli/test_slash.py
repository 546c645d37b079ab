"""Commands to the chat itself."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path

import attrs
import pytest

from triolet.cli import slash
from triolet.cli.conversation import ChatHistory, SavedChat
from triolet.cli.models.sampling import SAMPLING_OPTIONS
from triolet.cli.slash import ChatState, Next, ThinkMode
from triolet.core.request.params import SamplingParams


@pytest.fixture
def state() -> ChatState:
    conversation = ChatHistory(system="Be brief.")
    for question in ("one", "two"):
        conversation.ask(question)
        conversation.answer(f"{question}, you say")
    return ChatState(
        conversation=conversation, defaults=SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None)
    )


@pytest.mark.parametrize("text", ["/help", "/set temperature 0", "/nonsense", "/", "/?", "/Help", "/HELP x"])
def test_a_word_after_a_slash_is_a_command(text: str) -> None:
    assert slash.is_command(text)


@pytest.mark.parametrize("text", ["/usr/bin/env is what?", "either/or", "//", "what is /help?", " /usr"])
def test_other_slashes_are_for_the_model(text: str) -> None:
    assert not slash.is_command(text)


def test_an_unknown_command_gets_a_hint(state: ChatState) -> None:
    assert slash.run("/stts", state).complaint == "unknown command /stts; did you mean /stats?"
    hint = "/help lists the commands; with a space before the / it is a message"
    assert slash.run("/zzz", state).complaint == f"unknown command /zzz; {hint}"
    assert slash.run("/usr is what", state).complaint == f"unknown command /usr; {hint}"


def test_the_name_of_a_command_may_be_in_upper_case(state: ChatState) -> None:
    assert slash.run("/Help", state) == slash.run("/help", state)
    assert slash.run("/SET Temperature\t0.2", state).say == ("  temperature         0.2",)
    assert slash.run("/Bye", state).next is Next.LEAVE


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("END OF", ("END OF",)),
        (r"\n\n", ("\n\n",)),
        ('"a b"', ("a b",)),
        (r'"###", "\n" "say \"x\""', ("###", "\n", 'say "x"')),
        (r"C:\\new", (r"C:\new",)),
    ],
)
def test_set_stop_takes_one_text_or_several_in_quotes_with_escapes(
    state: ChatState, text: str, stop: tuple[str, ...]
) -> None:
    assert slash.run(f"/set stop {text}", state).complaint is None
    assert state.params().stop == stop


def test_a_setting_is_shown_as_it_can_be_typed(state: ChatState) -> None:
    slash.run(r'/set stop "a b" "\n"', state)
    assert slash.run("/set stop", state).say == (r'  stop                "a b" "\n"',)


def test_a_value_that_is_raised_is_told_in_the_chat_and_warned_of_nowhere_else(state: ChatState) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = slash.run("/set temperature 1e-5", state).say
        assert state.params().temperature == 0.01
    assert said == ("  temperature 1e-05 is raised to 0.01", "  temperature         0.01")


def test_help_lists_every_command_in_lines_that_fit(state: ChatState) -> None:
    lines = slash.run("/help", state).say
    for name in slash.COMMANDS:
        assert any(line.startswith(f"  {name}") for line in lines)
    assert max(map(len, lines)) < 80


def test_a_conversation_is_asked_up_to_its_last_question(state: ChatState) -> None:
    assert state.conversation.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one, you say"},
        {"role": "user", "content": "two"},
    ]


def test_clear_forgets_the_exchanges_and_keeps_the_system_prompt(state: ChatState) -> None:
    assert slash.run("/clear", state).say == ("A new conversation; the system prompt stays.",)
    state.conversation.ask("three")
    assert [message["content"] for message in state.conversation.messages()] == ["Be brief.", "three"]


def test_undo_takes_back_one_exchange_at_a_time(state: ChatState) -> None:
    assert slash.run("/undo", state).say == ("Took back: two",)
    assert slash.run("/undo", state).say == ("Took back: one",)
    assert slash.run("/undo", state).complaint == "there is nothing to take back"


def test_regen_asks_for_a_reply_and_says_when_it_can_only_be_the_same(state: ChatState) -> None:
    assert slash.run("/regen", state) == slash.Effect(next=Next.REPLY)
    slash.run("/set seed 7", state)
    assert "fixed seed" in slash.run("/regen", state).say[0]
    slash.run("/set temperature 0", state)
    assert "temperature 0" in slash.run("/regen", state).say[0]
    slash.run("/clear", state)
    assert slash.run("/regen", state) == slash.Effect(complaint="there is no reply to make again")


def test_system_shows_sets_reads_and_removes(state: ChatState, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("You are a cat.\n")
    assert slash.run("/system", state).say == ("Be brief.",)
    slash.run("/system You are a dog.", state)
    assert state.conversation.system == "You are a dog."
    slash.run(f"/system @{tmp_path}/system.txt", state)
    assert state.conversation.system == "You are a cat."
    assert "readable text file" in (slash.run("/system @no/such/file", state).complaint or "")
    assert state.conversation.system == "You are a cat."
    slash.run("/system none", state)
    assert state.conversation.system is None


def test_set_without_a_value_shows_what_holds_and_whether_it_is_a_default(state: ChatState) -> None:
    assert slash.run("/set temperature", state).say == ("  temperature         0.7  (default)",)
    assert slash.run("/set temperature 0.2", state).say == ("  temperature         0.2",)
    assert len(slash.run("/set", state).say) == len(SAMPLING_OPTIONS)


def test_set_changes_the_next_replies_parameters_and_default_undoes_it(state: ChatState) -> None:
    for line in ("/set temperature 0", "/set max-tokens 5", "/set stop ###"):
        assert slash.run(line, state).complaint is None
    expected = attrs.evolve(state.defaults, temperature=0.0, max_tokens=5, stop=("###",))
    assert state.params() == expected
    slash.run("/set temperature 0.5", state)
    assert state.params().top_p == 0.9  # greedy had set it aside, not lost it
    for name in ("temperature", "max_tokens", "stop"):
        slash.run(f"/set {name} default", state)
    assert state.params() == state.defaults


def test_none_lifts_a_limit_that_the_model_has(state: ChatState) -> None:
    state.defaults = attrs.evolve(state.defaults, max_tokens=64)
    assert slash.run("/set max_tokens", state).say == ("  max_tokens          64  (default)",)
    assert slash.run("/set max_tokens none", state).say == ("  max_tokens          none",)
    assert state.params().max_tokens is None


def test_a_filter_is_shown_as_it_was_set_with_the_remark_that_greedy_sampling_ignores_it(
    state: ChatState, tmp_path: Path
) -> None:
    no_effect = "no effect at temperature 0"
    slash.run("/set temperature 0", state)
    assert slash.run("/set top_k 5", state).say == (f"  top_k               5  ({no_effect})",)
    assert slash.run("/set top_p", state).say == (f"  top_p               0.9  (default; {no_effect})",)
    slash.run(f"/save {tmp_path}/chat.json", state)
    assert SavedChat.read(tmp_path / "chat.json").sampling == {"temperature": 0.0, "top_k": 5}
    slash.run("/set temperature default", state)
    assert slash.run("/set top_k", state).say == ("  top_k               5",)
    assert slash.run("/set top_k default", state).say == ("  top_k               0  (default)",)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set temperature 3", "temperature must be in [0, 2], got 3.0."),
        ("/set temperature warm", "temperature must be a number or default; got 'warm'"),
        ("/set max_tokens 1.5", "max_tokens must be a whole number, none or default; got '1.5'"),
        ("/set top_k none", "top_k must be a whole number or default; got 'none'"),
        ("/set temprature 1", "/set does not know temprature; did you mean temperature?"),
        (
            '/set stop "a',
            'stop must be one text, or several in double quotes, such as "###" "\\n\\n"; got "a',
        ),
        ("/stats perhaps", "/stats takes on or off; got perhaps"),
    ],
)
def test_an_impossible_setting_changes_nothing(state: ChatState, line: str, complaint: str) -> None:
    assert slash.run(line, state).complaint == complaint
    assert state.params() == state.defaults
    assert state.stats


def test_stats_is_a_switch(state: ChatState) -> None:
    slash.run("/stats off", state)
    assert not state.stats
    slash.run("/stats", state)
    assert state.stats


@pytest.mark.parametrize("line", ["/exit", "/bye"])
def test_there_are_two_words_for_leaving(state: ChatState, line: str) -> None:
    assert slash.run(line, state).next is Next.LEAVE


def test_a_saved_chat_is_loaded_with_its_settings_and_replaces_the_present_one(
    state: ChatState, tmp_path: Path
) -> None:
    path = tmp_path / "chat.json"
    state.model = "first"
    slash.run('/set stop "###"', state)
    assert slash.run(f"/save {path}", state).say == (f"Saved 2 exchanges to {path}.",)
    assert path.stat().st_mode & 0o077 == 0
    messages = state.conversation.messages(with_last_answer=True)
    other = ChatState(conversation=ChatHistory(), defaults=state.defaults, model="second")
    said = slash.run(f"/load {path}", other).say
    assert said[0] == f"Loaded 2 exchanges from {path}."
    assert "/model first" in said[1]
    assert other.conversation.messages(with_last_answer=True) == messages
    assert other.params() == state.params()
    assert slash.run(f"/save {path}", other).complaint is None  # a chat may be replaced


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("# Notes", "must be a chat that /save wrote"),
        ("[]", "must be a chat that /save wrote"),
        ('{"triolet_chat": 2, "messages": []}', "has version 2"),
        ('{"triolet_chat": 1, "messages": [{"role": "user", "content": "a"}]}', "must be a chat"),
        ('{"triolet_chat": 1, "messages": [], "sampling": {"n": 3}}', "sampling parameters only; it sets n"),
        ("[" * 100_000, "must be a chat that /save wrote"),
        (
            '{"triolet_chat": 1, "messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}]}',
            "must be a chat that /save wrote",
        ),
        (
            '{"triolet_chat": 1, "messages": [{"role": "system", "content": "\\ud800"}]}',
            "must be a chat that /save wrote",
        ),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_chat_is_neither_loaded_nor_overwritten(
    state: ChatState, tmp_path: Path, content: str | None, rule: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    before = state.conversation.messages(with_last_answer=True)
    assert rule in (slash.run(f"/load {path}", state).complaint or "")
    assert state.conversation.messages(with_last_answer=True) == before
    if content is not None and "sampling" not in content:
        assert slash.run(f"/save {path}", state).complaint is not None
        assert path.read_text() == content


@pytest.mark.parametrize("line", ["/read {}", "/save {}", "/load {}"])
def test_a_pipe_or_a_device_is_neither_read_nor_written(state: ChatState, tmp_path: Path, line: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        assert (
            slash.run(line.format(path), state).complaint
            == f"{path} must be a file; it is a pipe or a device"
        )


def test_a_file_that_is_too_long_to_be_sent_is_not_read_to_its_end(state: ChatState, tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(2**42)  # zeros that take no room on the disk, and would take all of the memory
    rule = f"{path} must have at most 1,000,000 characters; it has more"
    assert slash.run(f"/read {path}", state).complaint == rule


def test_a_chat_that_cannot_be_saved_leaves_the_file_that_was_saved_before(
    state: ChatState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.json"
    slash.run(f"/save {path}", state)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    state.conversation.ask("three")
    assert slash.run(f"/save {path}", state).complaint == f"{path} cannot be written; No space left on device"
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["chat.json"])


@pytest.mark.parametrize("line", ["/read {}", "/save {}", "/load {}", "/system @{}"])
def test_the_folder_of_an_unknown_user_is_complained_of_as_a_missing_file_is(
    state: ChatState, line: str
) -> None:
    complaint = slash.run(line.format("~no-such-user/file"), state).complaint
    missing = slash.run(line.format("no-such-folder/file"), state).complaint or ""
    assert complaint == missing.replace("no-such-folder", "~no-such-user") != ""


def test_a_chat_that_is_no_unicode_is_not_saved_and_leaves_no_file(state: ChatState, tmp_path: Path) -> None:
    state.conversation.system = "\udcff"  # from a byte on the command line that is no UTF-8
    assert "a message must be UTF-8" in (slash.run(f"/save {tmp_path}/chat.json", state).complaint or "")
    assert not (tmp_path / "chat.json").exists()


@pytest.mark.parametrize(
    ("content", "count"),
    [("alpha\n", "6 characters"), ("é", "1 character"), ("x" * 1234, "1,234 characters")],
)
def test_read_tells_how_many_characters_the_file_itself_has(
    state: ChatState, tmp_path: Path, content: str, count: str
) -> None:
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    said = slash.run(f"/read {tmp_path}/a.txt", state).say
    assert said == (f"{tmp_path}/a.txt, {count}, goes with the next message.",)


def test_files_that_were_read_go_with_the_next_message_only(state: ChatState, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha\n")
    assert "goes with the next message" in slash.run(f"/read {tmp_path}/a.txt", state).say[0]
    state.conversation.ask("What is this?")
    assert state.conversation.messages()[-1]["content"] == "a.txt:\n```\nalpha\n```\n\nWhat is this?"
    state.conversation.ask("And now?")
    assert state.conversation.messages()[-1]["content"] == "And now?"
    assert "readable text file" in (slash.run(f"/read {tmp_path}/none", state).complaint or "")


def test_files_of_a_message_that_is_taken_back_go_with_the_next_one(state: ChatState, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha\n")
    slash.run(f"/read {tmp_path}/a.txt", state)
    for _ in range(2):
        state.conversation.ask("What is this?")
        assert state.conversation.messages()[-1]["content"] == "a.txt:\n```\nalpha\n```\n\nWhat is this?"
        assert state.conversation.take_back_unanswered() is not None
    state.conversation.ask("What is this?")
    state.conversation.answer("The first letter.")
    assert state.conversation.take_back_unanswered() is None
    assert (len(state.conversation.exchanges), state.conversation.attached) == (3, [])


def test_one_of_the_forked_replies_is_picked(state: ChatState) -> None:
    assert slash.run("/fork", state) == slash.Effect(next=Next.FORK, argument="2")
    assert "from 2 to 4; got 9" in (slash.run("/fork 9", state).complaint or "")
    assert "no replies to pick from" in (slash.run("/pick 1", state).complaint or "")
    state.forks = ["left", "right"]
    assert "from 1 to 2; got 3" in (slash.run("/pick 3", state).complaint or "")
    slash.run("/pick 2", state)
    assert state.conversation.exchanges[-1].answer == "right"
    slash.run("/undo", state)
    assert slash.run("/pick 2", state).complaint is not None


def test_think_asks_for_reasoning_or_not_and_shows_what_was_hidden(state: ChatState) -> None:
    for word, wish in (("on", True), ("off", False), ("hide", None), ("AUTO", None)):
        assert slash.run(f"/think {word}", state).complaint is None
        assert state.thinking.wish is wish
    state.last_reasoning = "first\nsecond\n"
    assert slash.run("/think show", state).say == ("first", "second")
    assert state.thinking is ThinkMode.AUTO
    assert "got perhaps" in (slash.run("/think perhaps", state).complaint or "")


def test_think_on_and_off_are_refused_where_the_chat_template_has_no_switch(state: ChatState) -> None:
    state.can_think, state.model, state.thinking = False, "triolet-nano", ThinkMode.HIDE
    for word in ("on", "off", "OFF"):
        complaint = slash.run(f"/think {word}", state).complaint or ""
        assert "triolet-nano has none: its chat template reads no enable_thinking or thinking" in complaint
        assert state.thinking is ThinkMode.HIDE
    for word in ("hide", "auto", "show", ""):
        assert slash.run(f"/think {word}", state).complaint is None


def test_a_server_with_its_own_defaults_is_not_given_others(state: ChatState) -> None:
    state.knows_defaults = False
    assert slash.run("/set temperature", state).say == ("  temperature         (the server's default)",)
