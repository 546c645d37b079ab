"""The picture of the terminal in the README is what the chat shows, and loads nothing."""

from __future__ import annotations

import html
import re
import runpy
import shutil

import pytest

from tests.source_tree import ROOT

PICTURE = (ROOT / "docs" / "terminal.svg").read_text(encoding="utf-8")


def text_of(picture: str) -> str:
    lines = re.findall(r"<text[^>]*>(.*?)</text>", picture)
    return html.unescape("\n".join(lines)).replace("\xa0", " ")


def test_the_picture_loads_nothing_and_is_shown_in_the_readme() -> None:
    assert set(re.findall(r"https?://[^\"') <]+", PICTURE)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<script|<image|@font-face|@import", PICTURE)
    assert "](docs/terminal.svg)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_shows_questions_with_answers_and_no_figures_that_were_not_recorded() -> None:
    text = text_of(PICTURE)
    assert "Count from 1 to 20." in text and "18, 19, 20." in text
    assert not re.search(r"tok/s|\d+ ms", text)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_the_picture_is_what_the_chat_shows_now() -> None:
    script = runpy.run_path(str(ROOT / "tools" / "documentation" / "terminal_picture.py"))
    drawn = script["drawn"](script["take"]())
    assert text_of(PICTURE) == text_of(drawn), "draw it anew: python tools/documentation/terminal_picture.py"
