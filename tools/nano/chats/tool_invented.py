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
            return rng.choice([some.city, some.name, some.name, some.order, text.made_up_word, text.any_word, text.any_word, some.code, some.phrase, some.date, some.email, some.file, some.host, some.address, some.proper])(rng)  # fmt: skip


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

    return Tool(function, f"invented {verb} {noun}", name, wish, missing)


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


def _plain_word(rng: Random) -> str:
    return rng.choice([*w.THINGS, *w.FOODS, *w.VEGETABLES, *w.ANIMALS, text.made_up_word(rng)])


# fmt: off
_VERBS_OF_KINDS = VERBS + """show hide carry throw catch buy sell rent borrow return order deliver visit greet praise draw sing climb follow teach thank remind warn invite cancel extend shrink flip rotate crop zip encrypt
scramble translate rate like block mute pin share upload download install remove restart resume pause schedule book reserve water feed brush dry cut slice cook fry boil roast freeze melt""".split()
# What a function does something to: names of the parameter, values.
_OBJECTS: list[tuple[str, str, some.Make]] = [
    ("animal", "animal animal pet name", some.one_of(w.ANIMALS)), ("food", "food item dish", some.one_of(w.FOODS)), ("fruit", "fruit item", some.one_of(w.FRUITS)), ("plant", "plant kind name", some.one_of(w.VEGETABLES)),
    ("thing", "thing item object what", _plain_word), ("room", "room place", some.one_of(some.ROOMS)), ("file", "path file filename source", some.file), ("host", "host server name address", some.host),
    ("user", "user username name", some.name), ("student", "student name pupil", some.name), ("team", "team name", some.proper), ("place", "place location where", some.one_of(w.PLACES)),
    ("city", "city place", some.city), ("song", "song title name", some.song), ("film", "film title movie", some.film), ("word", "word text term", text.any_word), ("order", "order_id id number", some.order),
    ("device", "device name id", some.one_of(w.THINGS)), ("account", "account id name", some.code), ("page", "url page address", some.host), ("product", "product item name", some.one_of(some.PRODUCTS)),
    ("street", "street name", some.address), ("note", "note text", some.phrase), ("event", "event title", some.one_of(some.EVENTS)), ("ship", "ship name", some.proper), ("party", "party name", some.proper),
]
# How it is done: names of the parameter, values, its type, ways to say it.
_WAYS: list[tuple[str, some.Make, str, str]] = [
    ("seconds duration time", some.small, "integer", "for {} seconds;for {} seconds"), ("minutes duration", some.small, "integer", "for {} minutes"), ("hours", some.small, "integer", "for {} hours"), ("days", some.small, "integer", "for {} days"),
    ("times count repeat n", some.small, "integer", "{} times"), ("room place where", some.one_of(some.ROOMS), "string", "in the {}"), ("place location where", some.one_of(w.PLACES), "string", "in the {};at the {};near the {}"),
    ("city where place", some.city, "string", "in {}"), ("color colour", some.one_of(w.COLOURS), "string", "in {};in {}"), ("name title label", some.proper, "string", "as {};and call it {};under the name {}"), ("person recipient to user", some.name, "string", "for {};for {}"),
    ("tool with_item material with", _plain_word, "string", "with the {};with a {};with some {}"), ("target to destination new_name", some.file, "string", "to {};into {}"), ("source from origin", some.file, "string", "from {}"), ("to destination address", some.address, "string", "to {};at {}"),
    ("date day when", some.date, "string", "on {};for {}"), ("time at when", some.time, "string", "at {};at {}"), ("level power speed", some.small, "integer", "at level {};with power {}"), ("width", some.number, "integer", "to a width of {};with width {}"),
    ("height", some.number, "integer", "with height {};and height {}"), ("amount quantity", some.number, "integer", "with an amount of {}"), ("price", some.price, "number", "for {} euros;at a price of {}"), ("reason message text", some.phrase, "string", "because \"{}\";with the message \"{}\""),
    ("percent percentage", some.small, "integer", "by {} percent;to {} percent"), ("language", some.one_of(some.LANGUAGES), "string", "in {};into {}"), ("email address to", some.email, "string", "for {};to {}"), ("note comment", some.phrase, "string", "with the note '{}'"),
]
_WITH_ARTICLE = "animal food fruit plant thing room place device product".split()
_METHODS = ["fast slow", "small medium large", "soft hard", "red green blue", "A B C D", "md5 sha1 sha256", "json xml csv", "low medium high", "left right", "up down left right", "png jpg gif", "north south east west", "cold warm hot", "daily weekly monthly", "bold italic plain"]
# fmt: on


