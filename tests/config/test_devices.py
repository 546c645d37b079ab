"""Devices are named by words, numbers of GPUs and sets of cores."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from triolet.config.devices import cores_in, cores_of, device_of_cores, kind_of, split_cores


def parts(divided: Iterable[frozenset[int]]) -> list[list[int]]:
    return [sorted(part) for part in divided]


@pytest.mark.parametrize(
    ("device", "cores"),
    [
        ("auto", None),
        ("cpu", None),
        ("cuda:1", None),
        ("cpu:3", {3}),
        ("cpu:0-3", {0, 1, 2, 3}),
        ("cpu:0-1+8+10-11", {0, 1, 8, 10, 11}),
    ],
)
def test_a_device_may_be_bound_to_cores(device: str, cores: set[int] | None) -> None:
    assert cores_of(device) == cores
    if cores is not None:
        assert device_of_cores(cores) == device
        assert kind_of(device) == "cpu"


@pytest.mark.parametrize(("text", "cores"), [("", set()), ("0-2,5\n", {0, 1, 2, 5}), ("7", {7})])
def test_lists_of_the_kernel_name_cores(text: str, cores: set[int]) -> None:
    assert cores_in(text) == cores


def test_as_many_nodes_as_replicas_are_their_parts() -> None:
    nodes = [frozenset({0, 1, 4}), frozenset({2, 3, 5, 6}), frozenset[int]()]
    assert parts(split_cores(frozenset({0, 1, 2, 3, 5}), nodes, 2)) == [[0, 1], [2, 3, 5]]


def test_otherwise_cores_are_divided_equally_and_by_nodes() -> None:
    nodes = [frozenset({0, 2, 4, 6}), frozenset({1, 3, 5, 7})]
    assert parts(split_cores(frozenset(range(8)), nodes, 4)) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert parts(split_cores(frozenset(range(5)), [], 3)) == [[0, 1], [2, 3], [4]]
