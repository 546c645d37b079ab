"""What holds for every request: ids, keys, origins, hosts, and errors that say no more than they should."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.harness import STEP_S, FakeExecutor
from tests.server.routes.harness import HELLO, MODEL, serving
from triolet.config.server import GatewayConfig
from triolet.protocol.access import owner_name
from triolet.server.transport.input_limits import ROUTED_BYTES, ROUTED_HEADER

CHAT = "/v1/chat/completions"


async def test_an_engine_with_keys_lets_no_client_in_without_one(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with serving(api_keys=("engines",)) as scene:
        assert scene.gateway is not None
        for access in (scene.app.state.context.access, scene.gateway.access):
            assert access.api_keys == ("engines",)
        assert (await scene.get("/v1/models")).error[:2] == (401, "invalid_api_key")
        assert (await scene.get("/v1/models", headers={"Authorization": "Bearer engines"})).status == 200
    async with serving(config=GatewayConfig(api_keys=("servers",)), api_keys=("engines",)) as scene:
        assert (await scene.get("/v1/models", headers={"Authorization": "Bearer engines"})).status == 401
        assert (await scene.get("/v1/models", headers={"Authorization": "Bearer servers"})).status == 200


KEYS = GatewayConfig(api_keys=("key-one", "key-two"))


async def test_every_answer_has_a_request_id(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        own = await scene.get("/health", headers={"X-Request-Id": "mine-1"})
        made = await scene.get("/nothing", headers={"X-Request-Id": "not\tone"})
    assert own.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req_")
    assert made.headers["x-content-type-options"] == "nosniff"


async def test_keys_guard_everything_but_what_operators_and_the_page_need() -> None:
    async with serving(config=KEYS) as scene:
        for path in ("/", "/health", "/health/ready", "/metrics", "/version", "/static/app.js"):
            assert (await scene.get(path)).status == 200, path
        for path in ("/v1/models", "/v1/responses/x", "/nothing", "/static", "/healthy"):
            answer = await scene.get(path)
            assert answer.error == (401, "invalid_api_key", None), path
            assert answer.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer key-two"}
        assert (await scene.get("/v1/models", headers=right)).status == 200
        assert (await scene.post("/tokenize", {"prompt": "A"})).status == 401


async def test_a_key_has_its_own_responses_and_its_own_share(autojump_clock: trio.testing.MockClock) -> None:
    config = GatewayConfig(api_keys=("key-one", "key-two"), max_active_per_key=1)
    one, two = ({"Authorization": f"Bearer {key}"} for key in config.api_keys)
    async with serving(config=config) as scene, trio.open_nursery() as nursery:
        made = await scene.post(
            "/v1/responses", {"model": MODEL, "input": "HELLO", "max_output_tokens": 2}, headers=one
        )
        path = f"/v1/responses/{made.json['id']}"
        assert (await scene.get(path, headers=two)).error[0] == 404
        assert (await scene.get(path, headers=one)).json["id"] == made.json["id"]
        call = scene.call("POST", CHAT, {**HELLO, "stream": True}, headers=one)
        nursery.start_soon(call.run)
        await call.has_received(b"data")
        assert (await scene.post(CHAT, HELLO, headers=one)).error[:2] == (429, "rate_limit_exceeded")
        assert (await scene.post(CHAT, {**HELLO, "max_tokens": 1}, headers=two)).status == 200
        call.leave()


async def test_a_foreign_page_is_refused_and_a_listed_one_is_let_in() -> None:
    config = GatewayConfig(allowed_origins=("https://chat.example",))
    async with serving(config=config) as scene:
        foreign = await scene.post(CHAT, HELLO, headers={"Origin": "https://evil.example"})
        assert foreign.error == (403, "origin_not_allowed", None)
        assert "access-control-allow-origin" not in foreign.headers
        listed = await scene.get("/v1/models", headers={"Origin": "https://chat.example"})
        assert listed.headers["access-control-allow-origin"] == "https://chat.example"
        assert listed.headers["vary"] == "Origin"
        own = await scene.get("/v1/models", headers={"Origin": "http://localhost:8000"})
        assert own.status == 200


async def test_a_browser_may_ask_before_it_asks() -> None:
    config = GatewayConfig(allowed_origins=("*",), api_keys=("key",))
    asked = {
        "Origin": "https://any.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    async with serving(config=config) as scene:
        answer = await scene.call("OPTIONS", CHAT, headers=asked).run()
    assert answer.status == 204
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "POST" in answer.headers["access-control-allow-methods"]


async def test_a_name_bent_to_this_machine_is_refused() -> None:
    async with serving() as scene:
        answer = await scene.get("/v1/models", headers={"Host": "evil.example"})
    assert answer.error == (403, "host_not_allowed", None)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_json"),
        (b'{"model": NaN}', "invalid_json"),
        (b'{"model": 1e999}', "invalid_json"),
        (b"\xff", "invalid_json"),
        (b'{"a":' * 100_000, "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"n":' + b"1" * 5000 + b"}", "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"{}", "missing_required_parameter"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/detokenize"])
async def test_what_is_no_request_is_said_to_be_none(body: bytes, code: str, path: str) -> None:
    async with serving() as scene:
        answer = await scene.post(path, body=body)
    assert answer.error[:2] == (400, code)


async def test_a_body_that_is_too_long_is_not_read() -> None:
    async with serving(config=GatewayConfig(max_body_bytes=1024)) as scene:
        said = await scene.post(CHAT, headers={"Content-Length": "1025"})
        endless = await scene.post(CHAT, headers={"Content-Length": "9" * 30})
        unsaid = await scene.post(CHAT, body=b" " * 1025)
    assert [answer.error[:2] for answer in (said, endless, unsaid)] == [(413, "body_too_large")] * 3


async def test_a_body_that_a_router_passes_on_may_be_longer_by_what_the_router_adds() -> None:
    config = GatewayConfig(max_body_bytes=1024)
    async with serving(config=config) as scene:
        added = await scene.post(CHAT, headers={ROUTED_HEADER: "1"}, body=b" " * (1024 + ROUTED_BYTES))
        more = await scene.post(CHAT, headers={ROUTED_HEADER: "1"}, body=b" " * (1025 + ROUTED_BYTES))
    assert added.error[:2] == (400, "invalid_json")
    assert more.error[:2] == (413, "body_too_large")


async def test_long_bodies_that_are_read_together_are_limited_and_short_ones_are_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    config = GatewayConfig(max_input_bytes=100_000, max_input_bytes_per_client=100_000)
    async with serving(config=config) as scene, trio.open_nursery() as nursery:
        half = scene.call("POST", CHAT, body=b" " * 90_000)
        ask = half._receive

        async def stalled() -> Any:
            return {**await ask(), "more_body": True} if not half._was_asked else await trio.sleep_forever()

        nursery.start_soon(half.app, half.scope, stalled, half._send)
        await trio.testing.wait_all_tasks_blocked()
        refused = await scene.post(CHAT, body=b" " * 50_000)
        short = await scene.post(CHAT, HELLO)
        nursery.cancel_scope.cancel()
    assert refused.error[:2] == (429, "rate_limit_exceeded") and refused.headers["retry-after"] == "1"
    assert short.status == 200


async def test_a_body_of_too_many_values_is_refused() -> None:
    async with serving() as scene:
        keys = b"{" + b",".join(b'"%d":1' % number for number in range(300_000)) + b"}"
        bias = b'{"logit_bias":{' + b",".join(b'"%d":1' % number for number in range(5000)) + b"}}"
        for body in (keys, bias):
            assert (await scene.post(CHAT, body=body)).error[:2] == (400, "json_too_large")


async def test_a_body_that_stops_coming_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as scene:
        call = scene.call("POST", CHAT, HELLO)
        ask = call._receive

        async def half() -> Any:
            return {**await ask(), "more_body": True} if not call._was_asked else await ask()

        await call.app(call.scope, half, call._send)
        assert call.status == 408


@pytest.mark.parametrize(
    "error", [RuntimeError("secret"), OSError("secret"), ExceptionGroup("secret", [KeyError("x")])]
)
async def test_no_exception_text_leaves_the_server(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as scene:

        def fail(*args: object, **more: object) -> None:
            raise error

        monkeypatch.setattr(type(scene.engine), "generate", fail)
        for path, payload in ((CHAT, HELLO), ("/v1/responses", {"model": MODEL, "input": "HELLO"})):
            for stream in (False, True):
                answer = await scene.post(path, {**payload, "stream": stream})
                assert answer.error == (500, "server_error", None)
                assert b"secret" not in answer.body


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("POST", "/health"), ("DELETE", "/v1/models"), ("PUT", "/")]
)
async def test_a_wrong_method_is_said_to_be_one(method: str, path: str) -> None:
    async with serving() as scene:
        answer = await scene.call(method, path).run()
    assert answer.error[:2] == (405, "method_not_allowed")
    assert "allow" in answer.headers


async def test_eight_names_under_one_key_get_together_one_keys_share(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS.api_keys)
    asked = {"model": MODEL, "max_tokens": 400, "ignore_eos": True}
    async with (
        serving(
            FakeExecutor(num_blocks=2048, block_size=4), config=KEYS, policy="fair", max_num_seqs=4
        ) as scene,
        trio.open_nursery() as nursery,
    ):
        for number in range(8):
            named = {**asked, "prompt": "A" * 10, "client": f"name-{number}"}
            nursery.start_soon(scene.call("POST", "/v1/completions", named, headers=one).run)
            lonely = {**asked, "prompt": "B" * 10}
            nursery.start_soon(scene.call("POST", "/v1/completions", lonely, headers=two).run)
        await trio.sleep(200 * STEP_S)
        num_tokens = [
            sum(request.num_output_tokens for request in scene.engine.requests(owner_name(key.encode())))
            for key in KEYS.api_keys
        ]
        assert min(num_tokens) > 100
        assert max(num_tokens) < 1.3 * min(num_tokens)
        assert {request.client for request in scene.engine.requests()} >= {f"name-{n}" for n in range(8)}
        nursery.cancel_scope.cancel()


async def test_eight_names_under_one_key_leave_another_key_its_part_of_the_queue(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, two = ({"Authorization": f"Bearer {key}"} for key in KEYS.api_keys)
    long = {"model": MODEL, "prompt": "A", "max_tokens": 40}
    async with (
        serving(config=KEYS, policy="fair", max_num_seqs=2, max_queued_requests=14) as scene,
        trio.open_nursery() as nursery,
    ):
        for number in range(16):
            named = {**long, "client": f"name-{number % 8}"}
            nursery.start_soon(scene.call("POST", "/v1/completions", named, headers=one).run)
        await wait_all_tasks_blocked()
        assert len(scene.engine.requests()) < 16
        assert (await scene.post("/v1/completions", {**long, "max_tokens": 1}, headers=two)).status == 200
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": HELLO["messages"], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "A", "max_tokens": 1}),
        ("/v1/responses", {"input": "A", "max_output_tokens": 1}),
    ],
)
async def test_a_key_needs_permission_for_a_priority_before_all_others(
    path: str, fields: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    config = GatewayConfig(api_keys=("plain",), priority_keys=("first",))
    plain, first = ({"Authorization": f"Bearer {key}"} for key in ("plain", "first"))
    body = {"model": MODEL, **fields}
    async with serving(config=config) as scene:
        refused = await scene.post(path, {**body, "priority": -1}, headers=plain)
        assert refused.error == (403, "priority_not_allowed", "priority")
        assert (await scene.post(path, {**body, "priority": 1}, headers=plain)).status == 200
        assert (await scene.post(path, {**body, "priority": -1}, headers=first)).status == 200
    async with serving() as scene:
        assert (await scene.post(path, {**body, "priority": -1})).status == 200


async def test_responses_are_counted_by_route_and_status_refusals_by_reason_and_requests_by_key() -> None:
    async with serving(config=KEYS) as scene:
        await scene.get("/v1/models/made-up", headers={"Authorization": "Bearer key-one"})
        await scene.get("/made-up", headers={"Authorization": "Bearer key-one"})
        await scene.get("/v1/models")
        body = {"model": MODEL, "prompt": "A", "max_tokens": 1}
        await scene.post("/v1/completions", body, headers={"Authorization": "Bearer key-one"})
        text = (await scene.get("/metrics")).body.decode()
    assert 'triolet:http_responses_total{route="/v1/models/{name:path}",status="404"} 1.0' in text
    assert 'triolet:http_responses_total{route="unmatched",status="404"} 1.0' in text
    assert 'triolet:http_responses_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'triolet:gateway_rejections_total{reason="invalid_api_key"} 1.0' in text
    assert f'triolet:key_requests_total{{key="{owner_name(b"key-one")}"}} 1.0' in text
    assert "key-one" not in text and "made-up" not in text


async def test_a_refusal_is_counted_under_the_route_that_was_asked(autojump_clock: MockClock) -> None:
    config = GatewayConfig(api_keys=("key",), allowed_origins=("*",))
    preflight = {"Origin": "https://any.example", "Access-Control-Request-Method": "POST"}
    async with serving(config=config) as scene:
        await scene.post(CHAT, HELLO)
        await scene.get("/made-up")
        await scene.call("OPTIONS", CHAT, headers=preflight).run()
        await scene.post("/v1/score", {})
        assert scene.gateway is not None
        await scene.gateway.drain(trio.current_time())
        await scene.post(CHAT, HELLO, headers={"Authorization": "Bearer key"})
        text = (await scene.get("/metrics")).body.decode()
    counted = re.findall(r'triolet:http_responses_total\{route="(.*?)",status="(\d+)"\} (\S+)', text)
    assert sorted(counted) == [
        (CHAT, "204", "1.0"),
        (CHAT, "401", "1.0"),
        (CHAT, "503", "1.0"),
        ("/v1/score", "401", "1.0"),
        ("unmatched", "401", "1.0"),
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**HELLO, "max_tokens": 3}),
        ("/v1/completions", {"model": MODEL, "prompt": "A", "max_tokens": 3}),
        ("/v1/responses", {"model": MODEL, "input": "A", "max_output_tokens": 3}),
    ],
)
async def test_the_bytes_of_event_streams_are_counted_while_they_wait_and_when_they_were_sent(
    path: str, body: dict[str, Any], autojump_clock: MockClock
) -> None:
    answers: list[Any] = []
    async with serving() as scene:
        metrics = scene.app.state.context.gateway_metrics
        await scene.post(path, body)
        assert b"triolet:sse_sent_bytes_total 0.0" in metrics.render()
        call = scene.call("POST", path, {**body, "stream": True})
        taken = trio.Event()

        async def app_of_a_slow_client(scope: Any, receive: Any, send: Any) -> None:
            async def send_late(message: Any) -> None:
                if message.get("body"):
                    await taken.wait()
                await send(message)

            await scene.app(scope, receive, send_late)

        async def run() -> None:
            answers.append(await call.run())

        call.app = app_of_a_slow_client
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await trio.sleep(1)
            waiting = re.search(rb"^triolet:sse_waiting_bytes (\S+)", metrics.render(), re.MULTILINE)
            assert waiting is not None and float(waiting[1]) > 50
            taken.set()
        assert b"triolet:sse_waiting_bytes 0.0" in metrics.render()
        sent = re.search(rb"^triolet:sse_sent_bytes_total (\S+)", metrics.render(), re.MULTILINE)
        assert sent is not None and float(sent[1]) == len(answers[0].body)
