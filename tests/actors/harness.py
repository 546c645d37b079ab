"""An engine whose model is the fake one of the core's tests: inline, on virtual time, with a step that lasts 10 ms."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
import trio

from tests.core.fake_model import FakeModel, expected_answer
from triolet.actors.executors.contract import Executor, Tell
from triolet.config.engine import EngineConfig
from triolet.core import engine_core
from triolet.core.kv_cache.cache_groups import CacheGroups
from triolet.core.load_progress import OnProgress
from triolet.core.request.lora import Adapter
from triolet.core.request.model_info import GenerationDefaults, ModelInfo
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized, TokenizerInterface
from triolet.core.scheduling.scheduler import Scheduler
from triolet.core.step_plan import StepPlan, StepResult, after_step
from triolet.core.worker_call import WorkerCall, WorkerOutcome, outcome_of
from triolet.engine.engine import Engine
from triolet.engine.open_engine import run_engine
from triolet.errors import InvalidPrompt, InvariantViolated

STEP_S = 0.01
VOCAB = 50
LONGEST = 2**20  # tokens of a sequence, where neither cache nor story sets a limit


class Panic(BaseException):
    """What foreign code may raise past every `except Exception`."""


class LetterTokenizer:
    """One token is one character: token 0 is 'A', token 1 is 'B' and so on."""

    def tokenize(self, message: Tokenize) -> Tokenized:
        if message.prompt == "panic":
            raise Panic("in foreign code")
        if not isinstance(message.prompt, str):
            raise InvalidPrompt("prompt must be text here", field="prompt")
        if message.max_tokens is not None and len(message.prompt) > message.max_tokens:
            return Tokenized(message.prompt, (), (), num_unlisted=len(message.prompt))
        return Tokenized(message.prompt, tuple((ord(char) - 65) % VOCAB for char in message.prompt), ())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(65 + token_id) for token_id in token_ids)


def model_info(
    num_blocks: int, block_size: int, windows: tuple[int | None, ...] = (None,), longest: int = LONGEST
) -> ModelInfo:
    """A model whose longest sequence fills the whole cache, or is as long as its windows allow."""
    return ModelInfo(
        folder="/nowhere",
        architecture="Fake",
        backend="native",
        vocab_size=VOCAB,
        max_position=4096,
        max_model_len=min(CacheGroups(windows).longest(num_blocks, block_size), longest),
        num_kv_blocks=num_blocks,
        block_size=block_size,
        dtype="float32",
        device="cpu",
        generation=GenerationDefaults(),
        cache_windows=windows,
    )


def unexpected(result: StepResult) -> None:
    """Receiver of the results of runs, where there are none."""
    raise AssertionError(f"{result} is not the last of its plan")


def weights_of(folder: str | None) -> int:
    """Number of the weights of a folder, which is the end of its name."""
    return 0 if folder is None else int(folder.rpartition("-")[2])


class FakeExecutor(Executor):
    """Fulfils the executor contract in virtual time; faults are planted by replacing `before_step`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        longest: int = LONGEST,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.windows, self.longest = windows, longest
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.num_lives = 0
        self.plans: list[StepPlan] = []  # a run as its steps
        self.is_halted = False
        self.folder: str | None = None  # of the weights
        self.num_unloads = 0
        self.prepared: list[tuple[str, bool]] = []  # adapters, and whether they are pinned

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        await trio.lowlevel.checkpoint()
        self.num_lives += 1
        self.model = FakeModel(
            self.num_blocks, self.block_size, VOCAB, weights_of(self.folder), windows=self.windows
        )
        return model_info(self.num_blocks, self.block_size, self.windows, self.longest)

    async def execute(self, plan: StepPlan, tell: Tell) -> StepResult:
        self.is_halted = False
        rest: StepPlan | None = plan
        while rest is not None:
            result, rest = after_step(rest, await self.compute(rest), must_halt=self.is_halted)
            if rest is not None:
                tell(result)
        return result

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        await trio.lowlevel.checkpoint()
        self.prepared.append((adapter.name, is_pinned))

    async def call(self, call: WorkerCall, limit_s: float | None) -> WorkerOutcome:
        await trio.lowlevel.checkpoint()
        return outcome_of(self.model, call)

    def use_weights(self, folder: str | None) -> None:
        self.folder = folder

    def forget_model(self) -> None:
        self.num_unloads += 1

    def halt(self) -> None:
        self.is_halted = True

    async def compute(self, plan: StepPlan) -> StepResult:
        """One step: what subclasses change."""
        self.plans.append(plan)
        result = self.model.execute(plan)
        await trio.sleep(STEP_S)
        self.before_step(plan)
        return result


@asynccontextmanager
async def fake_engine(
    executor: FakeExecutor | None = None, tokenizer: TokenizerInterface | None = None, **fields: object
) -> AsyncGenerator[Engine]:
    """An engine over the fake model, with every count of its scheduler checked after every step."""
    config = EngineConfig.create(
        EngineConfig(runner="inline", max_num_seqs=4, max_num_batched_tokens=16), **fields
    )
    executor = executor or FakeExecutor(num_blocks=64, block_size=4)
    violations: list[InvariantViolated] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_core, "Scheduler", _checked_scheduler(violations))
        async with run_engine(config, executor, lambda: tokenizer or LetterTokenizer()) as engine:
            yield engine
            check(engine)
    assert violations == []


def _checked_scheduler(violations: list[InvariantViolated]) -> type[Scheduler]:
    class CheckedScheduler(Scheduler):
        def plan_step(self, now_s: float) -> StepPlan | None:
            plan = super().plan_step(now_s)
            self._note_violations()
            return plan

        def apply(self, result: StepResult, now_s: float) -> None:
            super().apply(result, now_s)
            self._note_violations()

        def _note_violations(self) -> None:
            try:
                self.check()
            except InvariantViolated as violation:  # raised, it would be one more crash to recover from
                violations.append(violation)

    return CheckedScheduler


def check(engine: Engine) -> None:
    """Every count of the core holds."""
    scheduler = engine._core.scheduler
    assert scheduler is not None
    scheduler.check()


def assert_all_blocks_back(engine: Engine) -> None:
    """No request holds anything."""
    statistics = engine.statistics()
    assert statistics.kv_blocks_free + statistics.kv_blocks_cached == statistics.kv_blocks_total
    assert statistics.num_requests_live == 0
    check(engine)


def answer_of(prompt: Sequence[int], seed: int, num_tokens: int) -> tuple[int, ...]:
    """What the fake model answers, whatever else runs."""
    return tuple(expected_answer(prompt, seed, num_tokens, VOCAB))
