"""Host of the further models of a server: one engine each, opened when a request asks for it and closed when idle.

    open_gateway's nursery
      ModelHost.run        asks `core.model_registry` what is to be done, whenever something has changed or is due
        _host, one a model   the scope of its engine, from `LoadModel` to `UnloadModel`

The first model of the server is not hosted here: its engine lasts as long as the server, and goes to sleep when it is
idle, which frees the weights as unloading does. A hosted model that
cannot be loaded, or whose engine dies, fails only the requests that asked for it; the next request loads it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

import triolet
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.core.model_registry import LoadModel, ModelRegistry, ModelState
from triolet.core.tools.answer import thinking_switch_of
from triolet.engine.adapters import configured_adapters
from triolet.engine.engine import Engine
from triolet.errors import ConfigError, EngineUnhealthy, TrioletError
from triolet.observability.prometheus import Metrics
from triolet.protocol.errors import WireError, model_not_found
from triolet.protocol.responses.requests import CreateResponse, SamplingPlan
from triolet.protocol.responses.session import ResponsesContext

CHECK_INTERVAL_S = 1.0

OpenEngine = Callable[[EngineConfig], AbstractAsyncContextManager[Engine]]
logger = logging.getLogger("triolet.models")


@attrs.frozen(kw_only=True)
class FurtherModel:
    """Model that a server has beside its first one."""

    config: EngineConfig
    size_bytes: int = 0  # of its weights; 0 if it is not known


class ModelNotLoaded(Exception):
    """The model of a request is not loaded now."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@attrs.define(eq=False)
class LoadAttempt:
    """Outcome of the present or next load of a model."""

    done: trio.Event = attrs.field(factory=trio.Event)
    error: Exception | None = None  # why it failed


