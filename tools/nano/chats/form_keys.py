"""Keys of forms, and what may stand behind each: a schema with a maker of values that follow it."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import attrs
import words as w
from chats import form_values as some
from phrasing import capital
from skills import text

Schema = dict[str, Any]


@attrs.frozen
class Node:
    """A JSON schema with a maker of values that follow it."""

    schema: Schema
    make: some.Make


def _leaf(kind: str, make: some.Make, **more: Any) -> Callable[[Random], Node]:
    return lambda rng: Node({"type": kind, **more}, make)


def _enum(*options: str) -> Callable[[Random], Node]:
    def write(rng: Random) -> Node:
        is_full = len(options) < 4 or rng.random() < 0.5
        chosen = list(options) if is_full else rng.sample(options, rng.randint(2, len(options)))
        return Node({"type": "string", "enum": chosen}, some.one_of(chosen))

    return write


def _strings(make: some.Make) -> Callable[[Random], Node]:
    return lambda rng: Node({"type": "array", "items": {"type": "string"}}, make)


def _numbers(kind: str, make: some.Make) -> Callable[[Random], Node]:
    return lambda rng: Node({"type": "array", "items": {"type": kind}}, some.list_of(make))


def _bounded(low: int, high: int) -> Callable[[Random], Node]:
    def write(rng: Random) -> Node:
        bounds = {"minimum": low, "maximum": high} if rng.random() < 0.3 else {}
        return Node({"type": "integer", **bounds}, some.between(low, high))

    return write


def _integer_or_number(low: int, high: int, digits: int) -> Callable[[Random], Node]:
    def write(rng: Random) -> Node:
        if rng.random() < 0.25:
            return Node({"type": "integer"}, some.between(low, high))
        return Node({"type": "number"}, some.decimal(low, high, digits))

    return write


# fmt: off
_ADDRESS = [("street", "street"), ("city", "city"), ("zip,postal code,zip code", "zip"), ("country", "country")]
_PLACES = [[("lat,latitude", "degrees"), ("lon,lng,longitude", "degrees")], [("city", "city"), ("country", "country")], [("x", "small"), ("y", "small")]]
_SIZES = [("width", "length"), ("height", "length"), ("depth", "length")]
_HUMAN = [("name", "person"), ("age", "age"), ("email", "email"), ("city", "city"), ("role,job", "job"), ("id", "number id")]
_ITEM = [("name,item,product,title", "product"), ("quantity,qty,count,amount", "quantity"), ("price,unit price,cost", "price")]
# fmt: on


def _address(rng: Random) -> Node:
    return object_of(rng, _ADDRESS[: rng.choice([2, 3, 3, 4])])


def _place(rng: Random) -> Node:
    return object_of(rng, rng.choice(_PLACES))


def _size(rng: Random) -> Node:
    return object_of(rng, _SIZES[: rng.choice([2, 3])])


def _human(rng: Random) -> Node:
    return object_of(rng, rng.sample(_HUMAN, rng.randint(1, 3)))


def _items(rng: Random) -> Node:
    return array_of(object_of(rng, _ITEM[: rng.choice([2, 2, 3])]), 3)


def _people(rng: Random) -> Node:
    return array_of(_human(rng), 2)


def array_of(item: Node, most: int = 4) -> Node:
    """Make an array of one to `most` items."""
    return Node({"type": "array", "items": item.schema}, some.list_of(item.make, most))


# fmt: off
KINDS: dict[str, Callable[[Random], Node]] = {
    "person": _leaf("string", some.person), "first name": _leaf("string", some.first_name), "last name": _leaf("string", some.last_name), "city": _leaf("string", some.city), "country": _leaf("string", some.one_of(some.COUNTRIES)),
    "job": _leaf("string", some.one_of(w.JOBS)), "company": _leaf("string", some.one_of(some.COMPANIES)), "brand": _leaf("string", some.one_of(some.BRANDS)), "product": _leaf("string", some.one_of(some.PRODUCTS)), "title": _leaf("string", some.title),
    "song": _leaf("string", some.song), "genre": _leaf("string", some.one_of(some.GENRES)), "music": _leaf("string", some.one_of(some.MUSIC)), "dish": _leaf("string", some.one_of(some.DISHES)), "cuisine": _leaf("string", some.one_of(some.CUISINES)),
    "species": _leaf("string", some.one_of(some.SPECIES)), "task": _leaf("string", some.task), "event": _leaf("string", some.one_of(some.EVENTS)), "problem": _leaf("string", some.one_of(some.PROBLEMS)), "department": _leaf("string", some.one_of(some.DEPARTMENTS)),
    "colour": _leaf("string", some.one_of(w.COLOURS)), "animal": _leaf("string", some.one_of(w.ANIMALS)), "food": _leaf("string", some.one_of(w.FOODS)), "thing": _leaf("string", some.one_of(w.THINGS)), "hobby": _leaf("string", some.one_of(w.HOBBIES)),
    "street": _leaf("string", some.street), "zip": _leaf("string", lambda rng: str(rng.randint(10000, 99999))), "sentence": _leaf("string", some.sentence), "text": _leaf("string", some.short_text), "word": _leaf("string", some.one_of(w.WORDS)),
    "date": lambda rng: Node({"type": "string", "format": "date"} if rng.random() < 0.4 else {"type": "string"}, some.date), "time": _leaf("string", some.time),
    "moment": _leaf("string", lambda rng: f"{some.date(rng)}T{some.time(rng)}:00Z"), "email": _leaf("string", some.email), "url": _leaf("string", some.url), "phone": _leaf("string", some.phone), "code": _leaf("string", some.code),
    "weekday": _leaf("string", some.one_of(w.DAYS)), "month": _leaf("string", some.one_of(sorted(w.MONTH_DAYS))), "language": _leaf("string", some.one_of(some.LANGUAGES)), "room": _leaf("string", some.one_of(some.ROOMS)), "place": _leaf("string", some.one_of(w.PLACES)),
    "subject": _leaf("string", some.one_of(some.SUBJECTS)), "sport": _leaf("string", some.one_of(some.SPORTS)), "weather": _leaf("string", some.one_of(some.WEATHER)), "mood": _leaf("string", some.one_of(some.MOODS)), "material": _leaf("string", some.one_of(some.MATERIALS)),
    "power": _leaf("string", some.one_of(some.POWERS)), "adjective": _leaf("string", some.one_of(w.ADJECTIVES)), "currency": _enum(*some.CURRENCIES), "unit": _enum("kg", "g", "m", "cm", "km", "l"), "status": _enum("open", "closed", "pending", "done"),
    "priority": _enum("low", "medium", "high", "urgent"), "sentiment": _enum("positive", "negative", "neutral"), "size name": _enum("S", "M", "L", "XL"), "level": _enum("easy", "medium", "hard"), "gender": _enum("male", "female", "other"),
    "role": _enum("admin", "user", "guest", "editor"), "pay": _enum("card", "cash", "transfer"), "age": _bounded(1, 90), "year": _bounded(1950, 2026), "quantity": _bounded(1, 20), "small": _bounded(0, 20), "count": _bounded(1, 300),
    "rating": _bounded(1, 5), "score": _bounded(0, 10), "percent": _bounded(0, 100), "minutes": _leaf("integer", some.one_of([5, 10, 15, 20, 25, 30, 40, 45, 60, 90, 120])), "pages": _bounded(40, 900), "number id": _bounded(1, 9999),
    "price": _integer_or_number(1, 200, 2), "money": _integer_or_number(10, 5000, 2), "length": _integer_or_number(1, 200, 1), "weight": _integer_or_number(1, 90, 1), "degrees": _leaf("number", some.decimal(-60, 60, 2)),
    "temperature": _integer_or_number(-10, 38, 1), "share": _leaf("number", lambda rng: rng.choice([0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0])), "number": _integer_or_number(0, 100, 1), "bool": _leaf("boolean", some.one_of([True, False])),
    "hobbies": _strings(some.list_of(w.HOBBIES)), "tags": _strings(some.list_of(some.TAGS)), "ingredients": _strings(some.list_of(some.INGREDIENTS)), "names": _strings(some.list_of(some.person)), "first names": _strings(some.list_of(w.NAMES)), "cities": _strings(some.list_of(w.CITIES)),
    "colours": _strings(some.list_of(w.COLOURS)), "animals": _strings(some.list_of(w.ANIMALS)), "foods": _strings(some.list_of(w.FOODS)), "things": _strings(some.list_of(w.THINGS)), "languages": _strings(some.list_of(some.LANGUAGES)), "skills": _strings(some.list_of(some.SKILLS)),
    "features": _strings(some.list_of(some.FEATURES, 3)), "genres": _strings(some.list_of(some.GENRES, 3)), "steps": _strings(some.list_of(some.step)), "words": _strings(some.list_of(w.WORDS)), "tasks": _strings(some.list_of(some.TASKS, 3)), "titles": _strings(some.list_of(some.title, 3)),
    "sentences": _strings(some.list_of(some.sentence, 3)), "numbers": _numbers("integer", some.between(0, 100)), "decimals": _numbers("number", some.decimal(0, 50)), "dates": _strings(some.list_of(some.date, 3)),
    "powers": _strings(some.list_of(some.POWERS, 2)), "address": _address, "coordinates": _place, "dimensions": _size, "human": _human, "items": _items, "people": _people,
    "big": _leaf("integer", lambda rng: rng.randint(1, 900) * 10 ** rng.randint(2, 4)), "salary": _leaf("integer", lambda rng: rng.randint(20, 95) * 1000),
    "river": _leaf("string", some.one_of("Rhine Danube Thames Seine Nile Tiber Elbe Volga Amazon Ganges".split())), "transport": _leaf("string", some.one_of("train plane bus car ship bike".split())),
}
_KEYS = """
person: name|full name|author|owner|customer|customer name|user|client|sender|recipient|manager|employee|artist|director|writer|contact|contact name|teacher|student|friend|winner|chef|speaker|organizer|host|creator|assignee|assigned to|reporter|doctor|patient|player|driver|author name|seller|buyer|guest|leader|mother|father|parent|hero|main character|editor|singer|actor|protagonist|created by|who
first name: first name|given name|nickname|username|user name|display name|firstname|pet name
last name: last name|surname|family name|lastname
city: city|town|location|place|destination|hometown|origin|birthplace|venue|departure city|from|to|based in|city name|home|start|goal|where|birth place
country: country|nationality|country of origin|country name|nation|homeland
job: job|occupation|profession|role|job title|position|career|work
company: company|employer|vendor|publisher|organization|store|shop|supplier|manufacturer|school|bank|merchant|company name|business
brand: brand|make|maker|model|label
product: product|item|product name|item name|article|gift|device|tool
title: title|book|book title|movie|film|series|headline|name of book|story title|game
song: song|track|song title|album|tune
genre: genre|category|style|kind|theme
dish: dish|recipe|meal|dish name|recipe name|lunch|dinner|favorite dish
cuisine: cuisine
species: species|animal type|pet type|kind of pet|breed
task: task|todo|task name|action|next step|goal|objective|plan|activity|suggestion|advice
event: event|event name|meeting|occasion|appointment|topic|agenda|subject line
problem: problem|issue|error|complaint|bug|reason|cause|error message|concern
department: department|team|division|section|group
colour: color|colour|favorite color|eye color|hair color|paint|background color|favourite colour|shade
animal: animal|pet|favorite animal|mascot
food: food|favorite food|snack|fruit|flavor|breakfast|dessert
thing: object|thing|prize|symbol|weapon|icon|toy|tool name|equipment
hobby: hobby|interest|sport name|favorite hobby|pastime
street: street|address line|street address|address|line1
zip: zip|zip code|postal code|postcode
sentence: description|summary|bio|comment|note|notes|message|text|content|body|details|overview|explanation|review text|caption|intro|about|feedback|reply|response|quote|moral|background|backstory|plot|synopsis|conclusion|instructions|greeting|fact|remark|reasoning|thought|purpose|slogan
text: value|data|info|result|output|input|key|content type|other|extra|field|misc|metadata|property|attribute|detail
word: word|label|keyword|type|variant|token|answer|term|class|synonym|slug
date: date|birthday|birth date|date of birth|due date|deadline|start date|end date|published|release date|created|arrival date|day|delivery date|published on|hire date|joined|order date|invoice date|expires|expiry date
time: time|start time|end time|hour|departure|arrival|opening time|alarm
moment: created at|updated at|timestamp|datetime|last login|modified at|sent at|starts at
email: email|email address|mail|contact email|work email
url: url|website|link|homepage|image url|avatar|photo|source|web site|image
phone: phone|phone number|tel|mobile|telephone|fax
code: code|sku|order id|product id|serial number|reference|ticket id|invoice number|order number|uuid|user id|flight number|room number|license plate|transaction id|barcode|number plate|isbn
weekday: day of week|weekday|day name
month: month|birth month
language: language|native language|lang|spoken language
room: room|area|zone
place: setting|habitat|scene|environment|terrain|landscape
subject: subject|course|class name|lesson|field of study
sport: sport|game name|discipline
weather: weather|condition|forecast|conditions
mood: mood|feeling|emotion|tone|state of mind
material: material|fabric|made of
power: power|ability|special ability|talent|strength|weakness|superpower
adjective: trait|personality|character|quality|adjective|temper
currency: currency|currency code
unit: unit|units|unit of measure
status: status|state|order status|phase|stage
priority: priority|urgency|severity|importance|risk|risk level
sentiment: sentiment|polarity|opinion|attitude
size name: size|shirt size
level: difficulty|level|skill level|complexity
gender: gender|sex
role: user role|access|permission|account type
pay: payment method|payment|paid by
age: age|age in years|years|years old|years of experience|experience
year: year|published year|release year|founded|birth year|year of birth|publication year|built|since|first published
quantity: quantity|qty|amount|servings|seats|guests|days|nights|items count|lives|nights booked|chapters|players|hours|stops|seasons|children|rooms|floors|wins|weeks|months|size in rooms|copies
small: floor|row|column|x|y|index|rank|position number|week|chapter|goals|points lost|step|page
count: count|total|number of pages|attendees|capacity|views|likes|followers|votes|population|stock|points|visitors|members|calories|speed|num items|total count|word count|participants|downloads|health|health points|mana|distance
rating: rating|stars|grade|star rating
score: score|happiness|strength score|intelligence|wisdom|luck|stars out of ten|fun|power level|charisma
percent: percentage|percent|progress|battery|humidity|discount|completion|battery level
minutes: duration|minutes|cooking time|prep time|duration minutes|length minutes|runtime|time in minutes|cook time|reading time
pages: pages|page count|num pages
number id: id|number|user number|record id|seat|item id|identifier|member id|version
price: price|cost|unit price|fee|fare|price in euros|tip|tax|value in euros|shipping
money: total price|salary|budget|balance|income|subtotal|grand total|total amount|amount due|amount paid|revenue|profit|net worth|wage
length: length|height|width|depth|radius|distance km|height cm|size cm|altitude|area size|diameter
weight: weight|mass|weight kg|load
degrees: latitude|longitude|lat|lon|lng|angle
temperature: temperature|temp|high|low|degrees|temperature celsius|max temp|min temp
share: confidence|probability|ratio|accuracy|certainty|relevance|likelihood
number: reading|measure|measurement|average|mean|median|change|difference|sum|max|min
bool: active|is active|available|in stock|is member|has children|verified|is admin|completed|done|paid|is open|has pets|enabled|can swim|vegetarian|is vegan|married|is student|has garden|public|is happy|urgent flag|valid|correct|success|spam|is spam|read|subscribed|is new|has wifi|can fly|is late|approved|required|visible|premium|friendly|featured|free|open|accepted|recommended|would recommend|wants reply|vaccinated|online|is public|needs review|finished
hobbies: hobbies|interests|activities|likes|free time
tags: tags|labels|keywords|categories|topics|themes
ingredients: ingredients|shopping list|allergens|toppings
names: authors|guests list|members list|people|participants list|attendee names|players list|characters|cast|speakers|employees|students|winners|contacts|names
first names: friends|siblings|kids|parents|pets|children names|team members|users|invited|family
cities: cities|places|destinations|stops list|locations|route
colours: colors|colours|palette|available colors
animals: animals|favorite animals|species list
foods: foods|favorite foods|menu|snacks|dislikes|fruits|courses
things: objects|inventory|equipment list|things|packing list|gear|tools|possessions
languages: languages|spoken languages
skills: skills|technologies|abilities|strengths|requirements|qualifications
features: features|pros|benefits|advantages|highlights
genres: genres|styles
steps: steps|instructions list|directions|method
words: words|values|examples|entries|list|results|options|choices|synonyms|elements
tasks: tasks|todos|actions|next steps|goals list|action items|chores|recommendations|ideas
titles: books|movies|publications|favorite books|albums|films
sentences: facts|comments|notes list|messages|quotes|key points|points list|warnings|reviews|cons
numbers: numbers|scores|ratings|ids|grades|marks|counts|ages|sequence|digits
decimals: measurements|readings|prices|weights|samples|vector|temperatures
dates: dates|holidays|days off|available dates
powers: powers|special abilities|talents
address: address|home address|shipping address|billing address|location details|residence
coordinates: coordinates|location|geo|position|gps
dimensions: dimensions|size|measurements
human: person|user|author|owner|customer|contact|creator|client|employee|profile|driver
items: items|products|order items|line items|cart|purchases|lines|goods
people: people|users|employees|guests|team|contacts|members|passengers|family members
"""
# fmt: on
KEYS = {kind: keys.split("|") for kind, keys in (line.split(": ") for line in _KEYS.strip().splitlines())}
"""Of each kind, the keys that have such a value."""
KEY_OF = [(key, kind) for kind, keys in KEYS.items() for key in keys]
KIND_OF = dict(reversed(KEY_OF))


def speller(rng: Random) -> Callable[[str], str]:
    """Choose how keys are spelled in this chat."""
    style = rng.choices(["snake", "camel", "pascal", "kebab", "words", "upper"], [62, 26, 4, 3, 3, 2])[0]

    def spell(key: str) -> str:
        parts = key.split(" ")
        match style:
            case "snake":
                return "_".join(parts)
            case "camel":
                return parts[0] + "".join(map(capital, parts[1:]))
            case "pascal":
                return "".join(map(capital, parts))
            case "kebab":
                return "-".join(parts)
            case "words":
                return capital(key)
            case _:
                return "_".join(parts).upper()

    return spell


def renamed(schema: Schema, spell: Callable[[str], str]) -> Schema:
    """Spell the keys of objects in a schema."""
    if "properties" in schema:
        properties = {spell(k): renamed(v, spell) for k, v in schema["properties"].items()}
        schema = {**schema, "properties": properties}
        if "required" in schema:
            schema["required"] = [spell(key) for key in schema["required"]]
    if "items" in schema:
        schema = {**schema, "items": renamed(schema["items"], spell)}
    return schema


def respelled(value: Any, spell: Callable[[str], str]) -> Any:
    """Spell the keys of objects in a value."""
    if isinstance(value, dict):
        return {spell(key): respelled(each, spell) for key, each in value.items()}
    return [respelled(each, spell) for each in value] if isinstance(value, list) else value


def object_of(rng: Random, fields: Sequence[tuple[str, str]]) -> Node:
    """Make an object of (keys to choose from, kind) pairs."""
    return of_nodes(rng, {rng.choice(keys.split(",")): KINDS[kind](rng) for keys, kind in fields})


def of_nodes(rng: Random, nodes: Mapping[str, Node]) -> Node:
    """Make an object of named nodes; some forms leave keys out of what is required."""
    required = list(nodes)
    if len(nodes) > 2 and rng.random() < 0.15:
        required = [key for key in nodes if rng.random() < 0.7] or required[:1]

    def make(rng: Random) -> dict[str, Any]:
        kept = {key: node for key, node in nodes.items() if key in required or rng.random() < 0.6}
        values = {key: node.make(rng) for key, node in kept.items()}
        return agreeing(rng, values)

    schema: Schema = {
        "type": "object",
        "properties": {key: node.schema for key, node in nodes.items()},
        "required": required,
    }
    if rng.random() < 0.3:
        schema["additionalProperties"] = False
    return Node(schema, make)


def agreeing(rng: Random, values: dict[str, Any]) -> dict[str, Any]:
    """Let an e-mail address and a first name follow the name, and a country its capital."""
    name = values.get("name") or values.get("full name")
    if isinstance(name, str) and isinstance(values.get("email"), str):
        values["email"] = f"{some.plain_letters(name)}@{values['email'].split('@')[1]}"
    if isinstance(values.get("country"), str) and isinstance(values.get("city"), str):
        values["country"] = rng.choice(some.COUNTRIES)
        values["city"] = w.CAPITALS[values["country"]]
    return values


_VAGUE: dict[str, tuple[str, ...]] = {
    "string": ("text", "word", "sentence", "text", "thing", "person"),
    "integer": ("quantity", "small", "count", "number id"),
    "number": ("price", "number", "share"),
    "boolean": ("bool",),
    "array": ("words", "things", "numbers", "tags", "names"),
}
_AFFIXES = {
    "{} count": "count", "num {}": "quantity", "number of {}": "quantity", "is {}": "bool", "has {}": "bool", "can {}": "bool", "{} id": "code", "{} url": "url", "{} email": "email", "{} date": "date",
    "{} at": "moment", "{} name": "person", "{} title": "title", "{} list": "words", "{} price": "price", "{} description": "sentence", "{} type": "word", "{} color": "colour", "{} city": "city", "total {}": "count",
    "max {}": "small", "min {}": "small", "{} score": "score", "{} rating": "rating", "{} year": "year", "{} age": "age", "{} time": "time", "{} phone": "phone", "{} tags": "tags", "{} notes": "sentence", "first {}": "word",
    "favorite {}": "word", "{} status": "status", "{} level": "score", "{} address": "address", "{} summary": "sentence", "should {}": "bool", "{} percent": "percent", "{} weight": "weight", "{} length": "length",
}  # fmt: skip


def _any_key(rng: Random) -> str:
    return rng.choice(w.WORDS).replace("-", " ")


def made_up_field(rng: Random) -> tuple[str, Node]:
    """Make a key that means little, with a node of any type."""
    word = rng.choice(w.WORDS) if rng.random() < 0.7 else text.made_up_word(rng)
    word = word.replace("-", " ")
    roll = rng.random()
    if roll < 0.35:
        pattern = rng.choice(list(_AFFIXES))
        return pattern.format(word), KINDS[_AFFIXES[pattern]](rng)
    key = word if rng.random() < 0.7 else f"{word} {_any_key(rng)}"
    if roll < 0.43:
        options = rng.sample(w.WORDS, rng.randint(2, 4))
        choice: Schema = {"enum": options} if rng.random() < 0.5 else {"type": "string", "enum": options}
        return key, Node(choice, some.one_of(options))
    if roll < 0.48:
        kinds = _VAGUE["string"] + _VAGUE["integer"]
        return key, object_of(rng, [(_any_key(rng), rng.choice(kinds)) for _ in range(rng.randint(1, 2))])
    if roll < 0.51:
        return key, Node({"type": "object"}, lambda _: {})
    if roll < 0.54:
        return key, Node({"type": "array", "items": {"type": "string"}}, lambda _: [])
    if roll < 0.57:
        inner = KINDS[rng.choice(_VAGUE["string"])](rng)
        schema = {"anyOf": [inner.schema, {"type": "null"}]}
        return key, Node(schema, lambda rng: None if rng.random() < 0.5 else inner.make(rng))
    if roll < 0.59:
        return key, array_of(object_of(rng, [(_any_key(rng), "word"), (_any_key(rng), "quantity")]), 2)
    kind = rng.choices(list(_VAGUE), [5, 2, 1, 1.5, 2])[0]
    return key, KINDS[rng.choice(_VAGUE[kind])](rng)


def known_field(rng: Random) -> tuple[str, Node]:
    """Choose a key that is known, with a node of its kind."""
    if rng.random() < 0.5:
        kind = rng.choice(list(KEYS))
        return rng.choice(KEYS[kind]), KINDS[kind](rng)
    key = rng.choice(KEY_OF)[0]
    return key, KINDS[KIND_OF[key]](rng)
