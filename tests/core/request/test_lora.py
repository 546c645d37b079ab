"""LoRA adapters: what a caller may name, which of them stay loaded, and which one makes way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from triolet.core.request.lora import Adapter, AdapterModule, AdapterTable, LoRARequest
from triolet.errors import AdaptersPinned, InvalidRequest, UnsupportedFeature


def wish(name: str = "a", number: int = 1, **fields: Any) -> LoRARequest:
    """Adapter as a caller names it."""
    return LoRARequest(name, number, **({"lora_path": "/adapters/" + name} | fields))


def loaded(name: str = "a", number: int = 1) -> Adapter:
    return Adapter(name=name, int_id=number, path="/adapters/" + name, digest="digest of " + name)


def table_of(*names: str, most: int = 3) -> AdapterTable:
    """A table with adapters numbered from 1, the last one used last."""
    table = AdapterTable(True, most)
    for number, name in enumerate(names, 1):
        table.add(loaded(name, number))
    return table


def names(table: AdapterTable) -> list[str]:
    """Names of the loaded adapters, the one that was used last at the end."""
    return [adapter.name for adapter in table.adapters]


# ------------------------------------------------------------------------------ what a caller names


def test_an_adapter_that_a_caller_names_has_its_values_under_two_names() -> None:
    request = LoRARequest("a", 7, "folder")
    assert (request.name, request.adapter_id, request.path) == ("a", 7, "folder")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("a", 7, "folder")


def test_an_adapter_is_read_once_unless_the_caller_says_otherwise() -> None:
    request = wish()
    assert request.load_inplace is False
    assert request.is_3d_lora_weight is False
    assert request.base_model_name is None


@pytest.mark.parametrize("field", ["lora_name", "lora_path", "base_model_name"])
@pytest.mark.parametrize("value", ["", 5, b"a", ["a"], Path("a")], ids=repr)
def test_the_texts_of_an_adapter_are_texts_and_not_empty(field: str, value: object) -> None:
    fields: dict[str, Any] = {"lora_name": "a", "lora_int_id": 1, "lora_path": "p", field: value}
    with pytest.raises(InvalidRequest) as caught:
        LoRARequest(**fields)
    assert str(caught.value) == f"{field} must be a non-empty string; got {value!r}"
    assert (caught.value.field, caught.value.got) == (field, value)


@pytest.mark.parametrize("field", ["lora_name", "lora_path"])
def test_name_and_folder_of_an_adapter_can_not_be_none(field: str) -> None:
    fields: dict[str, Any] = {"lora_name": "a", "lora_int_id": 1, "lora_path": "p", field: None}
    with pytest.raises(InvalidRequest, match=f"{field} must be a non-empty string; got None"):
        LoRARequest(**fields)


def test_the_folder_of_an_adapter_must_be_given() -> None:
    with pytest.raises(InvalidRequest, match="lora_path must be a non-empty string"):
        LoRARequest("a", 1)


@pytest.mark.parametrize("value", ["1", 1.0, None, True, False])
def test_the_number_of_an_adapter_is_a_whole_number(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LoRARequest("a", value, "p")
    assert str(caught.value) == f"lora_int_id must be a whole number; got {value!r}"
    assert (caught.value.field, caught.value.got) == ("lora_int_id", value)


@pytest.mark.parametrize("number", [0, -1])
def test_the_number_of_an_adapter_is_at_least_one(number: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wish(number=number)
    assert str(caught.value) == f"id must be > 0, got {number}"
    assert (caught.value.field, caught.value.got) == ("lora_int_id", number)
    assert wish(number=1).lora_int_id == 1


def test_adapters_of_fused_experts_are_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="is_3d_lora_weight must be False") as caught:
        wish(is_3d_lora_weight=True)
    assert (caught.value.field, caught.value.got) == ("is_3d_lora_weight", True)


def test_two_wishes_are_equal_if_they_name_the_same_adapter() -> None:
    assert wish("a", 1) == wish("a", 2, lora_path="elsewhere")
    assert hash(wish("a", 1)) == hash(wish("a", 2))
    assert wish("a", 1) != wish("b", 1)
    assert wish("a", 1) != "a"
    assert len({wish("a", 1), wish("a", 2), wish("b", 1)}) == 2


def test_the_folder_is_absolute_and_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert wish(lora_path="~/lora").folder == Path("/somewhere/lora")
    assert wish(lora_path="lora").folder == Path.cwd() / "lora"


def test_an_adapter_that_was_read_is_the_one_that_was_named() -> None:
    request = LoRARequest("a", 7, "/adapters/a", "base")
    adapter = Adapter.of(request, "digest")
    assert adapter == Adapter(name="a", int_id=7, path="/adapters/a", digest="digest", base_model_name="base")
    again = adapter.lora_request
    assert (again.lora_name, again.lora_int_id, again.lora_path) == ("a", 7, "/adapters/a")
    assert again.base_model_name == "base"


def test_a_module_is_a_linear_layer_unless_it_is_said_to_be_an_embedding() -> None:
    assert not AdapterModule("layers.0.self_attn.q_proj", "layers.0.qkv", 0, 4, 8).is_embedding


# ----------------------------------------------------------------------------- which ones are loaded


def test_an_engine_without_lora_refuses_an_adapter() -> None:
    request = wish()
    with pytest.raises(InvalidRequest, match="but LoRA is not enabled!") as caught:
        AdapterTable(False, 3).check_enabled(request)
    assert (caught.value.field, caught.value.got) == ("lora", request)


def test_an_engine_with_lora_takes_an_adapter() -> None:
    table = AdapterTable(True, 3)
    table.check_enabled(wish())
    assert table.adapters == ()


def test_an_adapter_that_is_not_loaded_is_not_found() -> None:
    assert table_of("a").find(wish("b", 2)) is None


def test_an_adapter_that_is_found_counts_as_used_last() -> None:
    table = table_of("a", "b", "c")
    assert table.find(wish("a", 1)) == loaded("a", 1)
    assert names(table) == ["b", "c", "a"]


def test_an_adapter_to_be_read_again_is_not_found_and_not_used() -> None:
    table = table_of("a", "b")
    assert table.find(wish("a", 1, load_inplace=True)) is None
    assert names(table) == ["a", "b"]


@pytest.mark.parametrize("load_inplace", [False, True])
def test_a_number_belongs_to_one_adapter(load_inplace: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        table_of("a", "b").find(wish("c", 2, load_inplace=load_inplace))
    assert str(caught.value) == "lora_int_id must belong to one adapter; 2 is 'b', got 'c'"
    assert (caught.value.field, caught.value.got) == ("lora_int_id", 2)


@pytest.mark.parametrize("load_inplace", [False, True])
def test_a_name_belongs_to_one_adapter(load_inplace: bool) -> None:
    with pytest.raises(InvalidRequest) as caught:
        table_of("a", "b").find(wish("b", 9, load_inplace=load_inplace))
    assert str(caught.value) == "lora_name must belong to one adapter; 'b' has lora_int_id 2, got 9"
    assert (caught.value.field, caught.value.got) == ("lora_name", "b")


def test_the_adapter_that_was_not_used_for_longest_makes_way() -> None:
    table = table_of("a", "b", "c", most=3)
    table.find(wish("a", 1))
    table.add(loaded("d", 4))
    assert names(table) == ["c", "a", "d"]


def test_no_adapter_makes_way_while_there_is_room() -> None:
    table = table_of("a", "b", most=3)
    table.add(loaded("c", 3))
    assert names(table) == ["a", "b", "c"]


def test_an_adapter_that_is_read_again_takes_its_own_place_and_counts_as_used_last() -> None:
    table = table_of("a", "b", most=2)
    newer = Adapter(name="a", int_id=1, path="/adapters/a", digest="another")
    table.add(newer)
    assert table.adapters == (loaded("b", 2), newer)


def test_a_pinned_adapter_does_not_make_way() -> None:
    table = table_of("a", "b", most=2)
    assert table.pin(1) == loaded("a", 1)
    assert table.is_pinned(loaded("a", 1))
    assert not table.is_pinned(loaded("b", 2))
    table.add(loaded("c", 3))
    assert names(table) == ["a", "c"]


def test_there_is_no_room_for_another_where_all_are_pinned() -> None:
    table = table_of("a", "b", most=2)
    table.pin(1)
    table.pin(2)
    with pytest.raises(AdaptersPinned, match="all 2 LoRA adapters"):
        table.add(loaded("c", 3))
    table.add(loaded("a", 1))  # a pinned adapter may be read again
    assert names(table) == ["b", "a"]


def test_a_registered_adapter_is_known_while_its_weights_make_way() -> None:
    table = table_of("a", "b", most=2)
    table.register(1)
    table.add(loaded("c", 3))  # in the place of the one that is not registered
    assert names(table) == ["a", "c"]
    table.register(3)
    table.add(loaded("d", 4))
    assert names(table) == ["a", "c", "d"]
    assert [adapter.name for adapter in table.resident] == ["c", "d"]
    assert table.find(wish("a", 1)) == loaded("a", 1)
    assert [adapter.name for adapter in table.resident] == ["d", "a"]
    assert table.remove(1) and table.remove(3)
    table.add(loaded("a", 1))  # no longer registered
    table.add(loaded("e", 5))
    assert names(table) == ["a", "e"]


def test_pinned_weights_never_make_way_and_not_more_are_pinned_than_there_is_room_for() -> None:
    table = table_of("a", most=2)
    for number, name in enumerate("bcd", 2):
        table.register(number - 1)
        table.add(loaded(name, number))
    table.pin(1)
    assert [adapter.name for adapter in table.resident] == ["a", "d"]
    table.pin(2)
    assert [adapter.name for adapter in table.resident] == ["a", "b"]
    with pytest.raises(AdaptersPinned, match="all 2 LoRA adapters"):
        table.pin(3)
    assert table.pin(2) == loaded("b", 2)  # as it is
    with pytest.raises(AdaptersPinned, match="all 2 LoRA adapters"):
        table.add(loaded("e", 5))


def test_an_adapter_that_is_removed_is_neither_loaded_nor_pinned() -> None:
    table = table_of("a", "b", most=2)
    table.pin(1)
    assert table.remove(1) is True
    assert names(table) == ["b"]
    assert table.remove(1) is False
    table.add(loaded("a", 1))
    assert not table.is_pinned(loaded("a", 1))


def test_an_adapter_that_is_not_loaded_can_not_be_pinned() -> None:
    table = table_of("a")
    with pytest.raises(InvalidRequest) as caught:
        table.pin(2)
    assert str(caught.value) == "Pinning failed. LoRA 2 is not registered."
    assert (caught.value.field, caught.value.got) == ("lora_int_id", 2)
    assert not table.is_pinned(loaded("b", 2))


@pytest.mark.parametrize(
    ("name", "number", "digest", "others"),
    [
        ("a", 1, "digest of a", False),
        ("a", 1, "of other contents", True),
        ("a", 9, "digest of a", True),
        ("c", 2, "digest of c", True),
        ("b", 1, "digest of b", True),
        ("c", 9, "digest of a", False),
    ],
)
def test_a_name_or_number_is_taken_by_another_adapter_or_by_other_contents(
    name: str, number: int, digest: str, others: bool
) -> None:
    assert table_of("a", "b").has_others(wish(name, number), digest) is others
