"""Ask triolet-nano for JSON that follows the held-out schemas, through triolet itself, and score the answers.

    python tools/nano/held_out/evaluate_forms.py [--model src/triolet/nano] [--first N] [--show]

The engine binds the answers to the schemas, so what is scored is whether they end by themselves, and their values: "valid"
says nearly the same as "ended", as a bound answer that ends is JSON of its schema. The forms are not in the training text, but
they were written by one who knew the forms that are.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio
from schemas import FORMS, Form

import triolet

FOLDER = Path(__file__).parents[3] / "src" / "triolet" / "nano"
MAX_TOKENS = 300


@attrs.frozen
class Score:
    """How one answer did.

    Attributes:
        stopped: it ended by itself; `valid`: it follows the schema.
        num_expected: how many values the ask states; `num_right`: how many of them the answer has.
    """

    stopped: bool
    valid: bool
    num_right: int
    num_expected: int


def is_valid(text: str, schema: dict[str, Any]) -> bool:
    """Tell whether the text is JSON of the schema; without the jsonschema package, whether it is JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    try:
        import jsonschema
    except ImportError:
        return True
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


def score(form: Form, text: str, finish_reason: str | None) -> Score:
    """Score an answer."""
    expected = form.expected or {}
    try:
        value = json.loads(text)
    except ValueError:
        value = {}
    num_right = sum(isinstance(value, dict) and value.get(key) == right for key, right in expected.items())
    return Score(finish_reason == "stop", is_valid(text, form.schema), num_right, len(expected))


async def ask(engine: triolet.Engine, form: Form, show: bool) -> Score:
    """Ask for one form, greedily."""
    params = triolet.SamplingParams(
        structured_outputs=triolet.StructuredOutputsParams(json=form.schema),
        max_tokens=MAX_TOKENS,
        temperature=0,
    )
    output = await engine.complete([{"role": "user", "content": form.ask}], params)
    scored = score(form, output.text, output.finish_reason)
    if show:
        print(
            f"{form.ask}\n  {output.text!r} {output.finish_reason}, {scored.num_right} of {scored.num_expected}"
        )
    return scored


async def main(model: Path, forms: Sequence[Form], show: bool) -> None:
    async with triolet.open_engine(model=str(model)) as engine:
        scores = [await ask(engine, form, show) for form in forms]
    num_expected = sum(each.num_expected for each in scores)
    num_right = sum(each.num_right for each in scores)
    for name, count, total in (
        ("ended by themselves", sum(each.stopped for each in scores), len(scores)),
        ("valid", sum(each.valid for each in scores), len(scores)),
        ("expected values", num_right, num_expected),
    ):
        print(f"{name:22} {count:4} of {total:4}  {100 * count / max(1, total):5.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluate triolet-nano on held-out forms.")
    parser.add_argument("--model", type=Path, default=FOLDER, help="folder of the model")
    parser.add_argument("--first", type=int, default=len(FORMS), help="ask for the first N forms only")
    parser.add_argument("--show", action="store_true", help="show the answers")
    options = parser.parse_args()
    trio.run(main, options.model, FORMS[: options.first], options.show)
