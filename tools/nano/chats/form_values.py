"""Values for the keys of forms: names, dates, titles, short sentences, and the makers that choose among them."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import words as w
from phrasing import capital
from skills import text

Make = Callable[[Random], Any]

# fmt: off
_LAST = """Smith Jones Brown Miller Lopez Rossi Silva Novak Weber Schmidt Martin Dubois Tanaka Kim Chen Patel Singh Khan Ali Okafor Mensah Larsen Berg Hansen Virtanen
Kowalski Popov Green Hill Wood Baker Cook Fisher Stone Rivers Young King Moore Clark Lewis Hall Adams Reed Bell Ward Cox Gray Ross Murphy Kelly Walsh Costa Moreno Ortiz""".split()
COUNTRIES = sorted(w.CAPITALS)
LANGUAGES = "English French German Spanish Italian Dutch Swedish Polish Greek Turkish Japanese Chinese Arabic Hindi Finnish Danish".split()
PRODUCTS = """lamp|desk lamp|chair|office chair|table|coffee mug|water bottle|backpack|notebook|pencil case|headphones|keyboard|mouse|phone|laptop|tablet|camera|wool scarf|blue shirt|running shoes
umbrella|kettle|toaster|clock|wooden spoon|tent|bicycle|soccer ball|chess set|puzzle|candle|garden hose|hammer|red hat|sunglasses|USB cable|monitor|printer|soap|toy car""".replace("\n", "|").split("|")
BRANDS = "Acme Nordia Lumo Vento Kestrel Orbit Pinecone Solara Bluefin Marlow Tivo Zenit Halden Corvo Fabri Monti".split()
GENRES = ["fantasy", "science fiction", "mystery", "romance", "thriller", "horror", "history", "comedy", "drama", "adventure", "poetry", "biography"]
MUSIC = ["rock", "pop", "jazz", "folk", "blues", "classical", "hip hop", "electronic", "country", "metal"]
DISHES = ["tomato soup", "vegetable curry", "apple pie", "pancakes", "mushroom risotto", "potato salad", "chicken stew", "fried rice", "lemon cake", "garlic bread", "bean chili", "fish tacos", "banana bread", "pasta with pesto"]
INGREDIENTS = "flour sugar eggs butter milk salt rice beans oil water cheese cream yeast honey basil lemon chicken beef fish oats cinnamon".split() + w.VEGETABLES
CUISINES = "Italian Indian Mexican Thai Greek French Chinese Japanese Spanish Turkish".split()
SPECIES = "dog cat rabbit parrot hamster fish turtle horse pony snake mouse duck".split()
TASKS = ["buy milk", "call the bank", "water the plants", "clean the kitchen", "write the report", "fix the door", "pay the rent", "send the invoice", "book a flight", "walk the dog", "wash the car", "read chapter two",
          "update the website", "plan the party", "order new chairs", "review the code", "back up the server", "answer the mail", "paint the fence", "pack the bags"]
EVENTS = ["team meeting", "birthday party", "book club", "spring concert", "chess tournament", "cooking class", "yoga class", "art fair", "science night", "summer picnic", "board meeting", "dance lesson", "open day", "music festival", "movie night", "job interview"]
PROBLEMS = ["the printer is broken", "the login page shows an error", "my order has not arrived", "the app is slow", "I cannot reset my password", "the screen stays black", "the invoice is wrong", "the server is down", "the search finds nothing", "the photo does not load", "the door does not lock", "the battery is empty"]
COMPANIES = ["Blue Fox Ltd", "Green Leaf", "Sunrise Foods", "Nova Systems", "Harbour Bank", "Red Kite Media", "Oak and Sons", "Polar Tools", "Bright Labs", "River Books", "Stone Works", "Cloud Nine Travel"]
DEPARTMENTS = ["sales", "support", "engineering", "marketing", "finance", "research", "design", "logistics"]
_STREETS = "Main High Park Church Oak Mill Station Garden Lake River Hill School King Queen Elm Bridge".split()
ROOMS = ["kitchen", "office", "garage", "garden", "hall", "cellar", "room 4", "room 12", "lab 2", "roof"]
SUBJECTS = ["maths", "history", "biology", "physics", "art", "music", "geography", "chemistry", "French", "sports"]
SPORTS = ["football", "tennis", "hockey", "chess", "basketball", "rugby", "swimming", "cycling"]
WEATHER = ["sunny", "rainy", "cloudy", "windy", "snowy", "foggy", "stormy", "clear"]
MOODS = ["happy", "calm", "sad", "curious", "excited", "tired", "proud", "nervous"]
MATERIALS = ["wood", "steel", "cotton", "wool", "glass", "plastic", "leather", "paper", "clay", "silk"]
FEATURES = ["waterproof", "light", "easy to clean", "foldable", "long battery life", "made of wood", "quiet", "two pockets", "wireless", "warm"]
SKILLS = ["Python", "SQL", "Java", "writing", "teaching", "design", "cooking", "sales", "planning", "Excel", "drawing", "Rust", "testing"]
TAGS = ["new", "sale", "summer", "travel", "food", "music", "tech", "home", "garden", "family", "health", "sports", "work", "art", "science", "kids", "books", "urgent", "fun", "nature"]
POWERS = ["can fly", "reads minds", "turns invisible", "talks to animals", "runs very fast", "heals wounds", "breathes under water", "stops time"]
CURRENCIES = ["EUR", "USD", "GBP", "CHF", "SEK"]
# fmt: on


def one_of(options: Sequence[Any]) -> Make:
    """Choose one of the options."""
    return lambda rng: rng.choice(options)


def list_of(options: Sequence[str] | Make, most: int = 4) -> Make:
    """Choose or make one to `most` different values."""

    def make(rng: Random) -> list[Any]:
        size = rng.choices(range(1, most + 1), [3, 5, 5, 2, 1, 1][:most])[0]
        if callable(options):
            made = [options(rng) for _ in range(size)]
            return [each for at, each in enumerate(made) if each not in made[:at]]
        return rng.sample(list(options), size)

    return make


def between(low: int, high: int) -> Make:
    """Choose an integer."""
    return lambda rng: rng.randint(low, high)


def decimal(low: int, high: int, digits: int = 1) -> Make:
    """Choose a number, sometimes a whole one."""

    def make(rng: Random) -> float | int:
        return round(rng.uniform(low, high), digits) if rng.random() < 0.8 else rng.randint(low, high)

    return make


def first_name(rng: Random) -> str:
    return rng.choice(w.NAMES) if rng.random() < 0.85 else capital(text.made_up_word(rng))


def last_name(rng: Random) -> str:
    return rng.choice(_LAST) if rng.random() < 0.85 else capital(text.made_up_word(rng))


def person(rng: Random) -> str:
    return first_name(rng) if rng.random() < 0.35 else f"{first_name(rng)} {last_name(rng)}"


def city(rng: Random) -> str:
    known = [*w.CITIES, *w.CAPITALS.values()]
    return rng.choice(known) if rng.random() < 0.88 else capital(text.made_up_word(rng))


def title(rng: Random) -> str:
    adjective = capital(rng.choice(w.ADJECTIVES))
    thing = capital(rng.choice(w.ANIMALS + w.THINGS + w.PLACES))
    return rng.choice(["The {a} {t}", "The {t}", "A {t} in {c}", "The {t} of {c}", "{a} {t}", "{n} and the {t}", "My {a} {t}", "The Last {t}", "{n}'s {t}"]).format(
        a=adjective, t=thing, c=city(rng), n=rng.choice(w.NAMES))  # fmt: skip


def song(rng: Random) -> str:
    return rng.choice(["{a} {t}", "Under the {t}", "Dance with the {t}", "{d} Morning", "Hello {n}", "{t} in the Rain", "Blue {t}"]).format(
        a=capital(rng.choice(w.ADJECTIVES)), t=capital(rng.choice(w.THINGS)), d=rng.choice(w.DAYS), n=rng.choice(w.NAMES))  # fmt: skip


def sentence(rng: Random) -> str:
    return rng.choice(["A {a} {t} from {c}.", "It is {a} and {b}.", "{n} likes the {a} {x}.", "A {a} story about a {x}.", "The {x} is in the {p}.", "A {b} day in {c}.", "{n} found a {t} in the {p}.",
                       "Good for a {a} {x}.", "All is well.", "It works well.", "A {a} {x} and a {b} {y} are friends.", "{n} lives in {c}."]).format(
        a=rng.choice(w.ADJECTIVES), b=rng.choice(w.ADJECTIVES), t=rng.choice(w.THINGS), c=city(rng), n=rng.choice(w.NAMES), x=rng.choice(w.ANIMALS), y=rng.choice(w.ANIMALS), p=rng.choice(w.PLACES))  # fmt: skip


def short_text(rng: Random) -> str:
    size = rng.choices([1, 2, 3, 4], [5, 4, 2, 1])[0]
    return " ".join(rng.choice(w.WORDS) for _ in range(size))


def date(rng: Random) -> str:
    return f"{rng.randint(1950, 2030) if rng.random() < 0.3 else rng.randint(2020, 2027)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def time(rng: Random) -> str:
    return f"{rng.randint(6, 22):02}:{rng.choice(['00', '15', '30', '45'])}"


def plain_letters(word: str) -> str:
    """Write a name as it stands in an e-mail address."""
    return word.lower().translate(str.maketrans("éëü", "eeu")).replace(" ", ".").replace("-", "")


def email(rng: Random) -> str:
    return f"{plain_letters(rng.choice(w.NAMES))}{rng.choice(['', '', '.' + plain_letters(rng.choice(_LAST))])}@{rng.choice(['example.com', 'mail.com', 'example.org', 'post.net'])}"


def url(rng: Random) -> str:
    return f"https://{rng.choice(['www.', ''])}{rng.choice(w.THINGS + w.ANIMALS)}.{rng.choice(['com', 'org', 'net'])}{rng.choice(['', '', '/' + rng.choice(w.THINGS)])}"


def phone(rng: Random) -> str:
    return rng.choice(["555-{:04}", "+44 20 {:04}", "+1 555 {:04}", "0{:04}"]).format(rng.randint(1000, 9999))


def code(rng: Random) -> str:
    return rng.choice(["A-{}", "B{}", "{}", "ID-{}", "X{}", "no-{}"]).format(rng.randint(10, 9999))


def task(rng: Random) -> str:
    return capital(rng.choice(TASKS)) if rng.random() < 0.7 else rng.choice(TASKS)


def street(rng: Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(_STREETS)} {rng.choice(['Street', 'Road', 'Lane'])}"


def step(rng: Random) -> str:
    return rng.choice(["Mix the {i}.", "Add the {i}.", "Cut the {i}.", "Bake for {n} minutes.", "Wash the {i}.", "Cook for {n} minutes.", "Serve warm.", "Open the box.", "Turn it on.", "Wait {n} minutes."]).format(
        i=rng.choice(INGREDIENTS), n=rng.choice([5, 10, 15, 20, 30, 45]))  # fmt: skip
