"""Get an answer that is JSON and follows a schema.

python examples/structured_json.py [--model PATH_OR_HUB_ID] [QUESTION]
"""

import argparse
import json

import trio

import triolet

PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "likes": {"type": "array", "items": {"enum": ["food", "sun", "rain"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "likes"],
    "additionalProperties": False,
}


async def main(model: str | None, question: str) -> None:
    async with triolet.open_engine(model=model) as engine:
        params = triolet.SamplingParams(
            structured_outputs=triolet.StructuredOutputsParams(json=PET), max_tokens=200, seed=7
        )
        output = await engine.complete([{"role": "user", "content": question}], params)
        pet = json.loads(output.text)
        print(json.dumps(pet, indent=2))
        print(f"{pet['name']!r} is a {pet['kind']} of {pet['age']} years, ended by {output.finish_reason}")

        # a wrong schema raises here, in the caller, and affects no other request
        try:
            wrong = triolet.StructuredOutputsParams(json={"type": "pet"})
            await engine.complete(question, triolet.SamplingParams(structured_outputs=wrong))
        except triolet.errors.InvalidParams as error:
            print(error)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("question", nargs="?", default="Tell me about a pet.")
    parser.add_argument("--model", help="folder or hub id; by default triolet-nano")
    arguments = parser.parse_args()
    trio.run(main, arguments.model, arguments.question)
