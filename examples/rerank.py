"""Put texts in the order of their relevance to a question.

    python examples/rerank.py [QUESTION] [--model FOLDER_OR_HUB_ID] [--classifier-from-token NO,YES]

The default, triolet-nano, compares embeddings that it was not trained for. For good orders name a reranker, such as
Qwen/Qwen3-Reranker-0.6B with `--classifier-from-token no,yes`.
"""

from __future__ import annotations

import argparse

import trio

import triolet

TEXTS = ["The days of the week are seven.", "A fox lives in the forest.", "Two and two are four."]


async def main(question: str, model: str | None, tokens: tuple[str, ...]) -> None:
    # a model that is named says in its folder what it computes
    convert = "embed" if model is None else "auto"
    async with triolet.open_engine(model=model, convert=convert, classifier_from_token=tokens) as engine:
        found = await engine.score(question, TEXTS)
    ranked = sorted(zip([one.outputs.score for one in found], TEXTS, strict=True), reverse=True)
    for score, text in ranked:
        print(f"{score:.3f}  {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Put texts in the order of their relevance to a question.")
    parser.add_argument("question", nargs="?", default="A fox lives in the forest!")
    parser.add_argument("--model")
    parser.add_argument("--classifier-from-token", default="")
    asked = parser.parse_args()
    trio.run(main, asked.question, asked.model, tuple(filter(None, asked.classifier_from_token.split(","))))
