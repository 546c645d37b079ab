"""Prompt adapters: the answers are those of transformers, given the embeddings or the keys and values of the files.

The oracle is the documented rule: embeddings stand before those of the prompt's tokens, and keys and values in the
cache before the prompt. One test compares with peft itself, where it is installed.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trio
from safetensors.torch import load_file, save_file

import triolet
from tests.model.tiny import make_model
from triolet import Engine, PromptAdapterRequest, SamplingParams
from triolet.errors import (
    AdapterError,
    ConfigError,
    InvalidRequest,
    PromptTooLong,
    RequestFailed,
    SnapshotError,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 10
PROMPTS = [[(7 * place + 11 * index) % 250 for place in range(30 + index)] for index in range(2)]
KINDS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@cache
def reference_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_prompt_adapter(base: Path, folder: Path, kind: str, num_tokens: int, **fields: Any) -> Path:
    config = reference_model(base).config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 2 * config.num_hidden_layers * heads * size if kind == "PREFIX_TUNING" else config.hidden_size
    noise = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(num_tokens))
    folder.mkdir(parents=True)
    save_file({"prompt_embeddings": noise}, folder / "adapter_model.safetensors")
    settings = {"peft_type": kind, "num_virtual_tokens": num_tokens, "num_transformer_submodules": 1} | fields
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def expected(
    base: Path, folder: Path | None, prompt: Sequence[int], num_tokens: int = NUM_TOKENS
) -> list[int]:
    """Greedy answer by transformers, with the files read by the documented rule."""
    model, numbers, kind = reference_model(base), torch.zeros(0, 0), ""
    if folder is not None:
        numbers = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
        kind = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["peft_type"]
    token_ids = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            if kind == "PREFIX_TUNING":
                config = model.config
                parts = numbers.view(len(numbers), 2 * config.num_hidden_layers, -1, config.head_dim)
                cached = transformers.DynamicCache(config=config)
                for layer in range(config.num_hidden_layers):
                    keys, values = (parts[:, 2 * layer + i].transpose(0, 1)[None] for i in range(2))
                    cached.update(keys, values, layer)
                output = model(input_ids=torch.tensor([token_ids]), past_key_values=cached)
            else:
                embedded = model.get_input_embeddings()(torch.tensor([token_ids]))
                if len(numbers):
                    embedded = torch.cat([numbers[None], embedded], dim=1)
                output = model(inputs_embeds=embedded)
            token_ids.append(int(output.logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


def open_engine(base: Path, **fields: Any) -> Any:
    settings: dict[str, Any] = {"runner": "inline", "model": str(base), "dtype": "float32"}
    return triolet.open_engine(**(settings | {"num_kv_blocks": 256, "log_stats": False} | fields))


def named(folder: Path | None, number: int) -> PromptAdapterRequest | None:
    return None if folder is None else PromptAdapterRequest(f"soft-{number}", number, str(folder))


async def answer(
    engine: Engine, prompt: list[int], adapter: PromptAdapterRequest | None, num_tokens: int = NUM_TOKENS
) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    output = await engine.complete(prompt, params, prompt_adapter=adapter)
    assert list(output.prompt_token_ids) == prompt  # virtual tokens are not billed
    assert output.num_cached_tokens <= len(prompt)
    return list(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3", "PROMPT_TUNING"),  # the C++ step, where there is a compiler
        pytest.param("qwen3", "PREFIX_TUNING", marks=pytest.mark.slow),
        pytest.param("qwen3", "P_TUNING", marks=pytest.mark.slow),
        # the torch decoder, with a scale of the embedding; and with learned positions
        pytest.param("gemma3", "PROMPT_TUNING", marks=pytest.mark.slow),
        pytest.param("gpt2", "PROMPT_TUNING", marks=pytest.mark.slow),
        # a scale that counts for given embeddings, too
        pytest.param("granite", "P_TUNING", marks=pytest.mark.slow),
        # layers with a window and others, in cache groups of their own
        ("gemma3", "PREFIX_TUNING"),
    ],
)
async def test_an_answer_is_that_of_transformers_alone_together_in_chunks_and_with_a_prefix_hit(
    family: str, kind: str, tmp_path: Path
) -> None:
    base = make_model(family, tmp_path / "tiny", with_tokenizer=True)
    # one that ends within a block, and one that fills two
    folders = [None, make_prompt_adapter(base, tmp_path / "5", kind, 5)]
    folders.append(make_prompt_adapter(base, tmp_path / "32", kind, 32))
    wanted = {
        (number, place): expected(base, folder, prompt)
        for number, folder in enumerate(folders)
        for place, prompt in enumerate(PROMPTS)
    }
    assert len({tuple(tokens) for tokens in wanted.values()}) == 6  # the soft prompts change something
    found: dict[tuple[int, int], list[int]] = {}

    async def ask(number: int, place: int) -> None:
        found[number, place] = await answer(engine, PROMPTS[place], named(folders[number], number))

    for fields in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}):
        async with open_engine(base, **fields) as engine:
            assert await answer(engine, PROMPTS[0], named(folders[2], 2)) == wanted[2, 0]
            for _ in range(2):  # the second time, the prompts are in the prefix cache
                async with trio.open_nursery() as nursery:
                    for number, place in wanted:
                        nursery.start_soon(ask, number, place)
                assert found == wanted
                found.clear()
            assert engine.statistics().prefix_cache_hits > 0
            assert engine.list_prompt_adapters() == {1, 2}
            assert engine.statistics().kv_blocks_in_use == 0


@pytest.mark.slow
async def test_a_killed_runner_changes_no_answer(base: Path, tmp_path: Path) -> None:
    folders = [make_prompt_adapter(base, tmp_path / kind, kind, 7) for kind in KINDS]
    found: list[list[int]] = [[] for _ in folders]

    async def ask(place: int) -> None:
        found[place] = await answer(engine, PROMPTS[1], named(folders[place], place + 1), 60)

    async with open_engine(base, runner="process", num_scheduler_steps=1) as engine:
        async with trio.open_nursery() as nursery:
            for place in range(3):
                nursery.start_soon(ask, place)
            while engine.statistics().steps < 10:  # noqa: ASYNC110
                await trio.sleep(0.001)
            process_id = engine.model_info.process_id
            assert process_id is not None
            os.kill(process_id, signal.SIGKILL)
        assert engine.statistics().num_restarts == 1
    assert found == [expected(base, folder, PROMPTS[1], 60) for folder in folders]


@pytest.mark.slow
async def test_a_snapshot_goes_on_with_the_same_contents_or_not_at_all(base: Path, tmp_path: Path) -> None:
    folder = make_prompt_adapter(base, tmp_path / "soft", "PROMPT_TUNING", 5)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with open_engine(base) as engine:
        async with engine.generate(PROMPTS[0], params, prompt_adapter=named(folder, 1)) as stream:
            async for output in stream:
                if len(output.outputs[0].token_ids) > 2:
                    snapshot = engine.snapshot()
                    break
    async with open_engine(base) as engine:
        [resumed] = engine.resume(snapshot).values()
        async with resumed as stream:
            outputs = [output async for output in stream]
        assert list(outputs[-1].outputs[0].token_ids) == expected(base, folder, PROMPTS[0])
        assert list(outputs[-1].prompt_token_ids) == PROMPTS[0]
    save_file({"prompt_embeddings": torch.ones(5, 64)}, folder / "adapter_model.safetensors")
    async with open_engine(base) as engine:
        [resumed] = engine.resume(snapshot).values()
        with pytest.raises(SnapshotError, match="other contents of prompt adapter 'soft-1'"):
            async with resumed:
                pytest.fail("it has begun")


async def test_an_answer_goes_on_in_an_engine_with_another_soft_prompt_of_that_name(
    base: Path, tmp_path: Path
) -> None:
    begun = named(make_prompt_adapter(base, tmp_path / "begun", "PROMPT_TUNING", 5), 1)
    other = named(make_prompt_adapter(base, tmp_path / "other", "PROMPT_TUNING", 7), 1)
    assert begun is not None and other is not None
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    async with open_engine(base) as engine:
        async with engine.generate(PROMPTS[0], params, prompt_adapter=begun) as stream:
            await anext(stream)
            snapshot = engine.snapshot()
    async with open_engine(base) as engine:
        await engine.add_prompt_adapter(other)
        [resumed] = engine.resume(snapshot).values()
        async with resumed as stream:
            outputs = [output async for output in stream]
        assert list(outputs[-1].outputs[0].token_ids) == expected(base, tmp_path / "begun", PROMPTS[0])
        assert [one.prompt_adapter_local_path for one in engine.prompt_adapters()] == [
            str(tmp_path / "other")
        ]


async def test_beams_behind_a_soft_prompt_end_where_the_context_is_full(base: Path, tmp_path: Path) -> None:
    soft = named(make_prompt_adapter(base, tmp_path / "soft", "PROMPT_TUNING", 5), 1)
    params = triolet.BeamSearchParams(beam_width=2, max_tokens=20, ignore_eos=True)
    async with open_engine(base, max_model_len=40) as engine:
        found = await engine.beam_search(PROMPTS[0], params, prompt_adapter=soft)
    assert [len(beam.tokens) for beam in found.sequences] == [35, 35]  # 5 places are the virtual tokens'
    assert {beam.finish_reason for beam in found.sequences} == {triolet.FinishReason.LENGTH}


@pytest.mark.slow
async def test_a_bad_prompt_adapter_fails_its_request_alone_and_names_file_and_field(
    base: Path, tmp_path: Path
) -> None:
    good = make_prompt_adapter(base, tmp_path / "good", "PROMPT_TUNING", 5)
    bad = {
        "missing": (tmp_path / "missing", "is no folder with a prompt adapter"),
        "lora": (
            make_prompt_adapter(base, tmp_path / "lora", "LORA", 5),
            "peft_type must be one of PROMPT_TUNING",
        ),
        "length": (
            make_prompt_adapter(base, tmp_path / "length", "P_TUNING", 5, num_virtual_tokens=6),
            r"num_virtual_tokens must be that of prompt_embeddings, 5; got 6",
        ),
        "shape": (
            make_prompt_adapter(base, tmp_path / "shape", "P_TUNING", 5, peft_type="PREFIX_TUNING"),
            r"prompt_embeddings must be of shape \(virtual tokens, \d+\) for this model; got \(5, 64\)",
        ),
        "cut": (make_prompt_adapter(base, tmp_path / "cut", "P_TUNING", 5), "is truncated"),
    }
    weights = tmp_path / "cut/adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    async with open_engine(base, max_model_len=64) as engine:
        for number, (folder, message) in enumerate(bad.values(), start=2):
            with pytest.raises(AdapterError, match=message) as caught:
                await answer(engine, PROMPTS[0], named(folder, number))
            assert caught.value.field == "prompt_adapter"
        soft = named(good, 1)
        assert soft is not None
        assert await engine.add_prompt_adapter(soft)
        assert engine.prompt_adapters()[0].prompt_adapter_num_virtual_tokens == 5
        for wrong, message in (
            (PromptAdapterRequest("soft-1", 3, str(good)), "prompt_adapter_name must belong to one"),
            (PromptAdapterRequest("other", 1, str(good)), "prompt_adapter_id must belong to one"),
            (PromptAdapterRequest("soft-1", 1, str(good), 9), "must be that of the folder, 5; got 9"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await engine.complete(PROMPTS[0], prompt_adapter=wrong)
        with pytest.raises(InvalidRequest, match="prompt_logprobs must be None with a prompt adapter"):
            await engine.complete(PROMPTS[0], SamplingParams(prompt_logprobs=1), prompt_adapter=soft)
        with pytest.raises(PromptTooLong, match="65 tokens"):  # virtual ones included
            await engine.complete([1] * 60, prompt_adapter=soft)
        save_file({"prompt_embeddings": torch.ones(5, 64)}, good / "adapter_model.safetensors")
        with pytest.raises(RequestFailed, match=r"prompt adapter 'soft-1' could not be loaded.*has changed"):
            await answer(engine, PROMPTS[0], soft)
        assert engine.remove_prompt_adapter(1)
        assert not engine.remove_prompt_adapter(1)
        assert await answer(engine, PROMPTS[0], soft) == expected(base, good, PROMPTS[0])
        assert engine.statistics().num_requests_live == 0
    with pytest.raises(ConfigError, match="NAME=FOLDER"):
        async with open_engine(base, prompt_adapters=("good",)):
            pytest.fail("it has started")


@pytest.mark.slow
async def test_the_prefix_root_is_the_contents_so_that_a_changed_folder_finds_no_stale_block(
    base: Path, tmp_path: Path
) -> None:
    folder, prompt = make_prompt_adapter(base, tmp_path / "soft", "PREFIX_TUNING", 32), PROMPTS[0]
    async with open_engine(base, prompt_adapters=(f"soft-1={folder}",)) as engine:
        for seed in range(2):
            numbers = load_file(folder / "adapter_model.safetensors")["prompt_embeddings"]
            save_file({"prompt_embeddings": numbers + seed}, folder / "adapter_model.safetensors")
            if seed:
                engine.remove_prompt_adapter(1)
            assert await answer(engine, prompt, named(folder, 1)) == expected(base, folder, prompt)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of peft about transformers
@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_that_of_peft(kind: str, base: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", exc_type=ImportError)
    config = {
        "PROMPT_TUNING": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6),
        "P_TUNING": lambda: peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=6, encoder_hidden_size=16
        ),
        "PREFIX_TUNING": lambda: peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=6, token_dim=32, num_attention_heads=2
        ),
    }[kind]()
    torch.manual_seed(1)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(plain, config).eval()
    model.save_pretrained(tmp_path / "soft")
    wanted: list[int] = []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([PROMPTS[0] + wanted])
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            wanted.append(int(logits[0, -1].argmax()))
    async with open_engine(base) as engine:
        assert await answer(engine, PROMPTS[0], named(tmp_path / "soft", 1)) == wanted
