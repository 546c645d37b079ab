"""Steps on the device's rows that are planned, and submitted, before the results of the steps before were read."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.model.backends.fake_causal_model import VOCAB_SIZE
from tests.model.cuda.fake_graph import FakeDevice, put_in_place
from tests.model.cuda.histories import KINDS, MAX_MODEL_LEN, SIZES, DeviceModel, History
from tests.model.test_runner import make_runner, start
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import PlanRow, StepPlan
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model import runner as runner_module
from triolet.model.interface import LayerCache
from triolet.model.runner import ModelRunner, PendingStep
from triolet.model.sampling.sampler import NOT_NUMBERS

POISON = 13
# Not taken by the device: the whole step goes another way, and its rows are sent anew afterwards.
ELSEWHERE = SamplingParams(max_tokens=12, temperature=0, prompt_logprobs=1)


def play_ahead(seed: int, runner: ModelRunner, *, poison: int = -1) -> tuple[History, int]:
    """Play requests that arrive, end and are aborted; return them, and the number of steps submitted ahead."""
    roll = random.Random(seed)
    config = SchedulerConfig(
        num_blocks=26, block_size=4, max_num_seqs=6, max_num_batched_tokens=17, max_model_len=MAX_MODEL_LEN,
        cache_key=b"k", async_scheduling=True,
    )  # fmt: skip
    journal = Journal()
    scheduler = Scheduler(config, journal)
    history = History([], scheduler, set())
    pending: list[PendingStep] = []
    plans: list[StepPlan] = []

    def step() -> bool:
        while scheduler.may_plan and (plan := scheduler.plan_step(0.0)) is not None:
            plans.append(plan)
            pending.append(runner.submit(plan))
        if not pending:
            return False
        scheduler.apply(pending.pop(0).result(), 0.0)
        scheduler.check()
        return True

    for number in range(10):
        own = [roll.randrange(VOCAB_SIZE) for _ in range(roll.randint(1, 15))]
        if poison >= 0:
            own = [one for one in own if one != poison] or [1]
            own += [poison] * (number == 3)
        kind = ELSEWHERE if roll.random() < 0.15 else roll.choice(KINDS)
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple(own),
            params=kind,
            seed=roll.getrandbits(60),
            max_tokens=12,
            eos_token_ids=(3, 4),
        )
        history.entries.append(journal.open(request))
        scheduler.add(history.entries[-1])
        for _ in range(roll.choice([0, 1, 1, 4])):
            step()
        if roll.random() < 0.15:
            scheduler.abort(roll.choice(history.entries).serial)
    while step():
        pass
    return history, sum(plan.is_ahead for plan in plans)


@pytest.mark.parametrize("has_graphs", [False, True], ids=["launched", "graphs"])
def test_every_answer_is_the_one_computed_alone_also_without_memory_in_some_steps(
    has_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, model = FakeDevice(), DeviceModel(random.Random(5))
    if has_graphs:
        put_in_place(device, monkeypatch)
        monkeypatch.setattr(model, "forward_logits", device.launched(model.forward_logits))
    runner = make_runner(model, **SIZES, step_device=device)
    if has_graphs:
        runner.capture_graphs()
    num_ahead = 0
    for seed in range(2):
        runner.reset()
        history, number = play_ahead(seed, runner)
        history.check()
        num_ahead += number
    assert num_ahead > 20
    assert model.num_errors > 0


class PoisonedModel(DeviceModel):
    """Gives no numbers after the token `POISON`."""

    def _logits_after(self, index: int, layer: LayerCache, attention: AttentionMetadata) -> Tensor:
        logits = super()._logits_after(index, layer, attention)
        last_token = layer.keys.flatten(0, 1)[attention.slot_mapping[index], -1, -1]
        return torch.full_like(logits, torch.nan) if last_token == POISON else logits


def test_a_row_that_fails_in_a_step_that_was_not_read_fails_alone() -> None:
    runner = make_runner(PoisonedModel(), **SIZES, step_device=FakeDevice())
    failed: list[JournalEntry] = []
    for seed in (12, 13):
        runner.reset()
        history, _ = play_ahead(seed, runner, poison=POISON)
        history.check()
        assert history.entries[3].finish_reason is FinishReason.ERROR
        failed += [entry for entry in history.entries if entry.finish_reason is FinishReason.ERROR]
    last_tokens = {[*entry.request.prompt_token_ids, *entry.output_token_ids][-1] for entry in failed}
    assert last_tokens == {POISON}
    assert {entry.failure for entry in failed} == {NOT_NUMBERS}


class Clock:
    """Time that passes when it is told so."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def test_a_step_that_was_submitted_early_takes_its_time_from_the_result_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(runner_module, "time", clock)
    runner = make_runner(DeviceModel(), **SIZES, step_device=FakeDevice())
    first = runner.submit(StepPlan(1, (), (start(0, [1, 2]),), (PlanRow(0, 0, 2, (0,), sample=True),)))
    clock.now_s += 1
    rows = (PlanRow(0, 2, 1, (), sample=True),)
    second = runner.submit(StepPlan(2, (), (), rows, is_ahead=True))
    assert not (first.is_done or second.is_done)
    clock.now_s += 4
    assert first.result().elapsed_s == 5
    clock.now_s += 2
    second.wait()
    assert second.result().elapsed_s == 2
    clock.now_s += 8
    third = runner.submit(StepPlan(3, (), (), (PlanRow(0, 3, 1, (), sample=True),)))
    clock.now_s += 3
    assert third.result().elapsed_s == 3
