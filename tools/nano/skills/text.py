"""Skills with letters and text: spelling, repeating, capital letters, rhymes."""

from random import Random

from exchange import Chat, Exchange
from phrasing import a, capital, listed, phrase
from words import ALPHABET, CITIES, NAMES, RHYMES, WORDS

_ONSETS = "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sp st str t th tr v w wh y z".split()
_VOWELS = "a e i o u ai ea ee oa oo ou y ie au".split()
_ENDS = " b ck d g l ll m n nd ng nt p r rd rt s sh ss st t tch th x".split(" ")
_SYMBOLS = "é ü ö ä ñ ç å ø ß π √ € £ ° 😀 🎉 🌍 🐱 🚀 ❤ 日 本 語 你 好 世 界 Привет мир שלום ا ب Ω ≤ → … “ ” ’ –".split()


def made_up_word(rng: Random) -> str:
    """Make up a word that sounds English and mostly means nothing."""
    syllables = rng.choice([1, 1, 2, 2, 2, 3])
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(syllables))


def any_word(rng: Random) -> str:
    """Choose a word to spell: known, a name, made up, or plain letters."""
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(WORDS).replace("-", "")
    if roll < 0.62:
        return rng.choice(NAMES + CITIES).replace("-", "")
    if roll < 0.92:
        return made_up_word(rng)
    return "".join(rng.choices(ALPHABET, k=rng.randint(2, 9)))


def spelled(word: str) -> str:
    """Spell `word`: "c-a-t"."""
    return "-".join(word.lower())


def _shown(rng: Random, word: str) -> str:
    roll = rng.random()
    if roll < 0.1:
        return f'"{word}"'
    if roll < 0.2:
        return capital(word)
    return word.upper() if roll < 0.25 else word


def spell(rng: Random, chat: Chat) -> Exchange:
    """Spell a word letter by letter."""
    word = any_word(rng)
    templates = ["spell {w}", "spell {w}", "and spell {w}", "now spell {w}", "spell: {w}", "spell the word {w}", "how do you spell {w}", "how is {w} spelled", "how do i spell {w}",
                 "spell {w} letter by letter", "spell out {w}", "what are the letters of {w}", "what letters are in {w}", "what is the spelling of {w}"]  # fmt: skip
    ask = phrase(rng, templates, {"w": _shown(rng, word)}, command=rng.random() < 0.5)
    return Exchange(ask=ask, answer=f"{spelled(word)}.", plain=True)


def count_letters(rng: Random, chat: Chat) -> Exchange:
    """Ask for the number of letters of a word; the model spells it first."""
    word = any_word(rng)[:10]
    ask = phrase(rng, ["how many letters are in {w}", "how many letters are in the word {w}", "how many letters does {w} have",
                       "count the letters in {w}", "how long is the word {w}"], {"w": _shown(rng, word)})  # fmt: skip
    return Exchange(
        ask=ask, answer=f"{spelled(word)}: that is {len(word)} letter{'s' * (len(word) > 1)}.", plain=True
    )


def backwards(rng: Random, chat: Chat) -> Exchange:
    """Ask for a word spelled backwards; the model spells it forwards first."""
    word = any_word(rng)[:7]
    ask = phrase(rng, ["spell {w} backwards", "spell the word {w} backwards", "what is {w} backwards", "say {w} backwards", "reverse the word {w}",
                       "write {w} backwards"], {"w": _shown(rng, word)})  # fmt: skip
    return Exchange(ask=ask, answer=f"{spelled(word)} backwards is {spelled(word[::-1])}.", plain=True)


