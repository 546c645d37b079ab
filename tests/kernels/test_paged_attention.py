from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from tests.kernels.targets import PagedCase, Target
from triolet.errors import KernelShapeError
from triolet.kernels import gathered_attention, paged_attention
from triolet.kernels.paged_attention import paged_attention_reference

MIXED = [(7, 7), (1, 65), (16, 80), (1, 1), (0, 3), (1, 64), (63, 63), (1, 300), (1, 17)]
EXACT: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture(autouse=True)
def torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here is torch's way; the compiled one is in test_cpu_paged_attention.py."""
    monkeypatch.setattr(paged_attention, "library", lambda: None)


def run(case: PagedCase, **options: Any) -> torch.Tensor:
    return paged_attention.paged_attention(
        case.query, case.keys, case.values, case.metadata, scale=case.scale, **options
    )


def run_reference(case: PagedCase, **options: Any) -> torch.Tensor:
    return paged_attention_reference(
        case.query, case.keys, case.values, case.metadata, scale=case.scale, **options
    )


@pytest.mark.parametrize("attend", [run, run_reference])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (4, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 16, "soft_cap": 2.0}], ids=["plain", "window-and-cap"]
)
def test_every_row_is_plain_attention_over_its_own_past(
    attend: Any, num_heads: int, num_kv_heads: int, options: dict[str, Any]
) -> None:
    case = PagedCase.make(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, num_padding_rows=3)
    torch.testing.assert_close(attend(case, **options).double(), case.truth(**options), **EXACT)


@pytest.mark.parametrize("attend", [run, run_reference])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (3, 1), (6, 2)])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 16, "soft_cap": 2.0}], ids=["plain", "window-and-cap"]
)
def test_a_sink_is_one_more_score_of_its_head_without_a_value(
    attend: Any, num_heads: int, num_kv_heads: int, options: dict[str, Any]
) -> None:
    case = PagedCase.make(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, num_padding_rows=3)
    # far below and far above all scores, too: nothing is lost to it, or nearly everything
    sinks = torch.cat((torch.tensor([-100.0, 100.0]), torch.randn(num_heads)))[:num_heads]
    torch.testing.assert_close(
        attend(case, sinks=sinks, **options).double(), case.truth(sinks=sinks, **options), **EXACT
    )


@pytest.mark.parametrize("attend", [run, run_reference])
@pytest.mark.parametrize("sliding_window", [1, 2, 15, 16, 17, 64, 1000])
def test_a_window_shows_as_many_keys_as_it_is_wide(attend: Any, sliding_window: int) -> None:
    case = PagedCase.make([(1, 16), (1, 17), (33, 48), (20, 20)])
    truth = case.truth(sliding_window=sliding_window)
    torch.testing.assert_close(attend(case, sliding_window=sliding_window).double(), truth, **EXACT)


