"""Section `kernels` of `gpu.py`: every Triton kernel against numbers that are computed in float64, or bit for bit."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from gpu_place import ROOT, TOLERANCE, Case, Figures, Place, by_flash_attention, flash_attentions, randn
from gpu_steps import compare_step_kernels
from torch import Tensor

sys.path.insert(0, str(ROOT))  # weights and steps of the tests

from tests.kernels.packed_weights import CASES
from triolet import SamplingParams
from triolet.kernels.attention_metadata import AttentionMetadata
from triolet.kernels.flash_attention import FlashAttention

FLOAT8 = torch.float8_e4m3fn
ATTENTION_OPTIONS: list[dict[str, Any]] = [{}, {"sliding_window": 20, "soft_cap": 5.0}]


def kernels(place: Place) -> Iterator[Case]:
    """Yield every Triton kernel with every dtype, and the bits of the noise."""
    flashes = flash_attentions(place)
    for dtype in place.dtypes:
        name = str(dtype).removeprefix("torch.")
        for check in (
            _rms_norm, _rotary, _kv_write, _kv_write_float8, _gate_mul, _qkv_prepare, _grouped_linear, _low_rank,
            _scaled_linear,
        ):  # fmt: skip
            yield f"{check.__name__.strip('_')} {name}", partial(check, place, dtype)
        for weight in ("gptq", "fp8 by block") if place.dry_run else CASES:
            yield f"weight-only linear, {weight} {name}", partial(_weight_only, place, dtype, weight)
        for kind, lens in _attention_steps(place).items():
            for options in ATTENTION_OPTIONS:
                words = f"attention {kind}{' window and cap' if options else ''} {name}"
                yield words, partial(_attention, place, dtype, lens, **options)
            yield f"attention {kind} fp8 {name}", partial(_attention, place, dtype, lens, cache_dtype=FLOAT8)
            yield (
                f"attention {kind} of any lengths {name}",
                partial(_attention, place, dtype, lens, is_bound=True),
            )
            for flash in flashes:
                case = partial(_attention, place, dtype, lens)
                yield f"attention {kind} by {flash} {name}", by_flash_attention(flash, case)
        yield f"step {name}", partial(compare_step_kernels, place, dtype)
    yield "noise bits", partial(_noise, place)
    yield "draws", partial(_draws, place)


def compared(pairs: Sequence[tuple[Tensor, Tensor]], tolerance: float) -> Figures:
    """Compare results with their float64 truth; NaN and unwritten numbers never pass."""
    worst = 0.0
    for result, truth in pairs:
        result, truth = result.cpu().double(), truth.cpu().double()
        error = ((result - truth).norm() / truth.norm().clamp_min(1e-30)).item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    shown = worst if math.isfinite(worst) else "not finite"
    return {"relative_error": shown, "tolerance": tolerance, "passed": worst <= tolerance}


def _rms_norm(place: Place, dtype: torch.dtype) -> Figures:
    from triolet.kernels.rms_norm import rms_norm_triton

    pairs = []
    for shape in ((1, 64), (5, 3, 128), (3, 1000), (2 if place.dry_run else 300, 4096)):
        for offset in (0.0, 1.0):
            x, residual, weight = (randn(place, dtype, *each) for each in (shape, shape, shape[-1:]))
            out, total = rms_norm_triton(x, weight, 1e-6, residual=residual, weight_offset=offset)
            wide = total.double()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
            pairs += [
                (total, x.double() + residual.double()),
                (out, wide * scale * (weight.double() + offset)),
            ]
    return compared(pairs, TOLERANCE[dtype])


def _rotary(place: Place, dtype: torch.dtype) -> Figures:
    from triolet.kernels.rotary import rotary_triton

    pairs = []
    for num_tokens, head_dim, rotary_dim in ((1, 64, 64), (7, 128, 128), (5, 96, 48)):
        query, key = (
            randn(place, dtype, num_tokens, 4, head_dim),
            randn(place, dtype, num_tokens, 2, head_dim),
        )
        angle = torch.rand(100, rotary_dim // 2) * 6
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).to(place.device)
        positions = torch.randint(100, (num_tokens,), device=place.device)
        cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
        for heads in (query, key):
            first, second = heads[..., :rotary_dim].double().chunk(2, dim=-1)
            rest = heads[..., rotary_dim:].double()
            pairs.append(
                (heads, torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1))
            )
        rotary_triton(query, key, cos_sin, positions)
    return compared(pairs, TOLERANCE[dtype])


def _kv_write(place: Place, dtype: torch.dtype) -> Figures:
    from triolet.kernels.kv_write import kv_write_triton

    new, cache = randn(place, dtype, 9, 2, 80), randn(place, dtype, 6, 16, 2, 80)
    slots = torch.randperm(6 * 16)[:9]
    slots[4] = -1  # padding
    truth = cache.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            truth[slot // 16, slot % 16] = new[token].double()
    kv_write_triton(new, cache, slots.to(place.device))
    return compared([(cache, truth)], 0.0)


def _gate_mul(place: Place, dtype: torch.dtype) -> Figures:
    from triolet.kernels.silu_mul import gelu_tanh_mul_triton, silu_mul_triton

    pairs = []
    for shape in ((1, 64), (3, 2 * 1000), (2, 2 * 3072)):
        gate_up = randn(place, dtype, *shape)
        gate, up = gate_up.double().chunk(2, dim=-1)
        pairs += [
            (silu_mul_triton(gate_up), gate * torch.sigmoid(gate) * up),
            (gelu_tanh_mul_triton(gate_up), torch.nn.functional.gelu(gate, approximate="tanh") * up),
        ]
    return compared(pairs, TOLERANCE[dtype])


def _kv_write_float8(place: Place, dtype: torch.dtype) -> Figures:
    """Compare the codes that are kept with torch's conversion."""
    from triolet.kernels.float8 import to_float8
    from triolet.kernels.kv_write import kv_write_triton

    num_other = 0
    for kept in (FLOAT8, torch.float8_e5m2):
        new = randn(place, dtype, 40, 2, 80) * 100
        cache = torch.zeros(3, 16, 2, 80, dtype=torch.uint8, device=place.device).view(kept)
        kv_write_triton(new, cache, torch.arange(40, device=place.device), 0.5)
        truth = to_float8(new.cpu(), kept, 0.5).view(torch.uint8)
        num_other += int((cache.view(torch.uint8).cpu().flatten(0, 1)[:40] != truth).sum())
    return {"other_codes": num_other, "passed": num_other == 0}


