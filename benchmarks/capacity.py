"""Compute what a number of replicas carries and what their front costs, and check the model against the simulation.

    python benchmarks/capacity.py [--replicas N ...] [--prompt TOKENS] [--answer TOKENS] [--hit PART] [--event-us US]
        [--seconds S] [--output FILE]

With x requests a second for each replica, prompts of L new tokens and answers of A tokens, `running = x A t` answers
decode beside each prompt (t seconds a token), and a replica is busy with prompts for the part

    x L (1 - hit) (1 + running / slowdown) / rate

of its time. It is saturated where that is 1. All N replicas bring the front N x decisions and N x A events a second; it
is saturated where these take a whole core. A decision is measured, an event is `--event-us` (`benchmarks/router.py`).

The check plays requests at random moments over the simulated replicas of `benchmarks/dispatch.py`, at 0.8 and at 1.25
times the saturating rate: the busy part must be the model's within a tenth, first tokens must take about as long from
beginning to end below saturation, and longer and longer above it. Prints one JSON line for each number of replicas;
exits with 1 if the model does not hold.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from statistics import mean, median
from typing import Any

import attrs
from common import machine
from dispatch import DECODE_SLOWDOWN, DECODE_TOKEN_S, PREFILL_TOKENS_PER_S, Arrival, Simulation

BELOW, ABOVE = 0.8, 1.25  # of the saturating rate
EVENT_US = 120.0  # that a router takes for an event, as `benchmarks/router.py` measured


@attrs.frozen
class Work:
    """What clients ask for, in the mean of all requests."""

    num_tokens: float  # of a prompt
    num_answer_tokens: float
    hit: float  # part of a prompt that prefix caches hold

    def busy(self, rate: float) -> float:
        """Return the part of its time that a replica computes prompts, at so many requests a second for each."""
        running = rate * self.num_answer_tokens * DECODE_TOKEN_S
        new_tokens = self.num_tokens * (1 - self.hit)
        return rate * new_tokens / PREFILL_TOKENS_PER_S * (1 + running / DECODE_SLOWDOWN)

    def saturating_rate(self) -> float:
        """Return the requests a second at which a replica has no time left."""
        linear = self.num_tokens * (1 - self.hit) / PREFILL_TOKENS_PER_S
        square = linear * self.num_answer_tokens * DECODE_TOKEN_S / DECODE_SLOWDOWN
        return (math.sqrt(linear * linear + 4 * square) - linear) / (2 * square) if square else 1 / linear

    def front_cores(self, num_requests_per_s: float, decision_us: float, event_us: float) -> float:
        """Return the cores that a front needs for so many requests a second."""
        return num_requests_per_s * (decision_us + self.num_answer_tokens * event_us) / 1e6


class MeasuredSimulation(Simulation):
    """Simulation that notes how long its replicas compute prompts, and when first tokens come."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__("triolet", num_replicas)
        self.busy_s = 0.0
        self.first_tokens_s: list[float] = []

    def compute(self, number: int, arrival: Arrival, chosen: int, num_new: int, now_s: float) -> float:
        began_s = max(now_s, self.replicas[chosen].free_at_s)
        done_s = super().compute(number, arrival, chosen, num_new, now_s)
        self.busy_s += done_s - began_s
        self.first_tokens_s.append(done_s - now_s)
        return done_s


def requests(work: Work, num_per_s: float, seconds: float, seed: int) -> list[Arrival]:
    """Return requests at random moments, with lengths between a half and one and a half of the mean."""
    draw, now_s, found = random.Random(seed), 0.0, []
    while (now_s := now_s + draw.expovariate(num_per_s)) < seconds:
        num_new = round(work.num_tokens * (1 - work.hit) * draw.uniform(0.5, 1.5))
        found.append(Arrival(now_s, num_new, round(work.num_answer_tokens * draw.uniform(0.5, 1.5)), ()))
    return found


def quarter_means(times_s: list[float]) -> list[float]:
    """Return the mean of each quarter of the times."""
    size = len(times_s) // 4
    return [mean(times_s[start : start + size]) for start in range(0, 4 * size, size)]


def measure(work: Work, num_replicas: int, seconds: float, event_us: float) -> dict[str, Any]:
    """Return the model's figures, and those of the simulation."""
    rate = work.saturating_rate()
    line: dict[str, Any] = {"bench": "capacity", "replicas": num_replicas, **attrs.asdict(work)}
    decision_us = 0.0
    for name, part in (("below", BELOW), ("above", ABOVE)):
        simulation = MeasuredSimulation(num_replicas)
        simulation.run(requests(work, part * rate * num_replicas, seconds, num_replicas), 1.0)
        # above saturation the queue is computed after the last arrival
        line[f"{name}_busy"] = round(min(work.busy(part * rate), 1.0), 3)
        span_s = max(seconds, *(each.free_at_s for each in simulation.replicas))
        line[f"{name}_busy_simulated"] = round(simulation.busy_s / (num_replicas * span_s), 3)
        line[f"{name}_ttft_s"] = [round(each, 3) for each in quarter_means(simulation.first_tokens_s)]
        decision_us = decision_us or median(simulation.decisions_us)
    num_per_s = rate * num_replicas
    return {
        **line,
        "requests_per_s": round(num_per_s, 1),
        "tokens_per_s": round(num_per_s * work.num_answer_tokens),
        "decision_us": round(decision_us, 1),
        "event_us": event_us,
        "front_cores": round(work.front_cores(num_per_s, decision_us, event_us), 2),
        "holds": holds(line),
    }


def holds(line: dict[str, Any]) -> bool:
    """Return True if the simulation does what the model says."""
    below, above = line["below_ttft_s"], line["above_ttft_s"]
    is_as_busy = all(
        abs(line[f"{name}_busy_simulated"] / line[f"{name}_busy"] - 1) < 0.1 for name in ("below", "above")
    )
    # what waits grows by a quarter of the time that passes, and so does the time of a first token
    is_growing = above[-1] - above[0] > 4 * max(0.0, below[-1] - below[0])
    return is_as_busy and is_growing and above[-1] > 2 * below[-1]


def main() -> None:
    """Compute, check, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=float, default=8000.0)
    parser.add_argument("--answer", type=float, default=200.0)
    parser.add_argument("--hit", type=float, default=0.0)
    parser.add_argument("--event-us", type=float, default=EVENT_US)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the simulated time")
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the lines go"
    )
    options = parser.parse_args()
    work = Work(options.prompt, options.answer, options.hit)
    is_right = True
    for num_replicas in options.replicas:
        line = measure(work, num_replicas, options.seconds, options.event_us)
        is_right = is_right and line["holds"]
        print(json.dumps(line | machine()), file=options.output, flush=True)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
