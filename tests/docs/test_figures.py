"""Every figure that the documentation shows is measured and in a result file, or a limit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.figures import FIGURE, LIMITS, NOT_MEASURED, SENTENCES
from tests.documentation import PAGES, outside_of_blocks, outside_of_tables
from tests.source_tree import ROOT

SHOWN = [page for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]


def prose(page: Path) -> str:
    """Return a page's text as one line, without programs and without the tables that are made."""
    text = outside_of_tables(outside_of_blocks(page.read_text(encoding="utf-8")))
    return " ".join(line for line in text.split("\n") if not line.endswith(NOT_MEASURED))


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", SENTENCES)
def test_a_sentence_with_figures_says_what_the_results_say(name: str) -> None:
    text = prose(ROOT / name)
    assert [made for sentence in SENTENCES[name] if (made := sentence()) not in text] == []


@pytest.mark.parametrize("page", SHOWN, ids=named)
def test_a_figure_is_in_a_sentence_that_is_made_from_results_or_is_a_limit(page: Path) -> None:
    """What is set or wanted goes into LIMITS; what was measured goes into SENTENCES, or a table."""
    text, name = prose(page), named(page)
    for sentence in SENTENCES.get(name, ()):
        text = text.replace(sentence(), "")
    limits = LIMITS.get(name, ())
    assert [limit for limit in limits if limit not in text] == [], "these limits are no longer on the page"
    found = {match[0] for match in FIGURE.finditer(text)}
    assert sorted(found - set(limits)) == [], "neither a sentence made from results nor a limit"


def test_a_figure_that_is_not_in_a_result_file_is_found() -> None:
    text = "It takes 12 ms, 1.5 times as long, at 2,000 tokens/s and 40 %; gpt-3.5 s has version 1.2."
    assert [re.sub(r"\s", "", match[0]) for match in FIGURE.finditer(text)] == [
        "12ms",
        "1.5times",
        "2,000tokens/s",
        "40%",
    ]
