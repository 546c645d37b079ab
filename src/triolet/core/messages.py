"""What the actors say to each other: frozen facts and wishes, in tuples.

The state that must survive is the journal's, so most messages are no more than "look there". Requests are named by
their journal serial, which is never reused; ids that callers chose stay at the engine's edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from triolet.core.conversation import Conversation
from triolet.core.plan import StepResult


@attrs.frozen
class Wake:
    """To the scheduler: requests came or went; look into the journal."""


@attrs.frozen
class StepDone:
    """To the scheduler: the runner has finished a step."""

    result: StepResult


SchedulerMessage = Wake | StepDone


@attrs.frozen
class Progressed:
    """To the detokenizer: these requests have new tokens in the journal, or have ended. One message per step."""

    serials: tuple[int, ...]


@attrs.frozen
class Tokenize:
    """To the tokenizer, with a reply channel beside it.

    Args:
        prompt: a text, or chat messages; None where the ids are known already.
        bad_words: texts whose ids are wanted, too.
        marks: texts whose ids are wanted as they stand in an answer.
    """

    prompt: str | Sequence[Mapping[str, Any]] | Conversation | None
    bad_words: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


@attrs.frozen
class Tokenized:
    """The tokenizer's answer.

    Args:
        text: what was encoded, after the chat template; None if there was no prompt to encode.
        token_ids: the prompt.
        bad_words_token_ids: ids that would write the bad words.
        marks_token_ids: ids of the marks.
    """

    text: str | None
    token_ids: tuple[int, ...]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    marks_token_ids: tuple[tuple[int, ...], ...] = ()