def _qkv_prepare(place: Place, dtype: torch.dtype) -> Figures:
    """Compare norms, rotation and writes in one launch with float64."""
    from triolet.kernels.qkv_prepare import HeadNorms, qkv_prepare_triton

    num_tokens, num_heads, kv_heads, head_dim, block_size = 3 if place.dry_run else 37, 8, 2, 128, 16
    heads = randn(place, dtype, num_tokens, num_heads + 2 * kv_heads, head_dim)
    weights = randn(place, dtype, 2, head_dim)
    angle = torch.rand(500, head_dim // 2, dtype=torch.float64) * 6
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).float()
    positions, slots = torch.randint(500, (num_tokens,)), torch.randperm(64)[:num_tokens]
    wide = heads.cpu().double()
    cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    truths = []
    for part, weight in zip(
        (wide[:, :num_heads], wide[:, num_heads:-kv_heads]), weights.cpu().double(), strict=True
    ):
        normed = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * weight
        first, second = normed.chunk(2, dim=-1)
        truths.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    keys, values = (
        torch.full((4, block_size, kv_heads, head_dim), math.nan, dtype=dtype, device=place.device)
        for _ in range(2)
    )
    norms = HeadNorms(query_weight=weights[0], key_weight=weights[1], eps=1e-6, weight_offset=0.0)
    query = qkv_prepare_triton(
        heads, keys, values, slots.to(place.device), positions.to(place.device), num_heads=num_heads, norms=norms,
        cos_sin=cos_sin.to(place.device),
    )  # fmt: skip
    there = slots.to(place.device)
    kept = [cache.flatten(0, 1)[there] for cache in (keys, values)]
    # Norms are rounded to the dtype before they are turned, as the operations one by one round them.
    return compared(
        [(query, truths[0]), (kept[0], truths[1]), (kept[1], wide[:, -kv_heads:])], 2 * TOLERANCE[dtype]
    )


def _weight_only(place: Place, dtype: torch.dtype, case: str) -> Figures:
    """Compare products of packed weights with those of the numbers that the format's formula gives."""
    from triolet.kernels.linear.weight_only import weight_only_linear_triton

    weight, plain = CASES[case]()
    packed, pairs = weight.to(torch.device(place.device)), []
    for num_tokens in (1, 17, 65):
        x = randn(place, dtype, num_tokens, weight.num_in)
        out = torch.full((num_tokens, weight.num_out), math.nan, dtype=dtype, device=place.device)
        weight_only_linear_triton(x, packed, None, out)
        pairs.append((out, x.cpu().double() @ plain.to(dtype).double().T))
    return compared(pairs, TOLERANCE[dtype])


