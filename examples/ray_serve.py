"""Put an engine into each replica of a Ray Serve deployment, and stream its answers over HTTP.

python examples/ray_serve.py [--stay] [--model PATH_OR_HUB_ID] [--replicas 2] [--gpus 1] [--port 8000]

Needs `pip install 'ray[serve]'`. Asks for a story and ends; with --stay it serves until Ctrl-C.
"""

import argparse
import contextlib
import http.client
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Body, FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve

import triolet
import triolet.aio


def application_of(model: str | None, num_replicas: int, num_gpus: float) -> Any:
    """Return what `serve.run` takes: replicas, with an engine and so many GPUs each."""

    def app() -> FastAPI:
        # Called in each replica: neither an engine nor an app that holds one can be sent there.
        @contextlib.asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, object]]:
            async with triolet.aio.open_engine(model=model) as engine:
                yield {"engine": engine}

        app = FastAPI(lifespan=lifespan)

        @app.post("/answer")
        async def answer(request: Request, question: str = Body(embed=True)) -> StreamingResponse:
            params = triolet.SamplingParams(max_tokens=200, output_kind=triolet.RequestOutputKind.DELTA)

            async def pieces() -> AsyncIterator[str]:
                # Ray Serve cancels the generator of a client that hangs up, and the request's blocks are free.
                async with request.state.engine.generate(
                    [{"role": "user", "content": question}], params
                ) as stream:
                    async for output in stream:
                        yield output.text

            return StreamingResponse(pieces(), media_type="text/plain; charset=utf-8")

        return app

    deployment = serve.deployment(
        name="triolet",
        num_replicas=num_replicas,
        # The engine has a queue and computes many requests at once; by default Ray Serve gives a replica only five.
        max_ongoing_requests=256,
        ray_actor_options={"num_gpus": num_gpus},
    )
    return deployment(serve.ingress(app)()).bind()


def ask(port: int, question: str) -> None:
    """Print an answer as it comes."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    body = json.dumps({"question": question})
    connection.request("POST", "/answer", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    while piece := answer.read1():
        print(piece.decode(errors="replace"), end="", flush=True)
    print()
    connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    parser.add_argument("--replicas", type=int, default=1, help="engines")
    parser.add_argument("--gpus", type=float, default=0, help="of each engine")
    parser.add_argument("--port", type=int, default=8000, help="of Ray Serve, if it does not run yet")
    arguments = parser.parse_args()
    serve.start(http_options={"port": arguments.port})
    serve.run(application_of(arguments.model, arguments.replicas, arguments.gpus), blocking=arguments.stay)
    ask(arguments.port, "Tell me a story.")
    serve.shutdown()
