"""What a parser of answers finds: text, reasoning, and calls of tools, piece by piece."""

from __future__ import annotations

import attrs


@attrs.frozen
class TextPiece:
    """Some of what is said to the user."""

    text: str


@attrs.frozen
class ReasoningPiece:
    """Some of what the model said to itself."""

    text: str


@attrs.frozen
class ToolCallBegin:
    """A call of a tool begins.

    Args:
        index: of the call in the answer, from 0.
        name: of the function.
    """

    index: int
    name: str


@attrs.frozen
class ToolCallArguments:
    """Some of a call's arguments, as the model wrote them: JSON text, when all of it is there.

    Args:
        index: of the call.
        text: what follows the pieces before.
    """

    index: int
    text: str


@attrs.frozen
class ToolCallEnd:
    """A call of a tool is over; every call that begins ends.

    Args:
        index: of the call.
        name: of the function.
        arguments: all pieces together.
        is_valid: whether they are a JSON object. They are not if the answer was cut short, or if the model blundered.
    """

    index: int
    name: str
    arguments: str
    is_valid: bool


AnswerEvent = TextPiece | ReasoningPiece | ToolCallBegin | ToolCallArguments | ToolCallEnd
