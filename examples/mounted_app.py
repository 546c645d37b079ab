"""Mount triolet's routes in a web app of your own, on any ASGI server for Trio.

python examples/mounted_app.py [--stay] [--model PATH_OR_HUB_ID]

Sends itself one question over HTTP and ends; with --stay it serves until Ctrl-C.
"""

import argparse
import json
import urllib.request

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

import triolet
from triolet.server import create_app


def app_of(engine: triolet.Engine) -> Starlette:
    """Return an app with a route that uses the engine directly, and all of triolet's routes below /llm."""

    async def story(request: Request) -> Response:
        output = await engine.complete([{"role": "user", "content": "Tell me a story."}])
        return PlainTextResponse(output.text)

    return Starlette(routes=[Route("/story", story), Mount("/llm", create_app(engine))])


def ask(url: str, model: str) -> str:
    """Send a question with the standard library; any other client works, too."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    request = urllib.request.Request(f"{url}/llm/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
        return text


async def main(model: str | None, stay: bool) -> None:
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.loglevel = "WARNING"
    async with triolet.open_engine(model=model) as engine, trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve, app_of(engine), config)
        print(f"{url}/story, {url}/llm/")
        if stay:
            await trio.sleep_forever()
        print("said over HTTP:", await trio.to_thread.run_sync(ask, url, engine.model_name))
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--stay", action="store_true", help="serve until Ctrl-C")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.stay)
