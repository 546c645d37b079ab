"""What reaches a terminal, and what a pipe."""

from __future__ import annotations

import io
import re

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from triolet.cli.screen import Screen, Wrapping


def shown(written: str) -> list[str]:
    """The lines that a terminal shows, where the cursor is only moved back, and lines erased from there on."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[\d+D|\x1b\[K|\n|[^\x1b\n]", written):
        if part == "\n":
            lines, column = [*lines, ""], 0
        elif part.endswith("D"):
            column -= int(part[2:-1])
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part
            column += 1
    return lines


def wrapped(text: str, width: int, pieces: int = 1) -> list[str]:
    wrapping, size = Wrapping(), max(1, len(text) // pieces)
    return shown("".join(wrapping.feed(text[at : at + size], width) for at in range(0, len(text), size)))


def test_a_word_that_reaches_the_margin_moves_to_the_next_line() -> None:
    assert wrapped("the quick brown fox", width=11) == ["the quick ", "brown fox"]


def test_a_word_longer_than_the_line_is_cut_at_the_margin() -> None:
    assert wrapped("a " + "x" * 25, width=11) == ["a ", "x" * 10, "x" * 10, "x" * 5]


def test_wide_characters_count_twice() -> None:
    assert Wrapping().feed("日本語", width=5) == "日本\n語"


def test_a_tab_of_a_reply_goes_to_the_next_column_of_four_and_never_over_the_margin() -> None:
    assert wrapped("if x:\n\ty\n\t\tz\nab\tc", width=40) == ["if x:", "    y", "        z", "ab  c"]
    assert wrapped("abcdefgh\tx", width=11) == ["abcdefgh", "x"]


@given(text=st.text(alphabet="ab \n", max_size=200), width=st.integers(4, 30), pieces=st.integers(1, 200))
def test_wrapping_keeps_every_word_and_every_margin_however_the_text_is_cut(
    text: str, width: int, pieces: int
) -> None:
    lines = wrapped(text, width, pieces)
    assert max(map(len, lines)) < width
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert lines == wrapped(text, width)
    if max(map(len, text.split()), default=0) < width:
        assert " ".join(lines).split() == text.split()


def test_a_pipe_gets_the_reply_as_it_is() -> None:
    out = io.StringIO()
    screen = Screen(out, live=False, colour=False)
    screen.reply("a very long line " * 20 + "\x1b[31m")
    screen.end_reply()
    assert out.getvalue() == "a very long line " * 20 + "\x1b[31m\n"


def test_a_reply_that_ends_its_line_gets_no_second_line_break() -> None:
    out = io.StringIO()
    screen = Screen(out, live=False, colour=False)
    screen.reply("done\n")
    screen.end_reply()
    assert out.getvalue() == "done\n"


def test_a_model_can_not_move_the_cursor_of_a_terminal() -> None:
    out = io.StringIO()
    Screen(out, live=True, colour=True).reply("safe\x1b]0;title\x07\x9b2J\r\b!")
    assert out.getvalue() == "safe]0;title2J!"


@pytest.mark.parametrize(("colour", "written"), [(True, "\x1b[2mnote\x1b[0m\n"), (False, "note\n")])
def test_a_remark_is_dim_where_colours_are_welcome(colour: bool, written: str) -> None:
    out = io.StringIO()
    Screen(out, live=True, colour=colour).remark("note")
    assert out.getvalue() == written


async def test_a_spinner_turns_says_how_long_and_leaves_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    out = io.StringIO()
    async with trio.open_nursery() as nursery:
        spinner = Screen(out, live=True, colour=True).spinner(nursery)
        await trio.sleep(3.01)
        spinner.stop()
        written = out.getvalue()
    assert "⠋" in written and "⠙" in written
    assert "2 s" in written and "1 s" not in written
    assert written.endswith("\r\x1b[K")
    assert out.getvalue() == written


async def test_a_spinner_tells_the_reason_of_now_after_a_moment(
    autojump_clock: trio.testing.MockClock,
) -> None:
    out = io.StringIO()
    reasons = ["one"]
    async with trio.open_nursery() as nursery:
        spinner = Screen(out, live=True, colour=False).spinner(nursery)
        nursery.start_soon(spinner.spin)
        spinner.reason = lambda: reasons[-1]
        await trio.sleep(0.3)
        assert "one" not in out.getvalue()
        await trio.sleep(0.3)
        reasons.append("two")
        await trio.sleep(2.0)
        spinner.stop()
    frames = out.getvalue().split("\r\x1b[K")
    assert any(frame.endswith("one") for frame in frames)
    assert any(frame.endswith("two 2 s") for frame in frames)
    assert frames[-1] == ""


async def test_a_spinner_stopped_before_its_first_turn_is_never_seen() -> None:
    out = io.StringIO()
    async with trio.open_nursery() as nursery:
        Screen(out, live=True, colour=True).spinner(nursery).stop()
    assert out.getvalue() == ""
