"""LoRA pairs of a linear layer, and what they add to its output: one by one in torch, all at once in Triton.

y += scaling * B (A x) for the tokens of one adapter; the scaling is folded into B. A layer that joins several modules
of the checkpoint (q, k and v) has a pair for each of them, which adds to that module's range of the output.

In Triton two launches serve all adapters of a step: shrink, A x, and expand, which adds B of that. The tokens are
sorted by adapter and cut into tiles of one adapter each; a table says where the pairs of each adapter are, so that they
may differ in rank and lie anywhere.

Source: LoRA, arXiv 2106.09685; DoRA, arXiv 2402.09353; shrink and expand: Punica, arXiv 2310.18547.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.kernels._triton import INTERPRETING, kernel, run_or_reference

if TYPE_CHECKING:
    import triton.language as tl

TILE_ROWS = 16
"""Tokens of a tile: the least that a matrix product in Triton takes."""

_RANKS, _DEPTH, _OUTS = 16, 128, 128
_FIELDS = 6  # of an entry of a table


@kernel.with_widths("num_in", "x_stride")
def _shrink_kernel(
    x_ptr,  # [num_tokens, num_in]
    shrunk_ptr,  # [num_places, shrunk_width] float32
    table_ptr,  # [num_adapters, num_modules, FIELDS], see `LowRankTable`
    tiles_ptr,  # [num_tiles, 3], see `AdapterTiles`
    tokens_ptr,  # [num_places]
    like_ptr,  # any A, for its dtype
    num_in, x_stride, shrunk_width, num_modules,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens by some rows of A of one module."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    entry_ptr = table_ptr + (tl.load(tile_ptr) * num_modules + tl.program_id(1)) * FIELDS
    rank = tl.load(entry_ptr + 2)
    r = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(2) * RANKS >= rank:
        return
    a_ptr = tl.load(entry_ptr).to(tl.pointer_type(like_ptr.dtype.element_ty))
    row = tl.arange(0, ROWS)
    place = tl.load(tile_ptr + 1) + row
    row_live, r_live = row < tl.load(tile_ptr + 2), r < rank
    token = tl.load(tokens_ptr + place, mask=row_live, other=0)
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    for start in range(0, num_in, DEPTH):
        k = start + tl.arange(0, DEPTH)
        x = tl.load(
            x_ptr + token[:, None] * x_stride + k[None, :],
            mask=row_live[:, None] & (k < num_in)[None, :], other=0.0,
        ).to(like_ptr.dtype.element_ty)  # [ROWS, DEPTH]  # fmt: skip
        a = tl.load(
            a_ptr + r[None, :] * num_in + k[:, None], mask=r_live[None, :] & (k < num_in)[:, None], other=0.0
        )  # [DEPTH, RANKS]
        if WIDEN:
            x, a = x.to(tl.float32), a.to(tl.float32)
        sums += tl.dot(x, a, input_precision="ieee")
    shrunk = shrunk_ptr + place[:, None] * shrunk_width + (tl.load(entry_ptr + 5) + r)[None, :]
    tl.store(shrunk, sums, mask=row_live[:, None] & r_live[None, :])


@kernel.with_widths("y_stride")
def _expand_kernel(
    y_ptr,  # [num_tokens, num_out of the layer], added to
    shrunk_ptr, table_ptr, tiles_ptr, tokens_ptr, like_ptr,  # see `_shrink_kernel`
    y_stride, shrunk_width, num_modules,
    FIELDS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, OUTS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add what some rows of B of one module make of a tile of tokens."""
    tile_ptr = tiles_ptr + tl.program_id(0) * 3
    entry_ptr = table_ptr + (tl.load(tile_ptr) * num_modules + tl.program_id(1)) * FIELDS
    rank, num_out = tl.load(entry_ptr + 2), tl.load(entry_ptr + 4)
    out = tl.program_id(2) * OUTS + tl.arange(0, OUTS)
    if tl.program_id(2) * OUTS >= num_out:  # also of a module that the adapter does not have
        return
    b_ptr = tl.load(entry_ptr + 1).to(tl.pointer_type(like_ptr.dtype.element_ty))
    row = tl.arange(0, ROWS)
    place = tl.load(tile_ptr + 1) + row
    row_live, out_live = row < tl.load(tile_ptr + 2), out < num_out
    token = tl.load(tokens_ptr + place, mask=row_live, other=0)
    from_ptr = shrunk_ptr + tl.load(entry_ptr + 5)
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, rank, RANKS):
        r = start + tl.arange(0, RANKS)
        shrunk = tl.load(
            from_ptr + place[:, None] * shrunk_width + r[None, :],
            mask=row_live[:, None] & (r < rank)[None, :], other=0.0,
        ).to(like_ptr.dtype.element_ty)  # [ROWS, RANKS]  # fmt: skip
        b = tl.load(
            b_ptr + out[None, :] * rank + r[:, None], mask=out_live[None, :] & (r < rank)[:, None], other=0.0
        )  # [RANKS, OUTS]
        if WIDEN:
            shrunk, b = shrunk.to(tl.float32), b.to(tl.float32)
        sums += tl.dot(shrunk, b, input_precision="ieee")
    to_ptr = y_ptr + token[:, None] * y_stride + (tl.load(entry_ptr + 3) + out)[None, :]
    live = row_live[:, None] & out_live[None, :]
    y = tl.load(to_ptr, mask=live, other=0.0)
    tl.store(to_ptr, (y.to(tl.float32) + sums).to(y.dtype), mask=live)


