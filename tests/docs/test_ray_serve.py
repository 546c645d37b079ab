"""The program for Ray Serve, with a stand-in for the part of Ray Serve that it uses; its app and engine are real."""

from __future__ import annotations

import runpy
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.ports import free_port
from tests.source_tree import ROOT


class FakeServe(ModuleType):
    """Keeps what is deployed; runs one replica of it in a thread."""

    def __init__(self) -> None:
        super().__init__("ray.serve")
        self.options: dict[str, Any] = {}
        self.port = 8000

    def start(self, http_options: dict[str, Any]) -> None:
        self.port = http_options["port"]

    def run(self, app: Callable[[], Any], blocking: bool) -> None:
        import uvicorn

        assert not blocking
        self.server = uvicorn.Server(uvicorn.Config(app(), port=self.port, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started and self.thread.is_alive():
            time.sleep(0.05)

    def shutdown(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    def ingress(self, app: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: app

    def deployment(self, **options: Any) -> Callable[[Any], Any]:
        self.options = options
        return lambda target: SimpleNamespace(bind=lambda: target)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    pytest.importorskip("fastapi")
    ray, serve = ModuleType("ray"), FakeServe()
    ray.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", serve)
    return serve


def application_of(*arguments: object) -> Callable[[], Any]:
    found: Callable[[], Any] = runpy.run_path(str(ROOT / "examples/ray_serve.py"))["application_of"](
        *arguments
    )
    return found


def test_a_replica_of_ray_serve_has_its_gpus_and_more_requests_than_the_five_of_the_default(
    serve: FakeServe,
) -> None:
    app = application_of(None, 2, 1)()
    assert "/answer" in {route.path for route in app.routes}
    assert (serve.options["num_replicas"], serve.options["ray_actor_options"]) == (2, {"num_gpus": 1})
    assert serve.options["max_ongoing_requests"] > 5


@pytest.mark.slow
def test_the_program_for_ray_serve_streams_a_story(
    serve: FakeServe, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["ray_serve.py", "--port", str(free_port())])
    try:
        runpy.run_path(str(ROOT / "examples/ray_serve.py"), run_name="__main__")
    finally:
        serve.shutdown()
    assert len(capsys.readouterr().out.split()) > 10
    assert not serve.thread.is_alive()
