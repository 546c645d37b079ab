"""Sections of `gpu.py`, each the program of one process: `gpu_sections.py SECTION [--dry-run]`.

    ceilings  copy bandwidth and matrix products of this card, which all percentages refer to
    kernels   every Triton kernel in float32, float16 and bfloat16 against float64
    parity    six families with small random weights against transformers in float64
    engine    32 streams of all kinds of sampling, together and one by one
    faults    kill -9 and an illegal access to the GPU's memory under 64 streams
    bench     speed of decoding, prompts, attention and sampling, in percent of what the ceilings allow

A section is a list of cases. A case that raises is a result like any other (`passed` false, with the error), and the
next one begins; only an error that poisons the CUDA context ends the section. All results are JSON lines on standard
output, written when they are known.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from gpu_bench import bench
from gpu_place import KINDS, ROOT, TOLERANCE, Case, Figures, Place, circumstances, randn, read_all
from gpu_steps import compare_step_kernels
from torch import Tensor

sys.path.insert(0, str(ROOT))  # the small models of the tests

from triolet import EngineConfig, RequestOutputKind, SamplingParams
from triolet.kernels.attention_metadata import AttentionMetadata

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
# Between triolet's log-probabilities and those of transformers in float64, over logits of a spread of about 10.
MAX_LOGPROB_DIFFERENCE = {"float32": 1e-2, "bfloat16": 0.5}
STICKY = ("CUDA error", "illegal memory access", "device-side assert")


def ceilings(place: Place) -> Iterator[Case]:
    """Yield the measurement that all percentages refer to."""

    def measure() -> Figures:
        num_bytes, side = (2**20, 128) if place.dry_run else (2**30, 8192)
        source = torch.randint(255, (num_bytes,), dtype=torch.uint8, device=place.device)
        target = torch.empty_like(source)
        copy_s = place.time_s(lambda: target.copy_(source), 20)
        left, right = (torch.randn(side, side, device=place.device).bfloat16() for _ in range(2))
        product_s = place.time_s(lambda: left @ right, 20)
        # bytes read plus bytes written; random numbers, because a product of zeros is faster
        return {"copy_bytes_per_s": 2 * num_bytes / copy_s, "matmul_flop_per_s": 2 * side**3 / product_s}

    yield "copy and matmul", measure


def kernels(place: Place) -> Iterator[Case]:
    """Yield every Triton kernel with every dtype, and the bits of the noise."""
    for dtype in place.dtypes:
        name = str(dtype).removeprefix("torch.")
        for check in (_rms_norm, _rotary, _kv_write, _gate_mul):
            yield f"{check.__name__.strip('_')} {name}", partial(check, place, dtype)
        for kind, lens in _attention_steps(place).items():
            for options in ({}, {"sliding_window": 20, "soft_cap": 5.0}):
                words = f"attention {kind}{' window and cap' if options else ''} {name}"
                yield words, partial(_attention, place, dtype, lens, **options)
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


def _attention_steps(place: Place) -> dict[str, list[tuple[int, int]]]:
    if place.dry_run:
        return {"decode": [(1, 1), (1, 33)], "mixed": [(1, 17), (9, 20)]}
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
) -> Figures:
    """Compare a step with float64; slots of no sequence are NaN, and so is memory before it is written."""
    from triolet.kernels.paged_attention import paged_attention_triton

    heads, kv_heads, head_dim, block_size = (4, 2, 32, 16) if place.dry_run else (16, 4, 128, 16)
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
        keys[slots], values[slots] = (torch.randn(2, seq_len, kv_heads, head_dim)).to(dtype).float()
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
        query_lens_host=query_lens,
        seq_lens_host=seq_lens,
    )
    out = paged_attention_triton(
        query.to(place.device), *(each.view(shape).to(dtype).to(place.device) for each in (keys, values)),
        metadata, scale=head_dim**-0.5, sliding_window=sliding_window, soft_cap=soft_cap,
    )  # fmt: skip
    return compared([(out, torch.cat(truths))], TOLERANCE[dtype])


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
    some = [
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


def parity(place: Place) -> Iterator[Case]:
    """Yield each family in float32 and bfloat16."""
    for family in FAMILIES:
        # a dry run shows that the case runs, and once is enough for that
        dtypes = ("float32",) if place.dry_run and family != FAMILIES[0] else ("float32", "bfloat16")
        for dtype in dtypes:
            yield f"{family} {dtype}", partial(_parity, place, family, dtype)
        if not place.dry_run or family == FAMILIES[0]:
            yield f"{family} without graphs", partial(_parity, place, family, dtypes[0], enforce_eager=True)


def _parity(place: Place, family: str, dtype: str, *, enforce_eager: bool = False) -> Figures:
    """Compare greedy answers and their log-probabilities with transformers in float64 over the same weights."""
    import transformers

    from tests.model.tiny import VOCAB_SIZE, make_model

    # longer than the models' sliding windows; prompts of several lengths, computed together
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(4 + 9 * i)] for i in range(4)]
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(family, Path(name), dtype=getattr(torch, dtype))
        config = EngineConfig(
            model=str(folder), dtype=dtype, device=place.device, runner="inline", num_kv_blocks=64,
            enforce_eager=enforce_eager,
        )  # fmt: skip
        params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=1, ignore_eos=True)
        answers = trio.run(_answers, config, prompts, [params] * len(prompts))
        reference = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).to(place.device)
    largest, num_other, num_tokens = 0.0, 0, 0
    for prompt, (token_ids, logprobs) in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt + token_ids], device=place.device)
            truth = reference(ids).logits[0].double().log_softmax(-1).cpu()
        for place_in_answer, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            at = truth[len(prompt) - 1 + place_in_answer]
            largest = max(largest, abs(at[token_id].item() - logprob))
            num_other += int(at.argmax()) != token_id
            num_tokens += 1
    limit = MAX_LOGPROB_DIFFERENCE[dtype]
    same = num_other == 0 or dtype != "float32"
    return {
        "tokens": num_tokens, "other_tokens": num_other, "largest_logprob_difference": largest,
        "limit": limit, "passed": same and largest <= limit,
    }  # fmt: skip


async def _answers(
    config: EngineConfig, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
) -> list[tuple[list[int], list[float]]]:
    from triolet import open_engine

    async with open_engine(config) as engine:
        return await read_all(engine, prompts, params)


def engine(place: Place) -> Iterator[Case]:
    """Yield the whole engine with the model in a process."""
    yield "together as apart, and blocks given back", lambda: trio.run(_engine, place)


def _small_model(folder: str) -> str:
    from tests.model.tiny import make_model

    return str(make_model("qwen3", Path(folder)))


async def _engine(place: Place) -> Figures:
    """Read 32 streams of all kinds together, again four at a time, and leave eight: blocks must come back."""
    from triolet import open_engine

    prompts = [[(11 * i + j) % 256 for j in range(1 + 5 * i % 40)] for i in range(32)]
    kinds = list(KINDS.values())
    params = [
        SamplingParams(**kinds[i % len(kinds)], seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=_small_model(folder),
            dtype="float32",
            device=place.device,
            runner="process",
            num_kv_blocks=256,
        )
        async with open_engine(config) as each:
            together = await read_all(each, prompts, params)
            apart = [
                answer
                for i in range(0, len(prompts), 4)
                for answer in await read_all(each, prompts[i : i + 4], params[i : i + 4])
            ]
            for prompt in prompts[:8]:
                async with each.generate(prompt, SamplingParams(max_tokens=200, ignore_eos=True)) as stream:
                    async for _ in stream:
                        break
            for _ in range(500):
                counts = each.statistics()
                if not (num_held := counts.kv_blocks_in_use + counts.kv_blocks_quarantined):
                    break
                await trio.sleep(0.02)
    # float32: neither the neighbours in a batch nor the order of arrival may change a token
    other = sum(a[0] != b[0] for a, b in zip(together, apart, strict=True))
    short = sum(len(token_ids) != 24 for token_ids, _ in together)
    return {
        "streams": len(prompts), "other_answers": other, "short_answers": short, "blocks_held": num_held,
        "passed": not other and not short and not num_held,
    }  # fmt: skip


FAULTS = {"kill -9": signal.SIGKILL, "illegal access": signal.SIGUSR1}


def faults(place: Place) -> Iterator[Case]:
    """Yield the ends that a runner's process may find while 64 streams are read; in a dry run in one engine."""
    each = [FAULTS] if place.dry_run else [{name: number} for name, number in FAULTS.items()]
    for some in each:
        yield " and ".join(some), partial(_fault, place, list(some.values()))