def _choices(rng: Random) -> list[str]:
    """Return what a parameter may be: words that belong together, or any two to five, so that none is learned by heart."""
    if rng.random() < 0.35:
        return rng.choice(_METHODS).split()
    pool = rng.choice([w.FOODS, w.ANIMALS, w.ADJECTIVES, w.WORDS, _STATES])
    many = [*rng.sample(pool, rng.randint(2, 4)), *([text.made_up_word(rng)] if rng.random() < 0.25 else [])]
    rng.shuffle(many)
    return many


def natural_tool(rng: Random) -> Tool:
    """Make up a function that does something to a thing, and ask for it as people do: without names of parameters."""
    verb = rng.choice(_VERBS_OF_KINDS)
    kind, names, make = rng.choice(_OBJECTS)
    names = names if rng.random() < 0.75 else f"{kind} {kind}_name the_{kind}"
    is_named = rng.random() < 0.6  # "feed the animal goat", where the value alone may be asked as well
    parameters = [Parameter("v", names.split(), make, {"type": "string"}, False)]
    ways = ["{v}", "the {v}", "my {v}"] if kind in _WITH_ARTICLE else ["{v}"]
    says = [rng.choice([f"the {kind} {{v}}", f"the {{v}} {kind}", *ways] if is_named else ways)]
    for key, (way_names, way_make, way_kind, phrases) in zip(
        "wz", rng.sample(_WAYS, rng.choices([0, 1, 2], [35, 45, 20])[0]), strict=False
    ):
        schema: dict[str, Any] = {"type": way_kind}
        parameters.append(Parameter(key, way_names.split(), way_make, schema, rng.random() < 0.25))
        says.append(rng.choice(phrases.split(";")).replace("{}", f"{{{key}}}"))
    if len(parameters) < 3 and rng.random() < 0.3:
        choices = _choices(rng)
        parameters.append(
            Parameter(
                "m",
                ["mode", "method", "kind", "style", "size", "format", "option", "type"],
                some.one_of(choices),
                {"type": "string", "enum": choices},
                rng.random() < 0.2,
            )
        )
        says.append(rng.choice(["with {m}", "with {m}", "as {m}", "in {m}", "{m}"]))
    name = rng.choice(
        [f"{verb}_{kind}", f"{verb}_{kind}", f"{verb}_{kind}", f"{verb}_the_{kind}", f"{kind}_{verb}", verb]
    )
    whole = " ".join(says)
    # A further way of asking leaves out what is optional.
    needed = " ".join(
        said for parameter, said in zip(parameters, says, strict=True) if not parameter.is_optional
    )
    asks = [f"!{verb} {said}" for said in (whole, whole, needed)]
    asks += [f"i want to {verb} {whole}", f"i need you to {verb} {needed}"]
    known = Known(
        group=f"natural {verb} {kind}", names=name if rng.random() < 0.8 else _camel(name), parameters=parameters,
        says=f"{capital(verb)} {a(kind)}.;{capital(_inflected(verb))} the {kind}.;{capital(verb)} the {kind}.;Use it to {verb} {a(kind)}.;{capital(verb)} {a(kind)} of your choice.",
        asks=";".join(asks), more=f"now {needed};and {needed}", facts=lambda rng, v: {"r": _made_up_value(rng)},
        shapes=[*DONE, {"result": "{r}"}, {"status": "{r}"}], answers="It is done.;Done.;The result is {r}.", pairs=f"!{verb} {{v}} and {{v2}}" if len(parameters) == 1 else "",
    )  # fmt: skip
    return known_tool(rng, known)


