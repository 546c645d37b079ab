"""A client: it asks, reads in its manner, leaves in its way, and holds whatever comes against what must come."""

from __future__ import annotations

from array import array
from typing import Any

import attrs
import trio

from tests.core.fake_model import expected_vector
from tests.simulation.adapters import lora_of
from tests.simulation.answer import Answer
from tests.simulation.story import DETOKENIZER_POINTS, MAX_STEP_S, TOKENIZER_POINTS, Ask
from tests.simulation.world import Countdown, Record, World, is_planted
from triolet import SamplingParams
from triolet.core.output.outputs import RequestOutput
from triolet.core.request.request import FinishReason
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import (
    AdapterError,
    EngineClosed,
    EngineDead,
    InvalidPrompt,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestFailed,
    RequestIdInUse,
    ResourceShortage,
)


class LeftByItself(Exception):
    """A client that leaves its scope by an exception of its own."""


@attrs.define(eq=False)
class Client:
    """One request of the story, from its arrival to its end.

    Args:
        world: judges.
        ask: what it wants.
        scope: around everything it does.
        gone: it has nothing to do with the engine any more.
    """

    world: World
    ask: Ask
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    gone: trio.Event = attrs.field(factory=trio.Event)
    _task: trio.lowlevel.Task | None = None
    _answers: dict[int, Answer] = attrs.field(factory=dict)
    _has_ended: bool = False

    @property
    def name(self) -> str:
        return f"client {self.ask.number}"

    @property
    def records(self) -> list[Record]:
        """Of the answers to its request, once that is in the journal."""
        return [] if self._task is None else self.world.records_of(self._task)

    @property
    def is_settled(self) -> bool:
        """Whether the engine owes it nothing more; it may still be reading."""
        return self.gone.is_set() or (bool(self.records) and self._has_given_back)

    @property
    def _has_given_back(self) -> bool:
        return all(record.closed_s is not None for record in self.records)

    async def run(self, engine: Engine) -> None:
        """Come, ask, leave."""
        ask, self._task = self.ask, trio.lowlevel.current_task()
        await trio.sleep_until(ask.at_s)
        with self.scope:
            if ask.cancel_after_s is not None:
                self.scope.deadline = trio.current_time() + ask.cancel_after_s
            if ask.cancel_at_checkpoint is not None:
                self.world.cancels[self._task] = Countdown(ask.cancel_at_checkpoint, self.scope)
            try:
                await self._ask(engine)
            except Exception as error:
                self._judge_error(error, engine)
        self.world.note(f"{self.name} has gone")
        # Its scope is left: whatever it held is given back by now, and not some time later.
        self._expect(self._has_given_back, "has gone, and its request has not")
        self.gone.set()
        self.world.endings.unpark_all()

    async def abort_later(self, engine: Engine) -> None:
        """Abort it from another task."""
        assert self.ask.abort_after_s is not None
        await trio.sleep_until(self.ask.at_s + self.ask.abort_after_s)
        self.world.note(f"abort {self.ask.request_id}")
        self.world.aborted.add(self.ask.request_id)
        engine.abort(self.ask.request_id)
        named = [one for one in self.world.records.values() if one.request_id == self.ask.request_id]
        self._expect(all(one.closed_s is not None for one in named), "was aborted and goes on")

    # ------------------------------------------------------------------------------------- manners

    async def _ask(self, engine: Engine) -> None:
        ask, arguments = self.ask, dict(self.ask.arguments)
        if "deadline" in arguments:
            arguments["deadline"] += trio.current_time()
        prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        if ask.is_pooled:
            await self._ask_for_vector(engine, prompt, arguments)
            return
        params = SamplingParams(**ask.params)
        if ask.adapter is not None:
            if ask.retraining is not None:
                self.world.folders.retrain(ask.adapter)
            arguments["lora"] = lora_of(ask.adapter, load_inplace=ask.retraining == "reload")
        if ask.manner == "complete":
            self._take(await engine.complete(prompt, params, request_id=ask.request_id, **arguments))
            return
        async with engine.generate(prompt, params, request_id=ask.request_id, **arguments) as stream:
            match ask.manner:
                case "sit":
                    await trio.sleep(ask.pace_s)
                case "impatient":
                    await self._read_impatiently(stream)
                case _:
                    await self._read(stream)

    async def _ask_for_vector(
        self, engine: Engine, prompt: str | list[int], arguments: dict[str, Any]
    ) -> None:
        ask = self.ask
        async with engine.encode(prompt, request_id=ask.request_id, **arguments) as stream:
            if ask.manner == "sit":
                await trio.sleep(ask.pace_s)
                return
            output = await stream.output()
            if ask.manner == "raise":
                raise LeftByItself
        (record,) = self.records
        prompt_token_ids = record.entry.request.prompt_token_ids
        vector = expected_vector(prompt_token_ids, record.weights[-1], self.world.story.windows)
        right = array("f", vector).tolist()
        self.world.note(f"{self.name} reads {output.outputs.data.tolist()}")
        self._expect(
            output.outputs.data.tolist() == right, f"got {output.outputs.data.tolist()}, not {right}"
        )
        self._expect(self.world.num_counted[record.entry.serial] == 1, "its result was not counted once")
        self._expect(
            record.entry.finish_reason is FinishReason.STOP, f"ended by {record.entry.finish_reason}"
        )
        self._has_ended = True

    async def _read(self, stream: TokenStream) -> None:
        num_outputs = 0
        async for output in stream:
            self._take(output)
            num_outputs += 1
            if self.ask.manner == "slow":
                await trio.sleep(self.ask.pace_s)
            if self.ask.manner == "leave" and num_outputs > self.ask.num_outputs:
                return
            if self.ask.manner == "raise" and num_outputs > self.ask.num_outputs:
                raise LeftByItself
        self._expect(self._has_ended, "a stream ended without an ending")

    async def _read_impatiently(self, stream: TokenStream) -> None:
        """Every read has a time limit, and may be broken off at any checkpoint: nothing is lost by that."""
        while True:
            with trio.move_on_after(self.ask.pace_s) as scope:
                if self._task is not None and self.ask.cancel_at_checkpoint is None:
                    self.world.cancels[self._task] = Countdown(self.world.rng.randint(1, 5), scope)
                try:
                    self._take(await anext(stream))
                except StopAsyncIteration:
                    break
        self._expect(self._has_ended, "a stream ended without an ending")

    # ------------------------------------------------------------------------------------ judgement

    def _expect(self, holds: bool, rule: str) -> None:
        self.world.expect(holds, f"{self.name}: {rule}")

    def _take(self, output: RequestOutput) -> None:
        records = self.records
        self._expect(len(records) == self.ask.num_answers, f"has {len(records)} answers")
        self._expect(not self._has_ended, "an output came after the last one")
        used = {
            None if (adapter := record.entry.request.adapter) is None else adapter.name for record in records
        }
        self._expect(used == {self.ask.adapter}, f"is answered by the adapters {used}")
        for new in output.outputs:
            answer = self._answers.setdefault(new.index, Answer(self.world, self.ask, records, new.index))
            answer.take(new)
        num_ended = sum(answer.has_ended for answer in self._answers.values())
        self._has_ended = output.finished
        self._expect(output.finished == (num_ended == len(records)), "was told of another end")
        if output.finished:
            self._expect_promptness()

    def _expect_promptness(self) -> None:
        """A client that waits for an ending hears of it at once, but not while a runner starts again."""
        story = self.world.story
        closed_s = max(record.closed_s or 0.0 for record in self.records)
        if self.ask.manner in ("read", "complete") and not story.restart_s and not self.world.hung_s:
            late_s = trio.current_time() - closed_s
            self._expect(
                late_s <= (1.01 * MAX_STEP_S if self.world.num_lives > 1 else 0),
                f"heard of its ending {late_s} s late",
            )

    def _judge_error(self, error: Exception, engine: Engine) -> None:
        self.world.note(f"{self.name} gets {error!r}")
        self._has_ended = True
        self._expect(self._is_explained(error, engine), f"got {error!r} for no reason")

    def _is_explained(self, error: Exception, engine: Engine) -> bool:
        ask, world = self.ask, self.world
        match error:
            case LeftByItself():
                return True
            case Overloaded(is_for_others=True):
                return bool(world.story.limits["policy"] == "fair")
            case AdapterError():
                return ask.adapter is not None and self._task in world.folders.unread
            case RequestFailed(reason=reason) if "could not be loaded" in reason:
                return any(ask.is_of(start) for start in world.folders.unplaced)
            case Overloaded(limit="max_queued_requests"):
                admission = engine._core.admission
                num_live = admission._num_reserved + len(admission.journal)
                return num_live + ask.num_answers > admission.max_live_requests
            case Overloaded(limit="max_queued_tokens"):
                queued = engine._core.journal.num_queued_tokens
                return bool(queued >= world.story.limits["max_queued_tokens"])
            case InvalidRequest(field="n"):
                return ask.num_answers > engine._core.admission.max_live_requests
            case PromptTooLong():
                return len(ask.prompt) >= min(world.max_model_len, world.story.max_model_len + 1)
            case InvalidPrompt():
                num_struck = sum(world.fired[point] for point in (*TOKENIZER_POINTS, "tokenizer.hang"))
                return ask.prompt == "panic" or (isinstance(ask.prompt, str) and num_struck >= 2)
            case RequestIdInUse():
                return ask.request_id == "twice"
            case EngineClosed():
                return world.is_closing
            case EngineDead():
                return world.may_die and is_planted_cause(error)
            case RequestFailed(reason=reason) if "it ended before its result" in reason:
                (record,) = self.records
                reason_of_end = record.entry.finish_reason
                return Answer(world, ask, self.records, 0).is_allowed(reason_of_end, record.entry.request)
            case RequestFailed(reason=reason) if "crashes the model runner" in reason:
                return world.may_be_blamed(ask) and is_planted_cause(error)
            case RequestFailed(reason=reason) if "the model runner has now" in reason:
                return world.max_model_len < world.story.max_model_len
            case RequestFailed(reason=reason) if "there is no memory" in reason:
                return bool(world.fired["runner.out_of_memory"])
            case ResourceShortage(purpose="tokenizing the prompt"):
                return bool(world.fired["shortage.tokenizer"])
            case ResourceShortage():
                return "structured_outputs" in ask.params and bool(world.num_shortages)
            case RequestFailed(reason=reason) if "its grammar gives no answer" in reason:
                return "structured_outputs" in ask.params and bool(world.hung_s)
            case RequestFailed(reason=reason) if "its grammar failed" in reason:
                return "structured_outputs" in ask.params and bool(world.fired["grammars.fail"])
            case RequestFailed():
                world.num_failed += 1
                num_struck = sum(world.fired[point] for point in DETOKENIZER_POINTS)
                return world.num_failed <= world.fired["tokenizer.decode"] + num_struck // 2
        return False


def is_planted_cause(error: BaseException) -> bool:
    """Whether it names the fault that is behind it."""
    return error.__cause__ is not None and is_planted(error.__cause__)
