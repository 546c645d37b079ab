"""`triolet bench`: speed of a model on this machine, measured through the public interface of the engine."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import attrs
import trio

from triolet.cli.interrupts import Interrupts
from triolet.cli.loading import opened
from triolet.config.engine import EngineConfig
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.engine.engine import Engine

PERCENTILES = (50, 90, 99)


@attrs.frozen(kw_only=True)
class Work:
    """Load on the engine."""

    num_prompts: int  # requests in all
    input_len: int  # tokens in each prompt, drawn at random, so that the prefix cache has no effect
    output_len: int  # tokens in each answer; stop conditions are off
    concurrency: int  # most requests at a time
    seed: int = 0


@attrs.define
class Times:
    """Measurements, seconds."""

    total_s: float = 0.0  # from the first request to the last token
    ttft_s: list[float] = attrs.field(factory=list)  # time to first token, one per request
    itl_s: list[float] = attrs.field(factory=list)  # time between one output and the next, of all requests
    num_output_tokens: int = 0  # tokens of all answers

    def summary(self, work: Work) -> dict[str, Any]:
        """Return the figures by name: rates per second, latencies in milliseconds."""
        num_tokens = work.num_prompts * work.input_len + self.num_output_tokens
        return {
            **attrs.asdict(work),
            "duration_s": round(self.total_s, 4),
            "request_throughput": round(work.num_prompts / self.total_s, 3),
            "output_throughput": round(self.num_output_tokens / self.total_s, 2),
            "total_token_throughput": round(num_tokens / self.total_s, 2),
            "output_tokens": self.num_output_tokens,
            "ttft_ms": percentiles_ms(self.ttft_s),
            "itl_ms": percentiles_ms(self.itl_s),
        }


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return the percentiles by name, milliseconds; an empty dict without values."""
    # Nearest rank: the smallest value that at least so many percent do not exceed.
    ordered = sorted(seconds)
    return {
        f"p{share}": round(1e3 * ordered[math.ceil(share / 100 * len(ordered)) - 1], 3)
        for share in PERCENTILES
        if ordered
    }


async def measure(engine: Engine, work: Work) -> Times:
    """Run the requests once and return the measurements."""
    times = Times()
    params = SamplingParams(
        temperature=0.0,
        max_tokens=work.output_len,
        ignore_eos=True,
        detokenize=engine.tokenizer is not None,
        output_kind=RequestOutputKind.DELTA,
    )
    dice = random.Random(work.seed)
    vocab_size = engine.model_info.vocab_size
    limiter = trio.CapacityLimiter(work.concurrency)

    async def ask(prompt: list[int]) -> None:
        async with limiter:
            before = trio.current_time()
            is_first = True
            async with engine.generate(prompt, params) as stream:
                async for output in stream:
                    now = trio.current_time()
                    (times.ttft_s if is_first else times.itl_s).append(now - before)
                    before, is_first = now, False
                    times.num_output_tokens += len(output.outputs[0].token_ids)

    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(work.num_prompts):
            nursery.start_soon(ask, [dice.randrange(vocab_size) for _ in range(work.input_len)])
    times.total_s = trio.current_time() - started
    return times


def lines(model: str, summary: dict[str, Any]) -> list[str]:
    """Return the lines of the printed report."""
    waits = [
        f"{name}, ms".ljust(24) + " · ".join(f"{share} {value:,.1f}" for share, value in summary[key].items())
        for name, key in (("time to first token", "ttft_ms"), ("between outputs", "itl_ms"))
        if summary[key]
    ]
    prompts = f"{summary['num_prompts']} prompts of {summary['input_len']} tokens"
    return [
        f"{model}: {prompts}, answers of {summary['output_len']}, {summary['concurrency']} at a time",
        f"{'duration, s':24}{summary['duration_s']:,.2f}",
        f"{'requests/s':24}{summary['request_throughput']:,.2f}",
        f"{'output tokens/s':24}{summary['output_throughput']:,.1f}",
        f"{'all tokens/s':24}{summary['total_token_throughput']:,.1f}",
        *waits,
    ]


def run(work: Work, config: EngineConfig, *, as_json: bool) -> None:
    """Measure, after a short warm-up round, and print the figures."""

    async def body(interrupts: Interrupts) -> None:
        async with AsyncExitStack() as stack:
            engine = await opened(stack, config)
            few = min(work.num_prompts, work.concurrency, 4)
            await measure(engine, attrs.evolve(work, num_prompts=few, concurrency=few, seed=work.seed + 1))
            summary = (await measure(engine, work)).summary(work)
        if as_json:
            print(json.dumps({"model": engine.model_name, **summary}, ensure_ascii=False), flush=True)
        else:
            sys.stdout.write("\n".join(lines(engine.model_name, summary)) + "\n")

    Interrupts().run(body)
