"""Share an engine between two clients under the policy `fair`: one sends many long requests, the other a short
question.

The question does not wait for the long requests. While it waits at all, its place in the queue is printed.

python examples/fair.py [--model PATH_OR_HUB_ID] [--policy fair]
"""

import argparse

import trio

import triolet
from triolet import SamplingParams

NUM_LONG = 12


async def write_story(engine: triolet.Engine, number: int, done: list[str]) -> None:
    params = SamplingParams(max_tokens=120, ignore_eos=True, seed=number)
    await engine.complete([{"role": "user", "content": "Tell me a short story."}], params, client="hog")
    done.append("hog")


async def ask(engine: triolet.Engine, done: list[str]) -> None:
    question = [{"role": "user", "content": "What is the opposite of hot?"}]
    began_s = trio.current_time()
    async with engine.generate(
        question, SamplingParams(temperature=0.0, max_tokens=30), client="light"
    ) as stream:
        async for progress in stream.follow():
            print(
                f"position {progress.queue_position}, {progress.num_computed_tokens} tokens of the prompt computed"
            )
        print(f"first token after {1000 * (trio.current_time() - began_s):.0f} ms")
        print(await stream.text())
    done.append("light")


async def main(model: str | None, policy: str) -> None:
    done: list[str] = []
    async with triolet.open_engine(model=model, policy=policy, max_num_seqs=4) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(NUM_LONG):
                nursery.start_soon(write_story, engine, number, done)
            await trio.sleep(0.05)
            await ask(engine, done)
            print(f"{done.count('hog')} of {NUM_LONG} long requests were done before")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    parser.add_argument("--policy", choices=("fcfs", "priority", "fair"), default="fair")
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.policy)
