from __future__ import annotations

import gc
import json

import pytest

from triolet.core.request.prompt import TokenIds
from triolet.core.untracked import MIN_ITEMS
from triolet.protocol.json.parsing import LONG_TEXT, parse_object


def test_the_garbage_collector_does_not_look_through_many_token_ids() -> None:
    assert not gc.is_tracked(TokenIds(range(MIN_ITEMS + 1)))
    raw = json.dumps({"prompt": list(range(LONG_TEXT))})
    assert not gc.is_tracked(parse_object(raw)["prompt"])


@pytest.mark.parametrize("place", [0, LONG_TEXT // 2, LONG_TEXT - 1])
def test_a_list_with_anything_else_among_its_numbers_is_looked_through(place: int) -> None:
    items: list[object] = list(range(LONG_TEXT))
    items[place] = {"a": []}
    assert gc.is_tracked(found := parse_object(json.dumps({"prompt": items}))["prompt"])
    assert found == items
