"""The tokenizer: byte-level BPE with single digits, and how a conversation becomes tokens."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = [PAD, SYSTEM, USER, ASSISTANT, END]
TOOL = "<|tool|>"
CALL, CALL_END, THINK, THINK_END = "<tool_call>", "</tool_call>", "<think>", "</think>"
MARKS = [CALL, CALL_END, THINK, THINK_END]
"""Text of an answer with a meaning of its own: one token each, but not special, so that decoding shows it."""
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL, "text": ""}
# A digit stands alone, so that numbers are read digit by digit; ", " between two numbers is one token.
_PIECES = r", (?=\p{N})|\p{N}|'(?:s|t|re|ve|m|ll|d)\b| ?\p{L}+|\n+| ?[^\s\p{L}\p{N}]+|\s"
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


@attrs.frozen(kw_only=True)
class Message:
    """One turn; the role "text" stands for text without turns.

    Attributes:
        given: beginning of an answer that stands in the prompt already, as `<think>` where thinking is switched on.
    """

    role: str
    content: str
    given: str = ""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what the system turn says of functions, as the chat template writes it.

    Args:
        tools: functions, each `{"name": ..., "description": ..., "parameters": JSON schema}`.
    """
    return "Tools:\n" + "\n".join(map(_signature, tools))


def _signature(tool: Mapping[str, Any]) -> str:
    schema = tool.get("parameters") or {}
    required = schema.get("required", ())
    parameters = ", ".join(
        f"{name}{'' if name in required else '?'}: {_type_of(value)}"
        for name, value in schema.get("properties", {}).items()
    )
    description = f": {tool['description']}" if tool.get("description") else ""
    return f"{tool['name']}({parameters}){description}"


def _type_of(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "|".join(json.dumps(value) for value in schema["enum"])
    if "anyOf" in schema:
        return "|".join(_type_of(each) for each in schema["anyOf"])
    kind = schema.get("type", "object" if "$ref" in schema else "any")
    return kind if isinstance(kind, str) else "|".join(kind)


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a call, as the chat template writes it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL}\n{call}\n{CALL_END}"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train the byte-level BPE; all 256 bytes are in it, so there is no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(MARKS),
        special_tokens=[*SPECIAL, TOOL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    between_marks = (part for text in texts for part in _between_marks(text))
    tokenizer.train_from_iterator(between_marks, trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    return tokenizer


def _between_marks(text: str) -> list[str]:
    return re.split("|".join(MARKS), text)


def extend_tokenizer(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer with more tokens: the role of tools, the marks, and merges learned from `texts`.

    All tokens keep their ids. The new merges come after the old ones, so a text that has no new token is encoded as before.
    One that has as many tokens is returned as it is.
    """
    if tokenizer.get_vocab_size() == vocab_size:
        return tokenizer
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    added = [AddedToken(TOOL, special=True), *(AddedToken(mark, special=False) for mark in MARKS)]
    first = len(vocab)
    next_id = first + len(added)
    pieces: Counter[tuple[str, ...]] = Counter()
    assert tokenizer.pre_tokenizer is not None
    words = Counter(
        word
        for text in texts
        for part in _between_marks(text)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(part)
    )
    for word, count in words.items():
        pieces[tuple(token.value for token in tokenizer.model.tokenize(word))] += count
    while next_id < vocab_size:
        pairs: Counter[tuple[str, str]] = Counter()
        for piece, count in pieces.items():
            for pair in pairwise(piece):
                pairs[pair] += count
        if not pairs:
            raise ValueError(f"the texts have too few words for a vocabulary of {vocab_size} tokens")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(list(best))
        token = "".join(best)
        if token not in vocab:
            vocab[token] = next_id
            next_id += 1
        pieces = _merged(pieces, best)
    state["added_tokens"] += [
        {
            "id": first + number,
            "content": token.content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token.special,
        }
        for number, token in enumerate(added)
    ]
    for number, token in enumerate(added):
        vocab[token.content] = first + number
    return Tokenizer.from_str(json.dumps(state))


def _merged(pieces: Counter[tuple[str, ...]], pair: tuple[str, str]) -> Counter[tuple[str, ...]]:
    """Join the pair wherever it stands in the pieces."""
    joined: Counter[tuple[str, ...]] = Counter()
    for piece, count in pieces.items():
        parts: list[str] = []
        for token in piece:
            if parts and (parts[-1], token) == pair:
                parts[-1] += token
            else:
                parts.append(token)
        joined[tuple(parts)] += count
    return joined


def encode(
    tokenizer: Tokenizer, batch: Sequence[Sequence[Message]], user_weight: float
) -> list[tuple[list[int], list[float]]]:
    """Convert conversations to tokens, with the weight of each token in the loss.

    Args:
        user_weight: weight of what users and system turns say; the assistant's words and its end token weigh 1.
    """
    flat = [message for conversation in batch for message in conversation]
    encoded = iter(tokenizer.encode_batch([f"{ROLES[m.role]}{m.content}{END}" for m in flat]))
    rows = []
    for conversation in batch:
        tokens: list[int] = []
        weights: list[float] = []
        for message in conversation:
            ids = next(encoded).ids
            tokens += ids
            if message.role == "text":
                weights += [user_weight] + [1.0] * (len(ids) - 1)
            elif message.role == "assistant":
                num_given = 1 + (len(tokenizer.encode(message.given).ids) if message.given else 0)
                weights += [0.0] * num_given + [1.0] * (len(ids) - num_given)
            else:
                weights += [user_weight] * len(ids)
        rows.append((tokens, weights))
    return rows
