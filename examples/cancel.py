"""Leave the scope of a stream, which aborts its request, and print the KV blocks before, during and after, three times.

Blocks that the step in flight still writes are quarantined until it ends, a few milliseconds later.

python examples/cancel.py [--model PATH_OR_HUB_ID]
"""

import argparse

import trio

import triolet

LONG = triolet.SamplingParams(max_tokens=2000, ignore_eos=True)  # left long before its end
ONE_TOKEN = triolet.SamplingParams(max_tokens=1)


def show(when: str, engine: triolet.Engine) -> None:
    now = engine.statistics()
    print(
        f"{when:<28} requests {now.num_requests_live}   blocks: {now.kv_blocks_in_use} in use, "
        f"{now.kv_blocks_quarantined} quarantined, "
        f"{now.kv_blocks_free + now.kv_blocks_cached} of {now.kv_blocks_total} available"
    )


async def read(engine: triolet.Engine, num_outputs: int) -> None:
    """Read a few outputs of a long answer, then simply leave."""
    async with engine.generate("Once upon a time", LONG) as stream:
        async for _ in stream:
            num_outputs -= 1
            if num_outputs == 0:
                show("in the middle of the answer", engine)
                break


async def main(model: str | None) -> None:
    async with triolet.open_engine(model=model) as engine:
        show("before", engine)

        await read(engine, num_outputs=5)
        show("after break", engine)
        await engine.complete("Hello", ONE_TOKEN)  # its step comes after the one that was in flight
        show("one step later", engine)

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(read, engine, 10_000)
            await trio.sleep(0.3)
            show("four readers in a nursery", engine)
            nursery.cancel_scope.cancel()
        await engine.complete("Hello", ONE_TOKEN)
        show("after the nursery's cancel", engine)

        try:
            async with engine.generate("Once upon a time", LONG) as stream:
                async for output in stream:
                    raise ValueError(f"this is not what I wanted: {output.text}")
        except ValueError:
            await engine.complete("Hello", ONE_TOKEN)
            show("after an exception", engine)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    trio.run(main, parser.parse_args().model)
