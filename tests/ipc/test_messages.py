"""Every message arrives as it was sent; whatever else arrives is a FrameError, and costs no more than its bytes."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tracemalloc
from typing import Any

import attrs
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc import values
from tests.source_tree import SRC
from triolet import SamplingParams
from triolet.config.engine import EngineConfig
from triolet.core.step_plan import (
    PlanRow,
    PromptLogprobs,
    RowFailure,
    RowResult,
    RowStart,
    SampledToken,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from triolet.errors import FrameError
from triolet.ipc.messages import (
    CONVERTER,
    HEADER_BYTES,
    LAYOUT,
    REPLIES,
    REQUESTS,
    Halt,
    Reply,
    Request,
    Way,
    layout_of,
)

WAYS: dict[str, Way[Any]] = {"requests": REQUESTS, "replies": REPLIES}


def through(way: Way[Any], message: object) -> object:
    """A message, after its journey."""
    reader = way.reader()
    reader.feed(way.pack(message))
    [arrived] = way.messages(reader)
    reader.close()
    return arrived


def unpack(way: Way[Any], body: object) -> object:
    return way.unpack(msgpack.packb(body))


@given(values.requests)
def test_a_request_arrives_as_it_was_sent(request: Request) -> None:
    assert through(REQUESTS, request) == request


@given(values.replies)
def test_a_reply_arrives_as_it_was_sent(reply: Reply) -> None:
    assert through(REPLIES, reply) == reply


@given(values.row_starts)
def test_what_is_compared_by_no_hash_arrives_too(start: RowStart) -> None:
    plan = StepPlan(1, (), (start,), ())
    arrived = through(REQUESTS, plan)
    assert isinstance(arrived, StepPlan)
    assert attrs.asdict(arrived) == attrs.asdict(plan)
    assert type(arrived.starts[0].ending_token_ids) is frozenset


def test_a_long_prompt_arrives() -> None:
    start = RowStart(
        row_id=0,
        request_id="r",
        epoch=1,
        prompt_token_ids=tuple(range(200_000)),
        output_token_ids=(),
        params=SamplingParams(),
        seed=1,
        ending_token_ids=frozenset(),
    )
    plan = StepPlan(1, (), (start,), (PlanRow(0, 0, 512, (1, 2), sample=False),))
    assert through(REQUESTS, plan) == plan


def test_messages_go_one_way_only() -> None:
    payload = REQUESTS.pack(EngineConfig())[HEADER_BYTES:]
    with pytest.raises(
        FrameError,
        match="must be one of LoadProgress, ModelInfo, StepResult, CallAnswer, Failure, Pong, ProcessEnded; got",
    ):
        REPLIES.unpack(payload)


ROW = [0, 0, 1, [], True, None, []]
TOKEN = [0, ["r", 1, 0, 5, None]]


@pytest.mark.parametrize(
    ("way", "body"),
    [
        ("requests", ["StepPlan", [7, [], [], [ROW[:-1]], 1, [], [], [], False]]),  # a field is missing
        ("requests", ["StepPlan", [7, [], [], [[*ROW, 1]], 1, [], [], [], False]]),  # one too many
        (
            "requests",
            ["StepPlan", [7, [], [], [[0, 0, 1.0, [], True, None, []]], 1, [], [], [], False]],
        ),  # a float for an int
        (
            "requests",
            ["StepPlan", [7, [], [], [[0, 0, True, [], True, None, []]], 1, [], [], [], False]],
        ),  # a bool for an int
        (
            "requests",
            ["StepPlan", [7, [], [], [[0, 0, 1, [], 1, None, []]], 1, [], [], [], False]],
        ),  # an int for a bool
        (
            "requests",
            ["StepPlan", [7, [], [], [[0, 0, 1, [1, "2"], True, None, []]], 1, [], [], [], False]],
        ),  # a text among ids
        (
            "requests",
            ["StepPlan", [7, [], [], [[0, 0, 1, [], True, "mask", []]], 1, [], [], [], False]],
        ),  # a text for bytes
        (
            "requests",
            ["StepPlan", [7, [], [], [[0, 0, 1, [], True, None, ["2"]]], 1, [], [], [], False]],
        ),  # a text for a drafted id
        ("requests", ["StepPlan", [7, "", [], [], 1, [], [], [], False]]),  # a text for a list
        ("requests", ["StepPlan", [7, {}, [], [], 1, [], [], [], False]]),  # a mapping for a list
        (
            "requests",
            ["StepPlan", [7, [], [], [ROW], "1", [], [], [], False]],
        ),  # a text for a number of steps
        ("requests", ["StepPlan", [7, [], [], [ROW], 1, [], [[1, "key"]], [], False]]),  # a text for a key
        (
            "requests",
            ["StepPlan", [7, [], [], [ROW], 1, [], [], [[0, b"key"]], False]],
        ),  # a load without its block
        ("requests", ["StepPlan", {"step_id": 7}]),
        ("requests", ["StepPlan"]),
        ("requests", ["StepResult", [7, [], 0.0, None, True, 0, 0]]),
        ("requests", ["object", []]),
        ("requests", [1, [7, [], [], [], 1]]),
        ("requests", [[], [7, [], [], [], 1]]),
        ("requests", {"StepPlan": [7, [], [], [], 1]}),
        ("requests", []),
        ("requests", None),
        ("replies", ["StepResult", [7, [[0, ["r", 1, 0, "5", None]]], 0.1, None, True, 0, 0]]),
        ("replies", ["StepResult", [7, [TOKEN], "0.1", None, True, 0, 0]]),
        ("replies", ["StepResult", [7, [TOKEN], None, None, True, 0, 0]]),
        ("replies", ["StepResult", [7, [TOKEN], 1, None, 1, 0, 0]]),  # an int for a bool
        ("replies", ["StepResult", [7, [TOKEN[1]], 1, None, True, 0, 0]]),  # no tag
        ("replies", ["StepResult", [7, [[*TOKEN, 1]], 1, None, True, 0, 0]]),  # more than tag and fields
        ("replies", ["StepResult", [7, [[1, TOKEN[1]]], 1, None, True, 0, 0]]),  # the tag of another variant
        ("replies", ["StepResult", [7, [[3, TOKEN[1]]], 1, None, True, 0, 0]]),  # a tag of none
        (
            "replies",
            ["StepResult", [7, [[-3, TOKEN[1]]], 1, None, True, 0, 0]],
        ),  # an index from the end for a tag
        ("replies", ["StepResult", [7, [[False, TOKEN[1]]], 1, None, True, 0, 0]]),  # a bool for a tag
        (
            "replies",
            ["StepResult", [7, [["SampledToken", TOKEN[1]]], 1, None, True, 0, 0]],
        ),  # a name for a tag
        ("requests", ["Halt", [1]]),
        ("replies", ["Failure", ["kind", "message", {"got": {}}]]),
        ("replies", ["Failure", ["kind", "message", {"got": [1]}]]),
        ("replies", ["Failure", ["kind", b"message", {}]]),
    ],
    ids=repr,
)
def test_what_is_only_similar_to_a_message_is_refused(way: str, body: object) -> None:
    with pytest.raises(FrameError, match=r"^a message must be one of "):
        unpack(WAYS[way], body)


def test_the_bodies_of_the_test_above_are_wrong_in_one_place_only() -> None:
    assert unpack(REQUESTS, ["StepPlan", [7, [], [], [ROW], 1, [], [], [], False]]) == StepPlan(
        7, (), (), (PlanRow(0, 0, 1, (), sample=True),)
    )
    assert unpack(REPLIES, ["StepResult", [7, [TOKEN], 1, None, True, 0, 0]]) == StepResult(
        7, (SampledToken("r", 1, 0, 5),), 1.0
    )


TOP = TokenLogprobs((5, 6), (-0.1, -float("inf")), 1)
VARIANTS: list[RowResult] = [
    SampledToken("r", 1, 0, 5),
    SampledToken("r", 1, 1, 5, TOP),
    PromptLogprobs(1, 1, (TOP, TOP)),
    RowFailure("s", 2, "NaN"),
]


@pytest.mark.parametrize("rows", [*([one] for one in VARIANTS), VARIANTS, VARIANTS[::-1] * 2], ids=len)
def test_each_variant_of_a_row_result_arrives_as_its_own_class_and_in_its_place(
    rows: list[RowResult],
) -> None:
    arrived = through(REPLIES, StepResult(7, tuple(rows)))
    assert isinstance(arrived, StepResult)
    assert [type(row) for row in arrived.rows] == [type(row) for row in rows]
    assert arrived.rows == tuple(rows)


@given(st.floats())
def test_a_log_probability_keeps_its_bits(number: float) -> None:
    token = SampledToken("r", 1, 0, 5, TokenLogprobs((5,), (number,), 1))
    arrived = through(REPLIES, StepResult(7, (token,)))
    assert isinstance(arrived, StepResult)
    [row] = arrived.rows
    assert isinstance(row, SampledToken)
    assert row.logprobs is not None
    assert struct.pack("d", row.logprobs.logprobs[0]) == struct.pack("d", number)


@pytest.mark.parametrize("tag", [4, -1, False, "SampledToken", None])
def test_an_unknown_tag_is_refused_by_name(tag: object) -> None:
    with pytest.raises(FrameError, match="a tag must be a whole number from 0 to 3; got "):
        unpack(REPLIES, ["StepResult", [7, [[tag, TOKEN[1]]], 1, None, True, 0, 0]])


def test_the_layout_covers_the_order_of_the_variants_that_the_tags_count() -> None:
    def message(rows: Any) -> type:
        return attrs.make_class("Whole", {"rows": attrs.field(type=rows)})

    assert layout(message(tuple[SampledToken | RowFailure, ...])) != layout(
        message(tuple[RowFailure | SampledToken, ...])
    )


def test_what_the_class_itself_refuses_is_refused() -> None:
    config = CONVERTER.unstructure(EngineConfig())
    names = [field.name for field in attrs.fields(EngineConfig)]
    config[names.index("block_size")] = -1
    with pytest.raises(FrameError, match="block_size must be a whole number of at least 1; got -1"):
        unpack(REQUESTS, ["EngineConfig", config])


short_texts, small = st.text(max_size=5), st.integers(0, 9)
json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | short_texts
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(short_texts | small, inner, max_size=3),
    max_leaves=20,
)


@given(st.sampled_from(["requests", "replies"]), st.binary(max_size=100))
def test_any_bytes_are_a_message_or_an_error(way: str, payload: bytes) -> None:
    assert_message_or_error(WAYS[way], payload)


@given(st.sampled_from([(way, kind.__name__) for way in WAYS.values() for kind in way.kinds]), json_like)
def test_any_values_are_a_message_or_an_error(target: tuple[Way[Any], str], fields: object) -> None:
    way, name = target
    assert_message_or_error(way, msgpack.packb([name, fields]))


@given(values.requests, st.data())
def test_a_message_with_some_bytes_changed_is_a_message_or_an_error(
    request: Request, data: st.DataObject
) -> None:
    payload = bytearray(REQUESTS.pack(request)[HEADER_BYTES:])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    assert_message_or_error(REQUESTS, bytes(payload))


@given(values.replies, st.data())
def test_a_message_cut_short_is_an_error(reply: Reply, data: st.DataObject) -> None:
    payload = REPLIES.pack(reply)[HEADER_BYTES:]
    with pytest.raises(FrameError):
        REPLIES.unpack(payload[: data.draw(st.integers(0, len(payload) - 1))])


def assert_message_or_error(way: Way[Any], payload: bytes) -> None:
    got: object
    try:
        got = way.unpack(payload)
    except FrameError as error:
        got = error
    assert isinstance(got, way.kinds) or len(str(got)) < 1_000


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\x00\xff\xff\xff" * 20_000,  # lists in lists, each said to be long
        b"\x91" * 100_000,  # lists in lists, each of one item
        b"\xdf\x00\x00\xff\xff" * 20_000,  # mappings in mappings
        b"\xdb\xff\xff\xff\xff",  # a text of 4 GiB
        b"\xc9\xff\xff\xff\xff\x00",  # an extension of 4 GiB
        b"\x92\xaaStepResult\xdc\xff\xff"
        + b"\x90" * 65_535,  # a result with as many fields as a list may have
    ],
    ids=["lists", "deep lists", "mappings", "text", "extension", "fields"],
)
def test_a_small_message_costs_little_memory_whatever_it_says(payload: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(FrameError):
        REPLIES.unpack(payload)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**29


def test_a_small_message_takes_little_memory_to_write() -> None:
    """The allocation of a large buffer fails first where memory is short, and with it the step."""
    tracemalloc.start()
    REQUESTS.pack(Halt())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**16


# ------------------------------------------------------------------------------------------- layout


def layout(*kinds: type) -> int:
    return layout_of(kinds)


def test_the_layout_follows_from_the_fields_of_every_part_of_a_message() -> None:
    def message(name: str, **types: Any) -> type:
        return attrs.make_class(name, {field: attrs.field(type=type_) for field, type_ in types.items()})

    part = message("Part", number=int, text=str)
    whole = message("Whole", parts=tuple[part, ...], flag=bool)  # type: ignore[valid-type]
    changes = [
        message("Whole", parts=tuple[message("Part", number=float, text=str), ...], flag=bool),  # type: ignore[misc]
        message("Whole", parts=tuple[message("Part", text=str, number=int), ...], flag=bool),  # type: ignore[misc]
        message("Whole", parts=tuple[part, ...], flag=bool | None),  # type: ignore[valid-type]
        message("Whole", parts=tuple[part, ...]),  # type: ignore[valid-type]
        message("Other", parts=tuple[part, ...], flag=bool),  # type: ignore[valid-type]
    ]
    again = message("Whole", parts=tuple[message("Part", number=int, text=str), ...], flag=bool)  # type: ignore[misc]
    assert layout(whole) == layout(again)
    assert len({layout(kind) for kind in (whole, *changes)}) == 6
    assert layout(whole, part) == layout(whole) != layout(part, whole)


def test_the_layout_is_the_same_in_every_process() -> None:
    program = "from triolet.ipc.messages import LAYOUT; print(LAYOUT)"
    environ = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True)
    assert int(said.stdout) == LAYOUT
