"""Lines about requests and throughput, and stat loggers in every shape that vLLM's versions give them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.actors.harness import LetterTokenizer, fake_engine, model_info
from tests.bridge.harness import FastExecutor, no_thread_is_left
from tests.compat.test_llm_engine import make_engine, run, seeded
from tests.core.fake_model import REPETITIVE, FakeModel
from triolet.compat import (
    AsyncEngineArgs,
    AsyncLLM,
    Counter,
    EngineArgs,
    Gauge,
    Histogram,
    LLMEngine,
    LoRARequest,
    SamplingParams,
    StatLoggerBase,
    Vector,
)
from triolet.compat.generation import Generation
from triolet.compat.operations.request_log import RequestLog
from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError, InvalidRequest, RequestFailed, UnsupportedFeature

PARAMS = SamplingParams(max_tokens=4, seed=3)
REQUESTS, STATISTICS = "triolet.requests", "triolet.statistics"


@pytest.fixture(autouse=True)
def a_fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fake(config: EngineConfig) -> object:
        return fake_engine(log_stats=config.log_stats)

    monkeypatch.setattr("triolet.compat.async_llm.open_engine", open_fake)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger=STATISTICS)
    caplog.set_level(logging.DEBUG, logger=REQUESTS)  # last: it is the level of the handler, too
    return lambda name=REQUESTS: [one.getMessage() for one in caplog.records if one.name == name]


def short(lines: list[str]) -> list[str]:
    """Without those that show parameters and prompts."""
    return [line for line in lines if not line.startswith("Received") and "details" not in line]


async def test_each_request_is_logged_when_it_comes_and_when_it_ends(
    lines: Any, autojump_clock: MockClock
) -> None:
    async with AsyncLLM(EngineConfig(), max_log_len=3) as llm:
        async for _ in llm.generate("ABCDE", PARAMS, "a"):
            pass
        assert lines()[0].startswith("Received request a: params: SamplingParams(")
        assert lines()[0].endswith(", lora_request: None.")
        assert lines()[1:] == [
            "Request a details: prompt: 'ABC'.",
            "Added request a.",
            "Finished request a.",
        ]
        async for _ in llm.generate([1, 2, 3, 4], PARAMS, "b"):
            break
        async with llm.generate({"prompt_token_ids": [5, 6, 7, 8], "prompt": "FGHI"}, PARAMS, "c") as outputs:
            await llm.abort("c")
            assert [output.finish_reason async for output in outputs] == ["abort"]
        async with llm.generate("A", PARAMS, "d"):
            pass
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.015):
            async for _ in llm.generate("A", PARAMS, "e"):
                pass
    assert "Request b details: prompt: [1, 2, 3]." in lines()
    assert "Request c details: prompt: {'prompt_token_ids': [5, 6, 7], 'prompt': 'FGH'}." in lines()
    ended = [f"{word} request {name}." for name in "bcde" for word in ("Added", "Aborted")]
    assert short(lines())[2:] == ended


class Failing:
    """A stream that fails after it was entered, or before."""

    request_id = "a"

    def __init__(self, error: Exception, *, is_refused: bool) -> None:
        self.error, self.is_refused = error, is_refused

    async def __aenter__(self) -> None:
        if self.is_refused:
            raise self.error

    async def __anext__(self) -> None:
        raise self.error

    def close(self) -> None: ...


async def test_failures_are_logged_and_refusals_are_not(lines: Any) -> None:
    log = RequestLog()
    for error, is_refused in ((InvalidRequest("no"), True), (RequestFailed("a", "planted"), False)):
        stream: Any = Failing(error, is_refused=is_refused)
        outputs = Generation(stream, lambda name: log.begin(name, "A", PARAMS, None))
        with pytest.raises(type(error)):
            async for _ in outputs:
                pass
    assert [line[:29] for line in short(lines())] == ["Added request a.", "Request a failed: RequestFail"]


async def test_no_line_is_written_where_none_is_asked_for(lines: Any, autojump_clock: MockClock) -> None:
    for args in (AsyncEngineArgs(), AsyncEngineArgs(disable_log_requests=True, max_log_len=5)):
        async with AsyncLLM.from_engine_args(args) as llm:
            async for _ in llm.generate("A", PARAMS, "a"):
                pass
    async with AsyncLLM(EngineConfig(), log_requests=False) as llm, llm.generate("A", PARAMS):
        pass
    assert lines() == []
    asked = AsyncEngineArgs(enable_log_requests=True, max_log_len=0)
    assert (asked.enable_log_requests, asked.disable_log_requests, asked.max_log_len) == (True, False, 0)
    assert asked != AsyncEngineArgs()
    async with AsyncLLM.from_engine_args(asked) as llm, llm.generate("A", PARAMS, "r"):
        pass
    assert lines()[1] == "Request r details: prompt: ''."
    with pytest.raises(
        UnsupportedFeature, match="enable_log_requests is not offered: AsyncEngineArgs has it"
    ):
        EngineArgs(enable_log_requests=True)
    with pytest.raises(InvalidRequest, match="max_log_len must be None or a number of at least 0"):
        AsyncLLM(EngineConfig(), max_log_len=-1)


def test_the_lines_are_the_same_under_asyncio(lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_fake(config: EngineConfig) -> object:
        return fake_engine(FastExecutor(step_s=0.001))

    monkeypatch.setattr("triolet.compat.async_llm.open_engine", open_fake)

    async def main() -> None:
        llm = AsyncLLM(EngineConfig())
        async for _ in llm.generate("ABC", PARAMS, "a"):
            pass
        async for _ in llm.generate("ABC", SamplingParams(max_tokens=200), "b"):
            break
        await llm.do_log_stats()
        llm.shutdown()

    with no_thread_is_left():
        asyncio.run(main())
    assert short(lines()) == [
        "Added request a.",
        "Finished request a.",
        "Added request b.",
        "Aborted request b.",
    ]
    assert len(lines(STATISTICS)) == 1


# ---------------------------------------------------------------------------------------- stat loggers


class Notes(StatLoggerBase):
    """Notes the generated tokens in vLLM's present shape."""

    def __init__(self, vllm_config: EngineConfig | None = None, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self.tokens = self.num_logs = self.num_starts = 0
        self.seen: list[Any] = []

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        assert engine_idx == self.engine_index
        self.tokens += iteration_stats.num_generation_tokens
        self.seen.append((scheduler_stats, iteration_stats))

    def log_engine_initialized(self) -> None:
        self.num_starts += 1

    def log(self) -> None:
        self.num_logs += 1


class Early:
    """The shape of the first version: the scheduler's part only."""

    def __init__(self) -> None:
        self.running: list[int] = []

    def record(self, scheduler_stats: Any) -> None:
        self.running.append(scheduler_stats.num_running_reqs)


class Later:
    """Two parts, and an index that must come."""

    def __init__(self) -> None:
        self.tokens = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any, engine_idx: int
    ) -> None:
        assert mm_cache_stats is None
        self.tokens += iteration_stats.num_generation_tokens


