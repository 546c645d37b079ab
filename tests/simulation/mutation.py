"""Defects to plant in the engine, one at a time: a simulation that does not notice them proves nothing.

Each is a small patch with a name. `SURVIVORS` names those that can not be noticed from here, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]

MUTANTS: dict[str, Plant] = {}

SURVIVORS = {
    "a cache salt is ignored": "equal tokens give equal KV whatever the salt: only which requests may share "
    "changes, which the tests of core.prefix_cache hold",
    "a cache hit does not compare tokens": "it takes two contents with one 128-bit hash",
    "what ends while no scheduler lives is told to the dead one": "a runner that dies leaves its scheduler whole, and "
    "one that dies is replaced before any request can end; tests.actors.test_crashes holds the rule",
    "a request that runs when a trial begins goes on": "it costs one crash more, and finds the same one; "
    "tests.core.scheduling.test_scheduler_recovery holds the rule",
    "the crashes of a trial count": "a story has too few poisoned requests to exhaust two supervisors; "
    "tests.actors.test_poison holds the rule",
    "steps never become larger again": "the first token of all is as likely to come as the last: only time is lost, "
    "which the tests of core.memory_limit hold",
    "a question that met a shortage is asked no more": "the watchdog ends the actor, and its next life asks again: "
    "only time is lost; tests.actors.executors.test_grammar_process holds the rule",
    "a task that waits for a grammar is told of no shortage": "likewise",
    "supervisors stop their children in order of their start": "a stopped actor of ours does nothing any more that "
    "another one could see; the tests of the supervisor hold the order",
}


def mutant(name: str) -> Callable[[Plant], Plant]:
    """Enter a patch into the list."""

    def enter(plant: Plant) -> Plant:
        MUTANTS[name] = plant
        return plant

    return enter


@contextmanager
def planted_mutant(name: str | None) -> Iterator[None]:
    """Within this scope the engine has the defect; None is the engine as it is."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            all_mutants()[name](patch)
        yield


def all_mutants() -> dict[str, Plant]:
    """By name."""
    for module in (
        "mutants",
        "mutants_of_adapters",
        "mutants_of_answers",
        "mutants_of_faults",
        "mutants_of_forms",
        "mutants_of_look_ahead",
        "mutants_of_operations",
        "mutants_of_pooling",
        "mutants_of_replicas",
        "mutants_of_runs",
        "mutants_of_texts",
        "mutants_of_windows",
    ):  # each enters its own
        import_module(f"tests.simulation.{module}")
    return MUTANTS


def is_of_adapters(name: str) -> bool:
    """Whether only a story with adapters can show it."""
    return all_mutants()[name].__module__.endswith("mutants_of_adapters")


def is_of_windows(name: str) -> bool:
    """Whether only a story whose model has windows can show it."""
    return all_mutants()[name].__module__.endswith("mutants_of_windows")


def is_of_replicas(name: str) -> bool:
    """Whether only a story with replicas can show it."""
    return all_mutants()[name].__module__.endswith("mutants_of_replicas")


def is_of_operations(name: str) -> bool:
    """Whether only a story with sleep, pauses or new weights can show it."""
    return all_mutants()[name].__module__.endswith("mutants_of_operations")
