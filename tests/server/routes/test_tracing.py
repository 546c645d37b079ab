"""Traces over the network: headers and events that name one come in, and spans go out to a collector."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from trio.testing import MockClock

from tests.actors.harness import fake_engine
from tests.observability.spans import ENDPOINT, HEADERS, OTHER, PARENT, SPAN, TRACE, the_span, trace_of
from tests.server.responses.websocket_client import Client
from tests.server.routes.harness import HELLO, serving
from triolet import SamplingParams

SHORT = SamplingParams(max_tokens=5, seed=1)


async def test_a_chat_over_http_is_in_the_trace_of_its_headers(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with serving(otlp_traces_endpoint=ENDPOINT) as scene:
        answer = await scene.post("/v1/chat/completions", {**HELLO, "max_tokens": 3}, headers=HEADERS)
        assert answer.status == 200
    assert trace_of(the_span(exporter)) == TRACE


async def test_a_response_over_http_is_in_the_trace_of_its_headers(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    body = {"model": "triolet-nano", "input": "HELLO", "max_output_tokens": 3}
    async with serving(otlp_traces_endpoint=ENDPOINT) as scene:
        answer = await scene.post("/v1/responses", body, headers=HEADERS)
        assert answer.status == 200
    span = the_span(exporter)
    assert trace_of(span) == TRACE
    assert (span.attributes or {})["gen_ai.request.id"] == answer.json["id"]


@pytest.mark.parametrize(
    ("fields", "trace"),
    [
        ({}, TRACE),
        ({"trace_headers": {"traceparent": OTHER}}, "1" * 32),
        ({"client_metadata": {"ws_request_header_traceparent": OTHER, "session": 5}}, "1" * 32),
        ({"client_metadata": "anything"}, TRACE),
    ],
    ids=["upgrade", "event", "metadata", "no-metadata"],
)
async def test_a_response_over_a_websocket_is_in_the_trace_of_its_event_or_of_the_upgrade(
    fields: dict[str, object], trace: str, autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with serving(otlp_traces_endpoint=ENDPOINT) as scene, trio.open_nursery() as nursery:
        assert scene.gateway is not None
        ours, theirs = trio.testing.memory_stream_pair()
        nursery.start_soon(scene.gateway.serve_websocket, theirs)
        client = Client(ours)
        assert await client.open(traceparent=PARENT)
        await client.create(**fields)
        while not any(event["type"] == "response.incomplete" for event in client.events):
            assert await client.next_events()
        nursery.cancel_scope.cancel()
    assert trace_of(the_span(exporter)) == trace


class Collector(http.server.BaseHTTPRequestHandler):
    bodies: list[bytes]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200 if self.path == "/v1/traces" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []
    handler = type("Handler", (Collector,), {"bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        server.shutdown()
        thread.join()


async def test_a_collector_gets_the_span_over_http(collector: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = collector
    async with fake_engine(otlp_traces_endpoint=endpoint) as engine:
        await engine.complete([1, 2, 3], SHORT, trace_headers=HEADERS)
    [body] = bodies
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    [span] = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, SPAN)
