"""Request several answers to one question, and read them as they come, each in a line of its own.

python examples/several_answers.py [--model PATH_OR_HUB_ID] [-n NUMBER] [QUESTION]
"""

import argparse

import attrs
import trio

import triolet


async def main(model: str | None, question: str, n: int) -> None:
    async with triolet.open_engine(model=model) as engine:
        params = attrs.evolve(
            engine.default_sampling_params(),
            n=n,
            seed=1,
            temperature=1.0,
            max_tokens=60,
            output_kind=triolet.RequestOutputKind.DELTA,
        )
        texts, num_shared = [""] * n, 0
        async with engine.generate([{"role": "user", "content": question}], params) as stream:
            async for output in stream:
                [answer] = output.outputs  # one of them at a time
                texts[answer.index] += answer.text
                num_shared = max(num_shared, output.num_cached_tokens)
                if answer.finished():
                    print(f"{answer.index} ({answer.finish_reason}): {texts[answer.index]}")
        num_prompt_tokens = len(output.prompt_token_ids)
        print(
            f"\n{n} answers to a prompt of {num_prompt_tokens} tokens, {output.num_cached_tokens} of them shared"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "question", nargs="?", default="Tell me a story about a dog and a cat who live near the sea."
    )
    parser.add_argument("-n", type=int, default=3, help="how many answers")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.question, arguments.n)
