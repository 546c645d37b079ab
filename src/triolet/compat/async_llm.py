"""vLLM's `AsyncLLM` (also named `AsyncLLMEngine`): the same methods and parameters over an `Engine`.

    async with AsyncLLM.from_engine_args(AsyncEngineArgs(max_num_seqs=8)) as engine:
        async with engine.generate("Hello!", SamplingParams(max_tokens=20), "request-0") as outputs:
            async for output in outputs: ...

Under Trio an engine lives as long as its scope: nothing is started before the scope is entered, and nothing is left
behind it. Under asyncio the same lines work, and vLLM's way does, too: without a scope the engine starts at once, in a
thread of its own (`triolet.aio`), and `shutdown` ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, cast
from weakref import WeakSet

import attrs
import trio

from triolet.actors.executors.registry import executor_class_of
from triolet.aio import AsyncioEngine
from triolet.bridge.engine_thread import EngineThread
from triolet.compat.async_facts import Count, Done, checkpoint
from triolet.compat.engine_args import EngineArgs, with_executor
from triolet.compat.generation import Generation, TextPieces
from triolet.compat.operations.asynchronous import AsyncOperations
from triolet.compat.operations.request_log import RequestLog
from triolet.compat.operations.stat_loggers import GivenLoggers, NamedLoggers
from triolet.compat.pooling import params_of_task, with_tensor
from triolet.compat.prompts import EngineCoreRequest, split_prompt
from triolet.compat.refusals import (
    ASYNC_ATTRIBUTES,
    ASYNC_METHODS,
    check_rank,
    check_usage_context,
    key_of,
    refuse,
    refuse_given,
    refusing,
    request_keys,
)
from triolet.compat.views import ConfigView
from triolet.config.engine import EngineConfig
from triolet.core.output.pooling_outputs import PoolingOutput, PoolingRequestOutput
from triolet.core.request.lora import LoRARequest
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt_adapter import PromptAdapterRequest
from triolet.core.request.request import RequestStatus
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.engine.engine import Engine
from triolet.engine.open_engine import open_engine
from triolet.errors import ConfigError, EngineClosed, EngineDead

T = TypeVar("T")


@refusing(ASYNC_METHODS, ASYNC_ATTRIBUTES)
class AsyncLLM(AsyncOperations):
    """Engine under vLLM's asynchronous interface, entered with `async with`.

    Args:
        vllm_config: configuration of the engine.
        log_stats: a line in the log every ten seconds of work.
        executor_class: where the model runs, by a name or class as for `distributed_executor_backend`; None for what
            the configuration says.
        usage_context: makes no difference: no usage is reported.
        stat_loggers: loggers that are told of every step, or factories of them, by name or in a list.
        log_requests: lines in the log about every request; see `compat.operations.request_log`.
        max_log_len: characters or token ids of a prompt in the log; None for all.
        start_engine_loop: whether the engine starts at once under asyncio; otherwise it does with its scope, with
            `start_background_loop` or with its first use, as it always does under Trio.
        **vllm_only: vLLM's other arguments: refused unless they have no value.
    """

    # Thread of an engine without a scope, under asyncio; set here, since a refused argument ends `__init__` early.
    _thread: EngineThread | None = None

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: object = None,
        log_stats: bool = True,
        usage_context: object = None,
        *,
        stat_loggers: GivenLoggers = None,
        log_requests: bool = True,
        max_log_len: int | None = None,
        start_engine_loop: bool = True,
        **vllm_only: object,
    ) -> None:
        super().__init__()
        if not isinstance(vllm_config, EngineConfig):  # early versions of vLLM began with two flags
            raise ConfigError("vllm_config", "an EngineConfig", vllm_config)
        refuse_given(vllm_only)
        check_usage_context(usage_context)
        if isinstance(vllm_config, ConfigView):  # of another engine
            vllm_config = vllm_config.plain()
        vllm_config = with_executor(vllm_config, executor_class)
        # `begin` writes the first lines about a request.
        self._log = RequestLog(max_log_len) if log_requests else None
        self.log_stats = log_stats and vllm_config.log_stats
        self._may_start = not start_engine_loop  # by `start_background_loop`
        self._config = vllm_config = attrs.evolve(vllm_config, log_stats=self.log_stats)
        self._given_loggers, self._loggers = stat_loggers, NamedLoggers(self.vllm_config)
        self._scope = AsyncExitStack()
        # A bare `Generation` that is kept in a variable would go on after the scope: leaving the scope closes these.
        self._generations: WeakSet[Generation] = WeakSet()
        self._open: Callable[[], AbstractAsyncContextManager[Engine]] = lambda: open_engine(vllm_config)
        self._engine: Engine | None = None
        self._was_left = False
        if _runs_in_asyncio() and start_engine_loop:
            self._start_thread()

    @classmethod
    def _get_executor_cls(cls, vllm_config: EngineConfig) -> type:
        """Return the class that runs the model, which may be given as `executor_class`."""
        return executor_class_of(vllm_config)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: GivenLoggers = None,
        engine_config: EngineConfig | None = None,
    ) -> Self:
        """Make an engine with these arguments, or with a configuration that was made of them, to be entered.

        In early versions of vLLM the configuration comes second, before the flag; both orders are taken.
        """
        given: Any = start_engine_loop
        if not isinstance(given, bool):
            if isinstance(usage_context, bool):
                start, usage_context, stat_loggers = usage_context, stat_loggers, cast("Any", engine_config)
            else:
                start = True
            return cls.from_engine_args(engine_args, start, usage_context, stat_loggers, given)
        return cls(
            engine_config or engine_args.create_engine_config(),
            start_engine_loop=start_engine_loop,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            log_requests=engine_args.enable_log_requests,
            max_log_len=engine_args.max_log_len,
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: GivenLoggers = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
        **vllm_only: Any,
    ) -> Self:
        """Make an engine with this configuration, to be entered with `async with`."""
        return cls(
            vllm_config,
            start_engine_loop=start_engine_loop,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            log_stats=not disable_log_stats,
            log_requests=enable_log_requests,
            **vllm_only,
        )

    @classmethod
    def around(cls, engine: Engine | AsyncioEngine) -> Self:
        """Wrap an engine that is open already, and stays open when this scope is left.

        Args:
            engine: of `triolet.open_engine`, or under asyncio of `triolet.aio.open_engine`.
        """
        face = cls(engine.config, log_requests=False, start_engine_loop=False)
        if isinstance(engine, AsyncioEngine):  # has a thread of its own
            face._engine, face._may_start = cast("Engine", engine), False
            return face
        native = engine

        @asynccontextmanager
        async def borrowed() -> AsyncGenerator[Engine]:
            yield native

        face._open, face._may_start = borrowed, False
        return face

    # ------------------------------------------------------------------------------- the engine's scope

    def _start_thread(self) -> None:
        """Start the engine and block the event loop until it is ready, as the constructor of vLLM does."""
        thread = EngineThread(self._open)
        try:
            engine = AsyncioEngine(thread, thread.opened.result())
            self._loggers = NamedLoggers(self.vllm_config)
            for logger in self._loggers.make(self._given_loggers, engine.index):
                engine.add_stat_logger(logger)
        except BaseException:  # also of a factory: the next attempt must not find half an engine
            thread.stop()
            raise
        self._thread, self._engine = thread, cast("Engine", engine)

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
            thread.finish()

    def __del__(self) -> None:
        if self._thread is not None:
            self._thread.stop()

    async def __aenter__(self) -> Self:
        if _runs_in_asyncio() and not self._was_left:
            self.engine  # noqa: B018  starts it
            return self
        if self._engine is not None or self._was_left:
            raise EngineClosed("an engine can be entered once; make another one")
        async with AsyncExitStack() as opening:  # a factory that raises closes the engine again
            engine = await opening.enter_async_context(self._open())
            for logger in self._loggers.make(self._given_loggers, engine.index):
                engine.add_stat_logger(logger)
            self._scope = opening.pop_all()
        self._engine = engine
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._was_left = True
        for generation in tuple(self._generations):
            generation.close()
        if self._thread is not None:
            self._end_thread()
            return None
        return await self._scope.__aexit__(kind, error, traceback)

    @property
    def _info(self) -> ModelInfo:
        return self.engine.model_info

    @property
    def _tokenizer(self) -> TokenizerInterface | None:
        return self.engine.tokenizer

    @property
    def engine(self) -> Engine:
        """The triolet engine behind this interface.

        Raises:
            EngineClosed: outside of `async with`, or after `shutdown` under asyncio.
        """
        if self._engine is None and not self._was_left and _runs_in_asyncio():
            self._start_thread()  # it was made before the event loop ran
        if self._was_left:
            raise EngineClosed("the engine has been shut down; make another one")
        if self._engine is None:
            raise EngineClosed("the engine runs inside of `async with`, and nowhere else")
        return self._engine

    def start_background_loop(self) -> Any:
        """Start the engine, if it was made with `start_engine_loop=False`; the result may be awaited.

        Raises:
            EngineClosed: outside of the scope, under Trio.
            RuntimeError: the engine runs already, as in vLLM.
        """
        self.engine  # noqa: B018  starts it, or raises
        if not self._may_start:
            raise RuntimeError("Background loop is already running.")
        self._may_start = False
        return Done()

    def shutdown_background_loop(self) -> Any:
        """Shut the engine down, like `shutdown()`."""
        self.shutdown()
        return Done()

    def shutdown(self, timeout: float | None = None) -> None:
        """Take no new requests, and end the live ones with finish_reason `shutdown`.

        The scope stays open; an engine that was started without one, under asyncio, ends.

        Args:
            timeout: seconds for the requests to finish: not offered here, since waiting must be awaited; see `drain`.
        """
        if timeout:
            refuse("shutdown(timeout)", "await drain(drain_timeout), which waits")
        if self._engine is not None and not self._was_left:
            self._engine.shut_down()
        if self._thread is not None:
            self._was_left = True
            self._end_thread()

    async def drain(self, drain_timeout: float) -> None:
        """Take no new requests, and let the live ones finish.

        Args:
            drain_timeout: seconds; requests that have not finished by then end with finish_reason `shutdown`.
        """
        now_s = asyncio.get_running_loop().time() if _runs_in_asyncio() else trio.current_time()
        await self.engine.drain(now_s + drain_timeout)

    @property
    def is_running(self) -> bool:
        """True if requests are taken."""
        return self._engine is not None and not self._was_left and self._engine.is_open

    @property
    def is_stopped(self) -> bool:
        """True if the engine is dead or does not run: the same as `errored`, as in vLLM."""
        return self.errored

    @property
    def errored(self) -> bool:
        """True if the engine is dead or does not run."""
        return not self.is_running

    @property
    def dead_error(self) -> BaseException | None:
        """Error that a request would be refused with, None while requests are taken.

        That of a dead engine has the last crash as its `__cause__`.
        """
        if self._engine is not None and (death := self._engine.death) is not None:
            return death
        if self.is_running:
            return None
        return EngineClosed("the engine does not run")

    async def check_health(self) -> None:
        """Check that requests are being served.

        Raises:
            EngineUnhealthy: steps do not finish; they may again later.
            EngineDead: the engine will serve no request any more.
        """
        self.engine.check_health()
        await checkpoint()

    # ------------------------------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        client: str | None = None,
        deadline: float | None = None,
        queue_timeout: float | None = None,
        cache_salt: str | None = None,
        **vllm_only: object,
    ) -> Generation:
        """Return the outputs of one request, to be entered with `async with`, or iterated directly; see `Generation`.

        Args:
            prompt: text, token ids, a mapping of vLLM's (`prompt`, `prompt_token_ids`, `cache_salt`) or chat messages.
            sampling_params: by default the model's own.
            request_id: unique among live requests; by default the engine names it.
            prompt_token_ids: the prompt's ids, if they are known.
            priority: lower goes first under the `priority` policy.
            data_parallel_rank: 0, or none.
            client: see `Engine.generate`, like the arguments that follow.
            lora_request: LoRA adapter that computes the answer; loaded now if it is not yet.
            prompt_adapter_request: soft prompt before the prompt; likewise.
            **vllm_only: such as `tokenization_kwargs`: refused unless they have no value.
        """
        refuse_given(vllm_only)
        check_rank(data_parallel_rank)
        if isinstance(prompt, EngineCoreRequest):
            sampling_params, priority, cache_salt, lora_request, trace_headers = prompt.fill(
                params=sampling_params,
                priority=priority,
                cache_salt=cache_salt,
                lora_request=lora_request,
                trace_headers=trace_headers,
            )
            request_id = prompt.request_id if request_id is None else request_id
            check_rank(prompt.data_parallel_rank)
            prompt, prompt_token_ids = None, prompt.prompt_token_ids
        content, salt = split_prompt(prompt, prompt_token_ids, cache_salt)
        log = self._log
        generation = Generation(
            self.engine.generate(
                content,
                sampling_params,
                request_id=None if request_id is None else key_of(request_id),
                priority=priority,
                client=client,
                deadline=deadline,
                queue_timeout=queue_timeout,
                lora=lora_request,
                prompt_adapter=prompt_adapter_request,
                cache_salt=salt,
                trace_headers=trace_headers,
            ),
            None
            if log is None
            else lambda accepted: log.begin(accepted, content, sampling_params, lora_request),
        )
        self._generations.add(generation)
        return generation

    async def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        *others: Any,
        **arguments: Any,
    ) -> Generation:
        """Queue a request now; closing the returned `Generation` ends it. The others are those of `generate`."""
        refuse_given({"arrival_time": arrival_time})
        if isinstance(params, PoolingParams):
            refuse("add_request with PoolingParams", "encode() takes them, and LLMEngine.add_request()")
        generation = self.generate(prompt, params, key_of(request_id), lora_request, *others, **arguments)
        return await generation.__aenter__()

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        data_parallel_rank: int | None = None,
        client: str | None = None,
        deadline: float | None = None,
        queue_timeout: float | None = None,
        cache_salt: str | None = None,
        **vllm_only: object,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the one output of a pooled request; its numbers are a tensor.

        Args:
            prompt: see `generate`, as for the arguments that are not named here.
            pooling_params: by default those of the task that the model is for.
        Raises:
            InvalidRequest: a wrong argument, or a task that the model does not do; a ValueError.
            RequestFailed: the result could not be computed.
        """
        refuse_given(vllm_only)
        check_rank(data_parallel_rank)
        content, salt = split_prompt(prompt, None, cache_salt)
        params = params_of_task(pooling_params, None)
        begin = None if self._log is None else partial(self._log.begin, prompt=content, params=params)
        # Nothing is held while it is suspended at the yield, so that a generator left there leaves no request behind.
        [output] = await self.engine.encode_all(
            [content],
            params,
            request_id=None if request_id is None else key_of(request_id),
            priority=priority,
            client=client,
            deadline=deadline,
            queue_timeout=queue_timeout,
            lora=lora_request,
            cache_salt=salt,
            trace_headers=trace_headers,
        )
        if begin is not None:  # no earlier: the engine may have named it
            begin(output.request_id, lora_request=lora_request).finished(None)
        yield with_tensor(output)

    def stream_generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **arguments: Any,
    ) -> TextPieces:
        """Return the text of one answer, piece by piece; used like `generate`."""
        params = sampling_params or self.engine.default_sampling_params()
        params = attrs.evolve(params, output_kind=RequestOutputKind.DELTA)
        return TextPieces(self.generate(prompt, params, request_id, **arguments))

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their readers get the output so far, with finish_reason `abort`. Unknown ids are ignored.

        Args:
            request_id: one, or several.
            internal: makes no difference: there are no ids but the caller's.
        """
        for one in request_keys(request_id):
            self.engine.abort(one)
        await checkpoint()

    def get_request_status(self, request_id: str) -> RequestStatus | None:
        """Return the status of a request; None for one that is unknown or already forgotten."""
        return self.engine.status(key_of(request_id))

    def get_num_unfinished_requests(self) -> Count:
        """Return the number of requests that wait or run; each of the n answers to a prompt is one."""
        return Count(self.engine.statistics().num_requests_live)

    def has_unfinished_requests(self) -> bool:
        """Return True if a request waits or runs."""
        return self.get_num_unfinished_requests() > 0

    # ------------------------------------------------------------------------------------------- numbers

    async def do_log_stats(self, scheduler_outputs: object = None, model_output: object = None) -> None:
        """Write the throughput since the last line to the log now, and have the stat loggers write theirs.

        Args:
            scheduler_outputs: makes no difference, as in vLLM since it counts by itself.
            model_output: likewise.
        """
        self.engine.tell_stat_loggers(asks_for_summary=True)
        await checkpoint()

    @property
    def stat_loggers(self) -> dict[str, Any]:
        """Stat loggers that were given or added, by name; those of a list are numbered."""
        return dict(self._loggers.guests)

    def add_logger(self, logger_name: str, logger: Any) -> Any:
        """Report every step to this logger; see `StatLoggerBase`. The result may be awaited.

        Raises:
            KeyError: there is one of that name, as in vLLM.
        """
        engine = self.engine
        engine.add_stat_logger(self._loggers.add(logger_name, logger, engine.index))
        return Done()

    def remove_logger(self, logger_name: str) -> Any:
        """Stop reporting to this logger. The result may be awaited.

        Raises:
            KeyError: there is none of that name.
        """
        self.engine.remove_stat_logger(self._loggers.take(logger_name))
        return Done()


def _runs_in_asyncio() -> bool:
    if trio.lowlevel.in_trio_run():
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


AsyncLLMEngine = AsyncLLM
EngineDeadError = EngineDead
