"""Experts of a mixture stay in the blocks of their file, and compute what the same blocks do in a dense model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.kernels.cpu_variants import compiled, each_on_some_variants, on_every_cpu_variant
from tests.model.gguf.test_gguf_gemma4 import write_gemma4
from tests.model.gguf.test_gguf_models import (
    PROMPT,
    WIDE,
    generated,
    model_of,
    more_keys,
    ours,
    with_weights_of,
)
from tests.model.gguf.tiny_gguf import write_gguf
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.errors import ConfigError
from triolet.kernels.cpu.gemm.packing import pack_linear
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.quant_method import QUANT_METHODS, UNQUANTIZED
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

pytestmark = pytest.mark.usefixtures("one_thread")

MOE: dict[str, Any] = {**WIDE, "moe_intermediate_size": 256, "num_hidden_layers": 2, "mlp_only_layers": []}

WAYS = [
    ("float32", None),
    ("bfloat16", None),
    ("float32", "int8-activations"),
    ("bfloat16", "int8-activations"),
]
"""Dtypes and roundings, of which each has its own product with blocks on some CPU."""

Load = Callable[..., CpuDecoder]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a model with the kernels of a variant."""

    def with_kernels(path: Path, variant: str = "", **options: Any) -> CpuDecoder:
        cpp = compiled(variant)
        monkeypatch.setattr(plan, "library", lambda: cpp)
        model = load_model(str(path), LoadOptions(**options)).model
        assert isinstance(model, CpuDecoder)
        return model

    return with_kernels


def tokens(count: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=torch.manual_seed(seed)).tolist()
    return ids


def prompt_and_decodes(model: CpuDecoder) -> Tensor:
    """The logits of a prompt and of three tokens behind it, one by one."""
    driver = PagedDriver(model)
    sequence = driver.sequence(len(PROMPT) + 3)
    prompt = driver.feed(sequence, PROMPT)
    return torch.cat([prompt, driver.feed(sequence, [5, 6, 7], chunk=1)])


# ------------------------------------------------------------------------------------ what is computed


