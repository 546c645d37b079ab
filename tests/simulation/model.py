"""The model side of a simulated engine: a runner with faults, and a tokenizer with tokens that are half characters."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import attrs
import trio

from tests.actors.harness import FakeExecutor, LetterTokenizer, model_info, weights_of
from tests.simulation.adapters import RunnerAdapters
from tests.simulation.forms import choice_in
from tests.simulation.story import MAX_STEP_S
from tests.simulation.world import World
from triolet.actors.model_runner import PROOF
from triolet.actors.supervisor import foreign_errors_kept
from triolet.core.load_progress import OnProgress
from triolet.core.recovery.recovery_state import MIN_LIMIT_S, RareHangLimit
from triolet.core.recovery.supervision import MAX_PAUSE_S
from triolet.core.request.lora import Adapter, AdapterSupport
from triolet.core.request.model_info import GenerationDefaults, ModelInfo
from triolet.core.request.pooling_params import PoolingInfo
from triolet.core.step_plan import PooledVectors, RowStart, SampledToken, StepPlan, StepResult
from triolet.errors import ResourceShortage, RunnerDied

FIRST_LEAD, FIRST_TAIL = 40, 45  # tokens from here on are first and second halves of two-byte characters
MAX_REMEMBERED = 80
SLOW_LOAD_S = 5.0  # longer than the limits of the first two attempts, of 2 s and of 4 s
SLOW_LOADS_S = 2 * MIN_LIMIT_S + 4 * MIN_LIMIT_S + 8 * SLOW_LOAD_S  # and what later lives may need
EARLY_END = 0.05  # of runs, after any step


class HalfLetterTokenizer(LetterTokenizer):
    """One token is one letter, or a half of one."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(map(byte_of, token_ids)).decode("utf-8", "replace")


def byte_of(token_id: int) -> int:
    if token_id >= FIRST_TAIL:
        return 0xA0 + token_id - FIRST_TAIL
    return 0xC3 + token_id - FIRST_LEAD if token_id >= FIRST_LEAD else 65 + token_id


class FaultyTokenizer(HalfLetterTokenizer):
    """The same, with the story's faults."""

    def __init__(self, world: World) -> None:
        self.world = world

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.world.reach("tokenizer.decode")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


