"""Use the official openai client with triolet: a chat over HTTP, then a conversation over the WebSocket.

python examples/openai_client.py [--url http://HOST:PORT] [--model PATH_OR_HUB_ID]

Without --url it serves a model itself, on a free port. Needs `pip install "openai[realtime]"`.
"""

import argparse

import trio
from openai import OpenAI

import triolet
from triolet.config.server import GatewayConfig
from triolet.server import serve


def talk(url: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id

    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count from 1 to 5"}], stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    previous_id = None
    with client.responses.connect() as connection:
        for question in ("Hello!", "Who are you?"):
            connection.response.create(model=model, input=question, previous_response_id=previous_id)
            for event in connection:
                if event.type == "response.output_text.delta":
                    print(event.delta, end="", flush=True)
                elif event.type == "response.completed":
                    previous_id = event.response.id
                    break
                elif event.type in ("response.incomplete", "response.failed", "error"):
                    print("ended early:", event.type)
                    return
            print()


async def main(url: str | None, model: str | None) -> None:
    if url is not None:
        await trio.to_thread.run_sync(talk, url)
        return
    async with triolet.open_engine(model=model) as engine, trio.open_nursery() as nursery:
        own_url = await nursery.start(serve, engine, GatewayConfig(port=0))
        await trio.to_thread.run_sync(talk, own_url)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    trio.run(main, arguments.url, arguments.model)
