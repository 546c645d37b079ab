"""Events that the parser of an answer returns: text, reasoning, and tool calls, piece by piece."""

from __future__ import annotations

import attrs


@attrs.frozen
class TextPiece:
    """Piece of the text for the user."""

    text: str


@attrs.frozen
class ReasoningPiece:
    """Piece of the model's reasoning."""

    text: str


@attrs.frozen
class ToolCallBegin:
    """Beginning of a tool call.

    Args:
        index: of the call in the answer, from 0.
        name: of the function.
    """

    index: int
    name: str


@attrs.frozen
class ToolCallArguments:
    """Piece of a call's arguments as the model wrote them; together the pieces are JSON text.

    Args:
        index: of the call.
        text: what follows the pieces before.
    """

    index: int
    text: str


@attrs.frozen
class ToolCallEnd:
    """End of a tool call; every call that begins ends.

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
