r"""`\d`, `\w` and `\s` in regular expressions: those of ASCII, as in vLLM 0.32.0's default engine."""

from __future__ import annotations

import re

import pytest

from triolet.structured_outputs.ascii_regex import ascii_classes


@pytest.mark.parametrize(
    ("regex", "spelled"),
    [
        (r"\d+", "[0-9]+"),
        (r"[\d.]+", "[0-9.]+"),
        (r"[^\w-]", "[^0-9A-Za-z_-]"),
        (r"\D\W", "[^0-9][^0-9A-Za-z_]"),
        (r"\\d", r"\\d"),
        (r"[]\d]", "[]0-9]"),
        (r"[^]\d]", "[^]0-9]"),
        (r"\[\d\]", r"\[[0-9]\]"),
        (r"[\[\d]", r"[\[0-9]"),
        (r"[\D]", r"[\D]"),
        (r"[^\s\S]", r"[^\s\S]"),
        (r"\n\x41\p{L}\.", r"\n\x41\p{L}\."),
        ("", ""),
    ],
)
def test_classes_are_spelled_out(regex: str, spelled: str) -> None:
    assert ascii_classes(regex) == spelled


def test_what_is_spelled_out_means_the_same_to_python() -> None:
    texts = [chr(code) for code in range(128)]
    for regex in (r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[\d\s]", r"[^\w]"):
        for text in texts:
            if text in "\x1c\x1d\x1e\x1f":  # spaces to Python alone
                continue
            expected = re.fullmatch(regex, text, re.ASCII) is not None
            assert (re.fullmatch(ascii_classes(regex), text) is not None) == expected, (regex, text)


def test_a_backslash_at_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="ends in a backslash"):
        ascii_classes("a\\")
