"""LoRA adapters, packed in the order in which the C++ step reads them; the layouts are described in lora.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from triolet.kernels.cpu.abi import AdapterLinearStruct, AdapterPieceStruct, AdapterStruct
from triolet.kernels.cpu.attention.paged_attention import DTYPES
from triolet.kernels.cpu.gemm.packing import MODEL_DTYPES, pack_column, pointer
from triolet.kernels.lora import LowRankPair


@attrs.frozen(eq=False)
class CppAdapter:
    """Packed adapter of a whole model."""

    struct: AdapterStruct
    kept: tuple[object, ...]  # the addresses of the struct point at these

    @property
    def address(self) -> int:
        """Address of the struct, valid as long as this object lives."""
        return ctypes.addressof(self.struct)


@attrs.frozen
class AdaptedShape:
    """Layer of the decoder that an adapter may change."""

    name: str
    num_out: int
    gated: bool = False  # packed so that gates and what they gate share panels


def pack_adapter(
    library: ctypes.CDLL,
    pairs: Mapping[str, Sequence[LowRankPair]],
    *,
    layers: Sequence[AdaptedShape],
    embedding: AdaptedShape,
    head: AdaptedShape,
) -> CppAdapter:
    """Copy the pairs of an adapter into the order in which C++ reads them.

    Args:
        library: the kernels; their vector width decides the order.
        pairs: by name of the layer; of the embedding, A is [rank, vocab_size].
        layers: the four of each layer of the decoder, in the order of `Adapter::layers`.
        embedding: of the decoder.
        head: of the decoder.
    """
    dtypes = {pair.a.dtype for of_layer in pairs.values() for pair in of_layer}
    # float16 becomes float32, which holds all its numbers
    dtype = dtypes.pop() if len(dtypes) == 1 and dtypes <= set(MODEL_DTYPES) else torch.float32
    kept: list[object] = []

    def packed(shape: AdaptedShape) -> AdapterLinearStruct:
        if not (of_layer := pairs.get(shape.name)):
            return AdapterLinearStruct()
        if shape is embedding:
            a = torch.cat([pair.a for pair in of_layer]).float().T.contiguous()
        else:
            a = torch.cat([pair.a for pair in of_layer]).to(dtype)
        return _linear_struct(library, shape, of_layer, a, dtype, kept)

    of_layers = (AdapterLinearStruct * len(layers))(*map(packed, layers))
    ends = packed(embedding), packed(head)
    struct = AdapterStruct(
        ctypes.addressof(of_layers),
        *ends,
        DTYPES[dtype],
        max(layer.rank for layer in (*of_layers, *ends)),
    )
    return CppAdapter(struct, (of_layers, *kept))


def _linear_struct(
    library: ctypes.CDLL,
    shape: AdaptedShape,
    pairs: Sequence[LowRankPair],
    a: Tensor,
    dtype: torch.dtype,
    kept: list[object],
) -> AdapterLinearStruct:
    pieces, first_rank = [], 0
    half = library.triolet_panel_columns() // 2
    for pair in pairs:
        for piece, b in _pieces(shape, pair, half, dtype):
            piece.first_rank = first_rank
            pieces.append(piece)
            kept.append(b)
        first_rank += len(pair.a)
    array = (AdapterPieceStruct * len(pieces))(*pieces)
    bias = _column(library, shape, 0.0, [(pair.start, pair.bias) for pair in pairs])
    magnitude = _column(library, shape, 1.0, [(pair.start, pair.magnitude) for pair in pairs])
    kept += (a, array, bias, magnitude)
    return AdapterLinearStruct(
        a.data_ptr(), ctypes.addressof(array), pointer(bias), pointer(magnitude), len(pieces), first_rank
    )


def _pieces(
    shape: AdaptedShape, pair: LowRankPair, half: int, dtype: torch.dtype
) -> Iterator[tuple[AdapterPieceStruct, Tensor]]:
    """Cut B into the half panels that its module takes part in."""
    # Of a gated layer the gates are in the first halves of all panels, and what they gate in the second halves.
    parts = ((0, shape.num_out // 2, 0), (shape.num_out // 2, shape.num_out, 1))
    for begin, end, first in parts if shape.gated else ((0, shape.num_out, 0),):
        low, high = max(begin, pair.start), min(end, pair.start + len(pair.b))
        if low >= high:
            continue
        # Zeros where the module begins or ends within a half panel: that of its neighbour is added to the same sums.
        skipped = (low - begin) % half
        num_halves = -(-(skipped + high - low) // half)
        padded = torch.zeros(num_halves * half, len(pair.a), dtype=dtype)
        padded[skipped : skipped + high - low] = pair.b[low - pair.start : high - pair.start]
        strips = padded.view(num_halves, half, -1).transpose(1, 2).contiguous()
        step = 2 if shape.gated else 1
        yield (
            AdapterPieceStruct(
                b=strips.data_ptr(),
                first_half=first + (low - begin) // half * step,
                step=step,
                num_halves=num_halves,
                rank=len(pair.a),
            ),
            strips,
        )


def _column(
    library: ctypes.CDLL, shape: AdaptedShape, default: float, parts: Sequence[tuple[int, Tensor | None]]
) -> Tensor | None:
    # one number for each output of the layer, `default` outside of the parts; None if there is no part
    if all(part is None for _, part in parts):
        return None
    column = torch.full((shape.num_out,), default)
    for start, part in parts:
        if part is not None:
            column[start : start + len(part)] = part
    return pack_column(library, column, gated=shape.gated)