@attrs.frozen(eq=False, kw_only=True)
class LowRankPair:
    """A and B of one module."""

    start: int  # first of its outputs in the layer
    a: Tensor  # [rank, num_in]
    b: Tensor  # [num_out, rank], with the scaling
    bias: Tensor | None = None  # [num_out], with the scaling
    # DoRA: the plain output, without the bias of the layer, and that of the pair are multiplied by it; [num_out].
    magnitude: Tensor | None = None
    layer_bias: Tensor | None = None  # [num_out], where there is a magnitude


def add_low_rank(y: Tensor, x: Tensor, pair: LowRankPair, tokens: Tensor | None) -> None:
    """Add what a pair makes of the input `x` of a layer to its output `y`, in place.

    Args:
        y: [num_tokens, num_out].
        x: [num_tokens, num_in].
        pair: of the layer, in any dtype.
        tokens: [num] int64, those of the adapter; None for all.
    """
    x = x if tokens is None else x[tokens]
    added = functional.linear(functional.linear(x.to(pair.a.dtype), pair.a), pair.b, pair.bias)
    part = y[:, pair.start : pair.start + len(pair.b)]
    if pair.magnitude is not None:
        plain = part if tokens is None else part[tokens]
        if pair.layer_bias is not None:
            plain = plain - pair.layer_bias
        added = added * pair.magnitude + plain * (pair.magnitude - 1)
    if tokens is None:
        part += added.to(y.dtype)
    else:
        part.index_add_(0, tokens, added.to(y.dtype))


# ------------------------------------------------------------------------------------ all at once


@attrs.frozen(eq=False, kw_only=True)
class LowRankTable:
    """Where the pairs of a layer are, for each adapter of a step."""

    # [num_adapters, num_modules, 6] int64: addresses of A and B, rank, first output, number of outputs, and first
    # column of what A makes; zeros for a module that an adapter does not have
    entries: Tensor
    num_modules: int
    max_rank: int  # of a module
    max_num_out: int
    shrunk_width: int
    pairs: tuple[tuple[LowRankPair, ...], ...]  # the addresses are theirs

    @classmethod
    def of(cls, adapters: Sequence[Sequence[LowRankPair]]) -> LowRankTable | None:
        """Build the table of a layer from its pairs by adapter.

        Returns:
            None if no adapter has a pair, or if a pair has what the kernels do not know: a bias, a magnitude, or a
            dtype of its own.
        """
        pairs = [pair for of_adapter in adapters for pair in of_adapter]
        if not pairs or len({pair.a.dtype for pair in pairs}) > 1:
            return None
        if any(pair.bias is not None or pair.magnitude is not None for pair in pairs):
            return None
        num_modules = max(map(len, adapters))
        entries = torch.zeros(len(adapters), num_modules, _FIELDS, dtype=torch.int64)
        shrunk_width = 0
        for index, of_adapter in enumerate(adapters):
            first = 0
            for module, pair in enumerate(of_adapter):
                rank, num_out = len(pair.a), len(pair.b)
                entries[index, module] = torch.tensor(
                    [pair.a.data_ptr(), pair.b.data_ptr(), rank, pair.start, num_out, first]
                )
                first += rank
            shrunk_width = max(shrunk_width, first)
        return cls(
            entries=entries.to(pairs[0].a.device),
            num_modules=num_modules,
            max_rank=max(len(pair.a) for pair in pairs),
            max_num_out=max(len(pair.b) for pair in pairs),
            shrunk_width=shrunk_width,
            pairs=tuple(map(tuple, adapters)),
        )


