from __future__ import annotations

from typing import Any

import pytest

from triolet.protocol.errors import WireError
from triolet.protocol.json.encoding import EncodedItems, EncodedList, EncodedObject, EncodedText
from triolet.protocol.responses.store import (
    BYTES_PER_RESPONSE,
    ResponseStore,
    StoreBudget,
    StoredResponse,
    previous_messages,
    prompt_of,
)


def stored(name: str, text: str = "", owner: str | None = None, **fields: Any) -> StoredResponse:
    response = {"id": name, "output": [], "top_logprobs": 0, **fields}
    return StoredResponse.of(
        response=response, messages=({"role": "user", "content": text},), num_input=1, owner=owner
    )


def test_the_response_that_was_not_used_for_the_longest_time_is_forgotten_first() -> None:
    store = ResponseStore(max_responses=2, max_bytes=2**20)
    store.put(stored("a"))
    store.put(stored("b"))
    assert store.get("a") is not None
    store.put(stored("c"))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]


def test_a_store_is_bounded_in_bytes_and_its_count_is_exact() -> None:
    store = ResponseStore(max_responses=100, max_bytes=15 * BYTES_PER_RESPONSE)
    for number in range(50):
        store.put(stored(str(number % 20), "x" * (number * 100)))
        assert store.num_bytes <= 15 * BYTES_PER_RESPONSE
    for number in range(20):
        store.delete(str(number))
    assert (len(store), store.num_bytes) == (0, 0)


def test_the_items_of_a_response_are_found_as_long_as_it_is_and_by_its_owner() -> None:
    store = ResponseStore(max_responses=2, max_bytes=2**20)
    for name in "abc":
        item = {"id": f"msg_{name}", "type": "message", "content": []}
        store.put(stored(f"resp_{name}", owner="one", output=[item]))
    for item_id, response_id in (
        ("msg_c", "resp_c"),
        ("msg_c_0", "resp_c"),
        ("msg_a", None),
        ("msg_a_0", None),
    ):
        found = store.response_with(item_id, "one")
        assert (found and found.id) == response_id
        assert store.response_with(item_id, "other") is None
    assert store.response_with("msg", "one") is None
    store.clear()
    assert store._response_of == {}


@pytest.mark.parametrize("length", [10, 20_000], ids=["packed", "long"])
def test_a_response_and_its_chat_come_back_as_they_were(length: int) -> None:
    output = [
        {
            "type": "message",
            "content": [{"type": "output_text", "text": "ö\u2028" * length, "logprobs": EncodedList()}],
        }
    ]
    response = {
        "id": "a",
        "output": output,
        "top_logprobs": 0,
        "temperature": 0.1,
        "error": None,
        "user": '"\\',
    }
    messages = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    )
    store = ResponseStore(max_responses=1, max_bytes=2**20)
    store.put(StoredResponse.of(response, messages, 1))
    back = store.get("a")
    assert back is not None and (back.response, back.messages, back.num_input) == (response, messages, 1)


def test_what_alone_is_larger_than_the_store_is_not_kept() -> None:
    store = ResponseStore(max_responses=10, max_bytes=BYTES_PER_RESPONSE)
    store.put(stored("a", "x" * 10_000))
    assert store.get("a") is None and store.num_bytes == 0


def test_log_probabilities_count() -> None:
    position = {"token": "x", "bytes": [120], "logprob": -0.5}
    positions = [{**position, "top_logprobs": [position] * 20}] * 100
    part = {"type": "output_text", "text": "x", "logprobs": positions}
    # Also where the client has named tokens, or asked for all, and not for so many of the likeliest.
    for num_top in (20, 0, -1):
        heavy = stored("a", output=[{"content": [part]}], top_logprobs=num_top)
        assert heavy.num_bytes > stored("a").num_bytes + 100 * 20 * 100


def test_a_response_is_its_owners_alone() -> None:
    store = ResponseStore(10, 2**20)
    store.put(stored("a", owner="key 1"))
    assert store.get("a", "key 2") is None and store.get("a") is None
    assert not store.delete("a", "key 2")
    assert store.delete("a", "key 1") and store.get("a", "key 1") is None


def test_everything_that_a_client_wrote_counts() -> None:
    text = "x" * 100_000
    tools = [{"parameters": {"enum": [text]}}]
    for fields in (
        {"metadata": {"a": text}},
        {"user": text},
        {"tools": tools},
        {"tools": EncodedItems.of(tools)},
        {"tool_choice": EncodedObject.of({"tools": [text]})},
        {"instructions": EncodedText(text)},
    ):
        assert stored("a", **fields).num_bytes > stored("b").num_bytes + len(text)


@pytest.mark.parametrize(("max_responses", "max_bytes"), [(64, 2**30), (2**20, 64 * 6000)])
def test_responses_of_one_key_never_evict_those_of_another(max_responses: int, max_bytes: int) -> None:
    store = ResponseStore(max_responses, max_bytes)
    for name in "abc":
        store.put(stored(name, owner="key 1"))
    for number in range(200):
        store.put(stored(str(number), owner="key 2"))
    assert [store.get(name, "key 1") is not None for name in "abc"] == [True] * 3
    assert store.get("199", "key 2") is not None and len(store) <= 80
    assert store.num_bytes <= max_bytes


def test_stores_that_share_memory_evict_only_their_own() -> None:
    shared = StoreBudget(max_bytes=12 * BYTES_PER_RESPONSE)
    one, other = (ResponseStore(100, 2**30, shared) for _ in range(2))
    one.put(stored("mine"))
    for number in range(50):
        other.put(stored(str(number)))
        assert shared.num_bytes <= shared.max_bytes
    assert one.get("mine") is not None and other.get("49") is not None
    one.clear()
    other.clear()
    assert shared.num_bytes == 0


def test_a_chat_is_looked_for_in_each_store_and_its_absence_is_an_error() -> None:
    near, far = ResponseStore(10, 2**20), ResponseStore(10, 2**20)
    far.put(stored("a", "Hello"))
    assert previous_messages(None, None, near, far) == ()
    assert previous_messages("a", None, near, far)[0]["content"] == "Hello"
    with pytest.raises(WireError) as raised:
        previous_messages("b", None, near, far)
    assert raised.value.code == "previous_response_not_found"


def test_nothing_to_ask_with_is_an_error() -> None:
    assert prompt_of("Be brief.", []) == [{"role": "system", "content": "Be brief."}]
    with pytest.raises(WireError, match="input must not be empty"):
        prompt_of(None, [])
