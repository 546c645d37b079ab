r"""`\d`, `\w` and `\s` in regular expressions: those of ASCII, as in vLLM 0.32.0's default engine."""

from __future__ import annotations

import re

import pytest

from tests.structured_outputs.vocabularies import follows
from triolet.core.request.structured_outputs import StructuredOutputsParams
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
        (r"[\D]", "[[^0-9]]"),
        (r"[^\W\d_]", "[^[^0-9A-Za-z_]0-9_]"),
        (r"[\w-~]", r"[0-9A-Za-z_\-~]"),
        (r"[+-\d]", r"[+\-0-9]"),
        (r"[\d-\w]", r"[0-9\-0-9A-Za-z_]"),
        (r"[]-\d]", r"[]\-0-9]"),
        (r"[!--\d]", r"[!-\-0-9]"),
        (r"[\d--a]", r"[0-9\-\-a]"),
        (r"[-\d-]", "[-0-9-]"),
        (r"[\x2b-\x2d\d]", r"[\x2b-\x2d0-9]"),
        (r"\n\x41\p{L}\.", r"\n\x41\p{L}\."),
        (r"[[:alpha:]_]", r"[[:alpha:]_]"),
        ("", ""),
    ],
)
def test_classes_are_spelled_out(regex: str, spelled: str) -> None:
    assert ascii_classes(regex) == spelled


def test_what_is_spelled_out_means_the_same_to_python() -> None:
    texts = [chr(code) for code in range(128)]
    for regex in (r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"[\d\s]", r"[^\w]", r"[-\d-]"):
        for text in texts:
            if text in "\x1c\x1d\x1e\x1f":  # spaces to Python alone
                continue
            expected = re.fullmatch(regex, text, re.ASCII) is not None
            assert (re.fullmatch(ascii_classes(regex), text) is not None) == expected, (regex, text)


def test_a_backslash_at_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="ends in a backslash"):
        ascii_classes("a\\")


@pytest.mark.parametrize(
    ("regex", "accepted", "refused"),
    [
        (r"[\w-~]+", ["a-b", "~"], ["a{b", "a b"]),
        (r"[\w-\.]+@", ["a.b-c@"], ["a+b@", "a/@"]),
        (r"[+-\d]", ["+", "-", "1"], [",", "."]),
        (r"[\s-\d]", [" ", "-", "1"], ["!", "a"]),
        (r"[^\W\d_]+", ["ab"], ["\u00e9", "1", "_", "-"]),
        (r"[^\S\n]+", [" \t"], ["\n", "\u00a0", "a"]),
        (r"[\D]", ["a", "\u0663"], ["3"]),
        (r"[\w\W]", ["a", "-", "\u00e9"], [""]),
        (r"[!--\d]+", ["!*-1"], [".", "/"]),
        (r"[\w&&[^\d]]+", ["ab_"], ["1"]),
    ],
)
def test_a_class_in_brackets_means_what_it_means_alone(
    regex: str, accepted: list[str], refused: list[str]
) -> None:
    form = StructuredOutputsParams(regex=regex)
    assert [text for text in (*accepted, *refused) if follows(form, text)] == accepted


def test_classes_in_a_pattern_of_whitespace_are_those_of_ascii() -> None:
    form = StructuredOutputsParams(json_object=True, whitespace_pattern=r"\s")
    texts = ["{ }", "{\t}", "{\u00a0}"]
    assert [text for text in texts if follows(form, text)] == texts[:2]
