"""Functions that no program has: verbs with nouns, made-up words, properties to get and to set."""

from random import Random
from typing import Any

import words as w
from chats import tool_values as some
from chats.tool_function import Tool, Wish, known_tool, rendered, schema_of, sentence_of, shown
from chats.tool_table import DONE, Known, Parameter, Values, nothing, parameter
from phrasing import a, capital, listed, phrase
from skills import text

# fmt: off
VERBS = """open close start stop check find scan paint clean fix move lift build send fetch read write count measure weigh mix bake pack load lock wake feed wash fold tune reset update delete create rename copy sort merge
split rank test charge park launch water heat cool print label book assign approve cancel verify archive summon polish calibrate inspect activate register export import sync""".split()
NOUNS = """door gate lamp robot engine pump valve boat ticket invoice order parcel shelf garden field kettle oven drone camera sensor tower bridge wagon rocket crystal token scroll badge ledger recipe map signal garage
cabinet bottle flag piano clock mirror balloon vault queue folder server cluster branch model profile contract member guest patient student team player planet dragon potion wizard castle tank tunnel report""".split()
_PARAMETERS = """name id target code level amount size color speed count mode key label value place owner limit weight depth angle text topic item title source user power height x y n word kind style note zone""".split()
_KEYS = """status result value level count total code message name color score weight state size price place owner speed rank mode answer number label energy progress grade distance duration""".split()
_STATES = "ready done open closed active empty full idle running broken green red blue high low waiting locked sent new old lost found safe warm cold paused online offline pending complete".split()
# fmt: on


def _inflected(verb: str) -> str:
    return verb + ("es" if verb.endswith(("s", "x", "ch", "sh")) else "s")


def _named(rng: Random, verb: str, noun: str) -> str:
    roll = rng.random()
    if roll < 0.6:
        return f"{verb}_{noun}"
    if roll < 0.75:
        return f"{verb}{noun.capitalize()}"
    if roll < 0.85:
        return f"{verb}_the_{noun}"
    return f"{noun}_{verb}" if roll < 0.9 else f"{verb}_{noun}s"


def _any_value(rng: Random, schema: dict[str, Any]) -> Any:
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "integer":
            return some.number(rng)
        case "number":
            return some.number(rng) if rng.random() < 0.6 else round(rng.uniform(0, 200), rng.choice([1, 2]))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            kind = schema["items"]["type"]
            if kind == "string":
                return rng.sample(w.WORDS, rng.randint(2, 4))
            return [rng.randint(0, 99) for _ in range(rng.randint(2, 4))]
        case _:
            return rng.choice([some.city, some.name, some.name, some.order, text.made_up_word, text.any_word, text.any_word, some.code, some.phrase, some.date, some.email])(rng)  # fmt: skip


def _any_schema(rng: Random) -> dict[str, Any]:
    kind = rng.choices(
        ["string", "integer", "number", "boolean", "array", "enum"], [50, 18, 10, 4, 5, 13], k=1
    )[0]
    if kind == "enum":
        if rng.random() < 0.8:
            pool = rng.choice([w.COLOURS, _STATES, ["low", "medium", "high"], ["small", "medium", "large"], w.ANIMALS, w.FOODS, w.DAYS])  # fmt: skip
            return {"type": "string", "enum": rng.sample(pool, min(len(pool), rng.randint(2, 4)))}
        return {"type": "integer", "enum": sorted(rng.sample(range(1, 30), rng.randint(2, 4)))}
    if kind == "array":
        return {"type": "array", "items": {"type": rng.choice(["string", "number"])}}
    return {"type": kind}


