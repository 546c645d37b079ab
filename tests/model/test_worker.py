"""The worker's table: its own methods and those of an extension, and nothing else."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from triolet.core.worker_call import WorkerCall
from triolet.errors import ConfigError, UnknownWorkerMethod
from triolet.model.tensor_bytes import tensor_bytes, tensor_of
from triolet.model.worker import Worker, call_worker, worker_class

HERE = "tests.model.test_worker"


class Extension:
    """What an operator adds."""

    not_callable = 3

    def scale(self: Any, factor: float, *, offset: float = 0.0) -> tuple[int, float]:
        return self.rank, self.model.weight * factor + offset

    def _private(self) -> None: ...


class Taken:
    """It would replace a name of the worker."""

    def get_model(self) -> None: ...


def double_weight(model: Any) -> float:
    weight: float = model.weight
    return weight * 2


class FakeRunner:
    model = SimpleNamespace(weight=1.5)
    profile = None
    device = torch.device("cpu")


RUNNER = FakeRunner()


def worker() -> Worker:
    return worker_class(f"{HERE}:Extension")(cast(Any, RUNNER))


def test_a_worker_does_not_keep_its_runner_and_the_models_memory() -> None:
    runner = FakeRunner()
    runner.worker = Worker(cast(Any, runner))  # type: ignore[attr-defined]
    was = weakref.ref(runner)
    del runner
    assert was() is None


def test_methods_of_the_extension_and_functions_of_the_model_are_called() -> None:
    one = worker()
    assert call_worker(one, WorkerCall("scale", False, (2.0,), {"offset": 1.0})) == (0, 4.0)
    assert call_worker(one, WorkerCall("check_health")) is None
    assert call_worker(one, WorkerCall(lambda worker, x: (worker, x), False, (5,))) == (one, 5)
    assert call_worker(one, WorkerCall(f"{HERE}:double_weight", True)) == 3.0
    assert call_worker(one, WorkerCall(double_weight, True)) == 3.0


@pytest.mark.parametrize(
    "name", ["_private", "__init__", "not_callable", "rank", "model", "model_runner", "", "scale.__call__"]
)
def test_a_method_that_is_not_in_the_table_is_refused_with_the_table(name: str) -> None:
    with pytest.raises(
        UnknownWorkerMethod, match=r"one of check_health, get_model, scale, start_profile, .*; got"
    ):
        call_worker(worker(), WorkerCall(name))


@pytest.mark.parametrize(
    "name", ["double_weight", f"{HERE}:nothing", "no.such:thing", f"{HERE}:HERE", ":", "a:"]
)
def test_a_function_that_cannot_be_imported_is_refused(name: str) -> None:
    with pytest.raises(UnknownWorkerMethod, match="method must be "):
        call_worker(worker(), WorkerCall(name, True))


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("no.such:Thing", "importable"),
        ("no_colon", "importable"),
        (f"{HERE}:Nothing", "importable"),
        (f"{HERE}:double_weight", "a class"),
        (f"{HERE}:Taken", r"without names of the worker \(get_model\)"),
    ],
)
def test_an_extension_that_cannot_be_mixed_in_is_an_error_of_the_configuration(name: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^worker_extension must be {rule}"):
        worker_class(name)


def test_tensors_cross_a_pipe_as_safetensors() -> None:
    for tensor in (torch.arange(6).reshape(2, 3).T, torch.ones((), dtype=torch.bfloat16), torch.empty(0, 2)):
        data = tensor_bytes(tensor)
        assert data is not None
        back = tensor_of(data)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)
    assert tensor_bytes([1]) is None
