"""Greedy answers of every quantised format are those of transformers on the weights that the format stands for.

What the weights are is computed without the program: by the writers of `tests.model.quantized.writers`, or by gguf-py.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import gguf
import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

import triolet
from tests.e2e.test_parity import answer, answer_all, generate
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.quantized import writers
from tests.model.quantized.test_quantized_folders import FORMATS, FP8, GPTQ
from tests.model.quantized.writers import Writer, write_folders, write_mxfp4_folders
from tests.model.tiny import make_model
from triolet import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
NUM_LAYERS = 2


def gptq_formats() -> dict[str, tuple[Writer, dict[str, Any]]]:
    return {
        f"gptq-{bits}-v{version}{'-act-order' * act_order}": (
            # Zeros of 1 and 2 have the mean of two bits; with 3 all weights would tend to one side.
            writers.gptq(
                bits,
                32,
                act_order=act_order,
                version=version,
                zeros_below=3 if (bits, version) == (2, 1) else None,
            ),
            {
                **GPTQ,
                "bits": bits,
                "desc_act": act_order,
                "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
            },
        )
        for bits in (2, 3, 4, 8)
        for version in (1, 2)
        for act_order in (False, True)
    }


FOLDERS: dict[str, tuple[Writer, dict[str, Any]]] = {
    **{name: made for name, made in FORMATS.items() if not name.startswith("gptq")},
    **gptq_formats(),
    "fp8-group": (writers.float_quantized("group"), FP8),
    "fp8-block-of-compressed-tensors": (writers.float_quantized("block"), FP8),
    "fp8-static": (
        writers.with_input_scale(writers.float_quantized("tensor")),
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
}
GGUF_KINDS = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip


@attrs.frozen
class Case:
    """A quantised model, and what transformers answers with the same weights in plain."""

    model: Path
    prompts: list[list[int]]
    answers: list[tuple[int, ...]]


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 30 tokens; the last one begins like the one before it."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 320, (length,), generator=generator).tolist() for length in (1, 9, 17, 30)]
    return [*prompts, prompts[3][:24] + prompts[1]]


def write_folder(name: str, plain: Path, quantized: Path) -> Path:
    make_model("qwen3", plain, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False)
    write_folders(plain, quantized, *FOLDERS[name])
    weights = load_file(plain / "model.safetensors")
    linear = [weight.flatten() for name, weight in weights.items() if name.endswith("proj.weight")]
    # The writers' weights are small. With this the model computes what it would with weights as lively as those of
    # `randomise`: norms make the inputs larger, and the outputs meet embeddings that are as small as they are.
    factor = 0.25 / float(torch.cat(linear).std())
    for folder in (plain, quantized):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.embed_tokens.weight"] /= factor
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor *= factor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return quantized


def write_experts(name: str, plain: Path, quantized: Path) -> Path:
    make_model("gpt-oss", plain, num_hidden_layers=NUM_LAYERS)
    write_mxfp4_folders(plain, quantized)
    return quantized


def write_file(kind: str, plain: Path, quantized: Path) -> Path:
    """Write a GGUF file, and the values that gguf-py reads from it as the plain folder."""
    wide: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
    }  # k-quants take rows of 256 values
    make_model("qwen3", plain, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False, **wide)
    quantized.mkdir()
    path = write_gguf(plain, quantized / "model.gguf", kind)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, NUM_LAYERS)
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        found = read[names.get_name(name, (".weight",)) or ""]
        values = gguf.dequantize(found.data, found.tensor_type).astype(np.float32)
        tensors[name] = torch.from_numpy(values.reshape(tensor.shape).copy())
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return path


READERS: dict[str, Callable[[str, Path, Path], Path]] = {
    **dict.fromkeys(FOLDERS, write_folder),
    "mxfp4": write_experts,
    **dict.fromkeys(GGUF_KINDS, write_file),
}
QUICK = ("gptq-3-v1-act-order", "awq", "fp8-block", "bnb-nf4-nested", "mxfp4", "Q4_K")
"""One of each kind; the others differ from these in how their weights are read."""

EACH = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow], id=name) for name in READERS]
SLOW = [pytest.param(name, marks=[pytest.mark.slow], id=name) for name in READERS]


_made: dict[str, Case] = {}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    name = request.param
    if name not in _made:
        folder = Path(tempfile.mkdtemp(name.replace("/", "-")))
        model = READERS[name](name, folder / "plain", folder / "quantized")
        prompts = make_prompts()
        answers, _ = generate(folder / "plain", prompts)
        # A model that repeats itself everywhere would hide a wrong position, or a wrong weight.
        variety = [len(set(given)) for given in answers]
        assert sorted(variety)[len(variety) // 2] > NUM_TOKENS // 8, variety
        _made[name] = Case(model, prompts, answers)
    return _made[name]


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH, indirect=True)
async def test_alone_and_in_chunks_of_seven_tokens(case: Case) -> None:
    async with triolet.open_engine(
        model=str(case.model), runner="inline", dtype="float32", num_kv_blocks=64, max_num_batched_tokens=7
    ) as engine:
        for prompt, expected in zip(case.prompts, case.answers, strict=True):
            assert await answer(engine, prompt, GREEDY) == expected


@pytest.mark.parametrize("case", SLOW, indirect=True)
@pytest.mark.parametrize("num_kv_blocks", [200, 30], ids=["all-at-once", "preempted"])
async def test_in_a_batch_with_blocks_for_all_and_for_few(case: Case, num_kv_blocks: int) -> None:
    async with triolet.open_engine(
        model=str(case.model), runner="inline", dtype="float32", num_kv_blocks=num_kv_blocks, block_size=4
    ) as engine:
        assert await answer_all(engine, case.prompts, GREEDY) == case.answers
        assert (engine.statistics().num_preemptions > 0) == (num_kv_blocks == 30)


@pytest.mark.parametrize("case", SLOW, indirect=True)
async def test_in_a_process_that_is_killed_and_started_again(case: Case) -> None:
    answers: dict[int, list[int]] = {}
    async with triolet.open_engine(
        model=str(case.model), runner="process", dtype="float32", num_kv_blocks=64
    ) as engine:

        async def ask(index: int) -> None:
            answers[index] = []
            async with engine.generate(case.prompts[index], GREEDY) as stream:
                async for output in stream:
                    if index == 0 and not answers[0]:
                        assert engine.model_info.process_id is not None
                        os.kill(engine.model_info.process_id, signal.SIGKILL)
                    answers[index] = list(output.outputs[0].token_ids)

        async with trio.open_nursery() as nursery:
            for index in range(len(case.prompts)):
                nursery.start_soon(ask, index)
        assert engine.statistics().num_restarts == 1
    assert [tuple(answers[index]) for index in range(len(case.prompts))] == case.answers
