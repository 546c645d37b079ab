"""Open-loop load: requests are sent when they are due, however many are unanswered, and their times are summed up.

The gaps between requests are exponential, so arrivals are a Poisson process, as those of many independent users are.
Latencies count from when a request was due: a client that is late must not make the server look fast.

Source: Schroeder, Wierman, Harchol-Balter, "Open Versus Closed: A Cautionary Tale", NSDI 2006.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import attrs
import trio

from triolet.cli.bench import percentiles_ms
from triolet.cli.load_test.targets import Timeline
from triolet.client.address import ServerError

Ask = Callable[[str, Timeline], Awaitable[None]]
"""Sends a prompt, and notes the arrival of the answer."""

# Short common words, which most tokenizers take as one token each with the space before.
WORDS: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business side kind head house friend father power hour game "
    "line end member law car city community name team minute idea body back parent face level office door health art"
).split()


@attrs.frozen(kw_only=True)
class Load:
    """Requests of one round."""

    num_prompts: int
    input_len: int  # words in each prompt, drawn at random, so that no two prompts begin alike
    rate: float  # requests a second; infinite sends all at once
    seed: int = 0

    def due_times(self) -> list[float]:
        """Return when each request is due, seconds after the start, in order."""
        if self.rate == float("inf"):
            return [0.0] * self.num_prompts
        dice, now, due = random.Random(f"{self.seed} gaps"), 0.0, []
        for _ in range(self.num_prompts):
            due.append(now)
            now += dice.expovariate(self.rate)
        return due

    def prompts(self, salt: str = "") -> list[str]:
        """Return the prompts; those of another salt share no beginning with them, for the prefix cache's sake."""
        dice = random.Random(f"{self.seed} {salt}")
        return [" ".join(dice.choices(WORDS, k=self.input_len)) for _ in range(self.num_prompts)]


async def measure(
    ask: Ask,
    prompts: Sequence[str],
    due_times: Sequence[float],
    on_change: Callable[[Sequence[Timeline]], None] = lambda timelines: None,
) -> list[Timeline]:
    """Send every request when it is due, and return what came of each.

    Args:
        on_change: called with the requests so far when one was sent or has ended.
    """
    timelines: list[Timeline] = []

    async def one(prompt: str, timeline: Timeline) -> None:
        try:
            await ask(prompt, timeline)
        except ServerError as error:
            timeline.error = str(error)
        on_change(timelines)

    start_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for prompt, due in zip(prompts, due_times, strict=True):
            await trio.sleep_until(start_s + due)
            timeline = Timeline(start_s + due, sent_s=trio.current_time())
            timelines.append(timeline)
            nursery.start_soon(one, prompt, timeline)
            on_change(timelines)
    return timelines


def summary(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the figures of a round by name: rates per second, latencies in milliseconds."""
    done = [one for one in timelines if one.end_s is not None]
    ends = [one.end_s for one in done if one.end_s is not None]
    duration_s = max(ends) - timelines[0].due_s if ends else 0.0
    num_prompt, num_output = (
        sum(one.num_prompt_tokens for one in done),
        sum(one.num_output_tokens for one in done),
    )
    return {
        "completed": len(done),
        "failed": len(timelines) - len(done),
        "errors": dict(Counter(one.error for one in timelines if one.error is not None).most_common(3)),
        "duration_s": round(duration_s, 4),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "request_throughput": _per_second(len(done), duration_s),
        "output_throughput": _per_second(num_output, duration_s),
        "total_token_throughput": _per_second(num_prompt + num_output, duration_s),
        "ttft_ms": percentiles_ms([one.piece_s[0] - one.due_s for one in done if one.piece_s]),
        "tpot_ms": percentiles_ms(list(_times_per_output_token(done))),
        "itl_ms": percentiles_ms([gap for one in done for gap in _gaps(one.piece_s)]),
        "e2e_ms": percentiles_ms([end - one.due_s for end, one in zip(ends, done, strict=True)]),
        "sent_late_ms": percentiles_ms([one.sent_s - one.due_s for one in timelines]),
    }


def _per_second(number: int, duration_s: float) -> float:
    return round(number / duration_s, 3) if duration_s > 0 else 0.0


def _gaps(times: Sequence[float]) -> Iterable[float]:
    return (later - earlier for earlier, later in itertools.pairwise(times))


def _times_per_output_token(timelines: Iterable[Timeline]) -> Iterable[float]:
    for one in timelines:
        if one.num_output_tokens > 1 and one.piece_s:
            yield (one.piece_s[-1] - one.piece_s[0]) / (one.num_output_tokens - 1)
