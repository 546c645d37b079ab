"""Where an engine lives: programs of the documentation in other libraries' servers, notebooks and workers.

A library that is not installed skips its test. `make test` installs the small ones; those around language models are
not among them, and were run by hand with the versions on the page.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import re
import runpy
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from starlette.applications import Starlette

from tests.documentation import Block, blocks
from tests.e2e.server import Server, serve
from tests.ports import free_port
from tests.source_tree import ROOT
from triolet.errors import ModelNotFound

CLIENTS = [block for block in blocks("py") if block.page.name == "integrations.md" and "8000" in block.text]
[QUART] = [block for block in blocks("py") if "QuartTrio" in block.text]
[NOTEBOOK] = [block for block in blocks("py") if "scope.close()" in block.text]


@pytest.fixture(scope="module")
def server() -> Iterator[Callable[[], Server]]:
    """A server for all, started by the first test that needs it."""
    with ExitStack() as stack:
        running: list[Server] = []

        def started() -> Server:
            if not running:
                running.append(stack.enter_context(serve()))
            return running[0]

        yield started


def needed(program: str) -> list[str]:
    """Return the packages that a program imports."""
    found = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found += [one.name.partition(".")[0] for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.append(node.module.partition(".")[0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("block", CLIENTS, ids=str)
def test_a_program_with_another_library_gets_an_answer(
    block: Block, server: Callable[[], Server], tmp_path: Path
) -> None:
    missing = [name for name in needed(block.text) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    program = block.text.replace("127.0.0.1:8000", f"127.0.0.1:{server().port}")
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stdout + ran.stderr


@pytest.mark.slow
def test_the_app_of_fastapi_streams_and_frees_what_a_client_leaves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("fastapi")
    said = run_example("fastapi_app", capsys)
    assert re.search(r"^http://127\.0\.0\.1:\d+/answer\n\w.{20}", said)
    assert said.endswith("live requests: 1\nlive requests after the hang-up: 0\n")


@pytest.mark.slow
def test_the_workers_of_a_job_queue_share_an_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huey")
    said = run_example("job_queue", capsys)
    assert "Count from 1 to 5. 1, 2, 3, 4, 5." in said.splitlines() and len(said.splitlines()) == 4
    monkeypatch.setattr(sys, "argv", ["job_queue.py", "--model", "/no/such/model"])
    with pytest.raises(ModelNotFound):
        runpy.run_path(str(ROOT / "examples" / "job_queue.py"), run_name="__main__")


def run_example(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    path = ROOT / "examples" / f"{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path)])
        runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out


# -------------------------------------------------------------------------------------------- quart-trio


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_cancelling_the_scope_of_a_quart_server_ends_it_and_a_hang_up_frees_the_request() -> None:
    pytest.importorskip("quart_trio")
    port = str(free_port())
    # With answers that are long enough to be left in their middle.
    program = QUART.text.replace("8080", port).replace("max_tokens=40", "max_tokens=500, temperature=0")
    program = program.replace("trio.run(main)", "")
    parts: dict[str, Any] = {"__name__": "quart_program"}
    exec(compile(program, "integrations.md", "exec"), parts)  # noqa: S102  the documentation's own program
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()

            async def serving() -> None:
                with scope:
                    await parts["main"]()

            nursery.start_soon(serving)
            async with question(int(port), "Count from 1 to 5.") as stream:
                answer = b""
                while not answer.endswith(b"\r\n0\r\n\r\n"):
                    answer += await stream.receive_some()
                # Chunks of HTTP: a line with the length, a line with the text.
                assert (
                    "".join(answer.decode().partition("\r\n\r\n")[2].split("\r\n")[1::2]) == "1, 2, 3, 4, 5."
                )
            engine = parts["app"].engine
            async with question(int(port), "Count from 1 to 100.") as stream:
                await first_text(stream)
                assert engine.statistics().num_requests_live == 1
            while engine.statistics().num_requests_live:  # noqa: ASYNC110  the server notices the hang-up
                await trio.sleep(0.01)
            async with question(int(port), "Count from 1 to 100.") as stream:
                await first_text(stream)
                scope.cancel()  # in the middle of an answer
    assert scope.cancelled_caught and not engine.is_open
    assert engine.statistics().num_requests_live == 0


async def first_text(stream: trio.SocketStream) -> None:
    """Read until the answer has begun: the head of the response comes before the request has been submitted."""
    received = b""
    while not received.partition(b"\r\n\r\n")[2]:
        received += await stream.receive_some()


@contextlib.asynccontextmanager
async def question(port: int, text: str) -> AsyncGenerator[trio.SocketStream]:
    body = json.dumps({"question": text})
    head = (
        f"POST /answer HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    while True:
        try:
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            break
        except OSError:  # the engine is still loading
            await trio.sleep(0.05)
    async with stream:
        await stream.send_all((head + body).encode())
        yield stream


# ------------------------------------------------------------------------------ hypercorn's startup_timeout


@pytest.mark.parametrize(("startup_timeout", "starts"), [(5.0, False), (120.0, True)])
async def test_a_lifespan_may_load_for_as_long_as_hypercorn_waits(
    startup_timeout: float, starts: bool, autojump_clock: trio.testing.MockClock
) -> None:
    from hypercorn.config import Config
    from hypercorn.trio import serve as serve_app
    from hypercorn.utils import LifespanTimeoutError

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        await trio.sleep(60.0)  # a large model
        yield

    config = Config()
    config.bind, config.startup_timeout, config.loglevel = ["127.0.0.1:0"], startup_timeout, "CRITICAL"
    expected = (
        contextlib.nullcontext()
        if starts
        else pytest.RaisesGroup(LifespanTimeoutError, flatten_subgroups=True)
    )
    with expected:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_app, Starlette(lifespan=lifespan), config)
            nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------------------------ Jupyter


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_engine_serves_the_cells_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    shells = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = shells.instance()
    cells = NOTEBOOK.text.split("\n\n")
    assert len(cells) == 4
    try:
        for cell in cells:
            shell.run_cell(cell, silent=True).raise_error()
    finally:
        shells.clear_instance()
    assert "1, 2, 3, 4, 5." in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------- Open WebUI


@pytest.mark.slow
def test_the_calls_of_open_webui_are_answered(server: Callable[[], Server]) -> None:
    """What its backend sends for a chat: the list of models, a streamed answer with usage, a title, embeddings."""
    import urllib.error
    import urllib.request

    base, headers = server().url + "/v1", {"Authorization": "Bearer none", "Content-Type": "application/json"}

    def call(path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(base + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    status, text = call("/models")
    [model] = json.loads(text)["data"]
    assert (status, model["id"], model["object"]) == (200, "triolet-nano", "model")
    messages = [{"role": "user", "content": "Count from 1 to 5."}]
    settings = {
        "temperature": 0,
        "top_p": 0.9,
        "frequency_penalty": 0,
        "seed": 1,
        "stop": ["###"],
        "max_tokens": 40,
    }
    chat = {
        "model": model["id"],
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    status, text = call("/chat/completions", {**chat, **settings})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    said = "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])
    assert said == "1, 2, 3, 4, 5." and chunks[-1]["usage"]["completion_tokens"] > 0
    title = {
        "model": model["id"],
        "stream": False,
        "max_completion_tokens": 20,
        "metadata": {"task": "title_generation"},
    }
    status, text = call("/chat/completions", {**title, "messages": messages})
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"]
    status, text = call("/embeddings", {"model": model["id"], "input": ["a text"]})
    assert status in (200, 400, 404) and json.loads(text)