def invented_tool(rng: Random, verb: str = "", noun: str = "") -> Tool:
    """Make up a function: its name, its parameters, and what is said of it."""
    is_word = not verb and rng.random() < 0.25
    verb = verb or rng.choice(VERBS)
    noun = noun or (rng.choice(NOUNS) if rng.random() < 0.75 else text.made_up_word(rng))
    name = text.made_up_word(rng) if is_word else _named(rng, verb, noun)
    if is_word and rng.random() < 0.3:
        name = f"{name}_{text.made_up_word(rng)}"
    size = rng.choices([0, 1, 2, 3], [6, 50, 34, 10])[0]
    names = [key if rng.random() < 0.85 else text.made_up_word(rng) for key in rng.sample(_PARAMETERS, size)]
    names = list(dict.fromkeys(names))
    if names and rng.random() < 0.15:
        names[0] = f"{noun}_{names[0]}"
    parameters = [(each, _any_schema(rng), at == 0 or rng.random() < 0.75) for at, each in enumerate(names)]
    function: dict[str, Any] = {"name": name}
    thing = f"the {noun}"
    purpose = rng.choice([f"{verb} {thing}", f"{verb} a {noun}", f"{verb} {thing}"])
    if rng.random() < (0.5 if is_word else 0.8):
        function["description"] = rng.choice([f"{capital(purpose)}.", f"{capital(purpose)}.", f"{capital(_inflected(verb))} {thing}.", f"Use it to {purpose}.", f"A tool to {purpose}."])  # fmt: skip
    else:
        purpose = ""
    if is_word is False and not purpose:
        purpose = f"{verb} {thing}"
    function["parameters"] = schema_of(rng, parameters)

    def values_of(rng: Random) -> Values:
        return {
            each: _any_value(rng, schema)
            for each, schema, required in parameters
            if required or rng.random() < 0.5
        }

    def wish(rng: Random, kind: str) -> Wish | None:
        values = values_of(rng)
        if kind == "pair":
            others = values_of(rng)
            if set(others) != set(values) or others == values or not values:
                return None
            first, second = (_with_values(rng, each) for each in (values, others))
            if len(values) == 1:
                first, second = (_quoted(rng, next(iter(each.values()))) for each in (values, others))
            ask = phrase(rng, ["use {f} with {x} and with {y}", "call {f} for {x} and for {y}", "call {f} twice, with {x} and with {y}", "run {f} on {x} and on {y}"],
                         {"f": name, "x": first, "y": second}, command=True)  # fmt: skip
            both = [_made_up_result(rng) for _ in range(2)]
            return Wish(
                ask,
                [(name, values), (name, others)],
                [result for result, _ in both],
                " ".join(answer for _, answer in both),
            )
        ask = _ask_for(rng, name, purpose, values)
        result, answer = _made_up_result(rng)
        return Wish(ask, [(name, values)], [result], answer)

    def missing(rng: Random) -> tuple[str, str] | None:
        lacking = [each for each, schema, required in parameters if required]
        if len(lacking) != 1:
            return None
        ask = phrase(rng, ["use {f}", "call {f}", "run {f}"], {"f": name}, command=True)
        return ask, rng.choice(["Which {p} should I use?", "What is the {p}?"]).format(
            p=lacking[0].replace("_", " ")
        )

    return Tool(function, f"invented {verb} {noun}", wish, missing)


def _quoted(rng: Random, value: Any) -> str:
    said = shown(value)
    if isinstance(value, str) and (" " in value or rng.random() < 0.2):
        return f'"{said}"' if rng.random() < 0.7 else f"'{said}'"
    return said


def _with_values(rng: Random, values: Values) -> str:
    """Write parameters with their values: "x 5 and y 7", "x=5, y=7"."""
    way = rng.choice(["{p} {v}", "{p} {v}", "{p}={v}", "{p} = {v}", "{p}: {v}", "the {p} {v}"])
    parts = [
        way.format(p=each if rng.random() < 0.6 else each.replace("_", " "), v=_quoted(rng, value))
        for each, value in values.items()
    ]
    return ", ".join(parts) if "=" in way or ":" in way else listed(parts)


