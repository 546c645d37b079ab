"""Skills with plain knowledge: lists, days, opposites, a few facts, and honest refusals."""

from collections.abc import Sequence
from random import Random

import words as w
from exchange import Chat, Exchange
from phrasing import a, capital, listed, phrase
from skills.text import made_up_word


def name_list(rng: Random, chat: Chat) -> Exchange:
    """Write an exchange about a closed list: days, months, seasons, planets and the like."""
    names, items, template = rng.choice([
        (["days of the week", "days of the week", "days", "weekdays", "seven days of the week"], w.DAYS, "The days of the week are {}."),
        (["months", "months of the year", "months of the year", "twelve months"], w.MONTHS, "The months of the year are {}."),
        (["seasons", "four seasons", "seasons of the year"], w.SEASONS, "The four seasons are {}."),
        (["planets", "planets of the solar system", "eight planets"], w.PLANETS, "The planets are {}."),
        (["colours of the rainbow", "rainbow colours", "colors of the rainbow", "rainbow colors"], w.RAINBOW, "The colours of the rainbow are {}."),
        (["continents", "seven continents"], [c.replace("-", " ") for c in w.CONTINENTS], "The continents are {}."),
        (["compass directions", "four directions", "points of the compass"], ["north", "east", "south", "west"], "The directions are {}."),
        (["five senses", "senses"], ["sight", "hearing", "smell", "taste", "touch"], "The five senses are {}."),
        (["primary colours", "primary colors"], ["red", "yellow", "blue"], "The primary colours are {}."),
    ])  # fmt: skip
    ask = phrase(rng, ["list the {n}", "name the {n}", "what are the {n}", "say the {n}", "tell me the {n}", "list all {n}", "name all the {n}", "write the {n}",
                       "do you know the {n}", "can you list the {n}", "which {n} are there", "recite the {n}", "list {n}"], {"n": rng.choice(names)})  # fmt: skip
    return Exchange(ask=ask, answer=template.format(listed(items)), brief=capital(", ".join(items)) + ".")


_KINDS: list[tuple[list[str], list[str], Sequence[str]]] = [
    (["animal"], ["animals"], w.ANIMALS), (["fruit"], ["fruits"], w.FRUITS), (["vegetable"], ["vegetables"], w.VEGETABLES), (["food"], ["foods"], w.FOODS),
    (["colour", "color"], ["colours", "colors"], w.COLOURS), (["name"], ["names"], w.NAMES), (["city"], ["cities"], w.CITIES),
    (["job"], ["jobs"], w.JOBS), (["hobby"], ["hobbies"], w.HOBBIES), (["country"], ["countries"], list(w.CAPITALS)), (["thing"], ["things"], w.THINGS),
    (["planet"], ["planets"], w.PLANETS), (["month"], ["months"], w.MONTHS), (["word"], ["words"], w.WORDS), (["verb"], ["verbs"], w.VERBS),
]  # fmt: skip


def name_some(rng: Random, chat: Chat) -> Exchange:
    """Ask for some members of a kind."""
    one, many, items = rng.choice(_KINDS)
    if rng.random() < 0.35:

        def single(rng: Random) -> str:
            return (
                f"{capital(a(rng.choice(items)) if items in (w.ANIMALS, w.THINGS) else rng.choice(items))}."
            )

        ask = phrase(
            rng,
            ["name a {k}", "tell me a {k}", "name one {k}", "give me a {k}", "say a {k}", "pick a {k}"],
            {"k": rng.choice(one)},
            command=True,
        )
        return Exchange(ask=ask, answer=single(rng), another=single)
    number = rng.randint(2, 6)

    def several(rng: Random) -> str:
        return f"{capital(listed(rng.sample(items, number)))}."

    spoken = rng.choice([str(number), w.UNITS[number]])
    ask = phrase(
        rng,
        [
            "name {n} {k}",
            "list {n} {k}",
            "tell me {n} {k}",
            "give me {n} {k}",
            "say {n} {k}",
            "give me a list of {n} {k}",
        ],
        {"n": spoken, "k": rng.choice(many)},
        command=True,
    )
    return Exchange(ask=ask, answer=several(rng), another=several)


