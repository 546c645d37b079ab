"""Choices of the CPU kernels change no bit of a step; they are measured once for a machine and model, and kept."""

from __future__ import annotations

import ctypes
import json
import logging
import math
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from tests.model.backends.test_cpu_greedy import Both, load
from tests.model.paged import PagedDriver
from tests.model.tiny import make_model
from triolet.kernels.cpu import calibration
from triolet.kernels.cpu.abi import ModelStruct
from triolet.kernels.cpu.calibration import (
    FEW_ROWS,
    MAX_KEPT,
    ROWS,
    Calibration,
    calibrate,
    calibrate_argmax_filter,
    calibrate_few_rows,
    kept_calibrations,
)
from triolet.kernels.cpu.gemm.packing import ANY_ROWS
from triolet.model.backends.cpu.decoder import CpuDecoder

VOCAB_SIZE = 3000
MEASURED = Calibration(argmax_filter_rows=16, few_rows=2)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CpuDecoder:
    return load(make_model("llama-plain", tmp_path / "model", vocab_size=VOCAB_SIZE), "", monkeypatch)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ModelStruct]:
    """Models that were measured; each gives `MEASURED`."""
    models: list[ModelStruct] = []

    def measure(cpp: ctypes.CDLL, model: ModelStruct, dtype: torch.dtype) -> Calibration:
        models.append(model)
        return MEASURED

    monkeypatch.setattr(calibration, "_measure", measure)
    monkeypatch.setattr(calibration, "MIN_SHARE", 0.0)  # the machine of the tests may be busy
    return models


def choices_of(model: ModelStruct) -> Calibration:
    return Calibration(argmax_filter_rows=model.argmax_filter.max_rows, few_rows=model.few_rows)


# ---------------------------------------------------------------------------------------------- the bits


