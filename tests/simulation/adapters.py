"""LoRA adapters of a simulated engine: their folders, the engine's registry with eyes, and the runner's memory of them.

A folder has nothing but a number, which is another one each time that its adapter is trained anew. The fake model
computes another KV for every number, so that a wrong adapter, and old contents of the right one, show as wrong tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from triolet.actors.adapters import AdapterRegistry
from triolet.core.request.lora import Adapter, LoRARequest
from triolet.core.step_plan import AdapterStart, RowFailure, RowStart, StepPlan, StepResult
from triolet.errors import AdapterError

if TYPE_CHECKING:
    from tests.core.fake_model import FakeModel
    from tests.simulation.world import World

NAMES = ("x", "y", "z")
BROKEN = "broken"  # name of an adapter that can never be read
ROOT = Path("/adapters")
MAX_CHANGES = 1000


def number_of(digest: str) -> int:
    """The number of an adapter's contents."""
    return int(digest.rpartition("-")[2])


def lora_of(name: str, *, load_inplace: bool) -> LoRARequest:
    """What a client names."""
    return LoRARequest(name, 1 + (*NAMES, BROKEN).index(name), str(ROOT / name), load_inplace=load_inplace)


@attrs.define(eq=False)
class Folders:
    """The folders of all adapters, and what may be known of them.

    Args:
        numbers: of what is in each, by name.
        loaded: the latest numbers that the engine has told a client of.
        unread: tasks that met a fault in reading one.
        unplaced: rows whose adapter could not be put into its slot.
    """

    numbers: dict[str, int] = attrs.field(
        factory=lambda: {name: 1 + MAX_CHANGES * place for place, name in enumerate(NAMES)}
    )
    loaded: dict[str, int] = attrs.field(factory=dict)
    unread: set[trio.lowlevel.Task] = attrs.field(factory=set)
    unplaced: list[RowStart] = attrs.field(factory=list)

    def retrain(self, name: str) -> None:
        """Change what is in one."""
        if name != BROKEN:
            self.numbers[name] += 1

    def digest(self, path: str | Path) -> str:
        """Of what is there now."""
        name = Path(path).name
        if name == BROKEN:
            self.unread.add(trio.lowlevel.current_task())
            raise AdapterError(path, "is broken")
        return f"{name}-{self.numbers[name]}"


class WatchedAdapters(AdapterRegistry):
    """The engine's registry; the adapter of a request is as new as it must be, and no newer than it can be."""

    def __init__(self, world: World, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.world = world
        world.registry = self

    def _read(self, folder: Path) -> str:
        self.world.reach_adapter("adapter.read", folder)
        return self.world.folders.digest(folder)

    async def resolve(
        self, request: LoRARequest, *, is_registered: bool = False, digest: str | None = None
    ) -> Adapter:
        folders, name = self.world.folders, request.lora_name
        known = folders.numbers if request.load_inplace else folders.loaded
        least = known.get(name, 0)
        adapter = await super().resolve(request, is_registered=is_registered, digest=digest)
        number = number_of(adapter.digest)
        self.world.note(f"adapter {adapter.digest}")
        self.world.expect(
            adapter.name == name and least <= number <= folders.numbers[name],
            f"{name} has the contents {adapter.digest}, not {least} or later",
        )
        if adapter in self.adapters:  # that of a resumed request may be of other contents than the name's
            folders.loaded[name] = max(number, folders.loaded.get(name, 0))
        return adapter


class RunnerAdapters:
    """What one life of the runner knows of adapters: it keeps some, and has some of these in slots.

    Args:
        world: has the folders, and says what goes wrong.
        model: computes with the slots.
    """

    def __init__(self, world: World, model: FakeModel) -> None:
        self._world, self._model = world, model
        self._kept: OrderedDict[str, None] = OrderedDict()
        self._problems: dict[int, str] = {}
        self._unreported: set[int | None] = set()  # slots with a problem that no row has failed of
        self._reported: set[int | None] = set()  # slots with one that rows failed of first in the last step
        self._told: set[str] = set()
        self._has_begun = False

    def prepare(self, adapter: Adapter) -> None:
        """Read one and keep it; raises `AdapterError`."""
        self._told.add(adapter.digest)
        self._read("adapter.prepare", adapter.path, adapter.digest)

    def _read(self, point: str, path: str, digest: str) -> None:
        if digest not in self._kept:
            self._world.reach_adapter(point, path)
            if self._world.folders.digest(path) != digest:
                self._world.folders.unread.add(trio.lowlevel.current_task())
                raise AdapterError(path, "has changed since it was loaded")
        self._kept[digest] = None
        self._kept.move_to_end(digest)
        while len(self._kept) > self._world.story.limits["max_cpu_loras"]:
            self._kept.popitem(last=False)

    def begin(self, plan: StepPlan) -> None:
        """Fill the slots that a plan names."""
        if plan.rows and not self._has_begun:
            self._must_have_been_told()
        for start in plan.adapters:
            self._place(start)

    def _must_have_been_told(self) -> None:
        self._has_begun, registry = True, self._world.registry
        untold = {adapter.digest for adapter in registry.adapters} - self._told if registry else ()
        self._world.expect(not untold, f"a runner has begun and was not told of {sorted(untold)}")

    def _place(self, start: AdapterStart) -> None:
        self._model.adapters.pop(start.slot, None)
        self._problems.pop(start.slot, None)
        try:
            self._read("adapter.place", start.path, start.digest)
        except AdapterError as error:
            self._problems[start.slot] = f"adapter {start.name!r} could not be loaded: {error}"
            self._unreported.add(start.slot)
        else:
            self._model.adapters[start.slot] = number_of(start.digest)

    def judge(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a step, with a failure for each row whose adapter could not be loaded."""
        if result.out_of_memory is not None:
            return result
        starts = [self._model.rows[row.row_id].start for row in plan.rows]
        bad = [start for start in starts if start.adapter_slot in self._problems]
        # One problem fails the rows of one step, and those of a step that was planned before its result was there; for
        # the next ones the adapter must be read again.
        felt = self._unreported | (self._reported if plan.is_ahead else set())
        self._reported = self._unreported & {start.adapter_slot for start in bad}
        self._unreported -= self._reported
        if not bad:
            return result
        self._world.folders.unplaced += [start for start in bad if start.adapter_slot in felt]
        epochs = {start.epoch for start in bad}
        rows = [row for row in result.rows if row.epoch not in epochs]
        failures = [
            RowFailure(start.request_id, start.epoch, self._problems[start.adapter_slot or 0])
            for start in bad
        ]
        return attrs.evolve(result, rows=(*rows, *failures))
