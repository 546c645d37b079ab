"""What the actors say to each other: frozen facts in the past tense, frozen wishes in the imperative.

Requests are named by their journal serial, which is never reused; ids that callers chose stay at the engine's
edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.core.plan import StepResult


@attrs.frozen
class Submit:
    """Schedule the journal's request `serial`; if it is no longer live, its reader has left already."""

    serial: int


@attrs.frozen
class Wake:
    """Something changed without a message of its own (a request was aborted): look again."""


@attrs.frozen
class StepDone:
    """The runner has finished a step."""

    result: StepResult


@attrs.frozen
class StopFound:
    """The text of a request completed a stop string: nothing more of it is wanted."""

    serial: int


SchedulerMessage = Submit | Wake | StepDone | StopFound


@attrs.frozen
class Progressed:
    """These requests have new tokens in the journal, or have ended; one message per step."""

    serials: tuple[int, ...]


@attrs.frozen
class Tokenized:
    """The tokenizer's answer.

    Args:
        text: what was encoded, after the chat template; None where ids came.
        token_ids: the prompt.
        bad_words_token_ids: each bad word, with and without a leading space, as ids.
    """

    text: str | None
    token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]


@attrs.frozen
class Tokenize:
    """Turn a prompt into ids. Asked with a reply channel by the actor's port.

    Args:
        prompt: a text, or chat messages; None where the ids are known already.
        bad_words: texts to encode beside it.
    """

    prompt: str | Sequence[Mapping[str, Any]] | None
    bad_words: tuple[str, ...] = ()
