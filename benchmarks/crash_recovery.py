"""Kill the process of the model runner repeatedly under many streams, and measure lost tokens and recovery times.

    python benchmarks/crash_recovery.py [--kills N] [--seed N] [--apart S] [--streams N] [--tokens N] [--model FOLDER]
        [--tensor-parallel-size N] [--output FILE]

The streams are read twice: without kills, with the model inside this process, and with the model in a process of its
own that is killed with -9 at random moments, N times. A stream that has ended is requested again until all kills are
done. Half of the streams are greedy, half draw with a seed; all in float32, where every answer must be the same, token
for token. Prints one JSON line per kill (milliseconds from the kill until the supervisor learns of the death, until the
system has taken back the process, until another one is loaded, until the next token of any stream) and one for all of
them. Exits with 1 if an answer differs.

An engine that crashes more than five times in 30 seconds gives up, so if kills are less than six seconds apart, the
limit of its supervisors is raised; nothing else differs. A kill waits until every stream has gone on since the last
one: a request without progress between two crashes would count as the culprit.

With `--tensor-parallel-size` a random one of the model's processes is killed; the last one to end counts as its end.

As in `triolet serve`, objects that exist when the engine is open are kept from the garbage collector.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from common import machine, make_model, percentiles
from crowd import Crowd

import triolet
from triolet import EngineConfig
from triolet.actors import supervision_tree
from triolet.actors.executors.connection import RunnerProcess
from triolet.actors.executors.group import LocalGroup
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.supervisor import Supervisor
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.engine.gc_freeze import freeze_gc
from triolet.engine.open_engine import run_engine
from triolet.errors import RunnerDied

Write = Callable[[dict[str, Any]], None]

APART_S = 6.1  # five restarts in 30 s


@attrs.define(eq=False)
class Kill:
    """Monotonic times of the events after a kill, seconds.

    Args:
        killed_s: of the kill.
        waiting: the streams that have not gone on since.
    """

    killed_s: float
    waiting: set[int]
    noticed_s: float = math.nan
    gone_s: float = math.nan
    loaded_s: float = math.nan
    token_s: float = math.nan
    is_over: trio.Event = attrs.field(factory=trio.Event)

    def note_token(self, index: int, now_s: float) -> None:
        """Note the first token after the restart, and which streams have gone on."""
        if math.isnan(self.loaded_s):
            return
        if math.isnan(self.token_s):
            self.token_s = now_s
        self.waiting.discard(index)
        if not self.waiting:
            self.is_over.set()

    def figures(self) -> dict[str, float]:
        """Return the times since the kill, milliseconds."""
        times = {
            "noticed_ms": self.noticed_s,
            "gone_ms": self.gone_s,
            "loaded_ms": self.loaded_s,
            "next_token_ms": self.token_s,
        }
        return {name: round((time_s - self.killed_s) * 1000, 1) for name, time_s in times.items()}


class Watched:
    """Executor that notes when a death was noticed and when the next life was ready; mixed into an executor."""

    kills: list[Kill]
    processes: list[ProcessExecutor]

    @property
    def process_ids(self) -> list[int]:
        """Return the ids of the processes that live."""
        lives = (each._process for each in self.processes)
        return [life.child.pid for life in lives if isinstance(life, RunnerProcess)]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        try:
            async with super().running():  # type: ignore[misc]
                yield
        except RunnerDied:
            self.kills[-1].noticed_s = trio.current_time()
            raise

    async def start(self, on_progress: OnProgress) -> ModelInfo:
        if self.kills:
            for each in self.processes:
                assert each._former is not None
                await each._former.gone()
            self.kills[-1].gone_s = trio.current_time()
        info: ModelInfo = await super().start(on_progress)  # type: ignore[misc]
        if self.kills:
            self.kills[-1].loaded_s = trio.current_time()
        return info


class WatchedProcess(Watched, ProcessExecutor):
    """One process."""

    def __init__(self, config: EngineConfig, kills: list[Kill]) -> None:
        super().__init__(config)
        self.kills, self.processes = kills, [self]


class WatchedGroup(Watched, LocalGroup):
    """Several processes."""

    def __init__(self, config: EngineConfig, kills: list[Kill]) -> None:
        super().__init__(config)
        self.kills, self.processes = kills, [*self._ranks]


class PatientSupervisor(Supervisor):
    """Supervisor that never gives up, so that the number of kills is not limited."""

    def __init__(self, *arguments: Any, **limits: Any) -> None:
        super().__init__(*arguments, **limits | {"max_restarts": 10**9})


@attrs.define
class Kills:
    """Kills of the processes of a model, one after the other.

    Args:
        executor: of the processes; knows the kills, too.
        kills: those there were.
    """

    executor: Watched
    num_streams: int
    num_kills: int
    seed: int
    apart_s: float
    kills: list[Kill]

    def note_token(self, index: int, request_id: str) -> None:
        """Note that a stream has gone on since the last kill."""
        if self.kills:
            self.kills[-1].note_token(index, trio.current_time())

    async def kill_all(self) -> None:
        """Kill as often as requested."""
        draw = random.Random(self.seed)
        for number in range(self.num_kills):
            last_s = self.kills[-1].killed_s if number else trio.current_time() - self.apart_s
            await trio.sleep_until(last_s + self.apart_s + draw.random())
            await trio.sleep(draw.random())  # also when the last restart took longer than that
            process_id = draw.choice(self.executor.process_ids)
            kill = Kill(trio.current_time(), set(range(self.num_streams)))
            self.kills.append(kill)
            os.kill(process_id, signal.SIGKILL)
            await kill.is_over.wait()


async def measure(config: EngineConfig, options: argparse.Namespace, write: Write) -> bool:
    """Measure both runs; return True if every answer was right."""
    async with triolet.open_engine(config, runner="inline", tensor_parallel_size=1) as engine:
        peace = Crowd(engine, options.streams, options.tokens)
        await peace.read_all()
    kills: list[Kill] = []
    executor = (WatchedProcess if config.tensor_parallel_size == 1 else WatchedGroup)(config, kills)
    async with run_engine(config, executor) as engine:
        freeze_gc()
        killing = Kills(executor, options.streams, options.kills, options.seed, options.apart, kills)
        crowd = Crowd(engine, options.streams, options.tokens, killing.note_token)
        await crowd.read_all(killing.kill_all)
        num_restarts = engine.statistics().num_restarts
    right = crowd.compared_with(peace)
    figures = [kill.figures() for kill in kills]
    for kill in figures:
        write({"bench": "crash_recovery", **kill})
    counts = {
        "kills": len(kills),
        "restarts": num_restarts,
        "streams": options.streams,
        "tokens": options.tokens,
        "seed": options.seed,
        "apart_s": options.apart,
        "tensor_parallel_size": config.tensor_parallel_size,
    }
    outcome = {"answers": len(right), "wrong_answers": right.count(False)}
    spreads: dict[str, Any] = {name: percentiles([kill[name] for kill in figures]) for name in figures[0]}
    noticed_ms = [kill["noticed_ms"] for kill in figures]
    spreads["noticed_ms"]["max"] = max(noticed_ms)
    outcome["noticed_within_50_ms"] = sum(time_ms < 50 for time_ms in noticed_ms)
    write({"bench": "crash_recovery_all", **counts, **outcome, **spreads, **machine()})
    return all(right) and num_restarts == len(kills)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--apart", type=float, default=APART_S, help="seconds between kills, at least")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of every answer")
    parser.add_argument("--model", help="folder or hub id; by default one of 15 million random weights")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--output", type=argparse.FileType("a"), default=sys.stdout, help="where the lines go"
    )
    options = parser.parse_args()

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=options.output, flush=True)

    if options.apart < APART_S:
        supervision_tree.Supervisor = PatientSupervisor  # type: ignore[attr-defined]
    logging.disable()  # each crash is reported, with its traceback
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_model("llama-15m", Path(folder), dtype=torch.float32))
        config = EngineConfig(
            model=model,
            dtype="float32",
            runner="process",
            max_num_seqs=options.streams,
            tensor_parallel_size=options.tensor_parallel_size,
        )
        sys.exit(0 if trio.run(measure, config, options, write) else 1)


if __name__ == "__main__":
    main()
