"""Replay a trace of prompts over simulated replicas, with triolet's dispatcher and with the rules of others.

    python benchmarks/dispatch.py TRACE [--half second] [--output results.jsonl]

The trace is JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for each 512 tokens
of the prompt, as Mooncake publishes them (github.com/kvcache-ai/Mooncake, FAST25-release/traces; Apache-2.0). It is
played faster than it was recorded, so that the replicas are near saturation.

A replica computes prompts first come first served at 20,000 tokens a second, divided by 1 + running / 64 for the
answers that it decodes meanwhile (20 ms a token), less what its cache of 780 blocks holds (least recently used, 400,000
tokens).

The dispatcher is told only when first tokens come and answers end; it learns the costs. Its index is fed in two ways:
`triolet` by the caches themselves, as for replicas inside one engine, `triolet-router` by what was sent, as for a
router of engines. The other rules read tokens in queue and in use, answers included, from the replicas, without any
delay, and hits from an exact index; what they do not do is to expect a time:

- round_robin, p2c (the less loaded one of two), least (loaded): no prefix.
- hash: a consistent hash of the second block (nearly all share the first).
- cache_aware: sglang-gateway, vllm-router: above a match of 0.3 the best match, else the fewest requests; the fewest
  requests, too, where they differ by more than 64 and 1.5 times.
- dynamo: prefill blocks to compute plus blocks in use. llmd: 3 x prefix + 2 x queue + 2 x KV use.

Constants of the dispatcher were chosen on the first half of the trace; `--half second` is kept back for measuring. A
line has the part of prompt tokens found in caches, the time to first token in seconds, the time of a decision in
microseconds (`decision_*`, on this machine), and for triolet's lines `hit_of_best` and `*_of_best`: the ratio to the
best of the other rules in that figure.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import random
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from common import machine, percentiles, report

from triolet.core.dispatch.dispatcher import Dispatcher
from triolet.core.dispatch.prefix_index import PrefixIndex

BLOCK = 512
CACHE_BLOCKS = 780
PREFILL_TOKENS_PER_S = 20_000.0
DECODE_TOKEN_S = 0.02
DECODE_SLOWDOWN = 64  # answers that halve the speed of prompts
SITUATIONS = ((8, 1.0), (8, 2.0), (64, 8.0), (64, 14.0))


@attrs.frozen
class Arrival:
    """A line of the trace."""

    at_s: float
    num_tokens: int
    num_answer_tokens: int
    hashes: tuple[bytes, ...]


def read_trace(path: Path, half: str) -> list[Arrival]:
    """Return the arrivals of the whole trace or of one half, from 0 s on."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    middle = len(lines) // 2
    lines = {"whole": lines, "first": lines[:middle], "second": lines[middle:]}[half]
    began_ms = lines[0]["timestamp"]
    return [
        Arrival(
            (line["timestamp"] - began_ms) / 1000,
            line["input_length"],
            line["output_length"],
            tuple(number.to_bytes(8, "big") for number in line["hash_ids"]),
        )
        for line in lines
    ]


@attrs.define(eq=False)
class Replica:
    """A simulated replica."""

    cache: OrderedDict[bytes, None] = attrs.field(factory=OrderedDict)
    free_at_s: float = 0.0
    num_running: int = 0
    num_inflight: int = 0
    num_queued_tokens: int = 0
    num_active_tokens: int = 0

    def num_hits(self, hashes: tuple[bytes, ...]) -> int:
        """Return the number of leading blocks in the cache."""
        return next((depth for depth, each in enumerate(hashes) if each not in self.cache), len(hashes))

    def publish(self, hashes: tuple[bytes, ...]) -> Iterator[bytes]:
        """Put blocks into the cache; iterate over those that are evicted."""
        for each in hashes:
            self.cache[each] = None
            self.cache.move_to_end(each)
        while len(self.cache) > CACHE_BLOCKS:
            yield self.cache.popitem(last=False)[0]


# From an arrival and the hits of all replicas to a replica.
Rule = Callable[[Arrival, list[int]], int]


