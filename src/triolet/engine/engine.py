"""The engine that a caller holds: requests, facts, snapshots and shutdown.

Its methods are synchronous where they can be, and act on the state that the actors share (`EngineCore`, `Channels`,
`ActorProgress`). The actors belong to the scope of `open_engine`, not to this object.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast, overload

import attrs
import trio

from triolet.actors.actor_progress import ActorProgress
from triolet.actors.adapters import AdapterRegistry
from triolet.actors.channels import Channels
from triolet.actors.detokenizer import deliver
from triolet.actors.grammar_requests import GrammarRequests
from triolet.actors.prompt_adapters import PromptAdapterRegistry
from triolet.actors.supervisor import restart_after
from triolet.actors.watchdog import check_health
from triolet.config.engine import EngineConfig
from triolet.core.beam_search import BeamSearchOutput, BeamSearchParams
from triolet.core.engine_core import EngineCore
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.detokenizer import HoldBack
from triolet.core.output.output_processor import LiveRequest
from triolet.core.output.outputs import RequestOutput
from triolet.core.output.pooling_outputs import (
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from triolet.core.output.scoring import Scoring, plan_scoring
from triolet.core.recovery.supervision import CrashReport, RestartLog
from triolet.core.request.lora import LoRARequest
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.param_validation import check_type, int64
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.request.pooling_params import EMBED, POOLED, PoolingParams
from triolet.core.request.prompt import Prompt, parse_prompt
from triolet.core.request.prompt_adapter import PromptAdapterRequest
from triolet.core.request.request import FinishReason, RequestStatus
from triolet.core.request.request_builder import RequestBuilder
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.core.tools.answer import reasoning_parser_named, tool_parser_named
from triolet.engine.beam_search import beam_search
from triolet.engine.live_requests import live_requests
from triolet.engine.pooling import PoolingStream, encode_all, is_one_prompt
from triolet.engine.prompt_adapters import PromptAdapterMethods
from triolet.engine.snapshot import check_snapshot, resumed, take_snapshot
from triolet.engine.submission import (
    RequestPreparation,
    Submission,
    TrioRunGuard,
    check_truncation,
    duration,
    engine_deadline,
)
from triolet.engine.token_stream import SCOPE_ENDED, Availability, RequestTable, TokenStream, death_by
from triolet.engine.weights import WeightMethods
from triolet.engine.worker_calls import WorkerCallMethods
from triolet.errors import EngineDead
from triolet.ipc.snapshot import Snapshot
from triolet.observability.engine_index import ENGINE_INDICES
from triolet.observability.loop_monitor import LoopMonitor
from triolet.observability.stat_loggers import StatLogger, StatLoggers
from triolet.observability.tracing_setup import accepted_trace_headers, open_tracing


class RestartStream:
    """Iterator over the actors that are being restarted; made by `Engine.follow_restarts`, and ends with the engine.

    The first value is that of now, empty if none is. Values that were not read in time are left out.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shown: tuple[str, ...] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[str, ...]:
        engine = self._engine
        engine._run.check()
        await trio.lowlevel.checkpoint()
        while engine._availability.is_serving and engine._availability.death is None:
            restarting = tuple(sorted(engine._restart_log.restarting))
            if restarting != self._shown:
                self._shown = restarting
                return restarting
            await engine._progress.restarted.park()
        raise StopAsyncIteration


