"""Registry of the models of one server: which of them are to be loaded and unloaded.

    unloaded --LoadModel--> loading --> loaded --UnloadModel--> unloading --> unloaded
                               |
                               +--fails--> unloaded

A request holds its model from its arrival to its end. A model is loaded when a request holds it and there is room: of
the number of models and of the bytes of their weights. Where there is none, the model that has been idle longest makes
room; a model that a request holds is never unloaded, so that the request for another one waits. Models that wait for
room are loaded in order of arrival: one that would fit does not go before one that does not, which would wait for ever.

The registry has no clock and loads nothing: it takes times and returns what is to be done.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import attrs


class ModelState(enum.Enum):
    """State of one model of a server."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@attrs.frozen
class LoadModel:
    """Decision: load this model."""

    name: str


@attrs.frozen
class UnloadModel:
    """Decision: unload this model."""

    name: str


@attrs.define(eq=False)
class ModelResidency:
    """One model's state and holders."""

    size_bytes: int  # of its weights
    state: ModelState = ModelState.UNLOADED
    num_holders: int = 0  # requests that have come and have not ended
    idle_since_s: float | None = None  # None while a request holds it or it was never loaded
    wanted_since: int | None = None  # order of the first request that waits for it
    is_stopped: bool = False  # unload it as soon as no request holds it


@attrs.define(eq=False)
class ModelRegistry:
    """Decisions about loading; see the module.

    Args:
        sizes: bytes of the weights of each model, 0 where they are not known.
        max_loaded: most models in memory; None for no limit.
        max_bytes: most bytes of their weights together; None for no limit.
        idle_s: seconds without a request after which a model is unloaded; None for never.
    """

    sizes: Mapping[str, int]
    max_loaded: int | None = None
    max_bytes: int | None = None
    idle_s: float | None = None
    models: dict[str, ModelResidency] = attrs.field(init=False)
    _num_wanted: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.models = {name: ModelResidency(size) for name, size in self.sizes.items()}

    def fits(self, name: str) -> bool:
        """Return whether the model fits into memory when no other one is loaded."""
        return self.max_bytes is None or self.models[name].size_bytes <= self.max_bytes

    def hold(self, name: str) -> None:
        """Record that a request for this model has come."""
        model = self.models[name]
        model.num_holders += 1
        model.idle_since_s = None
        if model.state is not ModelState.LOADED and model.wanted_since is None:
            self._want(model)

    def release(self, name: str, now_s: float) -> None:
        """Record that a request for this model has ended, or waits no longer."""
        model = self.models[name]
        assert model.num_holders > 0, "a request releases what it holds"
        model.num_holders -= 1
        if not model.num_holders:
            model.wanted_since = None
            model.idle_since_s = now_s

    def note_loaded(self, name: str, now_s: float) -> None:
        """Record that a load has succeeded."""
        model = self.models[name]
        assert model.state is ModelState.LOADING
        model.state, model.wanted_since = ModelState.LOADED, None
        model.idle_since_s = None if model.num_holders else now_s

    def note_unloaded(self, name: str) -> None:
        """Record that a model is no longer in memory: unloaded, not loaded after all, or failed."""
        model = self.models[name]
        failed_load = model.state is ModelState.LOADING
        model.state, model.is_stopped = ModelState.UNLOADED, False
        # The requests that waited for a load that failed get its error; those that came to a model that was being
        # unloaded wait for the next load.
        model.wanted_since = None
        if model.num_holders and not failed_load:
            self._want(model)

    def stop(self, name: str) -> None:
        """Unload a model as soon as no request holds it."""
        model = self.models[name]
        if model.state is ModelState.LOADED:
            model.is_stopped = True

    def decide(self, now_s: float) -> list[LoadModel | UnloadModel]:
        """Return what is to be done now; the states are those after it has begun."""
        decisions: list[LoadModel | UnloadModel] = [
            self._unload(name) for name, model in self.models.items() if self._is_over(model, now_s)
        ]
        waiting = [(model.wanted_since, name) for name, model in self.models.items() if self._waits(model)]
        for _, name in sorted((since, name) for since, name in waiting if since is not None):
            decisions += self._make_room(name)
            if not self._has_room(self.models[name]):
                break
            self.models[name].state = ModelState.LOADING
            decisions.append(LoadModel(name))
        return decisions

    def wakes_at(self) -> float | None:
        """Return the time at which `decide` has something to do if nothing happens before; None for never."""
        if self.idle_s is None:
            return None
        idle = [model.idle_since_s for model in self.models.values() if model.state is ModelState.LOADED]
        return min((since + self.idle_s for since in idle if since is not None), default=None)

    def _want(self, model: ModelResidency) -> None:
        self._num_wanted += 1
        model.wanted_since = self._num_wanted

    def _waits(self, model: ModelResidency) -> bool:
        return model.state is ModelState.UNLOADED and model.wanted_since is not None

    def _is_over(self, model: ModelResidency, now_s: float) -> bool:
        if model.state is not ModelState.LOADED or model.idle_since_s is None:
            return False
        return model.is_stopped or (self.idle_s is not None and model.idle_since_s + self.idle_s <= now_s)

    def _unload(self, name: str) -> UnloadModel:
        self.models[name].state = ModelState.UNLOADING
        return UnloadModel(name)

    def _make_room(self, name: str) -> list[LoadModel | UnloadModel]:
        """Unload idle models, the one that has been idle longest first, until this one will have room."""
        idle = [
            (model.idle_since_s, other)
            for other, model in self.models.items()
            if model.state is ModelState.LOADED and model.idle_since_s is not None
        ]
        decisions: list[LoadModel | UnloadModel] = []
        for _, other in sorted(idle, key=lambda one: one[0] or 0.0):
            # What is being unloaded is counted as gone here: its room comes without another model's.
            if self._has_room(self.models[name], counts_leaving=False):
                break
            decisions.append(self._unload(other))
        return decisions

    def _has_room(self, model: ModelResidency, *, counts_leaving: bool = True) -> bool:
        absent = {ModelState.UNLOADED} if counts_leaving else {ModelState.UNLOADED, ModelState.UNLOADING}
        present = [one for one in self.models.values() if one.state not in absent]
        if self.max_loaded is not None and len(present) >= self.max_loaded:
            return False
        num_bytes = sum(one.size_bytes for one in present) + model.size_bytes
        return self.max_bytes is None or num_bytes <= self.max_bytes
