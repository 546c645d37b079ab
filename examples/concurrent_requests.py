"""Run many requests at once: a nursery starts them, the engine computes them together, step by step.

python examples/concurrent_requests.py [--model PATH_OR_HUB_ID]
"""

import argparse

import attrs
import trio

import triolet

QUESTIONS = (
    "What is the opposite of hot?", "Count from 1 to 20.", "List the days of the week.", "What does a cow say?",
    "Which month comes after May?", "What is ice?", "What is the capital of France?", "Tell me a story.",
)  # fmt: skip


async def main(model: str | None) -> None:
    async with triolet.open_engine(model=model) as engine:
        params = attrs.evolve(engine.default_sampling_params(), max_tokens=80, seed=1)
        num_tokens = 0

        async def ask(question: str) -> None:
            nonlocal num_tokens
            output = await engine.complete([{"role": "user", "content": question}], params)
            num_tokens += len(output.outputs[0].token_ids)
            print(f"{question}\n  {output.text}")

        # The first to fail would cancel the others, and leaving the nursery by any way ends them all.
        async with trio.open_nursery() as nursery:
            for question in QUESTIONS:
                nursery.start_soon(ask, question)
        print(f"\n{len(QUESTIONS)} answers, {num_tokens} tokens, {engine.statistics().steps} steps")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    trio.run(main, parser.parse_args().model)