# fmt: off
_TRAVELLERS = "train tram ferry coach truck boat plane parade shuttle postman nurse tour ship cart convoy guide".split()
_TRAVELS = ["leave", "reach", "pass", "enter", "visit", "cross", "stop at", "arrive at", "depart from", "start in", "get to"]
_STOPS: list[tuple[str, str, some.Make]] = [
    ("place", "place stop location where", some.proper), ("street", "street stop address", some.address), ("city", "city place town", some.city), ("station", "station stop name", some.proper), ("person", "person name", some.name),
]
_PARTS = "row box rack house hall corner wing lane pool yard pen block barn line stand case drawer".split()
# fmt: on


def arrival_tool(rng: Random) -> Tool:
    """Make up a function that tells when something comes to a place: the value stands behind a verb of its own."""
    mover, verb = rng.choice(_TRAVELLERS), rng.choice(_TRAVELS)
    place, names, make = rng.choice(_STOPS)
    parameters = [Parameter("v", names.split(), make, {"type": "string"}, False)]
    if rng.random() < 0.4:
        parameters.append(
            Parameter("n", ["number", "platform", "route", "track"], some.small, {"type": "integer"}, True)
        )
    known = Known(
        group=f"arrival {mover}", names=rng.choice([f"next_{mover}", f"{mover}_time", f"get_next_{mover}", f"find_{mover}", f"{mover}_schedule", _camel(f"next_{mover}")]), parameters=parameters,
        says=f"When the next {mover} will {verb} {a(place)}.;Tells when the {mover} will {verb} {a(place)}.;Times of the {mover}.;The next {mover} of {a(place)}.",
        asks=f"when does the next {mover} {verb} {{v}};when will the {mover} {verb} {{v}};when does the {mover} {verb} {{v}};how soon does the next {mover} {verb} {{v}};does {a(mover)} {verb} {{v}} today;at what time does the {mover} {verb} {{v}};when does {mover} number {{n}} {verb} {{v}}",
        more="and {v};what about {v}", missing=f"when is the next {mover};when does the next {mover} come>To which {place}?;Which {place} do you mean?", facts=lambda rng, v: {"r": some.time(rng)},
        shapes=["{r}", {"time": "{r}"}, {"next": "{r}"}, {"place": "{v}", "time": "{r}"}], answers=f"The next {mover} comes at {{r}}.;The {mover} will {verb} {{v}} at {{r}}.",
    )  # fmt: skip
    return known_tool(rng, known)


def placed_tool(rng: Random) -> Tool:
    """Make up a function that does something to all things in a part of a place, which a word in front of it names."""
    verb, noun, part = rng.choice(_VERBS_OF_KINDS), rng.choice(NOUNS), rng.choice(_PARTS)
    which = rng.choice([text.any_word, some.one_of(w.COLOURS), some.one_of(w.VEGETABLES), some.one_of(w.FRUITS), some.name, some.one_of(w.ANIMALS)])  # fmt: skip
    parameters = [
        Parameter("v", [part, part, f"{part}_name", "name", "where"], which, {"type": "string"}, False)
    ]
    said = f"the {noun}s in the {{v}} {part}"
    if rng.random() < 0.6:
        way_names, way_make, way_kind, phrases = rng.choice(_WAYS)
        parameters.append(
            Parameter("w", way_names.split(), way_make, {"type": way_kind}, rng.random() < 0.25)
        )
        said += " " + rng.choice(phrases.split(";")).replace("{}", "{w}")
    known = Known(
        group=f"placed {verb} {noun}", names=rng.choice([f"{verb}_{noun}s", f"{verb}_{noun}s_in_{part}", _camel(f"{verb}_{noun}s")]), parameters=parameters,
        says=f"{capital(verb)} the {noun}s in {a(part)}.;{capital(_inflected(verb))} all {noun}s of {a(part)}.;Use it to {verb} the {noun}s of {a(part)}.",
        asks=f"!{verb} {said};!{verb} all {said.removeprefix('the ')};i want to {verb} {said}", facts=nothing, shapes=DONE, answers="It is done.;Done.",
    )  # fmt: skip
    return known_tool(rng, known)


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
