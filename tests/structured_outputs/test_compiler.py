"""What a grammar lets come next, held against trying every token there is."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.structured_outputs.vocabularies import EOS, bits, small_tokenizer, tokens, vocabulary
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.ipc.grammar import MaskQuestion, Vocabulary
from triolet.structured_outputs.compiler import Grammar, GrammarVocabulary, InvalidGrammar

MERGES = [("a", "b"), ("ab", "c"), ("c", "a"), ('"', ":"), ("1", "2"), ("t", "r"), ("tr", "u"), ("tru", "e")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return small_tokenizer(MERGES)


@pytest.fixture(scope="module")
def known(tokenizer: Tokenizer) -> GrammarVocabulary:
    return tokens(tokenizer)


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id])


# Each with a function that says whether a text is a beginning of a text that follows it, and whether it is whole.
WORDS = ["abc", "abab", "ca", "cabc", "b"]


def begins_a_word(text: str) -> bool:
    return any(word.startswith(text) for word in WORDS)


def begins_ab_repeated(text: str) -> bool:
    return re.fullmatch(r"(ab|c)*a?", text) is not None


def begins_balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += {"a": 1, "b": -1}.get(char, 99)
        if depth < 0 or depth > 50:
            return False
    return True


def is_balanced(text: str) -> bool:
    return begins_balanced(text) and text.count("a") == text.count("b")


@pytest.mark.parametrize(
    ("params", "begins", "is_whole"),
    [
        (StructuredOutputsParams(choice=WORDS), begins_a_word, lambda text: text in WORDS),
        (
            StructuredOutputsParams(regex="(ab|c)*"),
            begins_ab_repeated,
            lambda text: re.fullmatch("(ab|c)*", text) is not None,
        ),
        (
            StructuredOutputsParams(grammar='start: item*\nitem: "a" start "b"'),
            begins_balanced,
            is_balanced,
        ),
    ],
)
def test_masks_are_those_of_trying_every_token(
    tokenizer: Tokenizer,
    known: GrammarVocabulary,
    params: StructuredOutputsParams,
    begins: Any,
    is_whole: Any,
) -> None:
    grammar, rng, eos = Grammar(known, params), Random(1), tokenizer.token_to_id(EOS)
    others = [token_id for token_id in range(known.vocab_size) if token_id != eos]
    for serial in range(30):
        answer: list[int] = []
        for _ in range(12):
            text = tokenizer.decode(answer)
            guided = grammar.next_mask(MaskQuestion(serial, 0, tuple(answer)))
            expected = {i for i in others if begins(text + text_of(tokenizer, i))}
            assert guided.problem == ""
            assert guided.is_over == (is_whole(text) and not expected)
            if guided.is_over:
                break
            assert bits(guided.mask) == expected | ({eos} if is_whole(text) else set()), text
            if not expected:
                break
            answer.append(rng.choice(sorted(expected)))


def test_an_answer_is_followed_piece_by_piece_as_it_is_in_one(
    tokenizer: Tokenizer, known: GrammarVocabulary
) -> None:
    grammar = Grammar(known, StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}}))
    token_ids = tuple(tokenizer.encode("[12, 3, 4").ids)
    for place, token_id in enumerate(token_ids):
        piecewise = grammar.next_mask(MaskQuestion(1, place, (token_id,)))
        whole = grammar.next_mask(MaskQuestion(2, 0, token_ids[: place + 1]))
        assert (piecewise.mask, piecewise.position) == (whole.mask, whole.position)


def test_two_answers_do_not_know_each_other(tokenizer: Tokenizer, known: GrammarVocabulary) -> None:
    grammar = Grammar(known, StructuredOutputsParams(choice=["abc", "cab"]))
    first = grammar.next_mask(MaskQuestion(1, 0, tuple(tokenizer.encode("a").ids)))
    second = grammar.next_mask(MaskQuestion(2, 0, tuple(tokenizer.encode("ca").ids)))
    assert {text_of(tokenizer, i) for i in bits(first.mask)} == {"b"}
    assert {text_of(tokenizer, i) for i in bits(second.mask)} == {"b"}
    grammar.forget([1])
    assert grammar.next_mask(MaskQuestion(1, 1, ())).problem == "its beginning is not known here"
    assert grammar.next_mask(MaskQuestion(2, second.position, tuple(tokenizer.encode("b").ids))).is_over


def test_a_token_that_may_not_come_is_a_problem_of_its_answer_alone(
    tokenizer: Tokenizer, known: GrammarVocabulary
) -> None:
    grammar = Grammar(known, StructuredOutputsParams(regex="ab*"))
    assert "doesn't satisfy the grammar" in grammar.next_mask(MaskQuestion(1, 0, (5,))).problem
    assert grammar.next_mask(MaskQuestion(2, 0, tuple(tokenizer.encode("ab").ids))).problem == ""


def test_the_end_of_sequence_ends_an_answer_where_the_grammar_can_end(
    tokenizer: Tokenizer, known: GrammarVocabulary
) -> None:
    grammar, eos = Grammar(known, StructuredOutputsParams(regex="ab*")), tokenizer.token_to_id(EOS)
    [a] = tokenizer.encode("a").ids
    assert eos not in bits(grammar.next_mask(MaskQuestion(1, 0, ())).mask)
    assert eos in bits(grammar.next_mask(MaskQuestion(1, 0, (a,))).mask)
    assert grammar.next_mask(MaskQuestion(1, 1, (eos,))).is_over


def test_a_model_without_an_end_of_sequence_goes_on_as_long_as_it_can(tokenizer: Tokenizer) -> None:
    endless = tokens(tokenizer, has_eos=False)
    [a, b] = (tokenizer.encode(char).ids[0] for char in "ab")
    grammar = Grammar(endless, StructuredOutputsParams(regex="ab*"))
    guided = grammar.next_mask(MaskQuestion(1, 0, (a,)))
    assert b in bits(guided.mask)
    assert tokenizer.token_to_id(EOS) not in bits(guided.mask)
    assert Grammar(endless, StructuredOutputsParams(regex="a")).next_mask(MaskQuestion(1, 0, (a,))).is_over


@pytest.mark.parametrize("vocab_size", [260, 300])
def test_masks_are_as_long_as_the_models_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    padded = GrammarVocabulary(vocabulary(tokenizer, vocab_size=vocab_size))
    mask = Grammar(padded, StructuredOutputsParams(regex=".*")).next_mask(MaskQuestion(1, 0, ())).mask
    assert len(mask) == (vocab_size + 7) // 8
    assert max(bits(mask)) < tokenizer.get_vocab_size()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "(a"}, "unclosed group|regex parse error"),
        ({"regex": "(?=a)b"}, "regex parse error"),
        ({"regex": r"[^\s\S]"}, "no text follows it"),
        ({"grammar": 'start: "a" nosuch'}, "unknown name"),
        ({"grammar": "start: start"}, "no text follows it"),
        ({"grammar": "?!"}, r"1\(3\): lexer error"),
        ({"json": {"type": "nosuch"}}, "Invalid type: nosuch"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        (
            {"json": {"type": "string", "pattern": "(?=a)"}},
            r"^pattern must not look around .*got '\(\?=a\)'$",
        ),
        ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group|regex parse error"),
        ({"json": {"type": "string", "format": 5}}, "format must be a string|Expected string"),
        ({"json": {"$ref": "https://host/schema"}}, "not present|retriev"),
        ({"json": {"not": {"type": "string"}}}, "Unimplemented keys"),
        (
            {"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "^oneOf must have schemas that exclude each other; anyOf takes others$",
        ),
        (
            {"json_object": True, "whitespace_pattern": "("},
            "^whitespace_pattern must be a regular expression: ",
        ),
        (
            {"json_object": True, "whitespace_pattern": "\\"},
            "^whitespace_pattern must be a regular expression: ",
        ),
        ({"grammar": "?start: 5"}, r"1\(9\): Expected value"),
        ({"grammar": 'start ::= "x"'}, "No 'root' rule found"),
        ({"grammar": 'root ::= "\\ud83d"'}, r"grammar must escape characters of Unicode, got \\ud83d"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_reason(
    known: GrammarVocabulary, fields: Any, message: str
) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        Grammar(known, StructuredOutputsParams(**fields))


def test_a_vocabulary_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="structured outputs do not work with this tokenizer"):
        GrammarVocabulary(Vocabulary(b"{}", 10, ()))


# ------------------------------------------------------------------------------------------ the options of JSON


def walk(tokenizer: Tokenizer, grammar: Grammar, rng: Random, num_tokens: int = 400) -> str:
    """An answer of random tokens, as a model with random weights gives it."""
    answer: list[int] = []
    eos = tokenizer.token_to_id(EOS)
    while len(answer) < num_tokens:
        guided = grammar.next_mask(MaskQuestion(0, 0, tuple(answer)))
        assert guided.problem == ""
        if guided.is_over:
            break
        answer.append(rng.choice(sorted(bits(guided.mask))))
        if answer[-1] == eos:
            break
    return tokenizer.decode(answer)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}


@pytest.mark.parametrize("seed", range(20))
def test_random_tokens_become_json_that_follows_the_schema(
    tokenizer: Tokenizer, known: GrammarVocabulary, seed: int
) -> None:
    params = StructuredOutputsParams(json=SCHEMA, disable_additional_properties=True)
    value = json.loads(walk(tokenizer, Grammar(known, params), Random(seed)))
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 5
    assert 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("seed", range(5))
def test_whitespace_is_left_out_or_follows_the_pattern(
    tokenizer: Tokenizer, known: GrammarVocabulary, seed: int
) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    bare = Grammar(known, StructuredOutputsParams(json=schema, disable_any_whitespace=True))
    assert not set(walk(tokenizer, bare, Random(seed))) & set(" \t\r\n")
    tabbed = Grammar(known, StructuredOutputsParams(json=schema, whitespace_pattern=r"\t"))
    text = walk(tokenizer, tabbed, Random(seed))
    assert len(json.loads(text)) == 3
    assert not set(text) & set(" \r\n")


ADD = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}},
    "required": ["x"],
    "additionalProperties": False,
}
STRUCTURES = [
    {"begin": "<call>add ", "schema": ADD, "end": "</call>"},
    {"begin": "<call>now", "schema": {"const": 0}, "end": "!"},
    {"begin": "#", "schema": {"type": "boolean"}, "end": ""},
]
TAG = {"structures": STRUCTURES, "triggers": ["<call>", "#"]}


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_text_is_free_and_a_trigger_is_followed_by_one_of_its_structures(kind: str) -> None:
    tokenizer = small_tokenizer(MERGES)
    if kind != "text":
        tokenizer.add_tokens([AddedToken("<call>", special=kind == "special")])
    grammar = Grammar(
        tokens(tokenizer), StructuredOutputsParams(structural_tag=TAG, disable_any_whitespace=True)
    )

    def after(text: str) -> tuple[set[str], bool]:
        """What may follow a text, as far as that is little, and whether it may end there."""
        guided = grammar.next_mask(MaskQuestion(0, 0, tuple(tokenizer.encode(text).ids)))
        assert guided.problem == "", text
        allowed = bits(guided.mask)
        ends = tokenizer.token_to_id(EOS) in allowed
        allowed.discard(tokenizer.token_to_id(EOS))
        return (set() if len(allowed) > 50 else {text_of(tokenizer, i) for i in allowed}), ends

    assert after("any text, é {") == (set(), True)
    assert after("then <call>") == ({"a", "n"}, False)
    assert after('then <call>add {"x":') == ({"1", "2"}, False)
    assert after('then <call>add {"x":2}</call') == ({">"}, False)
    assert after('then <call>add {"x":2}</call> and on') == (set(), True)
    assert after("<call>now0") == ({"!"}, False)
    assert after("<call>now0!#tru") == ({"e"}, False)


@pytest.mark.parametrize("kind", ["text", "added", "special"])
def test_a_trigger_binds_whether_it_is_one_token_is_spelled_or_begins_a_longer_token(kind: str) -> None:
    tokenizer = small_tokenizer(MERGES)
    marks = ["<call>", "</call>", "<|tool|>"]
    if kind != "text":
        tokenizer.add_tokens([AddedToken(mark, special=kind == "special") for mark in marks])
    longer = {"begin": "<|tool|>", "schema": ADD, "end": "</call>"}
    tag = {"structures": [*STRUCTURES, longer], "triggers": ["<call>", "#", "<|to"]}
    grammar = Grammar(
        tokens(tokenizer), StructuredOutputsParams(structural_tag=tag, disable_any_whitespace=True)
    )
    for written in (tokenizer, small_tokenizer(MERGES)):  # of one token, or spelled

        def stopped(text: str, written: Tokenizer = written) -> bool:
            """Whether its last token may not come."""
            *before, last = written.encode(text).ids
            guided = grammar.next_mask(MaskQuestion(0, 0, tuple(before)))
            assert guided.problem == "", text
            return last not in bits(guided.mask)

        assert stopped("ab <call>b")
        assert stopped("ab <|tool|>b")
        assert stopped('<|tool|>{"x":3')
        assert stopped('<call>add {"x":1}b')
        assert not stopped('ab <|tool|>{"x":2}</call> ab<call>add {"x":1}</call>b')


@pytest.mark.parametrize("kind", ["added", "special"])
@pytest.mark.parametrize(
    "form",
    [
        {"choice": ["<tool>"]},
        {"choice": ["a<tool>b"]},
        {"regex": "<tool>c*"},
        {"json": {"enum": ["<tool>"]}},
        {"json": {"type": "object", "properties": {"<tool>": {}}, "required": ["<tool>"]}},
        {"grammar": 'start: "a" "<tool>"'},
    ],
)
def test_a_text_that_a_special_token_is_called_by_is_spelled(kind: str, form: dict[str, Any]) -> None:
    tokenizer = small_tokenizer(MERGES)
    tokenizer.add_tokens(["b b", AddedToken("<tool>", special=kind == "special"), "c c"])
    grammar = Grammar(tokens(tokenizer), StructuredOutputsParams(**form))
    text, answer = "", list[int]()
    while "<tool>" not in text:
        guided = grammar.next_mask(MaskQuestion(0, 0, tuple(answer)))
        assert guided.problem == "", text
        answer.append(min(bits(guided.mask) - {tokenizer.token_to_id(EOS)}))
        text = tokenizer.decode(answer, skip_special_tokens=False)
    assert tokenizer.token_to_id("<tool>") not in answer


def test_a_grammar_may_name_a_special_token_outside_of_texts() -> None:
    tokenizer = small_tokenizer(MERGES)
    tokenizer.add_special_tokens([AddedToken("<tool>", special=True)])
    grammar = Grammar(tokens(tokenizer), StructuredOutputsParams(grammar='start: "a" <tool> "b"'))
    guided = grammar.next_mask(MaskQuestion(0, 0, tuple(tokenizer.encode("a").ids)))
    assert bits(guided.mask) == {tokenizer.token_to_id("<tool>")}
