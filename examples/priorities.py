"""Order requests by priority when there is not enough room: with policy="priority", lower numbers go first.

Two requests may run at a time, and six of low importance are there first. The urgent one that comes then does not
preempt the running ones, but it overtakes all that wait.

python examples/priorities.py [--model PATH_OR_HUB_ID]
"""

import argparse

import trio

import triolet

PARAMS = triolet.SamplingParams(
    max_tokens=24, ignore_eos=True, output_kind=triolet.RequestOutputKind.FINAL_ONLY
)


async def ask(
    engine: triolet.Engine, name: str, priority: int, *, task_status: trio.TaskStatus[None]
) -> None:
    async with engine.generate("Once upon a time", PARAMS, priority=priority) as stream:
        task_status.started()  # the request is in the queue
        async for output in stream:
            waited_s = output.metrics.scheduled_ts - output.metrics.queued_ts
            print(f"{name:<12} priority {priority:>2}   waited {waited_s * 1000:4.0f} ms")


async def main(model: str | None) -> None:
    async with (
        triolet.open_engine(model=model, policy="priority", max_num_seqs=2) as engine,
        trio.open_nursery() as nursery,
    ):
        for number in range(1, 7):
            await nursery.start(ask, engine, f"background {number}", 10)
        await nursery.start(ask, engine, "urgent", 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    trio.run(main, parser.parse_args().model)
