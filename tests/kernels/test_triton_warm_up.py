"""The warm-up launches every binary that serving needs, and each of them compiles for GPUs as it should."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path

import attrs
import pytest
import torch

from tests.kernels.dummy_driver import run_python
from tests.kernels.fake_decoder import CUDA, MODELS, fake_decoder, fake_steps, record_warm_up
from tests.scale import num_cases
from triolet.kernels._triton import record_launches
from triolet.model.backends.layers import warm_up

REPORT = "from tests.kernels.fake_decoder import compile_and_report; compile_and_report({!r}, {!r}, {}, {!r})"


NUM_STEPS = 3000 if os.environ.get("ALL_CASES") else 100


def random_step(dice: random.Random) -> tuple[tuple[int, int], ...]:
    """Return decodes of any length and perhaps some chunks of prompts."""
    step = [(1, dice.randint(1, 20_000)) for _ in range(dice.choice([0, 1, 8, 100]))]
    for _ in range(dice.choice([0, 0, 1, 3])):
        num_tokens = dice.choice([2, 7, 33, 64, 65, 500])
        step.append((num_tokens, num_tokens + dice.randint(0, 9_000)))
    return tuple(step) or ((1, 1),)


@pytest.mark.parametrize(
    ("model", "packs", "num_steps"),
    [
        ("qwen3-0.6b", True, 40),
        ("qwen3-moe-30b", False, 10),
        *(
            pytest.param(model, packs, NUM_STEPS, marks=pytest.mark.slow)
            for model in MODELS
            for packs in (False, True)
            if not (packs and "moe" in model)
        ),
    ],
)
def test_random_steps_launch_nothing_that_the_warm_up_has_not(
    model: str, packs: bool, num_steps: int
) -> None:
    pytest.importorskip("triton")
    dice = random.Random(7)
    with fake_decoder(model, torch.bfloat16, packs=packs) as decoder:
        steps = fake_steps(decoder)
        warm = record_warm_up(decoder, steps)
        with record_launches() as launched:
            for _ in range(num_steps):
                query_lens, seq_lens = zip(*random_step(dice), strict=True)
                steps.launch(query_lens, seq_lens, is_decode=max(query_lens) == 1)
    assert launched.keys() <= warm.keys()
    assert {variant.kernel.name for variant in launched} == {variant.kernel.name for variant in warm}


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_random_steps_over_a_cache_in_float8_launch_nothing_that_the_warm_up_has_not(
    kv_dtype: torch.dtype,
) -> None:
    pytest.importorskip("triton")
    dice = random.Random(8)
    with fake_decoder("qwen3-0.6b", torch.bfloat16, kv_dtype=kv_dtype) as decoder:
        steps = fake_steps(decoder)
        warm = record_warm_up(decoder, steps)
        with record_launches() as launched:
            for _ in range(40):
                query_lens, seq_lens = zip(*random_step(dice), strict=True)
                steps.launch(query_lens, seq_lens, is_decode=max(query_lens) == 1)
    assert launched.keys() <= warm.keys()
    over_cache = [variant for variant in warm if "MANTISSA" in dict(variant.constants)]
    bits = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}[kv_dtype]
    assert {variant.kernel.name for variant in over_cache} == {"_attention_kernel", "_qkv_prepare_kernel"}
    assert {dict(variant.constants)["MANTISSA"] for variant in over_cache} == {bits}


def test_the_warm_up_of_a_short_model_leaves_out_what_it_cannot_compute() -> None:
    pytest.importorskip("triton")
    with fake_decoder("qwen2-0.5b", torch.float16) as decoder, record_launches() as variants:
        short = attrs.evolve(decoder, spec=attrs.evolve(decoder.spec, max_position=100))
        warm_up.compute_warm_up_steps(short, CUDA, 16)
    assert not any(dict(variant.constants).get("SPLIT") for variant in variants)
    assert any(dict(variant.constants).get("FEW") is False for variant in variants)


COMPILED = tuple(
    itertools.product(
        (("qwen3-0.6b", "packs"), ("llama-8b", ""), ("qwen2-0.5b", ""), ("qwen3-moe-30b", "")),
        ("bfloat16", "float16", "float32"),
        (80, 90, 100),
    )
)

# GPUs before sm_89 have no instruction for E4M3, which is refused there.
OVER_FLOAT8 = tuple(
    itertools.product(
        (("llama-8b", "float8_e4m3fn"), ("qwen3-0.6b", "float8_e4m3fn"), ("llama-8b", "float8_e5m2")),
        ("bfloat16", "float16"),
        (90, 100),
    )
)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Triton's folder of binaries for all cases: models share those of the steps and of sampling."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_and_options", "dtype", "arch"),
    [case for cases in (COMPILED, OVER_FLOAT8) for case in cases[:: len(cases) // num_cases(len(cases))]],
)
def test_every_binary_of_the_warm_up_compiles_without_local_memory(
    model_and_options: tuple[str, str], dtype: str, arch: int, shared_cache: Path
) -> None:
    pytest.importorskip("triton")
    model, options = model_and_options
    report = run_python(REPORT.format(model, dtype, arch, options), TRITON_CACHE_DIR=str(shared_cache))
    lines = [line.split() for line in report.splitlines()]
    assert {name for name, *_ in lines} >= {
        "_attention_kernel",
        "_reduce_kernel",
        "_qkv_prepare_kernel",
        "_draw_kernel",
    }
    for name, part, local, tensor_cores, per_multiprocessor in lines:
        # In float32, without tensor cores, a few numbers may not find a register.
        assert int(local) <= (16 if dtype == "float32" else 0), name
        if part == "decode":
            assert int(per_multiprocessor) >= 2, name
        if part == "prefill" and arch == 90 and dtype != "float32":
            assert int(tensor_cores) > 0, name
