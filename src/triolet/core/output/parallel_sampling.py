"""Parallel sampling: the outputs of several answers to one prompt (`n`), for one reader.

Each answer has a collector. With n = 1 it is used alone. Otherwise a streamed output carries one answer, in turns, and
only the last output is `finished`; a FINAL_ONLY reader gets all answers in one output, in the order of their index.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from triolet.core.journal import JournalEntry
from triolet.core.output.output_collector import OutputCollector
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import RequestOutputKind


def collector_of(collectors: Sequence[OutputCollector]) -> ParallelCollector | OutputCollector:
    """Return the object from which a reader of these answers takes; the collectors are in the order of the index."""
    return collectors[0] if len(collectors) == 1 else ParallelCollector(collectors)


class ParallelCollector:
    """Collector of several answers, with the methods of an `OutputCollector`.

    Args:
        collectors: one per answer, by index; all of the same kind of output.
    """

    def __init__(self, collectors: Sequence[OutputCollector]) -> None:
        self._collectors = tuple(collectors)
        self._kind = collectors[0].entry.request.params.output_kind
        self._comes_at_once = self._kind is RequestOutputKind.FINAL_ONLY
        self._turn = 0
        self._prompt_told: set[int] = set()  # to which answers' readers

    @property
    def failed(self) -> JournalEntry | None:
        """An answer that could not be finished, if there is one."""
        for collector in self._collectors:
            if collector.failed is not None:
                return collector.failed
        return None

    @property
    def text(self) -> str:
        """Text of the first answer so far."""
        return self._collectors[0].text

    def has_output(self) -> bool:
        """Return True if `take` has an output."""
        whether = all if self._comes_at_once else any
        return whether(collector.has_output() for collector in self._collectors)

    def take(self) -> RequestOutput:
        """Return the next output; there must be one."""
        if not self._comes_at_once:
            return self._take_next()
        outputs = [collector.take() for collector in self._collectors]
        return attrs.evolve(outputs[0], outputs=tuple(output.outputs[0] for output in outputs))

    def _with_prompt(self, output: RequestOutput) -> RequestOutput:
        """Add the prompt's log-probabilities, which are computed once, to the outputs of each answer."""
        index = output.outputs[0].index
        prompt_logprobs = self._collectors[0].prompt_logprobs() if index else None
        if prompt_logprobs is None:
            return output
        is_told = self._kind is RequestOutputKind.DELTA and index in self._prompt_told
        self._prompt_told.add(index)
        return attrs.evolve(output, prompt_logprobs=[] if is_told else prompt_logprobs)

    def _take_next(self) -> RequestOutput:
        """Take from the next collector in turn that has an output."""
        turns = [*self._collectors[self._turn :], *self._collectors[: self._turn]]
        place = next(place for place, collector in enumerate(turns) if collector.has_output())
        self._turn = (self._turn + place + 1) % len(turns)
        output = self._with_prompt(turns[place].take())
        is_last = all(c.finish_reason is not None and not c.has_output() for c in self._collectors)
        return output if output.finished == is_last else attrs.evolve(output, finished=is_last)
