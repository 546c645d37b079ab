"""Stories, poems and jokes, made from parts; long stories walk through the days of a week or the months of a year."""

from random import Random

import attrs
import words as w
from exchange import Chat, Exchange
from phrasing import a, capital, phrase
from skills.text import made_up_word


@attrs.frozen(kw_only=True)
class Cast:
    """Characters and things of a story; the fields fill the slots of its sentences."""

    h: str  # how the hero is called in the story: "Mina" or "the fox"
    intro: str  # how the hero is introduced: "a brave fox called Mina"
    they: str
    their: str
    them: str
    f: str  # the friend
    p: str  # where the hero lives
    q: str  # another place
    t: str  # a thing
    u: str  # another thing
    o: str  # food
    c: str  # a colour
    j: str  # an adjective

    def fill(self, text: str) -> str:
        """Fill the slots of `text`; `{H}` and `{They}` start a sentence."""
        slots = attrs.asdict(self)
        return text.format(
            **slots, H=capital(self.h), They=capital(self.they), Their=capital(self.their), F=capital(self.f)
        )


def _cast(rng: Random, subject: str, name: str | None) -> Cast:
    """Cast a story about `subject`, an animal, person or thing, perhaps with a name."""
    they, their, them = rng.choice(
        _PEOPLE.get(subject, [("she", "her", "her"), ("he", "his", "him"), ("it", "its", "it")])
    )
    described = f"{a(rng.choice(w.ADJECTIVES))} {subject}"
    hero = name or f"the {subject}"
    intro = f"{described} called {name}" if name else described
    friend = f"the {rng.choice([other for other in w.ANIMALS if other != subject])}"
    p, q = rng.sample(w.PLACES, 2)
    t, u = rng.sample([thing for thing in w.THINGS if thing != subject], 2)
    return Cast(
        h=hero,
        intro=intro,
        they=they,
        their=their,
        them=them,
        f=friend,
        p=p,
        q=q,
        t=t,
        u=u,
        o=rng.choice(w.FOODS),
        c=rng.choice(w.COLOURS),
        j=rng.choice(w.ADJECTIVES),
    )


_PEOPLE = {
    "girl": [("she", "her", "her")], "boy": [("he", "his", "him")], "king": [("he", "his", "him")], "queen": [("she", "her", "her")],
    "princess": [("she", "her", "her")], "prince": [("he", "his", "him")], "old woman": [("she", "her", "her")], "old man": [("he", "his", "him")],
    "wizard": [("he", "his", "him")], "pirate": [("she", "her", "her"), ("he", "his", "him")],
}  # fmt: skip
_OPENINGS = ["Once upon a time there was {intro}.", "Once upon a time, in a {p}, there lived {intro}.", "There was once {intro}.", "Long ago, near a {p}, there lived {intro}.",
             "In a quiet {p} there lived {intro}."]  # fmt: skip
