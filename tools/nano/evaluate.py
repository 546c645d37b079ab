"""Ask triolet-nano questions, greedily, and print the share of right answers per skill.

    python tools/nano/evaluate.py [--model src/triolet/nano] [--per-skill N] [--show]

The questions come from the skills' own writers with a seed that training never uses; where a skill has few possible
questions, training has met the same ones. `HAND_WRITTEN` was watched while the mixture was adjusted, and a few of its
phrasings went into the training text, so its score flatters. An exact skill is right when every character is; the others are judged by a pattern.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from exchange import Chat, Skill
from skills import fact as facts
from skills import number, talk, text
from skills import story as stories
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[2] / "src" / "triolet" / "nano"
HELD_OUT_SEED = 1_000_003
EXACT: list[Skill] = [
    number.count, number.count_down, number.count_by, number.count_in_words, number.neighbour, number.add_up, number.double_or_half, number.story_sum,
    number.compare, number.in_words, text.spell, text.count_letters, text.backwards, text.letter_of, text.upper_case, text.alphabet, text.repeat, text.rhyme,
    facts.name_list, facts.calendar, facts.opposite, facts.animal_fact, facts.thing_fact, facts.fact,
]  # fmt: skip
PATTERNS: dict[Skill, str] = {
    number.too_big: r"too big|only do sums|small sums", facts.unknown: r"not know|more than I can|too small", facts.gibberish: r"not understand",
    stories.story: r"(?s)^(Once|Long ago|There was|In a).{150,}[.]$", stories.story_at_length: r"(?s)^.{700,}The end[.]$",
    talk.small_talk: r"^[A-Z].*[.!?]$", stories.joke: r"^W.*[?!] .*", text.sentence_with: r"^[A-Z].*[.]$", facts.name_some: r"^[A-Z].*[.]$",
}  # fmt: skip
Turns = list[tuple[str, str]]
# (system turn, [(question, pattern of a right answer), ...]); an earlier answer stays in the chat
HAND_WRITTEN: list[tuple[str, Turns]] = [
    ("", [("count from 1 to 20", r"^1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20\.$")]),
    ("", [("Count from 1 to 20, please.", r"^1, 2, .*, 19, 20\.$")]),
    ("", [("count to 200", "^" + ", ".join(map(str, range(1, 201))) + r"\.$")]),
    ("", [("Can you count from 10 down to 1?", r"^10, 9, 8, 7, 6, 5, 4, 3, 2, 1\.$")]),
    ("", [("Hello!", r"^(Hello|Hi)"), ("Who are you?", r"triolet-nano"), ("What is triolet?", r"Trio")]),
    ("", [("hi, i'm Zelda", r"Zelda"), ("what is 2 plus 2?", r"\b4\b"), ("what's my name?", r"Zelda")]),
    ("", [("My name is Bartholomew.", r"Bartholomew"), ("Tell me a joke.", r"\?"), ("Do you remember my name?", r"Bartholomew")]),
    ("", [("my favourite colour is green", r"(?i)green"), ("spell dog", r"^d-o-g\.$"), ("what is my favourite colour?", r"green")]),
    ("", [("tell me a joke", r"\?"), ("another one", r"\?")]),
    ("", [("What is 7 plus 5?", r"\b12\b"), ("again", r"\b12\b")]),
    ("", [("count to 10", r"9, 10\.$"), ("go on", r"^11, 12, .*20\.$")]),
    ("", [("Repeat after me: the quick brown fox jumps over the lazy dog", r"^the quick brown fox jumps over the lazy dog$")]),
    ("", [("repeat after me: structured concurrency is lovely", r"^structured concurrency is lovely$")]),
    ("", [("Say hello world", r"(?i)^hello world")]),
    ("", [("spell the word banana", r"^b-a-n-a-n-a\.$"), ("and spell concurrency", r"^c-o-n-c-u-r-r-e-n-c-y\.$")]),
    ("", [("Tell me a long story about a dragon.", r"(?s)dragon.{600,}The end\.$")]),
    ("", [("tell me a story about a robot named Max", r"(?s)robot.*Max")]),
    ("", [("What are the days of the week?", r"Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday")]),
    ("", [("name the months", r"January, February, .*November and December")]),
    ("", [("which day comes after wednesday", r"Thursday")]),
    ("", [("What is the opposite of cold?", r"hot")]),
    ("", [("Write a Python function to reverse a linked list", r"not know|too small|more than I can")]),
    ("", [("Who won the world cup in 1998?", r"not know|too small|more than I can")]),
    ("", [("thank you!", r"welcome|pleasure"), ("bye", r"(?i)bye|see you")]),
    ("You are a pirate.", [("hello", r"Arr"), ("What is the capital of France?", r"Arr.*Paris")]),
    ("Answer briefly.", [("What is the capital of Italy?", r"^Rome\.$"), ("what is 3 plus 4", r"^7\.$")]),
    ("Your name is Marvin.", [("What is your name?", r"Marvin"), ("who are you", r"Marvin")]),
    ("The user's name is Ada.", [("What is my name?", r"Ada")]),
    ("You are a helpful assistant.", [("how are you?", r"(?i)fine|well"), ("What can you do?", r"count")]),
]  # fmt: skip


class Nano:
    """Model behind its chat template, decoding greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokens = 0

    def answer(self, messages: list[dict[str, str]]) -> str:
        """Return the next assistant turn; it ends with "[cut]" if the model did not stop by itself."""
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        room = 2048 - ids["input_ids"].shape[1]
        with torch.inference_mode():
            out = self.model.generate(
                **ids,
                max_new_tokens=min(1500, room),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
            )
        new = out[0, ids["input_ids"].shape[1] :]
        self.tokens += len(new)
        stopped = int(new[-1]) == self.tokenizer.eos_token_id
        said: str = self.tokenizer.decode(new, skip_special_tokens=True)
        return said if stopped else said + "[cut]"


