"""The model runner: a `StepPlan` in, a `StepResult` out.

It makes no decisions: it keeps the table of rows, calls the model, samples, and stores the sampled tokens. After an
exception the table may hold half a step: call `reset()` and start the requests again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from triolet.core.scheduling.budget import DEFAULT_BATCHED_TOKENS
from triolet.core.step_plan import PromptLogprobs, RowFailure, RowResult, SampledToken, StepPlan, StepResult
from triolet.errors import InvariantViolated
from triolet.model.cuda.graphs import OnCaptured, ignore_captured
from triolet.model.cuda.step_device import StepDevice
from triolet.model.cuda.steps import DeviceSteps
from triolet.model.input_batch import Row, RowTable, StepInput
from triolet.model.interface import (
    BackgroundModel,
    CausalModel,
    GreedyModel,
    GreedyRun,
    GreedyStep,
    LayerCache,
    PartialModel,
)
from triolet.model.memory.kv_cache import allocate_kv_cache
from triolet.model.memory.out_of_memory import give_back, lack_of_memory
from triolet.model.memory.page_prefault import prefault_pages
from triolet.model.pooling import Pooler
from triolet.model.profile import StepProfile
from triolet.model.sampling.logits_processors import apply_bitmasks_
from triolet.model.sampling.logprobs import prompt_logprobs
from triolet.model.sampling.sampler import NO_SAMPLES, Samples, SamplingBatch, greedy_samples
from triolet.model.sampling.sampling_row import SamplingRow
from triolet.model.soft_prompts import SoftPromptBank, with_failures
from triolet.model.worker import Worker, call_worker

if TYPE_CHECKING:
    from triolet.core.kv_cache.cache_groups import CacheGroup
    from triolet.core.worker_call import WorkerCall
    from triolet.model.adapters import AdapterBank
    from triolet.model.memory.prefix_store import PrefixStore


class ModelRunner:
    """A model with its KV cache and the requests it is computing.

    Args:
        model: either backend's.
        num_blocks: of the KV cache.
        block_size: tokens in a block.
        max_num_seqs: rows of the table.
        max_model_len: longest sequence, tokens.
        device: where the model is.
        logprobs_mode: see `EngineConfig`.
        pooler: pools the hidden states of pooled requests; None for a model that only generates.
        adapters: LoRA adapters of the model's layers; None for a model without them.
        step_device: computes steps whose rows live on the device; None for a model that is not computed so.
        max_num_batched_tokens: most tokens of such a step.
        groups: cache groups of the model's layers; empty for one of all.
    Raises:
        ConfigError: there is no memory for so many blocks.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        logprobs_mode: str = "raw_logprobs",
        pooler: Pooler | None = None,
        adapters: AdapterBank[Any] | None = None,
        step_device: StepDevice | None = None,
        max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
        groups: tuple[CacheGroup, ...] = (),
    ) -> None:
        self.model: Any = model  # for the worker
        self._model = model
        self.worker = Worker(self)
        self.profile: StepProfile | None = None
        self._adapters = adapters
        self._pooler = pooler
        self._logprobs_mode, self._soft_prompts = logprobs_mode, SoftPromptBank(model.spec, device)
        self._greedy = model if isinstance(model, GreedyModel) else None
        self._partial = model if isinstance(model, PartialModel) else None
        self._background = model if isinstance(model, BackgroundModel) else None
        self._device = self.device = device
        self._cache = allocate_kv_cache(
            model.spec,
            num_blocks=num_blocks if step_device is None else num_blocks + 1,  # one for the padding of steps
            block_size=block_size,
            device=device,
            groups=groups,
        )
        # Layers of several groups have the same ones.
        tensors = list({id(tensor): tensor for layer in self._cache for tensor in layer.tensors}.values())
        self._pages = prefault_pages(tensors, device)
        self._table = RowTable(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            vocab_size=model.spec.vocab_size,
            device=device,
            num_groups=max(1, len(groups)),
            has_holes=any(group.window is not None for group in groups),
        )
        self._steps: DeviceSteps | None = None
        if step_device is not None:
            self._steps = DeviceSteps(
                model,
                self._cache,
                self._table,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                max_num_tokens=max_num_batched_tokens,
                device=step_device,
                logprobs_mode=logprobs_mode,
            )
        self._store: PrefixStore | None = None
        self._has_lacked_memory = False  # in the last step
        self._done_s = 0.0  # when the last result was there, seconds
        self._batch_rows: tuple[Row, ...] = ()
        self._batch = SamplingBatch((), model.spec.vocab_size, device)

    def keep_prefixes(self, open_store: Callable[[tuple[LayerCache, ...]], PrefixStore]) -> None:
        """Keep KV of prefixes in a store, which is opened for the KV cache."""
        self._store = open_store(self._cache)

    def capture_graphs(
        self, on_captured: OnCaptured = ignore_captured, *, only_largest: bool = False
    ) -> bool:
        """Capture the decode steps of all batch sizes, if the model is computed on the device's rows.

        Args:
            on_captured: told after each how many are done, and of how many.
            only_largest: capture one, to learn what memory they need.
        Returns:
            Whether there are graphs.
        """
        return self._steps is not None and self._steps.capture(on_captured, only_largest=only_largest)

    def flush(self) -> None:
        """Wait a little for what is still to be written to the prefix store."""
        if self._store is not None:
            self._store.flush()

    def call(self, call: WorkerCall) -> object:
        """Call a method of the worker, or a function with the model; see `core.worker_call.CallableRunner`."""
        if (
            call.invalidates
        ):  # what is computed from now on belongs to no files, and what they hold to other weights
            self._store = None
        answer = call_worker(self.worker, call)
        if call.invalidates and self._steps is not None and self._steps.graphs:
            self._steps.capture()  # the tensors of the model may be others now
        return answer

    def reset(self) -> None:
        """Forget every row."""
        # the KV cache needs no clearing: no block is read before it is written again
        if self._steps is not None:
            self._steps.clear()
        self._table.clear()
        if self._adapters is not None:
            self._adapters.clear()
        self._batch_for(())
        self.rest()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        Args:
            plan: follows the result of the one before, or, if it is made ahead, the one before.
        Returns:
            The sampled tokens; or, if memory ran out, only that fact.
        Raises:
            InvariantViolated: the plan contradicts the table of rows.
        """
        return self.submit(plan).result()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingStep:
        """Compute a step, or hand it to the device; the result is had of what is returned.

        The results of the steps before need not have been read: what a row that computes one token says is known where
        it is computed. They are read in the order of the steps.

        Args:
            plan: follows the one before.
        Raises:
            InvariantViolated: the plan contradicts the table of rows.
        """
        began_s = time.perf_counter()
        if plan.is_ahead:
            if self._has_lacked_memory:
                return PendingStep.of(self._pass_over(plan, "the step before found no memory"))
            if not (plan := self._table.without_failed(plan)).rows:
                return PendingStep.of(self._pass_over(plan))
        self._has_lacked_memory = False
        if self._device.index is not None:
            # Triton launches on the thread's current device, and a thread begins with the first one.
            torch.cuda.set_device(self._device)
        if self._greedy is not None:
            self._greedy.wake()  # the worker threads wake up while the input is prepared
        rest = plan
        if self._store is not None and (plan.saves or plan.loads):
            rest = self._store.take(plan, self._table, self._pages)
            if not rest.rows:
                self._place(rest)
                self.rest()
                return PendingStep.of(self._store.result(plan, rest, (), time.perf_counter() - began_s))
        rows = self._apply(rest)
        if self._steps is not None and self._steps.takes(rest, rows):
            return self._submit_to_device(self._steps, plan, rest, rows, began_s)
        if self._steps is not None:
            self._steps.pass_by(rest)
            if plan.is_ahead:  # by now it is known which rows failed in the step before
                rest, rows = self._table.without_failed(rest), [row for row in rows if not row.has_failed]
                if not rows:
                    return PendingStep.of(StepResult(plan.step_id, ()))
        return PendingStep.of(self._computed(plan, rest, self._table.input_of(rest, rows), began_s))

    def _submit_to_device(
        self, steps: DeviceSteps, plan: StepPlan, rest: StepPlan, rows: list[Row], began_s: float
    ) -> PendingStep:
        prepared_s = time.perf_counter()
        problem = None
        try:
            samples = steps.submit(rest, rows)
        except Exception as error:
            if (problem := lack_of_memory(error)) is None:
                raise
        if problem is not None:
            steps.rows.forget_all()  # some of it may have happened there
            return PendingStep.of(self._without_memory(plan, problem, began_s, prepared_s))

        def result() -> StepResult:
            steps.settle(samples)
            results = tuple(samples.settle())
            if self.profile is not None:
                self.profile.computed_s = time.perf_counter()
            return self._result(plan, rest, results, began_s, prepared_s)

        return PendingStep(result, samples.wait)

    def _without_memory(self, plan: StepPlan, problem: str, began_s: float, prepared_s: float) -> StepResult:
        self._note_profiled(plan, began_s, prepared_s)
        return self.not_computed(plan, problem)

    def not_computed(self, plan: StepPlan, problem: str, *, is_begun: bool = False) -> StepResult:
        """Return the result of a step that there was no memory for, and leave the rows as they were before it.

        Args:
            is_begun: earlier steps of the same plan are computed.
        """
        give_back(self._device)
        self._has_lacked_memory = True
        if not is_begun:
            self._table.take_back(plan)  # what is in the KV cache is written again
        return StepResult(plan.step_id, (), out_of_memory=problem)

    def _computed(self, plan: StepPlan, rest: StepPlan, step: StepInput, began_s: float) -> StepResult:
        prepared_s = time.perf_counter()
        problem = None
        try:
            samples, others = self._compute(step)
        except Exception as error:
            if (problem := lack_of_memory(error)) is None:
                raise
        finally:
            self.rest()
        if problem is not None:  # the error is gone by now, and with it the tensors that its traceback held
            return self._without_memory(plan, problem, began_s, prepared_s)
        rows: tuple[RowResult, ...] = (*self.note(step.sampled, samples), *others)
        if self._adapters is not None and step.adapter_slots is not None:
            rows = self._with_failed_adapters(plan, rows)
        rows = self._soft_prompts.with_failures(rows) if step.soft_prompts else rows
        return self._result(plan, rest, rows, began_s, prepared_s)

    def _result(
        self,
        plan: StepPlan,
        rest: StepPlan,
        rows: tuple[RowResult, ...],
        began_s: float,
        prepared_s: float,
    ) -> StepResult:
        self._note_profiled(plan, began_s, prepared_s)
        # A step that was submitted early begins when the one before it is done.
        now_s = time.perf_counter()
        elapsed_s, self._done_s = now_s - max(began_s, self._done_s), now_s
        if self._store is not None:
            return self._store.result(plan, rest, rows, elapsed_s)
        return StepResult(plan.step_id, rows, elapsed_s)

    def _pass_over(self, plan: StepPlan, problem: str | None = None) -> StepResult:
        """Note the rows and blocks of a plan, and compute nothing of it."""
        self._has_lacked_memory = False
        num_failed = 0
        if self._store is not None:
            self._store.save(plan.saves)
            num_failed = self._store.take_failures()
        self._place(plan)
        self._table.note(plan)
        return StepResult(plan.step_id, (), out_of_memory=problem, num_failed_saves=num_failed)

    def _note_profiled(self, plan: StepPlan, began_s: float, prepared_s: float) -> None:
        if self.profile is not None and self.profile.is_recording:
            self.profile.note(plan, began_s, prepared_s)

    def _note_computed(self) -> None:
        if self.profile is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # the pass has only been handed to the device
            self.profile.computed_s = time.perf_counter()

    @torch.inference_mode()
    def begin(self, plan: StepPlan, done_fd: int) -> BackgroundRun | None:
        """Begin a plan in the model's background thread, if all its rows are greedy decodes.

        Args:
            plan: see `execute`; also a run.
            done_fd: an eventfd; it counts the steps that are over.
        Returns:
            What it gives; None if the plan must be given to `execute` instead.
        Raises:
            InvariantViolated: the plan contradicts the table of rows.
        """
        began_s = time.perf_counter()
        rows = self._table.decoded(plan)
        # Anything but an argmax needs the logits, and Python between two steps. An adapter may fail to load: `execute`
        # tells its rows.
        # While a profile is recorded every step goes through `execute`, which records it.
        if (
            self._background is None
            or self.profile is not None
            or not rows
            or (plan.is_ahead and self._has_lacked_memory)
            or plan.adapters
            or not self._batch_for(rows).is_greedy
        ):
            return None
        self._has_lacked_memory = False
        if self._store is not None:
            self._store.save(plan.saves)
        self._background.prepare()  # the thread wakes up while the input is prepared
        step = self._table.input_of(plan, self._apply(plan))
        batch = step.forward_batch(self._cache, self._soft_prompts)
        run = self._background.begin_greedy(batch, num_steps=plan.num_steps, done_fd=done_fd)
        return BackgroundRun(self, plan, rows, run, time.perf_counter() - began_s)

    def prepare_adapter(self, path: str, digest: str, *, is_pinned: bool) -> None:
        """Read an adapter, so that the step that needs it does not wait. May be called from any thread."""
        if self._adapters is not None:
            self._adapters.prepare(path, digest)
            if is_pinned:
                self._adapters.pin(digest)

    def _with_failed_adapters(self, plan: StepPlan, rows: tuple[RowResult, ...]) -> tuple[RowResult, ...]:
        """Fail the rows whose adapter could not be loaded, instead of giving them the answers of the plain model."""
        assert self._adapters is not None
        failures = [
            RowFailure(row.request_id, row.epoch, problem)
            for row in self._table.adapted_rows(plan)
            if row.adapter_slot is not None
            and (problem := self._adapters.failure(row.adapter_slot)) is not None
        ]
        return with_failures(rows, failures)

    def _place(self, plan: StepPlan) -> None:
        for adapter in plan.adapters:
            if self._adapters is None:
                raise InvariantViolated(f"adapter {adapter.name!r} must not be planned: there are no slots")
            self._adapters.place(adapter)

    def _apply(self, plan: StepPlan) -> list[Row]:
        self._place(plan)
        rows = self._table.apply(plan)
        if self._pages is not None:
            self._pages.reach(self._table.highest_block_id)
        return rows

    def rest(self) -> None:
        """Note that no step is being computed any more."""
        if self._pages is not None:
            self._pages.rest()

    def _compute(self, step: StepInput) -> tuple[Samples, Sequence[RowResult]]:
        if step.pooled:
            return self._compute_pooled(step)
        batch = self._batch_for(step.sampled)
        inputs = step.forward_batch(self._cache, self._soft_prompts)
        if not step.prompted and all(
            row.mask is None for row in step.sampled
        ):  # the logits are for samples alone
            if self._greedy is not None and batch.is_greedy:
                values, token_ids = self._greedy.forward_greedy(inputs)
                self._note_computed()
                return greedy_samples(values, token_ids), ()
            if self._partial is not None and batch.is_open:
                logits = self._partial.forward_part(inputs)
                self._note_computed()
                return batch.sample_part(logits, self._partial.first_id, self._partial.gather), ()
        logits = self._model.forward_logits(inputs)
        self._note_computed()
        return self._sample(step, logits)

    def _compute_pooled(self, step: StepInput) -> tuple[Samples, Sequence[RowResult]]:
        # The hidden states of all tokens, which both native decoders give: the C++ step with its head left out.
        if self._pooler is None:
            raise InvariantViolated("a pooled request must not be admitted: the model has no pooling")
        inputs = step.forward_batch(self._cache, self._soft_prompts)
        if self._pooler.info.takes_token_types:
            inputs = attrs.evolve(inputs, token_type_ids=step.token_type_ids())
        hidden = self._model.forward(inputs)
        self._note_computed()
        samples = NO_SAMPLES
        prompts: tuple[PromptLogprobs, ...] = ()
        if len(inputs.logits_indices):
            samples, prompts = self._sample(step, self._model.compute_logits(hidden, inputs.logits_indices))
        return samples, (*prompts, *self._pooler.pool(step.pooled, hidden))

    def _sample(self, step: StepInput, logits: Tensor) -> tuple[Samples, tuple[PromptLogprobs, ...]]:
        prompts = prompt_logprobs(step.prompted, logits[len(step.sampled) :])
        # The rows to sample from come first, then those of prompt log-probabilities.
        logits = logits[: len(step.sampled)]
        apply_bitmasks_(logits, [row.mask for row in step.sampled])
        return self._batch_for(step.sampled).sample(logits) if step.sampled else NO_SAMPLES, prompts

    def note(self, rows: tuple[Row, ...], samples: Samples) -> list[SampledToken | RowFailure]:
        """Store the sampled tokens in their rows, and return them as results.

        Args:
            rows: as in `StepInput.sampled`.
            samples: theirs.
        """
        results: list[SampledToken | RowFailure] = []
        over: Row | None = None  # samples of a row after a rejected draft token or a failure are dropped
        for i, row in enumerate(rows):
            if row is over:
                continue
            if i in samples.failures:
                results.append(RowFailure(row.request_id, row.epoch, samples.failures[i]))
                row.has_failed, over = True, row
                continue
            token_id = samples.token_ids[i]
            position = len(row.sampling.output_token_ids)
            results.append(
                SampledToken(row.request_id, row.epoch, position, token_id, samples.logprobs.get(i))
            )
            over = None if row.append(token_id) else row
        return results

    def _batch_for(self, rows: tuple[Row, ...]) -> SamplingBatch:
        # the last step's tensors if the rows are the same; a row that is repeated (draft tokens) changes in each step
        if rows != self._batch_rows or len(set(rows)) < len(rows):  # rows are compared by identity
            self._batch = SamplingBatch(
                list(_in_turn(rows)),
                self._model.spec.vocab_size,
                self._device,
                self._logprobs_mode,
            )
            self._batch_rows = rows
        return self._batch


class PendingStep:
    """Step that was handed to a runner; see `core.step_plan.SubmittedStep`.

    Args:
        read: waits for its result, and reads it.
        wait: waits until it is computed; None if it was computed at once.
    """

    def __init__(self, read: Callable[[], StepResult], wait: Callable[[], None] | None = None) -> None:
        self._read, self._wait = read, wait
        self._result: StepResult | None = None

    @classmethod
    def of(cls, result: StepResult) -> PendingStep:
        """Return a step whose result is there."""
        return cls(lambda: result)

    @property
    def is_done(self) -> bool:
        return self._wait is None

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()

    def result(self) -> StepResult:
        if self._result is None:
            self._result = self._read()
        return self._result


class BackgroundRun:
    """Plan that a model computes in a background thread.

    Args:
        runner: owner of the rows.
        plan: what is computed.
        rows: of the plan.
        run: the model's side of it.
        prepared_s: what it took to begin, seconds.
    """

    def __init__(
        self, runner: ModelRunner, plan: StepPlan, rows: tuple[Row, ...], run: GreedyRun, prepared_s: float
    ) -> None:
        self._runner, self._plan, self._rows, self._run = runner, plan, rows, run
        self._prepared_s = prepared_s
        self._is_first = True

    def results(self, count: int) -> list[StepResult]:
        """Return the results of the next `count` steps, which `done_fd` has counted as over."""
        steps = self._run.steps(count)
        # Only now: pages are touched slowly while a step is being computed.
        if self._run.is_over:
            self._runner.rest()
        return [self._result(step, is_newest=step is steps[-1]) for step in steps]

    def _result(self, step: GreedyStep, *, is_newest: bool) -> StepResult:
        if step.lacks_memory:
            return self._runner.not_computed(
                self._plan, "there is no memory for a step", is_begun=not self._is_first
            )
        if not self._is_first:  # the plan has advanced the rows for the first step
            for row in self._rows:
                row.go_on()
        rows = tuple(self._runner.note(self._rows, greedy_samples(step.max_logits, step.token_ids)))
        # the first step of a run includes the time to prepare the input, as that of `execute` does
        elapsed_s = step.elapsed_s + (self._prepared_s if self._is_first else 0.0)
        self._is_first = False
        is_last = is_newest and self._run.is_over
        return StepResult(self._plan.step_id, rows, elapsed_s, is_last=is_last)

    @property
    def is_over(self) -> bool:
        """True when no results follow those that were returned."""
        return self._run.is_over

    def halt(self) -> None:
        """End the run after the step that is being computed."""
        self._run.halt()


def _in_turn(rows: tuple[Row, ...]) -> Iterator[SamplingRow]:
    # a row is repeated for each of its draft tokens: the n-th time, n of them count as accepted
    for _, same in groupby(rows, key=id):
        for num_guessed, row in enumerate(same):
            yield row.sampling_after(num_guessed)
