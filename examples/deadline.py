"""Limit the time of a request in two ways, and print the part of the answer that there is.

A cancel scope cancels the reader: the request is aborted, and the reader keeps what it has read. A `deadline` of the
request ends it normally, with a last output whose finish_reason is `deadline`.

python examples/deadline.py [--model PATH_OR_HUB_ID] [--seconds S]
"""

import argparse

import trio

import triolet

LONG = triolet.SamplingParams(max_tokens=2000, ignore_eos=True)  # would go on for much longer


async def with_a_scope(engine: triolet.Engine, seconds: float) -> None:
    text = ""
    with trio.move_on_after(seconds) as scope:
        async with engine.generate("Once upon a time", LONG) as stream:
            async for output in stream:
                text = output.text  # cumulative: all of it so far
    print(f"move_on_after: cancelled={scope.cancelled_caught}, kept {len(text)} characters")


async def with_a_deadline(engine: triolet.Engine, seconds: float) -> None:
    output = await engine.complete("Once upon a time", LONG, deadline=trio.current_time() + seconds)
    print(f"deadline=: finish_reason={output.finish_reason}, kept {len(output.text)} characters")


async def main(model: str | None, seconds: float) -> None:
    async with triolet.open_engine(model=model) as engine:
        await with_a_scope(engine, seconds)
        await with_a_deadline(engine, seconds)
        print(f"requests still alive: {engine.statistics().num_requests_live}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    parser.add_argument("--seconds", type=float, default=0.5)
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.seconds)
