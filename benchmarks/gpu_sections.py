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

import torch
import trio
from gpu_bench import bench
from gpu_kernels import kernels
from gpu_place import KINDS, ROOT, Case, Figures, Place, circumstances, read_all

sys.path.insert(0, str(ROOT))  # the small models of the tests

from triolet import EngineConfig, RequestOutputKind, SamplingParams

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
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
        reference = reference.to(place.device)
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