def _ask_for(rng: Random, name: str, purpose: str, values: Values) -> str:
    """Ask for a made-up function, by its name or its purpose."""
    slots: dict[str, object] = {"f": name, "u": purpose, "s": name.replace("_", " ")}
    if not values:
        templates = ["use {f}", "call {f}", "run {f}", "{f}"]
        if purpose:
            templates += ["{u}", "{u}", "{u}"]
    else:
        slots["x"] = _with_values(rng, values)
        templates = ["use {f} with {x}", "call {f} with {x}", "run {f} with {x}", "{f} with {x}", "call the function {f} with {x}", "use the tool {f} with {x}", "{s} with {x}"]  # fmt: skip
        if purpose:
            templates = [*templates[:4], "{u} with {x}", "{u} with {x}", "{u}, {x}"]
    if len(values) == 1:
        slots["v"] = _quoted(rng, next(iter(values.values())))
        templates += ["use {f} on {v}", "call {f} for {v}", "run {f} for {v}", "{f} {v}", "{f} {v}"]
        if purpose:
            templates += ["{u} {v}", "{u} for {v}", "{u} for {v}", "{u} {v}"]
    return phrase(rng, templates, slots, command=True)


def _made_up_value(rng: Random) -> Any:
    return rng.choices([some.one_of(_STATES), some.number, some.price, some.name, some.city, some.code, some.phrase, text.made_up_word, some.date], [6, 6, 3, 2, 2, 2, 2, 1, 1])[0](rng)  # fmt: skip


def _told(key: str, value: Any) -> str:
    return f"the {key.replace('_', ' ')} {'are' if isinstance(value, list) else 'is'} {shown(value)}"


def _made_up_result(rng: Random) -> tuple[str, str]:
    """Make up a result, and an answer that restates it."""
    roll = rng.random()
    if roll < 0.22:
        value = _made_up_value(rng)
        return rendered(rng, value), f"The result is {value}."
    if roll < 0.3:
        return rendered(rng, rng.choice(DONE)), rng.choice(["It is done.", "Done."])
    if roll < 0.4:
        told = rng.choice([some.headline(rng), f"{capital(_told(rng.choice(_KEYS), _made_up_value(rng)))}."])
        return rendered(rng, sentence_of(rng, told)), told
    if roll < 0.47:
        items = rng.sample(rng.choice([w.WORDS, w.NAMES, w.CITIES, _STATES]), rng.randint(2, 4))
        if rng.random() < 0.5:
            return rendered(rng, items), f"The results are {listed(items)}."
        key = rng.choice(["items", "names", "words", "results", "values", "options"])
        return rendered(rng, {key: items}), f"{capital(_told(key, items))}."
    size = rng.choices([1, 2, 3], [5, 4, 2])[0]
    keys = [
        key
        if rng.random() < 0.8
        else rng.choice([text.made_up_word(rng), f"{rng.choice(NOUNS)}_{key}", rng.choice(NOUNS)])
        for key in rng.sample(_KEYS, size)
    ]
    result = {key: _made_up_value(rng) for key in keys}
    answer = f"{capital(listed([_told(key, value) for key, value in result.items()]))}."
    if rng.random() < 0.1:
        return rendered(rng, {rng.choice(["data", "result", "output", *NOUNS]): result}), answer
    return rendered(rng, result), answer


# fmt: off
_OWNERS: list[tuple[str, str, some.Make]] = [
    ("person", "person name who person_name", some.name), ("user", "user username user_id name", some.name), ("city", "city place town location", some.city), ("country", "country nation name", some.one_of(some.COUNTRIES)),
    ("product", "product item product_name", some.one_of(some.PRODUCTS)), ("device", "device device_name id", some.one_of(w.THINGS)), ("animal", "animal species name", some.one_of(w.ANIMALS)), ("room", "room place", some.one_of(some.ROOMS)),
    ("word", "word text term", text.any_word), ("day", "day date weekday", some.one_of(w.DAYS)), ("student", "student name student_name", some.name), ("order", "id order_id code", some.order), ("fruit", "fruit name item", some.one_of(w.FRUITS)),
    ("key", "key k code", text.made_up_word), ("company", "company name firm", lambda rng: f"{capital(rng.choice(w.ADJECTIVES))} {capital(rng.choice(w.THINGS))}"),
]
_OF = """number code colour color price weight height age status rank score grade size speed level birthday address owner temperature voltage balance label salary shape rating name length teacher boss hobby pet email phone
password sign mood horoscope departure menu winner count distance taste sound origin team seat schedule""".split()
_FIRST_WORDS = "secret favourite lucky current last next total first best internal daily average lost hidden public".split()
_SETTABLE = "volume brightness level speed mode name title language theme colour color temperature limit power angle channel height timeout priority status label size state owner user theme font".split()
# fmt: on


