"""Random draws in Triton: temperature, min_p, top_k, top_p, noise and argmax, with no wait of the host.

Two passes. The first one finds, for rows with a top_k or top_p, the least logit that is kept without sorting: the
floats become integers of the same order, and a search takes four bits of the threshold at a time, counting (top_k) or
adding up weights (top_p) above 16 places at once. Weights are integers there, so that sums do not depend on an order.
The second pass gives each token that is kept its noise and takes the largest share.

The draw is that of `triolet.model.sampling.random_draw` in torch, with the same noise to the bit; exponentials and
logarithms may differ in their last bits. Of equally likely tokens top_p keeps those with lower ids, and top_k all.

Source: exponential noise: Gumbel-max; SplitMix64: see `triolet.model.sampling.noise`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from triolet.errors import KernelShapeError
from triolet.kernels._triton import device_function, kernel, next_power_of_2

if TYPE_CHECKING:
    import triton.language as tl

TILE = 1024
"""Tokens of one program of the draw, and of one turn of the search."""


@device_function
def _scaled(logits_ptr, live, temperature, floor):
    """Load logits and divide them by the temperature; -inf for tokens below min_p."""
    x = tl.div_rn(tl.load(logits_ptr, mask=live, other=float("-inf")), temperature)
    return tl.where(x < floor, float("-inf"), x)


@device_function
def _order_of(x):
    """Return integers of the order of floats; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@device_function
def _weight_of(x, largest):
    """Return probabilities as integers: 2 ** 40 for the likeliest token, of which 2 ** 23 fit into int64."""
    gap = x - largest
    return (tl.where(gap <= 0.0, tl.exp(gap), 0.0) * 1099511627776.0).to(tl.int64)


