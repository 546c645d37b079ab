"""Traces: a span for each request, in the trace that its caller named, and never a danger to the request."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Sequence

import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, answer_of, fake_engine, model_info
from tests.core.fake_model import FakeModel
from tests.observability.spans import ENDPOINT, HEADERS, PARENT, SPAN, TRACE, the_span, trace_of
from tests.test_layering import modules_after
from triolet import SamplingParams
from triolet.compat import AsyncLLM, LLMEngine
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError, InvalidRequest
from triolet.ipc.snapshot import Snapshot
from triolet.observability import otlp
from triolet.observability import tracing_setup as starting

SHORT = SamplingParams(max_tokens=5, seed=1, temperature=0.5, top_p=0.9)


@pytest.fixture(autouse=True)
def _warnings_of_earlier_tests_are_forgotten() -> None:
    starting._warn_once.cache_clear()


# ------------------------------------------------------------------------------------------- one span


async def test_a_traceparent_comes_out_as_the_span_s_trace_and_parent(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        await engine.complete([1, 2, 3], SHORT, trace_headers={"TraceParent": PARENT, "X-Other": "1"})
    span = the_span(exporter)
    assert trace_of(span) == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == SPAN
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert span.resource.attributes["service.name"] == "triolet"


async def test_the_state_of_the_trace_is_passed_on(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        await engine.complete([1, 2, 3], SHORT, trace_headers=HEADERS)
    span = the_span(exporter)
    assert span.context is not None
    assert span.context.trace_state.get("congo") == "t61rcWkgMzE"


async def test_a_span_says_what_was_asked_what_came_of_it_and_where_the_time_went(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    await trio.sleep(1)
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        output = await engine.complete([1, 2, 3], SHORT, request_id="mine")
    span = the_span(exporter)
    attributes = dict(span.attributes or {})
    reasons = attributes.pop("gen_ai.response.finish_reasons")
    assert reasons == ("length",)
    times = {name: attributes.pop(name) for name in list(attributes) if "latency" in name}
    assert times == pytest.approx(
        {
            "gen_ai.latency.time_in_queue": 0.0,
            "gen_ai.latency.time_to_first_token": STEP_S,
            "gen_ai.latency.time_in_model_prefill": STEP_S,
            "gen_ai.latency.time_in_model_decode": 4 * STEP_S,
            "gen_ai.latency.time_in_model_inference": 5 * STEP_S,
            "gen_ai.latency.e2e": 5 * STEP_S,
        }
    )
    assert attributes == {
        "gen_ai.request.id": "mine",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.response.model": "triolet-nano",
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 5,
    }
    assert span.start_time == int(output.metrics.arrival_time * 1e9)
    assert span.end_time == pytest.approx(span.start_time + 5 * STEP_S * 1e9, abs=1e6)
    assert [event.name for event in span.events] == ["scheduled", "first_token"]
    assert span.status.status_code is StatusCode.UNSET


async def test_several_answers_to_a_prompt_are_one_span(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        params = SamplingParams(max_tokens=4, n=3, seed=1)
        await engine.complete([1, 2, 3], params, request_id="three", trace_headers=HEADERS)
    span = the_span(exporter)
    assert span.attributes is not None
    names = ("request.id", "request.n", "usage.prompt_tokens", "usage.completion_tokens")
    assert [span.attributes[f"gen_ai.{name}"] for name in names] == ["three", 3, 3, 12]
    assert trace_of(span) == TRACE


# ------------------------------------------------------------------------------------------- endings


async def test_an_aborted_request_is_an_error_of_its_span(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=50), trace_headers=HEADERS) as stream:
            await anext(stream)
    span = the_span(exporter)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "abort")
    assert trace_of(span) == TRACE


async def test_a_request_that_never_ran_has_no_times_of_the_model(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT, max_num_seqs=1) as engine:
        async with engine.generate([1, 2, 3], SamplingParams(max_tokens=50)):
            await trio.sleep(2 * STEP_S)
            async with engine.generate([4], SHORT, request_id="late", queue_timeout=STEP_S) as stream:
                await stream.text()
    late = next(
        span
        for span in exporter.get_finished_spans()
        if (span.attributes or {})["gen_ai.request.id"] == "late"
    )
    assert late.attributes is not None
    assert [name for name in late.attributes if "latency" in name] == ["gen_ai.latency.e2e"]
    assert late.status.description == "deadline"
    assert late.events == ()


async def test_a_failed_request_is_an_error_of_its_span(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor, otlp_traces_endpoint=ENDPOINT) as engine:
        executor.model.failing.add("bad")
        with pytest.raises(Exception, match="planted"):
            await engine.complete([1, 2, 3], request_id="bad")
    span = the_span(exporter)
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "error")


# ------------------------------------------------------------------------------------------- headers

BAD = [
    "",
    "nonsense",
    f"00-{'0' * 32}-{SPAN}-01",
    f"ff-{TRACE}-{SPAN}-01",
    PARENT + "-x" * 600,
    "\x00\ud800é",
]


@pytest.mark.parametrize("parent", BAD, ids=range(len(BAD)))
async def test_a_bad_header_is_none(
    parent: str, autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        await engine.complete([1, 2, 3], SHORT, trace_headers={"traceparent": parent, "tracestate": "=,=\n"})
    span = the_span(exporter)
    assert span.parent is None
    assert trace_of(span) != TRACE


@pytest.mark.parametrize("given", [PARENT, [PARENT], {"traceparent": 5}, {5: PARENT}])
async def test_headers_must_be_texts_by_their_names(given: object, autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match="trace_headers must be a mapping of texts to texts"):
            engine.generate([1, 2, 3], trace_headers=given)  # type: ignore[arg-type]


async def test_a_program_that_traces_itself_is_the_parent_of_what_it_asks(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("a program")
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        with tracer.start_as_current_span("outer") as outer:
            await engine.complete([1, 2, 3], SHORT)
    span, parent = the_span(exporter), outer.get_span_context()
    assert span.parent is not None
    assert (span.parent.trace_id, span.parent.span_id) == (parent.trace_id, parent.span_id)


async def test_a_request_that_another_engine_takes_up_stays_in_its_trace(
    autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as first:
        async with first.generate([1, 2, 3], SHORT, request_id="r", trace_headers=HEADERS) as stream:
            await anext(stream)
            saved = Snapshot.from_bytes(first.snapshot().to_bytes())
    exporter.clear()
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as second:
        async with second.resume(saved)["r"] as stream:
            await stream.text()
    assert trace_of(the_span(exporter)) == TRACE


async def test_without_an_endpoint_headers_are_dropped_with_one_warning(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with fake_engine() as engine:
        for _ in range(3):
            output = await engine.complete([1, 2, 3], SHORT, trace_headers=HEADERS)
        await engine.complete([1, 2, 3], SHORT, trace_headers={"x-other": "1"})
    assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, 5)
    assert [record.levelname for record in caplog.records if record.name == "triolet.tracing"] == ["WARNING"]


# ------------------------------------------------------------------------------------- vLLM's faces


def llm_engine(**fields: object) -> LLMEngine:
    ticks = itertools.count()
    return LLMEngine(
        EngineConfig.create(EngineConfig(max_num_seqs=4), **fields),
        loaded=(RunnerForTracing(), model_info(64, 4), None),
        clock=lambda: next(ticks) * 0.001,
    )


class RunnerForTracing(FakeModel):
    def __init__(self) -> None:
        super().__init__(64, 4, 50)

    def reset(self) -> None:
        self.rows.clear()


def test_an_llm_engine_exports_spans_without_trio(exporter: InMemorySpanExporter) -> None:
    engine = llm_engine(otlp_traces_endpoint=ENDPOINT)
    engine.add_request("a", [1, 2, 3], SHORT, trace_headers=HEADERS)
    while engine.has_unfinished_requests():
        engine.step()
    assert engine._tracing is not None
    engine._tracing.close()
    assert trace_of(the_span(exporter)) == TRACE


def test_an_llm_engine_without_an_endpoint_drops_the_headers(caplog: pytest.LogCaptureFixture) -> None:
    engine = llm_engine()
    for name in "ab":
        engine.add_request(name, [1, 2, 3], SHORT, trace_headers=HEADERS)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("endpoint", [None, ENDPOINT])
async def test_async_llm_says_whether_spans_are_exported(
    endpoint: str | None, autojump_clock: MockClock, exporter: InMemorySpanExporter
) -> None:
    async with fake_engine(otlp_traces_endpoint=endpoint) as engine, AsyncLLM.around(engine) as llm:
        assert await llm.is_tracing_enabled() is (endpoint is not None)
        async for _ in llm.generate([1, 2, 3], SHORT, "r", trace_headers=HEADERS):
            pass
    assert [trace_of(span) for span in exporter.get_finished_spans()] == [TRACE] * (endpoint is not None)


# ------------------------------------------------------------------------------------- what can fail


class Faulty(SpanExporter):
    """Raises, or hangs until it is shut down."""

    def __init__(self, *, hangs: bool) -> None:
        self.hangs, self.asked, self.released = hangs, threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        if not self.hangs:
            raise OSError("the collector is on fire")
        assert self.released.wait(60)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.released.set()


@pytest.mark.parametrize("hangs", [False, True], ids=["raises", "hangs"])
async def test_an_exporter_that_fails_costs_a_line_in_the_log_and_no_request(
    hangs: bool, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(hangs=hangs)
    monkeypatch.setattr(otlp, "otlp_exporter", lambda endpoint: faulty)
    monkeypatch.setattr(otlp, "CLOSE_S", 0.2)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    before = threading.active_count()
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        for _ in range(3):
            output = await engine.complete([1, 2, 3], SHORT, trace_headers=HEADERS)
            assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, 5)
        assert engine.statistics().num_restarts == 0
    assert faulty.asked.is_set()
    assert hangs or any("on fire" in str(record.exc_info) for record in caplog.records)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("OtelBatch")]
    assert threading.active_count() <= before + 1  # Trio keeps the thread that waited for a while


async def test_a_span_that_can_not_be_made_is_lost_alone(
    autojump_clock: MockClock,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    async with fake_engine(otlp_traces_endpoint=ENDPOINT) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(otlp, "span_of", lambda *arguments: 1 // 0)
            await engine.complete([1, 2, 3], SHORT)
            engine.tell_stat_loggers()
        await engine.complete([1, 2, 3], SHORT, request_id="next")
    assert (the_span(exporter).attributes or {})["gen_ai.request.id"] == "next"
    assert "is lost" in caplog.text


async def test_an_endpoint_without_the_packages_for_it_is_a_wrong_configuration(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint.*triolet\[otel\]"):
        async with fake_engine(otlp_traces_endpoint=ENDPOINT):
            pass


@pytest.mark.slow
def test_nothing_of_opentelemetry_is_loaded_without_an_endpoint() -> None:
    loaded = modules_after(
        "import triolet.observability.otlp, triolet.engine.open_engine, triolet.server, "
        "triolet.compat.llm_engine, triolet.cli"
    )
    assert [module for module in loaded if module.startswith("opentelemetry")] == []
