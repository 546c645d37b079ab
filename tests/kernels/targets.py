"""Where the Triton kernels are tried, how exactly they must agree there, and a cache full of traps to try them on."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from tests.conftest import HAS_NVIDIA_DRIVER
from triolet.kernels.attention_metadata import AttentionMetadata


@attrs.frozen
class Target:
    """A device and a dtype that Triton kernels run with: without a GPU, Triton's interpreter on CPU tensors."""

    device: str
    dtype: torch.dtype

    @property
    def tolerance(self) -> dict[str, Any]:
        """Arguments of `torch.testing.assert_close`: two roundings of the dtype, of numbers about one."""
        one_rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[self.dtype]
        return {"rtol": 2 * one_rounding, "atol": 2 * one_rounding}

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.dtype).to(self.device)


def _targets() -> list[Any]:
    interpreted = pytest.mark.skipif(
        HAS_NVIDIA_DRIVER or importlib.util.find_spec("triton") is None,
        reason="needs triton and no GPU: with one the kernels are compiled for it",
    )
    without_gpu = [
        pytest.param(Target("cpu", torch.float32), marks=interpreted, id="interpreter-float32"),
        # The same code in another dtype: the rounding of results differs, and no more.
        pytest.param(
            Target("cpu", torch.float16), marks=(interpreted, pytest.mark.slow), id="interpreter-float16"
        ),
    ]
    with_gpu = [
        pytest.param(Target("cuda", torch.float32), marks=pytest.mark.gpu, id="cuda-float32"),
        pytest.param(Target("cuda", torch.float16), marks=pytest.mark.gpu, id="cuda-float16"),
        pytest.param(Target("cuda", torch.bfloat16), marks=pytest.mark.gpu, id="cuda-bfloat16"),
    ]
    return without_gpu + with_gpu


on_every_triton_target = pytest.mark.parametrize("target", _targets())


@attrs.frozen(eq=False)
class PagedCase:
    """One step's attention: paged as the kernels see it, and plain as anybody would write it down.

    Every slot that belongs to no sequence is NaN, every block table's tail names a block that does not exist, and
    the blocks of a sequence are scattered over the cache.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata
    plain_keys: tuple[Tensor, ...]
    plain_values: tuple[Tensor, ...]
    scale: float

    @classmethod
    def make(
        cls,
        lens: Sequence[tuple[int, int]],
        *,
        num_heads: int = 2,
        num_kv_heads: int = 1,
        head_dim: int = 16,
        block_size: int = 16,
        num_padding_rows: int = 0,
        target: Target | None = None,
    ) -> PagedCase:
        """`lens` are pairs (query length, sequence length)."""
        target = target or Target("cpu", torch.float32)
        num_blocks = [-(-seq_len // block_size) for _, seq_len in lens]
        scattered = iter(torch.randperm(sum(num_blocks) + 3).tolist())
        keys = torch.full((sum(num_blocks) + 3, block_size, num_kv_heads, head_dim), float("nan"))
        values = keys.clone()
        tables = torch.full((len(lens), max(num_blocks) + 1), 2**30, dtype=torch.int32)
        plain: list[tuple[Tensor, Tensor]] = []
        slots_of_queries: list[Tensor] = []
        for sequence, (query_len, seq_len) in enumerate(lens):
            blocks = torch.tensor([next(scattered) for _ in range(num_blocks[sequence])], dtype=torch.int32)
            tables[sequence, : len(blocks)] = blocks
            slots = (blocks.long()[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
            plain.append(
                (torch.randn(seq_len, num_kv_heads, head_dim), torch.randn(seq_len, num_kv_heads, head_dim))
            )
            keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = plain[-1]
            slots_of_queries.append(slots[seq_len - query_len :])
        query_lens = tuple(query_len for query_len, _ in lens)
        seq_lens = tuple(seq_len for _, seq_len in lens)
        padding = torch.full((num_padding_rows,), -1)
        return cls(
            query=target.randn(sum(query_lens) + num_padding_rows, num_heads, head_dim),
            keys=keys.to(target.dtype).to(target.device),
            values=values.to(target.dtype).to(target.device),
            metadata=AttentionMetadata(
                cu_query_lens=torch.tensor((0, *query_lens)).cumsum(0).int().to(target.device),
                seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(target.device),
                block_tables=tables.to(target.device),
                slot_mapping=torch.cat([*slots_of_queries, padding]).to(target.device),
                query_lens_host=query_lens,
                seq_lens_host=seq_lens,
            ),
            plain_keys=tuple(k.to(target.dtype) for k, _ in plain),
            plain_values=tuple(v.to(target.dtype) for _, v in plain),
            scale=head_dim**-0.5,
        )

    def truth(
        self,
        *,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, num_heads, head_dim] float64, one query and one head at a time, zero in padding rows."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        group = self.query.shape[1] // self.keys.shape[2]
        row = 0
        for query_len, k, v in zip(
            self.metadata.query_lens_host, self.plain_keys, self.plain_values, strict=True
        ):
            for position in range(len(k) - query_len, len(k)):
                first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
                for head in range(self.query.shape[1]):
                    query = self.query[row, head].cpu().double()
                    scores = self.scale * (k[first : position + 1, head // group].double() @ query)
                    if soft_cap is not None:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    weights = scores.softmax(0)
                    if sinks is not None:  # one more score, of a value of zero
                        weights = torch.cat((scores, sinks[head : head + 1].double())).softmax(0)[:-1]
                    out[row, head] = weights @ v[first : position + 1, head // group].double()
                row += 1
        return out
