"""Asks for the class of a text: its sentiment, topic, intent, urgency."""

from collections.abc import Callable
from random import Random
from typing import Any

import words as w
from chats import form_values as some
from chats.form_cases import Case
from chats.form_keys import KINDS, Node, Schema, of_nodes
from phrasing import capital, phrase

# fmt: off
_FELT = {
    "positive": ["I love this {x}!", "The {x} is great.", "What a wonderful {x}!", "Best {x} ever.", "I am very happy with the {x}.", "The {x} works perfectly.", "Great {x}, thank you!", "I really like the {x}.", "Excellent {x} and fast delivery.", "The {x} is beautiful and I enjoy it every day.", "Amazing {x}!", "Such a good {x}.", "{n} was so kind and helpful.", "I would buy the {x} again.", "This made my day!"],
    "negative": ["I hate this {x}.", "The {x} is terrible.", "What a bad {x}!", "Worst {x} ever.", "I am not happy with the {x}.", "The {x} broke after one day.", "Awful {x}, never again.", "The {x} does not work.", "Very slow and the {x} was dirty.", "I want my money back for the {x}.", "Horrible {x}!", "Such a poor {x}.", "{n} was rude to me.", "The {x} was a waste of money.", "This is so disappointing."],
    "neutral": ["The {x} is okay.", "The {x} arrived on {d}.", "It is a {x}.", "The {x} is {c}.", "I bought the {x} on {d}.", "The {x} is neither good nor bad.", "The {x} is average.", "{n} has a {x}.", "The shop opens on {d}.", "It is an ordinary {x}."],
}
_TOPICS = {
    "sports": ["{n} won the tennis match.", "The team scored three goals.", "The race starts on {d}.", "{c} beat {k} two to one."], "tech": ["The new phone has a better camera.", "{n} writes software.", "The server needs more memory.", "This laptop has a fast chip."],
    "food": ["The soup needs more salt.", "{n} baked a cake.", "Try the pasta with cheese.", "The pizza was hot."], "travel": ["We flew to {c}.", "The train to {c} leaves at noon.", "{n} booked a hotel in {c}.", "Our holiday in {c} was long."],
    "music": ["{n} plays the piano.", "The band has a new album.", "The concert was loud.", "She sings in a choir."], "health": ["The doctor gave me pills.", "I have a headache.", "Sleep is good for you.", "{n} has a fever."],
    "money": ["The bank raised the interest.", "My salary is paid on {d}.", "Shares fell today.", "{n} pays her taxes."], "weather": ["It will rain on {d}.", "The sun shines in {c}.", "A storm is coming.", "It snowed in {c}."],
}
_INTENTS = {
    "refund": ["I want my money back.", "Please refund my order.", "Can I return the {x}?"], "shipping": ["Where is my parcel?", "When will my {x} arrive?", "My order has not come yet."], "account": ["I forgot my password.", "How do I change my email?", "I cannot log in."],
    "greeting": ["Hello there!", "Good morning.", "Hi, how are you?"], "complaint": ["This is the worst service!", "I am very angry about the {x}.", "The {x} is broken again."], "order": ["I want to buy a {x}.", "Please send me two of the {x}.", "Can I order a {x}?"],
    "goodbye": ["Bye!", "See you on {d}.", "Goodbye and thanks."], "booking": ["A table for two on {d}, please.", "I need a room in {c}.", "Book a flight to {c}."],
}
_URGENT = {
    "high": ["The server is down!", "Fire in the {p}!", "Nobody can log in, help now!", "We lose money every minute.", "It is an emergency."], "low": ["No hurry, but the {x} could be nicer.", "When you have time, look at the {x}.", "A small typing mistake on the page.", "It can wait until next month."],
    "medium": ["The {x} is a bit slow since {d}.", "Please fix the {x} this week.", "Sometimes the page does not load."],
}
_SPAM = {"spam": ["You have won a million dollars! Click here!", "Buy cheap {x} now!!!", "Free money, click now!", "Claim your prize today!"], "ham": ["See you on {d}, {n}.", "The meeting is on {d}.", "Can you send me the {x}?", "Thanks for the {x}."]}
_EMOTIONS = {"joy": ["I am so happy today!", "Hooray, we won!", "What a lovely party!"], "anger": ["I am furious!", "Stop shouting at me!", "He broke my {x} on purpose!"], "sadness": ["I miss {n} so much.", "I cried all night.", "My {x} is lost forever."], "fear": ["I am afraid of the dark.", "There is a noise in the {p}!", "I am scared of the {x}."]}
_SORTS: list[tuple[dict[str, list[str]], str, str, str]] = [
    (_FELT, "sentiment|sentiment|label|polarity|feeling|class|classification|tone", "sentiment", "classify the sentiment;what is the sentiment;is this positive or negative;sentiment analysis;analyze the sentiment;how does the writer feel;rate the sentiment of this text;what is the tone of this review"),
    (_TOPICS, "topic|category|label|subject|class", "topic", "classify the topic;what is this about;which topic is this;choose a category;categorize this;what is the topic"),
    (_INTENTS, "intent|label|category|intention|type", "intent", "classify the intent;what does the user want;what is the intent;find the intent;classify this message"),
    (_URGENT, "priority|urgency|severity|level", "priority", "how urgent is this;what is the priority;classify the priority;rate the urgency;triage this message"),
    (_SPAM, "label|class|category|type", "label", "is this spam;classify this mail;spam or ham;spam filter"),
    (_EMOTIONS, "emotion|feeling|mood|label", "emotion", "which emotion is this;what is the emotion;classify the emotion;detect the emotion"),
]
# fmt: on


