"""A device in main memory, whose graphs repeat what was launched when they were captured: the same calls on the same
tensors with the same numbers of the host, and nothing of the Python between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from triolet.model.cuda import steps
from triolet.model.cuda.step_device import Graph, Mark

KERNELS = ("apply_writes", "make_inputs", "edit_logits", "draw_columns", "note_results", "note_logprobs")
Launch = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class FakeDevice:
    """A `StepDevice` on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_marks = self.num_waits = self.num_replays = 0
        self._captured: list[Launch] | None = None

    def pinned(self, num_words: int) -> Tensor:
        return torch.zeros(num_words, dtype=torch.int32)

    def mark(self) -> Mark:
        self.num_marks += 1
        return _FakeMark(self)

    def capture(self, work: Callable[[], None]) -> Graph:
        work()
        launches: list[Launch] = []
        self._captured = launches
        with _NothingBetween(self):
            work()
        self._captured = None
        return _FakeGraph(self, launches)

    def launched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap what is a launch, or, like a model, a series of them."""

        def launch(*args: Any, **kwargs: Any) -> Any:
            with self._unwatched() as captured:
                result = function(*args, **kwargs)
            if captured is not None:
                captured.append((function, args, kwargs, result))
            return result

        return launch

    @contextmanager
    def _unwatched(self) -> Iterator[list[Launch] | None]:
        captured, self._captured = self._captured, None
        yield captured
        self._captured = captured

    @property
    def is_watching(self) -> bool:
        return self._captured is not None


class _FakeMark:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device

    def wait(self) -> None:
        self._device.num_waits += 1


class _FakeGraph:
    def __init__(self, device: FakeDevice, launches: list[Launch]) -> None:
        self._device, self._launches = device, launches

    def replay(self) -> None:
        self._device.num_replays += 1
        for function, args, kwargs, result in self._launches:
            for old, new in zip(tensors(result), tensors(function(*args, **kwargs)), strict=True):
                old.copy_(new)


class _NothingBetween(TorchDispatchMode):
    """Refuses to compute between launches: a graph of ours would not repeat it."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device.is_watching and not func.is_view:
            raise AssertionError(f"{func} between the launches of a graph")
        return func(*args, **(kwargs or {}))


def tensors(result: Any) -> list[Tensor]:
    if attrs.has(type(result)):
        return [getattr(result, field.name) for field in attrs.fields(type(result))]
    return [] if result is None else [result]


def put_in_place(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device see the launches of steps."""
    for name in KERNELS:
        monkeypatch.setattr(steps, name, device.launched(getattr(steps, name)))