@kernel.with_widths("logits_stride", "vocab_size")
def _limits_kernel(
    logits_ptr,  # [num_rows, vocab_size] float32
    max_logits_ptr,  # [num_rows] float32
    temperature_ptr,  # [num_rows] float32
    log_min_p_ptr,  # [num_rows] float32, -inf = none
    top_k_ptr,  # [num_rows] int64, vocab_size = none
    top_p_ptr,  # [num_rows] float64, 1 or more = none
    thresholds_ptr,  # out: [num_rows] int32, order of the least logit that is kept
    last_ids_ptr,  # out: [num_rows] int32, of the tokens exactly there only those up to this id are kept
    logits_stride, vocab_size,
    TOLERANCE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Find what top_k and then top_p leave of a row."""
    LEAST: tl.constexpr = -2147483648
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    largest = tl.div_rn(tl.load(max_logits_ptr + row), temperature)
    floor = largest + tl.load(log_min_p_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    column = tl.arange(0, TILE)
    place = tl.arange(0, 16).to(tl.int64)

    threshold = tl.full([], LEAST, tl.int64)
    if top_k < vocab_size:
        for digit in range(8):
            step = tl.full([], 1, tl.int64) << (28 - 4 * digit)
            pivots = threshold + place * step  # [16]
            counts = tl.zeros([16, TILE], tl.int32)
            for start in range(0, vocab_size, TILE):
                live = start + column < vocab_size
                x = _scaled(row_ptr + start + column, live, temperature, floor)
                order = _order_of(x)
                counts += (live[None, :] & (order[None, :] >= pivots.to(tl.int32)[:, None])).to(tl.int32)
            above = tl.sum(counts, axis=1)  # [16], falling
            threshold += (tl.sum((above >= top_k).to(tl.int64), axis=0) - 1) * step
    last_id = vocab_size
    if top_p < 1.0:
        top_k_threshold = threshold
        threshold = tl.full([], LEAST, tl.int64)
        goal = tl.full([], 0, tl.int64)
        for digit in range(-1, 8):  # turn -1 adds up all weights
            step = tl.full([], 1, tl.int64) << tl.minimum(28 - 4 * digit, 32)
            pivots = threshold + place * step
            if digit < 0:
                pivots = top_k_threshold + place * 0
            sums = tl.zeros([16, TILE], tl.int64)
            for start in range(0, vocab_size, TILE):
                live = start + column < vocab_size
                x = _scaled(row_ptr + start + column, live, temperature, floor)
                order = _order_of(x)
                weight = _weight_of(x, largest)
                counted = live & (order >= top_k_threshold.to(tl.int32))
                above = counted[None, :] & (order[None, :] >= pivots.to(tl.int32)[:, None])
                sums += tl.where(above, weight[None, :], 0)
            above_sums = tl.sum(sums, axis=1)  # [16], falling
            if digit < 0:
                total = tl.max(above_sums, axis=0)
                wanted = top_p * total.to(tl.float64) * (1.0 - TOLERANCE)
                goal = tl.maximum(tl.ceil(wanted).to(tl.int64), 1)
            else:
                threshold += (tl.maximum(tl.sum((above_sums >= goal).to(tl.int64), axis=0), 1) - 1) * step
        # Of the tokens at the threshold as many as are needed, by their ids; those above it come first.
        higher = tl.zeros([TILE], tl.int64)
        equal = tl.zeros([TILE], tl.int64)
        for start in range(0, vocab_size, TILE):
            live = start + column < vocab_size
            x = _scaled(row_ptr + start + column, live, temperature, floor)
            order = _order_of(x)
            weight = _weight_of(x, largest)
            higher += tl.where(live & (order > threshold.to(tl.int32)), weight, 0)
            equal = tl.maximum(equal, tl.where(live & (order == threshold.to(tl.int32)), weight, 0))
        each = tl.maximum(tl.max(equal, axis=0), 1)
        missing = goal - tl.sum(higher, axis=0)
        num_equal = ((missing + each - 1) // each).to(tl.int32)
        num_before = tl.full([], 0, tl.int32)
        for start in range(0, vocab_size, TILE):
            live = start + column < vocab_size
            x = _scaled(row_ptr + start + column, live, temperature, floor)
            order = _order_of(x)
            is_equal = (live & (order == threshold.to(tl.int32))).to(tl.int32)
            rank = num_before + tl.cumsum(is_equal, axis=0)
            ids = tl.where((is_equal > 0) & (rank == num_equal), start + column, vocab_size)
            last_id = tl.minimum(last_id, tl.min(ids, axis=0))
            num_before += tl.sum(is_equal, axis=0)
    tl.store(thresholds_ptr + row, threshold.to(tl.int32))
    tl.store(last_ids_ptr + row, last_id)


@kernel.with_widths("logits_stride", "vocab_size")
def _draw_kernel(
    logits_ptr, max_logits_ptr, temperature_ptr, log_min_p_ptr,  # see `_limits_kernel`
    thresholds_ptr, last_ids_ptr,  # from it
    answers_ptr,  # [num_rows] int64, where the noise of each answer begins
    positions_ptr,  # [num_rows] int64, index in the answer of the token to be drawn
    shares_ptr,  # out: [num_rows, num_tiles] float32, the largest weight / noise of each tile
    ids_ptr,  # out: [num_rows, num_tiles] int32, the token that has it
    bits_ptr,  # WRITES_BITS only: [num_rows, vocab_size] int64, the noise itself
    logits_stride, vocab_size,
    WRITES_BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Draw the winner of a tile of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    token_id = tile * TILE + tl.arange(0, TILE)
    live = token_id < vocab_size
    temperature = tl.load(temperature_ptr + row)
    if temperature == 0.0:
        return

    # SplitMix64, twice: the stream of the position, and in it the number of the token.
    position = tl.load(positions_ptr + row).to(tl.uint64)
    stream = tl.load(answers_ptr + row).to(tl.uint64) + (position + 1) * 0x9E3779B97F4A7C15
    stream = (stream ^ (stream >> 30)) * 0xBF58476D1CE4E5B9
    stream = (stream ^ (stream >> 27)) * 0x94D049BB133111EB
    stream = stream ^ (stream >> 31)
    bits = stream + (token_id + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    bits = bits ^ (bits >> 31)
    if WRITES_BITS:
        tl.store(bits_ptr + row * vocab_size + token_id, bits.to(tl.int64), mask=live)
    uniform = ((bits >> 1) | 1).to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2 ** -63
    uniform = tl.minimum(uniform, 0.99999994)  # the largest float32 below 1
    # -log(1 - u), to the last bits for small u too, which decide whether an unlikely token wins: 2 artanh(u / (2 - u)).
    s = uniform / (2.0 - uniform)
    t = s * s
    series = 1.0 + t * (
        1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * (1.0 / 9 + t * (1.0 / 11 + t * (1.0 / 13 + t / 15)))))
    )
    noise = tl.where(uniform < 0.5, 2.0 * s * series, -tl.log(1.0 - uniform))

    largest = tl.div_rn(tl.load(max_logits_ptr + row), temperature)
    logit = tl.load(logits_ptr + row * logits_stride + token_id, mask=live, other=float("-inf"))
    x = tl.div_rn(logit, temperature)
    kept = live & (x >= largest + tl.load(log_min_p_ptr + row))
    threshold = tl.load(thresholds_ptr + row)
    order = _order_of(x)
    is_within = token_id <= tl.load(last_ids_ptr + row)
    kept = kept & ((order > threshold) | ((order == threshold) & is_within))
    share = tl.where(kept, tl.exp(x - largest) / noise, -1.0)
    best = tl.max(share, axis=0)
    # The last id stands in for a row without numbers, in which no share equals the largest.
    winner = tl.min(tl.where(share == best, token_id, vocab_size - 1), axis=0)
    out = row * tl.num_programs(1) + tile
    tl.store(shares_ptr + out, best)
    tl.store(ids_ptr + out, winner)


@kernel
def _winner_kernel(
    shares_ptr,  # [num_rows, num_tiles] float32
    ids_ptr,  # [num_rows, num_tiles] int32
    tokens_ptr,  # out: [num_rows] int64
    num_tiles, vocab_size,
    PADDED_TILES: tl.constexpr,
):  # fmt: skip
    """Take the winner of a row's tiles."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PADDED_TILES)
    live = tile < num_tiles
    share = tl.load(shares_ptr + row * num_tiles + tile, mask=live, other=-2.0)
    token_id = tl.load(ids_ptr + row * num_tiles + tile, mask=live, other=0)
    best = tl.max(share, axis=0)
    winner = tl.min(tl.where(live & (share == best), token_id, vocab_size - 1), axis=0)
    tl.store(tokens_ptr + row, winner.to(tl.int64))


def draw_triton(
    logits: Tensor,
    max_logits: Tensor,
    *,
    temperature: Tensor,
    log_min_p: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    answers: Tensor,
    positions: Tensor,
    tolerance: float,
    bits: Tensor | None = None,
) -> Tensor:
    """Draw a token for each row.

    Args:
        logits: [num_rows, vocab_size] float32, last dim contiguous; stay as they are.
        max_logits: [num_rows] float32, the largest of each row; if it is not finite, the row gives any token.
        temperature: [num_rows] float32, positive; 0 for a row that is not drawn and gets any token. It must have
            neither top_k nor top_p.
        log_min_p: [num_rows] float32, logarithm of min_p; -inf = none.
        top_k: [num_rows] int64; vocab_size = none.
        top_p: [num_rows] float64; 1 or more = none.
        answers: [num_rows] int64, where the noise of each answer begins.
        positions: [num_rows] int64, index in the answer of the token to be drawn.
        tolerance: share by which a sum of probabilities may stay below top_p.
        bits: [num_rows, vocab_size] int64, gets the noise's bits; None = they are not written.

    Returns:
        [num_rows] int64.

    Raises:
        KernelShapeError: the tensors disagree on num_rows, or have other dtypes or strides.

    Moves logits.nbytes, and 18 times as much for a row with both top_k and top_p.
    """
    num_rows, vocab_size = logits.shape
    columns = max_logits, temperature, log_min_p, top_k, top_p, answers, positions
    if any(column.shape != (num_rows,) or not column.is_contiguous() for column in columns):
        raise KernelShapeError("num_rows", logits=logits.shape, columns=[column.shape for column in columns])
    dtypes = [column.dtype for column in (logits, *columns)]
    if dtypes != [torch.float32] * 4 + [torch.int64, torch.float64, torch.int64, torch.int64]:
        raise KernelShapeError("dtypes", got=dtypes)
    if logits.stride(1) != 1:
        raise KernelShapeError("contiguous rows", strides=logits.stride())
    device = logits.device
    thresholds, last_ids = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    tile = min(TILE, max(16, next_power_of_2(vocab_size)))
    num_tiles = -(-vocab_size // tile)
    shares = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return tokens
    # For rows without limits too, which leave it at once: other launches would be a binary more.
    _limits_kernel[num_rows,](
        logits, max_logits, temperature, log_min_p, top_k, top_p, thresholds, last_ids,
        logits.stride(0), vocab_size, TOLERANCE=tolerance, TILE=tile, num_warps=16,
    )  # fmt: skip
    _draw_kernel[num_rows, num_tiles](
        logits, max_logits, temperature, log_min_p, thresholds, last_ids, answers, positions,
        shares, ids, ids if bits is None else bits, logits.stride(0), vocab_size,
        WRITES_BITS=bits is not None, TILE=tile,
    )  # fmt: skip
    _winner_kernel[num_rows,](
        shares, ids, tokens, num_tiles, vocab_size, PADDED_TILES=next_power_of_2(num_tiles)
    )
    return tokens
