"""Backend of the chat with an engine in this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import attrs
import trio

from triolet.cli.backends.base import ModelEntry, ReplyRequest, ReplySink
from triolet.cli.loading import opened
from triolet.cli.models.chosen import config_of
from triolet.cli.models.hub_cache import cached_models
from triolet.cli.models.presets import Preset, usable_presets
from triolet.cli.reply import Reply, explain_waiting
from triolet.config.engine import BUILT_IN_MODEL, EngineConfig
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.tools import AnswerEvent, AnswerParser, ReasoningPiece, TextPiece, plan_tools
from triolet.core.tools.answer import thinking_switch_of

if TYPE_CHECKING:
    from triolet.engine.engine import Engine


OtherModels = Callable[[str], tuple[Preset, EngineConfig]]
"""Returns what the name of a model, or of a preset, means, and its configuration."""


def by_name(text: str) -> tuple[Preset, EngineConfig]:
    """Return the model of that name in the default configuration."""
    preset = Preset(name=text, model=text)
    return preset, config_of(preset, {})


@attrs.define(eq=False)
class LocalBackend:
    """Engine in this process, which can be exchanged for another one."""

    _nursery: trio.Nursery
    _config: EngineConfig
    _other_models: OtherModels = by_name
    _engine: Engine = attrs.field(init=False)
    _leave: trio.Event = attrs.field(factory=trio.Event, init=False)  # ends the engine
    _has_left: trio.Event = attrs.field(factory=trio.Event, init=False)

    @classmethod
    async def open(
        cls, stack: AsyncExitStack, config: EngineConfig, other_models: OtherModels = by_name
    ) -> LocalBackend:
        """Load the model; the engine closes with `stack`."""
        backend = cls(await stack.enter_async_context(trio.open_nursery()), config, other_models)
        await backend._load(config)
        stack.callback(backend.close)
        return backend

    def close(self) -> None:
        """Let the engine close."""
        self._leave.set()  # of the present engine, which may be another one than at first

    async def _load(self, config: EngineConfig) -> None:
        self._leave, self._has_left = trio.Event(), trio.Event()
        self._engine = await self._nursery.start(self._host, config, self._leave, self._has_left)
        self._config = config

    async def _host(
        self,
        config: EngineConfig,
        leave: trio.Event,
        has_left: trio.Event,
        *,
        task_status: trio.TaskStatus[Engine],
    ) -> None:
        # In a task of its own: an engine is a nursery, which only the task that opened it may close, and only after
        # everything that was opened in it later.
        async with AsyncExitStack() as stack:
            task_status.started(await opened(stack, config))
            await leave.wait()
        has_left.set()

    @property
    def facts(self) -> tuple[str, ...]:
        info = self._engine.model_info
        return (self.model, info.backend, info.dtype, info.device, f"{self.max_model_len} tokens")

    @property
    def model(self) -> str:
        return self._engine.model_name

    @property
    def max_model_len(self) -> int | None:
        return self._engine.max_model_len

    @property
    def defaults(self) -> SamplingParams:
        return self._engine.default_sampling_params()

    @property
    def knows_defaults(self) -> bool:
        return True

    @property
    def thinking_switch(self) -> str | None:
        return thinking_switch_of(self._engine.tokenizer)

    async def reply(self, request: ReplyRequest, reply: Reply, sink: ReplySink) -> None:
        engine = self._engine
        plan = plan_tools(
            reasoning_parser=engine.reasoning_parser, form=request.form, tokenizer=engine.tokenizer
        )
        changes: dict[str, Any] = dict(request.sampling)
        if plan.structured_outputs is not None:
            changes["structured_outputs"] = plan.structured_outputs
        if not plan.skip_special_tokens:
            changes["skip_special_tokens"] = False
        params = attrs.evolve(self.defaults, **changes, output_kind=RequestOutputKind.DELTA)
        parser: AnswerParser | None = None

        async with engine.generate(self._prompt(request), params) as stream:
            explain_waiting(engine, sink.waits_for)(stream)
            async for output in stream:
                reply.count(output, trio.current_time())
                # Made late: the reasoning may begin in the prompt, whose text comes with the first output.
                parser = parser or plan.parser(output.prompt)
                _deliver(parser.feed(output.outputs[0].text), reply, sink)
                if output.finished:
                    _deliver(parser.finish(), reply, sink)

    def _prompt(self, request: ReplyRequest) -> Any:
        if request.thinks is None:
            return request.messages
        switch = self.thinking_switch
        values = {} if switch is None else {switch: request.thinks}
        return {"messages": request.messages, "tools": None, "chat_template_kwargs": values}

    async def models(self) -> list[ModelEntry]:
        found = [ModelEntry(BUILT_IN_MODEL, "ships with triolet")]
        found += await trio.to_thread.run_sync(_cached_models)
        model = self._config.model or BUILT_IN_MODEL
        if all(entry.name != model for entry in found):
            found.insert(0, ModelEntry(model))
        found += [
            ModelEntry(one.name, f"preset of {one.model or BUILT_IN_MODEL}") for one in usable_presets()
        ]
        return [attrs.evolve(entry, is_present=entry.name in (model, self.model)) for entry in found]

    async def switch(self, model: str) -> Preset:
        preset, config = self._other_models(model)
        before = self._config
        # Closed first: two models may not fit into memory together.
        self._leave.set()
        await self._has_left.wait()
        try:
            await self._load(config)
        except BaseException:  # also Ctrl-C, which stops the loading and not the chat
            with trio.CancelScope(shield=True):
                await self._load(before)
            raise
        return preset


def _deliver(events: tuple[AnswerEvent, ...], reply: Reply, sink: ReplySink) -> None:
    for event in events:
        match event:
            case TextPiece(text=text):
                reply.text += text
                sink.text(text)
            case ReasoningPiece(text=text):
                reply.reasoning += text
                sink.reasoning(text)


def _cached_models() -> list[ModelEntry]:
    """Return the models of the hub's cache on this machine."""
    try:
        models = cached_models()
    except OSError:
        return []
    return [
        ModelEntry(name, f"{size / 1e9:.1f} GB in the cache")
        for one in models
        for name, size in one.usable.items()
    ]