@attrs.frozen(eq=False)
class AdapterTiles:
    """Tokens of a step that have adapters, in tiles of one adapter."""

    tokens: Tensor  # [num_places] int64, those of one adapter side by side
    tiles: Tensor  # [num_tiles, 3] int64: index of the adapter, first place, number of places

    @classmethod
    def of(cls, groups: Sequence[Tensor], device: torch.device) -> AdapterTiles:
        """Cut the tokens of each adapter, [num] int64 on the CPU, into tiles."""
        tiles, first = [], 0
        for index, tokens in enumerate(groups):
            for start in range(0, len(tokens), TILE_ROWS):
                tiles.append([index, first + start, min(TILE_ROWS, len(tokens) - start)])
            first += len(tokens)
        return cls(torch.cat(list(groups)).to(device), torch.tensor(tiles).to(device))


def add_low_rank_triton(y: Tensor, x: Tensor, table: LowRankTable, tiles: AdapterTiles) -> None:
    """`add_low_rank` of all adapters of a step, in Triton.

    Args:
        y: [num_tokens, num_out], rows contiguous.
        x: [num_tokens, num_in], rows contiguous.
        table: of the layer.
        tiles: of the step; adapters in the order of `table`.
    """
    like = next(pair.a for of_adapter in table.pairs for pair in of_adapter)
    shrunk = torch.empty(len(tiles.tokens), table.shrunk_width, dtype=torch.float32, device=x.device)
    num_tiles = len(tiles.tiles)
    _shrink_kernel[num_tiles, table.num_modules, -(-table.max_rank // _RANKS)](
        x, shrunk, table.entries, tiles.tiles, tiles.tokens, like,
        x.shape[1], x.stride(0), table.shrunk_width, table.num_modules,
        FIELDS=_FIELDS, ROWS=TILE_ROWS, RANKS=_RANKS, DEPTH=_DEPTH, WIDEN=INTERPRETING,
    )  # fmt: skip
    _expand_kernel[num_tiles, table.num_modules, -(-table.max_num_out // _OUTS)](
        y, shrunk, table.entries, tiles.tiles, tiles.tokens, like,
        y.stride(0), table.shrunk_width, table.num_modules,
        FIELDS=_FIELDS, ROWS=TILE_ROWS, RANKS=_RANKS, OUTS=_OUTS, WIDEN=INTERPRETING,
    )  # fmt: skip


def compile_low_rank(dtype: torch.dtype, adapter_dtype: torch.dtype, device: torch.device) -> None:
    """Launch the kernels once, so that the first adapter need not wait until they are compiled.

    Args:
        dtype: of a model, whose layers have multiples of 16 inputs and outputs.
        adapter_dtype: of its adapters.
        device: a GPU.
    """
    pair = torch.zeros(_RANKS, _RANKS, dtype=adapter_dtype, device=device)
    table = LowRankTable.of([[LowRankPair(start=0, a=pair, b=pair)]])
    assert table is not None
    x = torch.zeros(1, _RANKS, dtype=dtype, device=device)
    tiles = AdapterTiles.of([torch.tensor([0])], device)
    run_or_reference(add_low_rank_triton, lambda *_: None, x.clone(), x, table, tiles)