def _grouped_linear(place: Place, dtype: torch.dtype) -> Figures:
    """Compare the products of all experts at once with those of each token alone."""
    from triolet.kernels.linear.grouped import ExpertTiles, StackedWeights, grouped_linear_triton

    num_experts, top_k, num_in, num_out = (4, 2, 40, 33) if place.dry_run else (32, 4, 1000, 770)
    weights = StackedWeights(randn(place, dtype, num_experts, num_out, num_in))
    pairs, numbers = [], torch.arange(num_experts, device=place.device)
    for num_tokens in (1, 9, 150):
        x = randn(place, dtype, num_tokens, num_in)
        chosen = torch.rand(num_tokens, num_experts).topk(top_k).indices
        tiles = ExpertTiles.of(chosen.to(place.device), numbers, x.itemsize)
        all_pairs = x.cpu().double().repeat_interleave(top_k, dim=0)
        truth = torch.einsum("pi,poi->po", all_pairs, weights.weight.cpu().double()[chosen.flatten()])
        pairs.append((grouped_linear_triton(x, weights, tiles, None), truth[tiles.places.cpu()]))
    return compared(pairs, TOLERANCE[dtype])


def _low_rank(place: Place, dtype: torch.dtype) -> Figures:
    """Compare what two adapters add to the tokens of a step with float64."""
    from triolet.kernels.lora import AdapterTiles, LowRankPair, LowRankTable, add_low_rank_triton

    num_in, num_out, num_tokens = 160, 224, 45
    adapters = [
        [
            LowRankPair(
                start=start, a=randn(place, dtype, rank, num_in) / 12, b=randn(place, dtype, width, rank) / 4
            )
            for start, width, rank in modules
        ]
        for modules in (((0, 128, 16), (160, 64, 3)), ((160, 64, 40),))
    ]
    slots = torch.tensor([-1, 0, 1] * (num_tokens // 3))
    groups = [(slots == slot).nonzero()[:, 0] for slot in range(2)]
    table = LowRankTable.of(adapters)
    assert table is not None
    x, y = randn(place, dtype, num_tokens, num_in), randn(place, dtype, num_tokens, num_out)
    truth = y.cpu().double()
    for tokens, of_adapter in zip(groups, adapters, strict=True):
        for pair in of_adapter:
            added = x.cpu().double()[tokens] @ pair.a.cpu().double().T @ pair.b.cpu().double().T
            truth[tokens, pair.start : pair.start + len(pair.b)] += added
    add_low_rank_triton(y, x, table, AdapterTiles.of(groups, torch.device(place.device)))
    # What A makes is rounded to the adapter's dtype, and the result once more.
    return compared([(y, truth)], 2 * TOLERANCE[dtype])


def _attention_steps(place: Place) -> dict[str, list[tuple[int, int]]]:
    if place.dry_run:
        return {"decode": [(1, 1), (1, 33)], "mixed": [(1, 17), (17, 20)]}
    return {
        "decode": [(1, 1), (1, 17), (1, 300), (1, 2049)],
        "split decode": [(1, 9000), (1, 3)],
        "prefill": [(64, 64), (129, 129), (33, 700)],
        "mixed": [(1, 1), (1, 999), (130, 400), (1, 16)],
    }


def _attention(
    place: Place,
    dtype: torch.dtype,
    lens: list[tuple[int, int]],
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    cache_dtype: torch.dtype | None = None,
    is_bound: bool = False,
    prompts: FlashAttention | None = None,
    block_size: int = 16,
) -> Figures:
    """Compare a step with float64; slots of no sequence are NaN, and so is memory before it is written.

    Args:
        cache_dtype: of keys and values; None for `dtype`.
        is_bound: whether the kernel is told bounds of the lengths, as in a graph.
        prompts: what attends to prompts; None for the Triton kernel.
        block_size: of the cache.
    """
    from triolet.kernels.paged_attention import paged_attention_triton

    heads, kv_heads, head_dim = (4, 2, 32) if place.dry_run else (16, 4, 128)
    query_lens, seq_lens = zip(*lens, strict=True)
    blocks_each = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_each) + 2
    keys, values = (torch.full((num_blocks * block_size, kv_heads, head_dim), math.nan) for _ in range(2))
    tables = torch.full((len(lens), max(blocks_each) + 1), 2**30, dtype=torch.int32)
    query = torch.randn(sum(query_lens), heads, head_dim).to(dtype)
    truths, first = [], 0
    for row, blocks in enumerate(torch.randperm(num_blocks)[: sum(blocks_each)].split(blocks_each)):
        query_len, seq_len = lens[row]
        tables[row, : len(blocks)] = blocks
        slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len]
        kept = torch.randn(2, seq_len, kv_heads, head_dim).to(cache_dtype or dtype)
        keys[slots], values[slots] = kept.float()
        q = query[first : first + query_len].double()
        k, v = (each[slots].double().repeat_interleave(heads // kv_heads, dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position, key_position = torch.arange(seq_len - query_len, seq_len)[:, None], torch.arange(seq_len)
        hidden = key_position > position
        if sliding_window is not None:
            hidden |= key_position <= position - sliding_window
        truths.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v))
        first += query_len
    shape = (num_blocks, block_size, kv_heads, head_dim)
    metadata = AttentionMetadata(
        cu_query_lens=torch.tensor((0, *query_lens)).cumsum(0).int().to(place.device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32).to(place.device),
        block_tables=tables.to(place.device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=place.device),
        query_lens_host=(sum(query_lens), *[0] * (len(lens) - 1)) if is_bound else query_lens,
        seq_lens_host=(2 * max(seq_lens),) * len(lens) if is_bound else seq_lens,
        has_any_lengths=is_bound,
    )
    key_cache, value_cache = (
        each.view(shape).to(cache_dtype or dtype).to(place.device) for each in (keys, values)
    )
    out = paged_attention_triton(
        query.to(place.device), key_cache, value_cache,
        metadata, scale=head_dim**-0.5, sliding_window=sliding_window, soft_cap=soft_cap, prompts=prompts,
    )  # fmt: skip
    return compared([(out, torch.cat(truths))], TOLERANCE[dtype])


