"""Questions to grammars and their answers: which requests need a mask, since when, and which answers still count."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

from tests.core.make import make_request, next_token
from triolet.core.engine_core import GrammarMasks
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.grammar_state import Constraint, ThinkingRules, TokenMask
from triolet.core.request.model_info import LoadedModel, ModelInfo
from triolet.core.request.structured_outputs import StructuredOutputsParams

GRAMMAR = StructuredOutputsParams(regex="a+")
OPENING, CLOSING = 5, 6
MAY_THINK = ThinkingRules(opening_token_ids=(OPENING,), closing_token_ids=(CLOSING,), is_open=False)
THINKS = ThinkingRules(opening_token_ids=(OPENING,), closing_token_ids=(CLOSING,), is_open=True, budget=2)


class Desk:
    """Masks of one journal, whose model has eight tokens."""

    def __init__(self) -> None:
        self.journal, model = Journal(), LoadedModel()
        model.info = cast(ModelInfo, SimpleNamespace(vocab_size=8))
        self.masks = GrammarMasks(self.journal, model)

    def open(
        self, grammar: StructuredOutputsParams | None = GRAMMAR, rules: ThinkingRules | None = None
    ) -> JournalEntry:
        return self.journal.open(make_request(constraint=Constraint(grammar=grammar, thinking=rules)))

    def has_questions(self) -> bool:
        return self.masks.has_questions

    def has_answers(self) -> bool:
        return self.masks.has_answers

    def say(self, entry: JournalEntry, *token_ids: int) -> None:
        for token_id in token_ids:
            self.journal.commit(entry, next_token(entry, token_id), 0.0)


def test_questions_are_taken_once_and_asked_again_where_they_were_lost() -> None:
    desk = Desk()
    first, second, free = desk.open(), desk.open(), desk.journal.open(make_request())
    assert not desk.has_questions()
    desk.masks.ask([], 0.0)
    assert not desk.has_questions()
    desk.masks.ask([first.serial], 0.0)
    assert desk.has_questions()
    assert [desk.masks.take_questions(), desk.masks.take_questions()] == [(first.serial,), ()]
    desk.masks.ask_again()
    assert desk.masks.take_questions() == (first.serial, second.serial)
    desk.masks.put_back([second.serial, free.serial, 99])
    assert desk.masks.take_questions() == (second.serial,)


def test_answers_are_taken_once_and_end_the_wait_for_them() -> None:
    desk = Desk()
    first, second = desk.open(), desk.open()
    desk.masks.ask([first.serial, second.serial], 1.0)
    desk.masks.ask([first.serial], 2.0)  # it has another token: the wait begins anew, behind the others
    assert desk.masks.unanswered() == ((second.serial, 1.0), (first.serial, 2.0))
    desk.masks.answer(second.serial, TokenMask(0))
    assert desk.masks.unanswered() == ((first.serial, 2.0),)
    assert desk.has_answers()
    assert [desk.masks.take_answers(), desk.masks.take_answers()] == [{second.serial: TokenMask(0)}, {}]
    assert not desk.has_answers()
    desk.journal.close(first)
    assert desk.masks.unanswered() == ()


def test_a_step_waits_two_milliseconds_for_masks_of_live_requests() -> None:
    desk = Desk()
    first, second = desk.open(), desk.open()
    assert (desk.masks.step_waits(0.0), desk.masks.waits_until_s) == (False, math.inf)
    desk.masks.ask([first.serial, second.serial], 1.0)
    assert (desk.masks.step_waits(1.001), desk.masks.waits_until_s) == (True, 1.002)
    desk.masks.answer(first.serial, TokenMask(0))
    assert desk.masks.step_waits(1.001)
    desk.journal.close(second)
    assert not desk.masks.step_waits(1.001)
    desk.masks.ask([first.serial], 2.0)
    assert (desk.masks.step_waits(2.002), desk.masks.waits_until_s) == (False, math.inf)


def test_grammars_are_needed_for_requests_that_are_bound_to_one() -> None:
    desk = Desk()
    bound, thinking, free = desk.open(), desk.open(None, THINKS), desk.journal.open(make_request())
    assert desk.masks.needs_grammars([free.serial, bound.serial])
    assert not desk.masks.needs_grammars([free.serial, thinking.serial, 99])


def test_a_grammar_reads_the_answer_from_where_the_reasoning_ended() -> None:
    desk = Desk()
    plain, other, thinking = desk.open(), desk.open(), desk.open(rules=THINKS)
    desk.say(plain, 1, 2)
    desk.say(thinking, 3, CLOSING, 1)
    serials = [plain.serial, other.serial, thinking.serial, 99]
    assert desk.masks.sort(serials) == {
        GRAMMAR: {plain.serial: (1, 2), other.serial: (), thinking.serial: (1,)}
    }
    assert not desk.has_answers()
    assert desk.masks.is_current(thinking.serial, 1)
    assert not desk.masks.is_current(thinking.serial, 3)
    assert not desk.masks.is_current(99, 0)
    assert desk.masks.set_mask(thinking.serial, TokenMask(1, b"\x02", is_over=True, problem="p"))
    assert desk.masks.take_answers() == {thinking.serial: TokenMask(3, b"\x02", is_over=True, problem="p")}
    assert not desk.masks.set_mask(plain.serial, TokenMask(1, b"\x02"))  # it has grown since
    assert not desk.has_answers()


def test_amid_reasoning_any_token_may_come_until_its_budget_is_spent() -> None:
    desk = Desk()
    entry = desk.open(rules=THINKS)
    desk.say(entry, 3)
    assert desk.masks.sort([entry.serial]) == {}
    assert desk.masks.take_answers() == {entry.serial: TokenMask(1, None)}
    desk.say(entry, 3)
    assert desk.masks.sort([entry.serial]) == {}
    assert desk.masks.take_answers() == {entry.serial: TokenMask(2, bytes([1 << CLOSING]))}
    entry.guidance = TokenMask(2)
    assert (desk.masks.sort([entry.serial]), desk.has_answers()) == ({}, False)  # it awaits none


def test_an_answer_with_a_form_does_not_end_amid_its_reasoning() -> None:
    desk = Desk()
    constraint = Constraint(grammar=GRAMMAR, thinking=THINKS)
    bound = desk.journal.open(make_request(constraint=constraint, eos_token_ids=(2, 7)))
    free = desk.journal.open(make_request(constraint=Constraint(thinking=THINKS), eos_token_ids=(2, 7)))
    assert desk.masks.sort([bound.serial, free.serial]) == {}
    all_but_two_and_seven = bytes([0b0111_1011])
    assert desk.masks.take_answers() == {
        bound.serial: TokenMask(0, all_but_two_and_seven),
        free.serial: TokenMask(0, None),
    }


def test_an_answer_with_a_form_may_begin_with_reasoning() -> None:
    desk = Desk()
    entry, plain = desk.open(rules=MAY_THINK), desk.open()
    assert desk.masks.sort([entry.serial, plain.serial]) == {GRAMMAR: {entry.serial: (), plain.serial: ()}}
    for one in (entry, plain):
        assert desk.masks.set_mask(one.serial, TokenMask(0, b"\x02"))
    answers = desk.masks.take_answers()
    assert answers == {
        entry.serial: TokenMask(0, bytes([2 | 1 << OPENING])),
        plain.serial: TokenMask(0, b"\x02"),
    }
    assert desk.masks.set_mask(entry.serial, TokenMask(0, None))
    assert desk.masks.take_answers() == {entry.serial: TokenMask(0, None)}


def test_answers_may_be_taken_for_some_requests_and_the_others_stay() -> None:
    desk = Desk()
    first, second = desk.open(), desk.open()
    for entry in (first, second):
        desk.masks.answer(entry.serial, TokenMask(0))
    assert desk.masks.take_answers({second.serial, 99}) == {second.serial: TokenMask(0)}
    assert desk.masks.take_answers({second.serial}) == {}
    assert desk.masks.take_answers() == {first.serial: TokenMask(0)}


def test_what_is_known_of_a_request_that_has_ended_is_dropped() -> None:
    desk = Desk()
    first, second, third = desk.open(), desk.open(), desk.open()
    desk.masks.ask([first.serial, second.serial], 1.0)
    for entry in (first, second):
        desk.masks.answer(entry.serial, TokenMask(0))
    desk.masks.ask([first.serial, second.serial], 2.0)
    desk.journal.close(first)
    desk.masks.sort([third.serial])
    assert desk.masks._asked_s == {second.serial: 2.0}
    assert desk.masks.take_answers({third.serial}) == {}
    assert desk.masks.take_answers() == {second.serial: TokenMask(0)}


def test_reasoning_alone_binds_no_answer_after_its_end() -> None:
    desk = Desk()
    entry = desk.open(None, THINKS)
    desk.say(entry, 3, CLOSING, 1)
    assert desk.masks.sort([entry.serial]) == {}
    assert desk.masks.take_answers() == {entry.serial: TokenMask(3, None)}


def test_an_answer_to_a_question_of_an_earlier_life_counts_from_the_first_token() -> None:
    desk = Desk()
    entry = desk.open()
    desk.say(entry, 1)
    assert (desk.masks.is_current(entry.serial, 0), desk.masks.is_current(entry.serial, 1)) == (False, True)
    assert desk.masks.set_mask(entry.serial, TokenMask(1, b"\x02"))
    assert desk.masks.take_answers() == {entry.serial: TokenMask(1, b"\x02")}


def test_reasoning_is_remembered_while_its_request_is_live() -> None:
    desk = Desk()
    first, second = desk.open(rules=THINKS), desk.open(rules=THINKS)
    desk.masks.sort([first.serial, second.serial])
    remembered = desk.masks._thinking[second.serial]
    desk.journal.close(first)
    desk.masks.sort([second.serial])
    assert desk.masks._thinking == {second.serial: remembered}
