"""How a form is shown: as few words, an example, a list of keys, or a JSON schema of one library or another."""

import json
import re
from random import Random

from chats.form_keys import Node, Schema
from phrasing import capital, listed

# fmt: off
_SHORT = {"py": {"integer": "int", "string": "str", "boolean": "bool", "number": "float"}, "ts": {"integer": "number"}}
_IN_WORDS = ["Answer in JSON: {}", "Answer as {}", "Form: {}", "Use this format: {}", "Respond in JSON like this: {}", "JSON format: {}", "Return JSON of the form {}", "The answer is JSON: {}", "Reply only with JSON in this shape: {}", "Schema: {}", "Output format: {}", "{}"]
_BY_EXAMPLE = ["Example: {}", "Answer in JSON like this example: {}", "For example: {}", "The answer looks like {}", "Use the format of this example: {}", "Like {}"]
_BY_KEYS = ["Use the keys {}.", "Answer in JSON with the keys {}.", "The JSON has the fields {}.", "Return a JSON object with {}.", "Fields: {}."]
_BY_SCHEMA = [
    "Answer in JSON that follows this schema: {}", "JSON schema: {}", "Follow this JSON schema:\n{}", "Respond with JSON that matches this schema:\n{}", "Schema:\n{}", "{}", "Answer with JSON that validates against {}",
    "As a genius expert, your task is to understand the content and provide the parsed objects in json that match the following json_schema:\n\n{}\n\nMake sure to return an instance of the JSON, not the schema itself",
    "Return the correct JSON response within a ```json codeblock. not the JSON_SCHEMA\n\n{}",
    "The output should be formatted as a JSON instance that conforms to the JSON schema below.\n\nHere is the output schema:\n```\n{}\n```",
    "You must respond with a JSON object in this format:\n```json\n{}\n```", "Respond only in valid JSON. No explanation.\nThe JSON object you return should match this schema:\n{}",
]
# fmt: on


def _type_word(schema: Schema, style: str) -> str:
    """Write a type in few words."""
    if "anyOf" in schema:
        return " | ".join(_type_word(each, style) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(json.dumps(each) for each in schema["enum"])
    kind = schema["type"]
    if kind == "array":
        inner = _type_word(schema["items"], style)
        return f"{inner}[]" if style == "ts" else f"[{inner}]" if style == "json" else f"list of {inner}"
    if kind == "object":
        parts = {key: _type_word(each, style) for key, each in schema.get("properties", {}).items()}
        written = "{}: {}" if style == "ts" else '"{}": {}'
        return "{" + ", ".join(written.format(key, word) for key, word in parts.items()) + "}"
    return _SHORT.get(style, {}).get(kind, str(kind))


def _pydantic(schema: Schema, title: str) -> Schema:
    """Write a schema as pydantic's `model_json_schema` does."""
    defs: dict[str, Schema] = {}

    def named(key: str) -> str:
        return capital(re.sub(r"[_-]", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", key))).title()

    def walk(part: Schema, key: str, top: bool = False) -> Schema:
        if "properties" in part:
            properties = {each: walk(inner, each) for each, inner in part["properties"].items()}
            body: Schema = {"properties": properties}
            if "required" in part:
                body["required"] = part["required"]
            name = "".join(named(key).split()) or "Model"
            body |= {"title": name, "type": "object"}
            if top:
                return body
            defs[name] = body
            return {"$ref": f"#/$defs/{name}"}
        inner = {k: v for k, v in part.items() if k not in ("items", "additionalProperties")}
        if "items" in part:
            item = walk(part["items"], key.rstrip("s") or key)
            inner = {"items": {k: v for k, v in item.items() if k != "title"}, **inner}
        return {**inner, "title": named(key)}

    body = walk(schema, title, top=True)
    return {"$defs": defs, **body} if defs else body


def _strict(schema: Schema) -> Schema:
    """Close all objects of a schema, as the OpenAI API wants it."""
    if "properties" in schema:
        return {
            "type": "object",
            "properties": {key: _strict(each) for key, each in schema["properties"].items()},
            "required": list(schema["properties"]),
            "additionalProperties": False,
        }
    return {**schema, "items": _strict(schema["items"])} if "items" in schema else schema


def shown_form(rng: Random, title: str, form: Node) -> str:
    """Tell the model of the form, in one of the ways that people and libraries have."""
    schema = form.schema
    roll = rng.random()
    if roll < 0.42:
        style = rng.choice(["json", "json", "ts", "py"])
        body = _type_word(schema, style)
        return rng.choice(_IN_WORDS).format(body)
    if roll < 0.55:
        tries = [form.make(rng) for _ in range(5)]
        fullest = max(tries, key=lambda made: len(made) if isinstance(made, dict) else 0)
        return rng.choice(_BY_EXAMPLE).format(json.dumps(fullest, ensure_ascii=False))
    if roll < 0.64 and schema.get("properties"):
        return rng.choice(_BY_KEYS).format(listed(list(schema["properties"])))
    real = rng.choice([schema, _strict(schema), _pydantic(schema, title), _pydantic(schema, title)])
    body = json.dumps(real, separators=(",", ":") if rng.random() < 0.2 else None)
    said = rng.choice(_BY_SCHEMA).replace("{}", body)
    if len(said) > 600:
        said = f"Answer in JSON: {_type_word(schema, 'json')}"
    return said
