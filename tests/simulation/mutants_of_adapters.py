"""Defects of LoRA adapters; see `mutation`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.mutation import mutant
from triolet.actors.adapters import AdapterRegistry
from triolet.core.engine_core import EngineCore
from triolet.core.kv_cache.prefix_cache import CacheNamespace
from triolet.core.request import request_builder
from triolet.core.request.lora import LoRARequest
from triolet.core.scheduling.adapter_slots import AdapterSlots
from triolet.core.scheduling.scheduler import Scheduler, SchedulerConfig
from triolet.core.step_plan import AdapterStart
from triolet.errors import AdapterError


@mutant("an adapter that was evicted is found in its former slot")
def _found_in_former_slot(patch: pytest.MonkeyPatch) -> None:
    def mutated(self: AdapterSlots) -> int:
        if len(self._slots) < self._num_slots:
            return len(self._slots)
        return next(slot for digest, slot in self._slots.items() if digest not in self._taken_s)

    patch.setattr(AdapterSlots, "_free_slot", mutated)


@mutant("the slot of an adapter in use is given to another")
def _slot_in_use(patch: pytest.MonkeyPatch) -> None:
    free_slot = AdapterSlots._free_slot

    def mutated(self: AdapterSlots) -> int:
        if len(self._slots) < self._num_slots:
            return free_slot(self)
        return self._slots.pop(next(iter(self._slots)))

    patch.setattr(AdapterSlots, "_free_slot", mutated)
    patch.setattr(AdapterSlots, "may_start", lambda self, adapter: True)


@mutant("blocks of an adapter's former contents are found after it is reloaded in place")
def _stale_prefix(patch: pytest.MonkeyPatch) -> None:
    def mutated(*, salt: str | None, adapter: str | None) -> CacheNamespace:
        return CacheNamespace(salt=salt, adapter=adapter and adapter.partition("-")[0])

    patch.setattr(request_builder, "CacheNamespace", mutated)


@mutant("a runner that was restarted is taken to have the adapters of the one before")
def _restarted_without_adapters(patch: pytest.MonkeyPatch) -> None:
    new_scheduler = EngineCore.new_scheduler

    def mutated(self: EngineCore, config: SchedulerConfig) -> Scheduler:
        former, new = self.scheduler, new_scheduler(self, config)
        if former is not None and former._planner.adapters is not None and new._planner.adapters is not None:
            new._planner.adapters._slots = former._planner.adapters._slots
        return new

    patch.setattr(EngineCore, "new_scheduler", mutated)


@mutant("a runner that was restarted is not told about the adapters")
def _not_told(patch: pytest.MonkeyPatch) -> None:
    async def mutated(self: AdapterRegistry) -> None:
        return

    patch.setattr(AdapterRegistry, "replay", mutated)


@mutant("a runner whose adapter cannot be read again does not start")
def _does_not_start(patch: pytest.MonkeyPatch) -> None:
    async def mutated(self: AdapterRegistry) -> None:
        for adapter in self.adapters:
            await self._executor.prepare_adapter(adapter, is_pinned=False)

    patch.setattr(AdapterRegistry, "replay", mutated)


@mutant("an adapter that is to be reloaded in place is taken as it is")
def _not_reloaded(patch: pytest.MonkeyPatch) -> None:
    resolve = AdapterRegistry.resolve

    async def mutated(self: AdapterRegistry, request: LoRARequest, **options: Any) -> Any:
        kept = LoRARequest(request.lora_name, request.lora_int_id, request.lora_path)
        return await resolve(self, kept, **options)

    patch.setattr(AdapterRegistry, "resolve", mutated)


@mutant("another adapter answers for one that cannot be loaded")
def _answered_by_another(patch: pytest.MonkeyPatch) -> None:
    load = AdapterRegistry._load

    async def mutated(self: AdapterRegistry, request: LoRARequest, **options: Any) -> Any:
        try:
            return await load(self, request, **options)
        except AdapterError:
            if (other := next(iter(self.adapters), None)) is None:
                raise
            return other

    patch.setattr(AdapterRegistry, "_load", mutated)


@mutant("an adapter that could not be put into its slot is not loaded again")
def _not_loaded_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterSlots, "load_again", lambda self, failed: None)


@mutant("a plan leaves out the second adapter that it needs")
def _one_at_a_time(patch: pytest.MonkeyPatch) -> None:
    take_starts = AdapterSlots.take_starts

    def mutated(self: AdapterSlots) -> tuple[AdapterStart, ...]:
        return take_starts(self)[:1]

    patch.setattr(AdapterSlots, "take_starts", mutated)
