"""Answer many prompts with vLLM's `LLM` class, which shows a progress bar, and print the answers in order.

There is no event loop: `LLM` computes step after step until all answers are complete.

python examples/offline.py [--model PATH_OR_HUB_ID] [--no-bar]
"""

import argparse

from triolet.compat import LLM, SamplingParams

WORDS = ("hot", "big", "old", "fast", "light", "happy", "open", "early")


def main(model: str | None, *, use_tqdm: bool) -> None:
    llm = LLM(model, max_num_seqs=4)
    questions = [f"What is the opposite of {word}?" for word in WORDS]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    outputs = llm.chat(conversations, params, use_tqdm=use_tqdm)
    for question, output in zip(questions, outputs, strict=True):
        print(f"{question}  {output.outputs[0].text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    parser.add_argument("--no-bar", action="store_true", help="no progress bar")
    arguments = parser.parse_args()
    main(arguments.model, use_tqdm=not arguments.no_bar)
