"""Base class of `LLMEngine`: sleep, weights, caches, adapters, calls into the worker and profiles, here and now.

The same `EngineCore` as in `Engine` holds the requests and knows what the runner should do; here the calls themselves
give up the model and load it. A call that waits for requests computes them: their outputs come with the next `step()`.
"""

from __future__ import annotations

import shutil
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from triolet.compat.facts import EngineFacts
from triolet.compat.in_process import InProcessAdapters
from triolet.compat.operations.weight_update import Tensors, WeightUpdate
from triolet.compat.refusals import refuse, refuse_given
from triolet.core.engine_core import EngineCore
from triolet.core.profile import StepRecorder
from triolet.core.request.lora import LoRARequest
from triolet.core.request.model_info import ModelInfo
from triolet.core.request.request import FinishReason
from triolet.core.request.tokenizer_interface import TokenizerInterface
from triolet.core.scheduling.scheduler import SchedulerConfig
from triolet.core.sleep import NOTHING, PAUSE, WEIGHTS, RunnerPhase, check_level, check_mode, check_tags
from triolet.core.step_plan import StepRunner
from triolet.core.worker_call import WorkerCall, outcome_of
from triolet.errors import InvalidRequest, ProfileConflict, WorkerCallTimeout
from triolet.observability.profile_path import check_profiling, new_profile_path

Loaded = tuple[StepRunner, ModelInfo, TokenizerInterface | None]


