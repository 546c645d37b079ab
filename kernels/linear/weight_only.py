"""Linear layers whose weights are integers of 4 or 8 bits, or float8, with a scale for each group of inputs.

So GPTQ, AWQ, compressed-tensors and folders in FP8 store them. Words, zeros and scales stay as they are in the
checkpoint: a tile of them becomes numbers in registers, in the dtype of the input, on its way into the product. There
is no other copy of a weight.

Source: GPTQ, arXiv 2210.17323; AWQ, arXiv 2306.00978.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from triolet.errors import KernelShapeError
from triolet.kernels._triton import INTERPRETING, kernel, run_or_reference

if TYPE_CHECKING:
    import triton.language as tl

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column, within its eight, of the k-th four bits of a word of AWQ."""


@kernel.with_widths("x_stride", "word_stride")
def _weight_only_kernel(
    x_ptr,  # [num_tokens, num_in], rows contiguous
    words_ptr,  # int32 [num_in / PER_WORD, num_out], or with PACKS_OUTPUTS [num_in, num_out / PER_WORD]
    zeros_ptr,  # HAS_ZEROS only: int32 [num_groups, num_out / PER_WORD]
    scales_ptr,  # [num_groups, num_out]
    order_ptr,  # HAS_ORDER only: int32 [num_in], the group of each input
    bias_ptr,  # HAS_BIAS only: [num_out]
    out_ptr,  # [num_tokens, num_out], rows contiguous
    num_tokens, num_in, num_out, group_size, x_stride, out_stride, word_stride, zero_stride, scale_stride,
    BITS: tl.constexpr, IS_FLOAT: tl.constexpr, PACKS_OUTPUTS: tl.constexpr, UNIT_OUT: tl.constexpr,
    HAS_ZEROS: tl.constexpr, ZERO_PLUS: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Multiply some tokens by some outputs.

    UNIT_OUT: outputs are side by side in memory, as in GPTQ and AWQ; otherwise inputs and groups are.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    row_live = row < num_tokens
    out_live = out < num_out
    place = tl.arange(0, PER_WORD)
    if PACKS_OUTPUTS:  # the order of AWQ: even columns first
        place_shift = ((place // 2) + (place % 2) * (PER_WORD // 2)) * BITS
        out_shift = ((out % PER_WORD) // 2 + (out % 2) * (PER_WORD // 2)) * BITS
        word_out = tl.program_id(0) * (OUTS // PER_WORD) + tl.arange(0, OUTS // PER_WORD)
    else:
        place_shift = place * BITS
        out_shift = (out % PER_WORD) * BITS
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    for start in range(0, num_in, DEPTH):
        k = start + tl.arange(0, DEPTH)
        k_live = k < num_in
        x = tl.load(
            x_ptr + row.to(tl.int64)[:, None] * x_stride + k[None, :],
            mask=row_live[:, None] & k_live[None, :], other=0.0,
        )  # [ROWS, DEPTH]  # fmt: skip
        if PACKS_OUTPUTS:
            words = tl.load(
                words_ptr + k.to(tl.int64)[:, None] * word_stride + word_out[None, :],
                mask=k_live[:, None] & (word_out * PER_WORD < num_out)[None, :], other=0,
            )  # [DEPTH, OUTS / PER_WORD]  # fmt: skip
            integers = tl.reshape((words[:, :, None] >> place_shift[None, None, :]) & MASK, (DEPTH, OUTS))
        else:
            word_in = start // PER_WORD + tl.arange(0, DEPTH // PER_WORD)
            if UNIT_OUT:
                word = word_in.to(tl.int64)[:, None] * word_stride + out[None, :]
            else:
                word = word_in[:, None] + out.to(tl.int64)[None, :] * word_stride
            words = tl.load(
                words_ptr + word, mask=(word_in * PER_WORD < num_in)[:, None] & out_live[None, :], other=0,
            )  # [DEPTH / PER_WORD, OUTS]  # fmt: skip
            integers = tl.reshape((words[:, None, :] >> place_shift[None, :, None]) & MASK, (DEPTH, OUTS))
        if ONE_GROUP:  # all inputs of the tile are in it
            group = (start // group_size + tl.zeros([1], tl.int32))[:, None]
            live = out_live[None, :]
        else:
            if HAS_ORDER:
                group = tl.load(order_ptr + k, mask=k_live, other=0)[:, None]
            else:
                group = (k // group_size)[:, None]
            live = k_live[:, None] & out_live[None, :]
        if UNIT_OUT:
            scale_place = group * scale_stride + out[None, :]
            zero_place = group * zero_stride + (out // PER_WORD)[None, :]
        else:
            scale_place = group + out[None, :] * scale_stride
            zero_place = group + (out // PER_WORD)[None, :] * zero_stride
        scale = tl.load(scales_ptr + scale_place, mask=live, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero_words = tl.load(zeros_ptr + zero_place, mask=live, other=0)
            zero = (((zero_words >> out_shift[None, :]) & MASK) + ZERO_PLUS) & MASK
            weight = (integers - zero).to(tl.float32) * scale
        elif IS_FLOAT:
            # Its bits in their places of a float32, whose exponents have a bias that is larger by 120. By hand, since
            # GPUs before sm_89 cannot convert it.
            bits = ((integers & 0x7F) << 20) | ((integers & 0x80) << 24)
            number = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
            weight = tl.where((integers & 0x7F) == 0x7F, float("nan"), number) * scale
        else:
            weight = (integers - (1 << (BITS - 1))).to(tl.float32) * scale
        weight = weight.to(x.dtype)  # [DEPTH, OUTS]
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums += tl.dot(x, weight, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias_ptr + out, mask=out_live, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * out_stride + out[None, :], sums.to(out_ptr.dtype.element_ty),
        mask=row_live[:, None] & out_live[None, :],
    )  # fmt: skip


@attrs.frozen(eq=False, kw_only=True)
class PackedWeight:
    """Weight of scale * (integer - zero) or scale * float8, in words of 32 bits with the first number in the lowest."""

    bits: int  # 4 or 8
    num_in: int
    num_out: int
    group_size: int  # inputs that share scale and zero
    # int32 [num_in / per_word, num_out]: integers of consecutive inputs share a word. With `packs_outputs`
    # [num_in, num_out / per_word]: integers of AWQ's outputs do. All parts are contiguous, or all transposed.
    words: Tensor
    scales: Tensor  # [num_groups, num_out]
    zeros: Tensor | None = None  # int32 [num_groups, num_out / per_word]; None = 2 ** (bits - 1)
    order: Tensor | None = None  # int32 [num_in], the group of each input; None = consecutive ones
    packs_outputs: bool = False  # as AWQ does, whose zeros are in its order as well
    stored_minus_one: bool = False  # zeros are one more than what is stored, and wrap around
    is_float: bool = False  # the integers are the bits of float8 (E4M3), and have no zeros

    def check(self) -> None:
        """Compare the shapes of the parts.

        Raises:
            KernelShapeError: they do not fit each other.
        """
        per_word, num_groups = 32 // self.bits, -(-self.num_in // self.group_size)
        packed = -(-self.num_in // per_word), self.num_out
        if self.packs_outputs:
            packed = self.num_in, self.num_out // per_word
        found = tuple(self.words.shape), tuple(self.scales.shape)
        if self.bits not in (4, 8) or found != (packed, (num_groups, self.num_out)):
            raise KernelShapeError("bits, words and scales", bits=self.bits, words=found[0], scales=found[1])
        if self.zeros is not None and self.zeros.shape != (num_groups, -(-self.num_out // per_word)):
            raise KernelShapeError("zeros and scales", zeros=tuple(self.zeros.shape), scales=found[1])
        if self.is_float and (self.bits != 8 or self.zeros is not None):
            raise KernelShapeError("float8 and bits", bits=self.bits, has_zeros=self.zeros is not None)
        if self.order is not None and self.order.shape != (self.num_in,):
            raise KernelShapeError("order and num_in", order=tuple(self.order.shape), num_in=self.num_in)

        parts = [part for part in (self.words, self.scales, self.zeros) if part is not None]
        if any(part.stride(1 if self.has_adjacent_outputs else 0) != 1 for part in parts):
            raise KernelShapeError("order in memory", strides=[part.stride() for part in parts])

    @property
    def has_adjacent_outputs(self) -> bool:
        """Tell whether outputs are side by side in memory, as in GPTQ and AWQ; otherwise inputs are."""
        return self.words.is_contiguous()

    def to(self, device: torch.device) -> PackedWeight:
        """Return it on a device."""
        return attrs.evolve(
            self,
            words=self.words.to(device),
            scales=self.scales.to(device),
            zeros=None if self.zeros is None else self.zeros.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def dequantize(self) -> Tensor:
        """Return the weight, float32 [num_out, num_in]."""
        per_word, mask = 32 // self.bits, (1 << self.bits) - 1
        columns = torch.arange(per_word, device=self.words.device)
        linear = columns * self.bits
        shifts = linear
        if self.packs_outputs:
            shifts = torch.empty_like(linear)
            shifts[list(AWQ_ORDER)] = linear

        def along_outputs(words: Tensor) -> Tensor:
            # [n, num_out / per_word] to [n, num_out]
            return ((words[:, :, None] >> shifts) & mask).flatten(1)[:, : self.num_out]

        if self.packs_outputs:
            integers = along_outputs(self.words)
        else:
            integers = ((self.words[:, None, :] >> linear[:, None]) & mask).flatten(0, 1)[: self.num_in]
        if self.is_float:
            integers = integers.to(torch.uint8).view(torch.float8_e4m3fn).float()
            zeros = torch.zeros_like(self.scales)
        elif self.zeros is None:
            zeros = torch.full_like(self.scales, 1 << (self.bits - 1), dtype=torch.int32)
        else:
            zeros = (along_outputs(self.zeros) + int(self.stored_minus_one)) & mask
        groups = self.order
        if groups is None:
            groups = torch.arange(self.num_in, device=self.words.device) // self.group_size
        index = groups.long()
        return ((integers - zeros[index]).float() * self.scales.float()[index]).T


def byte_weight(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> PackedWeight:
    """Return a weight of bytes with a scale for each block.

    Args:
        weight: [num_out, num_in] int8 or float8 (E4M3), contiguous; num_in is a multiple of 4.
        scales: [ceil(num_out / block[0]), ceil(num_in / block[1])].
        block: rows and columns of a block; the last blocks may be cut off.
    """
    num_out, num_in = weight.shape
    is_float = weight.dtype == torch.float8_e4m3fn
    raw = weight.view(torch.uint8)
    words = (raw if is_float else raw ^ 0x80).view(torch.int32)  # int8 becomes unsigned, with a zero of 128
    of_outputs = scales.float().repeat_interleave(block[0], dim=0)[:num_out]
    return PackedWeight(
        bits=8,
        num_in=num_in,
        num_out=num_out,
        group_size=block[1],
        words=words.T,
        scales=of_outputs.contiguous().T,
        is_float=is_float,
    )


def weight_only_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """Compute x @ weight.T + bias.

    The weight is rounded to the dtype of `x`; sums are in float32.

    Args:
        x: [num_tokens, num_in], rows contiguous.
        weight: of the layer.
        bias: [num_out], dtype of `x`, or None.
        out: [num_tokens, num_out], rows contiguous, dtype of `x`; gets the result.

    Raises:
        KernelShapeError: the tensors do not fit each other.

    Moves x.nbytes, out.nbytes and the bytes of the words, scales and zeros, once per tile of tokens.
    """
    if x.shape[1] != weight.num_in or out.shape != (len(x), weight.num_out) or x.dtype != out.dtype:
        raise KernelShapeError(
            "num_in, num_out and dtype", x=tuple(x.shape), out=tuple(out.shape), weight=(weight.num_out, weight.num_in)
        )  # fmt: skip
    if x.is_cuda:
        run_or_reference(weight_only_linear_triton, weight_only_linear_reference, x, weight, bias, out)
    else:
        weight_only_linear_reference(x, weight, bias, out)


def weight_only_linear_triton(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """`weight_only_linear` in Triton, without its checks."""
    num_tokens = len(x)
    if not num_tokens:
        return
    rows, outs, depth, num_warps = _tile(num_tokens, x.itemsize)
    one_group = weight.order is None and (
        weight.group_size >= weight.num_in or weight.group_size % depth == 0
    )
    unit = int(weight.has_adjacent_outputs)  # the dimension with a stride of one
    zeros = weight.words if weight.zeros is None else weight.zeros
    _weight_only_kernel[-(-weight.num_out // outs), -(-num_tokens // rows)](
        x, weight.words, zeros, weight.scales,
        weight.words if weight.order is None else weight.order, x if bias is None else bias, out,
        num_tokens, weight.num_in, weight.num_out, weight.group_size, x.stride(0), out.stride(0),
        weight.words.stride(1 - unit), zeros.stride(1 - unit), weight.scales.stride(1 - unit),
        BITS=weight.bits, IS_FLOAT=weight.is_float, PACKS_OUTPUTS=weight.packs_outputs, UNIT_OUT=unit == 1,
        HAS_ZEROS=weight.zeros is not None, ZERO_PLUS=int(weight.stored_minus_one),
        HAS_ORDER=weight.order is not None, HAS_BIAS=bias is not None, ONE_GROUP=one_group,
        ROWS=rows, OUTS=outs, DEPTH=depth, WIDEN=INTERPRETING,
        num_warps=num_warps, num_stages=3,
    )  # fmt: skip


def _tile(num_tokens: int, itemsize: int) -> tuple[int, int, int, int]:
    """Return tokens, outputs and inputs of a tile, and its warps; three tiles serve all numbers of tokens."""
    if itemsize == 4:
        return 16, 32, 32, 4  # more does not fit into the registers without tensor cores
    if num_tokens <= 16:
        return 16, 32, 64, 4  # a decode: many programs, since each reads its weights once
    if num_tokens <= 64:
        return 64, 64, 64, 4
    return 128, 64, 64, 8


def weight_only_linear_reference(x: Tensor, weight: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
    """`weight_only_linear` in torch, with a weight that is dequantised for the time of the call."""
    rounded = weight.dequantize().to(x.dtype)
    y = functional.linear(x.float(), rounded.float(), None if bias is None else bias.float())
    out.copy_(y.to(x.dtype))
