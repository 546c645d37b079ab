"""Torch and the C++ kernels compute with the threads that the processors of the process are good for."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from triolet.config.processors import Processors
from triolet.model.loading import runner
from triolet.model.loading.runner import choose_device

HYPER_THREADS = Processors(usable=frozenset(range(8)), cores=frozenset(range(4)))


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers that torch's threads were set to, on a machine of 4 cores with 8 hyper-threads; the first is torch's."""
    numbers = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Processors, "read", lambda: HYPER_THREADS)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: HYPER_THREADS.usable, raising=False)
    return numbers


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_cpu_computes_with_a_thread_for_each_core(device: str, threads: list[int]) -> None:
    choose_device(device)
    assert threads[-1] == 4


def test_a_lower_number_that_a_program_set_stays(threads: list[int]) -> None:
    threads.append(3)
    choose_device("cpu")
    assert threads[-1] == 3


def test_a_gpu_leaves_the_threads_as_they_are(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    choose_device("auto")
    assert threads == [8]


def test_cores_that_are_named_have_a_thread_each(threads: list[int]) -> None:
    choose_device("cpu:0+4-5")
    assert threads[-1] == 3


@pytest.mark.parametrize(("device", "expected"), [("cpu:0-3", 2), ("cpu", 2), ("cpu:0", 1)])
def test_ranks_divide_the_threads_once(device: str, expected: int, threads: list[int]) -> None:
    choose_device(device)
    threads.append(max(1, threads[-1] // 2))  # as Group.join does
    choose_device(device, 2)
    assert threads[-1] == expected


def test_more_threads_than_processors_are_bounded_with_a_warning(
    threads: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    threads.append(9)
    with caplog.at_level(logging.WARNING, runner.__name__):
        choose_device("cpu")
    assert threads[-1] == 8
    assert "OMP_NUM_THREADS must be at most the number of usable processors (8)" in caplog.text