@on_every_cpu_variant
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_the_same_bits_whether_threads_prepare_rows_for_themselves_or_in_a_stage(
    dtype: torch.dtype,
    quantization: str | None,
    variant: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder = make_model("llama-plain", tmp_path, vocab_size=300, dtype=dtype)
    model = load(folder, variant, monkeypatch, quantization=quantization)
    ids = torch.randint(300, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    found = {}
    for few_rows in (0, 1, 4, 16, 100):
        model._model.few_rows = few_rows
        driver = PagedDriver(model)
        found[few_rows] = torch.cat([driver.once(ids[:count]) for count in (1, 2, 5, 16, 17)])
    for logits in found.values():
        assert torch.equal(logits, found[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_calibrated_model_chooses_the_same_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_model("llama-plain", tmp_path, vocab_size=VOCAB_SIZE, dtype=dtype)
    model = load(folder, "", monkeypatch)
    chosen = calibrate(model._cpp, model._model, dtype, "force", cache=tmp_path)
    assert chosen.argmax_filter_rows in {0, *ROWS, ANY_ROWS}
    assert chosen.few_rows in {1, *FEW_ROWS}
    assert choices_of(model._model) == chosen
    both = Both(model)
    driver, ids = PagedDriver(both), list(range(20))
    logits = torch.cat([driver.once(ids[:1]), driver.once(ids)])
    assert both.tokens == logits.max(dim=1).indices.tolist()


# -------------------------------------------------------------------------------------- what is measured


@pytest.fixture
def _unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "FILTER_BUDGET_S", math.inf)
    monkeypatch.setattr(calibration, "FEW_ROWS_BUDGET_S", math.inf)


@pytest.mark.usefixtures("_unlimited")
@pytest.mark.parametrize(
    ("wins_up_to", "limit"), [(0, 0), (1, 1), (7, 4), (32, 32), (ROWS[-1], ANY_ROWS), (10**6, ANY_ROWS)]
)
def test_a_step_of_more_rows_than_the_filter_saves_time_for_computes_all_logits(
    wins_up_to: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_time_head", lambda *of: (1.0, 2.0 if of[3] <= wins_up_to else 0.5))
    model = ModelStruct(hidden=8)
    model.argmax_filter.max_rows = 5
    assert calibrate_argmax_filter(compiled(""), model, torch.float32) == limit
    assert model.argmax_filter.max_rows == 5


@pytest.mark.usefixtures("_unlimited")
@pytest.mark.parametrize(("wins_up_to", "limit"), [(0, 1), (1, 1), (2, 2), (7, 4), (16, 16), (10**6, 64)])
def test_more_rows_than_threads_are_quick_to_prepare_alone_get_a_stage(
    wins_up_to: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_time_layer", lambda *of: (1.0, 2.0 if of[3] <= wins_up_to else 0.5))
    model = ModelStruct(hidden=8, few_rows=5)
    assert calibrate_few_rows(compiled(""), model, torch.float32) == limit
    assert model.few_rows == 5


@pytest.mark.usefixtures("_unlimited")
def test_few_counts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for wins_up_to in (0, *ROWS):
        tried: list[int] = []

        def time_head(
            *of: Any, wins_up_to: int = wins_up_to, tried: list[int] = tried
        ) -> tuple[float, float]:
            tried.append(of[3])
            return 1.0, 2.0 if of[3] <= wins_up_to else 0.5

        monkeypatch.setattr(calibration, "_time_head", time_head)
        calibrate_argmax_filter(compiled(""), ModelStruct(hidden=8), torch.float32)
        assert len(tried) <= 3


@pytest.mark.parametrize(("wins", "limit"), [(True, 16), (False, 1)])
def test_nothing_more_is_tried_when_the_time_is_over_and_half_of_the_rest_is_won(
    wins: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def time_head(*of: Any) -> tuple[float, float]:
        tried.append(of[3])
        return 1.0, 2.0 if wins else 0.5

    monkeypatch.setattr(calibration, "_time_head", time_head)
    monkeypatch.setattr(calibration, "FILTER_BUDGET_S", 0.0)
    assert calibrate_argmax_filter(compiled(""), ModelStruct(hidden=8), torch.float32) == limit
    assert tried == [8]


# ------------------------------------------------------------------------------------------ what is kept


def test_what_was_measured_is_taken_until_it_is_to_be_measured_again(
    model: CpuDecoder, measured: list[ModelStruct], tmp_path: Path
) -> None:
    def chosen(mode: str) -> Calibration:
        model._model.few_rows = 77
        found = calibrate(model._cpp, model._model, torch.float32, mode, cache=tmp_path)
        assert choices_of(model._model) == found
        return found

    assert (chosen("off"), len(measured), kept_calibrations(tmp_path)) == (Calibration(), 0, [])
    assert (chosen("auto"), len(measured)) == (MEASURED, 1)
    assert (chosen("auto"), len(measured)) == (MEASURED, 1)
    assert (chosen("force"), len(measured)) == (MEASURED, 2)
    assert (chosen("off"), len(measured)) == (Calibration(), 2)
    [(_, kept)] = kept_calibrations(tmp_path)
    assert kept == MEASURED


def test_another_model_number_of_threads_or_processor_is_measured_for_itself(
    model: CpuDecoder, measured: list[ModelStruct], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def number_after_a_load(dtype: torch.dtype = torch.float32) -> int:
        calibrate(model._cpp, model._model, dtype, cache=tmp_path)
        return len(measured)

    assert [number_after_a_load() for _ in range(2)] == [1, 1]
    assert number_after_a_load(torch.bfloat16) == 2
    model._model.num_layers -= 1
    assert number_after_a_load() == 3
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    assert number_after_a_load() == 4
    monkeypatch.setattr(calibration, "cpu_facts", lambda: ("model name: another",))
    assert number_after_a_load() == 5


def damaged_files() -> Iterator[tuple[str, Any]]:
    def with_choices(choices: Any) -> Any:
        return lambda content: json.dumps({**content, "choices": choices})

    good = attrs.asdict(MEASURED)
    yield "empty", lambda content: ""
    yield "cut off", lambda content: json.dumps(content)[:-9]
    yield "no object", lambda content: "[1, 2]"
    yield "nested", lambda content: "[" * 100_000
    yield (
        "of another machine",
        lambda content: json.dumps({**content, "key": {**content["key"], "threads": 9}}),
    )
    yield "without choices", lambda content: json.dumps({"key": content["key"]})
    yield "unknown choice", with_choices({**good, "speed": 1})
    yield "negative", with_choices({**good, "few_rows": -1})
    yield "too large", with_choices({**good, "few_rows": 10**30})
    yield "not measured", with_choices({**good, "argmax_filter_rows": 3})
    yield "a fraction", with_choices({**good, "few_rows": 2.0})
    yield "a truth", with_choices({**good, "few_rows": True})
    yield "a text", with_choices({**good, "argmax_filter_rows": "16"})


@pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in damaged_files()])
def test_a_file_that_is_damaged_or_of_another_machine_is_measured_anew(
    damage: Any,
    model: CpuDecoder,
    measured: list[ModelStruct],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    calibrate(model._cpp, model._model, torch.float32, cache=tmp_path)
    [path] = tmp_path.glob("calibration-*.json")
    path.write_text(damage(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING):
        assert calibrate(model._cpp, model._model, torch.float32, cache=tmp_path) == MEASURED
    assert len(measured) == 2
    assert f"{path} cannot be used" in caplog.text
    calibrate(model._cpp, model._model, torch.float32, cache=tmp_path)
    assert len(measured) == 2


def test_what_was_measured_while_other_programs_had_the_processor_is_not_kept(
    model: CpuDecoder, measured: list[ModelStruct], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibration, "MIN_SHARE", 0.9)
    clocks = SimpleNamespace(perf_counter=count(0.0, 0.3).__next__, thread_time=count(0.0, 0.2).__next__)
    monkeypatch.setattr(calibration, "time", clocks)
    assert calibrate(model._cpp, model._model, torch.float32, cache=tmp_path) == MEASURED
    assert kept_calibrations(tmp_path) == []
    clocks.thread_time = count(0.0, 0.28).__next__
    assert calibrate(model._cpp, model._model, torch.float32, cache=tmp_path) == MEASURED
    assert [kept for _, kept in kept_calibrations(tmp_path)] == [MEASURED]


def test_without_a_folder_to_write_to_each_load_measures(
    model: CpuDecoder, measured: list[ModelStruct], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    for number in (1, 2):
        cache = tmp_path / "file" / "cache"
        assert calibrate(model._cpp, model._model, torch.float32, cache=cache) == MEASURED
        assert len(measured) == number


def test_the_oldest_files_make_way(model: CpuDecoder, measured: list[ModelStruct], tmp_path: Path) -> None:
    for number in range(MAX_KEPT + 3):
        model._model.num_layers = number + 1
        calibrate(model._cpp, model._model, torch.float32, cache=tmp_path)
    kept = kept_calibrations(tmp_path)
    assert len(kept) == MAX_KEPT
    shapes = [json.loads(path.read_text())["key"]["model"]["num_layers"] for path, _ in kept]
    assert shapes == list(range(4, MAX_KEPT + 4))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json" and path.is_file()]