_WISHES = [
    "{H} wanted to find the {c} {t} that everybody talked about.", "More than anything, {h} wished to see the {q}.", "One day {h} lost {their} {t} in the {p}.",
    "One morning {h} heard a strange noise behind the {t}.", "{H} had never left the {p}, and {they} wondered what the {q} was like.",
    "One evening {h} found an old map inside the {t}.", "{H} wanted to bake a cake with {o} for {f}.", "One day a letter came, and it said: come to the {q} before night.",
]  # fmt: skip
_EVENTS = [
    "On the way {they} met {f}, who was looking for a {t}.", "{They} walked and walked until {they} came to the {q}.", "Suddenly it began to rain, and {h} hid under a {t}.",
    "{F} said: I will help you, because you are {j}.", "Behind the {t} {they} saw a small {c} light.", "{H} was afraid at first, but then {they} took a deep breath.",
    "{They} asked {f} for help, and together they pushed the {t} away.", "The door was closed, but {f} knew a way around it.", "{H} gave {f} a piece of {o}, and they became friends.",
    "A {c} bird showed {them} the way.", "{They} looked under the {u}, but there was nothing there.", "Then {h} had an idea and ran back to the {p}.",
]  # fmt: skip
_ENDINGS = [
    "In the end {h} found what {they} was looking for, and everybody in the {p} was happy.", "From that day on, {h} and {f} were the best of friends.",
    "{H} went home and told everybody about it. That night {they} slept very well.", "And so {h} learned that it is good to be {j}.",
    "At last {h} came home to the {p}, tired and happy.", "They shared the {o}, laughed, and watched the stars together.",
]  # fmt: skip
_SCENES = [
    ("{h} went to the {q} to look for a {t}.", "{They} searched all day, but {they} only found a {c} {u}."),
    ("{h} met {f} near the {q}.", "They talked about {o} and laughed until the sun went down."),
    ("it rained from morning to evening.", "{H} stayed inside and made a {t} out of old paper."),
    ("{h} helped {f} to carry a heavy {t}.", "{F} was thankful and gave {them} some {o}."),
    ("{h} found a {c} {t} on the path.", "{They} wondered who had lost it, and asked everybody in the {p}."),
    ("a great storm came over the {p}.", "{H} held on to the {t} and was not afraid."),
    ("{h} wanted to learn how to dance.", "{F} showed {them} the steps, and soon they danced around the {u}."),
    ("{h} baked {o} for everybody in the {p}.", "It smelled so good that even {f} came to visit."),
    ("{h} could not sleep.", "{They} looked at the stars and counted them, and the {j} moon smiled down."),
    ("{h} climbed up to the {q}.", "From there {they} could see the whole {p}, small and quiet."),
    ("{h} and {f} built a {t}.", "It was crooked and {c}, but they were proud of it."),
    ("{f} was ill.", "{H} brought some {o} and told a story about a {j} king."),
    ("somebody knocked at the door.", "It was {f}, who had a letter about a hidden {t}."),
    ("{h} got lost on the way to the {q}.", "A {c} bird sang, and {h} followed the song back home."),
    ("{h} planted a small seed beside the {u}.", "{They} gave it water every morning and waited patiently."),
    ("there was a market in the {p}.", "{H} sold a {t} and bought a {c} {u}."),
    ("{h} sailed across the {q} in a small boat.", "The waves were high, but {they} sang all the way."),
    ("{h} sat under a tree and thought about the {t}.", "Then {they} had an idea and ran to tell {f}."),
    ("{h} cleaned the whole house.", "Under the bed {they} found the old {u} that {they} had lost long ago."),
    ("{f} told {h} a secret.", "There was a {c} door in the {q}, and nobody knew where it led."),
    ("{h} opened the {c} door.", "Behind it there was a garden full of {j} flowers."),
    ("it snowed, and everything was white.", "{H} and {f} made a snowman with a {t} for a hat."),
    ("{h} wrote a long letter to {f}.", "{They} wrote about the {q}, about the {t}, and about the good {o}."),
    ("{h} was a little sad.", "But then {f} came with some {o}, and soon they both laughed again."),
]  # fmt: skip


def short_story(rng: Random, subject: str, name: str | None) -> str:
    """Write a story of four to seven sentences."""
    cast = _cast(rng, subject, name)
    parts = [
        rng.choice(_OPENINGS),
        rng.choice(_WISHES),
        *rng.sample(_EVENTS, rng.randint(1, 4)),
        rng.choice(_ENDINGS),
    ]
    return " ".join(map(cast.fill, parts))


