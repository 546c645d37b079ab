"""The decoder that runs a step as one call computes what the decoder in torch computes."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.kernels.cpu_variants import compiled, each_on_some_variants, on_every_cpu_variant
from tests.model.paged import PagedDriver
from tests.model.tiny import VOCAB_SIZE, make_model
from triolet.errors import KernelShapeError
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.cpu.gemm.packing import pack_linear
from triolet.model.architectures import families
from triolet.model.backends.cpu import plan
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.torch_decoder import Decoder
from triolet.model.interface import CausalModel, ForwardBatch, ModelSpec
from triolet.model.loading.model import load_model
from triolet.model.loading.options import LoadOptions

PLANNED = (
    "llama", "llama-biased", "smollm", "mistral", "qwen2", "qwen2-yarn", "qwen3", "phi3",
    "gemma", "gemma2", "gemma3", "gemma4", "gemma4-small", "gemma4-moe", "gpt2",
    "granite", "smollm3", "olmo2", "olmo3", "exaone4", "cohere2", "glm", "glm4", "starcoder2",
    "ministral", "ministral3", "mixtral", "qwen2-moe", "qwen3-moe", "granite-moe", "gpt-oss",
    "helium", "ernie4.5", "ernie4.5-biased", "seed-oss", "seed-oss-biased", "granite-moe-shared", "olmoe", "glm4-moe",
    "arcee", "jais2", "cwm", "opt", "opt-unbiased", "gpt-neox", "gpt-neox-serial", "phi", "phi-normed", "stablelm",
    "stablelm-parallel", "cohere", "cohere-normed", "apertus", "apertus-biased", "hunyuan", "hunyuan-moe",
    "minimax-m2", "ernie4.5-moe", "ernie4.5-moe-sparse", "solar-open", "exaone-moe",
)  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CausalModel]:
    """Load a model with the kernels of a variant, or without any."""

    def with_kernels(folder: Path, variant: str | None, dtype: str = "auto") -> CausalModel:
        cpp = None if variant is None else compiled(variant)
        monkeypatch.setattr(plan, "library", lambda: cpp)
        return load_model(str(folder), LoadOptions(dtype=dtype)).model

    return with_kernels


def tokens(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (count,), generator=torch.manual_seed(seed)).tolist()
    return ids


@pytest.fixture(scope="module")
def in_torch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ModelSpec, Tensor]]:
    """A family's specification and logits in torch, which are the same beside each kind of CPU."""

    @functools.cache
    def answer(family: str) -> tuple[ModelSpec, Tensor]:
        folder = make_model(family, tmp_path_factory.mktemp(family))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "library", lambda: None)
            model = load_model(str(folder)).model
        assert isinstance(model, Decoder)
        return model.spec, PagedDriver(model).once(tokens(45))

    return answer


