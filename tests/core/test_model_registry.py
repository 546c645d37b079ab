"""Which models are loaded and unloaded: pure decisions over times, holders, a number and a budget of bytes."""

from __future__ import annotations

import random

import pytest

from triolet.core.model_registry import LoadModel, ModelRegistry, ModelState, UnloadModel


def loaded(registry: ModelRegistry, name: str, now_s: float) -> None:
    """Load a model for a request that ends at once."""
    registry.hold(name)
    assert registry.decide(now_s) == [LoadModel(name)]
    registry.note_loaded(name, now_s)
    registry.release(name, now_s)


def test_a_model_is_loaded_for_its_first_request_only() -> None:
    registry = ModelRegistry({"a": 1, "b": 1})
    assert registry.decide(0.0) == []
    registry.hold("a")
    registry.hold("a")
    assert registry.decide(0.0) == [LoadModel("a")]
    assert registry.decide(0.0) == []
    registry.note_loaded("a", 1.0)
    registry.hold("a")
    assert registry.decide(1.0) == []


def test_an_idle_model_is_unloaded_after_its_time_and_one_in_use_is_not() -> None:
    registry = ModelRegistry({"a": 1}, idle_s=10.0)
    loaded(registry, "a", 0.0)
    assert registry.wakes_at() == 10.0
    assert registry.decide(9.9) == []
    registry.hold("a")
    assert (registry.wakes_at(), registry.decide(100.0)) == (None, [])
    registry.release("a", 100.0)
    assert registry.decide(110.0) == [UnloadModel("a")]
    registry.note_unloaded("a")
    assert registry.models["a"].state is ModelState.UNLOADED


def test_the_model_that_has_been_idle_longest_makes_room() -> None:
    registry = ModelRegistry({"a": 4, "b": 4, "c": 6}, max_bytes=10)
    loaded(registry, "b", 0.0)
    loaded(registry, "a", 1.0)
    registry.hold("c")
    assert registry.decide(2.0) == [UnloadModel("b")]
    assert registry.decide(2.0) == []  # its room comes with the end of the unloading
    registry.note_unloaded("b")
    assert registry.decide(3.0) == [LoadModel("c")]


def test_a_model_that_a_request_holds_is_waited_for() -> None:
    registry = ModelRegistry({"a": 1, "b": 1}, max_loaded=1)
    registry.hold("a")
    registry.decide(0.0)
    registry.note_loaded("a", 0.0)
    registry.hold("b")
    assert registry.decide(0.0) == []
    registry.release("a", 1.0)
    assert registry.decide(1.0) == [UnloadModel("a")]
    registry.note_unloaded("a")
    assert registry.decide(1.0) == [LoadModel("b")]


def test_a_large_model_is_not_overtaken_by_small_ones() -> None:
    registry = ModelRegistry({"a": 4, "large": 8, "small": 2}, max_bytes=10)
    registry.hold("a")
    registry.decide(0.0)
    registry.note_loaded("a", 0.0)
    registry.hold("large")
    registry.hold("small")
    assert registry.decide(0.0) == []
    registry.release("a", 1.0)
    assert registry.decide(1.0) == [UnloadModel("a")]
    registry.note_unloaded("a")
    assert registry.decide(1.0) == [LoadModel("large"), LoadModel("small")]


def test_a_failed_load_is_tried_again_only_for_a_later_request() -> None:
    registry = ModelRegistry({"a": 1})
    registry.hold("a")
    registry.decide(0.0)
    registry.note_unloaded("a")
    assert registry.decide(0.0) == []
    registry.hold("a")
    assert registry.decide(0.0) == [LoadModel("a")]


def test_a_request_for_a_model_that_is_being_unloaded_loads_it_again() -> None:
    registry = ModelRegistry({"a": 1}, idle_s=1.0)
    loaded(registry, "a", 0.0)
    assert registry.decide(1.0) == [UnloadModel("a")]
    registry.hold("a")
    assert registry.decide(1.0) == []
    registry.note_unloaded("a")
    assert registry.decide(1.0) == [LoadModel("a")]


def test_a_stopped_model_goes_when_its_last_request_has_ended() -> None:
    registry = ModelRegistry({"a": 1})
    loaded(registry, "a", 0.0)
    registry.hold("a")
    registry.stop("a")
    assert registry.decide(0.0) == []
    registry.release("a", 1.0)
    assert registry.decide(1.0) == [UnloadModel("a")]


def test_a_model_fits_if_its_weights_do_not_pass_the_limit_alone() -> None:
    registry = ModelRegistry({"a": 10, "b": 11}, max_bytes=10)
    loaded(registry, "a", 0.0)
    assert [registry.fits("a"), registry.fits("b")] == [True, False]
    assert ModelRegistry({"b": 11}).fits("b") is True