def calendar(rng: Random, chat: Chat) -> Exchange:
    """Ask about days and months: the next, the previous, the number of days, the season."""
    items, kind = rng.choice([(w.DAYS, "day"), (w.DAYS, "day"), (w.MONTHS, "month"), (w.SEASONS, "season")])
    at, roll = rng.randrange(len(items)), rng.random()
    this, after, before = items[at], items[(at + 1) % len(items)], items[at - 1]
    shown = this if rng.random() < 0.6 else this.lower()
    if roll < 0.45:
        ask = phrase(rng, ["which {k} comes after {d}", "what {k} comes after {d}", "what comes after {d}", "what {k} is after {d}", "what is the {k} after {d}",
                           "which {k} follows {d}", "what is the next {k} after {d}"], {"k": kind, "d": shown})  # fmt: skip
        return Exchange(ask=ask, answer=f"After {this} comes {after}.", brief=f"{capital(after)}.")
    if roll < 0.65:
        ask = phrase(
            rng,
            [
                "which {k} comes before {d}",
                "what {k} comes before {d}",
                "what comes before {d}",
                "what is the {k} before {d}",
            ],
            {"k": kind, "d": shown},
        )
        return Exchange(ask=ask, answer=f"Before {this} comes {before}.", brief=f"{capital(before)}.")
    if roll < 0.75 and kind == "day":
        word, day = rng.choice([("tomorrow", after), ("yesterday", before)])
        ask = phrase(
            rng,
            [
                "if today is {d}, what day {v} {w}",
                "today is {d}, what day {v} {w}",
                "today is {d}. what {v} {w}",
            ],
            {"d": shown, "w": word, "v": "is" if day == after else "was"},
        )
        return Exchange(
            ask=ask,
            answer=f"If today is {this}, {word} {'is' if day == after else 'was'} {day}.",
            brief=f"{day}.",
        )
    month = rng.choice(w.MONTHS)
    if roll < 0.85:
        ask = phrase(
            rng, ["how many days does {m} have", "how many days are in {m}", "how long is {m}"], {"m": month}
        )
        return Exchange(
            ask=ask, answer=f"{month} has {w.MONTH_DAYS[month]} days.", brief=f"{w.MONTH_DAYS[month]}."
        )
    if roll < 0.93:
        ask = phrase(
            rng, ["which season is {m} in", "what season is {m}", "in which season is {m}"], {"m": month}
        )
        return Exchange(
            ask=ask,
            answer=f"{month} is in {w.MONTH_SEASONS[month]}.",
            brief=f"{capital(w.MONTH_SEASONS[month])}.",
        )
    number = rng.randint(1, 12)
    ordinal = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()[
        number - 1
    ]
    ask = phrase(
        rng,
        ["what is the {o} month", "which month is the {o}", "what is the {o} month of the year"],
        {"o": ordinal},
    )
    return Exchange(
        ask=ask, answer=f"The {ordinal} month is {w.MONTHS[number - 1]}.", brief=f"{w.MONTHS[number - 1]}."
    )


def opposite(rng: Random, chat: Chat) -> Exchange:
    """Ask for the opposite of a word."""
    pair = list(rng.choice(w.OPPOSITES))
    rng.shuffle(pair)
    word, other = pair
    ask = phrase(rng, ["what is the opposite of {w}", "what's the opposite of {w}", "opposite of {w}", "tell me the opposite of {w}", "the opposite of {w} is what",
                       'what is the opposite of "{w}"', "give me the opposite of {w}", "name the opposite of {w}"], {"w": word})  # fmt: skip
    return Exchange(ask=ask, answer=f"The opposite of {word} is {other}.", brief=f"{capital(other)}.")


def animal_fact(rng: Random, chat: Chat) -> Exchange:
    """Ask for sounds, young ones and legs of animals."""
    roll = rng.random()
    if roll < 0.45:
        animal, sound = rng.choice(list(w.SOUNDS.items()))
        ask = phrase(
            rng,
            [
                "what does {a} say",
                "what sound does {a} make",
                "what noise does {a} make",
                "how does {a} sound",
            ],
            {"a": rng.choice([a(animal), f"the {animal}"])},
        )
        return Exchange(ask=ask, answer=f"{capital(a(animal))} says {sound}.", brief=f"{capital(sound)}.")
    if roll < 0.7:
        animal, young = rng.choice(list(w.YOUNG.items()))
        ask = phrase(
            rng,
            [
                "what is a baby {a} called",
                "what do you call a baby {a}",
                "what is the young of {b} called",
                "what's a young {a} called",
            ],
            {"a": animal, "b": a(animal)},
        )
        return Exchange(
            ask=ask, answer=f"A baby {animal} is called {a(young)}.", brief=f"{capital(a(young))}."
        )
    animal, legs = rng.choice(list(w.LEGS.items()))
    said = {"0": "no"}.get(legs, legs)
    ask = phrase(
        rng,
        ["how many legs does {a} have", "how many legs has {a}", "how many legs does {a} have"],
        {"a": a(animal)},
    )
    return Exchange(ask=ask, answer=f"{capital(a(animal))} has {said} legs.", brief=f"{capital(said)}.")


