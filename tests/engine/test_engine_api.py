"""The engine's public methods: what they may wait for, what they refuse, and what they tell."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, assert_no_checkpoints, wait_all_tasks_blocked

from tests.actors.harness import (
    STEP_S,
    FakeExecutor,
    LetterTokenizer,
    answer_of,
    assert_all_blocks_back,
    fake_engine,
)
from triolet import (
    BeamSearchParams,
    LoRARequest,
    PromptAdapterRequest,
    SamplingParams,
    TokenStream,
    open_engine,
)
from triolet.core.request.request import FinishReason, RequestStatus
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.engine.engine import Engine
from triolet.errors import (
    ConfigError,
    EngineClosed,
    InvalidPrompt,
    InvalidRequest,
    PromptTooLong,
    StreamMisused,
    UnsupportedFeature,
    WrongTrioRun,
)
from triolet.ipc.snapshot import Snapshot
from triolet.nano import PATH

LONG = SamplingParams(max_tokens=100, seed=1)
SHORT = SamplingParams(max_tokens=3, seed=1)


# ------------------------------------------------------------------------------------- checkpoints


async def enter_with_ids(engine: Engine) -> None:
    await engine.generate([1, 2, 3], SHORT).__aenter__()


async def enter_with_text(engine: Engine) -> None:
    await engine.generate("HELLO", SHORT).__aenter__()


async def complete(engine: Engine) -> None:
    await engine.complete([1, 2, 3], SHORT)


async def drain_when_idle(engine: Engine) -> None:
    await engine.drain(trio.current_time() + 1)


async def drain_when_its_time_is_up(engine: Engine) -> None:
    await enter_with_ids(engine)
    await engine.drain(-math.inf)


@pytest.mark.parametrize(
    "method",
    [enter_with_ids, enter_with_text, complete, drain_when_idle, drain_when_its_time_is_up],
    ids=lambda method: method.__name__,
)
async def test_an_async_method_is_a_checkpoint(
    method: Callable[[Engine], Awaitable[None]], autojump_clock: MockClock
) -> None:
    async with fake_engine() as engine:
        with assert_checkpoints():
            await method(engine)


async def test_reading_is_a_checkpoint_whether_or_not_there_is_something_to_read(
    autojump_clock: MockClock,
) -> None:
    async with fake_engine() as engine, engine.generate([1, 2, 3], SHORT) as stream:
        with assert_checkpoints():  # it has to wait
            await anext(stream)
        await trio.sleep(1)
        with assert_checkpoints():  # it is there
            await anext(stream)
        with assert_checkpoints(), pytest.raises(StopAsyncIteration):
            await anext(stream)
        with assert_checkpoints():
            await stream.text()


async def test_a_cancelled_read_takes_nothing(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, engine.generate([1, 2, 3], SHORT) as stream:
        await trio.sleep(1)
        with trio.CancelScope() as scope:
            scope.cancel()
            await anext(stream)
        assert scope.cancelled_caught
        assert (await anext(stream)).outputs[0].token_ids == answer_of([1, 2, 3], 1, 3)


async def test_looking_and_aborting_are_no_checkpoints(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, engine.generate([1, 2, 3], LONG, request_id="r"):
        await trio.sleep(STEP_S)
        with assert_no_checkpoints():
            engine.statistics()
            engine.status("r")
            engine.generate([1], SHORT)
            engine.abort("r")


# ---------------------------------------------------------------------------------- streams misused


async def test_a_stream_is_read_inside_of_its_scope_only(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        stream = engine.generate([1, 2, 3], SHORT)
        with pytest.raises(StreamMisused, match="inside of its `async with`"):
            await anext(stream)
        with pytest.raises(StreamMisused, match="inside of its `async with`"):
            await stream.text()
        async with stream:
            await anext(stream)
        with pytest.raises(StreamMisused, match="inside of its `async with`"):
            await anext(stream)


async def test_a_stream_is_entered_once(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        stream = engine.generate([1, 2, 3], SHORT)
        async with stream:
            with pytest.raises(StreamMisused, match="entered once"):
                await stream.__aenter__()
            assert await stream.text()
        with pytest.raises(StreamMisused, match="entered once"):
            await stream.__aenter__()
        assert_all_blocks_back(engine)


async def test_a_second_reader_is_refused_and_the_first_reads_on(autojump_clock: MockClock) -> None:
    texts: list[str] = []
    async with fake_engine() as engine, engine.generate([1, 2, 3], SHORT) as stream:

        async def read() -> None:
            texts.append(await stream.text())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            with pytest.raises(StreamMisused, match="one reader"):
                await anext(stream)
    assert len(texts[0]) == 3


async def test_a_reader_of_a_stream_that_another_task_leaves_is_told(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine, trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(StreamMisused, match="inside of its `async with`"):
                await stream.text()

        async with engine.generate([1, 2, 3], LONG) as stream:
            nursery.start_soon(read)
            await trio.sleep(STEP_S)


# ---------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("sampling_params", {"sampling_params": {"max_tokens": 3}}),
        ("request_id", {"request_id": 7}),
        ("priority", {"priority": "high"}),
        ("priority", {"priority": True}),
        ("priority", {"priority": 1.5}),
        ("priority", {"priority": 2**63}),
        ("priority", {"priority": -(2**63) - 1}),
        ("client", {"client": 7}),
        ("cache_salt", {"cache_salt": b"salt"}),
        ("deadline", {"deadline": math.nan}),
        ("deadline", {"deadline": "soon"}),
        ("deadline", {"deadline": True}),
        ("queue_timeout", {"queue_timeout": math.nan}),
        ("queue_timeout", {"queue_timeout": [1]}),
        ("queue_timeout", {"queue_timeout": -1}),
        ("queue_timeout", {"queue_timeout": -math.inf}),
        ("lora", {"lora": "adapter"}),
    ],
)
async def test_a_wrong_argument_is_refused_by_name(
    field: str, arguments: dict[str, Any], autojump_clock: MockClock
) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match=field) as of_generate:
            engine.generate([1], **arguments)
        with pytest.raises(InvalidRequest, match=field) as of_complete:
            await engine.complete([1], **arguments)
        assert of_generate.value.field == of_complete.value.field == field
        assert engine.statistics().num_requests_live == 0


@pytest.mark.parametrize("prompt", [[[1]], [1.5], [True], b"HELLO", None, {"prompt": 3}, {"text": "A"}])
async def test_a_prompt_of_no_known_form_is_refused_at_once(prompt: Any, autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidPrompt):
            engine.generate(prompt)


@pytest.mark.parametrize("prompt", [[], ""])
async def test_a_prompt_without_tokens_is_refused(prompt: Any, autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidPrompt, match="prompt cannot be empty"):
            await engine.complete(prompt, SHORT)


@pytest.mark.parametrize("deadline", [10**400, math.inf, None])
async def test_a_deadline_beyond_all_numbers_is_none(deadline: Any, autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        assert (await engine.complete([1], SHORT, deadline=deadline)).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("field", ["stop", "bad_words"])
async def test_texts_need_a_tokenizer(field: str, autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        engine._core.model.tokenizer = None
        with pytest.raises(UnsupportedFeature, match=f"{field} must be empty") as caught:
            await engine.complete([1], SamplingParams(**{field: ["A"]}))  # type: ignore[arg-type]
        assert caught.value.field == field
        assert_all_blocks_back(engine)


@pytest.mark.parametrize("token_id", [-1, 50])
async def test_a_token_that_the_model_does_not_have_is_refused(
    token_id: int, autojump_clock: MockClock
) -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidPrompt, match=rf"Token id {token_id} is out of .* must be in \[0, 50\)"):
            await engine.complete([1, token_id], SHORT)
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            await engine.complete([1], SamplingParams(stop_token_ids=[token_id]))
        assert_all_blocks_back(engine)


async def test_a_prompt_leaves_room_for_one_token_at_least(autojump_clock: MockClock) -> None:
    async with fake_engine(FakeExecutor(num_blocks=4, block_size=4)) as engine:
        limit = engine.max_model_len
        for num_tokens in (limit, limit + 1):
            with pytest.raises(
                PromptTooLong, match=rf"maximum context length is {limit} tokens\..* has {num_tokens} tokens"
            ):
                await engine.complete([1] * num_tokens, LONG)
        output = await engine.complete([1] * (limit - 1), LONG)
        assert output.outputs[0].token_ids == answer_of([1] * (limit - 1), 1, 1)
        assert output.finish_reason is FinishReason.LENGTH
        output = await engine.complete([1, 2], SamplingParams(max_tokens=None, seed=1))
        assert output.outputs[0].token_ids == answer_of([1, 2], 1, limit - 2)
        assert_all_blocks_back(engine)


async def test_an_engine_answers_nothing_once_its_scope_has_ended(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        pass
    with pytest.raises(EngineClosed, match="scope has ended"):
        await engine.complete([1, 2, 3], SHORT)
    assert engine.requests() == ()
    assert engine.statistics().num_requests_live == 0


async def test_a_text_is_answered_like_its_token_ids(autojump_clock: MockClock) -> None:
    async with fake_engine() as engine:
        token_ids = [ord(letter) - 65 for letter in "HELLO"]
        found = [await engine.complete(prompt, LONG) for prompt in ("HELLO", token_ids)]
    assert found[0].outputs == found[1].outputs
    assert found[0].prompt_token_ids == found[1].prompt_token_ids == tuple(token_ids)


async def test_a_prompt_of_twenty_megabytes_delays_no_other_requests_tokens() -> None:
    others_have_read = threading.Event()

    class PatientTokenizer(LetterTokenizer):
        def tokenize(self, message: Tokenize) -> Tokenized:
            assert others_have_read.wait(300), "another request waits for this prompt"
            return Tokenized("", (1,) * 5000, ())

    async def ask_much() -> None:
        with pytest.raises(PromptTooLong):
            await engine.complete("A" * 20 * 10**6, LONG)

    async with (
        fake_engine(tokenizer=PatientTokenizer(), runner="thread") as engine,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(ask_much)
        await trio.sleep(STEP_S)
        output = await engine.complete([1, 2, 3], SamplingParams(max_tokens=10, seed=1))
        others_have_read.set()
    assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, len(output.outputs[0].token_ids))


# --------------------------------------------------------------------------------------- looking on


async def test_statistics_add_up_at_every_moment(autojump_clock: MockClock) -> None:
    looks = 0
    async with fake_engine(FakeExecutor(num_blocks=12, block_size=4), max_num_seqs=3) as engine:

        async def look() -> None:
            nonlocal looks
            while True:
                now = engine.statistics()
                blocks = (
                    now.kv_blocks_free,
                    now.kv_blocks_cached,
                    now.kv_blocks_in_use,
                    now.kv_blocks_quarantined,
                )
                assert sum(blocks) == now.kv_blocks_total == 12
                assert now.num_requests_live == now.num_requests_running + now.num_requests_waiting
                assert now.num_requests_running <= 3
                assert now.prefix_cache_hits <= now.prefix_cache_queries
                looks += 1
                await trio.sleep(STEP_S / 4)

        async with trio.open_nursery() as lookers:
            lookers.start_soon(look)
            async with trio.open_nursery() as nursery:
                for number in range(8):
                    params = SamplingParams(max_tokens=20, seed=number)
                    nursery.start_soon(engine.complete, [number % 2] * 9, params)
                await trio.sleep(6 * STEP_S)
                async with engine.generate([7] * 9, LONG):
                    await trio.sleep(6 * STEP_S)
            lookers.cancel_scope.cancel()
        statistics = engine.statistics()
        assert statistics.num_preemptions > 0
        assert statistics.prefix_cache_hits > 0
        assert looks > 3 * statistics.steps
        assert_all_blocks_back(engine)


async def test_status_tells_where_a_request_is_and_how_it_ended(autojump_clock: MockClock) -> None:
    executor = FakeExecutor(num_blocks=64, block_size=4)
    async with fake_engine(executor, max_num_seqs=1) as engine:
        executor.model.failing.add("bad")
        async with engine.generate([1], SHORT, request_id="first") as stream:
            assert engine.status("first") is RequestStatus.WAITING
            async with engine.generate([2], SHORT, request_id="second"):
                await trio.sleep(STEP_S)
                assert engine.status("first") is RequestStatus.RUNNING
                assert engine.status("second") is RequestStatus.WAITING
            await stream.text()
            assert engine.status("first") is RequestStatus.COMPLETED
        async with engine.generate([3], SHORT, request_id="bad"):
            await trio.sleep(1)
        statuses = {name: engine.status(name) for name in ("first", "second", "bad", "unknown")}
    assert statuses == {
        "first": RequestStatus.COMPLETED,
        "second": RequestStatus.CANCELLED,
        "bad": RequestStatus.FAILED,
        "unknown": None,
    }


async def test_open_engine_takes_only_the_name_of_a_model() -> None:
    async with open_engine(str(PATH), max_model_len=64, runner="inline") as engine:
        assert (engine.config.model, engine.max_model_len) == (str(PATH), 64)
    with pytest.raises(ConfigError, match="config must be an EngineConfig; all else is given by keyword"):
        async with open_engine(PATH):  # type: ignore[arg-type]
            pass


# ------------------------------------------------------------------------------ another thread or run


LORA = LoRARequest("a", 1, "/nowhere")
SOFT = PromptAdapterRequest("s", 1, "/nowhere")

# By the method's name; what reads the next value of a stream is in the next test.
USES: dict[str, Callable[[Engine], object]] = {
    "abort": lambda engine: engine.abort("mine"),
    "add_lora": lambda engine: engine.add_lora(LORA),
    "add_prompt_adapter": lambda engine: engine.add_prompt_adapter(SOFT),
    "add_stat_logger": lambda engine: engine.add_stat_logger(Mock()),
    "apply_model": lambda engine: engine.apply_model("report"),
    "beam_search": lambda engine: engine.beam_search([1, 2, 3], BeamSearchParams(2, 2)),
    "check_health": lambda engine: engine.check_health(),
    "collective_rpc": lambda engine: engine.collective_rpc("report"),
    "complete": lambda engine: engine.complete([1, 2, 3], SHORT),
    "drain": lambda engine: engine.drain(float("inf")),
    "embed": lambda engine: engine.embed([1, 2, 3]),
    "encode": lambda engine: engine.encode([1, 2, 3]),
    "encode_all": lambda engine: engine.encode_all([[1, 2, 3]]),
    "follow_restarts": lambda engine: engine.follow_restarts(),
    "generate": lambda engine: engine.generate([1, 2, 3], SHORT),
    "pause_generation": lambda engine: engine.pause_generation(),
    "pin_lora": lambda engine: engine.pin_lora(1),
    "reload_weights": lambda engine: engine.reload_weights("/nowhere"),
    "remove_lora": lambda engine: engine.remove_lora(1),
    "remove_prompt_adapter": lambda engine: engine.remove_prompt_adapter(1),
    "remove_stat_logger": lambda engine: engine.remove_stat_logger(Mock()),
    "requests": lambda engine: engine.requests(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "resume": lambda engine: engine.resume(Snapshot(architecture="", vocab_size=0)),
    "resume_generation": lambda engine: engine.resume_generation(),
    "score": lambda engine: engine.score("a", "b"),
    "shut_down": lambda engine: engine.shut_down(),
    "sleep": lambda engine: engine.sleep(),
    "sleep_when_idle": lambda engine: engine.sleep_when_idle(),
    "snapshot": lambda engine: engine.snapshot(),
    "start_profile": lambda engine: engine.start_profile(),
    "statistics": lambda engine: engine.statistics(),
    "status": lambda engine: engine.status("mine"),
    "stop_profile": lambda engine: engine.stop_profile(),
    "tell_stat_loggers": lambda engine: engine.tell_stat_loggers(),
    "update_weights": lambda engine: engine.update_weights({}),
    "wake_up": lambda engine: engine.wake_up(),
}
# They read what no task changes amid a call.
READS = {
    "cache_config", "default_sampling_params", "list_loras", "list_prompt_adapters", "loras", "plan_scoring",
    "prompt_adapters",
}  # fmt: skip


def test_every_method_is_known_to_the_test_below() -> None:
    methods = {name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")}
    assert methods == USES.keys() | READS


@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_a_use_from_another_threads_run_is_refused_and_harms_nothing(
    use: Callable[[Engine], object],
) -> None:
    async def elsewhere(engine: Engine) -> None:
        used = use(engine)
        if inspect.isawaitable(used):
            await used

    def outside_of_trio(engine: Engine) -> None:
        used = use(engine)
        if inspect.iscoroutine(used):
            used.send(None)

    async with fake_engine() as engine:
        for call in (lambda: trio.run(elsewhere, engine), lambda: outside_of_trio(engine)):
            with pytest.raises(WrongTrioRun, match=r"from another thread, use trio\.from_thread"):
                await trio.to_thread.run_sync(call)
        output = await engine.complete([1, 2, 3], SHORT)
        assert output.outputs[0].token_ids == answer_of([1, 2, 3], 1, 3)


async def test_a_stream_is_entered_and_read_in_the_engines_own_run() -> None:
    async def read(stream: AsyncIterator[object]) -> None:
        await anext(stream)

    async def enter(stream: TokenStream) -> None:
        async with stream:
            pass

    async with fake_engine() as engine:
        with pytest.raises(WrongTrioRun):
            await trio.to_thread.run_sync(trio.run, enter, engine.generate([1, 2, 3], SHORT))
        restarts = engine.follow_restarts()
        with pytest.raises(WrongTrioRun):
            await trio.to_thread.run_sync(trio.run, read, restarts)
        assert await anext(restarts) == ()
        async with engine.generate([1, 2, 3], SHORT) as stream:
            with pytest.raises(WrongTrioRun):
                await trio.to_thread.run_sync(trio.run, read, stream)
            with pytest.raises(WrongTrioRun):
                await trio.to_thread.run_sync(stream.close)
            outputs = [output async for output in stream]
        assert outputs[-1].outputs[0].token_ids == answer_of([1, 2, 3], 1, 3)


async def test_a_deadline_before_the_engine_was_opened_is_refused_with_how_to_write_it() -> None:
    async with fake_engine() as engine:
        with pytest.raises(InvalidRequest, match=r"such as trio\.current_time\(\) \+ 0\.2; got") as caught:
            engine.generate([1, 2, 3], SHORT, deadline=0.2)
        assert (caught.value.field, caught.value.got) == ("deadline", 0.2)
        with pytest.raises(InvalidRequest, match="deadline must be absolute"):
            await engine.drain(30)
        assert engine.is_open
        output = await engine.complete([1, 2, 3], SHORT, deadline=trio.current_time())
        assert output.finish_reason == FinishReason.DEADLINE
