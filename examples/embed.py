"""Run a model inside a Trio program, in ten lines, as shown in the README.

python examples/embed.py [--model PATH_OR_HUB_ID]
"""

import argparse

import trio

import triolet


async def main(model: str | None) -> None:
    params = triolet.SamplingParams(
        temperature=0.6, max_tokens=200, output_kind=triolet.RequestOutputKind.DELTA
    )
    messages = [{"role": "user", "content": "Tell me a story."}]
    async with triolet.open_engine(model=model) as engine:
        with trio.move_on_after(5):  # the reply takes five seconds at most
            async with engine.generate(messages, params) as stream:
                async for output in stream:
                    print(output.text, end="", flush=True)
        print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    trio.run(main, parser.parse_args().model)
