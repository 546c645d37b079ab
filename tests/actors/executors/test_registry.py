"""Where a model runs if the configuration leaves it open."""

from __future__ import annotations

import pytest

from triolet.actors.executors import registry
from triolet.actors.executors.in_process import ThreadExecutor
from triolet.actors.executors.process import ProcessExecutor
from triolet.actors.executors.registry import executor_class_of
from triolet.config.engine import EngineConfig


@pytest.mark.parametrize(
    ("device", "has_driver", "kind"),
    [
        ("cpu", True, ThreadExecutor),
        ("auto", False, ThreadExecutor),
        ("auto", True, ProcessExecutor),
        ("cuda", False, ProcessExecutor),
        ("cuda:1", False, ProcessExecutor),
    ],
)
def test_a_model_on_a_gpu_is_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, device: str, has_driver: bool, kind: type
) -> None:
    monkeypatch.setattr(registry, "has_gpu_driver", lambda: has_driver)
    assert executor_class_of(EngineConfig(device=device)) is kind
