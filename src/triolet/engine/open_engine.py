"""Scope of an engine: its actors run while the scope is open, and have ended when it is left."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Unpack

import attrs
import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.adapters import AdapterRegistry
from triolet.actors.channels import Channels, ReplicatedChannels
from triolet.actors.executors.contract import Executor
from triolet.actors.executors.registry import runner_of
from triolet.actors.executors.replicas import open_executors
from triolet.actors.executors.threads import clean_up_in_thread
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.supervision_tree import build_supervision_tree
from triolet.actors.supervisor import Supervisor, SupervisorGaveUp, root_cause
from triolet.actors.tokenizer import LoadTokenizer, check_configured_template, make_tokenizer_loader
from triolet.config.engine import DEFAULT_BLOCK_SIZE, EngineConfig
from triolet.config.engine_fields import EngineFields
from triolet.core.engine_core import EngineCore
from triolet.core.journal import Journal
from triolet.core.load_progress import OnProgress
from triolet.core.replicas.autoscale import AutoscalePolicy
from triolet.core.replicas.replicated_core import ReplicatedCore
from triolet.core.scheduling.admission import Admission
from triolet.core.sleep import RunnerPhase
from triolet.core.tools.answer import TemplateOwner
from triolet.engine.adapters import add_lora_modules
from triolet.engine.engine import Engine
from triolet.engine.gc_freeze import collect_frozen, frozen_gc
from triolet.engine.prompt_adapters import add_configured_prompt_adapters
from triolet.engine.token_stream import SCOPE_ENDED, death_by
from triolet.errors import EngineClosed, WrongEventLoop
from triolet.observability.engine_index import ENGINE_INDICES
from triolet.observability.loop_monitor import run_in_thread
from triolet.recording.recorder import Recorder, open_recorder


@asynccontextmanager
async def open_engine(
    config: EngineConfig | str | None = None,
    /,
    *,
    on_progress: OnProgress = lambda progress: None,
    **fields: Unpack[EngineFields],
) -> AsyncGenerator[Engine]:
    """Start an engine, yield it when it is ready, and stop it when the scope is left.

    Args:
        config: the configuration, or only the model's folder or hub id; by default triolet-nano.
        on_progress: called in the Trio thread with the progress of loading the model.
        **fields: fields of `EngineConfig` that differ from `config`.
    Raises:
        ConfigError: a wrong or unknown field, or a first argument of another type.
        ModelError: the model cannot be loaded.
        AdapterError: an adapter of `lora_modules` or `prompt_adapters` cannot be loaded.
        EngineDead: the engine has died, and no request or caller has got this error yet.
        WrongEventLoop: the caller does not run on Trio.
    """
    if not trio.lowlevel.in_trio_run():
        raise WrongEventLoop(
            "triolet.open_engine needs Trio's event loop; under asyncio use triolet.aio.open_engine, and without an "
            "event loop triolet.blocking.open_engine"
        )
    chosen = EngineConfig.of(config, **fields)
    with open_executors(chosen) as executors:
        async with run_engine(chosen, executors[0], None, *executors[1:], on_progress=on_progress) as engine:
            # Once it is loaded: collections need not look at its objects again.
            with frozen_gc():
                yield engine


@asynccontextmanager
async def run_engine(
    config: EngineConfig,
    executor: Executor,
    load_tokenizer: LoadTokenizer | None = None,
    *others: Executor,
    on_progress: OnProgress = lambda progress: None,
) -> AsyncGenerator[Engine]:
    """Open an engine with these executors and this tokenizer: the part of `open_engine` that tests share.

    Args:
        executor: computes the steps.
        load_tokenizer: reads the tokenizer; by default the model's.
        others: executors of further replicas.
    """
    executors = (executor, *others)
    autoscale = None
    if config.autoscale is not None:
        autoscale = AutoscalePolicy(*config.autoscale, config.max_num_seqs)
    channels, progress, core = _make_core(config, len(executors))

    phase = core.sleep.phase

    def note_hold() -> None:
        nonlocal phase
        former, phase = phase, core.sleep.phase
        if phase is RunnerPhase.UNLOADED is not former and runner_of(config) == "thread":
            collect_frozen()
        channels.wake_scheduler()
        progress.runner_held.unpark_all()

    core.sleep.on_change = note_hold
    core.sleep.set_sleep_after(config.sleep_after)
    grammars = GrammarRequests(core.masks)
    adapters = AdapterRegistry(config, core.model, executor)
    failure: BaseException | None = None
    recorder: Recorder | None = None
    async with AsyncExitStack() as stack:
        engine = Engine(config, core, channels, progress, grammars, adapters)
        stack.callback(ENGINE_INDICES.give_back, engine.index)
        stack.push_async_callback(_send_last_spans, engine)
        stack.push_async_callback(engine._remove_updates)
        tree = build_supervision_tree(
            config,
            core,
            channels,
            progress,
            grammars,
            executors,
            load_tokenizer or make_tokenizer_loader(config, core.model),
            run_in_thread,
            adapters if config.enable_lora else None,
            on_progress=on_progress,
            on_step=engine._reporting.report,
            on_report=engine._note_report,
            restart_log=engine._restart_log,
            autoscale=autoscale,
        )
        # Both before the model is loaded, which may take minutes.
        if config.chat_template is not None:
            await check_configured_template(config, inline=config.runner == "inline")
        if config.record is not None:
            recorder = open_recorder(config.record)
            stack.push_async_callback(recorder.close)
        async with trio.open_nursery() as nursery:
            try:
                await nursery.start(_keep_alive, engine, tree)
                if recorder is not None:
                    _start_recording(engine, recorder)
                    nursery.start_soon(recorder.run)
                if config.lora_modules:
                    await add_lora_modules(engine)
                if config.prompt_adapters:
                    await add_configured_prompt_adapters(engine)
                with engine._loop_watch.installed():
                    yield engine
            except BaseException as error:  # raised again below, without the nursery's group around it
                failure = error
            engine.shut_down()
            channels.worker_calls.fail_all(EngineClosed(SCOPE_ENDED))
            nursery.cancel_scope.cancel()
    # The actors are gone, and with them the step; its blocks would stay in quarantine.
    core.abandon_step()
    if failure is not None:
        raise failure
    # Last, so that an error of the caller's own is not replaced by this one.
    engine._availability.check_death_told()


def _make_core(config: EngineConfig, num_replicas: int) -> tuple[Channels, ActorProgress, EngineCore]:
    admission = Admission.of(config, Journal())
    if num_replicas == 1:
        channels, progress = Channels(), ActorProgress()
        return channels, progress, EngineCore(admission, channels.report_finished)
    several = ReplicatedChannels(num_replicas)
    progress = ActorProgress()
    progress.replicas = tuple(progress.of_replica() for _ in range(num_replicas))
    core = ReplicatedCore(
        attrs.evolve(admission, max_num_seqs=num_replicas * config.max_num_seqs),
        num_replicas,
        config.block_size or DEFAULT_BLOCK_SIZE,
        on_finish=lambda replica, serials: several.replicas[replica].report_finished(serials),
        wake=lambda replica: several.replicas[replica].wake_scheduler(),
    )
    return several, progress, core


def _start_recording(engine: Engine, recorder: Recorder) -> None:
    config = engine.config
    tokenizer: object = engine.tokenizer
    if config.chat_template is not None and isinstance(tokenizer, TemplateOwner):
        # as it is now: its file may change before a replay
        config = attrs.evolve(config, chat_template=tokenizer.template_source)
    recorder.begin(
        version("triolet"),
        config,
        engine.model_info,
        lambda: (engine.weight_version, engine.weights_folder),
    )
    engine._requests.recorder = recorder


async def _send_last_spans(engine: Engine) -> None:
    if engine._tracing is not None:
        # Requests that ended since the last step make spans, too.
        engine.tell_stat_loggers()
        # Also if the scope is cancelled: that takes seconds at most.
        await clean_up_in_thread(engine._tracing.close, "sending the last spans")


@trio.lowlevel.enable_ki_protection  # Ctrl-C is raised in the task that opened the engine
async def _keep_alive(engine: Engine, tree: Supervisor, *, task_status: trio.TaskStatus[None]) -> None:
    try:
        await tree.run(task_status=task_status)
    except SupervisorGaveUp as error:
        engine._die(root_cause(error))
        engine._channels.worker_calls.fail_all(death_by(root_cause(error)))