def classification(rng: Random) -> Case:
    """Choose the class of a text."""
    texts, names, noun, asks = rng.choices(_SORTS, [4, 2, 2, 1.5, 1, 1])[0]
    labels = list(texts)
    if len(labels) > 3:
        labels = rng.sample(labels, rng.randint(3, min(5, len(labels))))
    elif texts is _FELT and rng.random() < 0.25:
        labels = ["positive", "negative"]
    styles: list[Callable[[str], str]] = [str, str.upper, capital]
    cased = rng.choices(styles, [8, 1, 1])[0]
    key = rng.choice(names.split("|"))
    with_share, with_text, with_reason = rng.random() < 0.25, rng.random() < 0.1, rng.random() < 0.12
    bare = rng.random() < 0.07
    as_flag = texts is _SPAM and rng.random() < 0.5
    options = [cased(label) for label in labels]
    if rng.random() < 0.3:
        rng.shuffle(options)
    schema: Schema = {"type": "string", "enum": options} if rng.random() < 0.7 else {"enum": options}
    choice = Node(schema, some.one_of(options))
    nodes = {"text": KINDS["sentence"](rng)} if with_text else {}
    if as_flag:
        key = "is spam"
        choice = KINDS["bool"](rng)
    nodes[key] = choice
    score_key = rng.choice(["confidence", "score", "probability"])
    if with_share:
        nodes[score_key] = KINDS["share"](rng)
    if with_reason:
        nodes["reason"] = KINDS["sentence"](rng)
    form = of_nodes(rng, nodes)
    form.schema["required"] = list(nodes)

    def classified(rng: Random, ask: str, in_json: bool) -> Case:
        label = rng.choice(labels)
        said = rng.choice(texts[label]).format(
            x=rng.choice(some.PRODUCTS), n=rng.choice(w.NAMES), d=rng.choice(w.DAYS), c=rng.choice(w.CITIES), k=rng.choice(w.CITIES), p=rng.choice(w.PLACES))  # fmt: skip
        value: dict[str, Any] = {"text": said} if with_text else {}
        value[key] = label == "spam" if as_flag else cased(label)
        if with_share:
            value[score_key] = nodes[score_key].make(rng)
        if with_reason:
            reason = (
                "The text is" if texts is _FELT else "It is about" if texts is _TOPICS else "It sounds like"
            )
            value["reason"] = f"{reason} {label}."
        return Case(
            ask=ask,
            text=said,
            value=value[key] if bare else value,
            form=choice if bare else form,
            title=noun,
            in_json=in_json,
            again=lambda rng: classified(rng, "", True),
        )

    ask = phrase(rng, asks.split(";"))
    in_json = rng.random() < 0.4
    if in_json:
        ask = f"{ask.rstrip('.!?')}{rng.choice([' as JSON', ', answer in JSON', '. Answer in JSON', ' (JSON)'])}"
    elif rng.random() < 0.3 and not as_flag:
        ask = f"{ask.rstrip('.!?')}: {rng.choice([' or ', ', ', '/']).join(options)}"
    return classified(rng, ask, in_json)
