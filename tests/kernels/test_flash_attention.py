"""Prompts by torch's flash attention beside decodes by the Triton kernel; the former is a stand-in here."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.flash import FakeFlash
from tests.kernels.targets import PagedCase, Target, on_every_triton_target
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.flash_attention import FlashAttention
from triolet.kernels.paged_attention import paged_attention_triton

MIXED = [(30, 30), (1, 65), (40, 90), (2, 3), (0, 3), (1, 1), (17, 17)]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    fake = FakeFlash()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn_out", fake)
    return fake


@on_every_triton_target
@pytest.mark.parametrize("sliding_window", [None, 1, 16])
@pytest.mark.parametrize("num_heads", [2, 8])
def test_prompts_and_decodes_of_one_step_agree_with_the_truth(
    target: Target, flash: FakeFlash, num_heads: int, sliding_window: int | None
) -> None:
    if target.device != "cpu":
        pytest.skip("the stand-in is on the CPU")
    case = PagedCase.make(MIXED, num_heads=num_heads, num_kv_heads=2, num_padding_rows=3, target=target)
    got = paged_attention_triton(
        case.query, case.keys, case.values, case.metadata,
        scale=case.scale, sliding_window=sliding_window, prompts=FlashAttention("fa3"),
    )  # fmt: skip
    torch.testing.assert_close(got.double(), case.truth(sliding_window=sliding_window), **target.tolerance)
    (call,) = flash.calls
    few = 16 // (num_heads // 2)
    assert call["seqused_k"] == [seq_len if query_len > few else 0 for query_len, seq_len in MIXED]
    assert call["num_splits"] == 1, "else a row's bits depend on the rows beside it"


@on_every_triton_target
def test_the_lengths_of_a_graph_are_read_from_the_device(target: Target, flash: FakeFlash) -> None:
    if target.device != "cpu":
        pytest.skip("the stand-in is on the CPU")
    case = PagedCase.make(MIXED, num_padding_rows=5, target=target)
    bounds = attrs.evolve(
        case.metadata,
        query_lens_host=(len(case.query), *[0] * (len(MIXED) - 1)),
        seq_lens_host=(200,) * len(MIXED),
        has_any_lengths=True,
    )
    got = paged_attention_triton(
        case.query, case.keys, case.values, bounds, scale=case.scale, prompts=FlashAttention("fa3")
    )
    torch.testing.assert_close(got.double(), case.truth(), **target.tolerance)
    assert not got[-5:].any(), "padding"
    assert len(flash.calls) == 1


@on_every_triton_target
def test_steps_of_decodes_alone_stay_with_the_triton_kernel(target: Target, flash: FakeFlash) -> None:
    if target.device != "cpu":
        pytest.skip("the stand-in is on the CPU")
    case = PagedCase.make([(1, 5), (1, 70)], target=target)
    got = paged_attention_triton(
        case.query, case.keys, case.values, case.metadata, scale=case.scale, prompts=FlashAttention("fa3")
    )
    torch.testing.assert_close(got.double(), case.truth(), **target.tolerance)
    assert not flash.calls


@pytest.mark.parametrize("sliding_window", [None, 16])
def test_torchs_own_operator_takes_what_it_is_given(sliding_window: int | None) -> None:
    # on tensors without memory it checks names, types and numbers of heads, and computes nothing
    with FakeTensorMode():
        out, query = (torch.empty(29, 4, 64, dtype=torch.float16, device="cuda") for _ in range(2))
        keys, values = (torch.empty(9, 16, 2, 64, dtype=torch.float16, device="cuda") for _ in range(2))

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, dtype=torch.int32, device="cuda")

        metadata = AttentionMetadata(
            cu_query_lens=ints(3),
            seq_lens=ints(2),
            block_tables=ints(2, 4),
            slot_mapping=torch.empty(29, dtype=torch.int64, device="cuda"),
            query_lens_host=(28, 1),
            seq_lens_host=(40, 9),
        )
        options: dict[str, Any] = {"few_queries": 8, "scale": 0.1, "sliding_window": sliding_window}
        FlashAttention("fa2")(out, query, keys, values, metadata, **options)
        three_heads = torch.empty(9, 16, 3, 64, dtype=torch.float16, device="cuda")
        with pytest.raises(ValueError, match="Hq=4 and Hkv=3"):
            FlashAttention("fa2")(out, query, three_heads, three_heads, metadata, **options)
        no_table: Any = "none"
        wrong = attrs.evolve(metadata, block_tables=no_table)
        with pytest.raises(RuntimeError, match="block_table"):
            FlashAttention("fa2")(out, query, keys, values, wrong, **options)


@pytest.mark.parametrize(
    ("name", "model", "problem"),
    [
        ("fa3", {}, None),
        ("fa2", {"block_size": 512}, None),
        ("fa2", {}, "block_size must be a multiple of 256; got 16"),
        ("fa3", {"dtype": torch.float32}, "float16 or bfloat16 is needed; got torch.float32"),
        (
            "fa4",
            {"cache_dtype": torch.float8_e5m2},
            "a KV cache in the model's dtype is needed; got torch.float8_e5m2",
        ),
        ("fa3", {"head_dim": 320}, "a head_dim that is a multiple of 8 up to 256 is needed; got 320"),
        ("fa3", {"head_dim": 100}, "a head_dim that is a multiple of 8 up to 256 is needed; got 100"),
    ],
)
def test_models_that_it_cannot_compute_are_told_with_the_reason(
    name: str, model: dict[str, Any], problem: str | None
) -> None:
    dtype = model.get("dtype", torch.bfloat16)
    facts = {"dtype": dtype, "cache_dtype": dtype, "head_dim": 128, "block_size": 16} | model
    assert FlashAttention(name).problem_with(**facts) == problem


def test_an_implementation_without_its_package_is_not_activated() -> None:
    from torch.nn.attention import current_flash_attention_impl

    with pytest.raises(ImportError):
        FlashAttention("fa4").activate()
    FlashAttention("fa2").activate()
    assert current_flash_attention_impl() is None
