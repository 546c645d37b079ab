"""Asks whose answers follow a form: extracting what a text says, making things up, filling in any keys."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import attrs
import words as w
from chats import form_values as some
from chats.form_domains import DOMAINS, Domain
from chats.form_keys import (
    KEY_OF,
    KIND_OF,
    KINDS,
    Node,
    Schema,
    agreeing,
    array_of,
    known_field,
    made_up_field,
    object_of,
    of_nodes,
)
from exchange import Chat, Skill
from phrasing import a, capital, listed, phrase
from skills import fact as facts
from skills import talk, text


@attrs.frozen(kw_only=True)
class Case:
    """An ask with its answer.

    Attributes:
        ask: what the user wants; `text`: the text that it is about.
        in_json: whether the ask says that the answer is JSON.
        form: schema of the answer, with plain keys, and a maker of examples.
        title: what the form is called.
        again: writes another case of the same form.
    """

    ask: str
    value: Any
    form: Node
    title: str
    text: str = ""
    in_json: bool = False
    again: Callable[[Random], "Case"] | None = None


def _said(value: Any) -> str:
    """Say a value in a sentence."""
    if isinstance(value, list):
        return listed([str(each) for each in value])
    return value if isinstance(value, str) else json.dumps(value)


# fmt: off
_EXTRACT_JSON = ["extract the {n} as JSON", "extract the {n} from this text as JSON", "turn this into JSON", "parse this into JSON", "give me the {n} as JSON", "convert this to JSON", "extract the data as JSON",
                 "return the {n} as a JSON object", "read the {n} and answer in JSON", "extract {n} information and reply with JSON", "make JSON of this", "output the {n} as JSON only"]
_EXTRACT = ["extract the {n}", "extract the {n} details", "extract the information", "extract the {n} information", "parse this", "get the {n} from the text", "find the {n} in this text", "read this {n}",
            "extract the fields", "extract the {n} from the text", "what {n} is this", "fill in the form of the {n}", "parse the {n}", "extract structured data", "which {n} is meant", "extract the data"]
_MAKE_JSON = ["give me {an} as JSON", "invent {an} in JSON", "make up {an} and answer in JSON", "describe {an} as JSON", "generate a random {n} as JSON", "write JSON for {an}", "{n} as JSON", "show me {an} in JSON", "create {an}, JSON only",
              "give me {an} in JSON format", "reply with a JSON object of {an}", "generate JSON for {an}"]
_MAKE = ["give me {an}", "describe {an}", "make {an}", "invent {an}", "make up {an}", "create {an}", "generate {an}", "i need {an}", "show me {an}", "tell me about {an}", "suggest {an}", "generate a random {n}", "write {an}",
         "give me an example of {an}", "think of {an}", "produce {an}", "create a sample {n}", "make a fake {n} for testing", "give me a random {n}"]
_ANYTHING = ["answer", "give me an answer", "fill in the form", "give me some data", "fill this in", "go", "generate test data", "give me an object", "make an example", "example", "give me something", "any values will do", "surprise me",
             "fill in the values", "generate sample data", "make up some data", "do it", "hello", "test", "what do you think", "tell me something", "give me a record", "generate a mock record", "what is it"]
_ANYTHING_JSON = ["give me JSON", "answer in JSON", "respond with JSON", "give me any JSON object", "make up some JSON", "return JSON", "generate random JSON", "output JSON only", "reply in JSON", "write some JSON", "JSON please", "send me a JSON object"]
_GIVE = ["give me {t}", "answer with {t}", "pick {t}", "{t}", "make up {t}", "name {t}"]
_ANOTHER = ["another one", "one more", "again", "give me another one", "another {n}", "next", "a different one", "another one, please"]
_BEFORE = ["Hello!", "What a nice day.", "Dear team,", "Good morning.", "As you know:", "Update:", "By the way,", "Note:", "I have news.", "Hi there."]
_LISTINGS = [("{k}: {v}", "\n"), ("{k}: {v}", ", "), ("{k} = {v}", ", "), ("the {k} is {v}", ", "), ("the {k} is {v}", " and "), ("{k} is {v}", "; "), ("{k} {v}", ", "), ("{k}: {v}", "; "), ("- {k}: {v}", "\n"), ("{k}={v}", " ")]
_NAMING = {
    "person": ["called {}", "named {}", "with the name {}"], "first name": ["called {}", "named {}"], "city": ["in {}", "from {}"], "title": ["called {}", "with the title {}"], "song": ["called {}"], "dish": ["for {}"],
    "age": ["of age {}"], "product": ["for the {}"], "event": ["for the {}"], "job": ["who is a {}"], "species": ["that is a {}"], "date": ["on {}", "for {}"], "brand": ["by {}"], "company": ["of {}", "from {}"], "year": ["from {}"], "genre": ["of the genre {}"],
}
_OTHER_ASKS: list[Skill] = [talk.small_talk, facts.thing_fact, facts.unknown, text.sentence_with]
_OBJECTS = ["items", "people", "human", "address", "coordinates", "dimensions"]
"""Kinds that are objects."""
# fmt: on


def _wish(rng: Random, plain: Sequence[str], in_json: Sequence[str], noun: str) -> tuple[str, bool]:
    named = rng.random() < 0.5
    ask = phrase(rng, in_json if named else plain, {"n": noun, "an": a(noun)}, command=True)
    return ask.replace("json", "JSON") if "json" in ask else ask, named


def _is_plain(schema: Schema) -> bool:
    """Tell whether a value can be said in a few words."""
    inner = schema["items"] if schema.get("type") == "array" else schema
    return inner.get("type") in ("string", "integer", "number")


def _told_of(
    rng: Random, domain: Domain, template: str, nodes: Mapping[str, Node]
) -> Callable[[Random], tuple[str, dict[str, Any]]]:
    """Return what writes one text of a template, with the values of all its slots."""
    sentence, *implied = template.split("|")
    unfit = {"sentiment", "stars", *(each.split("=")[0] for each in implied)}
    if more := [
        slot
        for slot in domain.fields
        if "{" + slot + "}" not in sentence and slot not in unfit and _is_plain(nodes[slot].schema)
    ]:
        for slot in rng.sample(more, min(len(more), rng.choice([0, 0, 0, 1, 1, 2]))):
            key = domain.fields[slot][1][0]
            verb = "are" if nodes[slot].schema["type"] == "array" else "is"
            end = "" if sentence[-1] in ".!?" else "."
            sentence += end + rng.choice([" The {k} {v} {s}.", " The {k} {v} {s}.", " {K}: {s}."]).format(
                k=key, K=capital(key), v=verb, s="{" + slot + "}"
            )
    slots = re.findall(r"{([^}]*)}", sentence)

    def tell(rng: Random) -> tuple[str, dict[str, Any]]:
        values = agreeing(rng, {slot: nodes[slot].make(rng) for slot in slots})
        told = sentence.format(**{slot: _said(value) for slot, value in values.items()})
        for each in implied:
            slot, value = each.split("=")
            values[slot] = json.loads(value)
        if rng.random() < 0.08:
            told = f"{rng.choice(_BEFORE)} {told}"
        return told, values

    return tell


def extraction(rng: Random) -> Case:
    """Extract what a sentence says."""
    domain = rng.choice(DOMAINS)
    noun = rng.choice(domain.nouns)
    made = {slot: KINDS[kind](rng) for slot, (kind, _) in domain.fields.items()}
    tell = _told_of(rng, domain, rng.choice(domain.texts), made)
    said, values = tell(rng)
    slots = list(values)
    if len(slots) > 1 and rng.random() < 0.2:
        slots.remove(rng.choice(slots))
    others = [slot for slot in domain.fields if slot not in values]
    unsaid = rng.choice(others) if others and rng.random() < 0.08 else ""
    slots += [unsaid] if unsaid else []
    if rng.random() < 0.6:
        rng.shuffle(slots)
    keys: dict[str, str] = {}
    for slot in slots:
        key = rng.choice(domain.fields[slot][1])
        keys[slot] = slot if key in keys.values() else key
    nodes = {}
    for slot, key in keys.items():
        schema = made[slot].schema
        if "enum" in schema:
            schema = {"type": "string"} if rng.random() < 0.3 else _full_enum(domain.fields[slot][0])
        if slot == unsaid:
            schema = {"anyOf": [schema, {"type": "null"}]}
        nodes[key] = Node(schema, made[slot].make)
    form = of_nodes(rng, nodes)
    ask, in_json = _wish(rng, _EXTRACT, _EXTRACT_JSON, noun)

    def again(rng: Random) -> Case:
        said, values = tell(rng)
        value = {key: values.get(slot) for slot, key in keys.items()}
        return Case(ask="", text=said, value=value, form=form, title=noun, in_json=True)

    value = {key: values.get(slot) for slot, key in keys.items()}
    return Case(ask=ask, text=said, value=value, form=form, title=noun, in_json=in_json, again=again)


def _full_enum(kind: str) -> Schema:
    """Return the schema of an enum with all that its values can be."""
    schemas = (KINDS[kind](Random(seed)).schema for seed in range(40))
    return max(schemas, key=lambda schema: len(schema["enum"]))


def facts_told(rng: Random) -> Case:
    """Extract values of any keys, which the text names one by one."""
    fields: dict[str, Node] = {}
    while len(fields) < rng.choice([1, 2, 2, 3, 3, 4]):
        key, node = known_field(rng) if rng.random() < 0.5 else made_up_field(rng)
        kind = node.schema.get("type")
        flat = kind == "array" and node.schema["items"].get("type") in ("string", "integer")
        if kind in ("string", "integer", "number", "boolean") or (flat and node.make(rng)):
            fields[key] = node
    order = list(fields)
    between, after = rng.choice(_LISTINGS)

    def tell(rng: Random) -> tuple[str, dict[str, Any]]:
        values = {key: fields[key].make(rng) for key in order}
        said = after.join(between.format(k=key, v=_listed_or_said(values[key])) for key in order)
        return capital(said) if rng.random() < 0.5 else said, values

    said, values = tell(rng)
    wanted = rng.sample(order, len(order)) if rng.random() < 0.3 else order
    if len(order) > 1 and rng.random() < 0.15:
        wanted = wanted[:-1]
    form = of_nodes(rng, {key: fields[key] for key in wanted})
    form.schema["required"] = wanted
    noun = rng.choice(["record", "entry", "values", "record", "entry", "note"])
    ask, in_json = _wish(rng, _EXTRACT, _EXTRACT_JSON, noun)

    def again(rng: Random) -> Case:
        said, values = tell(rng)
        value = {key: values[key] for key in wanted}
        return Case(ask="", text=said, value=value, form=form, title=noun, in_json=True)

    value = {key: values[key] for key in wanted}
    return Case(ask=ask, text=said, value=value, form=form, title=noun, in_json=in_json, again=again)


def _listed_or_said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else _said(value)


def invention(rng: Random) -> Case:
    """Make up an object of a domain; what the ask says is in it."""
    domain = rng.choice(DOMAINS)
    noun = rng.choice(domain.nouns)
    size = min(rng.choice([1, 2, 3, 3, 3, 4, 4, 5, 5]), len(domain.fields))
    slots = rng.sample(list(domain.fields), size)
    slots.sort(key=list(domain.fields).index)
    if rng.random() < 0.4:
        rng.shuffle(slots)
    nodes: dict[str, Node] = {}
    kinds: dict[str, str] = {}
    for slot in slots:
        kind, keys = domain.fields[slot]
        key = rng.choice(keys)
        nodes[key] = KINDS[kind](rng)
        if kind != "person" or slot == "name":
            kinds[key] = kind
    while rng.random() < 0.3 and len(nodes) < 6:
        key, node = known_field(rng)
        nodes.setdefault(key, node)
    form = of_nodes(rng, nodes)
    value = form.make(rng)
    ask, in_json = _wish(rng, _MAKE, _MAKE_JSON, noun)
    named = [key for key in value if kinds.get(key) in _NAMING]
    if named and rng.random() < 0.3:
        key = rng.choice(named)
        ask = f"{ask.rstrip('.!?')} {rng.choice(_NAMING[kinds[key]]).format(_said(value[key]))}{rng.choice(['', '.'])}"

    def again(rng: Random) -> Case:
        ask = phrase(rng, _ANOTHER, {"n": noun})
        return Case(ask=ask, value=form.make(rng), form=form, title=noun, in_json=True)

    return Case(ask=ask, value=value, form=form, title=noun, in_json=in_json, again=again)


def _plural(noun: str) -> str:
    if noun.endswith("s"):
        return noun
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in ("", *"aeiou") else f"{noun}s"


def _any_form(rng: Random) -> tuple[Node, str]:
    """Make a form of known and made-up keys, or one that is no object."""
    roll = rng.random()
    if roll < 0.10:
        key, node = known_field(rng)
        item = node if "properties" not in node.schema else KINDS["text"](rng)
        return array_of(item, 4), f"list of {_plural(key)}"
    if roll < 0.14:
        keys = rng.sample(sorted(KIND_OF), rng.randint(1, 2))
        fields = [(key, KIND_OF[key]) for key in keys if KIND_OF[key] not in ("items", "people")]
        return array_of(object_of(rng, fields or [("name", "person")]), 2), "list"
    if roll < 0.22:
        key = rng.choice([key for key, kind in KEY_OF if kind not in _OBJECTS])
        return KINDS[KIND_OF[key]](rng), key
    if roll < 0.25:
        options: list[Any] = rng.sample(w.WORDS, rng.randint(2, 4))
        return Node({"enum": options}, some.one_of(options)), "choice"
    if roll < 0.27:
        return Node({"type": "object", "properties": {}}, lambda _: {}), "empty object"
    known = rng.choice([0.0, 0.5, 0.8, 1.0])
    nodes: dict[str, Node] = {}
    for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6])):
        key, node = known_field(rng) if rng.random() < known else made_up_field(rng)
        nodes.setdefault(key, node)
    form = of_nodes(rng, nodes)
    return form, rng.choice(["answer", "object", "record", "result", "response", "item", "data", "model"])


def anything(rng: Random) -> Case:
    """Fill in a form of any keys, whatever the ask is."""
    form, title = _any_form(rng)
    value = form.make(rng)
    roll = rng.random()
    if roll < 0.6 or not isinstance(value, dict):
        is_object = isinstance(value, dict)
        wishes = [ask for ask in _ANYTHING_JSON if is_object or "object" not in ask]
        ask, in_json = _wish(rng, _ANYTHING, wishes, title)
        if not is_object and rng.random() < 0.6:
            article = title if title.endswith("s") and not title.startswith("list") else a(title)
            ask = phrase(rng, _GIVE, {"t": article}, command=True)
            in_json = False
    elif roll < 0.85:
        noun = rng.choice(w.ANIMALS + w.THINGS + w.PLACES + w.JOBS + w.FOODS)
        ask, in_json = _wish(rng, _MAKE, _MAKE_JSON, noun)
    else:
        ask, in_json = rng.choice(_OTHER_ASKS)(rng, Chat()).ask, False

    def again(rng: Random) -> Case:
        ask = phrase(rng, ["again", "one more", "another", "another one", "next"])
        return Case(ask=ask, value=form.make(rng), form=form, title=title, in_json=True)

    return Case(ask=ask, value=value, form=form, title=title, in_json=in_json, again=again)
