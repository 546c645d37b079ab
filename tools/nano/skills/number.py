"""Skills with numbers: counting, sums, comparing, number words."""

from random import Random

from exchange import Chat, Exchange
from phrasing import capital, phrase
from words import TENS, UNITS


def number_words(number: int) -> str:
    """Spell `number`, 0 to 999, in English words."""
    if number < 20:
        return UNITS[number]
    if number < 100:
        return TENS[number // 10] + (f"-{UNITS[number % 10]}" if number % 10 else "")
    rest = f" and {number_words(number % 100)}" if number % 100 else ""
    return f"{UNITS[number // 100]} hundred{rest}"


def joined(numbers: range) -> str:
    """Join the numbers as a counting answer: "1, 2, 3."."""
    return ", ".join(map(str, numbers)) + "."


def _range_of(rng: Random) -> tuple[int, int]:
    """Choose where to count from and to: mostly short, sometimes some hundreds long, often across or up to a hundred."""
    kind = rng.random()
    if kind < 0.08:
        return 1, rng.choice(
            [rng.randint(90, 130), rng.choice([100, 110, 120, 150, 200]), rng.randint(100, 320)]
        )
    if kind < 0.33:
        end = rng.choice([100, 200, rng.randint(100, 330), rng.randint(100, 330)])
        return end - rng.randint(2, rng.choice([8, 20, 40])), end
    start = 1 if rng.random() < 0.6 else rng.randint(0, rng.choice([10, 30, 99, 300]))
    length = rng.choice([rng.randint(1, 9), rng.randint(3, 14), rng.randint(5, 25), rng.randint(10, 40)])
    if rng.random() < 0.1:
        length = rng.randint(30, 110)
    if rng.random() < 0.35:
        return start, max(start + 1, (start + length) // 10 * 10)
    return start, start + length


def count(rng: Random, chat: Chat) -> Exchange:
    """Count up."""
    a, b = _range_of(rng)
    templates = [
        "count from {a} to {b}", "count from {a} to {b}", "count from {a} up to {b}", "count {a} to {b}", "count up from {a} to {b}",
        "list the numbers from {a} to {b}", "say the numbers from {a} to {b}", "write the numbers {a} to {b}", "start at {a} and count to {b}",
        "give me all numbers between {a} and {b}", "print {a} to {b}", "print the numbers from {a} to {b}", "count {a}-{b}",
        "show me the numbers from {a} to {b}", "count all the way from {a} to {b}",
    ]  # fmt: skip
    if a == 1 and rng.random() < 0.5:
        templates = ["count to {b}", "count up to {b}", "count until {b}", "count till {b}", "count all the way to {b}", "count to {b}",
                     "list the first {b} numbers", "say the numbers up to {b}", "start counting and stop at {b}"]  # fmt: skip
    onward = joined(range(b + 1, b + 11))
    return Exchange(
        ask=phrase(rng, templates, {"a": a, "b": b}, command=True),
        answer=joined(range(a, b + 1)),
        onward=onward,
        plain=True,
    )


def count_down(rng: Random, chat: Chat) -> Exchange:
    """Count down."""
    low = rng.choice([0, 1, 1, 1, rng.randint(0, 60)])
    high = low + rng.choice(
        [rng.randint(2, 12), rng.randint(5, 30), rng.choice([9, 19, 49, 99]), rng.randint(5, 100)]
    )
    templates = ["count down from {a} to {b}", "count backwards from {a} to {b}", "count from {a} down to {b}", "count back from {a} to {b}",
                 "count from {a} to {b}", "count {a} to {b}", "count in reverse from {a} to {b}"]  # fmt: skip
    if low == 1 and rng.random() < 0.5:
        templates = [
            "count down from {a}",
            "count backwards from {a}",
            "do a countdown from {a}",
            "start a countdown from {a}",
        ]
    ask = phrase(rng, templates, {"a": high, "b": low}, command=True)
    return Exchange(ask=ask, answer=joined(range(high, low - 1, -1)), plain=True)


def count_by(rng: Random, chat: Chat) -> Exchange:
    """Count in steps, and the even and odd numbers."""
    step = rng.choice([2, 2, 2, 3, 4, 5, 5, 5, 10, 10, 10])
    numbers = {2: "twos", 3: "threes", 4: "fours", 5: "fives", 10: "tens"}[step]
    start = rng.choice([step, step, 0, rng.choice([1, step, 0]), step * rng.randint(1, 9)])
    end = start + step * rng.choice([rng.randint(3, 10), rng.randint(3, 20), rng.randint(10, 30)])
    templates = ["count by {s} from {a} to {b}", "count in {s} from {a} to {b}", "count from {a} to {b} by {s}", "count from {a} to {b} in {s}",
                 "count from {a} to {b} in steps of {n}"]  # fmt: skip
    if start == step:
        templates += [
            "count by {s} to {b}",
            "count in {s} to {b}",
            "count by {s} up to {b}",
            "skip count by {s} to {b}",
        ]
    if step == 2 and rng.random() < 0.5:
        odd = rng.random() < 0.5
        start = 1 if odd else 2
        end = start + 2 * rng.randint(3, 24)
        kind = "odd" if odd else "even"
        templates = [f"list the {kind} numbers up to {{b}}", f"say the {kind} numbers from {{a}} to {{b}}", f"count the {kind} numbers to {{b}}",
                     f"what are the {kind} numbers up to {{b}}", f"give me the {kind} numbers to {{b}}"]  # fmt: skip
    slots = {"a": start, "b": end, "s": rng.choice([numbers, numbers, str(step)]), "n": step}
    return Exchange(
        ask=phrase(rng, templates, slots, command=True),
        answer=joined(range(start, end + 1, step)),
        plain=True,
    )


def count_in_words(rng: Random, chat: Chat) -> Exchange:
    """Count with the numbers written out."""
    end = rng.randint(3, 30)
    ask = phrase(rng, ["count to {b} in words", "count from 1 to {b} in words", "count to {b} with words", "write the numbers from 1 to {b} in words",
                       "count to {b} using words", "write out the numbers from 1 to {b}"], {"b": end}, command=True)  # fmt: skip
    return Exchange(
        ask=ask, answer=capital(", ".join(map(number_words, range(1, end + 1)))) + ".", plain=True
    )


def neighbour(rng: Random, chat: Chat) -> Exchange:
    """Ask for the number after or before another."""
    number = rng.randint(1, rng.choice([10, 30, 100, 400]))
    if rng.random() < 0.6:
        templates = [
            "what comes after {n}",
            "which number comes after {n}",
            "what number is after {n}",
            "what is the next number after {n}",
            "what follows {n}",
        ]
        return Exchange(
            ask=phrase(rng, templates, {"n": number}),
            answer=f"After {number} comes {number + 1}.",
            brief=f"{number + 1}.",
        )
    templates = [
        "what comes before {n}",
        "which number comes before {n}",
        "what number is before {n}",
        "what is the number before {n}",
    ]
    return Exchange(
        ask=phrase(rng, templates, {"n": number}),
        answer=f"Before {number} comes {number - 1}.",
        brief=f"{number - 1}.",
    )


def _operands(rng: Random) -> tuple[str, int, int, int]:
    kind = rng.choice(["plus", "plus", "minus", "minus", "times"])
    top = rng.choice([10, 10, 20, 50, 99])
    a, b = rng.randint(0, top), rng.randint(0, rng.choice([10, top]))
    if kind == "minus":
        a, b = max(a, b), min(a, b)
        return kind, a, b, a - b
    if kind == "times":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        return kind, a, b, a * b
    return kind, a, b, a + b


def add_up(rng: Random, chat: Chat) -> Exchange:
    """Write a small sum, difference or product."""
    kind, a, b, result = _operands(rng)
    sign = {"plus": "+", "minus": "-", "times": rng.choice(["*", "x"])}[kind]
    templates = [f"what is {{a}} {kind} {{b}}", f"what's {{a}} {kind} {{b}}", f"how much is {{a}} {kind} {{b}}", f"{{a}} {kind} {{b}}",
                 f"what is {{a}} {sign} {{b}}", f"what is {{a}}{sign}{{b}}", f"{{a}} {sign} {{b}}", f"{{a}}{sign}{{b}}", f"{{a}} {sign} {{b}} =",
                 f"calculate {{a}} {sign} {{b}}", f"how much is {{a}} {sign} {{b}}", f"work out {{a}} {kind} {{b}}", f"{{a}}{sign}{{b}}=",
                 f"do you know what {{a}} {kind} {{b}} is", f"tell me what {{a}} {kind} {{b}} is"]  # fmt: skip
    templates += {
        "plus": [
            "add {a} and {b}",
            "what is the sum of {a} and {b}",
            "what do you get if you add {a} and {b}",
        ],
        "minus": ["take {b} from {a}", "subtract {b} from {a}", "take {b} away from {a}"],
        "times": ["multiply {a} by {b}", "multiply {a} and {b}"],
    }[kind]
    ask = phrase(rng, templates, {"a": a, "b": b})
    return Exchange(ask=ask, answer=f"{a} {kind} {b} is {result}.", brief=f"{result}.")


def double_or_half(rng: Random, chat: Chat) -> Exchange:
    """Ask for twice a number, or half of it."""
    n = rng.randint(1, rng.choice([10, 20, 50]))
    if rng.random() < 0.5:
        ask = phrase(
            rng,
            ["what is double {n}", "double {n}", "what is twice {n}", "what is the double of {n}"],
            {"n": n},
        )
        return Exchange(ask=ask, answer=f"Twice {n} is {2 * n}.", brief=f"{2 * n}.")
    ask = phrase(
        rng,
        ["what is half of {n}", "half of {n}", "what's half of {n}", "how much is half of {n}"],
        {"n": 2 * n},
    )
    return Exchange(ask=ask, answer=f"Half of {2 * n} is {n}.", brief=f"{n}.")


def story_sum(rng: Random, chat: Chat) -> Exchange:
    """Write a sum as a little story."""
    a, b = rng.randint(1, 12), rng.randint(1, 9)
    noun = rng.choice("apples pears books balls coins eggs stones cakes pencils flowers".split())
    slots = {"a": a, "b": b, "x": noun}
    if rng.random() < 0.5 or b > a:
        ask = phrase(rng, ["i have {a} {x} and get {b} more, how many {x} do i have", "if i have {a} {x} and you give me {b} more, how many do i have",
                           "i had {a} {x} and found {b} more. how many are there now"], slots)  # fmt: skip
        return Exchange(
            ask=ask, answer=f"{a} plus {b} is {a + b}, so you have {a + b} {noun}.", brief=f"{a + b} {noun}."
        )
    ask = phrase(rng, ["i have {a} {x} and give away {b}, how many {x} are left", "if i have {a} {x} and lose {b}, how many are left",
                       "i had {a} {x} and ate {b}. how many do i have now"], slots)  # fmt: skip
    return Exchange(
        ask=ask, answer=f"{a} minus {b} is {a - b}, so you have {a - b} {noun}.", brief=f"{a - b} {noun}."
    )


def compare(rng: Random, chat: Chat) -> Exchange:
    """Ask for the bigger or smaller of two numbers, or for even and odd."""
    a, b = rng.sample(range(rng.choice([12, 100])), 2)
    roll = rng.random()
    if roll < 0.4:
        word = rng.choice(["bigger", "larger", "greater"])
        ask = phrase(
            rng,
            ["which is {w}, {a} or {b}", "what is {w}, {a} or {b}", "which number is {w}: {a} or {b}"],
            {"w": word, "a": a, "b": b},
        )
        return Exchange(ask=ask, answer=f"{max(a, b)} is {word} than {min(a, b)}.", brief=f"{max(a, b)}.")
    if roll < 0.6:
        ask = phrase(
            rng,
            [
                "which is smaller, {a} or {b}",
                "what is smaller, {a} or {b}",
                "which number is smaller: {a} or {b}",
            ],
            {"a": a, "b": b},
        )
        return Exchange(ask=ask, answer=f"{min(a, b)} is smaller than {max(a, b)}.", brief=f"{min(a, b)}.")
    kind = "odd" if a % 2 else "even"
    ask = phrase(rng, ["is {a} even or odd", "is {a} odd or even", "is the number {a} even or odd"], {"a": a})
    return Exchange(ask=ask, answer=f"{a} is an {kind} number.", brief=f"{capital(kind)}.")


def in_words(rng: Random, chat: Chat) -> Exchange:
    """Ask for a number in words, or for words as a number."""
    n = rng.randint(0, rng.choice([20, 100, 999]))
    if rng.random() < 0.6:
        ask = phrase(
            rng,
            [
                "write {n} in words",
                "how do you write {n} in words",
                "write the number {n} in words",
                "{n} in words",
                "spell out the number {n}",
            ],
            {"n": n},
        )
        return Exchange(
            ask=ask, answer=f"{n} in words is {number_words(n)}.", brief=f"{capital(number_words(n))}."
        )
    ask = phrase(
        rng,
        ["write {w} as a number", "write {w} in digits", "what is {w} in digits", "{w} as a number"],
        {"w": number_words(n)},
    )
    return Exchange(ask=ask, answer=f"{capital(number_words(n))} is {n}.", brief=f"{n}.")


def too_big(rng: Random, chat: Chat) -> Exchange:
    """Write a sum that is beyond the model, and an answer that says so."""
    a, b = rng.randint(130, 99999), rng.randint(130, 9999)
    sign = rng.choice(["plus", "+", "-", "minus", "times", "*", "x", "/", "divided by"])
    templates = ["what is {a} {s} {b}", "{a} {s} {b}", "calculate {a} {s} {b}", "how much is {a} {s} {b}"]
    if rng.random() < 0.3:
        templates = [
            "what is the square root of {a}",
            "what is {a} divided by {b}",
            "what is {a} to the power of {b}",
            "what is {b} percent of {a}",
        ]
    ask = phrase(rng, templates, {"a": a, "b": b, "s": sign})
    answer = rng.choice(["That sum is too big for me. I can only do small sums, such as 7 plus 5.",
                         "I can only do sums with small numbers, so I do not know that one."])  # fmt: skip
    return Exchange(ask=ask, answer=answer, brief="That is too big for me.")
