"""Fake engines answer what a test has written, through the engine's own actors, under each kind of event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from triolet import SamplingParams
from triolet.errors import ConfigError, RequestFailed
from triolet.testing import ScriptedModel, SharedModel, open_fake_blocking_engine, open_fake_engine

LONG = SamplingParams(max_tokens=200)


async def test_a_fake_engine_answers_what_was_written() -> None:
    async with open_fake_engine("Grüße, 🦊 from a script!") as engine:
        output = await engine.complete("Hello", LONG)
    [answer] = output.outputs
    assert (answer.text, answer.finish_reason) == ("Grüße, 🦊 from a script!", "stop")
    assert output.prompt == "Hello"


async def test_each_request_gets_its_answer_in_the_order_of_arrival_and_the_last_one_is_told_apart() -> None:
    model = ScriptedModel(["one", "two"])
    async with open_fake_engine(model) as engine:
        assert [(await engine.complete(prompt, LONG)).text for prompt in ("a", "b")] == ["one", "two"]
        with pytest.raises(RequestFailed, match="no scripted answer for request 3 of 2"):
            await engine.complete("c", LONG)
    assert model.prompts == ["a", "b", "c"]


async def test_a_later_request_of_the_same_id_has_the_next_answer() -> None:
    async with open_fake_engine(["one", "two", "three"]) as engine:
        told = [await engine.complete(prompt, LONG, request_id="mine") for prompt in ("a", "a", "b")]
    assert [output.text for output in told] == ["one", "two", "three"]


async def test_a_function_sees_the_prompt_behind_the_chat_template() -> None:
    def answer(prompt: str) -> str:
        if "weather" not in prompt:
            raise LookupError("nothing else is known")
        return "Sunny."

    async with open_fake_engine(answer) as engine:
        assert (await engine.complete([{"role": "user", "content": "weather?"}], LONG)).text == "Sunny."
        with pytest.raises(RequestFailed, match="LookupError: nothing else is known"):
            await engine.complete("time?", LONG)


async def test_time_between_tokens_is_the_clocks(autojump_clock: MockClock) -> None:
    async with open_fake_engine(ScriptedModel("a b c d e f g h", step_s=60.0)) as engine:
        began = trio.current_time()
        output = await engine.complete("Hello", LONG)
        assert trio.current_time() - began >= 60 * len(output.outputs[0].token_ids)
        cut = await engine.complete("Hello", LONG, deadline=trio.current_time() + 150)
        assert cut.outputs[0].finish_reason == "deadline"
    assert output.text == "a b c d e f g h"


async def test_a_planted_crash_costs_a_stream_no_token(autojump_clock: MockClock) -> None:
    model = ScriptedModel("one two three four five six seven", step_s=0.01)
    model.crash(after_steps=3)
    async with open_fake_engine(model) as engine:
        async with engine.generate("Hello", LONG) as stream:
            texts = [output.text async for output in stream]
        assert model.num_crashes == 1
        assert engine.statistics().restarts != {}
    assert texts[-1] == "one two three four five six seven"
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))


async def test_the_restart_after_a_crash_takes_no_script_no_failure_and_is_no_prompt(
    autojump_clock: MockClock,
) -> None:
    model = ScriptedModel(["one", "two", "three"])
    async with open_fake_engine(model) as engine:
        assert (await engine.complete("a", LONG)).text == "one"
        model.crash()
        assert (await engine.complete("b", LONG)).text == "two"
        model.crash(after_steps=1)  # in the middle of the answer
        async with engine.generate("c", LONG) as stream:
            await anext(stream)
            model.fail_next_request("out of luck")
            assert await stream.text() == "three"
        with pytest.raises(RequestFailed, match="out of luck"):
            await engine.complete("d", LONG)
    assert (model.prompts, model.num_crashes) == (["a", "b", "c", "d"], 2)


async def test_a_planted_failure_is_one_requests_own() -> None:
    model = ScriptedModel("fine")
    model.fail_next_request("out of luck")
    async with open_fake_engine(model) as engine:
        with pytest.raises(RequestFailed, match="out of luck"):
            await engine.complete("Hello", LONG)
        assert (await engine.complete("Hello", LONG)).text == "fine"


async def test_what_no_script_can_give_is_said_to_the_request() -> None:
    async with open_fake_engine("short") as engine:
        with pytest.raises(RequestFailed, match="min_tokens is 50"):
            await engine.complete("Hello", SamplingParams(min_tokens=50, max_tokens=60))
        with pytest.raises(RequestFailed, match="log-probabilities of prompts"):
            await engine.complete("Hello to all of you", SamplingParams(prompt_logprobs=1))
        with pytest.raises(RequestFailed, match="structured_outputs do not allow token 1"):
            await engine.complete("Hello", SamplingParams(structured_outputs={"choice": ["yes", "no"]}))


async def test_stop_strings_limits_and_logprobs_are_the_engines() -> None:
    async with open_fake_engine("one two three four") as engine:
        assert (await engine.complete("Hello", SamplingParams(stop="three"))).text == "one two "
        limited = await engine.complete("Hello", SamplingParams(max_tokens=1, logprobs=1))
        assert limited.outputs[0].finish_reason == "length"
        assert limited.outputs[0].cumulative_logprob == 0.0
        guided = SamplingParams(structured_outputs={"regex": "[a-z ]+"}, max_tokens=50)
        assert (await engine.complete("Hello", guided)).text == "one two three four"


def test_under_asyncio_it_has_the_methods_of_the_engine() -> None:
    async def main() -> str:
        async with open_fake_engine("from a thread") as engine:
            async with engine.generate("Hello", LONG) as stream:
                texts = [output.text async for output in stream]
            return texts[-1]

    assert asyncio.run(main()) == "from a thread"


def test_without_an_event_loop_it_blocks() -> None:
    with open_fake_blocking_engine("in a thread") as engine:
        assert engine.complete("Hello", LONG).text == "in a thread"


def test_a_wrong_field_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"), open_fake_blocking_engine("x", max_num_seqs=0):
        pass
    with pytest.raises(ConfigError, match="step_s"):
        ScriptedModel("x", step_s=-1.0)


async def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer"):
        async with open_fake_engine("x", tokenizer=str(tmp_path)):
            pass


def test_a_fake_engine_needs_no_torch() -> None:
    program = """
import sys, trio, triolet.testing
async def main():
    async with triolet.testing.open_fake_engine() as engine:
        print((await engine.complete("Hello")).text)
trio.run(main)
assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "Hello from triolet."


def test_engines_of_a_shared_model_load_it_once_and_know_nothing_of_each_other() -> None:
    async def tokens(model: SharedModel) -> tuple[int, ...]:
        async with model.open_engine() as engine:
            output = await engine.complete("Once upon a time", SamplingParams(max_tokens=8, temperature=0))
            assert engine.statistics().prefix_cache_queries <= len(output.prompt_token_ids or ())
            return tuple(output.outputs[0].token_ids)

    with SharedModel(num_kv_blocks=64) as model:
        under_trio = trio.run(tokens, model)
        executor = model._executor
        assert asyncio.run(tokens(model)) == under_trio
        with model.open_blocking_engine() as engine:
            with pytest.raises(RuntimeError, match="still open"), model.open_blocking_engine():
                pass
            assert engine.model_info.num_kv_blocks == 64
        assert model._executor is executor


def test_a_shared_model_stays_in_the_process() -> None:
    with pytest.raises(ConfigError, match="runner"):
        SharedModel(runner="process")
