"""Pooled requests of every kind of model in every situation: alone, in a batch, in chunks, cached, after a failed step.

The right answers are transformers' own. Embeddings of decoders, beside text and after a kill, are in test_embeddings.py
and test_sentence_transformers.py; models that classify and encoders generate nothing, so that nothing can be beside
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import triolet
from tests.e2e.test_embeddings import PROMPTS, hidden_states
from tests.e2e.test_encoders import TEXTS, ids_of
from tests.e2e.test_encoders import hidden_states as encoder_states
from tests.model.tiny import change_json, make_model
from tests.model.tiny_encoders import add_modules, make_encoder
from triolet import Engine, PoolingParams
from triolet.core.step_plan import StepPlan, StepResult
from triolet.model.runner import ModelRunner

IDS = [ids_of(text) for text in TEXTS]


@attrs.frozen
class Case:
    """A model and what its pooled requests give."""

    prompts: Sequence[Sequence[int]]
    expected: list[Tensor]
    fields: dict[str, Any] = attrs.field(factory=dict)  # of the engine
    params: Sequence[PoolingParams | None] = (None,) * 16
    is_decoder: bool = False
    reads_cache: bool = False


def embedding(family: str, mode: str, folder: Path) -> Case:
    model = make_encoder(family, folder)
    dense = ((32, 48), (48, 24)) if family == "gemma" else ()
    add_modules(folder, mode, dense, max_seq_length=64)
    vectors = [encoder_states(model, ids) for ids in IDS]
    vectors = [hidden.mean(dim=0) if mode == "mean_tokens" else hidden[0] for hidden in vectors]
    for index in range(2, 2 + len(dense)):
        weight = load_file(folder / f"{index}_Dense/model.safetensors")["linear.weight"]
        vectors = [weight @ vector for vector in vectors]
    return Case(IDS, [functional.normalize(vector, dim=0) for vector in vectors])


def cross_encoder(folder: Path) -> Case:
    model = make_encoder("bert", folder, "ForSequenceClassification", num_labels=1)
    prompts, expected, query = [], [], ids_of("w1 w2")
    for ids in IDS:
        prompts.append((query + ids[1:])[:64])
        types = torch.tensor([[0] * len(query) + [1] * (len(prompts[-1]) - len(query))])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompts[-1]]), token_type_ids=types).logits
        expected.append(logits[0].sigmoid())
    return Case(prompts, expected, params=[PoolingParams(token_type_start=len(query))] * 16)


def reranker(folder: Path) -> Case:
    make_model("qwen3", folder, with_tokenizer=True)
    change_json(folder / "config.json", classifier_from_token=["n", "y"])
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([list(prompt)])).logits[0, -1] for prompt in PROMPTS]
    expected = [(each[vocabulary["y"]] - each[vocabulary["n"]]).sigmoid()[None] for each in logits]
    return Case(PROMPTS, expected, {"convert": "classify"}, is_decoder=True, reads_cache=True)


def reward(folder: Path) -> Case:
    """A head of one number after the last token."""
    base = make_model("qwen3", folder, with_tokenizer=True)
    model = transformers.Qwen3ForSequenceClassification.from_pretrained(
        base, num_labels=1, problem_type="regression", dtype=torch.float32
    ).eval()
    model.config.pad_token_id = 0
    model.save_pretrained(base)
    with torch.no_grad():
        expected = [model(torch.tensor([list(prompt)])).logits[0] for prompt in PROMPTS]
    return Case(PROMPTS, expected, is_decoder=True, reads_cache=True)


def process_reward(folder: Path) -> Case:
    """A head of two layers after every token."""
    make_model("qwen2", folder, with_tokenizer=True)
    torch.manual_seed(3)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    with torch.no_grad():
        expected = [head(hidden_states(folder, prompt)).softmax(dim=-1) for prompt in PROMPTS]
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"score.{name}": value.detach() for name, value in head.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(folder / "config.json", architectures=["Qwen2ForProcessRewardModel"])
    return Case(PROMPTS, expected, is_decoder=True)


async def check(engine: Engine, case: Case, places: Sequence[int]) -> int:
    """Compare the results of some prompts, asked for together; return how many tokens were found in the cache."""
    params = case.params[places[0]]
    outputs = await engine.encode_all([list(case.prompts[place]) for place in places], params)
    for place, output in zip(places, outputs, strict=True):
        found = torch.tensor(output.outputs.data.tolist())
        assert (found - case.expected[place]).abs().max() <= 1e-5, place
    return sum(output.num_cached_tokens for output in outputs)


def fail_once(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let one step fail, with half of the prompts underway."""
    left, execute = iter(range(after)), ModelRunner.execute

    def failing(self: ModelRunner, plan: StepPlan) -> StepResult:
        if next(left, None) == after - 1:
            raise RuntimeError("planted")
        return execute(self, plan)

    monkeypatch.setattr(ModelRunner, "execute", failing)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(reranker, id="reranker"),
        *(
            pytest.param(make, id=name, marks=pytest.mark.slow)
            for name, make in (
                ("cross-encoder", cross_encoder),
                ("reward", reward),
                ("process reward", process_reward),
                ("bert", lambda folder: embedding("bert", "mean_tokens", folder)),
                ("xlm-roberta", lambda folder: embedding("xlm-roberta", "cls_token", folder)),
                ("modernbert", lambda folder: embedding("modernbert", "mean_tokens", folder)),
                ("gemma with dense layers", lambda folder: embedding("gemma", "mean_tokens", folder)),
            )
        ),
    ],
)
async def test_a_pooled_request_gives_the_same_alone_in_a_batch_in_chunks_cached_and_after_a_failed_step(
    make: Callable[[Path], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(tmp_path)
    fields = {"dtype": "float32", "runner": "thread", "log_stats": False, **case.fields}
    every = range(len(case.prompts))
    async with triolet.open_engine(model=str(tmp_path), **fields) as engine:
        await check(engine, case, [13])
        await check(engine, case, every)
        cached = await check(engine, case, [15])
        assert (cached > 0) == case.reads_cache
    small: dict[str, Any] = {"max_num_batched_tokens": 16 if case.is_decoder else 64, "max_num_seqs": 4}
    if case.is_decoder:
        small["num_kv_blocks"] = 100
    async with triolet.open_engine(model=str(tmp_path), **fields, **small) as engine:
        await check(engine, case, every)  # in chunks, where the model allows it
        engine.reset_prefix_cache()
        fail_once(monkeypatch, 3)
        await check(engine, case, every)
        assert engine.statistics().num_restarts == 1
