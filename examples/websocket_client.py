"""Use OpenAI Responses over a WebSocket from a Trio program: two answers at the same time, one of them cancelled.

python examples/websocket_client.py [--url ws://HOST:PORT] [--model PATH_OR_HUB_ID]

Without --url it serves a model itself, on a free port.
"""

import argparse
import json
from contextlib import AsyncExitStack

import trio
from trio_websocket import WebSocketConnection, open_websocket_url

import triolet
from triolet.config.server import GatewayConfig
from triolet.server import serve

ENDINGS = ("response.completed", "response.incomplete", "response.failed", "error")


async def ask(socket: WebSocketConnection, model: str, lane: str, question: str) -> None:
    """Request answers in two lanes: those of one lane come one after the other, the lanes run at the same time."""
    create = {"type": "response.create", "stream_id": lane, "model": model, "input": question}
    await socket.send_message(json.dumps(create))


async def listen(socket: WebSocketConnection, num_answers: int) -> None:
    """Print the events; end the second lane's answer after a few words."""
    said = {"a": "", "b": ""}
    is_cancelled = False
    while num_answers:
        event = json.loads(await socket.get_message())
        lane = event["stream_id"]
        if event["type"] == "response.output_text.delta":
            said[lane] += event["delta"]
            if lane == "b" and len(said[lane]) > 40 and not is_cancelled:
                is_cancelled = True
                await socket.send_message(json.dumps({"type": "response.cancel", "stream_id": lane}))
        if event["type"] in ENDINGS:
            num_answers -= 1
            status = event["response"]["status"] if "response" in event else event["error"]["message"]
            print(f"{lane}, {status}: {said[lane]}")


async def main(url: str | None, model: str | None) -> None:
    async with AsyncExitStack() as stack:
        if url is None:
            engine = await stack.enter_async_context(triolet.open_engine(model=model))
            model = engine.model_name
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            address: str = await nursery.start(serve, engine, GatewayConfig(port=0))
            url = address.replace("http", "ws", 1)
        async with open_websocket_url(f"{url}/v1/responses") as socket:
            await ask(socket, model or "triolet-nano", "a", "Count from 1 to 10")
            await ask(socket, model or "triolet-nano", "b", "Tell me a story.")
            await listen(socket, num_answers=2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="of a running server, such as ws://127.0.0.1:8000")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    trio.run(main, arguments.url, arguments.model)
