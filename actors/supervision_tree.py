"""Who watches whom, and what the death of one means for the others.

    root          rest_for_one, 3 restarts in 60 s
      engine      rest_for_one, 5 in 30 s
        model_runner   its KV dies with it, so the block tables of ...
        scheduler      ... this one are lies from then on: it follows; alone, it restarts alone
      text        one_for_one, 10 in 10 s
        tokenizer      both keep nothing that is not in the journal and the streams
        detokenizer
        guidance       likewise; its grammars, processes of their own, die with it
      watchdog    ends who does nothing

The journal and the streams stand outside of the tree. While anything in it is being mended, streams wait; a crash costs
them a pause. When the root has lost its patience the engine is dead, and everybody is told the real cause.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

import trio

from triolet.actors.channels import Wiring
from triolet.actors.detokenizer import detokenizer_actor
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.grammars import make_grammars
from triolet.actors.model_runner import model_runner_actor
from triolet.actors.scheduler import scheduler_actor
from triolet.actors.structured_output import structured_output_actor
from triolet.actors.supervisor import ChildSpec, Supervisor
from triolet.actors.tokenizer import LoadTokenizer, tokenizer_actor
from triolet.actors.watchdog import watchdog_actor, watched
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import OnProgress
from triolet.core.recovery.supervision import CrashReport, Strategy
from triolet.core.scheduling.scheduler import SchedulerConfig


def build_supervision_tree(
    config: EngineConfig,
    wiring: Wiring,
    executor: Executor,
    load_tokenizer: LoadTokenizer,
    on_progress: OnProgress,
    on_report: Callable[[CrashReport], None],
) -> Supervisor:
    """The root of an engine's actors, not yet running."""
    cache_key = secrets.token_bytes(32)

    async def scheduler(*, task_status: trio.TaskStatus[None]) -> None:
        assert wiring.model_info is not None, "the runner starts before the scheduler"
        limits = SchedulerConfig.of(config, wiring.model_info, cache_key)
        await scheduler_actor(wiring, limits, task_status=task_status)

    def num_steps_done() -> int:
        return wiring.counters.num_steps_done

    engine = Supervisor(
        "engine",
        [
            ChildSpec(name="model_runner", start=partial(model_runner_actor, wiring, executor, on_progress)),
            ChildSpec(name="scheduler", start=watched(wiring, "scheduler", scheduler)),
        ],
        strategy=Strategy.REST_FOR_ONE,
        max_restarts=5,
        period_s=30.0,
        on_report=on_report,
        num_achieved=num_steps_done,
        take_uncounted_restarts=wiring.take_uncounted_restarts,
    )
    tokenizer = partial(tokenizer_actor, wiring, load_tokenizer, inline=config.runner == "inline")
    text = Supervisor(
        "text",
        [
            ChildSpec(name="tokenizer", start=watched(wiring, "tokenizer", tokenizer)),
            ChildSpec(
                name="detokenizer", start=watched(wiring, "detokenizer", partial(detokenizer_actor, wiring))
            ),
            ChildSpec(
                name="guidance", start=partial(structured_output_actor, wiring, make_grammars(config, wiring))
            ),
        ],
        strategy=Strategy.ONE_FOR_ONE,
        max_restarts=10,
        period_s=10.0,
        on_report=on_report,
    )
    children = [ChildSpec(name="engine", start=engine.run), ChildSpec(name="text", start=text.run)]
    if config.step_timeout is not None:
        watchdog = partial(watchdog_actor, wiring, config.step_timeout)
        children.append(ChildSpec(name="watchdog", start=watchdog))
    return Supervisor(
        "root",
        children,
        strategy=Strategy.REST_FOR_ONE,
        max_restarts=3,
        period_s=60.0,
        num_achieved=num_steps_done,
    )