def _fault(place: Place, numbers: list[signal.Signals]) -> Figures:
    num_streams, num_tokens = 64, 40 if place.dry_run else 150
    logging.disable()  # the crash is reported, with its traceback
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            model=_small_model(folder), dtype="float32", device=place.device, runner="process",
            num_kv_blocks=1024, max_num_seqs=num_streams,
        )  # fmt: skip
        whole, *broken, pauses_s, num_restarts = trio.run(
            _with_faults, config, num_streams, num_tokens, numbers
        )
    other = sum(a != b for answers in broken for a, b in zip(whole, answers, strict=True))
    return {
        "streams": num_streams, "restarts": num_restarts, "other_answers": other, "pauses_s": pauses_s,
        "passed": other == 0 and num_restarts == len(numbers),
    }  # fmt: skip


async def _with_faults(
    config: EngineConfig, num_streams: int, num_tokens: int, numbers: list[signal.Signals]
) -> list[Any]:
    """Return the answers without a fault, those with each one, the pauses in seconds, and the number of restarts."""
    from triolet.actors.executors.process import ProcessExecutor
    from triolet.engine.open_engine import run_engine

    worker = (sys.executable, str(ROOT / "benchmarks" / "gpu_worker.py"))
    times_s: list[float] = []
    answers: list[list[int]] = []
    is_under_way = trio.Event()

    async def read(index: int) -> None:
        params = SamplingParams(
            temperature=0.9 if index % 2 else 0.0, seed=index, max_tokens=num_tokens, ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        async with each.generate([index + 1] * (index % 40 + 1), params) as stream:
            async for output in stream:
                answers[index] += output.outputs[0].token_ids
                times_s.append(trio.current_time())
                if all(answers):  # every stream has begun
                    is_under_way.set()

    rounds: list[Any] = []
    pauses_s = []
    async with run_engine(config, ProcessExecutor(config, worker)) as each:
        for number in (None, *numbers):
            answers, times_s, is_under_way = [[] for _ in range(num_streams)], [], trio.Event()
            async with trio.open_nursery() as nursery:
                for index in range(num_streams):
                    nursery.start_soon(read, index)
                if number is not None:
                    await is_under_way.wait()
                    process_id = each.model_info.process_id
                    assert process_id is not None
                    os.kill(process_id, number)
            # the recovery is the longest pause in the tokens: some that were sent before the fault arrive after it
            if number is not None:
                pauses_s.append(round(max(b - a for a, b in pairwise(times_s)), 3))
            rounds.append(answers)
        num_restarts = each.statistics().num_restarts
    return [*rounds, pauses_s, num_restarts]


SECTIONS: dict[str, Callable[[Place], Iterator[Case]]] = {
    "ceilings": ceilings,
    "kernels": kernels,
    "parity": parity,
    "engine": engine,
    "faults": faults,
    "bench": bench,
}


def run(section: str, place: Place, end_s: float) -> int:
    """Run the cases of a section until none or no time is left; return the exit status."""
    around = circumstances(place)
    num_failed = 0
    for name, work in SECTIONS[section](place):
        if time.monotonic() > end_s:
            print(
                json.dumps(
                    {"bench": f"gpu_{section}", "case": name, "passed": False, "error": "no time was left"}
                )
            )
            return 1
        began_s, is_poisoned = time.monotonic(), False
        try:
            figures = {"passed": True, **work()}
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            traceback.print_exc()
            text = "".join(traceback.format_exception_only(error)).strip()[:1000]
            figures, is_poisoned = {"passed": False, "error": text}, any(sign in text for sign in STICKY)
        seconds = round(time.monotonic() - began_s, 2)
        # without ceilings there are no percentages, and JSON has no NaN
        shown = {key: None if value != value else value for key, value in figures.items()}
        print(
            json.dumps({"bench": f"gpu_{section}", "case": name, **shown, "seconds": seconds, **around}),
            flush=True,
        )
        num_failed += figures["passed"] is False
        if is_poisoned:
            return 1
        if not place.dry_run:
            torch.cuda.empty_cache()
    return 1 if num_failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--dry-run", action="store_true", help="on a pretended device")
    parser.add_argument(
        "--ceilings", type=json.loads, default={}, help="rates of the section ceilings, as JSON"
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no case begins")
    options = parser.parse_args()
    torch.manual_seed(0)
    # Memory that a kernel leaves unwritten shows as NaN.
    if options.section == "kernels":
        torch.use_deterministic_algorithms(True, warn_only=True)
    if not options.dry_run:
        torch.backends.cuda.matmul.allow_tf32 = False
    assumed = {
        "copy_bytes_per_s": math.nan,
        "matmul_flop_per_s": math.nan,
    }  # percentages are NaN without ceilings
    end_s = time.monotonic() + options.limit * 0.95
    return run(options.section, Place(options.dry_run, {**assumed, **options.ceilings}), end_s)


if __name__ == "__main__":
    sys.exit(main())