class FaultyExecutor(FakeExecutor):
    """A fake runner on virtual time that crashes, hangs, says things twice, and says old things again."""

    def __init__(self, world: World, replica: int = 0) -> None:
        story = world.story
        super().__init__(story.num_blocks, story.block_size, story.windows, story.longest)
        self.replica, self.num_steps = replica, 0
        self._load_silence = RareHangLimit(None)
        self._load_s = 0.0
        self.world = world
        self._told: list[SampledToken | PooledVectors] = []

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        weights = self.world.weights
        try:
            async with super().running():
                yield
            if self.world.story.operations:
                await trio.sleep(self.world.story.restart_s / 3)  # a process takes a moment to end
        except BaseException:
            weights.num_exits, weights.has_crashed = weights.num_exits + 1, True
            raise
        finally:
            weights.loaded = None

    def forget_model(self) -> None:
        super().forget_model()
        self.world.note("runner has given up the model")

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        world = self.world
        world.weights.begin(self.folder)
        world.num_lives += 1
        if self.num_lives:
            if world.is_due("shortage.runner"):
                world.num_lives -= 1
                world.hung_s += MAX_PAUSE_S
                raise ResourceShortage("processes or threads", "a process for the model runner")
            await self._load()
            await trio.sleep(world.story.restart_s)
            world.reach("runner.start")
            if weights_of(self.folder):
                world.reach_weights("weights.load", self.folder)
            self.num_blocks = world.num_blocks
        await super().start(on_progress)
        self._adapters = RunnerAdapters(world, self.model)
        self._load_silence.observe(self._load_s)
        world.weights.loaded, world.weights.has_crashed = weights_of(self.folder), False
        world.note(f"runner started with {self.num_blocks} blocks and weights {world.weights.loaded}")
        return attrs.evolve(
            model_info(self.num_blocks, self.block_size, self.windows, self.longest),
            generation=GenerationDefaults(eos_token_ids=world.story.eos_token_ids),
            pooling=PoolingInfo(tasks=("embed",), size=2),
            adapters=AdapterSupport((), "", 8) if world.story.limits.get("enable_lora") else None,
        )

    async def prepare_adapter(self, adapter: Adapter, *, is_pinned: bool) -> None:
        await super().prepare_adapter(adapter, is_pinned=is_pinned)
        self._adapters.prepare(adapter)

    async def _load(self) -> None:
        """Be silent for as long as the load takes, or until the engine has enough of that, as of a real process."""
        world = self.world
        if world.is_due("runner.load_slow"):
            self._load_s = SLOW_LOAD_S
            world.hung_s += SLOW_LOADS_S
        is_hanging = world.is_due("runner.load_hang")
        if is_hanging:
            world.hung_s += MIN_LIMIT_S
        limit_s = self._load_silence.limit_s()
        with trio.move_on_after(math.inf if limit_s is None else limit_s) as patience:
            await trio.sleep(math.inf if is_hanging else self._load_s)
        if patience.cancelled_caught:
            self._load_silence.count_hang()
            raise RunnerDied("made no progress in loading the model", -9, is_hang=True)

    async def compute(self, plan: StepPlan) -> StepResult:
        crashes: list[BaseException] = []
        rows = self._lengths(plan)
        with foreign_errors_kept(crashes.append):
            result = await self._execute(plan)
        if crashes:
            self.world.num_crashes += rows
            raise crashes[0]
        return result

    def _lengths(self, plan: StepPlan) -> list[tuple[RowStart, int]]:
        """The rows of a plan that has not begun, and how many tokens of each are known."""
        known = {row_id: (row.start, len(row.tokens)) for row_id, row in self.model.rows.items()}
        for start in plan.starts:
            known[start.row_id] = (start, len(start.prompt_token_ids) + len(start.output_token_ids))
        return [known[row.row_id] for row in plan.rows]

    async def _execute(self, plan: StepPlan) -> StepResult:
        world = self.world
        world.note(f"step {_shown(plan)}")
        is_still = bool(world.operations.still) and not world.is_closing and self._is_awaited(plan)
        world.expect(
            not is_still, f"computes while {sorted(world.operations.still)} should keep it from that"
        )
        world.reach("runner.execute.before")
        if world.is_due("runner.hang"):
            if (
                plan.step_id == PROOF.step_id
            ):  # a runner that can not start keeps all actors waiting, the scheduler included
                world.hung_s += world.story.limits["step_timeout"]
            await self._hang(plan)
        self.model.most_tokens = 0 if world.is_due("runner.out_of_memory") else world.story.memory_tokens
        # It may touch its blocks at the beginning of its time, or at the end.
        before_s, after_s = world.rng.choice(((0.0, MAX_STEP_S), (MAX_STEP_S / 2, 0.0)))
        await trio.sleep(before_s)
        self._adapters.begin(plan)
        result = self._adapters.judge(plan, self.model.execute(plan))
        self._maybe_die()
        world.reach("runner.execute.middle")
        if result.out_of_memory is None:
            self._check_masks(plan)
            self._reach_poison(plan)
        await trio.sleep(after_s)
        world.reach("runner.execute.after")
        if world.rng.random() < EARLY_END:  # as a runner may that knows no runs
            self.halt()
        return self._told_again(plan, result)

    def _maybe_die(self) -> None:
        self.num_steps += 1
        if self.world.is_armed and (self.replica, self.num_steps) in self.world.story.kills:
            self.world.fired["runner.killed"] += 1
            raise RunnerDied("was killed by SIGKILL", -9)

    def _check_masks(self, plan: StepPlan) -> None:
        """What is sampled of an answer with a form, is sampled from what the form leaves after these very tokens."""
        for planned in plan.rows:
            row = self.model.rows[planned.row_id]
            form = row.start.params.structured_outputs
            if planned.sample and form is not None:
                output = row.tokens[len(row.start.prompt_token_ids) : -1]
                choice = choice_in(form, output, self.world.story.eos_token_ids)
                self.world.expect(
                    planned.mask == choice.mask, f"{row.start.request_id} has another mask after {output}"
                )

    def _is_awaited(self, plan: StepPlan) -> bool:
        return plan.step_id != PROOF.step_id and bool(self.world.custody.awaits(self.replica, plan))

    def _reach_poison(self, plan: StepPlan) -> None:
        is_blamed = self._is_awaited(plan)
        for row in plan.rows:
            start = self.model.rows[row.row_id].start
            self.world.reach_poison(start, row.start + row.num_tokens, self.replica if is_blamed else None)

    async def _hang(self, plan: StepPlan) -> None:
        """What the watchdog of a runner's process makes of one: a crash after `step_timeout`."""
        await trio.sleep(self.world.story.limits["step_timeout"])
        raise RunnerDied("took too long", -9)

    def _told_again(self, plan: StepPlan, result: StepResult) -> StepResult:
        rows = result.rows
        told = [row for row in rows if isinstance(row, SampledToken | PooledVectors)]
        if self.world.is_due("runner.repeats_itself"):
            rows = (*rows, *told)
        if self.world.is_due("runner.repeats_the_past"):
            rows = (*self._told, *rows)
        self._told = [*self._told, *told][-MAX_REMEMBERED:]
        return attrs.evolve(result, rows=rows, elapsed_s=self._elapsed_s(plan))

    def _elapsed_s(self, plan: StepPlan) -> float:
        """What the step says it took, with some noise; the scheduler only compares such numbers with each other."""
        if (costs_s := self.world.story.costs_s) is None:
            return 0.0
        fixed_s, row_s, token_s = costs_s
        num_rows = len(plan.rows)
        whole_s = fixed_s + num_rows * row_s + (plan.num_tokens - num_rows) * token_s
        return whole_s * self.world.rng.uniform(0.9, 1.5)


def _shown(plan: StepPlan) -> str:
    rows = " ".join(
        f"{row.row_id}@{row.start}+{row.num_tokens}{list(row.new_block_ids)}" for row in plan.rows
    )
    starts = " ".join(f"{start.row_id}={start.request_id}/{start.epoch}" for start in plan.starts)
    adapters = "".join(f" {start.slot}<-{start.digest}" for start in plan.adapters)
    return f"{plan.step_id} [{starts}] {rows}{adapters}"