async def test_loggers_come_in_a_dict_or_in_a_list_as_they_are_or_from_factories(
    autojump_clock: MockClock,
) -> None:
    named: dict[str, Any] = {"notes": Notes(), "early": Early(), "later": Later()}
    llm = AsyncLLM(EngineConfig(), stat_loggers=named)
    async with llm:
        assert llm.stat_loggers == named
        async for _ in llm.generate("ABC", PARAMS, "a"):
            pass
        await llm.do_log_stats()
        await llm.remove_logger("notes")
        with pytest.raises(KeyError, match="already exists"):
            llm.add_logger("early", Early())
        async for _ in llm.generate("ABC", PARAMS, "b"):
            pass
        await llm.do_log_stats(scheduler_outputs=None, model_output=None)
    assert (named["notes"].tokens, named["notes"].num_logs, named["notes"].num_starts) == (4, 1, 1)
    assert named["later"].tokens == 8
    assert max(named["early"].running) == 1
    listed = AsyncLLM(EngineConfig(), stat_loggers=[Notes, lambda config, index: Early()])
    async with listed:
        assert [type(one) for one in listed.stat_loggers.values()] == [Notes, Early]
        assert listed.stat_loggers["0"].vllm_config is listed.vllm_config
    with pytest.raises(ConfigError, match=r"^stat_loggers must be loggers, or functions that make them"):
        async with AsyncLLM(EngineConfig(), stat_loggers={"wrong": 3}):
            raise AssertionError("not entered")


