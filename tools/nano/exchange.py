"""Exchanges that the skills write: one question with its answer, and the state of the chat."""

from collections.abc import Callable
from random import Random

import attrs


@attrs.frozen(kw_only=True)
class Exchange:
    """One question and its answer.

    Attributes:
        ask: what the user says.
        answer: what the model says.
        brief: the answer of a model that was told to be brief; None where there is no shorter one.
        another: writes a different answer of the same kind ("another one"); None where that makes no sense.
        onward: what follows the answer ("go on"); None where nothing does.
        plain: the answer is exact text that no style may change.
    """

    ask: str
    answer: str
    brief: str | None = None
    another: Callable[[Random], str] | None = None
    onward: str | None = None
    plain: bool = False


@attrs.define
class Chat:
    """State of one conversation: the system turn's wishes and the facts that the user has told.

    Attributes:
        bot_name: the name that the model goes by.
        prefix: put before every answer that is not plain; `suffix` behind.
        brief: whether the system turn asks for brevity.
        memory: what the user has told, by topic ("name", "colour", ...).
    """

    bot_name: str = "triolet-nano"
    prefix: str = ""
    suffix: str = ""
    brief: bool = False
    memory: dict[str, str] = attrs.field(factory=dict)


Skill = Callable[[Random, Chat], Exchange]
