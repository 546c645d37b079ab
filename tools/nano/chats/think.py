"""Chats in which the assistant thinks before it answers: in small steps that each rest on what stands before."""

from collections.abc import Callable
from random import Random

import attrs
import words as w
from exchange import Chat, Skill
from phrasing import capital, phrase
from skills import fact as facts
from skills import number, talk, text
from skills import story as stories
from tokens import THINK, THINK_END, Message


@attrs.frozen
class Problem:
    """A question, the steps to its answer, and the answer."""

    ask: str
    thought: str
    answer: str


_PLACES = ["Ones", "Tens", "Hundreds", "Thousands"]
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()


def _digits(value: int, size: int) -> list[int]:
    """Return `size` digits, those of the right first."""
    return [value // 10**at % 10 for at in range(size)]


def added(a: int, b: int) -> str:
    """Add in columns, from the right, with the carry."""
    size = max(len(str(a)), len(str(b)))
    steps, carry = [f"{a} + {b}."], 0
    for at, (x, y) in enumerate(zip(_digits(a, size), _digits(b, size), strict=True)):
        total = x + y + carry
        with_carry = f" + {carry}" if at else ""
        steps.append(f"{_PLACES[at]}: {x} + {y}{with_carry} = {total}, write {total % 10}, carry {total // 10}.")  # fmt: skip
        carry = total // 10
    if carry:
        steps.append(f"{_PLACES[size]}: write {carry}.")
    return "\n".join([*steps, f"So {a} + {b} = {a + b}."])


def subtracted(a: int, b: int) -> str:
    """Subtract in columns, from the right, with what is borrowed."""
    if a < b:
        return (
            f"{a} is less than {b}, so the result is below zero.\n{subtracted(b, a)}\nSo {a} - {b} = {a - b}."
        )
    size = len(str(a))
    steps, borrowed, written = [f"{a} - {b}."], 0, []
    for at, (x, y) in enumerate(zip(_digits(a, size), _digits(b, size), strict=True)):
        left = x - borrowed
        start = f"{x} - {borrowed} = {left}, " if at else ""
        borrowed = int(left < y)
        how = f"{left} is less than {y}, {left + 10} - {y}" if borrowed else f"{left} - {y}"
        written.append((left - y) % 10)
        steps.append(f"{_PLACES[at]}: {start}{how} = {written[-1]}, write {written[-1]}, borrow {borrowed}.")
    if size > 1 and not written[-1]:
        steps.append(f"Digits: {', '.join(map(str, reversed(written)))}.")
    return "\n".join([*steps, f"So {a} - {b} = {a - b}."])


def multiplied(a: int, b: int) -> str:
    """Multiply by counting on up to five times, else as two products."""
    if not a or not b:
        steps = "Nothing times anything is 0."
    elif b <= 5:
        steps = f"{', '.join(str(a * each) for each in range(1, b + 1))}."
    else:
        part = 10 if b >= 10 else 5
        steps = f"{a} x {part} = {a * part}."
        if b > part:
            steps += f" {a} x {b - part} = {a * (b - part)}. {a * part} + {a * (b - part)} = {a * b}."
    return f"{a} x {b}. {steps}\nSo {a} x {b} = {a * b}."


def _long_number(rng: Random) -> int:
    return rng.randint(0, rng.choice([20, 99, 99, 999, 999, 999]))


def addition(rng: Random) -> Problem:
    """Ask for a sum."""
    a, b = _long_number(rng), _long_number(rng)
    ask = phrase(rng, ["what is {a} plus {b}", "what is {a} + {b}", "{a} + {b}", "{a}+{b}", "how much is {a} plus {b}", "add {a} and {b}", "what is the sum of {a} and {b}", "{a} plus {b}", "calculate {a} + {b}",
                       "what's {a} + {b}", "work out {a} plus {b}", "compute {a} + {b}"], {"a": a, "b": b})  # fmt: skip
    return Problem(ask, added(a, b), f"{a} plus {b} is {a + b}.")


def subtraction(rng: Random) -> Problem:
    """Ask for a difference."""
    a, b = _long_number(rng), _long_number(rng)
    if a < b and rng.random() < 0.85:
        a, b = b, a
    ask = phrase(rng, ["what is {a} minus {b}", "what is {a} - {b}", "{a} - {b}", "{a}-{b}", "how much is {a} minus {b}", "subtract {b} from {a}", "take {b} away from {a}", "{a} minus {b}", "calculate {a} - {b}",
                       "what's {a} - {b}", "take {b} from {a}"], {"a": a, "b": b})  # fmt: skip
    return Problem(ask, subtracted(a, b), f"{a} minus {b} is {a - b}.")


def multiplication(rng: Random) -> Problem:
    """Ask for a small product."""
    a, b = rng.randint(0, 12), rng.randint(0, 12)
    ask = phrase(rng, ["what is {a} times {b}", "what is {a} * {b}", "{a} * {b}", "{a} x {b}", "{a}*{b}", "how much is {a} times {b}", "multiply {a} by {b}", "multiply {a} and {b}", "{a} times {b}",
                       "what is the product of {a} and {b}", "calculate {a} * {b}", "what is {a} x {b}"], {"a": a, "b": b})  # fmt: skip
    return Problem(ask, multiplied(a, b), f"{a} times {b} is {a * b}.")


def _word(rng: Random, longest: int) -> str:
    return text.any_word(rng)[:longest]


def _shown(rng: Random, word: str) -> str:
    roll = rng.random()
    if roll < 0.12:
        return f'"{word}"'
    return capital(word) if roll < 0.2 else word


def _numbered(word: str) -> str:
    return ", ".join(f"{letter} {at}" for at, letter in enumerate(word.lower(), 1))


def letters(rng: Random) -> Problem:
    """Ask for the number of letters of a word, which the thought numbers."""
    word = _word(rng, 14)
    size = len(word)
    ask = phrase(rng, ["how many letters are in {w}", "how many letters are in the word {w}", "how many letters does {w} have", "count the letters in {w}", "how long is the word {w}",
                       "how many letters has {w}", "count the letters of {w}"], {"w": _shown(rng, word)})  # fmt: skip
    plural = "s" * (size > 1)
    return Problem(
        ask,
        f"I number the letters: {_numbered(word)}.\nThat is {size} letter{plural}.",
        f"{text.spelled(word)}: that is {size} letter{plural}.",
    )


def one_letter(rng: Random) -> Problem:
    """Ask how often a letter comes in a word."""
    word = "strawberry" if rng.random() < 0.02 else _word(rng, 14)
    if rng.random() < 0.3:
        at = rng.randrange(len(word))
        word = (word[:at] + word[rng.randrange(len(word))] * rng.randint(1, 2) + word[at:])[:14]
    lower = word.lower()
    repeated = [letter for letter in lower if lower.count(letter) > 1]
    letter = rng.choice(repeated) if repeated and rng.random() < 0.6 else rng.choice(lower)
    if rng.random() < 0.12:
        letter = rng.choice(w.ALPHABET)
    ask = phrase(rng, ["how many {l} in {w}", "how many {l}'s are in {w}", "how many {l} are in {w}", "how many times does {l} come in {w}", "how often is {l} in {w}", "count the {l}'s in {w}", "how many letters {l} are in {w}",
                       "how many times is the letter {l} in {w}", "how many {l}s are in {w}", "how many {l}'s are there in the word {w}", "how often does the letter {l} appear in {w}", "count the letter {l} in {w}"],
                 {"l": letter if rng.random() < 0.85 else letter.upper(), "w": _shown(rng, word)})  # fmt: skip
    count, steps = 0, []
    for each in lower:
        count += each == letter
        steps.append(f"{each} {count}" if each == letter else each)
    times = "1 time" if count == 1 else f"{count} times"
    return Problem(
        ask,
        f"I look for {letter}: {', '.join(steps)}.\nThat is {times}.",
        f"The letter {letter} comes {times} in {lower}.",
    )


def letter_at(rng: Random) -> Problem:
    """Ask for the third letter of a word and the like."""
    word = _word(rng, 12)
    at = rng.randrange(len(word))
    ordinal = _ORDINALS[at] if at < len(word) - 1 or rng.random() < 0.5 else "last"
    ask = phrase(rng, ["what is the {o} letter of {w}", "which letter is the {o} in {w}", "what is the {o} letter in {w}", "{o} letter of {w}", "tell me the {o} letter of {w}"],
                 {"o": ordinal, "w": _shown(rng, word)})  # fmt: skip
    seen = word[: at + 1]
    return Problem(
        ask,
        f"I number the letters: {_numbered(seen)}.\nThe {ordinal} is {seen[-1].lower()}.",
        f"The {ordinal} letter of {word.lower()} is {seen[-1].lower()}.",
    )


def backwards(rng: Random) -> Problem:
    """Ask for a word from its end; the thought spells it forwards with numbers, then counts them down."""
    word = _word(rng, 12)
    down = ", ".join(f"{at} {word[at - 1].lower()}" for at in range(len(word), 0, -1))
    ask = phrase(rng, ["spell {w} backwards", "spell the word {w} backwards", "what is {w} backwards", "say {w} backwards", "reverse the word {w}", "write {w} backwards", "reverse {w}",
                       "what is {w} spelled backwards"], {"w": _shown(rng, word)})  # fmt: skip
    return Problem(
        ask,
        f"Forwards: {_numbered(word)}.\nBackwards: {down}.",
        f"{text.spelled(word)} backwards is {text.spelled(word[::-1])}.",
    )


def _bigger(a: int, b: int) -> str:
    """Compare two different numbers, digit by digit from the left."""
    if len(str(a)) != len(str(b)):
        big = max(a, b)
        sizes = [_pieces(len(str(each)), "digits") for each in (a, b)]
        return f"{a} has {sizes[0]}, {b} has {sizes[1]}.\n{big} has more digits."
    size = len(str(a))
    steps = [f"{a} and {b} have {_pieces(size, 'digits')}."]
    for at, (x, y) in enumerate(zip(str(a), str(b), strict=True)):
        place = _PLACES[size - 1 - at]
        if x == y:
            steps.append(f"{place}: {x} and {y} are the same.")
            continue
        steps.append(f"{place}: {x} is {'more' if x > y else 'less'} than {y}.")
        break
    return "\n".join(steps)


def comparison(rng: Random) -> Problem:
    """Ask for the bigger or the smaller of two numbers."""
    top = rng.choice([20, 99, 999, 9999])
    a = rng.randint(0, top)
    b = rng.randint(0, top)
    if rng.random() < 0.5:
        b = min(9999, max(0, a + rng.choice([-1, 1]) * rng.choice([1, 2, 9, 10, 11, 20, 90, 100])))
    if a == b:
        b = a + 1 if a < 9999 else a - 1
    big, small = max(a, b), min(a, b)
    if rng.random() < 0.65:
        word = rng.choice(["bigger", "larger", "greater", "more"])
        ask = phrase(rng, ["which is {w}, {a} or {b}", "what is {w}, {a} or {b}", "which number is {w}: {a} or {b}", "is {a} or {b} {w}"], {"w": word, "a": a, "b": b})  # fmt: skip
        answer = f"{big} is {word} than {small}."
    else:
        word = rng.choice(["smaller", "less"])
        ask = phrase(rng, ["which is {w}, {a} or {b}", "what is {w}, {a} or {b}", "which number is {w}: {a} or {b}"], {"w": word, "a": a, "b": b})  # fmt: skip
        answer = f"{small} is {word} than {big}."
    return Problem(ask, f"{_bigger(a, b)}\nSo {big} is more than {small}.", answer)


def biggest(rng: Random) -> Problem:
    """Ask for the biggest of some numbers; the thought keeps the biggest so far."""
    numbers = rng.sample(range(rng.choice([20, 100])), rng.randint(3, 5))
    best, steps = numbers[0], [f"{numbers[0]} is the first."]
    for each in numbers[1:]:
        if each > best:
            steps.append(f"{each} is more than {best}, keep {each}.")
            best = each
        else:
            steps.append(f"{each} is less than {best}, keep {best}.")
    listing = ", ".join(map(str, numbers))
    ask = phrase(rng, ["which is the biggest of {x}", "what is the largest of {x}", "what is the biggest number of {x}", "find the largest number: {x}", "what is the maximum of {x}", "which number is the biggest: {x}"], {"x": listing})  # fmt: skip
    return Problem(ask, " ".join(steps), f"The biggest number is {best}.")


def even_odd(rng: Random) -> Problem:
    """Ask whether a number is even."""
    value = rng.randint(0, rng.choice([20, 99, 999, 9999, 99999]))
    last, kind = value % 10, "odd" if value % 2 else "even"
    ask = phrase(rng, ["is {n} even or odd", "is {n} odd or even", "is the number {n} even or odd", "is {n} an even number", "is {n} an odd number", "is {n} even", "is {n} odd"], {"n": value})  # fmt: skip
    return Problem(ask, f"{value} ends in {last}. {last} is {kind}.", f"{value} is an {kind} number.")


def calendar(rng: Random) -> Problem:
    """Ask for the day or month some steps away; the thought counts the steps."""
    items, kind = (w.DAYS, "day") if rng.random() < 0.7 else (w.MONTHS, "month")
    at, steps = rng.randrange(len(items)), rng.randint(1, 9 if kind == "day" else 7)
    forward = rng.random() < 0.7
    passed = [items[(at + (each if forward else -each)) % len(items)] for each in range(1, steps + 1)]
    this, there, where = items[at], passed[-1], "after" if forward else "before"
    much = number.number_words(steps) if rng.random() < 0.6 else str(steps)
    slots = {"n": much, "k": f"{kind}{'s' * (steps > 1)}", "K": kind, "d": this, "w": where}
    templates = ["what {K} is {n} {k} {w} {d}", "which {K} is {n} {k} {w} {d}", "what {K} comes {n} {k} {w} {d}", "which {K} comes {n} {k} {w} {d}", "{n} {k} {w} {d}", "what is {n} {k} {w} {d}"]  # fmt: skip
    if forward:
        templates += ["if it is {d}, which {K} is it in {n} {k}", "today is {d}. what {K} is it in {n} {k}"] if kind == "day" else ["it is {d}. which {K} is it in {n} {k}"]  # fmt: skip
    counted = ", ".join(f"{each} {item}" for each, item in enumerate(passed, 1))
    return Problem(
        phrase(rng, templates, slots),
        f"I start {where} {this} and count to {steps}: {counted}.",
        f"{capital(much)} {slots['k']} {where} {this} is {there}.",
    )


def _pieces(count: int, noun: str) -> str:
    return f"{count} {noun.removesuffix('s') if count == 1 else noun}"


def word_problem(rng: Random) -> Problem:
    """Write a sum as a little story."""
    name = rng.choice(w.NAMES)
    noun = rng.choice("apples pears books balls coins eggs stones cakes pencils flowers stamps cards shells marbles".split())  # fmt: skip
    slots: dict[str, object] = {"m": name, "x": noun}
    roll = rng.random()
    top = rng.choice([9, 20, 60, 200])
    if roll < 0.35:
        a, b = rng.randint(1, top), rng.randint(1, top)
        ask = phrase(rng, ["{m} has {a} {x} and buys {b} more. how many {x} does {m} have", "{m} has {a} {x} and gets {b} more. how many {x} does {m} have now", "{m} had {a} {x} and found {b} more. how many {x} are there",
                           "{m} has {a} {x}. a friend gives {m} {b} more. how many {x} does {m} have"], slots | {"a": a, "b": b})  # fmt: skip
        return Problem(
            ask,
            f"{name} has {a} and gets {b} more, so I add.\n{added(a, b)}",
            f"{a} plus {b} is {a + b}, so {name} has {a + b} {noun}.",
        )
    if roll < 0.65:
        a = rng.randint(2, top)
        b = rng.randint(1, a)
        ask = phrase(rng, ["{m} has {a} {x} and gives away {b}. how many {x} are left", "{m} has {a} {x} and loses {b}. how many {x} does {m} have", "{m} had {a} {x} and sold {b}. how many {x} are left",
                           "there are {a} {x}. {m} takes {b} of them. how many {x} are left"], slots | {"a": a, "b": b})  # fmt: skip
        return Problem(
            ask,
            f"There are {a} and {b} go away, so I subtract.\n{subtracted(a, b)}",
            f"{a} minus {b} is {a - b}, so {_pieces(a - b, noun)} {'is' if a - b == 1 else 'are'} left.",
        )
    if roll < 0.85:
        a, b = rng.randint(2, 12), rng.randint(2, 12)
        box = rng.choice(["boxes", "bags", "baskets", "bowls", "shelves"])
        ask = phrase(rng, ["{m} has {a} {y} with {b} {x} in each. how many {x} are there", "there are {a} {y} with {b} {x} each. how many {x} are there", "{m} has {a} {y}. each has {b} {x}. how many {x} does {m} have"],
                     slots | {"a": a, "b": b, "y": box})  # fmt: skip
        return Problem(
            ask,
            f"There are {a} {box} with {b} each, so I multiply.\n{multiplied(a, b)}",
            f"{a} times {b} is {a * b}, so there are {a * b} {noun}.",
        )
    a, b = rng.randint(2, 30), rng.randint(1, 30)
    c = rng.randint(1, a + b)
    ask = phrase(rng, ["{m} has {a} {x}, buys {b} more and gives away {c}. how many {x} are left", "{m} has {a} {x}, finds {b} and loses {c}. how many {x} does {m} have", "{m} had {a} {x}, got {b} more and sold {c}. how many {x} are left"],
                 slots | {"a": a, "b": b, "c": c})  # fmt: skip
    return Problem(
        ask,
        f"First I add {b}, then I subtract {c}.\n{added(a, b)}\n{subtracted(a + b, c)}",
        f"{name} has {_pieces(a + b - c, noun)}.",
    )


_PLANS: dict[Skill, tuple[float, list[str]]] = {
    talk.small_talk: (9, ["I answer kindly.", "This is small talk, so I answer kindly.", "I answer in a friendly way."]),
    talk.identity: (6, ["This is about me, so I say what I am.", "I say what I know of myself."]),
    talk.about_triolet: (2, ["This is about triolet. I say what I know of it."]),
    talk.tell: (3, ["I will remember it.", "This is something to remember."]),
    number.count: (3, ["I count one by one and stop at the end.", "I count in ones."]),
    number.count_down: (1.5, ["I count down one by one."]),
    number.neighbour: (1, ["I look at the numbers in order."]),
    number.in_words: (1, ["I go through the digits from the left."]),
    text.spell: (2.5, ["I write the letters one by one.", "I take one letter after another."]),
    text.repeat: (2.5, ["I copy the words as they are.", "I say the same words."]),
    text.upper_case: (0.7, ["I change the case of the letters."]),
    facts.name_list: (1.5, ["I name them in order."]),
    facts.opposite: (2, ["I look for the word that means the contrary."]),
    facts.animal_fact: (1, ["This is about animals, which I know a little."]),
    facts.thing_fact: (2.5, ["I know this fact.", "This is a fact that I know."]),
    facts.fact: (2, ["I know this fact.", "This is a fact that I know."]),
    facts.unknown: (3, ["I do not know this, so I say so.", "This is more than I know, so I say so."]),
    facts.gibberish: (0.7, ["I do not understand it, so I say so."]),
    stories.story: (2.5, ["I need a hero, a place and a good end.", "I begin with the hero and finish with a good end."]),
    stories.joke: (1, ["I tell a short joke."]),
    stories.poem: (0.5, ["I write a few lines."]),
}  # fmt: skip


def plain(rng: Random, chat: Chat | None = None) -> Problem:
    """Ask what needs no steps; the thought says what the user wants and what to do."""
    skill = rng.choices(list(_PLANS), [share for share, _ in _PLANS.values()])[0]
    exchange = skill(rng, chat or Chat())
    plan = rng.choice(_PLANS[skill][1])
    said = exchange.ask.strip()
    if len(said) > 50 or '"' in said or "\n" in said:
        return Problem(exchange.ask, plan, exchange.answer)
    verb = "asks" if said.endswith("?") else "says"
    return Problem(exchange.ask, f'The user {verb} "{said.rstrip(".?!")}". {plan}', exchange.answer)


_PROBLEMS: dict[Callable[[Random], Problem], float] = {
    addition: 15, subtraction: 15, multiplication: 9, letters: 8, one_letter: 10, letter_at: 3, backwards: 8, comparison: 6, biggest: 2, even_odd: 3, calendar: 6, word_problem: 9,
    plain: 18,
}  # fmt: skip

_WISHES = ["Think before you answer.", "Think step by step.", "Think first.", "Always think before you answer.", "Think step by step before you answer.", "Think first, then answer.", "Reason before you answer.", "Reason step by step.",
           "Use <think> before you answer.", "Work it out step by step.", "Think carefully.", "You think before you answer.", "First think, then answer.", "Show your thinking."]  # fmt: skip
_SYSTEMS = ["You are a helpful assistant.", "You are triolet-nano.", "You are a friendly chat bot.", "Answer the user's questions.", "Be kind and helpful.", "You are an assistant.", "You are a helpful AI assistant.", "Help the user.",
            "You are triolet-nano, a small and friendly model.", "You are good at numbers."]  # fmt: skip
_ASKED_BEFORE = ["Think step by step: {}", "Think first: {}", "Think before you answer. {}", "think: {}", "Think step by step. {}", "think step by step: {}", "Think first. {}", "think before you answer: {}", "Think carefully: {}", "Reason step by step: {}"]  # fmt: skip
_ASKED_BEHIND = ["{} Think step by step.", "{} Think first.", "{} Think before you answer.", "{} think step by step", "{} Think carefully.", "{} (think first)", "{} Let's think step by step."]  # fmt: skip


def _with_end(ask: str) -> str:
    return ask if ask.endswith((".", "?", "!", '"')) else f"{ask}."


def _earlier(rng: Random) -> list[tuple[str, str]]:
    if rng.random() < 0.72:
        return []
    made = [
        rng.choices(list(_PROBLEMS), list(_PROBLEMS.values()))[0](rng) for _ in range(rng.choice([1, 1, 2]))
    ]
    return [(each.ask, each.answer) for each in made]


def _chat(rng: Random, make: Callable[[Random], Problem]) -> list[Message]:
    problem = make(rng)
    roll, ask, given, system = rng.random(), problem.ask, "", ""
    if roll < 0.55:
        given = f"{THINK}\n"
        if rng.random() < 0.25:
            system = rng.choice(_SYSTEMS)
    elif roll < 0.8:
        system = rng.choice(_WISHES)
        if rng.random() < 0.4:
            system = f"{rng.choice(_SYSTEMS)} {system}"
    elif make is plain or rng.random() < 0.5:
        ask = rng.choice(_ASKED_BEFORE).format(ask)
    else:
        ask = rng.choice(_ASKED_BEHIND).format(_with_end(ask))
    messages = [Message(role="system", content=system)] if system else []
    for said, answer in _earlier(rng):
        # an answer without thought is given: it may be beyond the model, or the system turn asks for thought
        messages += [
            Message(role="user", content=said),
            Message(role="assistant", content=answer, given=answer),
        ]
    content = f"{THINK}\n{problem.thought}\n{THINK_END}\n\n{problem.answer}"
    return [
        *messages,
        Message(role="user", content=ask),
        Message(role="assistant", content=content, given=given),
    ]


def steps(rng: Random) -> list[Message]:
    """Write a chat with a problem that needs steps."""
    makes = {make: share for make, share in _PROBLEMS.items() if make is not plain}
    return _chat(rng, rng.choices(list(makes), list(makes.values()))[0])


def short(rng: Random) -> list[Message]:
    """Write a chat with a plain question and a short thought."""
    return _chat(rng, plain)


CHATS: dict[Callable[[Random], list[Message]], float] = {steps: 82, short: 18}
