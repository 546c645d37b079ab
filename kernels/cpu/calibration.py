"""Choices between two ways to the same result, measured on this machine with the model's own weights.

A choice here never changes a token: both ways give the same bits, so a measurement that other programs disturbed costs
time and nothing else. What was measured is kept beside the compiled kernels, for the same kernels, CPU, threads and
shape of model: later loads, and the second life of a model after a crash, measure nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import torch

from triolet.kernels.cpu.abi import (
    CacheGroupStruct,
    LayerStruct,
    ModelStruct,
    StepStruct,
    addresses,
    no_memory,
)
from triolet.kernels.cpu.build import cache_folder, sources_hash
from triolet.kernels.cpu.gemm.packing import ANY_ROWS
from triolet.kernels.cpu.targets import cpu_facts

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a step that may be tried with and without the argmax filter."""

FEW_ROWS: Final = (2, 4, 8, 16, 32, 64)
"""Rows of a step that may be tried without a stage that prepares them; a lone row never has one."""

ROUNDS: Final = 5
FILTER_BUDGET_S, FEW_ROWS_BUDGET_S = 0.15, 0.06
"""Times after which nothing more is tried, seconds; a large head takes all of the first."""

MIN_SHARE: Final = 0.9
"""Part of the time that the measuring thread must have had, or what it measured is for this load only."""

MAX_KEPT: Final = 64
"""Files of choices; the oldest make way."""

_BLOCK_SIZE: Final = 16
_VERSION: Final = 1  # of the file, and of how choices are measured

logger = logging.getLogger(__name__)


@attrs.frozen
class Calibration:
    """Choices for one model on one machine.

    Args:
        argmax_filter_rows: up to so many rows of a step the argmax filter saves time; 0, or one of `ROWS`, or
            `ANY_ROWS`.
        few_rows: up to so many rows every thread prepares all rows of a product itself, instead of a part of them in
            a stage that all threads wait for.
    """

    argmax_filter_rows: int = 8
    few_rows: int = 4

    def apply(self, model: ModelStruct) -> None:
        """Set the fields of a model."""
        model.argmax_filter.max_rows, model.few_rows = self.argmax_filter_rows, self.few_rows

    def choices(self) -> dict[str, int]:
        """Return the choices by name; 0 stands for never, `ANY_ROWS` for always."""
        return attrs.asdict(self)

    def shown(self) -> dict[str, str]:
        """Return the choices by name, in words and digits."""
        return {name: "any" if rows == ANY_ROWS else str(rows) for name, rows in self.choices().items()}


def calibrate(
    cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype, mode: str = "auto", *, cache: Path | None = None
) -> Calibration:
    """Choose for a model, and set its fields.

    Args:
        cpp: the kernels that compute it.
        model: with its weights.
        dtype: of the model.
        mode: `auto` takes what was measured before, `force` measures anew, `off` measures nothing.
        cache: folder that choices are kept in; None = `cache_folder()`.
    """
    if mode == "off":
        chosen = Calibration()
    else:
        key = _key(cpp, model, dtype)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        path = (cache or cache_folder()) / f"calibration-{digest[:24]}.json"
        if mode == "auto" and (kept := _read(path, key)) is not None:
            chosen = kept
        else:
            chosen = _measure_and_keep(path, key, cpp, model, dtype)
    chosen.apply(model)
    return chosen


def _measure_and_keep(
    path: Path, key: dict[str, Any], cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype
) -> Calibration:
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    chosen = _measure(cpp, model, dtype)
    # This thread computes, or waits for the others without sleeping: it lacks time only where other programs had it.
    share = (time.thread_time() - began_cpu_s) / (time.perf_counter() - began_s)
    if share < MIN_SHARE:
        logger.info("calibration: %s, not kept: other programs took %.0f %%", chosen, 100 * (1 - share))
    else:
        logger.info("calibration: %s, kept in %s", chosen, path)
        _write(path, key, chosen)
    return chosen


def kept_calibrations(cache: Path | None = None) -> list[tuple[Path, Calibration]]:
    """List the files of choices and what they hold, the latest last; those that cannot be read are left out."""
    found = [(path, _read(path, None)) for path in _files(cache or cache_folder())]
    return [(path, kept) for path, kept in found if kept is not None]


# --------------------------------------------------------------------------------------------- measuring


