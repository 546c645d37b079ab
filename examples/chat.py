"""Hold a conversation: the messages so far are the prompt, and the prefix cache has their KV.

python examples/chat.py [--model PATH_OR_HUB_ID]
"""

import argparse

import attrs
import trio

import triolet

SYSTEM = "Your name is Marvin. You are a helpful assistant."
QUESTIONS = ("Hello! My name is Nora.", "What is your name?", "What is my name?")


async def main(model: str | None) -> None:
    async with triolet.open_engine(model=model) as engine:
        params = attrs.evolve(engine.default_sampling_params(), temperature=0.0, max_tokens=100)
        messages = [{"role": "system", "content": SYSTEM}]
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            output = await engine.complete(messages, params)
            messages.append({"role": "assistant", "content": output.text})
            print(f"> {question}\n{output.text}")
            print(
                f"  (prompt: {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} of them cached)"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    trio.run(main, parser.parse_args().model)
