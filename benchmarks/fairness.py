"""Measure the time to first token of a client with few short requests beside one with a hundred long ones, under
`fair`.

    python benchmarks/fairness.py [--policy fair fcfs] [--factor none] [--rounds 3] [--output results.jsonl]

The model is triolet-nano and the configuration the default one, but for the policy; the light client's prompts are
texts, so its time to first token includes the tokenizer's. In each round it asks alone, pausing at random between its
requests; then a hundred requests of another client run, and it asks the same way beside them. A line has the median and
90th percentile of its times to first token, in milliseconds, of both, the ratio of the medians of each round, the
tokens per second of the other client beside it and without it, and Jain's fairness index over the tokens of both while
the light client, too, asks for more than it gets: with a hundred concurrent short requests. One JSON line per policy,
then a table.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio
from common import machine, median, percentiles, report

import triolet
from triolet import Engine, RequestOutputKind, SamplingParams

NUM_LONG, LONG_PROMPT, LONG_ANSWER = 100, 64, 1500
SHORT_ANSWER, NUM_LANES = 8, 100
MOST_PAUSE_S = 0.1


def answer(max_tokens: int, seed: int) -> SamplingParams:
    """Return parameters of an answer of so many tokens, drawn."""
    return SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, seed=seed, output_kind=RequestOutputKind.DELTA
    )


@attrs.define
class Round:
    """Results of one round: milliseconds, and the heavy client's tokens per second."""

    alone_ms: list[float]
    beside_ms: list[float] = attrs.field(factory=list)
    hog_alone: float = 0.0
    hog_beside: float = 0.0
    jain: float = 0.0

    @property
    def ratio(self) -> float:
        """Ratio of the medians."""
        return median(self.beside_ms) / median(self.alone_ms)


@attrs.define
class Clients:
    """The light and the heavy client of one engine.

    Args:
        engine: they share it.
        dice: pauses and prompts.
        tokens: that each has had computed.
    """

    engine: Engine
    dice: random.Random
    tokens: Counter[str] = attrs.field(factory=Counter)

    async def short(self) -> float:
        """Send a short request of the light client; return the milliseconds to its first token."""
        began, first = time.perf_counter(), None
        prompt = f"Tell me something about number {self.dice.randrange(10**6)}, please."
        params = answer(SHORT_ANSWER, self.dice.randrange(10**6))
        async with self.engine.generate(prompt, params, client="light") as stream:
            async for output in stream:
                if first is None:
                    first = time.perf_counter()
                    self.tokens["light"] += len(output.prompt_token_ids or ())
                self.tokens["light"] += len(output.outputs[0].token_ids)
        assert first is not None
        return 1e3 * (first - began)

    async def visits(self, count: int) -> list[float]:
        """Send short requests one after the other, at random points of whatever else runs."""
        taken = []
        for _ in range(count):
            await trio.sleep(self.dice.uniform(0, MOST_PAUSE_S))
            taken.append(await self.short())
        return taken

    async def long(self) -> None:
        """Send a long request of the heavy client, and then the next."""
        vocab_size = self.engine.model_info.vocab_size
        while True:
            prompt = [self.dice.randrange(vocab_size) for _ in range(LONG_PROMPT)]
            params = answer(LONG_ANSWER, self.dice.randrange(10**6))
            async with self.engine.generate(prompt, params, client="hog") as stream:
                async for output in stream:
                    tokens = output.outputs[0].token_ids
                    self.tokens["hog"] += len(tokens)

    @asynccontextmanager
    async def hog(self) -> AsyncIterator[None]:
        """Keep a hundred long requests running."""
        async with trio.open_nursery() as nursery:
            for _ in range(NUM_LONG):
                nursery.start_soon(self.long)
            while self.engine.statistics().num_requests_running < NUM_LONG:  # noqa: ASYNC110
                await trio.sleep(0.01)
            yield
            nursery.cancel_scope.cancel()

    async def tokens_per_s(self, seconds: float) -> float:
        """Measure the heavy client's rate without the other one."""
        before, began = self.tokens["hog"], time.perf_counter()
        await trio.sleep(seconds)
        return (self.tokens["hog"] - before) / (time.perf_counter() - began)

    async def crowd(self, seconds: float) -> float:
        """Return Jain's index while the light client sends short requests without end."""

        async def lane() -> None:
            while True:
                await self.short()

        async with trio.open_nursery() as nursery:
            for _ in range(NUM_LANES):
                nursery.start_soon(lane)
            await trio.sleep(0.5)
            self.tokens.clear()
            await trio.sleep(seconds)
            nursery.cancel_scope.cancel()
        shares = [self.tokens["hog"], self.tokens["light"]]
        return sum(shares) ** 2 / (2 * sum(share**2 for share in shares))


async def run_round(clients: Clients, num_visits: int) -> Round:
    """Measure the light client alone, beside the heavy one, and both at full load."""
    taken = Round(await clients.visits(num_visits))
    async with clients.hog():
        before, began = clients.tokens["hog"], time.perf_counter()
        taken.beside_ms = await clients.visits(num_visits)
        taken.hog_beside = (clients.tokens["hog"] - before) / (time.perf_counter() - began)
        await trio.sleep(LINGERS_S)
        taken.hog_alone = await clients.tokens_per_s(1.0)
    async with clients.hog():
        taken.jain = await clients.crowd(4.0)
    return taken


LINGERS_S = 6.0  # longer than steps are kept short for a client that has left


async def measure(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the line of a policy."""
    fields: dict[str, Any] = {"policy": policy}
    if arguments.factor is not None:
        fields["fair_ttft_factor"] = None if arguments.factor == "none" else float(arguments.factor)
    async with triolet.open_engine(**fields) as engine:
        clients = Clients(engine, random.Random(0))
        await clients.visits(10)  # first times
        rounds = [await run_round(clients, arguments.visits) for _ in range(arguments.rounds)]
    alone = percentiles([each for taken in rounds for each in taken.alone_ms])
    beside = percentiles([each for taken in rounds for each in taken.beside_ms])
    return {
        "bench": "fairness",
        "policy": policy,
        "fair_ttft_factor": engine.config.fair_ttft_factor,
        "alone_p50_ms": alone["p50"],
        "alone_p90_ms": alone["p90"],
        "beside_p50_ms": beside["p50"],
        "beside_p90_ms": beside["p90"],
        "ratio": median([taken.ratio for taken in rounds]),
        "ratios": [round(taken.ratio, 2) for taken in rounds],
        "ratio_bound": 2.0,
        "jain": median([taken.jain for taken in rounds]),
        "jain_bound": 0.95,
        "hog_tokens_per_s": median([taken.hog_beside for taken in rounds]),
        "hog_alone_tokens_per_s": median([taken.hog_alone for taken in rounds]),
        **machine(),
    }


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", nargs="+", choices=("fair", "fcfs"), default=["fair"])
    parser.add_argument("--factor", help="fair_ttft_factor; by default the configuration's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--visits", type=int, default=25, help="of the light client, alone and beside the hog"
    )
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    lines = [trio.run(measure, policy, arguments) for policy in arguments.policy]
    columns = (
        "policy",
        "fair_ttft_factor",
        "alone_p50_ms",
        "beside_p50_ms",
        "beside_p90_ms",
        "ratio",
        "jain",
    )
    report(lines, (*columns, "hog_tokens_per_s", "hog_alone_tokens_per_s"), arguments.output)


if __name__ == "__main__":
    main()