async def test_records_have_the_fields_of_vllm(autojump_clock: MockClock) -> None:
    notes = Notes()
    async with AsyncLLM(EngineConfig(), stat_loggers={"notes": notes}) as llm:
        for name in "ab":
            async for _ in llm.generate("ABCDEFGHIJ", PARAMS, name):
                pass
        await llm.do_log_stats()
    assert {one.num_waiting_reqs for one, _ in notes.seen} <= {0, 1}
    assert 0 < max(one.kv_cache_usage for one, _ in notes.seen) < 1
    assert max(one.gpu_cache_usage for one, _ in notes.seen) < 1
    assert notes.seen[-1][0].step_counter == notes.seen[-1][0].steps == 8
    hits = sum(one.prefix_cache_stats.hits for one, _ in notes.seen)
    assert hits == notes.seen[-1][0].prefix_cache_hits == 8  # two blocks of four, of the second prompt
    assert 0 < hits <= sum(one.prefix_cache_stats.queries for one, _ in notes.seen)
    parts = [part for _, part in notes.seen]
    assert sum(len(part.time_to_first_tokens_iter) for part in parts) == 2
    assert sum(len(part.inter_token_latencies_iter) for part in parts) == 6
    assert sum(len(part.time_per_output_tokens_iter) for part in parts) == 6
    assert sum(part.num_prompt_tokens for part in parts) == 20
    assert sum(part.num_preempted_reqs for part in parts) == 0
    assert all(part.iteration_timestamp > 1e9 for part in parts)
    ended = [one for part in parts for one in part.finished_requests]
    assert [(one.finish_reason, one.max_tokens_param, one.num_prompt_tokens) for one in ended] == [
        ("length", 4, 10)
    ] * 2
    assert [one.num_generation_tokens for one in ended] == [4, 4]
    assert all(one.e2e_latency >= one.decode_time > 0 for one in ended)


async def test_do_log_stats_writes_the_throughput_now(lines: Any, autojump_clock: MockClock) -> None:
    async with AsyncLLM(EngineConfig()) as llm:
        await llm.do_log_stats()
        assert len(lines(STATISTICS)) == 1
        assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in lines(STATISTICS)[0]
        await trio.sleep(3)
        async for _ in llm.generate("ABC", SamplingParams(max_tokens=100, seed=1), "a"):
            pass
        await trio.sleep(1)  # after a hundred steps of 10 ms; the time before the first work does not count
        await llm.do_log_stats()
        assert len(lines(STATISTICS)) == 2
        assert "generation throughput: 50.0 tokens/s" in lines(STATISTICS)[1]
    quiet = AsyncLLM(EngineConfig(), log_stats=False)
    async with quiet:
        await quiet.do_log_stats()
        assert not quiet.log_stats
    assert len(lines(STATISTICS)) == 2


def test_llm_engine_logs_its_throughput_and_takes_loggers_in_either_form(lines: Any) -> None:
    ticks = iter(range(10_000))
    loaded: Any = (FakeModel(64, 4, 50), model_info(64, 4), LetterTokenizer())
    notes = Notes()
    engine = LLMEngine(
        EngineConfig(), stat_loggers={"notes": notes}, loaded=loaded, clock=lambda: next(ticks) * 0.01
    )
    engine.add_request("r", "ABC", PARAMS)
    while engine.has_unfinished_requests():
        engine.step()
    assert lines(STATISTICS) == []
    engine.do_log_stats_with_interval()
    assert lines(STATISTICS) == []
    engine.do_log_stats()
    assert len(lines(STATISTICS)) == 1
    assert (notes.tokens, notes.num_logs) == (4, 1)


async def test_lora_requests_are_named_in_the_line(lines: Any, autojump_clock: MockClock) -> None:
    async with AsyncLLM(EngineConfig()) as llm:
        assert llm._log is not None
        llm._log.begin("r", "A", PARAMS, LoRARequest("style", 1, "/style"))
    assert "lora_name='style'" in lines()[0]


def test_metrics_are_those_since_the_beginning_in_the_forms_of_vllm_or_a_typed_error() -> None:
    engine = make_engine(speculative="ngram", num_speculative_tokens=3)
    engine.add_request("a", [1, 2, 3] * 4, seeded(REPETITIVE, 40))
    run(engine)
    metrics = {metric.name.removeprefix("vllm:"): metric for metric in engine.get_metrics()}
    tokens, drafts = metrics["generation_tokens"], metrics["spec_decode_num_drafts"]
    accepted, by_place = (metrics[f"spec_decode_num_accepted_tokens{end}"] for end in ("", "_per_pos"))
    assert isinstance(tokens, Counter) and (tokens.value, tokens.labels["engine"]) == (40, str(engine._index))
    assert isinstance(drafts, Counter) and drafts.value > 0
    assert isinstance(accepted, Counter) and isinstance(by_place, Vector)
    assert len(by_place.values) == 3 and sum(by_place.values) == accepted.value > 0
    assert isinstance(running := metrics["num_requests_running"], Gauge) and running.value == 0
    first = metrics["time_to_first_token_seconds"]
    assert isinstance(first, Histogram) and first.count == first.buckets["+Inf"] == 1 and first.sum > 0
    with pytest.raises(UnsupportedFeature, match="log_stats"):
        make_engine(log_stats=False).get_metrics()
