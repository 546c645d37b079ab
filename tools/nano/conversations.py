"""Whole conversations: a mixture of skills, system turns, follow-ups, and some plain text without turns."""

from collections.abc import Iterator
from random import Random

import words as w
from chats import form, think, tool
from exchange import Chat, Exchange, Skill
from phrasing import capital, phrase
from skills import fact as facts
from skills import number, talk, text
from skills import story as stories
from tokens import Message

MIXTURE: dict[Skill, float] = {
    number.count: 14, number.count_down: 4, number.count_by: 3, number.count_in_words: 1.5, number.neighbour: 2, number.add_up: 18, number.double_or_half: 1,
    number.story_sum: 1.5, number.compare: 2.5, number.in_words: 2.5, number.too_big: 1.5,
    text.spell: 15, text.count_letters: 3, text.backwards: 3, text.letter_of: 3, text.upper_case: 4, text.alphabet: 1.5, text.repeat: 14, text.rhyme: 1, text.sentence_with: 2,
    facts.name_list: 3, facts.name_some: 3, facts.calendar: 5, facts.opposite: 3, facts.animal_fact: 2, facts.thing_fact: 4, facts.fact: 4, facts.unknown: 9, facts.gibberish: 2,
    talk.identity: 6, talk.about_triolet: 2, talk.small_talk: 8, talk.tell: 5, talk.recall: 4,
    stories.story: 4, stories.named_story: 1, stories.story_at_length: 0.8, stories.joke: 1.5, stories.poem: 1,
}  # fmt: skip
_SKILLS, _WEIGHTS = list(MIXTURE), list(MIXTURE.values())

_NEUTRAL = ["You are a helpful assistant.", "You are triolet-nano, a small and friendly model.", "You are a friendly chat bot.", "Answer the user's questions.", "You are a helpful AI assistant.",
            "Be kind and helpful.", "You are an assistant.", "Help the user.", "You are triolet-nano.", "You are a helpful, honest assistant."]  # fmt: skip
_BRIEF = ["Answer briefly.", "Be brief.", "Keep your answers short.", "Answer in one word if you can.", "Give short answers.", "Be concise.", "You are a helpful assistant. Answer briefly.",
          "Answer as briefly as possible.", "Short answers only."]  # fmt: skip
_STYLES = [
    (["You are a pirate.", "Talk like a pirate.", "Speak like a pirate.", "You are a pirate captain.", "Answer like a pirate."], "Arr! ", " Yo ho ho!"),
    (["You are a cat.", "Talk like a cat.", "Pretend to be a cat.", "You are a friendly cat."], "Meow! ", " Purr."),
    (["You are a dog.", "Talk like a dog.", "Pretend to be a dog."], "Woof! ", ""),
    (["You are a robot.", "Talk like a robot.", "Speak like a robot."], "Beep boop. ", " Beep."),
    (["You are very polite.", "Be very polite.", "Answer politely."], "With pleasure. ", ""),
    (["You are a wizard.", "Talk like a wizard.", "You are an old wizard."], "By my beard! ", ""),
    (["You are a king.", "Talk like a king.", "You are a queen."], "Hear me, my friend. ", ""),
    (["You are a knight.", "Talk like a knight."], "By my sword! ", ""),
    (["You are a ghost.", "Talk like a ghost."], "Boo! ", ""),
    (["You are a cowboy.", "Talk like a cowboy."], "Howdy! ", ""),
]  # fmt: skip


def system_turn(rng: Random, chat: Chat) -> str:
    """Write a system turn; its wishes are kept in `chat`."""
    kind = rng.choices(
        ["neutral", "name", "brief", "style", "start", "end", "fact", "both"], [26, 18, 22, 20, 7, 7, 10, 8]
    )[0]
    match kind:
        case "neutral":
            return rng.choice(_NEUTRAL)
        case "name":
            return _named(rng, chat)
        case "brief":
            chat.brief = True
            return rng.choice(_BRIEF)
        case "style":
            wishes, chat.prefix, chat.suffix = rng.choice(_STYLES)
            return rng.choice(wishes)
        case "start":
            word = capital(text.any_word(rng))
            chat.prefix = f"{word}! "
            return rng.choice(
                ["Start every answer with {}.", "Begin every answer with {}.", "Always start with {}."]
            ).format(f'"{word}!"')
        case "end":
            word = capital(text.any_word(rng))
            chat.suffix = f" {word}!"
            return rng.choice(
                ["End every answer with {}.", "Finish every answer with {}.", "Always end with {}."]
            ).format(f'"{word}!"')
        case "fact":
            return f"{rng.choice(_NEUTRAL)} {talk.system_fact(rng, chat)}"
        case _:
            wishes, chat.prefix, chat.suffix = rng.choice(_STYLES)
            return f"{_named(rng, chat)} {rng.choice(wishes)}"