def rule_of(name: str, replicas: list[Replica], dice: random.Random) -> Rule:
    """Return one of the others' rules."""
    numbers = range(len(replicas))

    def load(replica: int) -> int:
        return replicas[replica].num_queued_tokens + replicas[replica].num_active_tokens

    def fewest_requests() -> int:
        return min(numbers, key=lambda each: replicas[each].num_inflight)

    turn = -1

    def round_robin(arrival: Arrival, hits: list[int]) -> int:
        nonlocal turn
        turn = (turn + 1) % len(replicas)
        return turn

    def p2c(arrival: Arrival, hits: list[int]) -> int:
        return min((dice.randrange(len(replicas)), dice.randrange(len(replicas))), key=load)

    def least(arrival: Arrival, hits: list[int]) -> int:
        return min(numbers, key=load)

    def hash_(arrival: Arrival, hits: list[int]) -> int:
        key = arrival.hashes[min(1, len(arrival.hashes) - 1)]
        return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % len(replicas)

    def cache_aware(arrival: Arrival, hits: list[int]) -> int:
        counts = [each.num_inflight for each in replicas]
        best = max(numbers, key=hits.__getitem__)
        if max(counts) - min(counts) > 64 and max(counts) > 1.5 * min(counts):
            return fewest_requests()
        return best if hits[best] * BLOCK / arrival.num_tokens > 0.3 else fewest_requests()

    def dynamo(arrival: Arrival, hits: list[int]) -> int:
        def cost(each: int) -> tuple[float, float]:
            prefill = replicas[each].num_queued_tokens + arrival.num_tokens - hits[each] * BLOCK
            return (prefill + replicas[each].num_active_tokens) / BLOCK, dice.random()

        return min(numbers, key=cost)

    def llmd(arrival: Arrival, hits: list[int]) -> int:
        queue = max(1, *(each.num_queued_tokens for each in replicas))
        active = max(1, *(each.num_active_tokens for each in replicas))

        def score(each: int) -> tuple[float, float]:
            prefix = hits[each] * BLOCK / arrival.num_tokens
            idle = 1 - replicas[each].num_queued_tokens / queue
            free = 1 - replicas[each].num_active_tokens / active
            return 3 * prefix + 2 * idle + 2 * free, dice.random()

        return max(numbers, key=score)

    rules: dict[str, Rule] = {
        "round_robin": round_robin,
        "p2c": p2c,
        "least": least,
        "hash": hash_,
        "cache_aware": cache_aware,
        "dynamo": dynamo,
        "llmd": llmd,
    }
    return rules[name]


OTHERS = ("round_robin", "p2c", "least", "hash", "cache_aware", "dynamo", "llmd")
OURS = ("triolet", "triolet-router")