class EngineOperations(EngineFacts):
    """Methods of `LLMEngine` for the program that runs it."""

    _core: EngineCore
    _adapters: InProcessAdapters
    _runner: StepRunner | None  # None while the engine sleeps
    _limits: SchedulerConfig
    _can_load: bool  # False for a model that was handed in
    _clock: Callable[[], float]

    def __init__(self) -> None:
        self._update = WeightUpdate()
        self._profile: StepRecorder | None = None

    @abstractmethod
    def _compute(self) -> bool:
        """Compute one step; return False if there was nothing to compute."""

    @abstractmethod
    def _deliver(self) -> None:
        """Make the outputs of all progress, for the next `step()`."""

    # ----------------------------------------------------------------------------------- pause and sleep

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Compute no request until `resume_generation`; see `triolet.Engine.pause_generation`."""
        self._hold(PAUSE, check_mode(mode))
        if clear_cache:
            self.reset_prefix_cache(reset_running_requests=True)

    def resume_generation(self) -> None:
        """End a pause; harmless without one."""
        self._core.sleep.release(PAUSE)

    def is_paused(self) -> bool:
        """Return True between `pause_generation` and `resume_generation`."""
        return self._core.sleep.is_paused

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the model and the KV cache until `wake_up`; `step()` computes nothing meanwhile.

        Args:
            level: 0 only stops computing; 1 and 2 drop the model, which is read again when the engine wakes.
            mode: what happens to the live requests: `abort` ends them with what they have, `wait` computes them to
                their end before, `keep` has them go on after the sleep, with the same tokens.
        Raises:
            InvalidRequest: a wrong argument.
            UnsupportedFeature: level 1 or 2, and the model was handed in: it could not be read again.
        """
        self._check_can_load(check_level(level), f"sleep(level={level})")
        limit = self._settle(check_mode(mode))
        self._core.sleep.sleep(level, limit)
        self._follow()

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """End a sleep, or a part of it; return whether the engine is awake. See `triolet.Engine.wake_up`.

        Raises:
            InvalidRequest: another tag.
            ModelError: the model can no longer be loaded; the engine sleeps on.
        """
        self._core.sleep.wake(check_tags(tags))
        self._follow()
        return not self._core.sleep.is_sleeping

    def is_sleeping(self) -> bool:
        """Return True while the engine sleeps, or is paused, as in vLLM."""
        return self._core.sleep.is_sleeping or self._core.sleep.is_paused

    def _settle(self, mode: str) -> int:
        """Do with the live requests what a mode says; return the serial of the last one that was finished."""
        core = self._core
        if mode == "abort":
            for entry in tuple(core.journal):
                core.finish(entry.serial, FinishReason.ABORT)
            self._deliver()
        if mode != "wait":
            return NOTHING
        limit = core.journal.last_serial
        while core.has_live(limit) and self._compute():
            self._deliver()
        return limit

    def _hold(self, name: str, mode: str) -> None:
        limit = self._settle(mode)
        self._core.sleep.hold(name, limit)

    def _check_can_load(self, level: int, name: str) -> None:
        if level and not self._can_load:
            refuse(name, "the model was handed in, and could not be read again")

    def _follow(self) -> None:
        """Give up the model, or load it, as sleep and weights want it."""
        core = self._core
        if core.follow_runner(lambda: self._limits):
            self._runner = self._adapters.runner = None
            core.sleep.enter(RunnerPhase.UNLOADED)
        if core.sleep.phase is RunnerPhase.UNLOADED and not core.must_unload:
            try:
                info = self._load_runner()
            except Exception as error:
                if not core.weights.refuse(error, is_death=False):
                    raise
                info = self._load_runner()  # of the old weights
            core.note_loaded(info)
            core.follow_runner(lambda: self._limits)

    def _load_runner(self) -> ModelInfo:
        # Late, like the others: torch takes a second to import, and most engines never sleep.
        from triolet.actors.executors.contract import with_kv_cache, with_weights
        from triolet.model.loading.runner import load_runner

        folder, config = self._core.begin_load(), with_kv_cache(self._config, self._info)
        if config.model is None:
            config = attrs.evolve(config, model=self._info.folder)
        chosen = config if folder is None else with_weights(config, folder)
        self._runner, info = load_runner(chosen, lambda progress: None)
        self._adapters.runner = self._runner
        return info

    # ------------------------------------------------------------------------------------------- weights

    @property
    def weight_version(self) -> int:
        """Number of exchanges of the weights so far."""
        return self._core.weights.version

    def reload_weights(self, path: str, *, mode: str = "keep") -> int:
        """Serve with the weights of another folder from now on; see `triolet.Engine.reload_weights`."""
        from triolet.model.folder.exchange import check_exchange

        self._check_can_load(1, "reload_weights")
        folder = Path(path).expanduser().absolute()
        check_exchange(self._weights_folder, folder)
        return self._exchange(folder, mode)

    @property
    def _weights_folder(self) -> Path:
        return Path(self._core.weights.folder or self._info.folder)

    def start_weight_update(self) -> None:
        """Collect what `update_weights` gets, up to `finish_weight_update`."""
        self._update.start()

    def update_weights(self, request: Tensors) -> None:
        """Serve with other values of some tensors, at once or when the update that has begun is finished.

        Args:
            request: torch tensors by the names of the checkpoint, as a mapping or as pairs.
        Raises:
            UnsupportedFeature: the request is for one of vLLM's transfer engines.
            ModelError: the tensors do not fit; the old weights are in use.
        """
        if (tensors := self._update.add(request)) is not None:
            self._write_and_exchange(tensors)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve with what `update_weights` has got since `start_weight_update`; requests go on with it.

        Args:
            weight_version: name of the new weights; by default the number of the exchange.
        """
        if tensors := self._update.finish():
            self._write_and_exchange(tensors)
        if weight_version is not None:
            self.set_weight_version(weight_version)

    def set_weight_version(self, weight_version: str) -> None:
        """Name the weights in use."""
        self._update.set_label(self.weight_version, weight_version)

    def get_weight_version(self) -> str:
        """Return the name of the weights in use: the number of exchanges so far, if they were given none."""
        return self._update.label(self.weight_version)

    @cached_property
    def _updates(self) -> Path:
        """Folder of the folders of updated weights; removed with the engine."""
        from triolet.model.folder.exchange import new_updates_folder

        folder = new_updates_folder()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _write_and_exchange(self, tensors: Mapping[str, Any]) -> None:
        from triolet.model.folder.exchange import new_updates_folder, write_update

        self._check_can_load(1, "update_weights")
        if not tensors:
            raise InvalidRequest("tensors must hold at least one tensor; got none", field="tensors")
        former, folder = self._weights_folder, new_updates_folder(self._updates) / "weights"
        try:
            write_update(former, folder, tensors)
            self._exchange(folder, "keep")
        finally:
            unused = former if self._weights_folder == folder else folder
            if self._core.weights.requested is None and unused.parent.parent == self._updates:
                shutil.rmtree(unused.parent, ignore_errors=True)

    def _exchange(self, folder: Path, mode: str) -> int:
        core = self._core
        limit = self._settle(check_mode(mode))
        core.weights.request(str(folder))
        core.sleep.hold(WEIGHTS, limit)
        self._follow()
        if core.weights.refusal is not None:
            raise core.weights.refusal
        # One that sleeps loads them when it wakes.
        return core.weights.version + (core.weights.requested is not None)

    # ------------------------------------------------------------------------------------------- workers

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker, here and now; return the results in the order of the ranks: one.

        Args:
            method: name of a method of `worker_extension` or of the worker's own, or a callable that gets the worker.
            timeout: seconds. The call has the caller's thread and ends by itself; one that took longer is an error.
            args: positional arguments.
            kwargs: keyword arguments.
        Raises:
            UnknownWorkerMethod: there is no such method.
            WorkerCallTimeout: it took longer.
            InvalidRequest: the engine sleeps.
            Exception: what the method raises.
        """
        # vLLM's have no word for whether a call changes the weights.
        return [self._call(WorkerCall(method, False, tuple(args), dict(kwargs or {}), True), timeout)]

    def apply_model(self, func: str | Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model, here and now; a string names it as `module:function`."""
        return [self._call(WorkerCall(func, True, invalidates=True), None)]

    def start_profile(self, profile_prefix: str | None = None, **vllm_only: object) -> None:
        """Record the steps from now on; see `triolet.Engine.start_profile`."""
        refuse_given(vllm_only)
        path = new_profile_path(check_profiling(self._config.profile_dir, "start_profile"), profile_prefix)
        if self._profile is not None:
            raise ProfileConflict("a profile is being recorded; stop it first")
        self._call(WorkerCall("start_profile", args=(path,)), None)
        self._profile = StepRecorder()

    def stop_profile(self) -> None:
        """Write the recording of the steps to `profile_dir`; see `triolet.Engine.stop_profile`."""
        check_profiling(self._config.profile_dir, "stop_profile")
        recorder, self._profile = self._profile, None
        if recorder is None:
            raise ProfileConflict("no profile is being recorded; start it first")
        self._call(WorkerCall("write_profile", args=(recorder.values(),)), None)

    def _call(self, call: WorkerCall, timeout: float | None) -> Any:
        if self._runner is None:
            raise InvalidRequest(f"{call.name} needs the model, and the engine sleeps; call wake_up() first")
        began_s = self._clock()
        outcome = outcome_of(self._runner, call)
        if outcome.error is not None:
            raise outcome.error
        if timeout is not None and self._clock() - began_s > timeout:
            raise WorkerCallTimeout(call.name, timeout)
        return outcome.value

    # ------------------------------------------------------------------------------------------ adapters

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        return self._adapters.numbers

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; see `triolet.Engine.add_lora`."""
        self._adapters.resolve(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget a LoRA adapter; requests with it go on. Return False if it is not loaded."""
        return self._adapters.remove(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter loaded until it is removed; see `triolet.Engine.pin_lora`."""
        return self._adapters.pin(lora_id)

    # -------------------------------------------------------------------------------------------- caches

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached KV; False, and nothing done, while blocks are in use and may not be taken back."""
        refuse_given({"reset_connector": reset_connector})
        return self._core.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of images. Programs call it after every change of weights."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no cache of encoders."""