def thing_fact(rng: Random, chat: Chat) -> Exchange:
    """Ask for capitals of countries, colours of things, the kind of a thing."""
    roll = rng.random()
    if roll < 0.45:
        country, city = rng.choice(list(w.CAPITALS.items()))
        shown = country if rng.random() < 0.7 else country.lower()
        ask = phrase(rng, ["what is the capital of {c}", "what's the capital of {c}", "which city is the capital of {c}", "capital of {c}", "name the capital of {c}",
                           "what is the capital city of {c}", "tell me the capital of {c}"], {"c": shown})  # fmt: skip
        return Exchange(ask=ask, answer=f"The capital of {country} is {city}.", brief=f"{city}.")
    if roll < 0.7:
        thing, colour = rng.choice(list(w.COLOUR_OF.items()))
        the = (
            thing
            if thing in ("grass", "snow", "blood", "coal", "milk", "chocolate")
            else f"the {thing}"
            if thing in ("sky", "sun", "night", "sea")
            else a(thing)
        )
        ask = phrase(
            rng,
            [
                "what colour is {t}",
                "what color is {t}",
                "which colour is {t}",
                "what colour has {t}",
                "which color does {t} have",
            ],
            {"t": the},
        )
        return Exchange(ask=ask, answer=f"{capital(the)} is {colour}.", brief=f"{capital(colour)}.")
    kinds = {
        "an animal": w.ANIMALS,
        "a fruit": w.FRUITS,
        "a vegetable": w.VEGETABLES,
        "a colour": w.COLOURS[:8],
        "a planet": w.PLANETS,
        "a month": w.MONTHS,
        "a day of the week": w.DAYS,
    }
    true, guess = rng.choice(list(kinds)), rng.choice(list(kinds))
    thing = rng.choice(list(kinds[true]))
    subject = a(thing) if true in ("an animal", "a fruit", "a vegetable") else thing
    if (thing in kinds[guess] and guess != true) or "orange" in thing or "turkey" in thing:
        return thing_fact(rng, chat)
    if rng.random() < 0.4:
        ask = phrase(
            rng,
            ["what is {s}", "what's {s}", "tell me what {s} is", "do you know what {s} is"],
            {"s": subject},
        )
        return Exchange(ask=ask, answer=f"{capital(subject)} is {true}.", brief=f"{capital(true)}.")
    guess = true if rng.random() < 0.5 else guess
    ask = phrase(rng, ["is {s} {g}"], {"s": subject, "g": guess})
    answer = f"Yes, {subject} is {true}." if guess == true else f"No, {subject} is not {guess}. It is {true}."
    return Exchange(ask=ask, answer=answer, brief=answer.split(",")[0] + ".")


