"""Structs that Python and C++ share: a mirror that is laid out otherwise is refused when a library is loaded."""

from __future__ import annotations

import ctypes

import pytest

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from triolet.errors import InvariantViolated
from triolet.kernels.cpu import abi
from triolet.kernels.cpu.abi import MIRRORS, check_layouts
from triolet.kernels.cpu.build import build
from triolet.kernels.cpu.library import load
from triolet.kernels.cpu.targets import TARGETS


def mirror(name: str, *fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type(MIRRORS[name].__name__, (ctypes.Structure,), {"_fields_": fields})


def fields_of(name: str) -> list[tuple[str, type]]:
    return list(MIRRORS[name]._fields_)  # type: ignore[arg-type]


def refusal(monkeypatch: pytest.MonkeyPatch, name: str, *fields: tuple[str, type]) -> str:
    library = compiled()
    monkeypatch.setitem(MIRRORS, name, mirror(name, *fields))
    with pytest.raises(InvariantViolated) as caught:
        check_layouts(library)
    return str(caught.value)


@on_every_cpu_variant
def test_every_mirror_is_laid_out_as_its_struct(variant: str) -> None:
    check_layouts(compiled(variant))


@pytest.mark.parametrize("name", sorted(MIRRORS))
def test_a_mirror_with_a_field_too_many_is_refused_and_both_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = refusal(monkeypatch, name, *fields_of(name), ("surplus", ctypes.c_int32))
    assert (
        f"{MIRRORS[name].__name__}.surplus must be the field of {name} in C++, none; got 4 bytes" in message
    )


@pytest.mark.parametrize("name", sorted(MIRRORS))
def test_a_mirror_without_its_last_field_is_refused_and_both_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *kept, (last, _) = fields_of(name)
    message = refusal(monkeypatch, name, *kept)
    assert f".{last} must be the field of {name} in C++, " in message and message.endswith("got none")


def test_fields_of_the_same_size_that_change_places_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *others = fields_of("Draw")[1:]
    message = refusal(monkeypatch, "Draw", fields_of("Draw")[0], second, first, *others)
    assert "DrawStruct.answer must be the field of Draw in C++, 8 bytes at offset 8" in message


def test_a_struct_that_has_no_mirror_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = compiled()
    monkeypatch.delitem(MIRRORS, "Step")
    with pytest.raises(InvariantViolated, match="must mirror the structs"):
        check_layouts(library)


def test_a_library_is_not_loaded_when_a_mirror_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS[-1]
    compiled(target.name)  # or the test is skipped
    monkeypatch.setitem(abi.MIRRORS, "Linear", mirror("Linear", *fields_of("Linear")[:-1]))
    with pytest.raises(InvariantViolated, match="LinearStruct"):
        load(target, build(target))