def _camel(words: str) -> str:
    first, *rest = words.split("_")
    return first + "".join(map(str.capitalize, rest))


def property_tool(rng: Random) -> Tool:
    """Make up a function that gets a property of something, or sets one."""
    thing = rng.choice(_OF) if rng.random() < 0.85 else text.made_up_word(rng)
    if rng.random() < 0.4:
        thing = f"{rng.choice(_FIRST_WORDS)} {thing}"
    if rng.random() < 0.35:
        return _setter(rng)
    owner, names, make = rng.choice(_OWNERS)
    word = thing.replace(" ", "_")
    name = rng.choice([f"get_{word}", f"get_{word}", f"get_{owner}_{word}", f"find_{word}", f"lookup_{word}", f"{word}_of", word, f"fetch_{word}", f"read_{word}", f"check_{word}", f"get_{word}_of_{owner}", f"{owner}_{word}"])  # fmt: skip
    key = word if rng.random() < 0.6 else rng.choice(["result", "value", word.split("_")[-1]])
    shapes: list[Any] = ["{r}", {key: "{r}"}, {key: "{r}"}, {owner: "{v}", key: "{r}"}]
    known = Known(
        group=f"property {thing}", names=name if rng.random() < 0.8 else _camel(name),
        says=f"Get the {thing} of {a(owner)}.;Returns the {thing} of {a(owner)}.;The {thing} of {a(owner)}.;Look up the {thing} of {a(owner)}.;Tells the {thing}.;Get the {thing}.;Find the {thing} of a given {owner}.",
        parameters=[parameter("v", names, make)],
        asks=f"what is the {thing} of {{v}};what's the {thing} of {{v}};!tell me the {thing} of {{v}};!get the {thing} of {{v}};{thing} of {{v}};!find the {thing} of {{v}};!look up the {thing} for {{v}};what is {{v}}'s {thing};what is the {thing} for {{v}};do you know the {thing} of {{v}};which {thing} does {{v}} have;what {thing} has {{v}}",
        more="and of {v};what about {v};and {v};and for {v}", pairs=f"what is the {thing} of {{v}} and of {{v2}};!get the {thing} of {{v}} and {{v2}};what are the {thing}s of {{v}} and {{v2}}",
        missing=f"what is the {thing};!tell me the {thing};!get the {thing}>Of which {owner}?;Which {owner} do you mean?",
        facts=lambda rng, v: {"r": _made_up_value(rng)}, shapes=shapes, answers=f"The {thing} of {{v}} is {{r}}.",
    )  # fmt: skip
    return known_tool(rng, known)


def _setter(rng: Random) -> Tool:
    thing = rng.choice(_SETTABLE) if rng.random() < 0.85 else text.made_up_word(rng)
    verb = rng.choice(["set", "set", "set", "change", "update", "adjust", "switch"])
    name = f"{verb}_{thing}" if rng.random() < 0.8 else _camel(f"{verb}_{thing}")
    schema = _any_schema(rng)
    value = Parameter(
        "v",
        [rng.choice([thing, "value", "level", "to", "new_value", "x"])],
        lambda rng: _any_value(rng, schema),
        schema,
        False,
    )
    known = Known(
        group=f"property {thing}", names=name, says=f"{capital(verb)} the {thing}.;{capital(_inflected(verb))} the {thing}.;{capital(verb)} the {thing} to a value.",
        parameters=[value], asks=f"!set the {thing} to {{v}};!{verb} the {thing} to {{v}};!{verb} {thing} to {{v}};!put the {thing} to {{v}};{thing} {{v}};i want the {thing} to be {{v}};!make the {thing} {{v}}",
        more="now {v};and now to {v}", missing=f"!set the {thing};!{verb} the {thing}>To which value?;What should the {thing} be?", facts=nothing, shapes=[*DONE, {thing: "{v}"}, {"set": "{v}"}], answers=f"The {thing} is set to {{v}}.;The {thing} is now {{v}}.",
    )  # fmt: skip
    return known_tool(rng, known)