def dense_and_mixed(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    """A dense model, and one whose only expert is the dense one's feed-forward block, with the same bytes."""
    mixed = make_model(
        "qwen3-moe",
        tmp_path / "mixed",
        **MOE,
        num_experts=1,
        num_experts_per_tok=1,
        tie_word_embeddings=False,
    )
    dense = model_of("qwen3", tmp_path / "dense", **WIDE, num_hidden_layers=2, tie_word_embeddings=False)
    weights = load_file(mixed / "model.safetensors")
    plain = {name.replace(".experts.0.", "."): weight for name, weight in weights.items()}
    plain = {name: weight for name, weight in plain.items() if not name.endswith("mlp.gate.weight")}
    save_file(plain, dense / "model.safetensors", metadata={"format": "pt"})
    paths = tmp_path / "dense.gguf", tmp_path / "mixed.gguf"
    for folder, path in zip((dense, mixed), paths, strict=True):
        write_gguf(folder, path, kind)
    one, other = (
        [tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors if "ffn_down" in tensor.name]
        for path in paths
    )
    assert one == other
    return paths


@pytest.mark.parametrize(("dtype", "quantization"), WAYS)
@pytest.mark.parametrize(
    ("kind", "variant"), each_on_some_variants(["Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_K", "Q5_0"])
)
def test_an_only_expert_has_the_bits_of_a_dense_block(
    kind: str, variant: str, dtype: str, quantization: str | None, load: Load, tmp_path: Path
) -> None:
    dense, mixed = (
        prompt_and_decodes(load(path, variant, dtype=dtype, quantization=quantization))
        for path in dense_and_mixed(tmp_path, kind)
    )
    assert mixed.isfinite().all()
    assert mixed.equal(dense)


def file_of(family: str, tmp_path: Path) -> Path:
    """A model with experts whose matrices are all of kept types."""
    path = tmp_path / f"{family}.gguf"
    if family == "gemma4-moe":
        return write_gemma4(make_model(family, tmp_path / family, moe_intermediate_size=64), path, "Q8_0")
    if family == "qwen3-moe":  # experts of Q4_K, and of Q6_K on the way back
        return write_gguf(make_model(family, tmp_path / family, **MOE), path, "Q4_K", other_kind="Q6_K")
    kind = "Q5_0" if family == "gpt-oss" else "Q4_0"
    return write_gguf(model_of(family, tmp_path / family), path, kind, metadata=more_keys(family))


@pytest.mark.parametrize(
    ("family", "variant"), each_on_some_variants(["qwen3-moe", "mixtral", "gpt-oss", "gemma4-moe"])
)
def test_experts_in_blocks_have_the_bits_of_the_converted_ones(
    family: str, variant: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(family, tmp_path)
    # Plain float32 products, with tiles too: those of blocks and of what is not in blocks have the same bits.
    plain = attrs.evolve(UNQUANTIZED, pack=pack_linear)
    monkeypatch.setitem(QUANT_METHODS, None, plain)
    kept = load(path, variant, dtype="float32")
    monkeypatch.setitem(QUANT_METHODS, None, attrs.evolve(plain, keeps_blocks=False))
    whole = load(path, variant, dtype="float32")
    assert kept.num_bytes < whole.num_bytes / 2
    assert prompt_and_decodes(kept).equal(prompt_and_decodes(whole))


def test_a_mixture_of_k_quants_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    compiled()
    folder = make_model("qwen3-moe", tmp_path, **MOE)
    path = write_gguf(folder, tmp_path / "model.gguf", "Q4_K", other_kind="Q6_K")
    assert ours(path) == generated(with_weights_of(path, folder))


@on_every_cpu_variant
@pytest.mark.parametrize(("dtype", "quantization"), WAYS)
def test_neither_other_tokens_nor_threads_change_a_bit_of_what_experts_in_blocks_compute(
    dtype: str, quantization: str | None, variant: str, load: Load, tmp_path: Path
) -> None:
    if variant == "amx" and (dtype, quantization) == ("bfloat16", None):
        pytest.skip("tiles of bfloat16 add in another order than the vectors that multiply up to six rows")
    driver = PagedDriver(
        load(file_of("qwen3-moe", tmp_path), variant, dtype=dtype, quantization=quantization), num_blocks=512
    )
    prompts = [tokens(60 + number, seed=number) for number in range(8)]
    prompts += [tokens(1 + number, seed=number) for number in range(6)]

    def answers(numbers: range | list[int], num_threads: int) -> list[Tensor]:
        """The logits of prompts that are computed together, and of a token behind each."""
        torch.set_num_threads(num_threads)
        sequences = [driver.sequence(len(prompts[number]) + 1) for number in numbers]
        steps = [
            driver.step([(each, prompts[number]) for each, number in zip(sequences, numbers, strict=True)]),
            driver.step([(each, [number]) for each, number in zip(sequences, numbers, strict=True)]),
        ]
        driver.free(*sequences)
        torch.set_num_threads(1)
        return [torch.cat(logits) for logits in zip(*steps, strict=True)]

    together = answers(range(len(prompts)), 1)
    for num_threads in (2, 3):
        for logits, one in zip(answers(range(len(prompts)), num_threads), together, strict=True):
            assert logits.equal(one)
    for number in (0, 7, 8, 13):
        for num_threads in (1, 3):
            assert answers([number], num_threads)[0].equal(together[number])


def test_int8_activations_round_what_experts_are_multiplied_with(load: Load, tmp_path: Path) -> None:
    path = file_of("qwen3-moe", tmp_path)
    right, rounded = (
        prompt_and_decodes(load(path, dtype="float32", quantization=quantization))
        for quantization in (None, "int8-activations")
    )
    assert 0 < (rounded - right).norm() < 0.1 * right.norm()


# ------------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(("dtype", "quantization"), WAYS)
def test_experts_take_the_memory_that_they_take_in_the_file(
    dtype: str, quantization: str | None, load: Load, tmp_path: Path
) -> None:
    in_memory, in_files = list[int](), list[int]()
    for num_experts in (2, 6):
        folder = make_model("qwen3-moe", tmp_path / str(num_experts), **MOE, num_experts=num_experts)
        path = write_gguf(folder, tmp_path / f"{num_experts}.gguf", "Q4_K", other_kind="Q6_K")
        stacks = [each for each in gguf.GGUFReader(path).tensors if each.name.endswith("_exps.weight")]
        in_files.append(sum(int(each.n_bytes) for each in stacks))
        in_memory.append(load(path, dtype=dtype, quantization=quantization).num_bytes)
    # All else is the same in both models: the rows of a router are padded to those of a panel.
    assert in_memory[1] - in_memory[0] <= 1.03 * (in_files[1] - in_files[0])


def test_the_log_says_that_experts_are_kept(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "triolet.model.loading")
    folder = model_of("qwen3-moe", tmp_path, moe_intermediate_size=64)
    load(write_gguf(folder, tmp_path / "model.gguf", "Q8_0"))
    # The routers are float32.
    assert "its weights, Q8_0, are kept; F32, are converted to torch.bfloat16" in caplog.text


def test_a_mixture_without_kept_weights_refuses_int8_activations(tmp_path: Path) -> None:
    compiled()
    path = write_gguf(model_of("qwen3-moe", tmp_path), tmp_path / "model.gguf", "F32")
    with pytest.raises(ConfigError, match="quantised weights that the kernels keep"):
        load_model(str(path), LoadOptions(quantization="int8-activations"))


def test_experts_in_blocks_come_from_the_cache_of_packed_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled()
    caplog.set_level("INFO", "triolet.model")
    path, found = file_of("qwen3-moe", tmp_path), list[Tensor]()
    for said in ("are kept", "the packed weights are mapped from"):
        caplog.clear()
        model = load_model(str(path), LoadOptions(dtype="float32", weights_cache=str(tmp_path))).model
        assert isinstance(model, CpuDecoder)
        assert said in caplog.text
        assert "Q4_K, Q6_K, are kept" in caplog.text or "Q6_K, Q4_K, are kept" in caplog.text
        found.append(prompt_and_decodes(model))
    assert found[0].equal(found[1])
