"""Commands to the chat itself."""

from __future__ import annotations

import warnings
from pathlib import Path

import attrs
import pytest

from triolet.cli import slash
from triolet.cli.conversation import ChatHistory
from triolet.cli.options import SAMPLING_OPTIONS
from triolet.cli.slash import ChatState, Next
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


def test_set_without_a_value_shows_what_holds_and_whose_it_is(state: ChatState) -> None:
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


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/set temperature 3", "temperature must be in [0, 2], got 3.0."),
        ("/set temperature warm", "temperature must be a number; got 'warm'"),
        ("/set max_tokens 1.5", "max_tokens must be a whole number; got '1.5'"),
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
