"""Base class of `LLM`: what its `LLMEngine` does beside answering."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from triolet.compat.llm_engine import LLMEngine
from triolet.compat.operations.weight_update import Tensors
from triolet.core.request.lora import LoRARequest


class OfflineOperations:
    """Methods of `LLM` that are those of its engine."""

    llm_engine: LLMEngine

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give up the model and the KV cache until `wake_up`; see `LLMEngine.sleep`."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """End a sleep, or a part of it; return whether the engine is awake."""
        return self.llm_engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Return True while the engine sleeps, or is paused, as in vLLM."""
        return self.llm_engine.is_sleeping()

    def reload_weights(self, path: str, *, mode: str = "keep") -> int:
        """Answer with the weights of another folder from now on; return their version."""
        return self.llm_engine.reload_weights(path, mode=mode)

    def start_weight_update(self) -> None:
        """Collect what `update_weights` gets, up to `finish_weight_update`."""
        self.llm_engine.start_weight_update()

    def update_weights(self, request: Tensors) -> None:
        """Answer with other values of some tensors; see `LLMEngine.update_weights`."""
        self.llm_engine.update_weights(request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Answer with what `update_weights` has got; see `LLMEngine.finish_weight_update`."""
        self.llm_engine.finish_weight_update(weight_version)

    def update_weight_version(self, new_version: str) -> None:
        """Name the weights in use."""
        self.llm_engine.set_weight_version(new_version)

    def get_weight_version(self) -> str:
        """Return the name of the weights in use; see `LLMEngine.get_weight_version`."""
        return self.llm_engine.get_weight_version()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker, here and now; see `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: str | Callable[[Any], Any]) -> list[Any]:
        """Call a function with the model, here and now; see `LLMEngine.apply_model`."""
        return self.llm_engine.apply_model(func)

    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded LoRA adapters."""
        return self.llm_engine.list_loras()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter; see `triolet.Engine.add_lora`."""
        return self.llm_engine.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget a LoRA adapter. Return False if it is not loaded."""
        return self.llm_engine.remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep a LoRA adapter loaded until it is removed; see `triolet.Engine.pin_lora`."""
        return self.llm_engine.pin_lora(lora_id)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached KV; see `LLMEngine.reset_prefix_cache`."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no cache of images."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no cache of encoders."""

    def start_profile(self, profile_prefix: str | None = None, **vllm_only: object) -> None:
        """Record the steps from now on; see `triolet.Engine.start_profile`."""
        self.llm_engine.start_profile(profile_prefix, **vllm_only)

    def stop_profile(self) -> None:
        """Write the recording of the steps to `profile_dir`."""
        self.llm_engine.stop_profile()
