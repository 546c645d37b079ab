"""Read an answer as it comes, and print how long it took.

python examples/streaming.py [--model PATH_OR_HUB_ID] [QUESTION]
"""

import argparse

import attrs
import trio

import triolet


async def main(model: str | None, question: str) -> None:
    async with triolet.open_engine(model=model) as engine:
        # the model's own defaults (temperature, top_p, ...), but each output carries only the new text
        params = attrs.evolve(
            engine.default_sampling_params(), max_tokens=200, output_kind=triolet.RequestOutputKind.DELTA
        )
        num_outputs = num_tokens = 0
        async with engine.generate([{"role": "user", "content": question}], params) as stream:
            async for output in stream:
                num_outputs += 1
                num_tokens += len(output.outputs[0].token_ids)
                print(output.text, end="", flush=True)
        print(f"\n\n{num_tokens} tokens in {num_outputs} outputs, ended by {output.finish_reason}")
        metrics = output.metrics
        print(
            f"first token after {metrics.first_token_latency * 1000:.0f} ms, "
            f"the last {(metrics.last_token_ts - metrics.first_token_ts) * 1000:.0f} ms later"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", nargs="?", default="Tell me a story about a dog.")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.question)