@pytest.mark.parametrize("attend", [run, run_reference])
def test_what_lies_before_the_window_is_not_read(attend: Any) -> None:
    case = PagedCase.make([(1, 200), (30, 200), (1, 90)])
    truth = case.truth(sliding_window=50)
    for sequence, first_seen in enumerate((150, 121, 40)):
        forgotten = case.metadata.block_tables[sequence, : first_seen // 16].long()
        case.keys[forgotten] = case.values[forgotten] = float("nan")
    torch.testing.assert_close(attend(case, sliding_window=50).double(), truth, **EXACT)


@pytest.mark.parametrize("attend", [run, run_reference])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 80])
def test_block_edges_and_odd_head_dims_make_no_difference(
    attend: Any, block_size: int, head_dim: int
) -> None:
    lens = [(1, block_size), (1, block_size + 1), (3, 2 * block_size + 1), (1, 33)]
    case = PagedCase.make(lens, block_size=block_size, head_dim=head_dim)
    torch.testing.assert_close(attend(case).double(), case.truth(), **EXACT)


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("sliding_window", [None, 40])
def test_a_long_chunk_is_the_same_in_tiles_of_queries(
    monkeypatch: pytest.MonkeyPatch, soft_cap: float | None, sliding_window: int | None
) -> None:
    monkeypatch.setattr(gathered_attention, "QUERY_TILE", 16)
    case = PagedCase.make([(70, 70), (50, 90)])
    options: dict[str, Any] = {"soft_cap": soft_cap, "sliding_window": sliding_window}
    torch.testing.assert_close(run(case, **options), run_reference(case, **options), **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_computed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    target = Target("cpu", dtype)
    case = PagedCase.make(MIXED, num_heads=4, target=target)
    torch.testing.assert_close(run(case).double(), case.truth(), **target.tolerance)


def test_a_row_does_not_depend_on_what_else_is_in_the_step() -> None:
    together = PagedCase.make(MIXED, num_heads=4, num_kv_heads=2)
    rows = run(together)
    starts = together.metadata.cu_query_lens.tolist()
    for sequence, (query_len, seq_len) in enumerate(MIXED):
        if query_len == 0:
            continue
        metadata = attrs.evolve(
            together.metadata,
            cu_query_lens=torch.tensor([0, query_len], dtype=torch.int32),
            seq_lens=torch.tensor([seq_len], dtype=torch.int32),
            block_tables=together.metadata.block_tables[sequence : sequence + 1],
            query_lens_host=(query_len,),
            seq_lens_host=(seq_len,),
        )
        mine = slice(starts[sequence], starts[sequence + 1])
        alone = attrs.evolve(together, query=together.query[mine], metadata=metadata)
        torch.testing.assert_close(run(alone), rows[mine], rtol=1e-6, atol=1e-6)


def test_decodes_of_wildly_different_lengths_are_not_padded_to_the_longest() -> None:
    lens = [(1, 3000), *((1, 10) for _ in range(20))]
    plan = PagedCase.make(lens).metadata.gather_plan(16, None)
    assert sum(len(part.slots) for part in plan.parts) < 3000 + 20 * 10 + 1


def test_a_group_of_decodes_gathers_a_bounded_number_of_keys() -> None:
    plan = PagedCase.make([(1, 100 + i % 30) for i in range(40)]).metadata.gather_plan(16, None)
    assert len(plan.parts) >= 4
    assert plan.max_keys <= gathered_attention.GROUP_KEYS


def test_all_layers_of_a_step_share_one_plan() -> None:
    metadata = PagedCase.make(MIXED).metadata
    assert metadata.gather_plan(16, None) is metadata.gather_plan(16, None)
    assert metadata.gather_plan(16, 8) is not metadata.gather_plan(16, None)


def test_a_step_without_tokens_gives_no_rows() -> None:
    case = PagedCase.make([(0, 5)])
    assert run(case).shape == (0, 2, 16)


def test_rows_that_belong_to_no_sequence_are_zero() -> None:
    case = PagedCase.make([(3, 5), (1, 9)], num_padding_rows=4)
    assert run(case)[4:].eq(0).all()
    assert run(case)[:4].isfinite().all()


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    case = PagedCase.make([(2, 5), (1, 9)], num_heads=4, num_kv_heads=2)
    wrong = [
        attrs.evolve(case, query=case.query[..., :8]),  # head_dim
        attrs.evolve(case, query=case.query[:, :3]),  # 3 query heads over 2 KV heads
        attrs.evolve(case, query=case.query.half()),  # dtype
        attrs.evolve(case, query=case.query[:2]),  # fewer rows than queries
        attrs.evolve(case, values=case.values[:, :8]),  # block size
        attrs.evolve(case, keys=case.keys.transpose(1, 2), values=case.values.transpose(1, 2)),
        attrs.evolve(case, metadata=attrs.evolve(case.metadata, seq_lens_host=(5,))),
        attrs.evolve(case, query=case.query.to("meta")),
    ]
    for misfit in wrong:
        with pytest.raises(KernelShapeError, match="must agree"):
            run(misfit)