def test_a_model_that_is_in_use_again_does_not_wait_in_line() -> None:
    registry = ModelRegistry({"a": 1, "b": 1}, max_loaded=1)
    loaded(registry, "a", 0.0)
    registry.hold("a")
    registry.hold("b")
    registry.stop("a")
    registry.release("a", 1.0)
    assert registry.decide(1.0) == [UnloadModel("a")]
    registry.note_unloaded("a")
    registry.hold("a")
    assert registry.decide(1.0) == [LoadModel("b")]


def test_a_second_request_does_not_move_its_model_back_in_the_line() -> None:
    registry = ModelRegistry({"a": 1, "b": 1}, max_loaded=1)
    for name in ("a", "b", "a"):
        registry.hold(name)
    assert registry.decide(0.0) == [LoadModel("a")]


def test_a_stopped_model_that_was_loaded_again_stays() -> None:
    registry = ModelRegistry({"a": 1})
    loaded(registry, "a", 0.0)
    registry.stop("a")
    assert registry.decide(0.0) == [UnloadModel("a")]
    registry.note_unloaded("a")
    registry.stop("a")  # not in memory: nothing to stop
    loaded(registry, "a", 1.0)
    assert registry.decide(1e9) == []


def test_a_model_with_a_load_that_ended_without_a_request_is_idle_from_then_on() -> None:
    registry = ModelRegistry({"a": 1}, idle_s=10.0)
    registry.hold("a")
    registry.decide(0.0)
    registry.release("a", 1.0)
    assert registry.wakes_at() is None
    registry.note_loaded("a", 5.0)
    assert registry.wakes_at() == 15.0


def test_the_registry_wakes_when_the_first_of_its_idle_models_is_over() -> None:
    registry = ModelRegistry({"a": 1, "b": 1}, idle_s=10.0)
    assert registry.wakes_at() is None
    loaded(registry, "a", 2.0)
    loaded(registry, "b", 5.0)
    assert registry.wakes_at() == 12.0
    assert registry.decide(12.0) == [UnloadModel("a")]
    assert registry.wakes_at() == 15.0


def test_without_a_limit_of_idle_time_a_model_stays() -> None:
    registry = ModelRegistry({"a": 1})
    loaded(registry, "a", 0.0)
    assert (registry.wakes_at(), registry.decide(1e9)) == (None, [])


def test_a_request_that_waits_no_longer_loads_nothing() -> None:
    registry = ModelRegistry({"a": 1})
    registry.hold("a")
    registry.release("a", 0.0)
    assert registry.decide(0.0) == []


def test_of_models_idle_from_the_start_of_time_the_longest_idle_makes_room() -> None:
    registry = ModelRegistry({"a": 1, "b": 1, "c": 1}, max_loaded=2)
    loaded(registry, "a", 0.5)
    loaded(registry, "b", 0.0)
    registry.hold("c")
    assert registry.decide(1.0) == [UnloadModel("b")]


def test_only_as_many_models_make_room_as_are_needed() -> None:
    registry = ModelRegistry({"a": 4, "b": 4, "c": 2, "d": 6}, max_bytes=10)
    for place, name in enumerate("abc"):
        loaded(registry, name, float(place))
    registry.hold("d")
    assert registry.decide(3.0) == [UnloadModel("a"), UnloadModel("b")]


def test_nothing_to_release_is_an_error() -> None:
    with pytest.raises(AssertionError, match="releases what it holds"):
        ModelRegistry({"a": 1}).release("a", 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_walks_keep_the_limits_and_serve_every_request(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 10) for name in "abcde"}
    registry = ModelRegistry(sizes, max_loaded=rng.choice([None, 2, 3]), max_bytes=12, idle_s=5.0)
    held: list[str] = []
    pending: list[LoadModel | UnloadModel] = []
    now_s = 0.0
    for step in range(600):
        now_s += rng.random()
        if step < 400 and rng.random() < 0.4:
            held.append(rng.choice("abcde"))
            registry.hold(held[-1])
        ready = [name for name in held if registry.models[name].state is ModelState.LOADED]
        if ready and rng.random() < 0.5:
            held.remove(ready[0])
            registry.release(ready[0], now_s)
        if pending and rng.random() < 0.6:
            match pending.pop(rng.randrange(len(pending))):
                case LoadModel(name):
                    registry.note_loaded(name, now_s)
                case UnloadModel(name):
                    registry.note_unloaded(name)
        for decision in registry.decide(now_s):
            if isinstance(decision, UnloadModel):
                assert decision.name not in held
            pending.append(decision)
        present = [m for m in registry.models.values() if m.state is not ModelState.UNLOADED]
        assert sum(one.size_bytes for one in present) <= 12
        assert registry.max_loaded is None or len(present) <= registry.max_loaded
    while held or pending:
        before = (len(held), len(pending))
        for name in [one for one in held if registry.models[one].state is ModelState.LOADED]:
            held.remove(name)
            registry.release(name, now_s)
        for done in pending:
            if isinstance(done, LoadModel):
                registry.note_loaded(done.name, now_s)
            else:
                registry.note_unloaded(done.name)
        pending = registry.decide(now_s)
        assert (len(held), len(pending)) != before or pending, "a request waits for ever"