def letter_of(rng: Random, chat: Chat) -> Exchange:
    """Ask for first and last letters of words, neighbours in the alphabet, capital letters."""
    roll = rng.random()
    if roll < 0.35:
        word, first = any_word(rng), rng.random() < 0.6
        kind, letter = ("first", word[0]) if first else ("last", word[-1])
        ask = phrase(rng, ["what is the {k} letter of {w}", "which letter is the {k} in {w}", "what letter does {w} {v} with", "{k} letter of {w}"],
                     {"k": kind, "w": _shown(rng, word), "v": "start" if first else "end"})  # fmt: skip
        return Exchange(
            ask=ask,
            answer=f"The {kind} letter of {word.lower()} is {letter.lower()}.",
            brief=f"{letter.upper()}.",
        )
    at = rng.randrange(25)
    if roll < 0.55:
        ask = phrase(
            rng,
            [
                "which letter comes after {l}",
                "what letter comes after {l}",
                "what comes after the letter {l}",
                "what is the letter after {l}",
            ],
            {"l": ALPHABET[at]},
        )
        return Exchange(
            ask=ask,
            answer=f"After {ALPHABET[at]} comes {ALPHABET[at + 1]}.",
            brief=f"{ALPHABET[at + 1].upper()}.",
        )
    if roll < 0.7:
        ask = phrase(
            rng,
            [
                "which letter comes before {l}",
                "what letter comes before {l}",
                "what is the letter before {l}",
            ],
            {"l": ALPHABET[at + 1]},
        )
        return Exchange(
            ask=ask,
            answer=f"Before {ALPHABET[at + 1]} comes {ALPHABET[at]}.",
            brief=f"{ALPHABET[at].upper()}.",
        )
    ask = phrase(rng, ["what is the capital letter of {l}", "write {l} as a capital letter", "what is {l} in upper case", "what is the capital {l}",
                       "capital letter {l}", "write the letter {l} as a capital"], {"l": ALPHABET[at]})  # fmt: skip
    return Exchange(
        ask=ask,
        answer=f"The capital letter of {ALPHABET[at]} is {ALPHABET[at].upper()}.",
        brief=f"{ALPHABET[at].upper()}.",
    )


def upper_case(rng: Random, chat: Chat) -> Exchange:
    """Ask for a word or a few in capital letters."""
    text = " ".join(any_word(rng) for _ in range(rng.choice([1, 1, 1, 2, 3]))).lower()
    ask = phrase(rng, ["write {w} in capital letters", "write {w} in capitals", "write {w} in upper case", "put {w} in capital letters",
                       "{w} in capital letters", "turn {w} into capital letters", "make {w} upper case"], {"w": text})  # fmt: skip
    return Exchange(ask=ask, answer=f"{text.upper()}", plain=True)


def alphabet(rng: Random, chat: Chat) -> Exchange:
    """Ask for the alphabet, its capitals, its vowels."""
    roll = rng.random()
    if roll < 0.25:
        ask = phrase(
            rng, ["what are the vowels", "list the vowels", "which letters are vowels", "name the vowels"]
        )
        return Exchange(ask=ask, answer="The vowels are a, e, i, o and u.", brief="A, e, i, o, u.")
    if roll < 0.35:
        ask = phrase(rng, ["how many letters are in the alphabet", "how many letters does the alphabet have"])
        return Exchange(ask=ask, answer="The alphabet has 26 letters.", brief="26.")
    if roll < 0.5:
        ask = phrase(
            rng,
            [
                "say the alphabet in capital letters",
                "write the alphabet in capitals",
                "list the capital letters",
            ],
            command=True,
        )
        return Exchange(ask=ask, answer=", ".join(ALPHABET.upper()) + ".", plain=True)
    ask = phrase(rng, ["say the alphabet", "write the alphabet", "list the letters of the alphabet", "recite the alphabet", "tell me the alphabet",
                       "what is the alphabet", "list all letters", "say the abc"], command=True)  # fmt: skip
    return Exchange(ask=ask, answer=", ".join(ALPHABET) + ".", plain=True)


def any_phrase(rng: Random) -> str:
    """Choose a text to repeat: a sentence, loose words, made-up words, numbers or signs."""
    roll = rng.random()
    if roll < 0.3:
        return _sentence(rng)
    if roll < 0.55:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 9)))
    if roll < 0.75:
        return " ".join(any_word(rng) for _ in range(rng.randint(1, 6)))
    if roll < 0.85:
        parts = [
            any_word(rng),
            str(rng.randint(0, 9999)),
            any_word(rng),
            str(rng.randint(0, 99)),
            any_word(rng).upper(),
        ]
        return " ".join(rng.sample(parts, rng.randint(1, len(parts))))
    if roll < 0.93:
        parts = rng.choices(_SYMBOLS, k=rng.randint(1, 5)) + [any_word(rng) for _ in range(rng.randint(0, 3))]
        rng.shuffle(parts)
        return rng.choice(["", " "]).join(parts)
    return "".join(
        rng.choices(ALPHABET + ALPHABET.upper() + "0123456789.,;:!?-+*/()#@&%", k=rng.randint(3, 14))
    )


