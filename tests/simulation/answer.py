"""One of the answers to a request, as its reader hears it: each token once, and only what must come."""

from __future__ import annotations

import math

import attrs
import trio

from tests.simulation.expected import Ended, Expected, expected_of
from tests.simulation.story import Ask
from tests.simulation.world import Record, World
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.params import RequestOutputKind
from triolet.core.request.request import FinishReason, Request


@attrs.define(eq=False)
class Answer:
    """What has been heard of it, compared with the answer of a run of this request alone.

    Args:
        world: judges.
        ask: which it answers.
        records: of all answers to it, in order; the prompt is computed for the first one.
        index: its place among them.
        has_ended: its last output has come.
    """

    world: World
    ask: Ask
    records: list[Record]
    index: int
    has_ended: bool = False
    _token_ids: tuple[int, ...] = ()
    _text: str = ""

    @property
    def record(self) -> Record:
        """What the world knows of it."""
        return self.records[self.index]

    @property
    def _name(self) -> str:
        answer = f", answer {self.index}" if len(self.records) > 1 else ""
        return f"client {self.ask.number}{answer}"

    def take(self, new: CompletionOutput) -> None:
        """An output has some more of it."""
        request = self.record.entry.request
        weights = tuple(self.record.weights)
        expected, kind = expected_of(request, weights, self.world.story.windows), request.params.output_kind
        self.world.note(f"{self._name} reads {tuple(new.token_ids)} {new.text!a} {new.finish_reason}")
        self._expect(request.seed == self.ask.params["seed"] + self.index, f"has the seed {request.seed}")
        self._expect(not self.has_ended, "an output came after the last one")
        if kind is RequestOutputKind.DELTA:
            self._token_ids, self._text = (*self._token_ids, *new.token_ids), self._text + new.text
        else:
            is_longer = new.token_ids[: len(self._token_ids)] == self._token_ids
            self._expect(is_longer and new.text.startswith(self._text), "something was taken back")
            self._token_ids, self._text = tuple(new.token_ids), new.text
        is_beginning = expected.token_ids[: len(self._token_ids)] == self._token_ids
        self._expect(is_beginning, f"got tokens {self._token_ids}, not {expected.token_ids}")
        if self._token_ids:
            named = self.world.weights.of_version.get(new.weight_version)
            newest = weights[len(self._token_ids) - 1]
            self._expect(named == newest, f"names weights {named}, and {newest} computed its newest token")
        self.has_ended = new.finish_reason is not None
        if self.has_ended:
            self._expect(self.record.closed_s is not None, "the answer has ended, and its request goes on")
            self._judge_ending(expected, (new.finish_reason, new.stop_reason))
        else:
            self._expect(kind is not RequestOutputKind.FINAL_ONLY, "an output came before the last one")
            num_tokens = len(self._token_ids)
            if self.world.fired["tokenizer.decode"] and num_tokens == len(expected.token_ids):
                return  # the text of a token that ends the answer is hidden, also if the rest cannot be decoded
            self._expect_text(expected.text_of(num_tokens, is_flushed=False))

    def _judge_ending(self, expected: Expected, ended: Ended) -> None:
        if ended[0] in (FinishReason.STOP, FinishReason.LENGTH):
            self._expect(
                self._token_ids == expected.token_ids, f"ended at {self._token_ids}, {expected.token_ids}"
            )
            self._expect(ended == expected.ended, f"ended by {ended}, not {expected.ended}")
            self._expect(not self._should_have_crashed(), "was answered by a runner that can not compute it")
            self._expect_text(expected.text)
        else:
            self._expect(self.is_allowed(ended[0], expected.request), f"ended by {ended} for no reason")
            self._expect_text(expected.text_of(len(self._token_ids), is_flushed=True))

    def _should_have_crashed(self) -> bool:
        num_computed = self.record.entry.num_tokens - 1  # the last one was not computed any more
        return self.ask.poison_at is not None and num_computed > self.ask.poison_at

    def is_allowed(self, reason: FinishReason | None, request: Request) -> bool:
        """Whether something happened that explains an early end."""
        if reason is FinishReason.ABORT:
            return self.ask.request_id in self.world.aborted
        if reason is FinishReason.SHUTDOWN:
            return self.world.is_closing
        first = self.records[0].entry  # it waits for all of them
        queue_deadline_s = first.request.queue_deadline_s if first.scheduled_s is None else math.inf
        deadline_s = min(request.deadline_s, queue_deadline_s)
        return reason is FinishReason.DEADLINE and trio.current_time() >= deadline_s

    def _expect(self, holds: bool, rule: str) -> None:
        self.world.expect(holds, f"{self._name}: {rule}")

    def _expect_text(self, text: str) -> None:
        self._expect(self._text == text, f"got {self._text!a}, not {text!a}")
