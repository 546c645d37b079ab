"""Interface of compiled grammars, and two implementations: inline, and none; `grammar_process` has the third."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol

import trio

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.errors import InvalidParams, UnsupportedFeature
from triolet.ipc.grammar import MaskAnswer, MaskQuestion, Vocabulary

if TYPE_CHECKING:
    from triolet.structured_outputs.compiler import Grammar, GrammarVocabulary

OpenGrammars = Callable[[], AbstractAsyncContextManager["Grammars"]]


class GrammarFailed(Exception):
    """A question about a grammar got no answer: its process is dead, or was killed because it was late."""


class GrammarLate(GrammarFailed):
    """A process took too long, and was killed."""


class GrammarDead(GrammarFailed):
    """A process died of a question, or before it."""


class GrammarsDied(Exception):
    """The process that all grammar processes are forked from is dead; the structured output actor restarts it."""


class GrammarRefused(Exception):
    """The text to compile is not a valid grammar."""


class Grammars(Protocol):
    """Compiler of grammars, which also follows answers through them."""

    async def open(self, params: StructuredOutputsParams, owner: str | None = None) -> None:
        """Compile a grammar, unless it is there.

        Args:
            owner: name of the key that wants it; keys that wait take turns.
        Raises:
            InvalidParams: it is no grammar, or it is too much of one.
            UnsupportedFeature: no grammar works with this tokenizer.
            ResourceShortage: it needs a process, and none can be started now.
            GrammarsDied: no grammar can be compiled any more.
        """
        ...

    async def watch(self) -> None:
        """Wait until the grammars die.

        Raises:
            GrammarsDied: always, when they have died.
        """
        ...

    async def guide(
        self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]
    ) -> tuple[MaskAnswer, ...]:
        """Return the masks of the next tokens of answers that follow a grammar.

        Args:
            answers: all tokens so far, by serial.
        Raises:
            GrammarFailed: they cannot be followed; one of them alone may still be.
            ResourceShortage: they need a process, and none can be started now.
        """
        ...

    def forget(self, is_live: Callable[[int], bool]) -> None:
        """Drop what is kept of answers that have ended."""
        ...

    @property
    def is_timed(self) -> bool:
        """Return whether a computation with a time limit of its own is under way."""
        ...


def wrong_grammar(params: StructuredOutputsParams, problem: str) -> InvalidParams:
    """Return the error for a request with a grammar that cannot be compiled."""
    return _error_of(params, f"compiled: {problem}")


def unusable_grammar(params: StructuredOutputsParams, problem: str) -> InvalidParams:
    """Return the error for a grammar that was compiled and cannot be followed within the limits."""
    return _error_of(params, f"followed: {problem}")


def _error_of(params: StructuredOutputsParams, unmet: str) -> InvalidParams:
    field = f"structured_outputs.{params.kind}"
    return InvalidParams(
        f"{field} must be a grammar that can be {unmet}", field=field, got=getattr(params, params.kind)
    )


class NoGrammars:
    """Grammars for a tokenizer that cannot work with any: every request is refused.

    Args:
        problem: why.
    """

    def __init__(self, problem: str) -> None:
        self._problem = problem

    async def open(self, params: StructuredOutputsParams, owner: str | None = None) -> None:
        await trio.lowlevel.checkpoint()
        raise UnsupportedFeature(self._problem, field="structured_outputs", got=params.kind)

    async def watch(self) -> None:
        await trio.sleep_forever()

    async def guide(
        self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]
    ) -> tuple[MaskAnswer, ...]:
        await trio.lowlevel.checkpoint()
        raise GrammarFailed(self._problem)

    def forget(self, is_live: Callable[[int], bool]) -> None:
        pass  # nothing is kept between calls

    @property
    def is_timed(self) -> bool:
        return False


class InlineGrammars:
    """Grammars compiled in the event loop, for tests that need one order of events; none can be killed.

    Args:
        tokens: the model's vocabulary.
    """

    def __init__(self, tokens: GrammarVocabulary) -> None:
        self._tokens = tokens
        self._grammars: dict[StructuredOutputsParams, Grammar] = {}

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> Grammars:
        """Return the grammars for a vocabulary; `NoGrammars` if they do not work with its tokenizer."""
        from triolet.structured_outputs.compiler import GrammarVocabulary

        try:
            return cls(GrammarVocabulary(vocabulary))
        except ValueError as error:
            return NoGrammars(f"structured_outputs must be None: {error}")

    async def open(self, params: StructuredOutputsParams, owner: str | None = None) -> None:
        from triolet.structured_outputs.compiler import InvalidGrammar

        await trio.lowlevel.checkpoint()
        try:
            self._grammar(params)
        except InvalidGrammar as error:
            raise wrong_grammar(params, str(error)) from None

    def _grammar(self, params: StructuredOutputsParams) -> Grammar:
        from triolet.structured_outputs.compiler import Grammar

        if params not in self._grammars:
            self._grammars[params] = Grammar(self._tokens, params)
        return self._grammars[params]

    async def watch(self) -> None:
        await trio.sleep_forever()

    async def guide(
        self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]
    ) -> tuple[MaskAnswer, ...]:
        # Answers are followed from their beginnings each time, so that nothing has to be kept between calls.
        await trio.lowlevel.checkpoint()
        grammar = self._grammar(params)
        guided = tuple(grammar.next_mask(MaskQuestion(serial, 0, answers[serial])) for serial in answers)
        grammar.forget(answers)
        return guided

    def forget(self, is_live: Callable[[int], bool]) -> None:
        pass  # nothing is kept between calls

    @property
    def is_timed(self) -> bool:
        return False
