"""The pages for users of other programs name commands, flags, variables and routes that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.source_tree import ROOT
from triolet.cli import main

DOCS = ROOT / "docs"
PAGES = [DOCS / f"coming-from-{name}.md" for name in ("ollama", "llama-cpp", "vllm")]
ROUTES = (
    DOCS.joinpath("http.md").read_text(encoding="utf-8").partition("\n## Routes\n")[2].partition("\n## ")[0]
)

FLAGS = {
    flag
    for command in main.commands.values()
    for option in command.params
    for flag in option.opts + option.secondary_opts
}
OF_SERVER = {flag for option in main.commands["serve"].params for flag in option.opts}
VARIABLES = {f"TRIOLET_{flag.removeprefix('--').replace('-', '_').upper()}" for flag in OF_SERVER} | {
    "TRIOLET_URL"
}


def rows(page: Path) -> list[tuple[str, str]]:
    """Return theirs and ours of every row of the page's table."""
    table = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    cells = [re.split(r" \| ", line.removeprefix("| ").removesuffix(" |")) for line in table]
    return [(theirs, ours) for theirs, ours in cells if theirs != "---"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_of_triolet_is_there(page: Path) -> None:
    ours = [ours for _, ours in rows(page)]
    assert len(ours) > 20
    text = "\n".join(ours)
    assert set(re.findall(r"(?<=[` ])--[a-z][a-z-]*", text)) - FLAGS == set()
    assert set(re.findall(r"\bTRIOLET_[A-Z_]+", text)) - VARIABLES == set()
    assert set(re.findall(r"`triolet ([a-z-]+)", text)) - set(main.commands) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_routes_are_the_same_where_a_page_says_so_and_are_missing_where_it_says_that(page: Path) -> None:
    same = [theirs for theirs, ours in rows(page) if ours.startswith("the same routes")]
    missing = [theirs for theirs, ours in rows(page) if ours.startswith("not there") and "`/" in theirs]
    assert same and missing
    named = re.findall(r"`(/[\w/]+)`", same[0])
    assert len(named) >= 4
    assert [route for route in named if f"{route}`" not in ROUTES] == []
    assert [route for route in re.findall(r"`(/[\w/]+)`", missing[0]) if f" {route}`" in ROUTES] == []