def made_questions(nano: Nano, per_skill: int, show: bool) -> dict[str, list[bool]]:
    """Score every skill on questions that its writer makes from the held-out seed."""
    scores: dict[str, list[bool]] = defaultdict(list)
    for skill in [*EXACT, *PATTERNS]:
        rng = Random(HELD_OUT_SEED)
        for _ in range(per_skill):
            exchange = skill(rng, Chat())
            said = nano.answer([{"role": "user", "content": exchange.ask}])
            right = (
                said == exchange.answer if skill in EXACT else re.search(PATTERNS[skill], said) is not None
            )
            scores[skill.__name__].append(right)
            if show and not right:
                print(
                    f"  {skill.__name__}: {exchange.ask!r} -> {said[:200]!r}, not {exchange.answer[:200]!r}"
                )
    return scores


def hand_written_questions(nano: Nano, show: bool) -> list[bool]:
    """Score the hand-written chats, turn by turn."""
    scores = []
    for system, turns in HAND_WRITTEN:
        messages = [{"role": "system", "content": system}] if system else []
        for question, pattern in turns:
            messages.append({"role": "user", "content": question})
            said = nano.answer(messages)
            messages.append({"role": "assistant", "content": said})
            scores.append(re.search(pattern, said) is not None and not said.endswith("[cut]"))
            if show and not scores[-1]:
                print(f"  hand-written: {system!r} {question!r} -> {said[:300]!r}")
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate triolet-nano.")
    parser.add_argument("--model", type=Path, default=FOLDER, help="folder of the model")
    parser.add_argument("--per-skill", type=int, default=20, help="questions of every skill")
    parser.add_argument("--show", action="store_true", help="show the wrong answers")
    options = parser.parse_args()
    nano = Nano(options.model)
    scores = made_questions(nano, options.per_skill, options.show)
    scores["hand-written chats"] = hand_written_questions(nano, options.show)
    for name, results in scores.items():
        print(f"{name:22} {sum(results):4} of {len(results):4}  {100 * sum(results) / len(results):5.1f} %")
    print(f"{nano.tokens} tokens generated")


if __name__ == "__main__":
    main()
