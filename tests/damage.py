"""Damage to what is read from files and sockets: other bytes, and other values in trees of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, 1e308),
    *(float("nan"), float("inf"), -float("inf"), "", "x", "nan", "\ud800", b"", b"\xff"),
    *([], {}, [[]], [1], ["a"], {"a": 1}, {1: 2}),
)
NAMES = ("unknown", 5, None, True, 1.5, b"name")


def places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys and indexes that lead to every value of a tree."""
    if place:
        yield place
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*place, key))


def change_tree(tree: Any, rng: random.Random) -> None:
    """Put one or two values or names into a tree of dictionaries and lists, leave them out or replace them."""
    for _ in range(rng.randint(1, 2)):
        *way, last = rng.choice(list(places(tree)))
        parent = tree
        for key in way:
            parent = parent[key]
        match rng.choice(("replace", "replace", "replace", "leave out", "put in")):
            case "replace":
                parent[last] = deepcopy(rng.choice(VALUES))
            case "leave out":
                del parent[last]
            case _ if isinstance(parent, dict):
                parent[rng.choice(NAMES)] = deepcopy(rng.choice(VALUES))
            case _:
                parent.append(deepcopy(rng.choice(VALUES)))


def other_bytes(whole: bytes, rng: random.Random) -> bytes:
    """Return the same with one to three other bytes."""
    changed = bytearray(whole)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
