"""What Prometheus is told: vLLM's names and labels, and numbers that agree with what requests were told."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import trio
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from trio.testing import MockClock

from tests.actors.harness import STEP_S, FakeExecutor, fake_engine
from triolet import RequestOutput, SamplingParams
from triolet.engine.engine import Engine
from triolet.engine.token_stream import TokenStream
from triolet.errors import EngineClosed, InvalidRequest, Overloaded
from triolet.observability.prometheus import (
    SAMPLES_AT_ONCE,
    GatewayMetrics,
    Metrics,
    decade_buckets,
    pieces_of,
)

# reference: the metrics that vLLM's own dashboard draws, and the others that have a meaning here
GAUGES = "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info"
COUNTERS = (
    "num_preemptions prompt_tokens generation_tokens prompt_tokens_cached prefix_cache_queries prefix_cache_hits "
    "request_success prompt_tokens_by_source admission_rejections requests_received spec_decode_num_drafts "
    "spec_decode_num_draft_tokens spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos"
)
HISTOGRAMS = (
    "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens "
    "iteration_tokens_total request_max_num_generation_tokens request_params_n request_params_max_tokens "
    "request_num_preemptions request_prefill_kv_computed_tokens"
)


def values(text: bytes) -> dict[str, float]:
    """By name and labels without those that all have, such as `request_success_total{finished_reason="stop"}`."""
    found = {}
    for line in text.decode().splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace(",}", "}").replace("{}", "")
            found[name] = float(value)
    return found


def endings(metrics: Metrics) -> Counter[str]:
    pattern = re.compile(r'triolet:request_success_total\{finished_reason="(\w+)"\}')
    counts = values(metrics.render()).items()
    return Counter({match[1]: int(value) for name, value in counts if (match := pattern.fullmatch(name))})


@pytest.mark.parametrize("prefix", ["triolet:", "vllm:"])
async def test_every_name_is_there_before_anything_has_happened(prefix: str) -> None:
    async with fake_engine() as engine:
        text = Metrics(engine, prefix).render().decode()
    kinds = {name: kind for _, _, name, kind in (line.split() for line in re.findall("# TYPE .*", text))}
    for name in GAUGES.split():
        assert kinds[prefix + name] == "gauge"
    for name in COUNTERS.split():
        assert kinds[f"{prefix}{name}_total"] == "counter"
    for name in HISTOGRAMS.split():
        assert kinds[prefix + name] == "histogram"
    assert 'model_name="triolet-nano"' in text
    assert 'engine="0"' in text


async def test_two_engines_in_one_process_have_different_labels() -> None:
    async with fake_engine() as one, fake_engine() as other:
        assert (one.statistics().engine_index, other.statistics().engine_index) == (0, 1)
        assert 'engine="0"' in Metrics(one).render().decode()
        assert 'engine="1"' in Metrics(other).render().decode()
    async with fake_engine() as later:
        assert later.statistics().engine_index == 0


async def test_a_request_is_counted_with_its_times(autojump_clock: MockClock) -> None:
    await trio.sleep(1)
    async with fake_engine() as engine:
        metrics = Metrics(engine)
        await engine.complete([1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=5))
        now = values(metrics.render())
    expected = {
        "prompt_tokens_total": 6,
        "generation_tokens_total": 5,
        "time_to_first_token_seconds_sum": STEP_S,
        "inter_token_latency_seconds_count": 4,
        "inter_token_latency_seconds_sum": 4 * STEP_S,
        "request_time_per_output_token_seconds_sum": STEP_S,
        "e2e_request_latency_seconds_sum": 5 * STEP_S,
        "request_queue_time_seconds_count": 1,
        "request_queue_time_seconds_sum": 0,
        "request_prefill_time_seconds_sum": STEP_S,
        "request_decode_time_seconds_sum": 4 * STEP_S,
        "request_inference_time_seconds_sum": 5 * STEP_S,
        "request_prompt_tokens_sum": 6,
        "request_generation_tokens_sum": 5,
        "request_params_max_tokens_sum": 5,
        "iteration_tokens_total_sum": 10,
        "iteration_tokens_total_count": 5,
        'request_success_total{finished_reason="length"}': 1,
    }
    got = {name: now[f"triolet:{name}"] for name in expected}
    assert got == pytest.approx(expected)


async def test_an_answer_of_one_token_has_a_gap_of_nothing_as_in_vllm(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        metrics = Metrics(engine)
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=1))
        now = values(metrics.render())
    assert now["triolet:request_time_per_output_token_seconds_count"] == 1
    assert now["triolet:request_time_per_output_token_seconds_sum"] == 0


async def test_buckets_are_those_of_the_dashboards() -> None:
    async with fake_engine() as engine:
        text = Metrics(engine).render().decode()
    assert 'time_to_first_token_seconds_bucket{engine="0",le="0.001"' in text
    assert 'time_to_first_token_seconds_bucket{engine="0",le="2560.0"' in text
    assert 'e2e_request_latency_seconds_bucket{engine="0",le="7680.0"' in text
    assert 'iteration_tokens_total_bucket{engine="0",le="16384.0"' in text
    assert decade_buckets(300) == (1, 2, 5, 10, 20, 50, 100, 200)


async def test_a_registry_that_comes_late_knows_the_totals(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=3))
        assert endings(Metrics(engine))["length"] == 1


async def test_reasons_of_all_endings_add_up_to_the_requests_received(autojump_clock: MockClock) -> None:
    async with fake_engine(max_queued_requests=1, max_num_seqs=2) as engine:
        metrics = Metrics(engine)
        async with trio.open_nursery() as nursery:
            for seed in range(2):
                nursery.start_soon(leave_early, engine, seed)
            nursery.start_soon(engine_deadline, engine)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(Overloaded):
                await engine.complete([1, 2, 3])
        with pytest.raises(InvalidRequest):
            await engine.complete([1] * 5000)
        with trio.move_on_after(0):
            await engine.complete([1, 2, 3])
        async with engine.generate([5, 6], SamplingParams(max_tokens=3)) as stream:
            await stream.text()
        async with engine.generate([5, 6], SamplingParams(max_tokens=3)) as stream:
            engine.abort(stream.request_id)
            await stream.text()
        async with engine.generate([7, 8], SamplingParams(max_tokens=50)) as stream:
            await engine.drain(trio.current_time() + STEP_S)
        with pytest.raises(EngineClosed):
            await engine.complete([1, 2, 3])
        statistics, counted = engine.statistics(), endings(metrics)
    assert counted == {
        "stop": 0,
        "length": 1,
        "abort": 4,
        "error": 0,
        "deadline": 1,
        "shutdown": 1,
        "rejected": 3,
        **{reason: 0 for reason in counted if reason == "repetition"},
    }
    assert statistics.num_requests_live == 0
    assert statistics.num_requests_received == counted.total() == sum(statistics.num_requests_ended.values())


async def test_each_of_several_answers_is_counted(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        metrics = Metrics(engine)
        await engine.complete([1, 2, 3, 4], SamplingParams(max_tokens=4, n=3))
        async with engine.generate([1, 2, 3, 4], SamplingParams(max_tokens=50, n=2)) as stream:
            await anext(stream)
        statistics, counted = engine.statistics(), endings(metrics)
    assert (counted["length"], counted["abort"]) == (3, 2)
    assert statistics.num_requests_received == counted.total() == 5


async def test_n_and_the_longest_answer_are_counted_once_for_each_prompt(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        metrics = Metrics(engine)
        await engine.complete([1, 2, 3, 4], SamplingParams(max_tokens=4, n=3))
        async with engine.generate([1, 2, 3, 4], SamplingParams(max_tokens=50, n=2)) as stream:
            first = await anext(stream)
            engine.abort(stream.request_id)
            longest = max(len(one.token_ids) for one in (*first.outputs, *(await last_of(stream)).outputs))
        await engine.complete([5, 6], SamplingParams(max_tokens=2))
        now = values(metrics.render())
    assert now["triolet:request_params_n_count"] == 3
    assert now["triolet:request_params_n_sum"] == 3 + 2 + 1
    assert now["triolet:request_max_num_generation_tokens_count"] == 3
    assert now["triolet:request_max_num_generation_tokens_sum"] == 4 + longest + 2
    assert now["triolet:request_generation_tokens_count"] == 6  # the others are of each answer


async def last_of(stream: TokenStream) -> RequestOutput:
    return [output async for output in stream][-1]


async def leave_early(engine: Engine, seed: int) -> None:
    async with engine.generate([seed] * 5, SamplingParams(max_tokens=50, seed=seed)) as stream:
        async for output in stream:
            if len(output.outputs[0].token_ids) > 3:
                break


async def engine_deadline(engine: Engine) -> None:
    await engine.complete([9] * 5, SamplingParams(max_tokens=50), deadline=trio.current_time() + STEP_S / 2)


async def test_a_failing_request_is_counted_as_an_error(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor) as engine:
        metrics = Metrics(engine)
        executor.model.failing.add("bad")
        with pytest.raises(Exception, match="planted"):
            await engine.complete([1, 2, 3], request_id="bad")
        assert endings(metrics)["error"] == 1


async def test_the_text_comes_in_short_pieces_that_are_the_whole_together() -> None:
    async with fake_engine() as engine:
        for metrics in (Metrics(engine), GatewayMetrics()):
            pieces = list(metrics.render_in_pieces())
            assert b"".join(pieces) == generate_latest(metrics.registry)
            longest = max(len(family.samples) for family in metrics.registry.collect())
            for piece in pieces:
                num_samples = sum(not line.startswith(b"#") for line in piece.splitlines())
                assert num_samples < SAMPLES_AT_ONCE + longest


def test_metrics_that_only_further_engines_have_are_told_once_for_all_of_them() -> None:
    registries = [CollectorRegistry() for _ in range(3)]
    for number, registry in enumerate(registries):
        Gauge("all", "Of all.", ["engine"], registry=registry).labels(engine=number)
        if number:  # as the gauges of an engine with replicas, beside one without
            Gauge("some", "Of some.", ["engine"], registry=registry).labels(engine=number)
    lines = b"".join(pieces_of(*registries)).decode().splitlines()
    assert [line for line in lines if line.startswith("# TYPE")] == ["# TYPE all gauge", "# TYPE some gauge"]
    assert [line for line in lines if not line.startswith("#")] == [
        'all{engine="0"} 0.0',
        'all{engine="1"} 0.0',
        'all{engine="2"} 0.0',
        'some{engine="1"} 0.0',
        'some{engine="2"} 0.0',
    ]
