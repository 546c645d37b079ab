"""Profile of a model runner: times of its steps, torch's profiler beside them, and the trace file of both."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from triolet.core.profile import MAX_STEPS, StepRecorder, WorkerStep, chrome_events
from triolet.core.step_plan import StepPlan
from triolet.errors import ConfigError

_CLOCK = "triolet clock"  # event that says what torch's profiler calls a time of ours


class StepProfile:
    """Recording of the steps of a runner, in the thread that computes them.

    Args:
        path: file to write to.
        device: of the model.
    Raises:
        ConfigError: the folder cannot be written to.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._path = path
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(self._temporary("torch"), "wb"):
                pass
        except OSError as error:
            raise _unwritable(os.path.dirname(path), error) from error
        self.computed_s = 0.0  # when the forward pass of the present step ended
        self._steps: list[WorkerStep] = []
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._torch: torch.profiler.profile | None = torch.profiler.profile(activities=activities)
        self._torch.start()
        self._zero_s = time.perf_counter()
        with torch.profiler.record_function(_CLOCK):
            pass

    def note(self, plan: StepPlan, began_s: float, prepared_s: float) -> None:
        """Record a step that has just ended."""
        ended_s = time.perf_counter()
        computed_s = min(max(self.computed_s, prepared_s), ended_s)
        self._steps.append(
            WorkerStep(
                plan.step_id, len(plan.rows), plan.num_tokens, began_s, prepared_s, computed_s, ended_s
            )
        )
        if len(self._steps) >= MAX_STEPS:
            self.stop()

    @property
    def is_recording(self) -> bool:
        """True until it is stopped, or full."""
        return self._torch is not None

    def stop(self) -> None:
        """End the recording."""
        profiler, self._torch = self._torch, None
        if profiler is not None:
            profiler.stop()
            try:
                profiler.export_chrome_trace(self._temporary("torch"))
            except (OSError, RuntimeError) as error:
                self.discard()
                raise _unwritable(os.path.dirname(self._path), error) from error

    def write(self, engine_spans: Sequence[Any]) -> None:
        """Write the trace: torch's events, and the spans of the steps.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.stop()
        try:
            with open(self._temporary("torch"), encoding="utf-8") as file:
                trace = json.load(file)
            events = trace["traceEvents"]
            zero_us = next((event["ts"] for event in events if event.get("name") == _CLOCK), 0.0)
            recorder = StepRecorder.of(engine_spans)
            events += chrome_events(recorder, self._steps, os.getpid(), self._zero_s, zero_us)
            with open(self._temporary("whole"), "w", encoding="utf-8") as file:
                json.dump(trace, file)
            # a reader never finds half a file under the name
            os.replace(self._temporary("whole"), self._path)
        except OSError as error:
            raise _unwritable(os.path.dirname(self._path), error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what is not the trace itself."""
        if self._torch is not None:
            self._torch.stop()
            self._torch = None
        for part in ("torch", "whole"):
            with suppress(OSError):
                os.remove(self._temporary(part))

    def _temporary(self, part: str) -> str:
        return f"{self._path}.{part}.tmp"


def make_folder(path: str) -> None:
    """Make the folder of the traces if it is missing, so that a wrong one is known before the first profile.

    Raises:
        ConfigError: it cannot be written to.
    """
    try:
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(folder: str, error: BaseException) -> ConfigError:
    return ConfigError("profile_dir", f"a folder that can be written to ({error})", folder)