class Engine(WorkerCallMethods, WeightMethods, PromptAdapterMethods):
    """Running engine; `open_engine` makes it.

    Methods raise `WrongTrioRun` outside of the Trio run in which the engine was opened.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        channels: Channels,
        progress: ActorProgress,
        grammars: GrammarRequests,
        adapters: AdapterRegistry,
    ) -> None:
        super().__init__()
        self.config = config
        self._run, self._opened_s = TrioRunGuard(), trio.current_time()
        self._core, self._channels, self._progress, self._grammars = core, channels, progress, grammars
        self._adapters = adapters
        # Requests without a seed draw theirs from here: an engine of one seed repeats its answers.
        seeds = random.Random(config.seed)
        builder = RequestBuilder(config, core.model, lambda: seeds.getrandbits(63))
        self._prompt_adapters = PromptAdapterRegistry(config, core.model)
        preparation = RequestPreparation(
            builder, channels, progress, grammars, adapters, self._prompt_adapters
        )
        self._availability = Availability()
        hold_back = cast("HoldBack", config.hold_back)
        self._requests = RequestTable(hold_back, core, channels, progress, preparation, self._availability)
        self._num_restarts, self._restart_log = 0, RestartLog(progress.restarted.unpark_all)
        self._loop_watch = LoopMonitor()
        self._reporting = StatLoggers(core.journal, self.statistics, writes_log=config.log_stats)
        self._tracing = open_tracing(config)
        if self._tracing is not None:
            self.add_stat_logger(self._tracing)
        self.index = ENGINE_INDICES.take()  # until `run_engine` gives it back

    # ---------------------------------------------------------------------------------------- facts

    @property
    def model_info(self) -> ModelInfo:
        """Facts about the loaded model."""
        assert self._core.model.info is not None
        return self._core.model.info

    @property
    def model_name(self) -> str:
        """Name under which the model is shown."""
        return self.config.model_name

    @property
    def tokenizer(self) -> TokenizerInterface | None:
        """The model's tokenizer; None if it has none."""
        return self._core.model.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, tokens."""
        return self.model_info.max_model_len

    @property
    def tool_parser(self) -> str | None:
        """Format in which the model calls tools, for `plan_tools`.

        `none` if the chat template takes no tools; None if the format is unknown.
        """
        return tool_parser_named(self.config.tool_parser, self.tokenizer)

    @property
    def reasoning_parser(self) -> str | None:
        """Format in which the model marks its reasoning, for `plan_tools`; None if it marks none."""
        return reasoning_parser_named(self.config.reasoning_parser, self.tokenizer)

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's own parameters; if they have no `max_tokens`, the context is the limit."""
        return self.model_info.generation.sampling_params()

    def statistics(self) -> EngineStatistics:
        """Return the engine's counts, all taken at this moment."""
        self._run.check()
        return attrs.evolve(
            self._core.statistics(),
            engine_index=self.index,
            num_restarts=self._num_restarts,
            num_lost_records=self._requests.num_lost_records,
            restarts=dict(self._restart_log.counts),
            restarting=tuple(sorted(self._restart_log.restarting)),
            longest_task_step_s=self._loop_watch.longest_s,
            num_long_task_steps=self._loop_watch.num_long,
        )

    def add_stat_logger(self, stat_logger: StatLogger) -> None:
        """Report every step and every ended request to a logger from now on; one that raises is removed."""
        self._run.check()
        self._reporting.add(stat_logger)

    def remove_stat_logger(self, stat_logger: StatLogger) -> None:
        """Stop reporting to a logger; harmless if it was not added."""
        self._run.check()
        self._reporting.remove(stat_logger)

    def tell_stat_loggers(self, *, asks_for_summary: bool = False) -> None:
        """Report to the stat loggers now what the next step would report, and perhaps ask for their summaries."""
        self._run.check()
        self._reporting.report(trio.current_time(), asks_for_summary=asks_for_summary)

    def cache_config(self) -> dict[str, object]:
        """Return the layout of the KV cache, in vLLM's words."""
        return self.model_info.cache_config(enable_prefix_caching=self.config.enable_prefix_caching)

    def check_health(self) -> None:
        """Check that requests are being served.

        Raises:
            EngineUnhealthy: work has been pending for `step_timeout` and no step has finished; names the actor that the
                others wait for. A restart may end this state.
            EngineDead: the engine has died; this is final.
            EngineClosed: the engine's scope has ended. An engine that drains still serves.
        """
        self._run.check()
        self._availability.check_serving()
        check_health(self._core, self._channels, self._progress, self._grammars, self.config.step_timeout)

    @property
    def death(self) -> EngineDead | None:
        """Error of a dead engine; None while it lives."""
        return self._availability.death

    @property
    def is_open(self) -> bool:
        """True if requests are taken."""
        return self._availability.is_open

    def follow_restarts(self) -> RestartStream:
        """Return an iterator over changes of `statistics().restarting`, which ends with the engine."""
        self._run.check()
        return RestartStream(self)

    def status(self, request_id: str) -> RequestStatus | None:
        """Return the status of a request, also for a while after it ended; None for an unknown id."""
        self._run.check()
        return self._requests.status(request_id)

    def requests(self, owner: str | None = None) -> tuple[LiveRequest, ...]:
        """Return the requests that wait or run, of one owner or of all, in the order of arrival. Never waits."""
        self._run.check()
        return live_requests(self._requests.submissions.values(), self._core, owner)

    # ------------------------------------------------------------------------------------- requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        queue_timeout: float | None = None,
        lora: LoRARequest | None = None,
        prompt_adapter: PromptAdapterRequest | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        owner: str | None = None,
    ) -> TokenStream:
        """Return a stream of the answer to a prompt, to be entered with `async with`; nothing is queued before that.

        Args:
            prompt: a text, a list of token ids, `{"prompt_token_ids": [...]}` or a list of chat messages.
            sampling_params: by default the model's own.
            request_id: unique among live requests; by default the engine names it.
            priority: lower runs first under the `priority` policy.
            client: name under which admission and fairness count the request.
            deadline: absolute `trio.current_time()` at which the answer ends with the tokens so far; the deadline of
                the caller's own cancel scope counts as well.
            queue_timeout: seconds that the request may wait to be scheduled.
            lora: LoRA adapter that computes the answer; loaded now if it is not yet.
            prompt_adapter: soft prompt before the prompt; loaded now if it is not yet.
            cache_salt: prefixes are shared only between requests of the same salt.
            trace_headers: `traceparent` and `tracestate` of the request's trace; by default the caller's span.
            owner: name that `requests` filters by. It takes the place of `client` in admission and fairness: a server
                sets it to the name of the key, where `client` comes from the request.
        Raises:
            InvalidRequest: a wrong argument. Checks that need the model or the engine's state are made when the stream
                is entered, which raises `InvalidRequest`, `Overloaded`, `EngineClosed` or `EngineDead`.
        """
        self._run.check()
        if lora is not None:
            check_type("lora", lora, LoRARequest, "a LoRARequest")
        if prompt_adapter is not None:
            check_type("prompt_adapter", prompt_adapter, PromptAdapterRequest, "a PromptAdapterRequest")
        if sampling_params is not None:
            check_type("sampling_params", sampling_params, SamplingParams, "SamplingParams")
        submission = self._submission(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            client=client,
            deadline=deadline,
            queue_timeout=queue_timeout,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            owner=owner,
        )
        submission.lora, submission.prompt_adapter = lora, prompt_adapter
        return self._stream(submission)

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        client: str | None = None,
        deadline: float | None = None,
        queue_timeout: float | None = None,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
        owner: str | None = None,
    ) -> PoolingStream:
        """Return a stream of the one output of a pooled request, to be entered with `async with`.

        Args:
            prompt: see `generate`, as for the arguments that are not named here.
            pooling_params: by default those of the task that the model is for.
            truncate_prompt_tokens: length to which a longer prompt is cut, tokens; -1 is the longest that fits.
            truncation_side: side that is cut off: `right`, the default, or `left` to keep the last tokens.
        Raises:
            InvalidRequest: see `generate`. A task that the model does not do is refused when the stream is entered.
        """
        self._run.check()
        if lora is not None:
            check_type("lora", lora, LoRARequest, "a LoRARequest")
        if pooling_params is not None:
            check_type("pooling_params", pooling_params, PoolingParams, "PoolingParams")
        check_truncation(truncate_prompt_tokens, truncation_side)
        submission = self._submission(
            prompt,
            POOLED,
            request_id=request_id,
            priority=priority,
            client=client,
            deadline=deadline,
            queue_timeout=queue_timeout,
            cache_salt=cache_salt,
            trace_headers=trace_headers,
            owner=owner,
        )
        submission.pooling, submission.lora = pooling_params or PoolingParams(), lora
        submission.most_tokens, submission.keeps_end = truncate_prompt_tokens, truncation_side == "left"
        return PoolingStream(submission, self._stream(submission))

    async def encode_all(
        self, prompts: Sequence[Prompt], pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the outputs of several prompts, in their order; `max_num_seqs` of them are in the engine at one time.

        Arguments and errors are those of `encode`, without `request_id`. If one prompt fails, the others are aborted.

        Raises:
            InvalidPrompt: there is no prompt.
            RequestFailed: a result could not be computed.
        """
        self._run.check()
        # more than may wait would be refused, although nothing else runs
        most = min(self.config.max_num_seqs, self.config.max_queued_requests)
        return await encode_all(
            lambda prompt: self.encode(prompt, pooling_params, **arguments), prompts, most
        )

    @overload
    async def embed(
        self, prompts: str | Sequence[int], pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> EmbeddingRequestOutput: ...

    @overload
    async def embed(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        pooling_params: PoolingParams | None = None,
        **arguments: Any,
    ) -> list[EmbeddingRequestOutput]: ...

    async def embed(
        self, prompts: Any, pooling_params: PoolingParams | None = None, **arguments: Any
    ) -> EmbeddingRequestOutput | list[EmbeddingRequestOutput]:
        """Return the embedding of a prompt, or those of several prompts, in their order.

        Args:
            prompts: a text, a list of token ids, or a list of texts or of lists of token ids.
            pooling_params: of the task `embed`.
            arguments: of `encode`.
        Raises:
            InvalidRequest: a wrong argument, or a model without embeddings.
            RequestFailed: an embedding could not be computed.
        """
        params = attrs.evolve(pooling_params or PoolingParams(), task=EMBED)
        is_one = is_one_prompt(prompts)
        outputs = await self.encode_all([prompts] if is_one else prompts, params, **arguments)
        found = [EmbeddingRequestOutput.from_base(output) for output in outputs]
        return found[0] if is_one else found

    async def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
        **arguments: Any,
    ) -> list[ScoringRequestOutput]:
        """Return the scores of pairs of texts, such as a query and documents, in the order of the pairs.

        Args:
            data_1: a text, which is compared with each of `data_2`, or as many texts as there are in `data_2`.
            data_2: a text or several.
            pooling_params: their task is set here.
            instruction: task of a reranker that is asked in a chat; by default the one that it was trained with.
            arguments: of `encode`.
        Raises:
            InvalidRequest: a wrong argument, or a model without scores.
            RequestFailed: a score could not be computed.
        """
        self._run.check()
        scoring = self.plan_scoring(data_1, data_2, pooling_params, instruction=instruction)
        return scoring.scores(await self.encode_all(scoring.prompts, scoring.params, **arguments))

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, **arguments: Any
    ) -> BeamSearchOutput:
        """Find the likeliest answers to a prompt; see `triolet.beam_search`."""
        self._run.check()
        return await beam_search(self, prompt, params, **arguments)

    def plan_scoring(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
    ) -> Scoring:
        """Return the pooled requests that `score` makes, for callers that need their outputs, too."""
        if pooling_params is not None:
            check_type("pooling_params", pooling_params, PoolingParams, "PoolingParams")
        if instruction is not None:
            check_type("instruction", instruction, str, "a string")
        return plan_scoring(data_1, data_2, self.model_info, self.tokenizer, pooling_params, instruction)

    def _submission(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        priority: int,
        client: str | None,
        deadline: float | None,
        queue_timeout: float | None,
        cache_salt: str | None,
        trace_headers: Mapping[str, str] | None,
        owner: str | None,
    ) -> Submission:
        # Wrong types are refused by the call itself, so that the traceback shows it.
        texts = {"request_id": request_id, "client": client, "cache_salt": cache_salt, "owner": owner}
        for field, text in texts.items():
            if text is not None:
                check_type(field, text, str, "a string")
        priority = int64("priority", priority)  # a snapshot of all requests holds no longer one
        deadline_s = engine_deadline(deadline, self._opened_s)
        queue_timeout_s = duration("queue_timeout", queue_timeout)
        return Submission(
            prompt=parse_prompt(prompt),
            params=params,
            request_id=self._requests.new_id() if request_id is None else request_id,
            priority=priority,
            client=client,
            deadline_s=deadline_s,
            queue_timeout_s=queue_timeout_s,
            cache_salt=cache_salt,
            trace_headers=()
            if self._tracing is None and (trace_headers is None or trace_headers == {})
            else accepted_trace_headers(trace_headers, self._tracing),
            owner=owner,
        )

    def _stream(self, submission: Submission) -> TokenStream:
        return TokenStream(submission, self._requests, self._core, self._progress, self._run)

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **arguments: Any
    ) -> RequestOutput:
        """Return the whole answer at once; arguments and errors are those of `generate`.

        Raises:
            RequestFailed: the answer could not be finished.
        """
        if sampling_params is not None:
            check_type("sampling_params", sampling_params, SamplingParams, "SamplingParams")
        params = sampling_params or self.default_sampling_params()
        params = attrs.evolve(params, output_kind=RequestOutputKind.FINAL_ONLY)
        async with self.generate(prompt, params, **arguments) as stream:
            async for output in stream:
                return output
        raise AssertionError("a stream ends with an output or an error")

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets the output so far, with finish_reason `abort`. Unknown ids are ignored.

        Synchronous and idempotent: its blocks are free when this returns, or when the step in flight ends.
        """
        self._run.check()
        self._requests.abort(request_id)

    def snapshot(self, request_id: str | None = None) -> Snapshot:
        """Return the unfinished requests, or the one of an id, for another engine to `resume`; nothing changes here."""
        self._run.check()
        live = self._requests.submissions
        chosen = live.values() if request_id is None else filter(None, [live.get(request_id)])
        return take_snapshot(self.model_info, chosen)

    def resume(self, snapshot: Snapshot) -> dict[str, TokenStream]:
        """Return streams that go on with the unfinished requests of another engine of the same model, by request id.

        Each is entered like that of `generate`. Its first output brings the answer so far, and its text is the same as
        without the break.

        Raises:
            SnapshotError: the snapshot is of another model.
        """
        self._run.check()
        check_snapshot(snapshot, self.model_info)
        submissions = [resumed(saved) for saved in snapshot.requests]
        self._requests.keep_ids(submissions)
        return {submission.request_id: self._stream(submission) for submission in submissions}

    # ---------------------------------------------------------------------------------- shutdown

    async def drain(self, deadline: float) -> Snapshot:
        """Take no new requests, and let the live ones finish; a pause ends, and so does sleep.

        Args:
            deadline: absolute `trio.current_time()`; requests that have not finished by then end with finish_reason
                `shutdown`.
        Returns:
            The requests that had not finished, for another engine to `resume`.
        """
        self._run.check()
        deadline_s = engine_deadline(deadline, self._opened_s)
        self._availability.close("the engine is draining and takes nothing new", still_serving=True)
        self._requests.end_admissions()
        self._release_all()
        with trio.move_on_at(deadline_s):
            while self._core.journal:
                await self._progress.idle.park()
        snapshot = self.snapshot()
        self._end_all(FinishReason.SHUTDOWN)
        await trio.lowlevel.checkpoint()
        return snapshot

    def _end_all(self, reason: FinishReason) -> None:
        """End every live request now; readers get the output so far."""
        # No actor takes part, so that this works in whatever state they are.
        for entry in list(self._core.journal):
            self._core.finish(entry.serial, reason)
        for serial in list(self._core.outputs):
            deliver(self._core, self._progress, serial, trio.current_time())
        self._progress.idle.unpark_all()

    def shut_down(self) -> None:
        """Take nothing new, and end what there is with finish_reason `shutdown`; the engine's scope goes on."""
        self._run.check()
        self._availability.close(SCOPE_ENDED)
        self._requests.end_admissions()
        self._end_all(FinishReason.SHUTDOWN)
        self._progress.stepped.unpark_all()
        self._progress.restarted.unpark_all()

    def _die(self, cause: BaseException) -> None:
        """Fail every live request, after the root supervisor has given up."""
        self._availability.die(cause, was_told=bool(self._core.outputs))
        self._requests.end_admissions()
        for entry in list(self._core.journal):
            self._core.finish(entry.serial, FinishReason.ERROR)
        for serial in list(self._core.outputs):
            self._core.fail(serial, death_by(cause), trio.current_time())
        self._progress.stepped.unpark_all()
        self._progress.idle.unpark_all()
        self._progress.restarted.unpark_all()

    def _note_report(self, report: CrashReport) -> None:
        if (restart := restart_after(report)) is not None:
            self._num_restarts += 1
            self._restart_log.counts[restart] += 1
