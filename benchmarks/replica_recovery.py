"""Kill one of two replicas repeatedly under many streams; measure wrong tokens, and the gaps of the other's streams.

    python benchmarks/replica_recovery.py [--kills N] [--seed N] [--streams N] [--tokens N] [--model FOLDER]
        [--output FILE]

The streams are read twice: from one model without kills, and from two replicas of which one, drawn at random, is
killed with -9 at a random moment, N times; the next kill waits until both replicas live. A stream that has ended is
requested again until all kills are done. Half of the streams are greedy, half draw with a seed; all in float32, where
every answer must be the same, token for token. Prints one JSON line: answers, wrong ones, requests that moved, and the
gaps between two tokens of the streams of the replica that was not killed, from the kill until the other one is back:
their median, p99 and longest, and those of the undisturbed second before the kill; `longest_of_median` is the longest
one as a multiple of the median. A stream that an earlier kill has moved counts from its first token at the other
replica on. In a virtual machine the host may give the processors to others for a while: `stolen_gaps` counts the gaps
in which it did, and `longest_of_median_on_own_time` leaves them out. Exits with 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
import trio
from common import machine, make_model, percentiles, stolen_s
from crowd import Crowd

import triolet
from triolet import Engine, EngineConfig
from triolet.core.journal import JournalEntry
from triolet.core.replicas.replicated_core import ReplicatedCore
from triolet.engine.gc_freeze import freeze_gc

CALM_S = 1.0  # between two kills, at least
MOMENT_S = 0.002  # in which the stolen time is read once


@attrs.frozen
class Moment:
    """Moment of a token."""

    time_s: float
    stolen_s: float  # see `common.stolen_s`


@attrs.frozen
class Gap:
    """Time between two tokens of a stream."""

    length_s: float
    is_stolen: bool = attrs.field(kw_only=True)  # the host has taken the processors away meanwhile


@attrs.define(eq=False)
class Kills:
    """Kills of one replica or the other, and the gaps between the tokens of the streams that were elsewhere."""

    engine: Engine
    draw: random.Random
    num_kills: int
    num_killed: int = 0
    tokens: defaultdict[str, list[Moment]] = attrs.field(factory=lambda: defaultdict(list))  # by request
    calm_gaps: list[Gap] = attrs.field(factory=list)
    gaps: list[Gap] = attrs.field(factory=list)
    _last: Moment = attrs.field(factory=lambda: Moment(0.0, 0.0))

    def note_token(self, index: int, request_id: str) -> None:
        """Note the time of a token."""
        now_s = trio.current_time()
        if now_s - self._last.time_s >= MOMENT_S:
            self._last = Moment(now_s, stolen_s())
        self.tokens[request_id].append(Moment(now_s, self._last.stolen_s))

    async def kill_all(self) -> None:
        """Kill as often as requested."""
        while self.num_killed < self.num_kills:
            await trio.sleep(CALM_S + self.draw.random())
            await self._kill()

    async def _kill(self) -> None:
        core = self.engine._core
        assert isinstance(core, ReplicatedCore)
        victim = self.draw.randrange(len(core.replicas))
        info = core.replicas[victim].model.info
        assert info is not None
        assert info.process_id is not None
        live = {entry.request.request_id: entry for entry in core.journal}
        for request_id in self.tokens.keys() - live:
            del self.tokens[request_id]
        others = [
            (tokens, _num_moved(live[request_id]))
            for request_id, tokens in self.tokens.items()
            if live[request_id].replica == 1 - victim
        ]
        killed_s = trio.current_time()
        os.kill(info.process_id, signal.SIGKILL)
        async for restarting in self.engine.follow_restarts():
            if not restarting and self.engine.statistics().num_restarts > self.num_killed:
                break
        self.num_killed += 1
        for tokens, num_moved in others:
            # The first ones of a stream that was moved came from the replica that an earlier kill has ended.
            for before, after in pairwise(tokens[num_moved:]):
                gap = Gap(after.time_s - before.time_s, is_stolen=after.stolen_s > before.stolen_s)
                if after.time_s >= killed_s:
                    self.gaps.append(gap)
                elif before.time_s > killed_s - CALM_S:
                    self.calm_gaps.append(gap)


def _num_moved(entry: JournalEntry) -> int:
    """Return how many tokens of its answer a stream had when it was moved."""
    return max(0, entry.num_moved_tokens - len(entry.request.prompt_token_ids))


async def measure(config: EngineConfig, options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Measure both runs; return whether every answer was right, and the figures."""
    draw = random.Random(options.seed)
    async with triolet.open_engine(config, runner="inline") as engine:
        peace = Crowd(engine, options.streams, options.tokens)
        await peace.read_all()
    async with triolet.open_engine(config, replicas=2) as engine:
        freeze_gc()
        kills = Kills(engine, draw, options.kills)
        crowd = Crowd(engine, options.streams, options.tokens, kills.note_token)
        await crowd.read_all(kills.kill_all)
        statistics = engine.statistics()
    right = crowd.compared_with(peace)
    figures = {
        "bench": "replica_recovery",
        "kills": kills.num_killed,
        "restarts": statistics.num_restarts,
        "moved": statistics.num_moved_requests,
        "streams": options.streams,
        "tokens": options.tokens,
        "seed": options.seed,
        "answers": len(right),
        "wrong_answers": right.count(False),
    }
    for name, gaps in (("calm_gap_ms", kills.calm_gaps), ("gap_ms", kills.gaps)):
        in_ms = [1000 * gap.length_s for gap in gaps]
        figures[name] = percentiles(in_ms) | {"max": round(max(in_ms), 1)} if in_ms else None
    if kills.gaps:
        usual_s = median(gap.length_s for gap in kills.gaps)
        on_own_time = [gap.length_s for gap in kills.gaps if not gap.is_stolen]
        figures["longest_of_median"] = round(max(gap.length_s for gap in kills.gaps) / usual_s, 2)
        figures["stolen_gaps"] = len(kills.gaps) - len(on_own_time)
        figures["longest_of_median_on_own_time"] = round(max(on_own_time, default=0.0) / usual_s, 2)
        figures["gaps"] = len(kills.gaps)
    return all(right) and statistics.num_restarts == kills.num_killed, {**figures, **machine()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200, help="of every answer")
    parser.add_argument("--model", help="folder or hub id; by default one of 15 million random weights")
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the line goes"
    )
    options = parser.parse_args()
    logging.disable()  # each crash is reported, with its traceback
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_model("llama-15m", Path(folder), dtype=torch.float32))
        config = EngineConfig(
            model=model, dtype="float32", device="cpu", max_num_seqs=options.streams, log_stats=False
        )
        is_right, figures = trio.run(measure, config, options)
    print(json.dumps(figures), file=options.output, flush=True)
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