def long_story(rng: Random, subject: str, name: str | None, times: list[str]) -> str:
    """Write a story with one paragraph of scenes for each of `times` ("On Monday", ...)."""
    cast = _cast(rng, subject, name)
    scenes = rng.sample(_SCENES, len(times))
    friend = cast.f
    paragraphs = [cast.fill(f"{rng.choice(_OPENINGS)} {rng.choice(_WISHES)}")]
    for time, (first, second) in zip(times, scenes, strict=True):
        fresh = _cast(rng, subject, name)
        now = attrs.evolve(
            cast,
            f=friend if rng.random() < 0.6 else fresh.f,
            q=fresh.q,
            t=fresh.t,
            u=fresh.u,
            o=fresh.o,
            c=fresh.c,
            j=fresh.j,
        )
        extra = f" {rng.choice(_EVENTS)}" if rng.random() < 0.4 else ""
        paragraphs.append(now.fill(f"{time} {first} {second}{extra}"))
    paragraphs.append(cast.fill(f"{rng.choice(_ENDINGS)} The end."))
    return "\n\n".join(paragraphs)


WEEK = [f"On {day}" for day in w.DAYS]
YEAR = [f"In {month}" for month in w.MONTHS]


def _hero(rng: Random) -> tuple[str, str | None]:
    subject = rng.choice([*w.ANIMALS, *w.THINGS, *list(_PEOPLE) * 3])
    return subject, rng.choice(w.NAMES) if rng.random() < 0.4 else None


def story(rng: Random, chat: Chat) -> Exchange:
    """Write a short story, about anything or about the topic that the user asks for."""
    about = rng.random() < 0.65
    subject, name = _hero(rng)
    if not about:
        ask = phrase(rng, ["tell me a story", "tell me a short story", "tell a story", "i want to hear a story", "write a story", "write a short story", "make up a story",
                           "a story", "do you know a story", "tell me a bedtime story", "story time", "read me a story", "another story"], command=True)  # fmt: skip
        return Exchange(
            ask=ask, answer=short_story(rng, subject, name), another=lambda r: short_story(r, *_hero(r))
        )
    slots = {"s": a(subject), "n": name, "b": subject}
    asks = ["tell me a story about {s}", "tell me a short story about {s}", "write a story about {s}", "a story about {s}", "make up a story about {s}", "i want a story about {s}",
            "do you know a story about {s}", "tell a story about a {b}", "write a short story about {s}", "tell a story with {s}"]  # fmt: skip
    if name:
        asks = [
            "tell me a story about {s} called {n}",
            "tell me a story about {s} named {n}",
            "write a story about {s} called {n}",
            "a story about {n} the {b}",
            "tell me a story about {n} the {b}",
        ]
    ask = phrase(rng, asks, slots, command=True)
    return Exchange(
        ask=ask, answer=short_story(rng, subject, name), another=lambda r: short_story(r, subject, name)
    )


def named_story(rng: Random, chat: Chat) -> Exchange:
    """Write a short story about a person of whom only the name is given."""
    name = rng.choice(w.NAMES) if rng.random() < 0.7 else capital(made_up_word(rng))
    subject = rng.choice([*w.ANIMALS, *_PEOPLE])
    ask = phrase(
        rng,
        [
            "tell me a story about {n}",
            "write a story about {n}",
            "tell a story about {n}",
            "a story about {n}",
            "tell me a short story about {n}",
        ],
        {"n": name},
        command=True,
    )
    return Exchange(
        ask=ask, answer=short_story(rng, subject, name), another=lambda r: short_story(r, subject, name)
    )


def story_at_length(rng: Random, chat: Chat) -> Exchange:
    """Write a long story, over a week, or a very long one, over a year."""
    subject, name = _hero(rng)
    very = rng.random() < 0.3
    times = YEAR if very else WEEK
    kinds = (
        ["very long", "really long", "extremely long", "very, very long"]
        if very
        else ["long", "long", "longer", "quite long"]
    )
    slots = {"k": rng.choice(kinds), "s": a(subject)}
    asks = [
        "tell me a {k} story",
        "tell a {k} story",
        "write a {k} story",
        "i want to hear a {k} story",
        "make up a {k} story",
        "a {k} story",
    ]
    if about := rng.random() < 0.5:
        asks = [
            "tell me a {k} story about {s}",
            "write a {k} story about {s}",
            "a {k} story about {s}",
            "tell a {k} story about {s}",
        ]
    if not about and very:
        asks += [
            "tell me the longest story you know",
            "tell me a story that never ends",
            "write a story of a thousand words",
        ]
    ask = phrase(rng, asks, slots, command=True)
    return Exchange(
        ask=ask,
        answer=long_story(rng, subject, name, times),
        another=lambda r: long_story(r, *_hero(r), times),
    )


