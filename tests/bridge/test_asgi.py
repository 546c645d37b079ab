"""An engine in the lifespan of an ASGI application under uvicorn: answers stream, and a hang-up frees the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.actors.harness import answer_of
from tests.bridge.harness import FastExecutor, assert_nothing_is_held, engine_thread, no_thread_is_left
from triolet import SamplingParams, aio
from triolet.aio import AsyncioEngine
from triolet.core.request.params import RequestOutputKind

uvicorn = pytest.importorskip("uvicorn")


def make_app(engines: list[AsyncioEngine]) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[dict[str, Any]]:
        async with aio.engine_of_thread(engine_thread(FastExecutor(step_s=0.002))) as engine:
            engines.append(engine)
            yield {"engine": engine}

    async def answer(request: Request) -> StreamingResponse:
        params = SamplingParams(
            max_tokens=int(request.query_params["n"]), seed=3, output_kind=RequestOutputKind.DELTA
        )

        async def pieces() -> AsyncIterator[str]:
            async with request.state.engine.generate([1], params) as stream:
                async for output in stream:
                    yield "".join(f"{token} " for token in output.outputs[0].token_ids)

        return StreamingResponse(pieces(), media_type="text/plain")

    return Starlette(routes=[Route("/answer", answer)], lifespan=lifespan)


async def ask(port: int, num_tokens: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /answer?n={num_tokens} HTTP/1.0\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


def test_an_answer_streams_and_a_hang_up_frees_its_request() -> None:
    engines: list[AsyncioEngine] = []

    async def main() -> None:
        server = uvicorn.Server(uvicorn.Config(make_app(engines), port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        reader, writer = await ask(port, 30)
        assert tuple(map(int, (await reader.read()).split())) == answer_of([1], 3, 30)
        writer.close()

        reader, writer = await ask(port, 200)
        await reader.read(1)
        assert engines[0].statistics().num_requests_live == 1
        writer.transport.abort()
        while engines[0].statistics().num_requests_live:  # noqa: ASYNC110  the time limit of the test ends this
            await asyncio.sleep(0.001)
        await assert_nothing_is_held(engines[0])
        server.should_exit = True
        await serving

    with no_thread_is_left():
        asyncio.run(asyncio.wait_for(main(), 300))
