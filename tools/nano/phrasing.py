"""Variants of a request: politeness, letter case, punctuation and typing mistakes."""

from collections.abc import Mapping, Sequence
from random import Random

BEFORE = ["please ", "can you ", "could you ", "could you please ", "can you please ", "hey, ", "hi, ", "ok, ", "now ",
          "i want you to ", "would you ", "i would like you to ", "please, ", "well, ", "so, ", "hello, ", "will you "]  # fmt: skip
AFTER = [" please", ", please", " for me", " now", " thanks", ", thank you", " for me please", ", ok"]


def slip(rng: Random, word: str) -> str:
    """Make one typing mistake in `word`: drop, double or swap a letter."""
    if len(word) < 4 or not word.isalpha():
        return word
    at = rng.randrange(1, len(word) - 1)
    return rng.choice([
        word[:at] + word[at + 1 :],
        word[:at] + word[at] + word[at:],
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
    ])  # fmt: skip


def _with_slip(rng: Random, template: str) -> str:
    words = template.split(" ")
    at = rng.randrange(len(words))
    words[at] = slip(rng, words[at])
    return " ".join(words)


def _cased(rng: Random, text: str) -> str:
    roll = rng.random()
    if roll < 0.45 or not text:
        return text
    if roll < 0.96 or "{" in text:
        return text[0].upper() + text[1:]
    return text.upper()


def phrase(
    rng: Random, templates: Sequence[str], slots: Mapping[str, object] | None = None, *, command: bool = False
) -> str:
    """Phrase a request in one of many ways.

    Args:
        templates: lower-case requests without final punctuation, with `{slot}` fields; one is chosen.
        slots: values of the fields, kept as they are while the words around them vary.
        command: the templates are imperatives, so "can you ..." and "... please" fit around them.
    """
    text = rng.choice(templates)
    if command and rng.random() < 0.3:
        text = rng.choice(BEFORE) + text
    if command and rng.random() < 0.25:
        text += rng.choice(AFTER)
    if rng.random() < 0.06:
        text = _with_slip(rng, text)
    text = _cased(rng, text)
    if rng.random() < 0.5:
        asks = not command or text.lower().startswith(("can ", "could ", "would ", "will "))
        text += rng.choice("??!" if asks else "..!")
    return text.format(**slots or {})


def a(noun: str) -> str:
    """Return `noun` with its indefinite article."""
    return f"{'an' if noun[0].lower() in 'aeio' or noun == 'umbrella' else 'a'} {noun}"


def listed(items: Sequence[str]) -> str:
    """Join `items` as an English list: "red, green and blue"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def capital(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]
