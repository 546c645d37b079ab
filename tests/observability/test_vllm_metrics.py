"""The names, kinds, labels and buckets of vLLM 0.32.0's own registry, as it registered them, and ours beside them."""

from __future__ import annotations

import re

import attrs
from prometheus_client import Histogram
from prometheus_client.metrics import MetricWrapperBase

from tests.actors.harness import FakeExecutor, fake_engine
from tests.source_tree import ROOT
from triolet.observability.prometheus import Metrics

MAX_MODEL_LEN = 4096
SECONDS = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
ITL = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
TOKENS = "1 2 5 10 20 50 100 200 500 1000 2000"
ITERATION = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"

# Kind, name, labels beside `model_name` and `engine`.
RECORDED = """
gauge num_requests_running
gauge num_requests_waiting
gauge num_requests_waiting_by_reason reason=capacity|deferred
gauge engine_sleep_state sleep_state=awake|discard_all|weights_offloaded
gauge kv_cache_usage_perc
counter prefix_cache_queries
counter prefix_cache_hits
counter external_prefix_cache_queries
counter external_prefix_cache_hits
counter mm_cache_queries
counter mm_cache_hits
counter num_preemptions
counter prompt_tokens
counter prompt_tokens_by_source source=external_kv_transfer|local_cache_hit|local_compute
counter prompt_tokens_cached
counter prompt_tokens_cached_by_source source=device|disk|external_unspecified|host|p2p
counter generation_tokens
counter request_success finished_reason=abort|error|length|repetition|stop
counter admission_rejections reason=max_num_queued_reqs|max_num_queued_tokens
counter spec_decode_num_drafts
counter spec_decode_num_draft_tokens
counter spec_decode_num_accepted_tokens
counter spec_decode_num_accepted_tokens_per_pos position=0|1|2|3
counter estimated_flops_per_gpu
counter estimated_read_bytes_per_gpu
counter estimated_write_bytes_per_gpu
"""
HISTOGRAMS = {
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_max_num_generation_tokens": TOKENS,
    "request_params_max_tokens": TOKENS,
    "request_prefill_kv_computed_tokens": TOKENS,
    "iteration_tokens_total": ITERATION,
    "request_params_n": "1 2 5 10 20",
    "request_num_preemptions": "1 2 3 4 5 10 20",
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": ITL,
    "request_time_per_output_token_seconds": ITL,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_inference_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
}
WITHOUT_ENGINE = {"admission_rejections"}

# What has no meaning here is left out; a zero would say that it was measured.
NOT_HERE = {
    "mm_cache_queries",  # there are no images
    "mm_cache_hits",
    "estimated_flops_per_gpu",  # nothing is estimated
    "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
}
SOURCES_NOT_HERE = {"external_kv_transfer", "disk", "external_unspecified", "host", "p2p"}


# What the page may say is left out, with a part of vLLM's names for it.
NAMES_OF = {"LoRA": "lora_", "multimodal inputs": "mm_", "KV connectors": "nixl_"}


@attrs.frozen
class Family:
    """One metric: kind, labels, the values of the last one if they are known, and buckets."""

    kind: str
    labels: tuple[str, ...]
    values: frozenset[str] = frozenset()
    buckets: tuple[float, ...] = ()


def recorded() -> dict[str, Family]:
    found = {}
    for line in RECORDED.strip().splitlines():
        kind, name, *more = line.split()
        common = ("model_name",) if name in WITHOUT_ENGINE else ("model_name", "engine")
        label, _, values = more[0].partition("=") if more else ("", "", "")
        found[name] = Family(
            kind,
            (*common, label) if label else common,
            frozenset(values.split("|")) if values else frozenset(),
        )
    for name, buckets in HISTOGRAMS.items():
        found[name] = Family(
            "histogram", ("model_name", "engine"), buckets=tuple(map(float, buckets.split()))
        )
    return found


def registered(metrics: Metrics) -> dict[str, Family]:
    found = {}
    for one in set(metrics.registry._collector_to_names):
        assert isinstance(one, MetricWrapperBase)
        labels = one._labelnames
        has_values = len(labels) > 1 and labels[-1] != "engine"
        found[str(one._name).removeprefix("vllm:")] = Family(
            str(one._type),
            labels,
            frozenset(values[-1] for values in one._metrics) if has_values else frozenset(),
            tuple(map(float, one._kwargs["buckets"])) if isinstance(one, Histogram) else (),
        )
    return found


async def ours() -> dict[str, Family]:
    executor = FakeExecutor(num_blocks=MAX_MODEL_LEN // 4, block_size=4)
    async with fake_engine(executor, speculative="ngram", num_speculative_tokens=4) as engine:
        return registered(Metrics(engine, "vllm:"))


async def test_what_vllm_registers_is_here_with_its_kind_labels_and_buckets_or_has_no_meaning_here() -> None:
    here = await ours()
    for name, theirs in recorded().items():
        if name in NOT_HERE:
            assert name not in here
            continue
        one = here[name]
        assert (one.kind, one.labels, one.buckets) == (theirs.kind, theirs.labels, theirs.buckets), name
        assert theirs.values - SOURCES_NOT_HERE <= one.values, name


async def test_what_is_here_beside_them_is_known() -> None:
    assert set(await ours()) - set(recorded()) == {
        "actor_restarting",
        "actor_restarts",
        "cache_config_info",  # vLLM registers it later, with labels of its own
        "kv_blocks",
        "moved_requests",  # between replicas
        "requests_received",
        "longest_task_step_seconds",
        "kv_store_failed_saves",
        "long_task_steps",
        "recording_lost_records",
    }


def test_the_page_has_no_metric_of_what_it_says_is_left_out() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    [left_out] = re.findall(r"What vLLM has for things that are not here \((.+?)\) is left out", page)
    names = [NAMES_OF[thing] for thing in left_out.split(", ")]
    assert names
    assert [name for name in names if re.search(rf"`(\w+_)?{name}", page)] == []