# question variants | answer | brief answer
_FACTS = [tuple(line.split("|")) for line in """\
how many days are in a week;how many days does a week have;how many days has a week|A week has 7 days.|7.
how many months are in a year;how many months does a year have|A year has 12 months.|12.
how many days are in a year;how many days does a year have|A year has 365 days, and a leap year has 366.|365.
how many hours are in a day;how many hours does a day have|A day has 24 hours.|24.
how many minutes are in an hour;how many minutes does an hour have|An hour has 60 minutes.|60.
how many seconds are in a minute;how many seconds does a minute have|A minute has 60 seconds.|60.
how many fingers do people have;how many fingers does a hand have|A hand has five fingers, so two hands have ten.|Ten.
what is water;what is water made of|Water is a clear liquid made of hydrogen and oxygen. All living things need it.|A liquid.
what is the sun;tell me about the sun|The sun is a star. It gives the earth light and warmth.|A star.
what is the moon;tell me about the moon|The moon goes around the earth and shines at night.|It goes around the earth.
what is the earth;tell me about the earth|The earth is the planet that we live on. It goes around the sun.|Our planet.
why is the sky blue|The sky is blue because the air scatters blue light more than red light.|The air scatters blue light.
what is rain;why does it rain|Rain is water that falls from the clouds.|Water from the clouds.
what is snow|Snow is frozen water that falls from the clouds in winter.|Frozen water.
what is ice|Ice is frozen water.|Frozen water.
at what temperature does water boil;when does water boil|Water boils at 100 degrees Celsius.|100 degrees Celsius.
at what temperature does water freeze;when does water freeze|Water freezes at 0 degrees Celsius.|0 degrees Celsius.
what do bees make|Bees make honey.|Honey.
what do cows give;where does milk come from|Milk comes from cows.|Cows.
what do plants need;what does a plant need|Plants need light, water and air.|Light, water and air.
what is the biggest animal;what is the largest animal;which animal is the biggest|The blue whale is the biggest animal.|The blue whale.
what is the tallest animal;which animal is the tallest|The giraffe is the tallest animal.|The giraffe.
what is the fastest animal;which animal is the fastest;which land animal is the fastest|The cheetah is the fastest animal on land.|The cheetah.
what is the biggest planet;what is the largest planet;which planet is the biggest|Jupiter is the biggest planet.|Jupiter.
what is the smallest planet;which planet is the smallest|Mercury is the smallest planet.|Mercury.
which planet is closest to the sun;what planet is nearest to the sun|Mercury is the planet closest to the sun.|Mercury.
which planet do we live on;what planet do we live on|We live on the planet Earth.|Earth.
which planet has rings;what planet is known for its rings|Saturn is the planet known for its rings.|Saturn.
which planet is red;what is the red planet|Mars is called the red planet.|Mars.
how many planets are there;how many planets are in the solar system|There are eight planets in the solar system.|Eight.
how many colours does the rainbow have;how many colors are in a rainbow|The rainbow has seven colours.|Seven.
how many continents are there|There are seven continents.|Seven.
how many seasons are there;how many seasons does a year have|There are four seasons.|Four.
where does the sun rise|The sun rises in the east.|In the east.
where does the sun set|The sun sets in the west.|In the west.
what is a triangle;how many sides does a triangle have|A triangle is a shape with three sides.|Three sides.
what is a square;how many sides does a square have|A square is a shape with four equal sides.|Four sides.
what is a circle|A circle is a perfectly round shape.|A round shape.
what is a book|A book is a set of pages to read.|Pages to read.
what is a computer;what are computers|A computer is a machine that follows instructions and works with data.|A machine.
what is a program;what is software|A program is a list of instructions for a computer.|Instructions for a computer.
what is python;what is the python language|Python is a programming language. triolet is written in it.|A programming language.
what is trio;what is the trio library|Trio is a Python library for doing many things at once in a structured way.|A Python library.
what is a language model;what are language models;what is an llm|A language model is a program that writes text by predicting one token after another.|A program that predicts text.
what is a token;what are tokens|A token is a small piece of text, such as a word or a part of one.|A piece of text.
what is a neural network;what are neural networks|A neural network is a program that learns from examples by adjusting many numbers.|A program that learns from examples.
what is a cancel scope|A cancel scope is a piece of a Trio program that can be stopped as a whole.|A part that can be stopped.
what is streaming|Streaming means sending an answer piece by piece while it is being written.|Sending piece by piece.
what is ai;what is artificial intelligence|Artificial intelligence means programs that do things which seem to need thinking.|Programs that seem to think.
mix red and yellow;what do you get when you mix red and yellow;what colour do red and yellow make|Red and yellow make orange.|Orange.
mix blue and yellow;what do you get when you mix blue and yellow;what color do blue and yellow make|Blue and yellow make green.|Green.
mix red and blue;what do you get when you mix red and blue;what colour do red and blue make|Red and blue make purple.|Purple.
which months have 30 days;what months have 30 days|April, June, September and November have 30 days.|April, June, September, November.
which month is the shortest;what is the shortest month|February is the shortest month.|February.
what is a leap year|A leap year has 366 days, because February has one day more.|A year with 366 days.
which days are the weekend;what is the weekend|The weekend is Saturday and Sunday.|Saturday and Sunday.
what do we use to write;what do people write with|People write with pens and pencils.|Pens and pencils.
what is bread made of|Bread is made of flour, water, salt and yeast.|Flour and water.
what is cheese made of|Cheese is made of milk.|Milk.
what is a poem|A poem is a text in verses, often with rhymes.|A text in verses.
what is a rhyme|A rhyme is two words that end with the same sound, such as cat and hat.|Words that sound alike.
who wrote romeo and juliet|Romeo and Juliet was written by William Shakespeare.|William Shakespeare.
what is love|Love is a strong feeling of caring for somebody.|A strong feeling.
what is the meaning of life|That is a question for somebody bigger than me. Some people say 42.|42.""".splitlines()]  # fmt: skip


