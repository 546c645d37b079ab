"""Grammars in Lark's notation and in GBNF: which is which, and what GBNF may write."""

from __future__ import annotations

import pytest

from tests.structured_outputs.vocabularies import follows
from triolet.core.request.structured_outputs import StructuredOutputsParams


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a" rest\nrest: "b"',
        '?start: "a" rest\n?rest: "b"',
        '%llguidance {}\nstart: "ab"',
        '// start ::= "x"\nstart: "ab" | "a ::= b"',
        'root ::= "a" rest\nrest ::= "b"',
        'root ::= "a" start\nstart ::= "b"',
        'start   ::= "b"\n  root ::= "a" start # start: "c"',
        'root ::= start-0 start\nstart-0 ::= "a"\nstart ::= start_1\nstart_1 ::= "b"',
        '\n# x\nroot ::= (\n  "a"\n) [b]',
        'root ::= a-b a_b\na-b ::= "a"\na_b ::= "b"',
        'root ::= A a\nA ::= "a"\na ::= "b"',
        'root ::= x X_1 x_1 x-1\nx ::= "a"\nX_1 ::= "b"\nx_1 ::= ""\nx-1 ::= ""',
        'root ::=\n    "a" # c "d"\n\n  # | "e"\n    "b"\n',
        'root ::= "x"\n  "y"\n  # or\n  | rest\n\trest ::= "ab"',
        'root ::= [a]{1}\n  "b"{1,1}\n',
        'root ::= (\r\n  [a]{\r\n1 ,\r\n 1 }\r\n) # c\r\n\r\n  X # d "e"\r\nX ::=\r\n "b"\r\n',
        '# c "d"\rroot ::= "a" # e [\r\r  rest-of_X\rrest-of_X ::= "b" # f',
        'root ::= x |\n  # or\n\n  "a" "b"\nx ::= "y"',
    ],
)
def test_a_grammar_with_a_rule_of_gbnf_is_gbnf_and_any_other_is_lark(grammar: str) -> None:
    form = StructuredOutputsParams(grammar=grammar)
    assert [text for text in ("ab", "a", "b", "abb") if follows(form, text)] == ["ab"]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (r'root ::= "\u00e9"', "é"),
        (r'root ::= "\u0041\u00e9\x41"', "AéA"),
        (r'root ::= "\U0001f600"', "\U0001f600"),
        (r"root ::= [\u00e8-\u00ea]", "é"),
        (r'root ::= "\\u00e9"', r"\u00e9"),
        (r'root ::= "\u0022" "\u005c" [\u005d\u002d\u005e]', '"\\-'),
        (r'root ::= "start" "\u002e"', "start."),
        ('root ::= "a\nb"', "a\nb"),
        ('root ::= [\n] "a\r\n"', "\na\r\n"),
        ('root ::= [^\n]{2} "\\\\" [\n]', "ab\\\n"),
    ],
)
def test_gbnf_may_write_a_character_by_its_number(grammar: str, text: str) -> None:
    assert follows(StructuredOutputsParams(grammar=grammar), text)
