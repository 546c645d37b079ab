"""Grammar masks in progress: requests that need one, questions to the grammars, and their answers.

    scheduler   ask()  --->  take_questions(), sort()   driver of the grammars
                take_answers()  <---  answer(), put_down()

A step computes no token for a request while its mask is older than its last token. The scheduler's side never waits: it
asks, goes on with other requests, and takes the answers when they are there. The driver decides in which process the
grammars run.

This state can be lost: `ask_again` finds the missing masks in the journal, and `Thinking` is a function of the tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.grammar_state import Thinking, TokenMask, only, with_token
from triolet.core.request.model_info import LoadedModel
from triolet.core.request.structured_outputs import StructuredOutputsParams

MAX_WAIT_S = 0.002
"""Longest time that a step waits for masks, seconds. A mask takes some 0.2 ms; a request with a slower one misses the
step."""

GrammarQuestions = dict[StructuredOutputsParams, dict[int, tuple[int, ...]]]
"""Answers bound to each grammar, by serial: all tokens since the grammar began."""


class GrammarMasks:
    """Questions and answers about the masks of one engine's requests.

    Args:
        journal: holds the requests.
        model: gives the size of the vocabulary.
    """

    def __init__(self, journal: Journal, model: LoadedModel) -> None:
        self._journal, self._model = journal, model
        self._asked: dict[int, None] = {}
        self._answers: dict[int, TokenMask] = {}
        self._asked_s: dict[int, float] = {}  # since when, oldest first, until answered
        self._latest: set[int] = set()  # asked for the next step, and not answered
        self._wait_until_s = 0.0
        self._thinking: dict[int, Thinking] = {}

    # -------------------------------------------------------------------------------- the scheduler's side

    def ask(self, serials: Iterable[int], now_s: float) -> None:
        """Note that these requests need masks."""
        if serials := dict.fromkeys(serials):
            self._asked.update(serials)
            for serial in serials:
                self._asked_s.pop(serial, None)  # to the end
                self._asked_s[serial] = now_s
            self._latest, self._wait_until_s = set(serials), now_s + MAX_WAIT_S

    def take_answers(self) -> dict[int, TokenMask]:
        """Return the masks that have come since the last call, by serial."""
        answers, self._answers = self._answers, {}
        return answers

    def step_waits(self, now_s: float) -> bool:
        """Return True if the next step should wait for a mask."""
        self._latest = {serial for serial in self._latest if serial in self._journal}
        if now_s >= self._wait_until_s:
            self._latest.clear()
        return bool(self._latest)

    @property
    def waits_until_s(self) -> float:
        """Time at which a step that waits goes ahead without the masks; infinity if none waits."""
        return self._wait_until_s if self._latest else float("inf")

    # ------------------------------------------------------------------------------------ the driver's side

    @property
    def has_questions(self) -> bool:
        """True if masks are asked for."""
        return bool(self._asked)

    @property
    def has_answers(self) -> bool:
        """True if there are masks that the scheduler has not taken."""
        return bool(self._answers)

    def take_questions(self) -> tuple[int, ...]:
        """Return the serials of the requests that need masks."""
        asked = tuple(self._asked)
        self._asked.clear()
        return asked

    def ask_again(self) -> None:
        """Ask for all masks that are missing: questions that were taken may have been lost."""
        self._asked.update((entry.serial, None) for entry in self._journal if entry.awaits_mask)

    def put_back(self, serials: Iterable[int]) -> None:
        """Have questions asked once more that could not be answered now."""
        self._asked.update((serial, None) for serial in serials if self._awaits(serial))

    def unanswered(self) -> tuple[tuple[int, float], ...]:
        """Return the requests that wait for a mask, by serial, and since when, monotonic seconds; oldest first."""
        self._asked_s = {serial: at_s for serial, at_s in self._asked_s.items() if self._awaits(serial)}
        return tuple(self._asked_s.items())

    def _awaits(self, serial: int) -> bool:
        return (entry := self._journal.get(serial)) is not None and entry.awaits_mask

    def needs_grammars(self, serials: Iterable[int]) -> bool:
        """Return True if any of these requests is bound to a grammar."""
        constraints = [entry.request.constraint for entry in map(self._journal.get, serials) if entry]
        return any(constraint is not None and constraint.grammar is not None for constraint in constraints)

    def sort(self, serials: Iterable[int]) -> GrammarQuestions:
        """Answer the requests that need no grammar now; return the questions to the grammars."""
        self._thinking = {
            serial: thinking for serial, thinking in self._thinking.items() if serial in self._journal
        }
        questions: GrammarQuestions = defaultdict(dict)
        for entry in filter(None, map(self._journal.get, serials)):
            if entry.awaits_mask and (question := self._question(entry)) is not None:
                params, token_ids = question
                questions[params][entry.serial] = token_ids
        return questions

    def _question(self, entry: JournalEntry) -> tuple[StructuredOutputsParams, tuple[int, ...]] | None:
        """Return the grammar in force and the tokens that it must read; without a grammar, answer and return None."""
        constraint, output = entry.request.constraint, entry.output_token_ids
        assert constraint is not None
        is_bound = constraint.grammar is not None
        thinking = self._thinking.setdefault(entry.serial, Thinking(constraint.thinking, is_bound=is_bound))
        thinking.follow(output)
        is_in_form = thinking.ended is not None or thinking.optional_token_id is not None
        if constraint.grammar is not None and is_in_form:
            return constraint.grammar, tuple(output[thinking.ended or 0 :])
        forced = thinking.forced_token_id(output)
        assert self._model.info is not None, "the model is loaded before requests are admitted"
        mask = None if forced is None else only(forced, self._model.info.vocab_size)
        self.answer(entry.serial, TokenMask(len(output), mask))
        return None

    def put_down(self, serial: int, mask: TokenMask) -> bool:
        """Take the answer of a grammar; its position counts from the token at which the grammar began.

        Returns:
            True if the request waits for this mask.
        """
        if (entry := self._journal.get(serial)) is None:
            return False
        thinking, bits = self._thinking.get(serial), mask.mask
        position = mask.position + (0 if thinking is None else thinking.ended or 0)
        if position != len(entry.output_token_ids):
            return False  # asked in an earlier stay of the request, which has grown since
        if thinking is not None and thinking.optional_token_id is not None and bits is not None:
            bits = with_token(bits, thinking.optional_token_id)
        self.answer(serial, TokenMask(position, bits, mask.is_over, mask.problem))
        return True

    def answer(self, serial: int, mask: TokenMask) -> None:
        """Set the mask of a request; the next `plan_step` takes it."""
        self._answers[serial] = mask
        self._asked_s.pop(serial, None)
        self._latest.discard(serial)