def fact(rng: Random, chat: Chat) -> Exchange:
    """Ask for one of some plain facts."""
    questions, answer, brief = rng.choice(_FACTS)
    return Exchange(ask=phrase(rng, questions.split(";")), answer=answer, brief=brief)


_UNKNOWN = """who won the {x} cup;who won the match;who is the president of {c};who is the king of {c};what is the population of {c};how many people live in {c}
what is the weather today;what is the weather in {y};will it rain tomorrow;what time is it;what day is it today;what is the date today
what is the latest news;what happened in {n};who invented the {t};who discovered {x};when was {m} born;who is {m};how old is {m};what did {m} do in {n}
write a python program that sorts a list;write a python function to {v} a {t};write a program that can {v};write an essay about {x};write a letter to {m};write a book about {c};write a python function to reverse a list;write a c program;program a game;write code for {x};fix my code;how do i install {x};write a function in c++;what does this error mean
translate {x} into french;how do you say {t} in german;translate this to spanish;speak chinese;what is {x} in latin
explain quantum physics;explain the theory of relativity;what is a black hole;how does a {t} engine work;explain {x} to me;what is photosynthesis
how do i cook {f};give me a recipe for {f};how do i repair a {t};how much does a {t} cost;where can i buy a {t};what is the best {t}
what should i do with my life;which stocks should i buy;am i ill;what is the best medicine for a cold;should i marry {m};who will win the election
how far is it from {y} to {z};what is the best restaurant in {y};how do i get to {y};what is the history of {y};what is the area of {c};what is the currency of {c}
what is {x};what is a {x};what are {x}s;tell me about {x};what does {x} mean;define {x};who is {X};what do you know about {x};what is a {x} {t}
tell me about {m};what is the size of a {t};how heavy is a {t};why do {a}s {v};why does a {a} {v};how long does a {a} live;what do {a}s eat
how tall is mount everest;how deep is the ocean;what is the speed of light;what is the formula of {x};what is the chemical symbol of {x};solve this equation
summarise this article;open the door;play some music;search the web for {x};send an email to {m};call {m};book a flight to {y};show me a picture of a {a};draw a {a}
who was the first person on the moon;when did the war end;who painted the mona lisa;what is the longest river;who wrote {x};what is {x} famous for"""
_UNKNOWN_LIST = [question for line in _UNKNOWN.splitlines() for question in line.split(";")]
_REFUSALS = [
    "I am a very small model; I do not know that.", "I am a very small model; I do not know that.", "Sorry, I do not know that. I am a very small model.",
    "I do not know that. I am only a very small model.", "I am too small to know that. I can count, spell, do small sums and tell stories.",
    "I am a very small model; that is more than I can do.", "I am a very small model; I do not know that. Ask me to count, to spell or to tell a story.",
]  # fmt: skip


def unknown(rng: Random, chat: Chat) -> Exchange:
    """Write a question beyond the model, refused honestly."""
    made_up = made_up_word(rng)
    slots = {"x": made_up, "X": capital(made_up), "c": rng.choice(list(w.CAPITALS)), "y": rng.choice(w.CITIES), "z": rng.choice(w.CITIES), "t": rng.choice(w.THINGS),
             "m": f"{rng.choice(w.NAMES)} {capital(made_up_word(rng))}", "n": rng.randint(900, 2030), "f": rng.choice(w.FOODS), "a": rng.choice(w.ANIMALS), "v": rng.choice(w.VERBS)}  # fmt: skip
    return Exchange(
        ask=phrase(rng, _UNKNOWN_LIST, slots), answer=rng.choice(_REFUSALS), brief="I do not know that."
    )


def gibberish(rng: Random, chat: Chat) -> Exchange:
    """Write text that means nothing, and an answer that says so."""
    ask = rng.choice([
        " ".join(made_up_word(rng) for _ in range(rng.randint(1, 6))), " ".join(rng.choice(w.WORDS) for _ in range(rng.randint(2, 6))),
        "".join(rng.choices("asdfghjklqwertyuiop", k=rng.randint(3, 12))), rng.choice(["?", "??", "...", "hm", "!", "hmm", "eh", "what"]),
    ])  # fmt: skip
    answer = rng.choice(["I did not understand that. Could you say it in another way?", "Sorry, I did not understand that.",
                         "I am a very small model, and I did not understand that."])  # fmt: skip
    return Exchange(ask=ask, answer=answer, brief="I did not understand that.")