@attrs.define(eq=False)
class HostedModel:
    """One model, and its engine while it is loaded."""

    name: str
    config: EngineConfig
    engine: Engine | None = None
    metrics: Metrics | None = None  # of the engine
    context: ResponsesContext | None = None  # of its sessions; None while it is not loaded
    attempt: LoadAttempt = attrs.field(factory=LoadAttempt)
    leave: trio.Event = attrs.field(factory=trio.Event)  # closes the engine

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of its adapters; while it is not loaded, of those that it will load."""
        if self.context is None:
            return tuple(name for name, _, _ in configured_adapters(self.config))
        return self.context.adapter_names()


@attrs.frozen(eq=False)
class ModelSession:
    """Engine of a model that a request holds, and what its responses are made with."""

    engine: Engine
    context: ResponsesContext


class ModelHost:
    """Further models of a server.

    Args:
        models: by the name under which clients ask for them.
        config: how many may be loaded, and for how long.
        context_of: makes what sessions need to know of a loaded engine, from the engine and the model's name.
        open_engine: opens the engine of a model; by default `triolet.open_engine`.
    """

    def __init__(
        self,
        models: Mapping[str, FurtherModel],
        config: GatewayConfig,
        context_of: Callable[[Engine, str], ResponsesContext],
        open_engine: OpenEngine | None = None,
    ) -> None:
        self._models = {name: HostedModel(name, model.config) for name, model in models.items()}
        self._context_of = context_of
        self._metrics_prefix = config.metrics_prefix
        self._open_engine: OpenEngine = open_engine or triolet.open_engine
        self.registry = ModelRegistry(
            {name: model.size_bytes for name, model in models.items()},
            max_loaded=config.max_loaded_models,
            max_bytes=config.max_model_bytes,
            idle_s=config.model_idle,
        )
        self._changed = trio.lowlevel.ParkingLot()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters of all models."""
        return tuple(name for model in self._models.values() for name in model.adapter_names)

    def model_of(self, name: str) -> str | None:
        """Return the model that has a name, or has an adapter of that name; None if it is none of these."""
        if name in self._models:
            return name
        return next((model.name for model in self._models.values() if name in model.adapter_names), None)

    def added_to(self, first: ResponsesContext) -> ResponsesContext:
        """Return the context of the server's first model with the names of these models and of their adapters."""
        return attrs.evolve(
            first,
            models=(*first.models, *self.names),
            adapter_names=lambda: (*first.adapter_names(), *self.adapter_names),
        )

    @property
    def engines(self) -> list[Engine]:
        """Engines of the loaded models."""
        return [model.engine for model in self._models.values() if model.engine is not None]

    @property
    def metrics(self) -> list[Metrics]:
        """Metrics of the loaded models."""
        return [model.metrics for model in self._models.values() if model.metrics is not None]

    @staticmethod
    def description_of_first(engine: Engine) -> dict[str, Any]:
        """Return state and requests of the server's first model, in the words of the others."""
        return {
            "state": (ModelState.UNLOADED if engine.is_sleeping else ModelState.LOADED).value,
            "num_requests": engine.statistics().num_requests_live,
            "unloads_in_s": engine.sleeps_in_s,
        }

    def described(self, name: str) -> dict[str, Any]:
        """Return what is known of a model: its state, and the rest if it is loaded."""
        residency, engine = self.registry.models[name], self._models[name].engine
        since_s, idle_s = residency.idle_since_s, self.registry.idle_s
        unloads_in_s = None
        if engine is not None and since_s is not None and idle_s is not None:
            unloads_in_s = max(0.0, since_s + idle_s - trio.current_time())
        facts: dict[str, Any] = {
            "state": residency.state.value,
            "num_requests": residency.num_holders,
            "size_bytes": residency.size_bytes or None,
            "unloads_in_s": unloads_in_s,
        }
        if engine is not None:
            facts |= {
                "root": root_of(engine),
                "max_model_len": engine.max_model_len,
                "tasks": engine.model_info.tasks,
                "thinking_switch": thinking_switch_of(engine.tokenizer),
            }
        return facts

    # ------------------------------------------------------------------------------------ requests

    def plan(self, request: CreateResponse) -> SamplingPlan:
        """Return the plan of a request for a hosted model.

        Raises:
            WireError: the request is wrong, or there is no such model.
            ModelNotLoaded: it must be loaded first.
        """
        name = self.model_of(request.model)
        if name is None:
            raise model_not_found(request.model)
        model = self._models[name]
        if model.context is None:
            raise ModelNotLoaded(model.name)
        return model.context.planned(request)

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Keep a model loaded, or have it loaded, for a request.

        Raises:
            WireError: too many requests wait for it, or it is larger than the limit.
        """
        if not self.registry.fits(name):
            raise WireError(
                f"The model {name} is larger than this server's limit (--max-model-bytes).",
                code="model_too_large",
                status=503,
                type="server_error",
            )
        limit = self._models[name].config.max_queued_requests
        is_loaded = self.registry.models[name].state is ModelState.LOADED
        # Bodies of requests that wait are in memory.
        if not is_loaded and self.registry.models[name].num_holders >= limit:
            raise WireError(
                f"{limit} requests wait until the model {name} is loaded.",
                code="rate_limit_exceeded",
                status=429,
                type="rate_limit_error",
                retry_after_s=1.0,
            )
        self.registry.hold(name)
        self._changed.unpark_all()
        try:
            yield
        finally:
            self.registry.release(name, trio.current_time())
            self._changed.unpark_all()

    async def loaded(self, name: str) -> ModelSession:
        """Wait until a model that is held has been loaded.

        Raises:
            WireError: it cannot be loaded.
        """
        await trio.lowlevel.checkpoint()
        model = self._models[name]
        while model.engine is None or model.context is None:
            attempt = model.attempt
            await attempt.done.wait()
            if attempt.error is not None:
                raise load_failed(name, attempt.error)
        return ModelSession(model.engine, model.context)

    def stop(self, name: str) -> None:
        """Unload a model as soon as no request holds it."""
        self.registry.stop(name)
        self._changed.unpark_all()

    # ---------------------------------------------------------------------------------------- tasks

    async def run(self, nursery: trio.Nursery) -> None:
        """Load and unload models until cancelled; the engines run in `nursery`."""
        while True:
            for decision in self.registry.decide(trio.current_time()):
                if isinstance(decision, LoadModel):
                    nursery.start_soon(self._host, self._models[decision.name])
                else:
                    self._models[decision.name].leave.set()
            wakes_at = self.registry.wakes_at()
            with trio.move_on_at(float("inf") if wakes_at is None else wakes_at):
                await self._changed.park()

    async def _host(self, model: HostedModel) -> None:
        """Keep the engine of a model open until it is to be unloaded, or dies."""
        model.leave = trio.Event()
        logger.info("loading model %s", model.name)
        try:
            async with self._open_engine(model.config) as engine:
                context = self._context_of(engine, model.name)
                model.engine, model.context = engine, context
                # Without the adapters, whose series in vLLM's form has no name of a model.
                model.metrics = Metrics(engine, self._metrics_prefix)
                self.registry.note_loaded(model.name, trio.current_time())
                model.attempt.done.set()
                self._changed.unpark_all()
                logger.info("model %s is loaded", model.name)
                try:
                    await _until_left(model, engine)
                finally:
                    # Before the engine closes: no request may get it any more.
                    model.engine, model.context, model.attempt = None, None, LoadAttempt()
                    model.metrics = None
            logger.info("model %s is unloaded", model.name)
        except Exception as error:
            if isinstance(error, TrioletError):
                logger.warning("model %s failed: %s", model.name, error)
            else:
                logger.exception("model %s failed", model.name)
            if not model.attempt.done.is_set() and self._is_loading(model):
                failed, model.attempt = model.attempt, LoadAttempt()
                failed.error = error
                failed.done.set()
        self.registry.note_unloaded(model.name)
        self._changed.unpark_all()

    def _is_loading(self, model: HostedModel) -> bool:
        return self.registry.models[model.name].state is ModelState.LOADING

    async def drain(self, deadline: float) -> None:
        """End the requests of all loaded models by `deadline`; no new ones may come."""
        async with trio.open_nursery() as nursery:
            for engine in self.engines:
                nursery.start_soon(_drained, engine.drain, deadline)


async def _drained(drain: Callable[[float], Awaitable[object]], deadline: float) -> None:
    # An engine that is dying beside the drain has told its own requests.
    with contextlib.suppress(TrioletError):
        await drain(deadline)


async def _until_left(model: HostedModel, engine: Engine) -> None:
    """Wait until the model is to be unloaded.

    Raises:
        EngineDead: its engine has died.
    """
    while not model.leave.is_set():
        with trio.move_on_after(CHECK_INTERVAL_S):
            await model.leave.wait()
        with contextlib.suppress(EngineUnhealthy):
            engine.check_health()


def root_of(engine: Engine) -> str:
    """Return the hub id of an engine's model, or its name where it lies in a folder, whose path is not shown."""
    name, model = engine.config.model_name, engine.config.model
    if model is None or Path(os.path.expanduser(model)) == Path(engine.model_info.folder):
        return name
    return model


def check_adapter_names(first: EngineConfig, models: Mapping[str, FurtherModel]) -> None:
    """Check that each adapter that a server loads has a name of its own.

    Args:
        first: configuration of the first model.
        models: the others, by name.
    Raises:
        ConfigError: a model or another adapter has the name.
    """
    configs = (first, *(model.config for model in models.values()))
    taken = {*first.model_names, *models}
    for config in configs:
        for name, field, entry in configured_adapters(config):
            if name in taken:
                raise ConfigError(field, "names that no model and no other adapter has", entry)
            taken.add(name)


def load_failed(name: str, error: Exception) -> WireError:
    """Return the error for requests whose model cannot be loaded; the log has the cause, which may name files."""
    return WireError(
        f"The model {name} cannot be loaded ({type(error).__name__}); the server's log says why.",
        code="model_load_failed",
        status=503,
        type="server_error",
    )
