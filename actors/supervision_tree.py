"""The supervision tree: which supervisor restarts an actor, and which other actors are restarted with it.

    root          rest_for_one, 3 restarts in 60 s
      engine      rest_for_one, 5 in 30 s
        model_runner   its KV dies with it, and the block tables of the scheduler are about that KV: ...
        scheduler      ... it is restarted, too; when it crashes itself, it restarts alone
      text        one_for_one, 10 in 10 s
        tokenizer      neither has state that is not in the journal and the outputs
        detokenizer
      masks       one_for_one, 10 in 10 s, then with pauses of up to 5 s; never gives up
        structured_output   likewise; its grammars, processes of their own, die with it
      absence     ends what is overdue while no scheduler has it; has what waits for a replica that does not come back
                  go on elsewhere
      watchdog    ends actors that hang

With several replicas `engine` is one_for_one over them, and each of them is what `engine` is above. One that crashes
too often waits longer and longer while another one lives; if none does, `engine` gives up, and all are started anew.
With `autoscale` those beyond the least number are children of a `FurtherReplica` each, which the autoscaler starts and
ends.

The journal and the outputs are outside of the tree. While anything in it restarts, streams wait: a crash costs them a
pause. When the root gives up the engine is dead, and every reader gets the cause.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.adapters import AdapterRegistry
from triolet.actors.channels import Channels
from triolet.actors.detokenizer import detokenizer_actor
from triolet.actors.executors.contract import Executor, LookAheadExecutor
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.model_runner import model_runner_actor
from triolet.actors.replicas.absence import absence_actor
from triolet.actors.replicas.autoscaler import FurtherReplica, autoscaler_actor
from triolet.actors.scheduler import scheduler_actor
from triolet.actors.structured_output import make_grammars, structured_output_actor
from triolet.actors.supervisor import ChildSpec, ChildStart, Lives, Supervisor, watched
from triolet.actors.tokenizer import LoadTokenizer, RunThread, tokenizer_actor
from triolet.actors.watchdog import STRUCTURED_OUTPUT, watchdog_actor
from triolet.actors.worker_calls import ReplicatedWorkerCalls
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.load_progress import OnProgress
from triolet.core.recovery.supervision import CrashReport, RestartLog, Strategy
from triolet.core.replicas.autoscale import AutoscalePolicy
from triolet.core.replicas.replicated_core import ReplicaCore, ReplicatedCore


def build_supervision_tree(
    config: EngineConfig,
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    grammars: GrammarRequests,
    executors: Sequence[Executor],
    load_tokenizer: LoadTokenizer,
    run_thread: RunThread,
    adapters: AdapterRegistry | None = None,
    *,
    on_progress: OnProgress,
    on_step: Callable[[float], None],
    on_report: Callable[[CrashReport], None],
    restart_log: RestartLog,
    autoscale: AutoscalePolicy | None = None,
) -> Supervisor:
    """Return the root of an engine's actors, not yet running.

    Args:
        core: shared by the actors, as are the three that follow.
        channels: between them.
        progress: of them.
        grammars: meeting point of tasks and grammars.
        executors: compute the steps, one for each replica.
        load_tokenizer: reads the tokenizer.
        run_thread: runs the work of the tokenizer in a thread.
        adapters: LoRA adapters; None for a model without them.
        on_progress: called with the progress of loading.
        on_step: called with the time after every step.
        on_report: called with every crash.
        restart_log: told of the actors that are being restarted.
        autoscale: decides how many replicas there are; None for a fixed number.
    """
    # The watchdog ends the actors that are in it; the model runner has a watchdog of its own.
    lives: Lives = {}

    hash_key = _hash_key(config)

    def supervisor_of(
        core: EngineCore,
        channels: Channels,
        progress: ActorProgress,
        executor: Executor,
        *,
        name: str = "engine",
        suffix: str = "",
        on_progress: OnProgress = on_progress,
        gives_up: Callable[[], bool] = lambda: True,
    ) -> Supervisor:
        """Return the supervisor of a runner and its scheduler."""

        def make_room_for_call() -> None:
            executor.halt()
            core.sleep.wake_from_idleness()

        channels.worker_calls.end_run = make_room_for_call
        scheduler = partial(
            scheduler_actor,
            core,
            channels,
            progress,
            grammars,
            config,
            hash_key,
            halt=executor.halt,
            send_ahead=executor.send_ahead if isinstance(executor, LookAheadExecutor) else None,
            report=on_step,
        )
        runner = partial(
            model_runner_actor, core, channels, progress, executor, on_progress, adapters, config.step_timeout
        )
        if isinstance(core, ReplicaCore):
            runner = partial(_runner_of_replica, core, runner)
        return Supervisor(
            name,
            [
                ChildSpec(name=f"model_runner{suffix}", start=runner),
                ChildSpec(name=f"scheduler{suffix}", start=watched(lives, f"scheduler{suffix}", scheduler)),
            ],
            strategy=Strategy.REST_FOR_ONE,
            max_restarts=5,
            period_s=30.0,
            on_report=on_report,
            restart_log=restart_log,
            num_achieved=core.num_steps_done,
            take_uncounted_restarts=core.take_uncounted_restarts,
            gives_up=gives_up,
        )

    num_first = len(executors) if autoscale is None else autoscale.min_replicas
    further: list[FurtherReplica] = []

    def child_of_replica(whole: ReplicatedCore, replica: int) -> ChildSpec:
        is_further = replica >= num_first
        one = supervisor_of(
            whole.replicas[replica],
            channels.replicas[replica],
            progress.replicas[replica],
            executors[replica],
            name=f"replica {replica}",
            suffix=f".{replica}",
            # one bar on a terminal: all of them load the same
            on_progress=on_progress if replica == 0 else lambda told: None,
            gives_up=lambda: is_further or whole.give_up(replica),
        )
        start: ChildStart = one.run
        if is_further:
            assert isinstance(channels.worker_calls, ReplicatedWorkerCalls)
            forget = partial(restart_log.forget, (f"model_runner.{replica}", f"scheduler.{replica}"))
            further.append(FurtherReplica(replica, whole, one.run, channels.worker_calls, forget))
            start = further[-1].run
        return ChildSpec(name=f"replica {replica}", start=start, report_late_stop_s=math.inf)

    if isinstance(core, ReplicatedCore):
        engine = Supervisor(
            "engine",
            [child_of_replica(core, replica) for replica in range(len(executors))],
            strategy=Strategy.ONE_FOR_ONE,
            max_restarts=0,  # one gives up only when no replica lives
            period_s=30.0,
            starts_together=True,
        )
    else:
        engine = supervisor_of(core, channels, progress, executors[0])
    tokenizer = partial(
        tokenizer_actor,
        core.model,
        channels,
        progress,
        load_tokenizer,
        run_thread=run_thread,
        inline=config.runner == "inline",
    )
    detokenizer = partial(detokenizer_actor, core, channels, progress)
    open_grammars = make_grammars(config, core.model)
    text = Supervisor(
        "text",
        [
            ChildSpec(name="tokenizer", start=watched(lives, "tokenizer", tokenizer)),
            ChildSpec(name="detokenizer", start=watched(lives, "detokenizer", detokenizer)),
        ],
        strategy=Strategy.ONE_FOR_ONE,
        max_restarts=10,
        period_s=10.0,
        on_report=on_report,
        restart_log=restart_log,
    )
    structured_output = partial(structured_output_actor, core, channels, grammars, open_grammars)
    # A process that the system kills again and again costs the requests that need it; the others do not hear of it.
    masks = Supervisor(
        "masks",
        [ChildSpec(name=STRUCTURED_OUTPUT, start=watched(lives, STRUCTURED_OUTPUT, structured_output))],
        strategy=Strategy.ONE_FOR_ONE,
        max_restarts=10,
        period_s=10.0,
        on_report=on_report,
        restart_log=restart_log,
        gives_up=lambda: False,
    )
    # a late stop is reported once, by the supervisor of the actor that is late, and not again by the root
    children = [
        ChildSpec(name="engine", start=engine.run, report_late_stop_s=math.inf),
        ChildSpec(name="text", start=text.run, report_late_stop_s=math.inf),
        ChildSpec(name="masks", start=masks.run, report_late_stop_s=math.inf),
        ChildSpec(name="absence", start=partial(absence_actor, core)),
    ]
    supply = executors[0].supply()
    if isinstance(core, ReplicatedCore) and autoscale is not None and supply is not None:
        start = partial(autoscaler_actor, core, autoscale, supply, further)
        children.append(ChildSpec(name="autoscaler", start=start))
    if config.step_timeout is not None:
        # Last: its own crash restarts nothing else, and it is stopped before the actors that it watches.
        watchdog = partial(watchdog_actor, channels, progress, grammars, lives, config.step_timeout)
        children.append(ChildSpec(name="watchdog", start=watchdog))
    return Supervisor(
        "root",
        children,
        strategy=Strategy.REST_FOR_ONE,
        max_restarts=3,
        period_s=60.0,
        num_achieved=core.num_steps_done,
    )


async def _runner_of_replica(
    core: ReplicaCore, runner: ChildStart, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with core.computing():
        await runner(task_status=task_status)


def _hash_key(config: EngineConfig) -> bytes:
    """Return the key of the hashes of the prefix cache: random, unless it is that of a prefix store."""
    if config.kv_store is None:
        return secrets.token_bytes(32)
    from triolet.actors.executors.hash_key import hash_key  # imported here because most engines have no store

    return hash_key(config)
