"""Executor whose model says what a test has written, and fails where the test wants it to.

A request's answer is its text in the tokens of a real tokenizer, and then the end-of-sequence token. Everything around
the choice of a token is the engine's own: blocks, batches, stop strings, limits, streams, replays after a crash.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

from triolet.actors.executors.contract import Executor, Tell
from triolet.actors.model_runner import PROOF
from triolet.config.engine import DEFAULT_BLOCK_SIZE, EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import GenerationDefaults, ModelInfo
from triolet.core.step_plan import (
    PlanRow,
    RowFailure,
    RowResult,
    RowStart,
    SampledToken,
    StepPlan,
    StepResult,
    TokenLogprobs,
    after_step,
)
from triolet.core.worker_call import WorkerCall, WorkerOutcome, outcome_of
from triolet.errors import ConfigError
from triolet.model.folder.generation_config import read_generation_defaults
from triolet.model.tokenizer.tokenizer import TextTokenizer, load_configured_tokenizer
from triolet.nano import PATH as NANO

Answers = str | Sequence[str] | Callable[[str], str]
"""One answer for every request, one for each in the order of their arrival, or a function from prompt to answer."""

_Key = tuple[str, int, tuple[int, ...]]  # id, seed and prompt of a request

NUM_KV_BLOCKS = 1024


class PlantedCrash(Exception):
    """Crash of the model that a test has asked for."""


@attrs.define
class _Row:
    start: RowStart
    script: Sequence[int] | str  # tokens of the answer, or why the request fails
    num_tokens: int  # of the answer, so far


class ScriptedModel(Executor):
    """Model of a fake engine: what it answers, how long it takes, what goes wrong, and what it was asked.

    Args:
        answers: what it says. A sequence must be as long as the test has requests: one too many fails.
        step_s: duration of a step, in which every running request gets a token, seconds of Trio's clock; with
            pytest-trio's `autojump_clock` it costs no time.
    """

    def __init__(self, answers: Answers = "Hello from triolet.", *, step_s: float = 0.0) -> None:
        if not (step_s >= 0):
            raise ConfigError("step_s", "at least 0 seconds", step_s)
        self.step_s = step_s
        self.prompts: list[str] = []
        """Texts of the prompts in the order of their arrival, after the chat template; a prompt of ids is decoded."""
        self.num_crashes = 0
        """Planted crashes so far."""
        self._answers = answers
        self._scripts: dict[_Key, Sequence[int] | str] = {}
        self._rows: dict[int, _Row] = {}
        self._failures: list[str] = []
        self._crashes_after: int | None = None  # steps
        self._is_halted = False
        self._tokenizer: TextTokenizer | None = None
        self._end: tuple[int, ...] = ()

    def fail_next_request(self, reason: str = "planted failure") -> None:
        """Fail the next request that arrives, alone: its stream raises `RequestFailed` with this reason."""
        self._failures.append(reason)

    def crash(self, *, after_steps: int = 0) -> None:
        """Crash the model in one of the next steps: the engine starts it again, and the streams go on.

        Args:
            after_steps: steps that succeed before it.
        """
        self._crashes_after = after_steps

    # The executor contract, for the engine.

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Enclose one life of the model."""
        yield

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        """Forget the rows of an earlier life."""
        await trio.lowlevel.checkpoint()
        self._rows.clear()
        return self._info

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        """Compute a plan, a step every `step_s` seconds."""
        self._is_halted = False
        rest: StepPlan | None = plan
        while rest is not None:
            await trio.sleep(self.step_s)
            result, rest = after_step(rest, self._step(rest), must_halt=self._is_halted)
            if rest is not None:
                tell(result)
        return result

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        """Take an adapter, which changes nothing that is scripted."""
        await trio.lowlevel.checkpoint()

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        return outcome_of(self, call)

    def use_weights(self, folder: str | None) -> None:
        """Take other weights, which change nothing that is scripted."""

    def forget_model(self) -> None:
        """Free nothing."""

    def halt(self) -> None:
        """End a plan of several steps after the current one."""
        self._is_halted = True

    def bind(self, config: EngineConfig) -> TextTokenizer:
        """Become the model of an engine.

        Args:
            config: its `tokenizer`, or else its `model`, is the folder of tokenizer, chat template and end-of-sequence
                tokens; by default triolet-nano's.
        Returns:
            The tokenizer.
        Raises:
            ConfigError: the folder has no tokenizer.
        """
        folder = Path(config.tokenizer or config.model or NANO)
        tokenizer = load_configured_tokenizer(config, folder)
        if tokenizer is None:
            raise ConfigError("model", "a folder with a tokenizer", str(folder))
        defaults = read_generation_defaults(folder)
        num_blocks = config.num_kv_blocks or NUM_KV_BLOCKS
        block_size = config.block_size or DEFAULT_BLOCK_SIZE
        longest = num_blocks * block_size
        self._tokenizer, self._end = tokenizer, defaults.eos_token_ids[:1]
        self._info = ModelInfo(
            folder=str(folder),
            architecture="Scripted",
            backend="native",
            vocab_size=tokenizer.backend.get_vocab_size(),
            max_position=longest,
            max_model_len=min(config.max_model_len or longest, longest),
            num_kv_blocks=num_blocks,
            block_size=block_size,
            dtype="float32",
            device="cpu",
            # A script has no temperature: what else the folder recommends would only be in the way.
            generation=GenerationDefaults(eos_token_ids=defaults.eos_token_ids),
        )
        return tokenizer

    def _step(self, plan: StepPlan) -> StepResult:
        # After a crash: it takes no script of the test's requests, and is none of the steps before a planted crash.
        if plan == PROOF:
            return StepResult(plan.step_id, ())
        if self._crashes_after is not None:
            self._crashes_after -= 1
            if self._crashes_after < 0:
                self._crashes_after = None
                self.num_crashes += 1
                raise PlantedCrash("the test has asked for this crash")
        for row_id in plan.ended:
            self._rows.pop(row_id, None)
        for start in plan.starts:
            self._rows[start.row_id] = _Row(start, self._script(start), len(start.output_token_ids))
        results = [result for row in plan.rows if row.sample for result in self._sample(row)]
        return StepResult(plan.step_id, tuple(results))

    def _script(self, start: RowStart) -> Sequence[int] | str:
        """Return the tokens of a request's answer, or why it fails; the same if it comes again after a crash."""
        # The id alone is free again when a request has ended, and another one may have it.
        key: _Key = start.request_id, start.seed, start.prompt_token_ids
        if key not in self._scripts:
            try:
                self._scripts[key] = self._next_script(start)
            except (
                Exception
            ) as error:  # of the test's own function: it fails the request that it was asked for
                self._scripts[key] = f"the scripted answer raised {type(error).__name__}: {error}"
        return self._scripts[key]

    def _next_script(self, start: RowStart) -> Sequence[int] | str:
        assert self._tokenizer is not None, "`bind` comes first"
        prompt = self._tokenizer.decode(start.prompt_token_ids, skip_special_tokens=False)
        self.prompts.append(prompt)
        if self._failures:
            return self._failures.pop(0)
        if callable(self._answers):
            answer = self._answers(prompt)
        elif isinstance(self._answers, str):
            answer = self._answers
        elif len(self._scripts) < len(self._answers):
            answer = self._answers[len(self._scripts)]
        else:
            return f"there is no scripted answer for request {len(self._scripts) + 1} of {len(self._answers)}"
        return self._tokenizer.encode(answer, add_special_tokens=False)

    def _sample(self, planned: PlanRow) -> Iterator[RowResult]:
        """Give the next token of a row, and one after every token of its draft that was right."""
        row = self._rows[planned.row_id]
        start, draft = row.start, iter(planned.draft_token_ids)
        token_id: int | None = None
        while token_id is None or token_id == next(draft, None):
            try:
                token_id = self._next_token(row, planned.mask)
            except ValueError as error:
                yield RowFailure(start.request_id, start.epoch, str(error))
                return
            wants = start.params.logprobs is not None
            # The only token that it considers has the probability 1.
            logprobs = TokenLogprobs((token_id, token_id), (0.0, 0.0), 1) if wants else None
            yield SampledToken(start.request_id, start.epoch, row.num_tokens, token_id, logprobs)
            row.num_tokens += 1

    def _next_token(self, row: _Row, mask: bytes | None) -> int:
        if isinstance(row.script, str):
            raise ValueError(row.script)
        if row.start.wants_prompt_logprobs:
            raise ValueError("a scripted model has no log-probabilities of prompts")
        ends = row.num_tokens >= len(row.script)
        if ends and not self._end:
            raise ValueError(
                "the tokenizer's folder names no end-of-sequence token, and the scripted answer is over"
            )
        if ends and row.num_tokens < row.start.params.min_tokens:
            raise ValueError(
                f"the scripted answer has {len(row.script)} tokens; min_tokens is {row.start.params.min_tokens}"
            )
        token_id = self._end[0] if ends else row.script[row.num_tokens]
        if mask is not None and not mask[token_id // 8] >> token_id % 8 & 1:
            assert self._tokenizer is not None
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            raise ValueError(
                f"structured_outputs do not allow token {row.num_tokens + 1} of the scripted answer: {text!r}"
            )
        return token_id