def _scaled_linear(place: Place, dtype: torch.dtype) -> Figures:
    """Compare products of float8 with float8; on a GPU they are for bfloat16 alone, from compute capability 8.9 on."""
    from triolet.kernels.linear.scaled import (
        ScaledWeight,
        round_tokens_reference,
        round_tokens_triton,
        scaled_linear,
    )
    from triolet.kernels.linear.weight_only import byte_weight

    if not place.dry_run and (dtype != torch.bfloat16 or torch.cuda.get_device_capability() < (8, 9)):
        return {"passed": True, "left_out": f"{dtype} on this card"}
    values, factors = torch.randn(64, 256).to(FLOAT8), torch.rand(64, 1) / 16
    weight = ScaledWeight.of(byte_weight(values, factors, (1, 256)).to(torch.device(place.device)))
    assert weight is not None
    x = randn(place, dtype, 33, 256)
    codes, scales = round_tokens_triton(x)
    rounded, expected_scales = round_tokens_reference(x.cpu())
    truth = (rounded.double() * expected_scales.double()) @ (values.double() * factors.double()).T
    y = scaled_linear(codes, scales, weight, torch.float32 if place.dry_run else dtype)
    figures = compared([(y, truth)], TOLERANCE[dtype])
    is_equal = torch.equal(codes.cpu().view(torch.uint8), rounded.view(torch.uint8))
    return figures | {"bits_equal": is_equal, "passed": figures["passed"] and is_equal}


def _noise(place: Place) -> Figures:
    from triolet.model.sampling.noise import answer_streams, position_streams, uniform_noise

    def noise(device: str) -> Tensor:
        seeds, positions = torch.arange(100, device=device), torch.arange(100, device=device) * 7
        streams = position_streams(answer_streams(seeds), positions)
        return uniform_noise(streams, torch.arange(1000, device=device)).cpu()

    here, there = noise("cpu"), noise(place.device)
    return {"passed": torch.equal(here, there), "numbers": here.numel()}


def _draws(place: Place) -> Figures:
    """Compare the tokens of rows of mixed parameters with those that torch draws on the CPU."""
    from triolet.model.sampling.random_draw import GpuDraws, RandomDraw
    from triolet.model.sampling.sampling_row import SamplingRow

    num_rows, vocab_size = (24, 300) if place.dry_run else (2000, 20_000)
    some: list[dict[str, Any]] = [
        {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
        {"min_p": 0.1, "temperature": 1.5}, {"top_p": 0.999}, {"top_k": 1000}, {"temperature": 2.0},
    ]  # fmt: skip
    params = [SamplingParams(**{"temperature": 1.0, **some[i % len(some)]}) for i in range(num_rows)]
    rows = [SamplingRow(params=each, seed=i, vocab_size=vocab_size) for i, each in enumerate(params)]
    logits = torch.randn(num_rows, vocab_size) * 3
    logits[::2] = (logits[::2] * 8).round() / 8  # ties
    positions = list(range(num_rows))
    in_torch = attrs.evolve(RandomDraw.of(rows, vocab_size, torch.device("cpu")), on_cpu=None)
    expected = in_torch.draw(logits.clone(), logits.max(dim=1).values, positions)
    on_gpu = GpuDraws.of(params, in_torch.answers, vocab_size, torch.device(place.device))
    there = logits.to(place.device)
    got = on_gpu.draw(there, there.max(dim=1).values, positions).cpu()
    num_other = int((got != expected).sum())
    # logarithms and exponentials differ in their last bits: a draw in 100,000 may be too close to call
    return {"rows": num_rows, "other_tokens": num_other, "passed": num_other <= num_rows // 1000}
