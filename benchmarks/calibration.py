"""Compare what the calibration of the CPU kernels chooses with each fixed choice, for every target of this machine.

    python benchmarks/calibration.py [--model llama-15m llama-160m] [--rows 1 2 4 8 16 32 64] [--rounds 15]

A step decodes one token of each of `rows` sequences, greedily, at a context of 128 tokens. Each choice is yes or no for
a number of rows, so that there are four ways; all take turns in random order, so that other load on the machine affects
all alike. One JSON line for each target, model, dtype and number of rows: the median step of the way that the
calibration chose, of the best way, and their ratio. Weights are random, and so are their greedy tokens: the argmax
filter keeps more candidates than it would of a trained model.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import machine, median
from kernels_cpu import MODELS, random_weights, step_batch

from triolet.kernels.cpu.calibration import Calibration, calibrate
from triolet.kernels.cpu.gemm.packing import ANY_ROWS
from triolet.kernels.cpu.library import SWITCH, kernels
from triolet.kernels.cpu.targets import runnable
from triolet.model.architectures.families import parse_decoder_config
from triolet.model.backends.cpu.decoder import CpuDecoder
from triolet.model.backends.cpu.plan import build_cpu_decoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTEXT = 128
# Whether the filter is used, and whether there is no stage.
WAYS = [(filtered, alone) for filtered in (False, True) for alone in (False, True)]


def measure(model: CpuDecoder, chosen: Calibration, rows: int, rounds: int) -> dict[str, object]:
    """Time a step of all ways in turns; return what a line says of them, times in microseconds."""
    batch = step_batch(model.spec, rows, 1, CONTEXT)
    times: dict[tuple[bool, bool], list[float]] = {way: [] for way in WAYS}
    order, shuffle = WAYS[:], random.Random(rows).shuffle
    for _ in range(rounds):
        shuffle(order)
        for way in order:
            filtered, alone = way
            Calibration(argmax_filter_rows=filtered * ANY_ROWS, few_rows=alone * ANY_ROWS).apply(model._model)
            for _ in range(2):  # what the way before it left in the caches is not its own to count
                model.forward_greedy(batch)
            start = time.perf_counter()
            model.forward_greedy(batch)
            times[way].append((time.perf_counter() - start) * 1e6)
    medians = {way: median(took) for way, took in times.items()}
    way = rows <= chosen.argmax_filter_rows, rows <= chosen.few_rows
    best = min(medians, key=medians.__getitem__)
    return {
        **chosen.choices(), "filter": way[0], "best_filter": best[0], "alone": way[1], "best_alone": best[1],
        "calibrated_us": round(medians[way], 1), "best_us": round(medians[best], 1),
        "worst_us": round(max(medians.values()), 1), "ratio": round(medians[way] / medians[best], 3),
    }  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure the target of this process."""
    loaded = kernels()
    if loaded is None:
        raise SystemExit("the CPU kernels are not built here: there is nothing to calibrate")
    for name, dtype in itertools.product(options.model, options.dtype):
        config = parse_decoder_config(MODELS[name], Path(name))
        model = build_cpu_decoder(config, random_weights(config, DTYPES[dtype]), calibration="off")
        with tempfile.TemporaryDirectory() as cache:
            began = time.perf_counter()
            chosen = calibrate(model._cpp, model._model, DTYPES[dtype], "force", cache=Path(cache))
            took_s = time.perf_counter() - began
        for rows in options.rows:
            shape = {"bench": "calibration", "model": name, "dtype": dtype, "rows": rows}
            figures = measure(model, chosen, rows, options.rounds)
            line = {**shape, **figures, "calibration_s": round(took_s, 3), **machine()}
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=[*MODELS], default=["llama-15m", "llama-160m"])
    parser.add_argument("--dtype", nargs="+", choices=[*DTYPES], default=[*DTYPES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if SWITCH in os.environ:
        with torch.inference_mode():
            run(options)
        return
    for target in runnable():  # a process has one
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, SWITCH: target.name}, check=True)


if __name__ == "__main__":
    main()
