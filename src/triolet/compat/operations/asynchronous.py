"""Base class of `AsyncLLM`: sleep, weights, caches, adapters, calls into workers and profiles under vLLM's names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from triolet.compat.async_facts import AsyncFacts, checkpoint, told
from triolet.compat.operations.weight_update import WeightUpdate
from triolet.compat.refusals import refuse_given
from triolet.core.request.lora import LoRARequest
from triolet.engine.engine import Engine


class AsyncOperations(AsyncFacts):
    """Methods of `AsyncLLM` for the operator of an engine; they are those of `triolet.Engine`."""

    def __init__(self) -> None:
        self._update = WeightUpdate()

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The triolet engine behind this interface."""

    # ----------------------------------------------------------------------------------- pause and sleep

    async def pause_generation(
        self,
        *,
        mode: str = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
        **vllm_only: object,
    ) -> None:
        """Compute no request until `resume_generation`; see `triolet.Engine.pause_generation`.

        Args:
            wait_for_inflight_requests: an older name of mode `wait`.
        """
        refuse_given(vllm_only)
        await self.engine.pause_generation(
            "wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache
        )

    async def resume_generation(self) -> None:
        """End a pause; harmless without one."""
        self.engine.resume_generation()
        await checkpoint()

    async def is_paused(self) -> bool:
        """Return True between `pause_generation` and `resume_generation`."""
        return await told(self.engine.is_paused)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the model and the KV cache until `wake_up`; see `triolet.Engine.sleep`."""
        await self.engine.sleep(level, mode)

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """End a sleep, or a part of it; return whether the engine is awake. See `triolet.Engine.wake_up`."""
        return await self.engine.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Return True while the engine sleeps, or is paused, as in vLLM."""
        return await told(self.engine.is_sleeping or self.engine.is_paused)

    # ------------------------------------------------------------------------------------------- weights

    async def reload_weights(self, path: str, *, mode: str = "keep") -> int:
        """Serve with the weights of another folder; see `triolet.Engine.reload_weights`."""
        return await self.engine.reload_weights(path, mode=mode)

    async def start_weight_update(self) -> None:
        """Collect what `update_weights` gets, up to `finish_weight_update`."""
        self._update.start()
        await checkpoint()

    async def update_weights(self, request: Any) -> None:
        """Serve with other values of some tensors, at once or when the update that has begun is finished.

        Args:
            request: torch tensors by the names of the checkpoint, as a mapping or as pairs.
        Raises:
            UnsupportedFeature: the request is for one of vLLM's transfer engines.
            ModelError: the tensors do not fit; the old weights are in use. See `triolet.Engine.update_weights`.
        """
        if (tensors := self._update.add(request)) is None:
            await checkpoint()
        else:
            await self.engine.update_weights(tensors)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Serve with what `update_weights` has got since `start_weight_update`; requests go on with it.

        Args:
            weight_version: name of the new weights; by default the number of the exchange.
        """
        if tensors := self._update.finish():
            await self.engine.update_weights(tensors)
        else:
            await checkpoint()
        if weight_version is not None:
            self._update.set_label(self.engine.weight_version, weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights in use."""
        self._update.set_label(self.engine.weight_version, new_version)
        await checkpoint()

    async def get_weight_version(self) -> str:
        """Return the name of the weights in use: the number of exchanges so far, if they were given none."""
        return await told(self._update.label(self.engine.weight_version))

    # ------------------------------------------------------------------------------------------- workers

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,  # noqa: ASYNC109  vLLM's name
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker between two steps; see `triolet.Engine.collective_rpc`."""
        return await self.engine.collective_rpc(method, timeout, args, kwargs)

    async def apply_model(self, func: str | Callable[[Any], Any]) -> list[Any]:
        """Call a function with every worker's model; see `triolet.Engine.apply_model`."""
        return await self.engine.apply_model(func)

    async def start_profile(self, profile_prefix: str | None = None, **vllm_only: object) -> None:
        """Record the steps from now on; see `triolet.Engine.start_profile`."""
        refuse_given(vllm_only)
        await self.engine.start_profile(profile_prefix)

    async def stop_profile(self) -> None:
        """Write the recording of the steps to `profile_dir`."""
        await self.engine.stop_profile()

    # ------------------------------------------------------------------------------------------ adapters

    async def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        return await told(set(self.engine.list_loras()))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; see `triolet.Engine.add_lora`."""
        return await self.engine.add_lora(lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget a LoRA adapter; requests with it go on. Return False if it is not loaded."""
        return await told(self.engine.remove_lora(lora_id))

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter loaded until it is removed; see `triolet.Engine.pin_lora`."""
        return await self.engine.pin_lora(lora_id)

    # -------------------------------------------------------------------------------------------- caches

    async def reset_prefix_cache(self, reset_running_requests: bool = False, **vllm_only: object) -> bool:
        """Forget all cached KV; False, and nothing done, while blocks are in use and may not be taken back."""
        refuse_given(vllm_only)
        done = self.engine.reset_prefix_cache(reset_running_requests=reset_running_requests)
        return bool(await told(done))

    async def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of images. Programs call it after every change of weights."""
        await checkpoint()

    async def reset_encoder_cache(self) -> None:
        """Do nothing: there is no cache of encoders."""
        await checkpoint()
