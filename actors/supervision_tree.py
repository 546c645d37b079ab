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
      watchdog    ends actors that hang

The journal and the outputs are outside of the tree. While anything in it restarts, streams wait: a crash costs them a
pause. When the root gives up the engine is dead, and every reader gets the cause.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from functools import partial

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.adapters import AdapterRegistry
from triolet.actors.channels import Channels
from triolet.actors.detokenizer import detokenizer_actor
from triolet.actors.executors.contract import Executor
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.model_runner import model_runner_actor
from triolet.actors.scheduler import scheduler_actor
from triolet.actors.structured_output import make_grammars, structured_output_actor
from triolet.actors.supervisor import ChildSpec, Supervisor
from triolet.actors.tokenizer import LoadTokenizer, tokenizer_actor
from triolet.actors.watchdog import STRUCTURED_OUTPUT, Lives, watchdog_actor, watched
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore
from triolet.core.load_progress import OnProgress
from triolet.core.recovery.supervision import CrashReport, RestartLog, Strategy


def build_supervision_tree(
    config: EngineConfig,
    core: EngineCore,
    channels: Channels,
    progress: ActorProgress,
    grammars: GrammarRequests,
    executor: Executor,
    load_tokenizer: LoadTokenizer,
    adapters: AdapterRegistry | None = None,
    *,
    on_progress: OnProgress,
    on_step: Callable[[float], None],
    on_report: Callable[[CrashReport], None],
    restart_log: RestartLog,
) -> Supervisor:
    """Return the root of an engine's actors, not yet running.

    Args:
        core: shared by the actors, as are the three that follow.
        channels: between them.
        progress: of them.
        grammars: meeting point of tasks and grammars.
        executor: computes the steps.
        load_tokenizer: reads the tokenizer.
        adapters: LoRA adapters; None for a model without them.
        on_progress: called with the progress of loading.
        on_step: called with the time after every step.
        on_report: called with every crash.
        restart_log: told of the actors that are being restarted.
    """
    # The watchdog ends the actors that are in it; the model runner has a watchdog of its own.
    lives: Lives = {}

    scheduler = partial(
        scheduler_actor,
        core,
        channels,
        progress,
        grammars,
        config,
        _hash_key(config),
        halt=executor.halt,
        report=on_step,
    )

    def make_room_for_call() -> None:
        executor.halt()
        core.sleep.wake_from_idleness()

    channels.worker_calls.end_run = make_room_for_call
    model_runner = partial(
        model_runner_actor, core, channels, progress, executor, on_progress, adapters, config.step_timeout
    )
    engine = Supervisor(
        "engine",
        [
            ChildSpec(name="model_runner", start=model_runner),
            ChildSpec(name="scheduler", start=watched(lives, "scheduler", scheduler)),
        ],
        strategy=Strategy.REST_FOR_ONE,
        max_restarts=5,
        period_s=30.0,
        on_report=on_report,
        restart_log=restart_log,
        num_achieved=core.num_steps_done,
        take_uncounted_restarts=core.take_uncounted_restarts,
    )
    tokenizer = partial(
        tokenizer_actor, core.model, channels, progress, load_tokenizer, inline=config.runner == "inline"
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
        gives_up=False,
    )
    # a late stop is reported once, by the supervisor of the actor that is late, and not again by the root
    children = [
        ChildSpec(name="engine", start=engine.run, report_late_stop_s=math.inf),
        ChildSpec(name="text", start=text.run, report_late_stop_s=math.inf),
        ChildSpec(name="masks", start=masks.run, report_late_stop_s=math.inf),
    ]
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


def _hash_key(config: EngineConfig) -> bytes:
    """Return the key of the hashes of the prefix cache: random, unless it is that of a prefix store."""
    if config.kv_store is None:
        return secrets.token_bytes(32)
    from triolet.actors.executors.hash_key import hash_key  # imported here because most engines have no store

    return hash_key(config)