@attrs.define(eq=False)
class Simulation:
    """Replay of a trace under one policy."""

    policy: str
    num_replicas: int
    replicas: list[Replica] = attrs.field(init=False)
    index: PrefixIndex = attrs.field(init=False)
    dispatcher: Dispatcher | None = attrs.field(init=False, default=None)
    rule: Rule = attrs.field(init=False)
    events: list[tuple[float, int, int, int]] = attrs.field(
        factory=list
    )  # time, kind, number of arrival, replica
    new_tokens: dict[int, int] = attrs.field(factory=dict)
    decisions_us: list[float] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.replicas = [Replica() for _ in range(self.num_replicas)]
        if self.policy in OURS:
            is_exact = self.policy == "triolet"
            self.dispatcher = Dispatcher(BLOCK, max_blocks=CACHE_BLOCKS, learns_from_placements=not is_exact)
            for replica in range(self.num_replicas):
                self.dispatcher.add_replica(replica)
            self.index = self.dispatcher.index if is_exact else PrefixIndex()
        else:
            self.index = PrefixIndex()
            self.rule = rule_of(self.policy, self.replicas, random.Random(0))

    def run(self, trace: list[Arrival], speed: float) -> dict[str, Any]:
        """Replay the trace, so many times faster; return its figures."""
        first_tokens_s, num_hit_tokens = [], 0
        for number, arrival in enumerate(trace):
            now_s = arrival.at_s / speed
            self.advance(now_s, trace)
            chosen = self.choose(number, arrival, now_s)
            replica = self.replicas[chosen]
            hit_tokens = min(replica.num_hits(arrival.hashes) * BLOCK, arrival.num_tokens - 1)
            num_hit_tokens += hit_tokens
            done_s = self.compute(number, arrival, chosen, arrival.num_tokens - hit_tokens, now_s)
            first_tokens_s.append(done_s - now_s)
        ranks = percentiles(first_tokens_s)
        costs = percentiles(self.decisions_us)
        return {
            "hit": num_hit_tokens / sum(arrival.num_tokens for arrival in trace),
            "ttft_mean_s": sum(first_tokens_s) / len(first_tokens_s),
            **{f"ttft_{rank}_s": value for rank, value in ranks.items()},
            "within_1s": sum(each <= 1 for each in first_tokens_s) / len(first_tokens_s),
            "decision_p50_us": costs["p50"],
            "decision_p90_us": costs["p90"],
            "decision_p99_us": costs["p99"],
        }

    def choose(self, number: int, arrival: Arrival, now_s: float) -> int:
        """Return the replica of an arrival, and measure how long that takes."""
        began = time.perf_counter()
        if self.dispatcher is not None:
            placement = self.dispatcher.place(str(number), arrival.hashes, arrival.num_tokens, now_s)
            assert placement is not None
            chosen = placement.replica
        else:
            found = self.index.leading(arrival.hashes)
            chosen = self.rule(arrival, [found.get(each, 0) for each in range(self.num_replicas)])
        self.decisions_us.append(1e6 * (time.perf_counter() - began))
        return chosen

    def compute(self, number: int, arrival: Arrival, chosen: int, num_new: int, now_s: float) -> float:
        """Queue a prompt at a replica; return the time of its first token."""
        replica = self.replicas[chosen]
        rate = PREFILL_TOKENS_PER_S / (1 + replica.num_running / DECODE_SLOWDOWN)
        done_s = replica.free_at_s = max(now_s, replica.free_at_s) + num_new / rate
        replica.num_inflight += 1
        replica.num_queued_tokens += num_new
        replica.num_active_tokens += arrival.num_tokens + arrival.num_answer_tokens
        self.new_tokens[number] = num_new
        heapq.heappush(self.events, (done_s, 0, number, chosen))
        heapq.heappush(self.events, (done_s + arrival.num_answer_tokens * DECODE_TOKEN_S, 1, number, chosen))
        for evicted in replica.publish(arrival.hashes):
            self.index.discard(chosen, evicted)
        if self.dispatcher is None or self.index is self.dispatcher.index:
            for each in arrival.hashes:
                self.index.add(chosen, each)
        return done_s

    def advance(self, now_s: float, trace: list[Arrival]) -> None:
        """Let first tokens come and answers end until now."""
        while self.events and self.events[0][0] <= now_s:
            at_s, kind, number, chosen = heapq.heappop(self.events)
            replica = self.replicas[chosen]
            if kind == 0:
                replica.num_queued_tokens -= self.new_tokens.pop(number)
                replica.num_running += 1
            else:
                replica.num_running -= 1
                replica.num_inflight -= 1
                replica.num_active_tokens -= trace[number].num_tokens + trace[number].num_answer_tokens
            if self.dispatcher is not None and kind == 0:
                self.dispatcher.first_token(str(number), at_s)
            elif self.dispatcher is not None:
                self.dispatcher.finish(str(number), at_s)


def compare(lines: list[dict[str, Any]]) -> None:
    """Add to triolet's lines the ratios to the best of the other rules."""
    groups: defaultdict[tuple[int, float], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["replicas"], line["speed"]].append(line)
    for group in groups.values():
        others = [line for line in group if line["policy"] in OTHERS]
        for line in (line for line in group if line["policy"] in OURS and others):
            line["hit_of_best"] = line["hit"] / max(other["hit"] for other in others)
            for name in ("ttft_mean", "ttft_p90", "ttft_p99"):
                line[f"{name}_of_best"] = line[f"{name}_s"] / min(other[f"{name}_s"] for other in others)


def main() -> None:
    """Parse, replay, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--half", choices=("first", "second", "whole"), default="second")
    parser.add_argument("--policy", nargs="+", choices=OTHERS + OURS, default=[*OTHERS, *OURS])
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, arguments.half)
    lines = [
        {
            "bench": "dispatch",
            "policy": policy,
            "replicas": num_replicas,
            "speed": speed,
            "half": arguments.half,
            "requests": len(trace),
            **Simulation(policy, num_replicas).run(trace, speed),
            **machine(),
        }
        for num_replicas, speed in SITUATIONS
        for policy in arguments.policy
    ]
    compare(lines)
    columns = ("policy", "replicas", "speed", "hit", "ttft_mean_s", "ttft_p90_s", "ttft_p99_s", "within_1s")
    ratios = ("hit_of_best", "ttft_mean_of_best", "ttft_p90_of_best", "ttft_p99_of_best", "decision_p99_us")
    report(lines, (*columns, *ratios), arguments.output)


if __name__ == "__main__":
    main()