def _named(rng: Random, chat: Chat) -> str:
    chat.bot_name = rng.choice(w.NAMES) if rng.random() < 0.6 else capital(text.made_up_word(rng))
    return rng.choice(["Your name is {}.", "You are {}.", "You are called {}.", "You are an assistant called {}.", "Your name is {}. You are a helpful assistant.",
                       "You are {}, a helpful assistant.", "You are a chat bot named {}."]).format(chat.bot_name)  # fmt: skip


def styled(chat: Chat, exchange: Exchange, answer: str | None = None) -> str:
    """Return the answer in the style that the system turn asks for."""
    if answer is None:
        answer = exchange.brief if chat.brief and exchange.brief else exchange.answer
    return answer if exchange.plain else f"{chat.prefix}{answer}{chat.suffix}"


_ANOTHER = [
    "another one",
    "one more",
    "another",
    "again, but different",
    "tell me another one",
    "another one please",
    "give me another one",
    "a different one",
    "more",
    "one more please",
    "a new one",
]
_AGAIN = [
    "again",
    "repeat that",
    "say that again",
    "can you repeat that",
    "once more",
    "what did you say",
    "pardon",
    "say it again",
    "repeat your answer",
    "please repeat",
    "sorry, what",
    "do it again",
]
_ONWARD = [
    "go on",
    "continue",
    "keep going",
    "and then",
    "carry on",
    "more",
    "count on",
    "keep counting",
    "what comes next",
    "go on please",
]


def follow_up(rng: Random, chat: Chat, last: Exchange | None, said: str) -> tuple[str, str, Exchange] | None:
    """Write a follow-up question on the last exchange, with its answer and its topic; often None."""
    if last is None or rng.random() > (0.35 if last.onward else 0.15):
        return None
    roll = rng.random()
    if roll < 0.5 and last.another:
        others = (styled(chat, last, last.another(rng)) for _ in range(20))
        return phrase(rng, _ANOTHER), next((other for other in others if other != said), said), last
    if roll < 0.7 and last.onward:
        return phrase(rng, _ONWARD), last.onward, Exchange(ask="", answer=last.onward, plain=True)
    if len(said) < 400:
        return phrase(rng, _AGAIN), said, last
    return None


def _length(rng: Random) -> int:
    return rng.choice([1, 1, 1, 2, 2, 3, 3, 4, 5, 6, 8]) if rng.random() < 0.94 else rng.randint(8, 30)


def conversation(rng: Random) -> list[Message]:
    """Write a conversation of one to about thirty exchanges, with a system turn in a third of them."""
    chat, messages = Chat(), []
    if rng.random() < 0.33:
        messages.append(Message(role="system", content=system_turn(rng, chat)))
    last: Exchange | None = None
    said = ""
    for turn in range(_length(rng)):
        if follow := follow_up(rng, chat, last, said):
            ask, said, last = follow
        else:
            last = _next(rng, chat, first=turn == 0)
            ask, said = last.ask, styled(chat, last)
        messages += [Message(role="user", content=ask), Message(role="assistant", content=said)]
    return messages


def _next(rng: Random, chat: Chat, first: bool) -> Exchange:
    if first and rng.random() < 0.12:
        return talk.small_talk(rng, chat)
    if chat.memory and rng.random() < 0.3:
        return talk.recall(rng, chat)
    if chat.bot_name != "triolet-nano" and rng.random() < 0.25:
        return talk.identity(rng, chat)
    return rng.choices(_SKILLS, _WEIGHTS)[0](rng, chat)


def plain_text(rng: Random) -> list[Message]:
    """Write text without turns, for completion of a raw prompt."""
    roll, chat = rng.random(), Chat()
    if roll < 0.6:
        content = stories.story(rng, chat).answer
    elif roll < 0.75:
        content = stories.story_at_length(rng, chat).answer
    elif roll < 0.9:
        content = number.count(rng, chat).answer
    else:
        content = " ".join(
            skill(rng, chat).answer
            for skill in (facts.fact, facts.thing_fact, talk.about_triolet, facts.name_list)
        )
    return [Message(role="text", content=content)]


NEW_SHARE = 0.65
"""Share of chats with forms, tools and thinking."""


def new_chats(seed: int) -> Iterator[list[Message]]:
    """Yield endless chats with forms, tools and thinking."""
    rng = Random(seed)
    while True:
        yield _with_new(rng)


def _with_new(rng: Random) -> list[Message]:
    chats = rng.choices((form.CHATS, tool.CHATS, think.CHATS), (0.25, 0.62, 0.13))[0]
    return rng.choices(list(chats), list(chats.values()))[0](rng)


def conversations(seed: int) -> Iterator[list[Message]]:
    """Yield endless conversations that depend on `seed` alone."""
    rng = Random(seed)
    while True:
        roll = rng.random()
        if roll < NEW_SHARE:
            yield _with_new(rng)
        else:
            yield plain_text(rng) if rng.random() < 0.04 else conversation(rng)
