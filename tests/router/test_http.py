"""HTTP of a router's clients, before engines that answer from a script."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.e2e.test_serving import serving_whole
from tests.router.fake_fleet import (
    Answer,
    Asked,
    FakeEngine,
    Piece,
    Received,
    error_answer,
    open_fleet,
    response_events,
    sse,
)
from tests.server.routes.harness import MODEL
from triolet.client.address import ServerAddress
from triolet.client.http import request
from triolet.client.websocket import open_responses_socket
from triolet.config.server import GatewayConfig
from triolet.router.answer import StreamFollower
from triolet.router.client_request import RoutedPrompt
from triolet.router.http import _target_of
from triolet.router.service import Router
from triolet.server.transport.parse_thread import LONG_INPUT_BYTES

CHUNK = b"""data: {"id": "c", "created": 1, "choices": [{"index": 0, "delta": {"content": "a"}}]}

"""


def storing(name: str) -> FakeEngine:
    """Return an engine that stores its responses, and knows none of other engines."""
    stored: set[str] = set()

    def answer(asked: Asked) -> Answer:
        payload = json.loads(asked.body or b"{}")
        wanted = payload.get("previous_response_id") or asked.target.partition("/v1/responses/")[2]
        if wanted and wanted not in stored:
            return error_answer(404, "response_not_found")
        if asked.method == "GET":
            return Answer([json.dumps({"id": wanted}).encode()])
        response_id = f"resp_{name}_{len(stored)}"
        stored.add(response_id)
        if payload.get("stream"):
            return Answer([sse(event) for event in response_events(response_id, "a")])
        return Answer([json.dumps({"id": response_id}).encode()])

    return FakeEngine(answer=answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("continues", [False, True], ids=["first turn", "second turn"])
async def test_a_response_over_http_is_found_at_its_engine_while_the_others_have_less_to_do(
    stream: bool,
    continues: bool,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(monkeypatch, *[storing(name) for name in "abc"]) as fleet:
        for number in range(6):
            payload: dict[str, Any] = {"input": f"{number} " * 300, "stream": stream}
            for _ in range(1 + continues):
                answer = await fleet.ask("POST", "/v1/responses", payload)
                response_id = (
                    answer.events()[0]["response"]["id"] if stream else json.loads(answer.body)["id"]
                )
                payload["previous_response_id"] = response_id
            # Prompts that wait elsewhere: the engine of the response is not the next to be chosen.
            fleet.router.engines.place(f"other {number}", RoutedPrompt.of(f"{number} other " * 500))
            got = await fleet.ask("GET", f"/v1/responses/{response_id}")
            again = await fleet.ask("POST", "/v1/responses", {"previous_response_id": response_id})
            assert (got.status, again.status) == (200, 200)


async def test_a_response_that_moved_over_http_is_found_at_its_new_engine_under_the_id_that_the_client_knows(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    pieces: list[Piece] = [*map(sse, response_events("resp_1", "a")[:2]), None]
    broken, whole = FakeEngine(answer=lambda asked: Answer(pieces)), FakeEngine()

    def answer(asked: Asked) -> Answer:
        if asked.target == "/v1/responses":
            assert json.loads(asked.body).get("previous_response_id") in (None, "resp_2")
            return Answer([sse(event) for event in response_events("resp_2", "ab")])
        assert asked.target == "/v1/responses/resp_2"
        return Answer([b'{"id": "resp_2", "output": []}'])

    whole.answer = answer
    async with open_fleet(monkeypatch, broken, whole) as fleet:
        streamed = await fleet.ask("POST", "/v1/responses", {"input": "x", "stream": True})
        assert [event.get("delta") for event in streamed.events()] == [None, "a", "b", None]
        got = await fleet.ask("GET", "/v1/responses/resp_1")
        assert json.loads(got.body) == {"id": "resp_1", "output": []}
        again = await fleet.ask("GET", "/v1/responses/resp_1?stream=true")
        assert (again.status, again.code) == (404, "response_not_found")
        further = {"input": "y", "previous_response_id": "resp_1", "stream": True}
        assert (await fleet.ask("POST", "/v1/responses", further)).status == 200


async def test_a_stream_that_its_next_engine_refuses_ends_with_a_failure_and_not_with_the_refusal(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    pieces: list[Piece] = [*map(sse, response_events("resp_1", "a")[:2]), None]
    broken = FakeEngine(answer=lambda asked: Answer(pieces))
    refusing = FakeEngine(answer=lambda asked: error_answer(429, "rate_limit_exceeded"))
    async with open_fleet(monkeypatch, broken, refusing) as fleet:
        streamed = await fleet.ask("POST", "/v1/responses", {"input": "x", "stream": True})
        assert [event["type"] for event in streamed.events()][-1] == "response.failed"
        assert b"rate_limit" not in streamed.body


async def test_the_tokens_of_an_input_are_counted_at_the_engine_that_has_the_response_before_it(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, *[storing(name) for name in "abc"]) as fleet:
        first = await fleet.ask("POST", "/v1/responses", {"input": "x", "stream": True})
        response_id = first.events()[0]["response"]["id"]
        home = fleet.router._homes.of(response_id)
        assert home is not None
        # As if another engine had gone on with the response, under an id of its own.
        fleet.router._homes.note("resp_known", attrs.evolve(home, is_moved=True))
        for known in (response_id, "resp_known"):
            body = {"input": "y", "previous_response_id": known}
            counted = await fleet.ask("POST", "/v1/responses/input_tokens", body)
            assert counted.status == 200
    asked = [
        one for engine in fleet.engines for one in engine.asked if one.target == "/v1/responses/input_tokens"
    ]
    assert [json.loads(one.body)["previous_response_id"] for one in asked] == [response_id] * 2


async def test_a_request_without_a_model_is_for_the_engines_to_answer(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(answer=lambda asked: Answer([b'{"id": "resp_1"}']))
    async with open_fleet(monkeypatch, engine) as fleet:
        for target in (
            "/v1/chat/completions",
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/embeddings",
        ):
            assert (await fleet.ask("POST", target, {"input": "x"})).status == 200


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}], ids=str)
@pytest.mark.parametrize("target", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_a_reference_to_an_item_is_refused_where_no_response_names_its_engine(
    item: dict[str, str],
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(monkeypatch, engine := storing("a")) as fleet:
        refused = await fleet.ask("POST", target, {"input": [{"role": "user", "content": "x"}, item]})
        assert (refused.status, refused.code) == (400, "unsupported_parameter")
        assert json.loads(refused.body)["error"]["param"] == "input[1].type"
        assert engine.num_asked(target) == 0
        first = json.loads((await fleet.ask("POST", "/v1/responses", {"input": "x"})).body)
        body = {"input": [item], "previous_response_id": first["id"]}
        assert (await fleet.ask("POST", target, body)).status == 200


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/chat/completions"])
async def test_a_stream_that_ends_with_an_error_of_the_router_has_the_last_line_of_every_stream(
    target: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    pieces: list[Piece] = [CHUNK, None]
    if target == "/v1/responses":
        pieces = [*map(sse, response_events("resp_1", "a")[:2]), None]
    broken = FakeEngine(answer=lambda asked: Answer(pieces))
    other = FakeEngine(answer=lambda asked: error_answer(400, "invalid_value"))
    async with open_fleet(monkeypatch, broken, other) as fleet:
        streamed = await fleet.ask("POST", target, {"stream": True})
    assert "error" in streamed.events()[-1] or streamed.events()[-1]["type"] == "response.failed"
    assert streamed.body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_an_error_of_the_engine_that_goes_on_with_chunks_comes_to_the_client(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    broken = FakeEngine(answer=lambda asked: Answer([CHUNK, None]))
    error: list[Piece] = [b'data: {"error": {"code": "server_error"}}\n\n', b"data: [DONE]\n\n"]
    other = FakeEngine(answer=lambda asked: Answer([CHUNK, *error]))
    async with open_fleet(monkeypatch, broken, other) as fleet:
        streamed = await fleet.ask("POST", "/v1/chat/completions", {"stream": True})
    assert streamed.body == b"".join(piece for piece in [CHUNK, *error] if isinstance(piece, bytes))


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
    ],
)
async def test_foreign_names_and_pages_reach_no_engine_through_a_router(
    headers: dict[str, str],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine()) as fleet:
        answer = await fleet.ask("GET", "/v1/models", headers=headers)
        assert (answer.status, answer.code) == (403, code)
        assert engine.num_asked("/v1/models") == 1  # the router's own


async def test_allowed_pages_may_read_answers_and_the_engine_does_not_judge_them_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    allowed: dict[str, Any] = {
        "allowed_origins": ("https://page.example",),
        "allowed_hosts": ("name.example",),
    }
    headers = {"origin": "https://page.example", "host": "name.example"}
    async with open_fleet(monkeypatch, engine := FakeEngine(), **allowed) as fleet:
        preflight = await fleet.ask(
            "OPTIONS", "/v1/completions", headers={**headers, "access-control-request-method": "POST"}
        )
        assert (preflight.status, preflight.header("access-control-allow-origin")) == (204, headers["origin"])
        answer = await fleet.ask("POST", "/v1/completions", {"prompt": "x"}, headers)
        assert answer.header("access-control-allow-origin") == headers["origin"]
        assert "origin" not in engine.asked[-1].headers


async def test_a_router_with_a_key_is_asked_under_any_name(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine(key="k"), key="k") as fleet:
        headers = {"host": "name.example", "authorization": "Bearer k"}
        assert (await fleet.ask("GET", "/v1/models", headers=headers)).status == 200


async def test_a_refusal_of_the_router_has_an_id_and_says_when_to_try_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine(is_there=False)) as fleet:
        answer = await fleet.ask("POST", "/v1/completions", {"prompt": "x"}, {"x-request-id": "mine"})
        assert (answer.status, answer.header("retry-after"), answer.header("x-request-id")) == (
            503,
            "1",
            "mine",
        )


async def test_an_answer_has_the_id_under_which_its_engine_logs_it_and_no_date_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(answer=lambda asked: Answer([b"{}"], headers={"date": "then", "x-request-id": "no"}))
    async with open_fleet(monkeypatch, engine) as fleet:
        answer = await fleet.ask("POST", "/v1/completions", {"prompt": "x"})
        # The listener writes the date.
        assert answer.header("date") is None
        assert answer.header("x-request-id") == engine.asked[-1].headers["x-request-id"]


async def test_new_requests_of_a_draining_router_are_refused_and_it_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, FakeEngine()) as fleet:
        fleet.nursery.start_soon(fleet.router.drain)
        await trio.testing.wait_all_tasks_blocked()
        for target in ("/v1/models", "/health/ready"):
            answer = await fleet.ask("GET", target)
            assert (answer.status, answer.code) == (503, "service_unavailable")
            assert answer.header("connection") == "close"
        assert (await fleet.ask("GET", "/metrics")).status == 200


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/chat/completions"])
async def test_a_stream_that_is_not_over_at_the_end_of_the_grace_period_ends_with_its_failure(
    target: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    pieces: list[Piece] = [CHUNK]
    if target == "/v1/responses":
        pieces = [sse(event) for event in response_events("resp_1", "a")[:2]]
    engine = FakeEngine(answer=lambda asked: Answer([*pieces, trio.Event()]))
    async with open_fleet(monkeypatch, engine, grace_period=10.0) as fleet:
        received, is_over = Received(), trio.Event()

        async def ask() -> None:
            await fleet.ask_into(received, "POST", target, {"stream": True})
            is_over.set()

        monkeypatch.setattr(fleet.router._listener, "wait_for_ends", is_over.wait)
        fleet.nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        began_s = trio.current_time()
        await fleet.router.drain()
        assert 5.0 <= trio.current_time() - began_s < 10.0
        last = received.events()[-1]
        assert last.get("type") == "response.failed" or "error" in last


class CountedPiece(bytes):
    """Piece of a body; counts how often the lengths of all are asked for."""

    num_asked = 0

    def __len__(self) -> int:
        CountedPiece.num_asked += 1
        return super().__len__()


async def test_a_body_in_many_pieces_is_counted_once_a_piece(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    whole = json.dumps({"prompt": "x" * 1000}).encode()
    pieces = [CountedPiece(whole[start : start + 1]) for start in range(len(whole))]
    CountedPiece.num_asked = 0
    async with open_fleet(monkeypatch, engine := FakeEngine()) as fleet:
        assert (await fleet.ask("POST", "/v1/completions", pieces)).status == 200
    assert engine.asked[-1].body == whole
    assert CountedPiece.num_asked <= 2 * len(pieces)


async def test_a_body_that_stops_coming_to_a_router_is_given_up(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine()) as fleet:
        with trio.fail_after(60):
            answer = await fleet.ask("POST", "/v1/completions", [b'{"prompt"', b""])
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert not engine.num_asked("/v1/completions")


async def test_long_bodies_of_one_address_are_limited_together_whatever_keys_they_come_with(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    limits: dict[str, Any] = {"max_input_bytes": 300_000, "max_input_bytes_per_client": 100_000}
    body = [b'{"prompt":"' + b"x" * 90_000, b'"}']
    async with open_fleet(monkeypatch, FakeEngine(), **limits) as fleet:

        async def ask(number: int, pieces: list[bytes], client: str = "10.0.0.1") -> Received:
            received, key = Received(), {"authorization": f"Bearer k{number}"}
            await fleet.ask_into(received, "POST", "/v1/completions", pieces, key, client)
            return received

        fleet.nursery.start_soon(ask, 0, [body[0], b""])
        await trio.testing.wait_all_tasks_blocked()
        refused = await ask(1, body)
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert (await ask(2, body, "10.0.0.2")).status == 200
        assert (await ask(3, [b'{"prompt":"x"}'])).status == 200


async def test_a_long_body_is_parsed_in_the_parse_thread_and_comes_to_the_engine_as_it_is(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    parsed_for = []

    async def in_thread(work: Callable[[], Any], client: str) -> Any:
        await trio.lowlevel.checkpoint()
        parsed_for.append(client)
        return work()

    monkeypatch.setattr("triolet.router.client_request.parse_in_thread", in_thread)
    long = b'{ "stream":true, "prompt":"' + b"x" * LONG_INPUT_BYTES + b'" }\n'
    async with open_fleet(monkeypatch, engine := FakeEngine()) as fleet:
        for body in (b'{"prompt":"x"}', long):
            await fleet.ask("POST", "/v1/completions", [body])
    assert parsed_for == ["10.0.0.1"]
    sent = engine.asked[-1].body
    assert sent.startswith(long[:-2]) and json.loads(sent).keys() == {"stream", "prompt", "seed"}


async def test_a_body_of_too_many_values_reaches_no_engine(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine(), max_json_values=10) as fleet:
        answer = await fleet.ask("POST", "/v1/completions", {"prompt": list(range(20))})
        assert (answer.status, answer.code) == (400, "json_too_large")
        assert not engine.num_asked("/v1/completions")


@pytest.mark.parametrize("body", [b"no JSON", b"[1]", b'{"prompt": NaN}'])
async def test_what_is_no_json_object_is_refused_by_the_engine(
    body: bytes, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    engine = FakeEngine(answer=lambda asked: error_answer(400, "invalid_json"))
    async with open_fleet(monkeypatch, engine) as fleet:
        answer = await fleet.ask("POST", "/v1/completions", [body])
    assert (answer.status, engine.asked[-1].body) == (400, body)


async def test_responses_and_refusals_of_a_router_are_counted(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    events: list[Piece] = [sse(event) for event in response_events("resp_1", "a")]
    engine = FakeEngine(answer=lambda asked: Answer(events, headers={"content-type": "text/event-stream"}))
    async with open_fleet(monkeypatch, engine, max_json_values=10, max_body_bytes=1024) as fleet:
        stream = await fleet.ask("POST", "/v1/responses", {"stream": True})
        await fleet.ask("GET", "/v1/responses/resp_7")
        await fleet.ask("GET", "/nowhere")
        await fleet.ask("POST", "/v1/completions", [b" " * 1025])
        lines = (await fleet.ask("GET", "/metrics")).body.decode().splitlines()
        assert {
            'triolet:router_http_responses_total{route="/v1/responses",status="200"} 2.0',
            'triolet:router_http_responses_total{route="unmatched",status="404"} 1.0',
            'triolet:router_http_responses_total{route="/v1/completions",status="413"} 1.0',
            'triolet:router_gateway_rejections_total{reason="body_too_large"} 1.0',
            "triolet:router_sse_waiting_bytes 0.0",
        } <= set(lines)
        [sent] = [
            float(line.split()[1]) for line in lines if line.startswith("triolet:router_sse_sent_bytes_total")
        ]
        assert sent >= len(stream.body) > 0


LIMITED = GatewayConfig(port=0, max_body_bytes=4096, max_message_bytes=4096, max_json_values=8)


def longest(**fields: Any) -> str:
    """Return a request that has as many bytes, names and values as LIMITED allows, and no seed."""
    text = json.dumps({"model": MODEL, "input": "HELLO", "max_output_tokens": 3, **fields})
    return text[:-1] + " " * (4096 - len(text)) + "}"


async def test_a_request_of_the_greatest_length_that_a_router_takes_is_taken_by_its_engine() -> None:
    async with serving_whole(LIMITED) as (_, _, _, port), trio.open_nursery() as nursery:
        router = Router([ServerAddress.of(f"127.0.0.1:{port}")], LIMITED)
        address = ServerAddress.of(await nursery.start(router.run))
        await router.engines.wait_for_first_checks(60.0)
        stream = await trio.open_tcp_stream("127.0.0.1", address.port)
        async with stream:
            body = longest(stream=True)
            head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            await stream.send_all(f"{head}Connection: close\r\n\r\n{body}".encode())
            answer = b"".join([piece async for piece in stream])
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"response.incomplete" in answer
        async with open_responses_socket(address) as socket:
            await socket.send(longest(type="response.create"))
            kinds = [json.loads(await socket.receive())["type"]]
            while kinds[-1] not in ("response.incomplete", "error"):
                kinds.append(json.loads(await socket.receive())["type"])
        assert kinds[-1] == "response.incomplete"
        nursery.cancel_scope.cancel()


async def test_a_router_counts_the_connections_that_it_listens_for() -> None:
    router = Router([ServerAddress.of("127.0.0.1:9")], GatewayConfig(port=0))
    async with trio.open_nursery() as nursery:
        address = ServerAddress.of(await nursery.start(router.run))
        async with request(attrs.evolve(address, base_path=""), "/metrics") as answer:
            lines = (await answer.body()).decode().splitlines()
        nursery.cancel_scope.cancel()
    assert "triolet:router_open_http_connections 1.0" in lines


@pytest.mark.parametrize(
    "path", ["/v1/models/a%20b", "/v1/models/%C3%BC", "/v1/models/a%3Fb", "/v1/models/a%2Fb"]
)
async def test_a_path_comes_to_the_engine_as_the_client_has_written_it(
    path: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async with open_fleet(monkeypatch, engine := FakeEngine()) as fleet:
        got = await fleet.ask("GET", f"{path}?x=%20")
        assert (got.status, engine.asked[-1].target) == (200, f"{path}?x=%20")


def test_a_path_without_its_encoding_from_the_server_is_encoded_anew() -> None:
    assert _target_of({"path": "/v1/models/ü b", "query_string": b"x=1"}) == "/v1/models/%C3%BC%20b?x=1"


def test_an_event_that_comes_in_many_pieces_costs_no_more_than_its_length() -> None:
    event = sse({"type": "response.in_progress", "sequence_number": 0, "text": "x" * 2**23})
    follower, passed_on = StreamFollower(has_chunks=False), b""
    began_s = time.thread_time()
    for start in range(0, len(event), 1024):
        passed_on += follower.follow(event[start : start + 1024])
    assert passed_on == event
    assert time.thread_time() - began_s < 3  # where each piece has the whole looked at, it is a minute
