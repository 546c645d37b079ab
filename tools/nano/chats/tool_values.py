"""Values for the parameters of tools, and what tools find out: cities, names, times, numbers."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import words as w
from phrasing import capital
from skills import text

Make = Callable[[Random], Any]

# fmt: off
_MORE_CITIES = "Stockholm Helsinki Warsaw Budapest Brussels Ottawa Havana Seoul Beijing Moscow Dallas Austin Seattle Denver Miami Munich Cologne Lyon Nice Turin Naples Seville Valencia Geneva Basel Osaka Kyoto Mumbai Bogota Quito Dakar Accra Lagos Perth Glasgow Bristol Oxford Cork".split()
_LONG_CITIES = ["New York", "San Francisco", "Los Angeles", "Hong Kong", "Buenos Aires", "Cape Town", "Rio de Janeiro", "Mexico City", "Tel Aviv", "São Paulo", "Zürich", "Paris, France", "Boston, MA", "London, UK"]
_CITIES = [*w.CITIES, *w.CAPITALS.values(), *_MORE_CITIES, *_LONG_CITIES]
COUNTRIES = list(w.CAPITALS)
ZONES = ["UTC", "CET", "EST", "PST", "Europe/Paris", "Europe/Berlin", "Europe/London", "Asia/Tokyo", "America/New_York", "Asia/Kolkata", "Australia/Sydney"]
CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "partly cloudy", "light rain", "overcast"]
CURRENCIES = "EUR USD GBP CHF JPY SEK NOK CAD AUD INR CNY PLN".split()
SYMBOLS = "AAPL MSFT GOOG AMZN TSLA NVDA IBM INTC AMD META NFLX ORCL SAP SONY DIS".split()
LANGUAGES = "French German Spanish Italian Dutch Swedish Polish Greek Turkish Japanese Chinese Arabic Hindi Finnish Danish Portuguese".split()
ROOMS = ["kitchen", "bedroom", "living room", "bathroom", "office", "hall", "garage", "garden", "attic", "cellar", "nursery", "dining room"]
TOPPINGS = "cheese mushrooms ham salami olives onions peppers spinach tuna pineapple tomatoes".split()
TASKS = ["buy milk", "call the bank", "water the plants", "clean the kitchen", "write the report", "fix the door", "pay the rent", "walk the dog", "wash the car", "plan the party", "pack the bags", "feed the cat", "read the mail", "book a hotel", "renew the passport"]
EVENTS = ["team meeting", "birthday party", "book club", "spring concert", "chess night", "cooking class", "yoga", "dentist", "lunch with Anna", "board meeting", "dance lesson", "project review", "school play"]
_MESSAGES = ["I will be late.", "See you tomorrow.", "Happy birthday!", "The meeting is at noon.", "Call me back.", "Dinner is ready.", "Thank you for the flowers.", "Where are you?", "I am on my way.", "The report is done.", "Good luck!", "The train is late.", "hello", "see you soon", "all is well", "do not forget the keys"]
SUBJECTS = ["Meeting", "Hello", "Lunch", "Invoice", "Report", "Holiday", "Birthday", "Project update", "Thanks", "News", "Tickets", "Your order", "Question"]
_TOPICS = ["electric cars", "the history of Rome", "black holes", "jazz music", "vegan recipes", "the moon landing", "climate change", "chess openings", "python asyncio", "best hiking boots", "solar panels", "tulips", "ancient Egypt", "coffee", "penguins", "structured concurrency", "football results", "cheap flights", "gardening tips", "language models"]
_SONGS = ["Yesterday", "Imagine", "Blue Moon", "Hey Jude", "Dancing Queen", "Let It Be", "Bohemian Rhapsody", "Moon River", "Summertime", "Hello", "Waterloo", "Thriller"]
DISHES = ["tomato soup", "apple pie", "pancakes", "vegetable curry", "fried rice", "lemon cake", "garlic bread", "potato salad", "chicken stew", "mushroom risotto", "fish tacos", "lasagna"]
RESTAURANTS = ["Luigi's", "The Blue Fox", "Golden Dragon", "Chez Marie", "Sakura", "The Old Mill", "Bella Roma", "Green Leaf", "La Piazza"]
PRODUCTS = ["desk lamp", "office chair", "coffee mug", "water bottle", "backpack", "notebook", "keyboard", "headphones", "tent", "kettle", "toaster", "umbrella", "running shoes", "red scarf", "camera", "phone case"]
_FILMS = ["Casablanca", "Jaws", "Alien", "Amelie", "Titanic", "The Matrix", "Metropolis", "Vertigo", "Up", "Gladiator", "The Godfather", "Spirited Away"]
UNITS = ["km", "miles", "meters", "feet", "kg", "pounds", "grams", "liters", "gallons", "celsius", "fahrenheit", "inches"]
FILES = ["notes.txt", "report.pdf", "data.csv", "main.py", "todo.md", "config.json", "readme.md", "letter.txt", "photo.png", "log.txt"]
FOLDERS = ["/srv/ada", "docs", "src", "/tmp", "/var/log", "photos", "music", "projects/demo"]
_LAST = "Smith Jones Brown Miller Lopez Rossi Silva Novak Weber Martin Tanaka Kim Patel Singh Khan Okafor Hansen Popov Green Hill Lovelace Turing Hopper".split()
# fmt: on


def one_of(options: Sequence[Any]) -> Make:
    return lambda rng: rng.choice(options)


def city(rng: Random) -> str:
    return rng.choice(_CITIES) if rng.random() < 0.85 else capital(text.made_up_word(rng))


def name(rng: Random) -> str:
    first = rng.choice(w.NAMES) if rng.random() < 0.85 else capital(text.made_up_word(rng))
    return first if rng.random() < 0.7 else f"{first} {rng.choice(_LAST)}"


def phrase(rng: Random) -> str:
    size = rng.choices([1, 2, 3, 4, 5], [3, 4, 3, 2, 1])[0]
    return " ".join(rng.choice(w.WORDS) for _ in range(size))


def topic(rng: Random) -> str:
    return rng.choice(_TOPICS) if rng.random() < 0.5 else phrase(rng)


def body(rng: Random) -> str:
    return rng.choice(_MESSAGES) if rng.random() < 0.5 else phrase(rng)


def song(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_SONGS)
    return f"{capital(rng.choice(w.ADJECTIVES))} {capital(rng.choice(w.THINGS))}"


def film(rng: Random) -> str:
    return (
        rng.choice(_FILMS)
        if rng.random() < 0.5
        else f"The {capital(rng.choice(w.ADJECTIVES))} {capital(rng.choice(w.ANIMALS))}"
    )


def number(rng: Random) -> int:
    return rng.randint(0, 10 ** rng.choice([1, 2, 2, 3, 3, 4, 5]))


def small(rng: Random) -> int:
    return rng.randint(1, rng.choice([10, 20, 60]))


def size(rng: Random) -> int | float:
    return rng.randint(1, 200) if rng.random() < 0.8 else rng.randint(1, 99) + rng.choice([0.5, 0.25, 0.1])


def amount(rng: Random) -> int | float:
    return (
        rng.choice([5, 10, 20, 50, 100, 250, 1000, rng.randint(1, 5000)])
        if rng.random() < 0.8
        else round(rng.uniform(1, 500), 2)
    )


def time(rng: Random) -> str:
    if rng.random() < 0.7:
        return f"{rng.randint(0, 23):02}:{rng.choice(['00', '15', '30', '45', '10', '05'])}"
    return f"{rng.randint(1, 12)}{rng.choice([' am', ' pm', 'am', 'pm'])}"


def date(rng: Random) -> str:
    roll = rng.random()
    if roll < 0.5:
        return f"{rng.randint(2023, 2028)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    if roll < 0.75:
        return rng.choice([*w.DAYS, "tomorrow", "today"])
    return f"{rng.choice(w.MONTHS)} {rng.randint(1, 28)}"


def email(rng: Random) -> str:
    name = rng.choice(w.NAMES).lower().replace("é", "e").replace("ë", "e")
    last = rng.choice(["", f".{rng.choice(_LAST).lower()}", str(rng.randint(1, 99))])
    return f"{name}{last}@{rng.choice(['example.com', 'mail.com', 'example.org', 'test.org', 'work.net'])}"


def code(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(['', '-'])}{rng.randint(10, 99999)}"


def order(rng: Random) -> str:
    return str(rng.randint(100, 99999)) if rng.random() < 0.6 else code(rng)


def file(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(FILES)
    stem = text.any_word(rng).lower() + rng.choice(
        ["", "", f"-{rng.randint(1, 99)}", f"_{rng.choice(w.WORDS)}"]
    )
    return f"{stem}.{rng.choice('txt pdf csv md json png jpg py zip log doc html'.split())}"


def host(rng: Random) -> str:
    if rng.random() < 0.2:
        return ".".join(str(rng.randint(1, 254)) for _ in range(4))
    parts = [text.any_word(rng).lower() for _ in range(rng.choice([1, 2, 2]))]
    return ".".join([*parts, rng.choice(["com", "org", "net", "example.com", "example.org", "local"])])


def address(rng: Random) -> str:
    street = rng.choice(
        [text.made_up_word(rng), rng.choice(w.THINGS), rng.choice(_LAST), rng.choice(w.PLACES)]
    )
    return f"{rng.randint(1, 300)} {capital(street)} {rng.choice(['Street', 'Road', 'Lane', 'Avenue', 'Square'])}"


def proper(rng: Random) -> str:
    """Make up a name of several words, such as of a place, a song or a team."""
    words = [rng.choice([text.made_up_word, text.any_word])(rng) for _ in range(rng.choice([1, 2, 2, 3]))]
    return " ".join(map(capital, words))


def numbers(rng: Random) -> list[int]:
    return [rng.randint(0, 99) for _ in range(rng.randint(2, 5))]


def expression(rng: Random) -> str:
    x, y, z = (rng.randint(1, rng.choice([20, 99, 999])) for _ in range(3))
    shape = rng.choice(
        ["{x} + {y}", "{x} * {y}", "{x} - {y}", "({x} + {y}) * {z}", "{x} * {y} + {z}", "{x}*{y}", "{x}+{y}"]
    )
    return shape.format(x=x, y=y, z=z)


def price(rng: Random) -> float:
    return round(rng.uniform(1, 900), 2)


def headline(rng: Random) -> str:
    slots = {"n": rng.choice(w.NAMES), "c": city(rng), "a": rng.choice(w.ADJECTIVES), "x": rng.choice(w.ANIMALS), "t": rng.choice(w.THINGS), "d": rng.choice(w.DAYS), "k": rng.randint(2, 99)}  # fmt: skip
    return rng.choice(["A {a} {x} was seen in {c}.", "The {t} of {c} opens on {d}.", "{n} won {k} games in {c}.", "{k} ways to paint a {t}.", "The {a} {x} is back.", "All about the {a} {t}.",
                       "{c} plans {k} new schools.", "How to find a {a} {t}.", "{n} finds a {t} in {c}."]).format(**slots)  # fmt: skip
