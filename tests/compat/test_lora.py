"""LoRA adapters under vLLM's interfaces: answers are those of merged models, and the verbs return what vLLM's do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.model.tiny import make_model
from tests.model.tiny_adapters import ATTENTION, LINEAR, every_layer, is_greedy_answer, make_adapter, merged
from triolet.compat import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    LLMEngine,
    LoRARequest,
    RequestManager,
    StreamingRequest,
)
from triolet.core.request.params import SamplingParams
from triolet.errors import AdapterError, AdaptersPinned

PROMPT = {"prompt_token_ids": [(7 * place) % 256 for place in range(20)]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FIELDS: dict[str, Any] = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "lora_dtype": "auto",
    "fully_sharded_loras": False,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "tiny", with_tokenizer=True)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    root = tmp_path_factory.mktemp("adapters")
    folders = [
        make_adapter(base, root / "all", every_layer(LINEAR), rank=8, alpha=16, seed=1),
        make_adapter(base, root / "attention", every_layer(ATTENTION), rank=4, alpha=16, seed=2),
        make_adapter(base, root / "third", every_layer(ATTENTION), rank=2, alpha=16, seed=3),
    ]
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, start=1)]


def test_an_llm_answers_each_prompt_with_its_adapter(
    base: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    llm = LLM(str(base), dtype="float32", num_gpu_blocks_override=64, max_cpu_loras=2, **FIELDS)
    # more adapters than slots, and one prompt of all
    wanted = [adapters[0], None, adapters[1], adapters[2]]
    outputs = llm.generate([PROMPT] * 4, GREEDY, use_tqdm=False, lora_request=wanted)
    assert [output.lora_request for output in outputs] == wanted
    found = [list(output.outputs[0].token_ids) for output in outputs]
    for number, (adapter, tokens) in enumerate(zip(wanted, found, strict=True)):
        model = merged(base, None if adapter is None else Path(adapter.path), tmp_path / str(number))
        assert is_greedy_answer(model, PROMPT["prompt_token_ids"], tokens)
    assert len(set(map(tuple, found))) == 4
    with pytest.raises(ValueError, match=r"lengths of prompts \(2\) and lora_request \(1\)"):
        llm.generate([PROMPT] * 2, GREEDY, lora_request=[None])
    [[message]] = [[{"role": "user", "content": "Hello"}]]
    chats = llm.chat([[message]] * 2, GREEDY, use_tqdm=False, lora_request=adapters[0])
    assert [output.lora_request for output in chats] == [adapters[0]] * 2


def test_the_verbs_return_what_those_of_vllm_return(
    base: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    llm = LLM(str(base), num_gpu_blocks_override=16, max_cpu_loras=2, **FIELDS)
    one, two, three = adapters
    assert llm.list_loras() == set()
    assert llm.add_lora(one)
    assert llm.add_lora(two)
    assert llm.add_lora(one)  # only touched
    assert llm.add_lora(three)  # in the place of the one that was used least recently
    assert llm.list_loras() == {1, 3}
    with pytest.raises(ValueError, match=r"Pinning failed\. LoRA 7 is not registered\."):
        llm.pin_lora(7)
    assert llm.pin_lora(1)
    assert llm.pin_lora(3)
    with pytest.raises(AdaptersPinned, match="pinned items") as caught:
        llm.add_lora(two)
    assert isinstance(caught.value, RuntimeError)
    assert llm.remove_lora(3)
    assert not llm.remove_lora(3)
    with pytest.raises(AdapterError, match="is no folder"):
        llm.generate(PROMPT, GREEDY, lora_request=LoRARequest("nowhere", 9, str(tmp_path / "nowhere")))
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.list_loras() == {1}


async def test_an_async_llm_takes_adapters_as_an_llm_does(base: Path, adapters: list[LoRARequest]) -> None:
    given: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64, "runner": "inline"}
    alone = LLM(engine=LLMEngine.from_engine_args(AsyncEngineArgs(str(base), **given, **FIELDS)))
    [right] = alone.generate(PROMPT, GREEDY, use_tqdm=False, lora_request=adapters[0])
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(str(base), **given, **FIELDS)) as llm:
        outputs = [output async for output in llm.generate(PROMPT, GREEDY, "r", adapters[0])]
        assert outputs[-1].outputs[0].token_ids == right.outputs[0].token_ids
        assert outputs[-1].lora_request == adapters[0]
        request = StreamingRequest("s", PROMPT, GREEDY, None, adapters[1])
        outputs = [output async for output in await RequestManager(llm).add_request(request)]
        assert outputs[-1].lora_request == adapters[1]
        assert await llm.list_loras() == {1, 2}
        assert await llm.add_lora(adapters[1])
        assert await llm.pin_lora(2)
        assert await llm.remove_lora(1)
        assert not await llm.remove_lora(1)
        config = await llm.get_lora_config()
        assert config is not None
        assert (config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (2, 8, 2)


async def test_an_embedding_with_an_adapter_is_that_of_the_merged_model(
    base: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
        "runner": "inline",
        "convert": "embed",
    }
    args = AsyncEngineArgs(str(base), **given, **FIELDS)
    wanted = [adapters[0], None, adapters[1]]
    outputs = LLM(engine=LLMEngine.from_engine_args(args)).embed(
        [PROMPT] * 3, use_tqdm=False, lora_request=wanted
    )
    for number, adapter in enumerate(wanted):
        model = merged(base, None if adapter is None else Path(adapter.path), tmp_path / str(number))
        with torch.inference_mode():
            states = model(
                torch.tensor([PROMPT["prompt_token_ids"]]), output_hidden_states=True
            ).hidden_states
        right = functional.normalize(states[-1][0, -1], dim=0)
        assert (torch.tensor(outputs[number].outputs.embedding) - right).abs().max() < 1e-5
    async with AsyncLLM.from_engine_args(args) as llm:
        found = [output async for output in llm.encode(PROMPT, None, "r", adapters[1])]
        assert found[0].outputs.data.tolist() == pytest.approx(list(outputs[2].outputs.embedding), abs=1e-6)
