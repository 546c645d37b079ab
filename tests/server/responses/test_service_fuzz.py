"""Whatever a client sends: it is answered, the server goes on, and nothing is held afterwards."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import trio
import trio.testing

from tests.actors.executors.frames import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, Frame, FrameReader
from tests.actors.harness import STEP_S, FakeExecutor, assert_all_blocks_back, fake_engine
from tests.scale import num_cases
from tests.server.responses.websocket_client import ENDINGS, ChatTokenizer, Client
from triolet.config.server import GatewayConfig
from triolet.server.responses.service import ResponsesService, open_gateway

ANSWERS = (*ENDINGS, "response.steer.failed")
CLOSE_CODES = {1000, 1001, 1002, 1007, 1008, 1009}
MESSAGES_PER_CONNECTION = 50
FRAMES_PER_CONNECTION = 20
NASTY: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 1e308, -0.0, 0.5, "", "x", "x" * 300, "\ud83d\ude00",
    "\x00", "../../etc/passwd", "{{7*7}}", "resp_1", [], [None], ["a", 1], {}, {"type": "text"}, {"a": {"b": []}},
    [{"role": "user", "content": "hi"}], [{"role": "root", "content": "hi"}], [{"type": "input_image"}],
    [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [[[[[]]]]],
]  # fmt: skip
BASES: list[dict[str, Any]] = [
    {"type": "response.create", "model": "triolet-nano", "input": "Hi", "max_output_tokens": 2},
    {
        "type": "response.create", "model": "triolet-nano", "input": [{"role": "user", "content": "Hi"}],
        "stream_id": "a", "max_output_tokens": 2, "temperature": 0.5, "top_p": 0.5, "seed": 1, "stop": ["x"],
        "metadata": {"a": "b"}, "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"},
        "logit_bias": {"3": 1}, "tools": [], "tool_choice": "auto", "include": [], "store": False,
    },
    {"type": "response.cancel", "response_id": "resp_unknown"},
    {"type": "response.steer", "previous_response_id": "resp_unknown", "input": "Hi"},
    {"type": "response.resume", "response_id": "resp_unknown", "starting_after": 3, "stream_id": "b"},
]  # fmt: skip


def a_message(rng: random.Random) -> str:
    """Nearly right, or not at all."""
    event = json.loads(json.dumps(rng.choice(BASES)))
    for _ in range(rng.randrange(3)):
        name = rng.choice([*event, "stream_id", "previous_response_id", "timeout", "top_k", "unknown"])
        match rng.randrange(4):
            case 0:
                event.pop(name, None)
            case _:
                event[name] = rng.choice(NASTY)
    if event.get("type") == "response.cancel":
        event["response_id"] = (
            "resp_unknown"  # or it would end what another message began, and have no answer itself
        )
    if not isinstance(event.get("max_output_tokens"), str | list | dict):
        event["max_output_tokens"] = 2  # a long answer would only take long
    text = json.dumps(event, ensure_ascii=rng.random() < 0.5).encode(errors="replace").decode()
    if rng.random() < 0.2 and '"response.cancel"' not in text:
        cut = rng.randrange(len(text))
        text = (
            text[:cut]
            + rng.choice(["", "\x00", "]", "}", '"', "\\ud800", "NaN", "9" * 400])
            + text[cut + 1 :]
        )
    return text


async def converse(gateway: ResponsesService, seed: int, num_messages: int) -> None:
    """Each message gets exactly one answer; the connection stays."""
    rng = random.Random(seed)
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve_websocket, theirs)
        client = Client(ours)
        assert await client.open()
        for _ in range(num_messages):
            await client.send_text(a_message(rng))
        num_answers = 0
        with trio.fail_after(600):
            while num_answers < num_messages:
                events = await client.next_events()
                assert events, f"seed {seed}: closed with {client.closed}"
                num_answers += sum(event["type"] in ANSWERS for event in events)
        await client.send({"type": "response.cancel", "response_id": "resp_last"})
        [last] = await client.next_events()
        assert last["error"]["code"] == "response_not_found", f"seed {seed}: {last}"
        await trio.aclose_forcefully(ours)


@pytest.mark.parametrize(
    ("first_seed", "num_messages"),
    [(1, 1_000), pytest.param(1000, num_cases(100_000), marks=pytest.mark.slow)],
)
async def test_every_message_gets_one_answer(
    first_seed: int,
    num_messages: int,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = GatewayConfig(write_timeout=600, ping_interval=600)
    executor = FakeExecutor(num_blocks=16, block_size=4)  # answers are short, however long they were to be
    async with fake_engine(executor, tokenizer=ChatTokenizer(), max_num_batched_tokens=256) as engine:
        async with open_gateway(engine, config) as gateway:
            for seed in range(first_seed, first_seed + num_messages // MESSAGES_PER_CONNECTION):
                await converse(gateway, seed, MESSAGES_PER_CONNECTION)
            await trio.sleep(config.resume_grace + 2 * STEP_S)
            assert gateway.num_connections == 0
        assert_all_blocks_back(engine)
    assert [record for record in caplog.records if record.name == "triolet.gateway"] == []


def some_bytes(rng: random.Random) -> bytes:
    """Frames, right and wrong ones, or no frames at all."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.randrange(1, 200))
    payload = (
        a_message(rng).encode() if kind < 7 else rng.randbytes(rng.choice([0, 1, 125, 126, 1000, 70_000]))
    )
    frame = Frame(
        rng.choice([TEXT, TEXT, TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG, 3, 11]),
        payload,
        fin=rng.random() < 0.9,
        rsv=rng.choice([0, 0, 0, 0, 0, 0, 0, 1, 2, 4]),
        mask=None if rng.random() < 0.05 else rng.randbytes(4),
    ).encode()
    return frame if rng.random() < 0.95 else frame[: rng.randrange(len(frame))]