_JOKES = """\
Why did the cat sit on the computer? To keep an eye on the mouse.|What do you call a bear with no teeth? A gummy bear.|Why do bees hum? Because they forgot the words.
What is brown and sticky? A stick.|Why did the book go to the doctor? It had a bad spine.|What has hands but cannot clap? A clock.|Why was the broom late? It overslept... it swept in.
What do you get when you cross a snowman and a dog? Frostbite.|Why did the banana go to the doctor? It was not peeling well.|What kind of tree fits in your hand? A palm tree.
Why did the scheduler go to therapy? It had too many blocks.|Why did the token cross the stream? To get to the other side.|How do llamas say goodbye? Alpaca my bags.
Why did the spider go online? To visit its web site.|What did the zero say to the eight? Nice belt.|Why was six afraid of seven? Because seven ate nine.""".replace(
    "\n", "|"
).split("|")


def joke(rng: Random, chat: Chat) -> Exchange:
    """Write a joke."""
    ask = phrase(
        rng,
        [
            "tell me a joke",
            "do you know a joke",
            "make me laugh",
            "a joke",
            "tell a joke",
            "say something funny",
            "know any jokes",
            "joke",
        ],
        command=rng.random() < 0.5,
    )
    return Exchange(ask=ask, answer=rng.choice(_JOKES), another=lambda r: r.choice(_JOKES))


def _triolet(rng: Random) -> str:
    """Write a poem in the form of a triolet: A B a A a b A B."""
    c, t = (
        rng.choice(["silver", "quiet", "golden", "sleepy", "gentle"]),
        rng.choice(["moon", "star", "lamp", "cloud", "bird"]),
    )
    first, second = f"The {c} {t} is shining bright,", "And all the little fields lie still."
    return "\n".join([first, second, "It sends the village down below its light.", first, rng.choice(["The owl calls softly to the night,", "A fox runs home and out of sight,"]),
                      rng.choice(["A small wind wanders round the hill.", "The water sings beside the mill."]), first, second])  # fmt: skip


_COUPLETS = ["The sun comes up, the birds all sing,\nThe bells of all the villages ring.", "A little mouse in a little house\nOnce met another little mouse.",
             "The rain falls softly on the tree,\nThe river runs down to the sea.", "A cat sat sleeping on a chair\nAnd dreamed of fish and a friendly bear.",
             "The moon looks in at every door\nAnd paints her silver on the floor.", "I had a boat, I had a kite,\nI flew it all day and all night.",
             "The snow lies white upon the hill,\nThe wind is soft, the world is still.", "A frog jumped over a garden wall\nAnd did not look behind at all."]  # fmt: skip


def _poem(rng: Random) -> str:
    return "\n".join(rng.sample(_COUPLETS, 2))


def poem(rng: Random, chat: Chat) -> Exchange:
    """Write a short poem, or a triolet."""
    if rng.random() < 0.3:
        ask = phrase(
            rng,
            [
                "write a triolet",
                "write me a triolet",
                "recite a triolet",
                "tell me a triolet",
                "make a triolet poem",
            ],
            command=True,
        )
        return Exchange(ask=ask, answer=_triolet(rng), another=_triolet, plain=True)
    ask = phrase(
        rng,
        [
            "write a poem",
            "tell me a poem",
            "write me a poem",
            "a poem",
            "recite a poem",
            "make a poem",
            "say a poem",
            "sing a song",
            "sing me a song",
        ],
        command=True,
    )
    return Exchange(ask=ask, answer=_poem(rng), another=_poem, plain=True)
