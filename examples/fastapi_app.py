"""Keep an engine in the lifespan of a FastAPI app, under uvicorn, and stream its answers.

python examples/fastapi_app.py [--stay] [--model PATH_OR_HUB_ID]

Needs `pip install fastapi uvicorn`. Asks itself for a story, hangs up on a second one, and ends; with --stay it serves
until Ctrl-C.
"""

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import uvicorn
from fastapi import Body, FastAPI, Request
from fastapi.responses import StreamingResponse

import triolet
import triolet.aio


def app_of(model: str | None) -> FastAPI:
    """Return an app whose engine opens when the server starts, and closes when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, object]]:
        # uvicorn waits as long as this takes; hypercorn for `startup_timeout` seconds, 60 by default.
        async with triolet.aio.open_engine(model=model) as engine:
            app.state.engine = engine
            yield {"engine": engine}

    app = FastAPI(lifespan=lifespan)

    @app.post("/answer")
    async def answer(request: Request, question: str = Body(embed=True)) -> StreamingResponse:
        params = triolet.SamplingParams(max_tokens=200, output_kind=triolet.RequestOutputKind.DELTA)

        async def pieces() -> AsyncIterator[str]:
            # A client that hangs up cancels this generator, and leaving the scope frees the request's blocks.
            async with request.state.engine.generate(
                [{"role": "user", "content": question}], params
            ) as stream:
                async for output in stream:
                    yield output.text

        return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")

    return app


async def ask(port: int, question: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a question, and return the connection when the answer begins."""
    body = json.dumps({"question": question})
    head = f"POST /answer HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + body).encode())
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def show(server: uvicorn.Server, app: FastAPI) -> None:
    """Ask twice: read the first answer, and hang up in the middle of the second."""
    while not server.started:
        if server.should_exit:  # the engine could not be opened; uvicorn has said why
            return
        await asyncio.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(f"http://127.0.0.1:{port}/answer")
    reader, writer = await ask(port, "Tell me a story.")
    print((await reader.read()).decode())
    writer.close()
    reader, writer = await ask(port, "Count from 1 to 100.")
    await reader.read(1)
    print("live requests:", app.state.engine.statistics().num_requests_live)
    writer.transport.abort()
    while app.state.engine.statistics().num_requests_live:  # noqa: ASYNC110  no event tells of it
        await asyncio.sleep(0.01)
    print("live requests after the hang-up: 0")


async def main(model: str | None, stay: bool) -> None:
    app = app_of(model)
    server = uvicorn.Server(uvicorn.Config(app, port=8000 if stay else 0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    if not stay:
        await show(server, app)
        server.should_exit = True
    await serving
    if not server.started:
        raise SystemExit(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stay", action="store_true", help="serve on port 8000 until Ctrl-C")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.model, arguments.stay))
