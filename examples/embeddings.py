"""Find the text that is nearest to a question, with embeddings, while the same engine tells a story.

    python examples/embeddings.py [QUESTION] [--model FOLDER_OR_HUB_ID]

The default, triolet-nano, was not trained for embeddings: for good ones name a model that was, such as
Qwen/Qwen3-Embedding-0.6B.
"""

from __future__ import annotations

import argparse

import trio

import triolet

TEXTS = ["The days of the week are seven.", "A fox lives in the forest.", "Two and two are four."]


async def tell(engine: triolet.Engine) -> None:
    answer = await engine.complete("Once upon a time", triolet.SamplingParams(temperature=0, max_tokens=20))
    print("meanwhile:", " ".join(answer.text.split()))


async def main(question: str, model: str | None) -> None:
    async with triolet.open_engine(model=model, convert="embed") as engine, trio.open_nursery() as nursery:
        if engine.model_info.generates:
            nursery.start_soon(tell, engine)
        [asked, *texts] = await engine.embed([question, *TEXTS])
        print(f"{asked.outputs.hidden_size} numbers for each of {1 + len(texts)} texts")
        # their length is 1: the product is the cosine
        scores = [
            sum(a * b for a, b in zip(asked.outputs.embedding, text.outputs.embedding, strict=True))
            for text in texts
        ]
        for score, text in sorted(zip(scores, TEXTS, strict=True), reverse=True):
            print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Find the text that is nearest to a question.")
    parser.add_argument("question", nargs="?", default="A fox lives in the forest!")
    parser.add_argument("--model")
    asked = parser.parse_args()
    trio.run(main, asked.question, asked.model)
