"""vLLM's `LLMEngine`: `add_request`, then `step` until all outputs are there, without Trio and without threads.

The same `EngineCore` and `RequestBuilder` as in `Engine` decide everything about a request; here the caller of `step()`
drives them. There is no concurrency, supervision or cancellation: these come with the actors.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Self, TypeVar, cast

import attrs

from triolet.actors.executors.hash_key import hash_key
from triolet.compat.engine_args import EngineArgs, runners_of
from triolet.compat.in_process import InProcessAdapters, InProcessGrammars
from triolet.compat.operations.interrupts import HeldInterrupts
from triolet.compat.operations.metrics import Metric, metrics_of
from triolet.compat.operations.stat_loggers import GivenLoggers, NamedLoggers
from triolet.compat.operations.synchronous import EngineOperations, Loaded
from triolet.compat.pooling import pooled_tensor
from triolet.compat.prompts import EngineCoreRequest, PreparedPrompt, split_prompt
from triolet.compat.refusals import (
    ENGINE_ATTRIBUTES,
    ENGINE_METHODS,
    check_rank,
    check_request_id,
    check_usage_context,
    refuse,
    refuse_given,
    refusing,
)
from triolet.compat.refusals import request_ids as listed_ids
from triolet.compat.views import ConfigView
from triolet.config.engine import EngineConfig
from triolet.core.engine_core import EngineCore, OpenOutput
from triolet.core.journal import Journal
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.detokenizer import HoldBack
from triolet.core.output.output_processor import OutputCollector, ParallelCollector, collector_of
from triolet.core.output.scoring import Scoring, plan_scoring
from triolet.core.request.lora import LoRARequest
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.param_validation import check_type
from triolet.core.request.params import SamplingParams
from triolet.core.request.pooling_params import PoolingParams
from triolet.core.request.prompt import parse_prompt
from triolet.core.request.request import FinishReason
from triolet.core.request.request_builder import Need, RequestBuilder
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized, TokenizerInterface
from triolet.core.scheduling.admission import Admission
from triolet.core.scheduling.scheduler import SchedulerConfig
from triolet.core.step_plan import steps_of
from triolet.errors import Overloaded, RequestIdInUse, UnsupportedFeature
from triolet.model.loading.imports import no_full_collections
from triolet.observability.engine_index import ENGINE_INDICES
from triolet.observability.prometheus import Metrics
from triolet.observability.stat_loggers import StatLogger, StatLoggers
from triolet.observability.tracing_setup import accepted_trace_headers, open_tracing

T = TypeVar("T")

IN_PROCESS = ("thread", "inline")  # runners that mean the process of an `LLMEngine`


def load(config: EngineConfig) -> Loaded:
    """Load the model and the tokenizer that a configuration names.

    Raises:
        ConfigError: a field that does not fit the model or the machine.
        ModelError: the model cannot be loaded.
    """
    # Late, because torch takes a second to import.
    with no_full_collections():
        from triolet.model.loading.runner import load_runner
        from triolet.model.tokenizer.tokenizer import check_template, load_configured_tokenizer
    from triolet.nano import PATH

    config = attrs.evolve(config, model=config.model or str(PATH))
    if config.tensor_parallel_size > 1:
        refuse(
            f"tensor_parallel_size={config.tensor_parallel_size}",
            "LLM and LLMEngine compute in this process: AsyncLLM has several",
            config.tensor_parallel_size,
        )
    if config.num_replicas > 1:
        refuse(
            f"replicas={config.num_replicas}",
            "LLM and LLMEngine compute in this process: AsyncLLM has several",
            config.num_replicas,
        )
    if config.runner in ("remote", "ray"):
        refuse(
            f"runner={config.runner!r}",
            "LLM and LLMEngine compute in this process: AsyncLLM computes on other machines",
            config.runner,
        )
    check_template(config.chat_template)
    runner, info = load_runner(config, lambda progress: None)
    return runner, info, load_configured_tokenizer(config, Path(info.folder))


@refusing(ENGINE_METHODS, ENGINE_ATTRIBUTES)
class LLMEngine(EngineOperations):
    """Synchronous engine: `step()` computes in the caller's thread, and one thread uses the engine.

    Args:
        vllm_config: configuration of the engine.
        log_stats: a line in the log every ten seconds of work, and `get_metrics`.
        stat_loggers: factories of loggers that are told of every step.
        loaded: a model that is loaded already.
        clock: returns monotonic seconds.
        **vllm_only: refused unless they have no value.
    """

    def __init__(
        self,
        vllm_config: EngineConfig,
        executor_class: object = None,
        log_stats: bool = True,
        aggregate_engine_logging: bool = False,
        usage_context: object = None,
        stat_loggers: GivenLoggers = None,
        mm_registry: object = None,
        multiprocess_mode: bool = False,
        *,
        loaded: Loaded | None = None,
        clock: Callable[[], float] = time.monotonic,
        **vllm_only: object,
    ) -> None:
        super().__init__()
        check_usage_context(usage_context)
        given = {"mm_registry": mm_registry, **vllm_only}
        if executor_class is not None and runners_of("executor_class", executor_class)[0] not in IN_PROCESS:
            given["executor_class"] = executor_class
        given["multiprocess_mode"] = multiprocess_mode
        refuse_given({**given, "aggregate_engine_logging": aggregate_engine_logging})
        if vllm_config.record is not None:
            refuse("record", "an engine without an event loop writes no recording", vllm_config.record)
        if vllm_config.async_scheduling:
            refuse("async_scheduling", "`step()` computes one step after the other", True)
        if isinstance(vllm_config, ConfigView):  # of another engine
            vllm_config = vllm_config.plain()
        self._config = config = vllm_config
        self.log_stats = log_stats and config.log_stats
        self._can_load = loaded is None
        runner, info, tokenizer = loaded or load(config)
        self._runner = runner
        self._facts = info, tokenizer
        self._clock = clock
        self._core = core = EngineCore(Admission.of(config, Journal()))
        core.model.info, core.model.tokenizer = self._facts
        core.is_scheduling = True  # between two calls of `step()` the scheduler is always whole
        one_by_one = attrs.evolve(config, async_scheduling=False)
        self._limits = SchedulerConfig.of(one_by_one, self._info, hash_key(config))
        core.new_scheduler(self._limits)
        self._grammars = InProcessGrammars(config, core)
        self._adapters = InProcessAdapters(config, self._info.adapters, self._runner)
        seeds = Random(config.seed)
        self._builder = RequestBuilder(config, core.model, lambda: seeds.getrandbits(63))
        self._outputs: dict[str, tuple[OpenOutput, ...]] = {}
        self._answers: dict[str, ParallelCollector | OutputCollector] = {}
        self._interrupts = HeldInterrupts()
        self._untold: list[Any] = []  # outputs of a `step()` that Ctrl-C ended
        self._index = ENGINE_INDICES.take()
        # There is no scope whose end could give it back.
        weakref.finalize(self, ENGINE_INDICES.give_back, self._index)
        self._reporting = StatLoggers(core.journal, self.statistics, writes_log=self.log_stats)
        self._tracing = open_tracing(config)
        if self._tracing is not None:
            self.add_stat_logger(self._tracing)
            # Likewise: spans that still wait are sent when the program ends.
            atexit.register(self._tracing.close)
        for logger in NamedLoggers(self.vllm_config).make(stat_loggers, self._index):
            self.add_stat_logger(logger)
        # From the beginning: programs ask for them when everything has been answered.
        self._metrics = Metrics(self, prefix="vllm:") if self.log_stats else None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: GivenLoggers = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Make an engine with these arguments."""
        return cls(
            engine_args.create_engine_config(),
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            enable_multiprocessing=enable_multiprocessing,
        )

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: object = None,
        stat_loggers: GivenLoggers = None,
        disable_log_stats: bool = False,
    ) -> Self:
        """Make an engine with this configuration."""
        return cls(
            vllm_config,
            usage_context=usage_context,
            stat_loggers=stat_loggers,
            log_stats=not disable_log_stats,
        )

    @property
    def _info(self) -> ModelInfo:
        return self._facts[0]

    @property
    def _tokenizer(self) -> TokenizerInterface | None:
        return self._facts[1]

    # ------------------------------------------------------------------------------------------ requests

    def plan_scoring(
        self, data_1: Any, data_2: Any, params: PoolingParams | None = None, instruction: str | None = None
    ) -> Scoring:
        """Return the pooled requests that give the scores of pairs of texts; see `triolet.Engine.score`."""
        return plan_scoring(data_1, data_2, self._info, self._tokenizer, params, instruction)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        prompt_text: str | None = None,
        *,
        data_parallel_rank: int | None = None,
        client: str | None = None,
        cache_salt: str | None = None,
        **vllm_only: object,
    ) -> str:
        """Queue a request; its outputs come from `step()`.

        Returns:
            Its id.
        Raises:
            TypeError: the id is no string.
            InvalidRequest: another argument is wrong, or the adapter cannot be loaded (`AdapterError`).
            Overloaded: too many requests wait; each of the n answers to a prompt counts.
        """
        given = {"arrival_time": arrival_time, **vllm_only}
        refuse_given({**given, "tokenization_kwargs": tokenization_kwargs, "prompt_text": prompt_text})
        check_rank(data_parallel_rank)
        check_request_id(request_id)
        check_type("priority", priority, int, "an integer")
        if isinstance(prompt, EngineCoreRequest):
            params, priority, cache_salt, lora_request, trace_headers = prompt.fill(
                params=params,
                priority=priority,
                cache_salt=cache_salt,
                lora_request=lora_request,
                trace_headers=trace_headers,
            )
            check_rank(prompt.data_parallel_rank)
            prompt = {"prompt_token_ids": prompt.prompt_token_ids}
        with self._counted_rejection():
            self._admit(
                request_id,
                prompt,
                params,
                cache_salt,
                lora_request,
                priority=priority,
                client=client,
                trace_headers=accepted_trace_headers(trace_headers, self._tracing),
            )
        return request_id

    def prepare(
        self, prompt: Any, params: SamplingParams | PoolingParams, lora_request: LoRARequest | None = None
    ) -> PreparedPrompt:
        """Encode a prompt and check it, as `add_request` does that takes the result in its place; nothing is queued.

        Raises:
            InvalidRequest: the prompt or another argument is wrong. The adapter is not read.
        """
        with self._counted_rejection():
            params, pooling = self._checked(params)
            self._core.admission.check_answers(params.n)
            if lora_request is not None:
                self._adapters.check(lora_request)
            return self._prepare(prompt, params, pooling, None)

    @contextmanager
    def _counted_rejection(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._core.journal.stats.rejected(error.limit if isinstance(error, Overloaded) else None)
            raise

    def _admit(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams | None,
        cache_salt: str | None,
        lora_request: LoRARequest | None,
        *,
        client: str | None,
        **facts: Any,
    ) -> None:
        if request_id in self._answers:
            raise RequestIdInUse(request_id)
        admission, now_s = self._core.admission, self._clock()
        params, pooling = self._checked(params)
        # Before the prompt is tokenized: work on a request that is refused anyway would be in vain.
        admission.reserve(now_s, params.n, client=client)
        try:
            adapter = None if lora_request is None else self._adapters.resolve(lora_request)
            if not isinstance(prompt, PreparedPrompt):
                prompt = self._prepare(prompt, params, pooling, cache_salt)
            requests = self._builder.build(
                request_id,
                params,
                prompt.tokenized,
                prompt.constraint,
                arrival_s=now_s,
                client=client,
                cache_salt=prompt.cache_salt,
                pooling=pooling,
                adapter=adapter,
                **facts,
            )
            admission.check_tokens(now_s, client)
        finally:
            # Whether it is refused now or in the journal from `add` on: the journal counts its own.
            admission.give_back(params.n, client)
        hold_back = cast("HoldBack", self.vllm_config.hold_back)
        with self._interrupts.held():
            # Wall-clock time, as vLLM's `RequestMetrics` have it; all other times are monotonic.
            outputs = self._core.add(requests, arrival_time=time.time(), hold_back=hold_back)
            self._outputs[request_id] = outputs
            self._answers[request_id] = collector_of([output.processor.collector for output in outputs])

    def _checked(
        self, params: SamplingParams | PoolingParams | None
    ) -> tuple[SamplingParams, PoolingParams | None]:
        if isinstance(params, PoolingParams):
            return self._builder.check_pooling(params)
        if params is not None:
            check_type("params", params, SamplingParams, "SamplingParams or PoolingParams")
        return self._builder.check(params), None

    def _prepare(
        self, prompt: Any, params: SamplingParams, pooling: PoolingParams | None, cache_salt: str | None
    ) -> PreparedPrompt:
        builder = self._builder
        content, salt = split_prompt(prompt, None, cache_salt)
        parsed = parse_prompt(content)
        tokenized = self._run(
            builder.tokenize(parsed, params)
            if pooling is None
            else builder.tokenize_pooled(parsed, pooling, None)
        )
        return PreparedPrompt(tokenized, self._run(builder.constrain(params, tokenized)), cache_salt=salt)

    def _run(self, steps: Generator[Need, Tokenized | None, T]) -> T:
        """Run the preparation of a request to its end: tokenize and compile grammars here and now."""
        answer: Tokenized | None = None
        try:
            while True:
                need, answer = steps.send(answer), None
                if isinstance(need, Tokenize):
                    assert self._tokenizer is not None, "`RequestBuilder` asks nothing of a model without one"
                    answer = self._tokenizer.tokenize(need)
                else:
                    self._grammars.compile(need)
        except StopIteration as end:
            result: T = end.value
            return result

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests; the next `step()` returns their output so far, with finish_reason `abort`.

        Unknown ids are ignored.
        """
        with self._interrupts.held():
            for one in listed_ids(request_ids):
                for output in self._outputs.get(one, ()):
                    self._core.finish(output.entry.serial, FinishReason.ABORT)

    def discard(self, request_ids: Iterable[str]) -> None:
        """End requests and forget them: `step()` returns no more output of them."""
        with self._interrupts.held():
            for one in request_ids:
                self.abort_request(one)
                self._deliver()
                if one in self._answers:
                    self._forget(one)
                self._untold = [output for output in self._untold if output.request_id != one]

    def has_request(self, request_id: str) -> bool:
        """Return True if the id is in use."""
        return request_id in self._answers

    def has_place(self, num_answers: int = 1) -> bool:
        """Return False if a request for so many answers should wait until others have ended.

        True does not promise admission: `add_request` raises for a request that can never be admitted.
        """
        journal, admission = self._core.journal, self._core.admission
        if not journal:  # nothing would end while it waits
            return True
        is_short = journal.num_queued_tokens < admission.max_queued_tokens
        return is_short and len(journal) + num_answers <= admission.max_live_requests

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that wait, run or have output to take; n answers to a prompt count n times."""
        num_untold = sum(output.request_id not in self._outputs for output in self._untold)
        return sum(map(len, self._outputs.values())) + num_untold

    def has_unfinished_requests(self) -> bool:
        """Return True if a request waits, runs or has output to take."""
        return bool(self._answers or self._untold)

    def has_unfinished_requests_dp(self, has_unfinished: bool) -> bool:
        """Return the argument: there are no other engines to ask."""
        return has_unfinished

    # ---------------------------------------------------------------------------------------------- step

    def step(self) -> list[Any]:
        """Compute one step, and return the new outputs, at most one of each request.

        An output is a `RequestOutput`, or, of a pooled request, a `PoolingRequestOutput`.

        Raises:
            Exception: an error of the model's runner, unchanged. Later steps compute all requests again, except one
                that is found to crash the runner each time: that one fails.
            KeyboardInterrupt: Ctrl-C; no request is lost, and no token.
        """
        return self.step_for(None)

    def step_for(self, request_ids: Container[str] | None) -> list[Any]:
        """Compute one step, as `step` does, and return the new outputs of these requests; those of others wait."""
        outputs: list[Any] = []
        try:
            with self._interrupts.held():
                outputs = self._take_untold(request_ids)
                if not outputs:
                    self._compute()
                    self._deliver()
                    outputs = self._take_outputs(request_ids)
                    self._reporting.report(self._clock())
            return outputs
        except BaseException:  # of an interrupt that came meanwhile: the caller gets them with the next step
            self._untold += outputs
            raise

    def _compute(self) -> bool:
        with self._interrupts.held():  # but for the time in which the runner computes
            return self._compute_held()

    def _compute_held(self) -> bool:
        core = self._core
        core.add_arrivals()
        self._grammars.answer()
        began_s = time.perf_counter()
        plan = core.plan_step(self._clock())
        if plan is None:
            return False
        assert self._runner is not None, "the core plans no step while the engine sleeps"
        if self._profile is not None:
            self._profile.note_plan(plan.step_id, began_s, time.perf_counter())
        try:
            # One step for each call, as in vLLM, also of a plan for several: the caller may add or abort requests
            # between any two. Such a plan ends here, and the next one goes on with the blocks that it has taken.
            with self._interrupts.let_through():
                result = next(steps_of(plan, self._runner.execute, must_halt=lambda: True))
        except Exception as error:
            core.fail_step(plan, error)
            self._start_over()
            raise
        except BaseException:  # Ctrl-C: not counted as a crash of any request
            self._start_over()
            raise
        began_s = time.perf_counter()
        core.apply(result, self._clock())
        if self._profile is not None:
            self._profile.note_result(plan.step_id, began_s, time.perf_counter())
        return True

    def _start_over(self) -> None:
        # The runner may have done half a step, so everything is computed again from the journal.
        assert self._runner is not None
        self._runner.reset()
        self._core.new_scheduler(self._limits)

    def _deliver(self) -> None:
        with self._interrupts.held():
            # A stop string in what is delivered ends its request, which is progress again.
            while serials := self._core.take_progress():
                for serial in serials:
                    self._core.advance(serial, self._clock())

    def _take_untold(self, request_ids: Container[str] | None) -> list[Any]:
        if request_ids is None or not self._untold:
            outputs, self._untold = self._untold, []
            return outputs
        outputs = [output for output in self._untold if output.request_id in request_ids]
        self._untold = [output for output in self._untold if output.request_id not in request_ids]
        return outputs

    def _take_outputs(self, request_ids: Container[str] | None) -> list[Any]:
        outputs: list[Any] = []
        for request_id, answers in tuple(self._answers.items()):
            if request_ids is not None and request_id not in request_ids:
                continue  # merged with what comes, as of any slow reader
            while answers.has_output():
                entry, output = self._outputs[request_id][0].entry, answers.take()
                outputs.append(output if entry.request.pooling is None else pooled_tensor(entry))
            if outputs and outputs[-1].request_id == request_id and outputs[-1].finished:
                self._forget(request_id)
        return outputs

    def _forget(self, request_id: str) -> None:
        del self._answers[request_id], self._outputs[request_id]
        self._core.admission.ended(self._clock())

    # --------------------------------------------------------------------------------------------- facts

    def check_health(self) -> None:
        """Check the scheduler's counts against each other.

        Raises:
            InvariantViolated: they differ, which is a bug in triolet.
        """
        assert self._core.scheduler is not None
        self._core.scheduler.check()

    def statistics(self) -> EngineStatistics:
        """Return the engine's present counts."""
        return attrs.evolve(self._core.statistics(), engine_index=self._index)

    def cache_config(self) -> Mapping[str, object]:
        """Return the layout of the KV cache."""
        return self._info.cache_config(enable_prefix_caching=self.vllm_config.enable_prefix_caching)

    # ------------------------------------------------------------------------------------------- numbers

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        """Report every step to this logger from now on."""
        self._reporting.add(stat_logger)

    def remove_stat_logger(self, stat_logger: StatLogger) -> None:
        """Stop reporting to this logger."""
        self._reporting.remove(stat_logger)

    def tell_stat_loggers(self) -> None:
        """Report to the stat loggers now what the next step would report."""
        self._reporting.report(self._clock())

    def do_log_stats(self) -> None:
        """Write the throughput since the last line to the log now, and have the stat loggers write theirs."""
        self._reporting.report(self._clock(), asks_for_summary=True)

    def do_log_stats_with_interval(self) -> None:
        """Report to the stat loggers; the line in the log appears at most every ten seconds of work."""
        self.tell_stat_loggers()

    def get_metrics(self) -> list[Metric]:
        """Return all metrics under the prefix `vllm:`, each a `Counter`, `Gauge`, `Histogram` or `Vector`.

        Raises:
            UnsupportedFeature: statistics are off.
        """
        if self._metrics is None:
            raise UnsupportedFeature("get_metrics is not offered: log_stats is off", field="log_stats")
        # Brings the registry up to date.
        self._metrics.render()
        return metrics_of(self._metrics.registry.collect())
