"""Forms of answers: words, one of which an answer must be. What may come next in one is told by looking at them."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import trio

from tests.actors.harness import VOCAB
from triolet.actors.executors.grammar.grammars import GrammarFailed, Grammars, GrammarsDied
from triolet.core.recovery.supervision import typed_shortages
from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.ipc.grammar import MaskAnswer

if TYPE_CHECKING:
    from tests.simulation.story import Ask
    from tests.simulation.world import World

LETTERS = range(40)  # tokens that are characters by themselves
MAX_WORD = 12
# Within the patience of a step, beyond it, and longer than a step: other answers come meanwhile.
DELAYS_S = (0.0, 0.0, 0.001, 0.01, 0.03, 0.03)


def draw_forms(rng: random.Random, asks: tuple[Ask, ...], eos_token_ids: Collection[int]) -> tuple[Ask, ...]:
    """Many of these must be answered with a word; endings that the fake model would have to mask are not asked for."""

    def bind(ask: Ask) -> Ask:
        words = _draw_words(rng, [token_id for token_id in LETTERS if token_id not in eos_token_ids])
        params = {name: value for name, value in ask.params.items() if name != "min_tokens"}
        return attrs.evolve(
            ask, params=params | {"structured_outputs": StructuredOutputsParams(choice=words)}
        )

    return tuple(bind(ask) if rng.random() < 0.6 else ask for ask in asks)


def _draw_words(rng: random.Random, letters: list[int]) -> list[str]:
    """Some begin like others, some are the beginnings of others."""
    words = [""]
    for _ in range(rng.randint(1, 6)):
        word = rng.choice(words)
        beginning = word[: rng.randint(0, len(word))]
        rest = rng.choices(letters, k=rng.randint(1, MAX_WORD - min(len(beginning), MAX_WORD - 1)))
        words.append(beginning + "".join(chr(65 + token_id) for token_id in rest))
    return words[1:]


@attrs.frozen
class Choice:
    """What may come next in an answer.

    Args:
        token_ids: these; none if the answer is over, or was never one of the words.
        is_over: it is one of the words, and no longer one begins with it.
    """

    token_ids: frozenset[int]
    is_over: bool

    @property
    def mask(self) -> bytes:
        """A bit for each token."""
        return sum(1 << token_id for token_id in self.token_ids).to_bytes((VOCAB + 7) // 8, "little")


def choice_in(form: StructuredOutputsParams, output: Sequence[int], eos_token_ids: Collection[int]) -> Choice:
    """What the form leaves to choose from after these tokens."""
    if output and output[-1] in eos_token_ids:
        return Choice(frozenset(), is_over=True)
    text, words = "".join(chr(65 + token_id) for token_id in output), form.choice or ()
    following = {
        ord(word[len(text)]) - 65 for word in words if word.startswith(text) and len(word) > len(text)
    }
    is_whole = text in words
    token_ids = following | set(eos_token_ids) if is_whole else following
    return Choice(frozenset(token_ids), is_over=is_whole and not following)


class StandIn:
    """See `Grammars`: of words, slower and less reliable than the real ones.

    Args:
        world: judges, and says what goes wrong.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._opened: set[StructuredOutputsParams] = set()
        self._died = trio.Event()

    async def open(self, params: StructuredOutputsParams, owner: str | None = None) -> None:
        """See `Grammars`."""
        await trio.sleep(self._world.rng.choice(DELAYS_S))
        self._maybe_die()
        with typed_shortages("a grammar"):
            self._world.reach_shortage("shortage.open")
        self._opened.add(params)

    async def watch(self) -> None:
        """See `Grammars`."""
        await self._died.wait()
        raise GrammarsDied

    async def guide(
        self, params: StructuredOutputsParams, answers: dict[int, tuple[int, ...]]
    ) -> tuple[MaskAnswer, ...]:
        """See `Grammars`."""
        await trio.sleep(self._world.rng.choice(DELAYS_S))
        self._maybe_die()
        await self._world.maybe_hang("grammars.hang")
        with typed_shortages("a grammar"):
            self._world.reach_shortage("shortage.guide")
        if self._world.is_due("grammars.fail"):
            raise GrammarFailed("planted")
        return tuple(self._guided(params, serial, output) for serial, output in answers.items())

    def _guided(self, params: StructuredOutputsParams, serial: int, output: tuple[int, ...]) -> MaskAnswer:
        choice = choice_in(params, output, self._world.story.eos_token_ids)
        problem = "" if choice.token_ids or choice.is_over else "no word begins like this"
        return MaskAnswer(serial, len(output), choice.mask, choice.is_over, problem)

    def _maybe_die(self) -> None:
        if self._died.is_set() or self._world.is_due("grammars.die"):
            self._died.set()
            raise GrammarsDied

    def forget(self, is_live: Callable[[int], bool]) -> None:
        """See `Grammars`."""

    @property
    def is_timed(self) -> bool:
        """See `Grammars`: here nothing ends a hang but the watchdog."""
        return False


def opening_stand_ins(world: World) -> Callable[[], AbstractAsyncContextManager[Grammars]]:
    """The scope in which these are served, one life after the other."""

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Grammars]:
        await trio.lowlevel.checkpoint()
        world.reach_shortage("shortage.start")
        yield StandIn(world)

    return opened
