"""Random histories of requests under the real scheduler: arrivals, ends, aborts, preemptions, steps without memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from tests.model.backends.fake_causal_model import VOCAB_SIZE, FakeCausalModel, expected_logits
from tests.model.test_runner import expected_answer
from triolet.core.journal import Journal, JournalEntry
from triolet.core.request.params import SamplingParams
from triolet.core.request.request import FinishReason, Request
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import StepPlan, StepResult
from triolet.kernels import paged_attention
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.model.interface import ForwardBatch, LayerCache

MAX_MODEL_LEN = 60
SIZES = {"num_blocks": 26, "block_size": 4, "max_num_seqs": 6, "max_model_len": MAX_MODEL_LEN}


class DeviceModel(FakeCausalModel):
    """Reads lengths from the device's tensors, as a captured model must."""

    def __init__(self, roll: random.Random | None = None) -> None:
        super().__init__()
        self.roll, self.num_errors, self.is_captured = roll, 0, False

    def forward_logits(self, batch: ForwardBatch) -> Tensor:
        logits = super().forward_logits(batch)
        # A graph allocates nothing, so that only steps without one run out of memory.
        if (
            self.roll is not None
            and batch.attention.seq_lens_host[0] < MAX_MODEL_LEN
            and self.roll.random() < 0.1
        ):
            self.num_errors += 1
            raise MemoryError("no more")
        return logits

    def _check_hosts_numbers(self, attention: AttentionMetadata) -> None:
        assert len(attention.seq_lens) == len(attention.seq_lens_host) == len(attention.query_lens_host)
        assert all(
            length <= bound
            for length, bound in zip(attention.seq_lens.tolist(), attention.seq_lens_host, strict=True)
        )
        query_lens = attention.cu_query_lens.diff().tolist()
        if attention.has_any_lengths:
            assert sum(query_lens) <= sum(attention.query_lens_host)
            assert all(length <= 1 or length > paged_attention.MAX_FEW_QUERIES for length in query_lens)
        else:
            assert query_lens == list(attention.query_lens_host)

    def _logits_after(self, index: int, layer: LayerCache, attention: AttentionMetadata) -> Tensor:
        ends = attention.cu_query_lens.tolist()
        sequence = next((i for i in range(len(ends) - 1) if index < ends[i + 1]), None)
        if sequence is None:  # of padding in a step without rows
            return torch.zeros(VOCAB_SIZE)
        length = self.length(attention, sequence) - (ends[sequence + 1] - 1 - index)
        blocks = attention.block_tables[sequence, : -(-length // layer.keys.shape[1])].long()
        seen, places = (
            tensor[blocks].flatten(0, 1)[:length, -1, -1].long().tolist()
            for tensor in (layer.keys, layer.values)
        )
        return expected_logits(seen, places)

    def length(self, attention: AttentionMetadata, sequence: int) -> int:
        return int(attention.seq_lens[sequence])


class HostNumbersModel(DeviceModel):
    """Reads the host's numbers, as a captured model must not."""

    def length(self, attention: AttentionMetadata, sequence: int) -> int:
        return attention.seq_lens_host[sequence]


KINDS = (
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0, max_tokens=20, repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingParams(max_tokens=20),
    SamplingParams(max_tokens=20, top_p=0.9, presence_penalty=0.5),
    SamplingParams(max_tokens=20, top_k=5, min_tokens=10),
    SamplingParams(max_tokens=20, min_p=0.2, logit_bias={5: 3.0, 90: -4.0}),
    SamplingParams(max_tokens=20, temperature=0, logprobs=3),
    SamplingParams(max_tokens=20, allowed_token_ids=list(range(0, VOCAB_SIZE, 3))),
)


@attrs.define
class History:
    """What came of one."""

    entries: list[JournalEntry]
    scheduler: Scheduler
    aborted: set[str]

    def check(self) -> None:
        """Hold every answer against the one that is computed alone."""
        for entry in self.entries:
            request = entry.request
            alone = expected_answer(
                request.prompt_token_ids,
                len(entry.output_token_ids),
                request.params,
                seed=request.seed,
                ending=request.ending_token_ids,
            )
            assert list(entry.output_token_ids) == alone
            # a step of one row may find no memory again and again
            is_cut_short = entry.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            assert is_cut_short or len(alone) == request.max_tokens or alone[-1] in request.ending_token_ids


def play(
    seed: int,
    compute: Callable[[StepPlan], StepResult],
    after_step: Callable[[], None],
    num_requests: int = 10,
) -> History:
    """Play one to its end.

    Args:
        seed: of all that is random.
        compute: a step.
        after_step: called after each.
        num_requests: that arrive.
    """
    roll = random.Random(seed)
    journal = Journal()
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=26, block_size=4, max_num_seqs=6, max_num_batched_tokens=17, max_model_len=MAX_MODEL_LEN,
            cache_key=b"k",
        ),
        journal,
    )  # fmt: skip
    common = [roll.randrange(VOCAB_SIZE) for _ in range(9)]
    history = History([], scheduler, set())
    for number in range(num_requests):
        own = [roll.randrange(VOCAB_SIZE) for _ in range(roll.randint(1, 15))]
        request = Request(
            request_id=f"r{number}",
            prompt_token_ids=tuple([*common, *own] if roll.random() < 0.5 else own),
            params=roll.choice(KINDS),
            seed=roll.getrandbits(60),
            max_tokens=20,
            eos_token_ids=(3, 4),
        )
        history.entries.append(journal.open(request))
        scheduler.add(history.entries[-1])
        for _ in range(roll.choice([0, 1, 1, 4])):
            step(scheduler, compute, after_step)
        if roll.random() < 0.15:
            aborted = roll.choice(history.entries)
            if aborted.finish_reason is None:
                history.aborted.add(aborted.request.request_id)
                scheduler.abort(aborted.serial)
    while step(scheduler, compute, after_step):
        pass
    scheduler.check()
    return history


def step(
    scheduler: Scheduler, compute: Callable[[StepPlan], StepResult], after_step: Callable[[], None]
) -> bool:
    if (plan := scheduler.plan_step(0.0)) is None:
        return False
    scheduler.apply(compute(plan), 0.0)
    after_step()
    return True
