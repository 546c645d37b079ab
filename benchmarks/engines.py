"""One run through a workload, for each kind of engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
import trio
from peers.peer import Peer
from workloads import Job, Round

from triolet import Engine, RequestOutputKind, SamplingParams


async def run_peer(peer: Peer, jobs: Sequence[Job]) -> Round:
    """Run all requests in the peer's process."""
    told = [(job.prompt, job.num_tokens, job.due_s) for job in jobs]
    answer = await trio.to_thread.run_sync(peer.run, told)
    return Round(answer["elapsed_s"], answer["ttft_s"], answer["itl_s"])


async def run_triolet(engine: Engine, jobs: Sequence[Job]) -> Round:
    """Run all requests, each at its arrival time."""
    begin, trio_begin = time.perf_counter(), trio.current_time()
    ttft_s: list[float] = []
    itl_s: list[float] = []

    async def one(job: Job) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=job.num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        last = None
        await trio.sleep_until(trio_begin + job.due_s)
        async with engine.generate(job.prompt, params) as stream:
            async for _ in stream:
                now = time.perf_counter()
                if last is None:
                    ttft_s.append(now - begin - job.due_s)
                else:
                    itl_s.append(now - last)
                last = now

    async with trio.open_nursery() as nursery:
        for job in jobs:
            nursery.start_soon(one, job)
    return Round(time.perf_counter() - begin, ttft_s, itl_s)


class _Clock(transformers.StoppingCriteria):
    """Streamer that notes the time of each token of the batch; it stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


async def run_transformers(model: Any, jobs: Sequence[Job]) -> Round:
    """Run all requests as one batch, in a thread."""
    return await trio.to_thread.run_sync(_run_transformers, model, jobs)


def _run_transformers(model: Any, jobs: Sequence[Job]) -> Round:
    """Run all requests as one batch, padded on the left."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.zeros(len(jobs), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    clock = _Clock()
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(job.num_tokens for job in jobs),
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    end = time.perf_counter()
    gaps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
    return Round(end - begin, [clock.times[0] - begin] * len(jobs), gaps)