async def babble(gateway: ResponsesService, seed: int, num_frames: int) -> None:
    """The connection ends, and with a code that says why; or the client has said nothing wrong."""
    rng = random.Random(seed)
    ours, theirs = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(gateway.serve_websocket, theirs)
        assert await Client(ours).open()
        reader = FrameReader()
        with trio.fail_after(600):
            try:
                for _ in range(num_frames):
                    await ours.send_all(some_bytes(rng))
                await ours.send_eof()
                while data := bytes(await ours.receive_some(2**20)):
                    reader.feed(data)
            except trio.BrokenResourceError:
                pass
        assert reader.is_between_frames
        closes = [frame for frame in reader.frames if frame.opcode == CLOSE]
        assert len(closes) <= 1
        for frame in closes:
            code = int.from_bytes(frame.payload[:2], "big") if frame.payload else 1000
            assert code in CLOSE_CODES or 3000 <= code < 5000, f"seed {seed}: {code}"
        await trio.aclose_forcefully(ours)


@pytest.mark.parametrize(
    ("first_seed", "num_frames"),
    [(1, 2_000), pytest.param(1000, num_cases(100_000), marks=pytest.mark.slow)],
)
async def test_no_bytes_harm_the_server(
    first_seed: int,
    num_frames: int,
    autojump_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = FakeExecutor(num_blocks=16, block_size=4)  # answers are short, however long they were to be
    async with fake_engine(executor, tokenizer=ChatTokenizer(), max_num_batched_tokens=256) as engine:
        async with open_gateway(engine) as gateway:
            for seed in range(first_seed, first_seed + num_frames // FRAMES_PER_CONNECTION):
                await babble(gateway, seed, FRAMES_PER_CONNECTION)
            await trio.sleep(gateway.config.resume_grace + 2 * STEP_S)
            assert gateway.num_connections == 0
        assert_all_blocks_back(engine)
    assert [record for record in caplog.records if record.name == "triolet.gateway"] == []