@pytest.mark.parametrize(("family", "variant"), each_on_some_variants(PLANNED))
def test_the_plan_computes_the_logits_of_the_torch_decoder(
    family: str,
    variant: str,
    load: Callable[..., CausalModel],
    in_torch: Callable[[str], tuple[ModelSpec, Tensor]],
    tmp_path: Path,
) -> None:
    planned = load(make_model(family, tmp_path), variant)
    spec, logits = in_torch(family)
    assert isinstance(planned, CpuDecoder)
    assert planned.spec == spec
    torch.testing.assert_close(PagedDriver(planned).once(tokens(45)), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "overrides", [{"hidden_size": 60, "intermediate_size": 70, "head_dim": 10}, {"vocab_size": 333}]
)
def test_widths_need_be_no_multiples_of_the_vectors(
    overrides: dict[str, Any], load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    folder = make_model("llama-biased", tmp_path, **overrides)
    ids = tokens(20)
    planned, in_torch = (PagedDriver(load(folder, variant)).once(ids) for variant in ("", None))
    torch.testing.assert_close(planned, in_torch, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
def test_gelu_gates_are_planned_too(
    activation: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    folder = make_model("llama-plain", tmp_path, hidden_act=activation)
    ids = tokens(20)
    models = load(folder, ""), load(folder, None)
    assert isinstance(models[0], CpuDecoder)
    planned, in_torch = (PagedDriver(model).once(ids) for model in models)
    torch.testing.assert_close(planned, in_torch, rtol=1e-4, atol=1e-4)


def test_what_the_plan_does_not_know_stays_in_torch(load: Callable[..., CausalModel], tmp_path: Path) -> None:
    # It does not look for the best groups of experts.
    folder = make_model("glm4-moe", tmp_path, n_group=3, topk_group=2)
    assert isinstance(load(folder, ""), Decoder)


def test_float16_stays_in_torch(load: Callable[..., CausalModel], tmp_path: Path) -> None:
    assert isinstance(load(make_model("llama-plain", tmp_path), "", "float16"), Decoder)


@pytest.mark.parametrize(
    ("family", "variant"),
    each_on_some_variants(
        [
            *("llama", "qwen3", "gemma2", "gpt2", "olmo2", "cohere2", "qwen2-moe", "gpt-oss"),
            *("gpt-neox", "stablelm-parallel", "hunyuan"),
        ]
    ),
)
def test_a_row_alone_and_in_a_batch_of_32_has_the_same_logits_bit_for_bit(
    family: str, variant: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    driver = PagedDriver(load(make_model(family, tmp_path), variant), num_blocks=512)
    prompts = [tokens(5 + row % 9, seed=row) for row in range(32)]

    def answers(rows: list[int]) -> list[Tensor]:
        """The logits of the last prompt token and of two decodes, for prompts that are computed together."""
        sequences = [driver.sequence(40) for _ in rows]
        steps = [
            driver.step([(sequence, prompts[row]) for sequence, row in zip(sequences, rows, strict=True)])
        ]
        steps += [driver.step([(sequence, [row]) for sequence, row in zip(sequences, rows, strict=True)])]
        steps += [driver.step([(sequence, [7]) for sequence in sequences])]
        driver.free(*sequences)
        return [torch.stack([logits[-1] for logits in row]) for row in zip(*steps, strict=True)]

    together = answers(list(range(32)))
    for row in (0, 13, 31):
        assert answers([row])[0].equal(together[row])


@on_every_cpu_variant
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_prompt_alone_and_among_so_many_tokens_that_rows_are_shared_out_has_the_same_logits_bit_for_bit(
    num_threads: int, quantization: str | None, variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpp = compiled(variant)
    monkeypatch.setattr(plan, "library", lambda: cpp)
    model = load_model(str(make_model("llama", tmp_path)), LoadOptions(quantization=quantization)).model
    driver, before = PagedDriver(model, num_blocks=512), torch.get_num_threads()
    prompts = [tokens(30 + number, seed=number) for number in range(13)]
    assert sum(map(len, prompts)) > 384  # MANY_TOKENS in decoder.cpp
    try:
        torch.set_num_threads(num_threads)
        together = driver.step([(driver.sequence(48), prompt) for prompt in prompts])
        torch.set_num_threads(1)
        alone = [driver.once(prompt) for prompt in prompts]
    finally:
        torch.set_num_threads(before)
    assert all(one.equal(other) for one, other in zip(together, alone, strict=True))


@on_every_cpu_variant
@pytest.mark.parametrize("family", ["qwen2-moe", "gpt-oss"])
def test_tokens_of_long_prompts_that_share_experts_change_no_bit_of_each_other(
    family: str, variant: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path)
    driver, in_torch = PagedDriver(load(folder, variant), num_blocks=512), PagedDriver(load(folder, None))
    prompts = [tokens(60 + number, seed=number) for number in range(8)]
    together = driver.step([(driver.sequence(80), prompt) for prompt in prompts])
    for logits, prompt in zip(together[:2], prompts[:2], strict=True):
        assert logits.equal(driver.once(prompt))
        torch.testing.assert_close(logits, in_torch.once(prompt), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2-moe"])
def test_the_number_of_threads_changes_no_bit(
    family: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    driver = PagedDriver(load(make_model(family, tmp_path), ""))
    before, found = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            found.append(driver.once(tokens(40)))
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1]) and found[0].equal(found[2])


@pytest.mark.parametrize(("num_tokens", "variant"), each_on_some_variants([11, 12, 19, 70]))
def test_rows_of_a_panel_that_threads_share_have_the_bits_that_one_thread_gives(
    num_tokens: int, variant: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    # 288 outputs are five panels of AVX-512's and nine of AVX2's: with 2 to 4 threads some are left over.
    folder = make_model("llama", tmp_path, hidden_size=288, num_hidden_layers=1)
    driver, before, found = PagedDriver(load(folder, variant)), torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 4):
            torch.set_num_threads(num_threads)
            found.append(driver.once(tokens(num_tokens)))
    finally:
        torch.set_num_threads(before)
    assert all(logits.equal(found[0]) for logits in found[1:])


@pytest.mark.parametrize(("num_tokens", "variant"), each_on_some_variants([3, 9, 25, 120]))
@pytest.mark.parametrize("overrides", [{}, {"hidden_size": 60, "intermediate_size": 70, "head_dim": 10}])
def test_bfloat16_is_as_near_to_float32_as_transformers_own(
    num_tokens: int,
    overrides: dict[str, Any],
    variant: str,
    load: Callable[..., CausalModel],
    tmp_path: Path,
) -> None:
    folder = make_model("qwen3", tmp_path, dtype=torch.bfloat16, **overrides)
    ours = PagedDriver(load(folder, variant)).once(tokens(num_tokens)).float()
    truth, theirs = (
        answer_of_transformers(dtype, num_tokens, **overrides) for dtype in (torch.float32, torch.bfloat16)
    )
    assert (ours - truth).norm() <= (theirs - truth).norm()


@functools.cache
def answer_of_transformers(dtype: torch.dtype, num_tokens: int, **overrides: Any) -> Tensor:
    """The logits of weights in bfloat16, computed in a dtype."""
    with tempfile.TemporaryDirectory() as folder:
        make_model("qwen3", Path(folder), dtype=torch.bfloat16, **overrides)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([tokens(num_tokens)])).logits[0].float()
    return logits


def test_a_padding_token_writes_nothing(load: Callable[..., CausalModel], tmp_path: Path) -> None:
    driver = PagedDriver(load(make_model("llama", tmp_path), ""))
    sequence = driver.sequence(8)
    driver.feed(sequence, tokens(4))
    before = [(layer.keys.clone(), layer.values.clone()) for layer in driver.cache]
    padding = AttentionMetadata(
        cu_query_lens=torch.tensor([0, 0], dtype=torch.int32),
        seq_lens=torch.tensor([4], dtype=torch.int32),
        block_tables=torch.tensor([sequence.block_table], dtype=torch.int32),
        slot_mapping=torch.tensor([-1, -1]),
        query_lens_host=(0,),
        seq_lens_host=(4,),
    )
    none_wanted = torch.empty(0, dtype=torch.int64)
    logits = driver.model.forward_logits(
        ForwardBatch(
            token_ids=torch.tensor([1, 2]),
            positions=torch.tensor([0, 1]),
            cache=driver.cache,
            attention=padding,
            logits_indices=none_wanted,
        )
    )
    assert logits.shape == (0, VOCAB_SIZE)
    for (keys, values), layer in zip(before, driver.cache, strict=True):
        torch.testing.assert_close((layer.keys, layer.values), (keys, values), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (torch.zeros(4, 6, dtype=torch.float16), {}),
        (torch.zeros(4, 5, dtype=torch.bfloat16), {}),
        (torch.zeros(6, 4).T, {}),
        (torch.zeros(3, 4), {"gated": True}),
        (torch.zeros(4, 6), {"bias": torch.zeros(3)}),
    ],
)
def test_weights_that_can_not_be_packed_are_refused(weight: Tensor, options: dict[str, Any]) -> None:
    cpp: ctypes.CDLL = compiled("")
    with pytest.raises(KernelShapeError, match="must agree"):
        pack_linear(cpp, weight, **options)


@pytest.mark.parametrize(("family", "variant"), each_on_some_variants(PLANNED))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_and_cache_have_the_same_bits_whatever_rows_logits_are_asked_for(
    family: str, variant: str, dtype: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    """The last layer computes no more of the other rows than their keys and values."""
    model = load(make_model(family, tmp_path), variant, dtype)
    chunks = [tokens(count, seed=count) for count in (1, 5, 30, 64, 3)]

    def computed(rows: Sequence[int]) -> tuple[Tensor, ...]:
        """The logits of these rows, those of a decode after them, and the bits of the cache."""
        driver = PagedDriver(model)
        sequences = [driver.sequence(len(chunk) + 1) for chunk in chunks]
        [logits] = driver.step(list(zip(sequences, chunks, strict=True)), logits_indices=rows)
        decoded = torch.cat(driver.step([(sequence, [7]) for sequence in sequences]))
        return (
            logits,
            decoded,
            *(kept.view(torch.int8) for layer in driver.cache for kept in (layer.keys, layer.values)),
        )

    every, *rest = computed(range(sum(map(len, chunks))))
    for rows in ([0, 5, 35, 99, 102], [97], [98, 99, 100], []):
        logits, *others = computed(rows)
        assert logits.equal(every[rows])
        assert all(one.equal(other) for one, other in zip(others, rest, strict=True))


@on_every_cpu_variant
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_decode_with_a_draft_has_the_logits_of_decodes_one_by_one_bit_for_bit(
    family: str, variant: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    driver = PagedDriver(load(make_model(family, tmp_path), variant), num_blocks=512)
    for num_tokens in (2, 5, 9, 17):
        one_by_one, at_once = driver.sequence(100), driver.sequence(100)
        driver.step([(one_by_one, tokens(70)), (at_once, tokens(70))])
        ids = tokens(num_tokens, seed=2)
        alone = torch.cat([driver.step([(one_by_one, [token_id])])[0] for token_id in ids])
        [together] = driver.step([(at_once, ids)])
        assert together.equal(alone)
        driver.free(one_by_one, at_once)


@on_every_cpu_variant
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss"])
def test_each_layer_reads_and_writes_the_blocks_of_its_cache_group(
    family: str, variant: str, load: Callable[..., CausalModel], tmp_path: Path
) -> None:
    folder = make_model(family, tmp_path)
    for model in (load(folder, variant), load(folder, None)):
        logits = []
        for num_groups in (1, 2, 3):
            driver = PagedDriver(model, num_blocks=256, num_groups=num_groups)
            first = driver.sequence(100)
            driver.step([(first, tokens(48))])
            # They begin with blocks of the first one, as after a hit of the prefix cache.
            others = [driver.sequence(100) for _ in range(5)]
            for other in others:
                other.block_table[:12], other.length = first.block_table[:12], 48
            steps = [[(one, tokens(n + 1, seed=n)) for n, one in enumerate((first, *others))]]
            steps += [[(one, tokens(1, seed=n)) for n, one in enumerate((first, *others))] for _ in range(3)]
            logits.append([chunk for step in steps for chunk in driver.step(step)])
        for grouped in logits[1:]:
            assert all(ours.equal(expected) for ours, expected in zip(grouped, logits[0], strict=True))


def test_a_family_that_does_not_say_that_the_cpu_decoder_runs_it_goes_to_torch(
    load: Callable[..., CausalModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    twin = families.Family(families._FAMILIES["LlamaForCausalLM"].parse)
    folder = make_model("llama", tmp_path)
    ids = tokens(20)
    expected = PagedDriver(load(folder, None)).once(ids)
    monkeypatch.setitem(families._FAMILIES, "TwinForCausalLM", twin)
    path = folder / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "TwinForCausalLM"))
    model = load(folder, "")
    assert isinstance(model, Decoder)
    torch.testing.assert_close(PagedDriver(model).once(ids), expected, rtol=0, atol=0)