def _measure(cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype) -> Calibration:
    chosen = Calibration()
    chosen.apply(model)
    few_rows = calibrate_few_rows(cpp, model, dtype)
    attrs.evolve(chosen, few_rows=few_rows).apply(model)
    has_filter = bool(model.argmax_filter.int8.weights)
    rows = calibrate_argmax_filter(cpp, model, dtype) if has_filter else chosen.argmax_filter_rows
    return Calibration(argmax_filter_rows=rows, few_rows=few_rows)


def calibrate_argmax_filter(cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype) -> int:
    """Return up to how many rows the argmax filter of a model saves time: 0, one of `ROWS`, or `ANY_ROWS`.

    Few rows wait for the weights of the head, and the filter reads a quarter or half of the bytes. Many rows wait for
    the products, and the filter has two rows of int8 for each.

    Args:
        cpp: the kernels.
        model: with a filter; its `max_rows` is left as it was.
        dtype: of the model.
    """
    rows = torch.randn(ROWS[-1], model.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = model.argmax_filter.max_rows
    fastest = _most_that_win(ROWS, FILTER_BUDGET_S, lambda *limits: _time_head(cpp, model, rows, *limits))
    model.argmax_filter.max_rows = kept
    return ANY_ROWS if fastest == ROWS[-1] else fastest


def calibrate_few_rows(cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype) -> int:
    """Return up to how many rows every thread should prepare all rows itself: 1, or one of `FEW_ROWS`.

    To normalise, quantise or split a row takes a microsecond or more, and each thread repeats it; a stage of its own
    takes all threads to one point, which costs more the more there are.

    Args:
        cpp: the kernels.
        model: a model, of which the first layer is computed; its `few_rows` is left as it was.
        dtype: of the model.
    """
    one_layer = ModelStruct.from_buffer_copy(model)
    one_layer.num_layers = 1
    fastest = _most_that_win(
        FEW_ROWS, FEW_ROWS_BUDGET_S, lambda *limits: _time_layer(cpp, one_layer, dtype, *limits)
    )
    return max(fastest, 1)


def _most_that_win(
    counts: Sequence[int], budget_s: float, time_both: Callable[[int, float], tuple[float, float]]
) -> int:
    """Return the largest count for which the first way is no slower than the second; 0 if none is.

    The first way is faster up to some count and slower from there on, so that the middle of the counts that are still
    open is tried each time. When the time is over, half of those count as won.

    Args:
        counts: in rising order.
        budget_s: time after which no further one is tried, seconds.
        time_both: returns the times of both ways for a count, seconds; is told when time is over.
    """
    num_won, num_open_or_won = 0, len(counts)
    end_s = time.perf_counter() + budget_s
    while num_won < num_open_or_won:
        middle = (num_won + num_open_or_won) // 2
        first_s, second_s = time_both(counts[middle], end_s)
        if first_s <= second_s:
            num_won = middle + 1
        else:
            num_open_or_won = middle
        if time.perf_counter() > end_s:
            num_won = (num_won + num_open_or_won) // 2
            break
    return counts[num_won - 1] if num_won else 0


def _time_head(
    cpp: ctypes.CDLL, model: ModelStruct, rows: torch.Tensor, count: int, end_s: float
) -> tuple[float, float]:
    """Time the argmax of the first `count` rows with and without the filter, seconds."""
    max_logits, argmax = torch.empty(count), torch.empty(count, dtype=torch.int64)
    step = StepStruct(
        hidden=rows.data_ptr(),
        max_logits=max_logits.data_ptr(),
        argmax=argmax.data_ptr(),
        num_logits=count,
        num_threads=torch.get_num_threads(),
    )

    def run(limit: int) -> None:
        model.argmax_filter.max_rows = limit
        if cpp.triolet_head(ctypes.byref(model), ctypes.byref(step)):
            raise no_memory()

    return _in_turns(run, count, end_s)


def _time_layer(
    cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype, count: int, end_s: float
) -> tuple[float, float]:
    """Time a layer for the first tokens of `count` sequences: rows prepared by every thread, and in stages; seconds."""
    layer = LayerStruct.from_address(model.layers)
    cache = torch.zeros(2, count, _BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, dtype=dtype)
    keys, values = addresses([cache[0]]), addresses([cache[1]])
    tokens, positions = torch.arange(count) % 2, torch.zeros(count, dtype=torch.int64)
    slots = torch.arange(count) * _BLOCK_SIZE
    cu_query_lens = torch.arange(count + 1, dtype=torch.int32)
    seq_lens = torch.ones(count, dtype=torch.int32)
    block_tables = torch.arange(count, dtype=torch.int32)
    group = CacheGroupStruct(slots.data_ptr(), block_tables.data_ptr())
    group_of_layer = ctypes.c_int32(0)
    hidden = torch.empty(count, model.hidden, dtype=dtype)
    step = StepStruct(
        token_ids=tokens.data_ptr(),
        positions=positions.data_ptr(),
        cu_query_lens=cu_query_lens.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        groups=ctypes.addressof(group),
        group_of_layer=ctypes.addressof(group_of_layer),
        keys=ctypes.addressof(keys),
        values=ctypes.addressof(values),
        hidden=hidden.data_ptr(),
        block_tables_stride=1,
        num_groups=1,
        num_tokens=count,
        num_seqs=count,
        block_size=_BLOCK_SIZE,
        num_threads=torch.get_num_threads(),
    )

    def run(limit: int) -> None:
        model.few_rows = limit
        if cpp.triolet_step(ctypes.byref(model), ctypes.byref(step)):
            raise no_memory()

    return _in_turns(run, count, end_s)


def _in_turns(run: Callable[[int], None], count: int, end_s: float) -> tuple[float, float]:
    """Time `run(count)` and `run(0)` in turns, the best of `ROUNDS` each or of those before `end_s`, seconds."""
    best_s = {0: math.inf, count: math.inf}
    for turn in range(ROUNDS + 1):
        for limit in (0, count):
            start_s = time.perf_counter()
            run(limit)
            if turn:  # the first turn brings threads and weights into place
                best_s[limit] = min(best_s[limit], time.perf_counter() - start_s)
        if turn and time.perf_counter() > end_s:
            break
    return best_s[count], best_s[0]


# -------------------------------------------------------------------------------------------- what is kept


def _key(cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype) -> dict[str, Any]:
    """Return what choices depend on: machine, kernels, threads, and all numbers of the model and its first layer."""
    return {
        "version": _VERSION,
        "cpu": list(cpu_facts()),
        "kernels": [
            sources_hash(),
            Path(cpp._name).name,
            cpp.triolet_block_inputs(),
        ],  # the last tells of AMX
        "threads": torch.get_num_threads(),
        "dtype": str(dtype),
        "model": _numbers(model),
        "layer": _numbers(LayerStruct.from_address(model.layers)),
    }


def _numbers(struct: ctypes.Structure) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in struct._fields_:  # type: ignore[misc]
        if kind is ctypes.c_void_p or name in ("max_rows", "few_rows"):
            continue
        value = getattr(struct, name)
        found[name] = _numbers(value) if isinstance(value, ctypes.Structure) else value
    return found


def _read(path: Path, key: dict[str, Any] | None) -> Calibration | None:
    """Read choices; None if there are none, of this key, or the file is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if key is not None and content["key"] != key:
            raise ValueError("it is of another machine or model")
        chosen = Calibration(**content["choices"])
        few, most = chosen.few_rows, chosen.argmax_filter_rows
        if any(type(choice) is not int for choice in (few, most)):
            raise ValueError(f"choices must be whole numbers; got {content['choices']!r:.200}")
        if few not in (1, *FEW_ROWS) or most not in (0, Calibration().argmax_filter_rows, *ROWS, ANY_ROWS):
            raise ValueError(f"choices must be measured ones; got {content['choices']!r:.200}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning(
            "%s cannot be used and is measured anew with the next load of its model: %s", path, error
        )
        return None
    return chosen


def _write(path: Path, key: dict[str, Any], chosen: Calibration) -> None:
    """Keep choices; without a folder that can be written the next load measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump({"key": key, "choices": chosen.choices()}, file)
        os.replace(temporary, path)
        for oldest in _files(path.parent)[:-MAX_KEPT]:
            oldest.unlink(missing_ok=True)
    except OSError as error:
        logger.info("the calibration is not kept: %s", error)


def _files(cache: Path) -> list[Path]:
    """List the files of choices, the latest last."""
    found = [(path.stat().st_mtime_ns, path) for path in cache.glob("calibration-*.json") if path.exists()]
    return [path for _, path in sorted(found)]
