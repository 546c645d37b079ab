"""Program of one rank of a tensor-parallel group: `python -m triolet.workers.rank RANK SIZE MEETING [fork]`.

It is `triolet.workers.runner` in all but the load: the ranks join a group first, and each reads its part of the
weights. All of them get the same plans. Whether one of several steps is the last is agreed on, since a `Halt` reaches
the ranks at different times.

With `fork` it is the fork server of such a process (`workers.fork_server`).

MEETING is a folder. Its file `life` holds the number of the group's life; rank 0 writes the port of its store to the
file of that name.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import attrs

from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult, StepRunner
from triolet.core.worker_call import CallableRunner, WorkerCall
from triolet.ipc.messages import Reply, Request
from triolet.model.loading.imports import no_full_collections
from triolet.workers import fork_server
from triolet.workers.runner import FdTransport, Transport, import_model_code, imports_reported, serve

if TYPE_CHECKING:
    from triolet.model.parallel.group import Group


@attrs.define(eq=False)
class Rank:
    """One rank: its transport to the engine, which agrees with its peers, and its load."""

    transport: Transport
    rank: int
    size: int
    meeting: Path
    _group: Group | None = None

    def requests(self) -> Iterator[Request | None]:
        return self.transport.requests()

    def wake(self) -> None:
        self.transport.wake()

    def has_request(self) -> bool:
        """Return whether any rank has an unread request; all ranks ask after the same step."""
        assert self._group is not None, "steps come after the load"
        return self._group.any(self.transport.has_request())

    def reply(self, reply: Reply | bytes) -> None:
        self.transport.reply(reply)

    def fileno(self) -> int:
        return self.transport.fileno()

    def load(self, config: EngineConfig, on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        """Join the group, and load this rank's part of the model."""
        with imports_reported(on_progress):
            with no_full_collections():
                from triolet.model.loading.runner import choose_device, load_runner
                from triolet.model.parallel.cuts import Part
                from triolet.model.parallel.group import Group

            device = choose_device(config.device)
            if device.type == "cuda":
                config = attrs.evolve(config, device=f"cuda:{self.rank}")
                device = choose_device(config.device)
            life = (self.meeting / "life").read_text()
            part = Part(rank=self.rank, size=self.size)
            self._group = Group.join(part, self.meeting / life, device)
            runner, info = load_runner(config, on_progress, self._group)
            return RankRunner(runner), info


@attrs.frozen
class RankRunner:
    """Runner of one rank. What it has no memory for ends it: its peers wait in the middle of the step."""

    runner: CallableRunner

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step; see `StepRunner.execute`.

        Raises:
            MemoryError: there is no memory for it.
        """
        result = self.runner.execute(plan)
        if result.out_of_memory is not None:
            raise MemoryError(result.out_of_memory)
        return result

    def reset(self) -> None:
        self.runner.reset()

    def call(self, call: WorkerCall) -> Any:
        return self.runner.call(call)


def import_rank_code(on_progress: OnProgress) -> None:
    """Import torch, the modules of the model and those of groups."""
    import_model_code(on_progress)
    with imports_reported(on_progress):
        importlib.import_module("triolet.model.parallel.group")


def run(rank: int, size: int, meeting: Path) -> NoReturn:
    """Be the process of a rank, from its standard streams on."""
    me = Rank(FdTransport.take_over_standard_streams(), rank, size, meeting)
    serve(me.load, me, import_rank_code)


def main(rank: str, size: str, meeting: str, *fork: str) -> NoReturn:
    """Be a rank, or the fork server of one."""
    be_rank = partial(run, int(rank), int(size), Path(meeting))
    if fork:
        fork_server.main(socket.socket(fileno=0), be_rank, import_rank_code)
    be_rank()


if __name__ == "__main__":
    main(*sys.argv[1:])
