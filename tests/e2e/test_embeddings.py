"""Embeddings of decoders, compared with transformers' hidden states: alone, batched, chunked, cached, after a crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio
from torch.nn import functional

import triolet
from tests.model.tiny import make_model
from triolet import Engine, PoolingParams, SamplingParams
from triolet.core.request.request import FinishReason
from triolet.errors import (
    InvalidParams,
    InvalidPrompt,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    UnsupportedFeature,
)

RUNNERS = ("thread", pytest.param("process", marks=pytest.mark.slow))
LONG = tuple((7 * index) % 250 for index in range(150))
PROMPTS: tuple[tuple[int, ...], ...] = (
    *(tuple((11 * index + 3 * place) % 250 for place in range(1 + 5 * index)) for index in range(15)),
    LONG,
)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen runs on the C++ step, where there is a compiler, and Gemma on the torch decoder."""
    return make_model(request.param, tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@cache
def reference_model(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def hidden_states(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """After the final norm, by transformers; [num_tokens, hidden_size]."""
    with torch.no_grad():
        output = reference_model(folder)(torch.tensor([list(token_ids)]), output_hidden_states=True)
    hidden: torch.Tensor = output.hidden_states[-1][0]
    return hidden


def expected(folder: Path, token_ids: Sequence[int]) -> torch.Tensor:
    return functional.normalize(hidden_states(folder, token_ids)[-1], dim=0)


def check(folder: Path, token_ids: Sequence[int], embedding: Sequence[float]) -> None:
    found = torch.tensor(embedding)
    assert (found - expected(folder, token_ids)).abs().max() <= 1e-5
    assert abs(float(found.norm()) - 1) <= 1e-6


async def check_all(folder: Path, engine: Engine) -> None:
    outputs = await engine.embed(PROMPTS)
    assert [output.prompt_token_ids for output in outputs] == list(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check(folder, prompt, output.outputs.embedding)


def open_tiny(folder: Path, runner: str = "thread", **fields: Any) -> AbstractAsyncContextManager[Engine]:
    settings: dict[str, Any] = {
        "convert": "embed",
        "num_kv_blocks": 200,
        "dtype": "float32",
        "log_stats": False,
    }
    return triolet.open_engine(model=str(folder), runner=runner, **(settings | fields))


@pytest.mark.parametrize("runner", RUNNERS)
async def test_an_embedding_is_the_last_hidden_state_normalised(folder: Path, runner: str) -> None:
    async with open_tiny(folder, runner) as engine:
        one = await engine.embed("hello")
        assert len(one.prompt_token_ids) == len("hello")
        check(folder, one.prompt_token_ids, one.outputs.embedding)
        assert one.outputs.hidden_size == 64
        check(folder, (5,), (await engine.embed([5])).outputs.embedding)
        async with engine.encode("hello", PoolingParams(use_activation=False)) as stream:
            outputs = [output async for output in stream]
        assert [output.finished for output in outputs] == [True]
        raw = torch.frombuffer(outputs[0].outputs.data, dtype=torch.float32)
        assert (
            raw - hidden_states(folder, one.prompt_token_ids)[-1]
        ).abs().max() <= 1e-4  # of numbers around 1 to 10


@pytest.mark.parametrize("runner", RUNNERS)
async def test_embeddings_beside_generating_requests_change_neither(folder: Path, runner: str) -> None:
    async with open_tiny(folder, runner) as engine:
        alone = [(await engine.complete(prompt, GREEDY)).outputs[0].token_ids for prompt in PROMPTS[:4]]
        beside: dict[int, Sequence[int]] = {}

        async def generate(place: int) -> None:
            beside[place] = (await engine.complete(PROMPTS[place], GREEDY)).outputs[0].token_ids

        async with trio.open_nursery() as nursery:
            for place in range(4):
                nursery.start_soon(generate, place)
            await check_all(folder, engine)
        assert [beside[place] for place in range(4)] == alone
        statistics = engine.statistics()
        assert (statistics.num_requests_live, statistics.kv_blocks_in_use) == (0, 0)


@pytest.mark.parametrize("runner", RUNNERS)
async def test_chunks_and_prefix_hits_give_the_same_embeddings(folder: Path, runner: str) -> None:
    async with open_tiny(folder, runner, max_num_batched_tokens=16, max_num_seqs=4) as engine:
        await check_all(folder, engine)
        hits = engine.statistics().prefix_cache_hits
        again = await engine.embed(LONG)
        assert again.num_cached_tokens >= 128
        assert engine.statistics().prefix_cache_hits > hits
        check(folder, LONG, again.outputs.embedding)


@pytest.mark.slow
async def test_a_crash_of_the_runner_costs_no_embedding_and_doubles_none(folder: Path) -> None:
    async with open_tiny(folder, "process", max_num_batched_tokens=16, max_num_seqs=4) as engine:

        async def kill() -> None:
            for _ in range(2):
                steps = engine.statistics().steps
                while engine.statistics().steps < steps + 3:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                process_id = engine.model_info.process_id
                assert process_id is not None
                os.kill(process_id, signal.SIGKILL)
                while engine.model_info.process_id == process_id:  # noqa: ASYNC110
                    await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            await check_all(folder, engine)
        statistics = engine.statistics()
        assert statistics.num_restarts > 0
        assert statistics.num_requests_ended == {FinishReason.STOP: len(PROMPTS)}
        assert statistics.kv_blocks_in_use == 0


async def test_a_prompt_may_fill_the_whole_context(qwen: Path) -> None:
    async with open_tiny(qwen, max_model_len=len(LONG)) as engine:
        check(qwen, LONG, (await engine.embed(LONG)).outputs.embedding)
        with pytest.raises(
            PromptTooLong, match=r"maximum context length is 150 tokens.* 151 tokens"
        ) as caught:
            await engine.embed([*LONG, 1])
        assert "answer" not in str(caught.value)
        cut = await engine.embed([*LONG, 1], truncate_prompt_tokens=-1)
        assert cut.prompt_token_ids == LONG
        short, cut = await engine.embed("ab"), await engine.embed("abcdef", truncate_prompt_tokens=2)
        assert cut.prompt_token_ids == short.prompt_token_ids


async def test_a_long_list_does_not_overload_an_engine_with_a_short_queue(qwen: Path) -> None:
    async with open_tiny(qwen, "inline", max_queued_requests=2, max_num_seqs=8) as engine:
        assert len(await engine.embed([[index] for index in range(50)])) == 50


async def test_wrong_input_is_refused_by_name_and_nothing_stays(qwen: Path) -> None:
    async with open_tiny(qwen) as engine:
        with pytest.raises(InvalidPrompt, match="at least one prompt; got none"):
            await engine.encode_all([])
        empties: list[Any] = ["", [], [[]]]
        for empty in empties:
            with pytest.raises(InvalidPrompt, match="empty"):
                await engine.embed(empty)
        with pytest.raises(
            InvalidParams,
            match=r"Model 'tiny' does not support Matryoshka embeddings; dimensions must be unset "
            r"\(received dimensions=8\)",
        ):
            await engine.embed("a", PoolingParams(dimensions=8))
        with pytest.raises(UnsupportedFeature, match=r"got 'classify', which needs .*--convert classify"):
            await engine.encode_all(["a"], PoolingParams(task="classify"))
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens must be -1 or at least 1; got 0"):
            engine.encode("a", truncate_prompt_tokens=0)
        with pytest.raises(InvalidRequest, match="truncation_side must be left or right; got 'middle'"):
            engine.encode("a", truncation_side="middle")
        assert engine.statistics().num_requests_live == 0


async def test_a_model_that_only_generates_says_how_to_start_it_for_embeddings(qwen: Path) -> None:
    async with open_tiny(qwen, convert="auto") as engine:
        assert engine.model_info.tasks == ("generate",)
        with pytest.raises(
            UnsupportedFeature, match=r"must be one of generate .*got 'embed'.*--convert embed"
        ):
            await engine.embed("a")


async def test_an_output_and_a_failure_can_be_asked_for_again(qwen: Path) -> None:
    async with open_tiny(qwen) as engine:
        async with engine.encode("hello") as stream:
            first = await stream.output()
            assert (await stream.output()).outputs.data.tolist() == first.outputs.data.tolist()
        async with engine.encode("hello") as stream:
            [read] = [output async for output in stream]
            assert (await stream.output()).outputs.data.tolist() == read.outputs.data.tolist()
        async with engine.encode(LONG) as stream:
            engine.abort(stream.request_id)
            for _ in range(2):
                with pytest.raises(RequestFailed, match="ended before its result"):
                    await stream.output()


async def test_leaving_the_scope_aborts_and_one_failure_ends_the_others(qwen: Path) -> None:
    async with open_tiny(qwen, max_num_batched_tokens=16) as engine:
        with trio.move_on_after(0):
            await engine.embed([LONG] * 20)
        async with engine.encode(LONG) as stream:
            engine.abort(stream.request_id)
            with pytest.raises(RequestFailed, match="ended before its result"):
                await stream.output()
        with pytest.raises(InvalidPrompt, match="out of vocabulary"):
            await engine.embed([LONG, LONG, [10_000], LONG])
        while engine.statistics().kv_blocks_quarantined:  # noqa: ASYNC110
            await trio.sleep(0.001)
        statistics = engine.statistics()
        assert (statistics.num_requests_live, statistics.kv_blocks_in_use) == (0, 0)
