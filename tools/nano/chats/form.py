"""Chats in which the assistant answers with JSON that follows a form: extracting, making up, classifying, answering.

An engine that binds an answer to a schema forces the keys, so in more than half of the chats no form is shown: there
the values have to suit any key, and a string, a list and an object have to end soon.
"""

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

from chats.form_cases import Case, anything, extraction, facts_told, invention
from chats.form_classes import classification
from chats.form_keys import Node, renamed, respelled, speller
from chats.form_questions import question
from chats.form_schemas import shown_form
from exchange import Chat, Skill
from phrasing import capital
from skills import fact as facts
from skills import number, talk, text
from tokens import Message

# fmt: off
_JSON_SYSTEM = ["Answer in JSON.", "You answer in JSON.", "Always respond with JSON.", "You are a helpful assistant that answers in JSON.", "Respond only with valid JSON.", "You output JSON.", "Reply with JSON only, without explanation.", "You extract data from text and return JSON.", "You are a JSON API.",
                "You are a helpful assistant designed to output JSON."]
_EXTRACT_SYSTEM = ["Extract the {n}.", "Extract the {n} information.", "You extract structured data.", "You are an expert at structured data extraction.", "Extract the {n} from the user's text.", "You parse text."]
_PLAIN_SYSTEM = ["You are a helpful assistant.", "You are a helpful AI assistant.", "You are an assistant.", "Help the user.", "You are triolet-nano.", "You are a world class AI."]
_JOINED = ["{bare}: {said}", "{bare}: {said}", "{bare}:\n{said}", "{bare}:\n\n{said}", "{said}\n\n{ask}", '{bare}: "{said}"', "{said} {Ask}", "{ask}\n{said}", "{bare}.\n\nText: {said}"]
_AND = ["And", "Now", "Next", "And this", "Now this one", "The next one", "Same for this"]
_ORDINARY: dict[Skill, float] = {talk.small_talk: 4, talk.identity: 2, number.add_up: 4, number.count: 3, facts.opposite: 2, facts.thing_fact: 2, text.spell: 2, facts.fact: 2, text.repeat: 3, facts.calendar: 1}
# fmt: on


def _with_text(rng: Random, ask: str, said: str) -> str:
    """Put the text behind or before what is asked."""
    if not said or not ask:
        return said or ask
    return rng.choice(_JOINED).format(bare=ask.rstrip(".!?"), ask=ask, Ask=capital(ask), said=said)


def _dumped(value: Any, compact: bool) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":") if compact else None)


def _opening(content: str) -> str:
    """Return the marks with which JSON opens: a form forces them where no message has asked for JSON in words."""
    opened = re.match(r'[\[{"]+', content)
    return opened[0] if opened and opened[0] != content else ""


def _chat(rng: Random, case: Case) -> list[Message]:
    """Write a chat of a case: with or without its form, and sometimes with a second ask."""
    spell = speller(rng)
    form = Node(renamed(case.form.schema, spell), lambda rng: respelled(case.form.make(rng), spell))
    compact = rng.random() < 0.12
    shown = shown_form(rng, case.title, form) if rng.random() < 0.45 else ""
    system, asked = "", case.in_json
    ask = case.ask
    if shown and rng.random() < 0.4:
        system = shown
        if rng.random() < 0.3:
            first = rng.choice(_PLAIN_SYSTEM + _JSON_SYSTEM)
            system = first + rng.choice([" ", "\n", "\n\n"]) + shown
        if case.text and rng.random() < 0.3:
            ask = ""
            first = rng.choice(_EXTRACT_SYSTEM).format(n=case.title)
            system = first + rng.choice([" ", "\n"]) + system
    elif not shown and rng.random() < 0.25:
        in_json = rng.random() < 0.6
        asked = asked or in_json
        system = rng.choice(_JSON_SYSTEM if in_json else _PLAIN_SYSTEM)
        if case.text and rng.random() < 0.3:
            ask, system = "", f"{rng.choice(_EXTRACT_SYSTEM).format(n=case.title)} {system}"
    if case.text and not shown and rng.random() < 0.1:
        ask, asked = "", bool(system and asked and not case.in_json)
    user = _with_text(rng, ask, case.text)
    if shown and not system:
        joint = rng.choice(["\n\n", "\n", " ", "\n\n"])
        user = f"{user}{joint}{shown}" if rng.random() < 0.8 else f"{shown}\n\n{user}"
    messages = [Message(role="system", content=system)] if system else []

    def turn(said: str, value: Any, forced: bool) -> None:
        content = _dumped(respelled(value, spell), compact)
        messages.append(Message(role="user", content=said))
        messages.append(Message(role="assistant", content=content, given=_opening(content) if forced else ""))

    turn(user, case.value, not (asked or shown))
    roll = rng.random()
    if roll < 0.14 and case.again:
        for _ in range(rng.choice([1, 1, 2])):
            following = case.again(rng)
            said = _with_text(rng, "", following.text) or following.ask
            if following.text and rng.random() < 0.5:
                said = f"{rng.choice(_AND)}: {following.text}"
            turn(said, following.value, False)
    elif roll < 0.26 and not (system and (shown or system in _JSON_SYSTEM)) and "JSON" not in system:
        exchange = rng.choices(list(_ORDINARY), list(_ORDINARY.values()))[0](rng, Chat())
        messages.append(Message(role="user", content=exchange.ask))
        messages.append(Message(role="assistant", content=exchange.answer))
    return messages


def extract(rng: Random) -> list[Message]:
    """Write a chat that extracts what a sentence of a domain says."""
    return _chat(rng, extraction(rng))


def extract_facts(rng: Random) -> list[Message]:
    """Write a chat that extracts values of any keys."""
    return _chat(rng, facts_told(rng))


def invent(rng: Random) -> list[Message]:
    """Write a chat that makes up an object."""
    return _chat(rng, invention(rng))


def fill_in(rng: Random) -> list[Message]:
    """Write a chat that fills in a form of any keys."""
    return _chat(rng, anything(rng))


def classify(rng: Random) -> list[Message]:
    """Write a chat that classifies a text."""
    return _chat(rng, classification(rng))


def answer(rng: Random) -> list[Message]:
    """Write a chat that answers an ordinary question in JSON."""
    return _chat(rng, question(rng))


CHATS: dict[Callable[[Random], list[Message]], float] = {
    extract: 30, extract_facts: 13, invent: 16, fill_in: 7, classify: 10, answer: 11,
}  # fmt: skip