def _sentence(rng: Random) -> str:
    name, words = rng.choice(NAMES), [rng.choice(WORDS) for _ in range(5)]
    form = rng.choice([
        "the {0} {1} jumps over the {2}", "I like {0} and {1}", "{n} went to the {0} with {1} {2}", "my {0} is very {1}", "where is the {0}, {n}?",
        "We saw {0} {1} and {2} {3}.", "hello {n}, how is the {0}?", "{n} says: {0}, {1}, {2}!", "a {0} a day keeps the {1} away", "it is {0} today",
        "she sells {0} by the {1}", "to {0} or not to {0}", "The {0} is {1}, the {2} is {3} and the {4} too.", "good morning {n}", "hello world", "Hello, World!",
        "never give up your {0}", "roses are {0} and violets are {1}", "this is a {0} test", "I am {n} and I love {0}",
    ])  # fmt: skip
    return form.format(*words, n=name)


def repeat(rng: Random, chat: Chat) -> Exchange:
    """Repeat what the user says, exactly."""
    text = any_phrase(rng)
    roll = rng.random()
    if roll < 0.12:
        times = rng.randint(2, 5)
        word = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}[times]
        word = rng.choice([word, f"{times} times"])
        form = rng.choice(
            [
                "say {t} {n}",
                "repeat {t} {n}",
                'say "{t}" {n}',
                "write {t} {n}",
                "Say {t} {n}.",
                'Say "{t}" {n}.',
            ]
        )
        ask = form.format(t=text, n=word)
        return Exchange(ask=ask, answer=" ".join([text] * times), plain=True)
    forms = ["repeat after me: {t}", "repeat after me: {t}", "repeat after me, {t}", "repeat after me {t}", "repeat this: {t}", "repeat: {t}", "say: {t}",
             "say {t}", 'say "{t}"', 'repeat "{t}"', "repeat {t}", "copy this: {t}", "echo {t}", "echo: {t}", "write {t}", "please repeat: {t}",
             "please say {t}", "can you say {t}", "can you repeat {t}", "repeat the following: {t}", "say this: {t}", "type {t}", "print {t}",
             "repeat exactly: {t}", "i want you to repeat this: {t}", "just say {t}", "repeat the words {t}", 'repeat after me: "{t}"']  # fmt: skip
    ask = rng.choice(forms)
    ask = (capital(ask) if rng.random() < 0.5 else ask).format(t=text)
    return Exchange(ask=ask, answer=text, plain=True)


def rhyme(rng: Random, chat: Chat) -> Exchange:
    """Ask for words that rhyme."""
    group = rng.choice(RHYMES)
    word = rng.choice(group)
    others = [other for other in group if other != word]
    ask = phrase(
        rng,
        [
            "what rhymes with {w}",
            "name a word that rhymes with {w}",
            "find a rhyme for {w}",
            "which words rhyme with {w}",
            "a rhyme for {w}",
        ],
        {"w": word},
    )
    return Exchange(
        ask=ask,
        answer=f"{capital(listed(others))} rhyme{'s' * (len(others) == 1)} with {word}.",
        brief=f"{capital(others[0])}.",
    )


def sentence_with(rng: Random, chat: Chat) -> Exchange:
    """Ask for a sentence that uses a word."""
    from words import ADJECTIVES, ANIMALS, FOODS, PLACES, THINGS

    word = rng.choice(ANIMALS + THINGS + PLACES + FOODS)

    def write(rng: Random) -> str:
        forms = [f"I saw {a(word)} on my way to the {rng.choice(PLACES)}.", f"{rng.choice(NAMES)} has {a(rng.choice(ADJECTIVES))} {word}.",
                 f"There is {a(word)} near the {rng.choice(PLACES)}.", f"Everybody talks about the {rng.choice(ADJECTIVES)} {word}."]  # fmt: skip
        return rng.choice(forms)

    ask = phrase(rng, ["make a sentence with {w}", "write a sentence with {w}", "use {w} in a sentence", "write a sentence about {w}", "make a sentence with the word {w}",
                       "give me a sentence about a {w}"], {"w": word}, command=True)  # fmt: skip
    return Exchange(ask=ask, answer=write(rng), another=write)
