"""Bodies of nonsense, by the thousand, over streams in memory: each is answered, and the engine is as it was.

Each body begins as a right one, of a kind that is drawn, and is then changed once or several times: a value for
another, a key for another, bytes for others. So most of them get past the first check.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import pytest
import trio

from tests.actors.harness import STEP_S, assert_all_blocks_back
from tests.scale import num_cases
from tests.server.routes.harness import MODEL, serving
from tests.server.routes.memory import connected

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SAMPLING: dict[str, Any] = {
    "model": MODEL,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "n": 2,
    "stop": ["A", "BC"],
    "stop_token_ids": [3],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"3": 1.5},
    "bad_words": ["AB"],
    "min_tokens": 1,
    "ignore_eos": True,
    "priority": 1,
    "cache_salt": "salt",
    "user": "somebody",
    "stream": True,
    "stream_options": {"include_usage": True},
    "timeout": 5,
}
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "messages": [
            {"role": "system", "content": "BE"},
            {"role": "user", "content": [{"type": "text", "text": "HI"}]},
        ],
        "max_completion_tokens": 3,
        "tool_choice": "none",
        "tools": [TOOL],
        "response_format": {"type": "text"},
        "chat_template_kwargs": {},
    },
    "/v1/completions": {**SAMPLING, "prompt": ["HI", "HO"], "max_tokens": 3, "echo": False},
    "/v1/responses": {
        **{name: value for name, value in SAMPLING.items() if name not in ("n", "stream_options")},
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "HI"}]}],
        "instructions": "BE",
        "max_output_tokens": 3,
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low"},
        "store": False,
        "previous_response_id": None,
    },
    "/v1/responses/input_tokens": {
        "input": [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "HI"}],
        "instructions": "BE",
        "previous_response_id": None,
    },
    "/v1/embeddings": {"model": MODEL, "input": ["HI"], "encoding_format": "base64", "dimensions": 3},
    "/pooling": {"model": MODEL, "input": ["HI"], "task": "embed"},
    "/score": {"model": MODEL, "text_1": "HI", "text_2": ["HA"]},
    "/rerank": {"model": MODEL, "query": "HI", "documents": [{"text": "HA"}], "top_n": 1},
    "/tokenize": {"prompt": "HI", "return_token_strs": True, "add_special_tokens": False},
    "/detokenize": {"tokens": [1, 2, 3]},
}
NONSENSE: list[Any] = [
    None, True, False, 0, -1, 1, 2, 17, 2**31, 2**63 - 1, 2**63, 2**64, -(2**70), 0.0, -0.5, 1e-9, 1.5, 1e308, "",
    "A", "\x00", "é", "💥", "\ufffd", "nan", "A" * 3000, [], [[]], [None], [1, "a"], [0] * 300, {}, {"type": None},
    {"type": "text"}, {"a": {"b": {"c": []}}}, {"type": "json_schema"}, [{"role": "user"}], ["AB"] * 200,
    {"type": "function", "function": {"name": "f"}}, {"format": {"type": "json_schema"}}, [[[[[[[[[]]]]]]]]],
]  # fmt: skip
RAW = [
    b"\x00",
    b"\xff",
    b"{",
    b"}",
    b"[",
    b'"',
    b",",
    b":",
    b"1e999",
    b"NaN",
    b"\\ud800",
    b"null",
    b"-",
    b"\\u0000",
]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside of data, as the container and the key."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += [(value, key), *nodes(inner)]
    return found


def body_of(drawn: random.Random) -> tuple[str, bytes]:
    path = drawn.choice(list(RIGHT))
    body = json.loads(json.dumps(RIGHT[path]))
    if drawn.random() < 0.5:
        for name in drawn.sample(list(body), drawn.randrange(len(body))):
            if name not in ("model", "input", "prompt", "messages"):
                del body[name]
    for _ in range(drawn.choice((0, 1, 1, 1, 2, 5))):
        holder, key = drawn.choice(nodes(body) or [(body, "model")])
        match drawn.randrange(4):
            case 0 if isinstance(holder, dict):
                holder[str(drawn.choice([*body, "functions", "prompt", "x" * 200]))] = deepcopy(
                    drawn.choice(NONSENSE)
                )
            case 1 if isinstance(holder, dict):
                holder.pop(key, None)
            case _:
                holder[key] = deepcopy(drawn.choice(NONSENSE))
    raw = bytearray(json.dumps(body).encode())
    if drawn.random() < 0.15:
        for _ in range(drawn.randrange(1, 4)):
            at = drawn.randrange(len(raw) + 1)
            raw[at : at + drawn.randrange(3)] = drawn.choice(RAW)
    return path, bytes(raw)


async def answer_of(client: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of one answer on a connection that is kept."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body))
    await client.send_all(head + body)
    received = b""
    while b"\r\n\r\n" not in received:
        received += await client.receive_some()
    head, _, received = received.partition(b"\r\n\r\n")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    if length:
        while len(received) < int(length[0].split(b":")[1]):
            received += await client.receive_some()
    else:
        while not received.endswith(b"\r\n0\r\n\r\n"):
            received += await client.receive_some()
    return int(head.split()[1]), received


async def bodies_are_answered(seed: int, count: int) -> dict[int, int]:
    drawn = random.Random(seed)
    statuses: dict[int, int] = {}
    async with serving(max_num_seqs=8) as scene, connected(scene) as client:
        for number in range(count):
            path, body = body_of(drawn)
            status, answer = await answer_of(client, path, body)
            statuses[status] = statuses.get(status, 0) + 1
            assert status in (200, 400, 404), (number, path, body, answer)
            if status != 200:
                error = json.loads(answer)["error"]
                assert isinstance(error["code"], str), answer
                assert isinstance(error["message"], str), answer
                assert b"Traceback" not in answer and b" at 0x" not in answer, answer
            else:
                assert b'"server_error"' not in answer, (path, body, answer)
            if number % 100 == 0:
                await trio.sleep(2 * STEP_S)  # a step in flight may still hold what no client waits for
                assert_all_blocks_back(scene.engine)
        assert scene.engine.statistics().num_restarts == 0
    return statuses


@pytest.mark.slow
async def test_a_thousand_bodies_of_nonsense_are_answered(autojump_clock: trio.testing.MockClock) -> None:
    statuses = await bodies_are_answered(seed=0, count=1000)
    assert min(statuses.get(200, 0), statuses.get(400, 0)) > 100, statuses


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 1 + num_cases(10)))
async def test_ten_thousand_bodies_of_nonsense_are_answered(
    seed: int, autojump_clock: trio.testing.MockClock
) -> None:
    statuses = await bodies_are_answered(seed, count=10_000)
    assert statuses[400] > 1000
