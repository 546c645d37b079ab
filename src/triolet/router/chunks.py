"""Continuation of a stream of chunks, those of chat completions and of completions, by another engine.

It is what `continuation` is for the events of responses: texts are compared and left out, ids and times stay.
"""

from __future__ import annotations

from typing import Any

import attrs

from triolet.router.continuation import Diverged, ExpectedText, SentText

Chunk = dict[str, Any]
Place = tuple[Any, ...]
"""Index of a choice, and the names down to a text in it."""


@attrs.define(eq=False)
class SentChunks:
    """What a client has been sent of one stream of chunks."""

    first: Chunk | None = None  # its id and time are those of the whole stream
    texts: dict[Place, SentText] = attrs.field(factory=dict)
    facts: dict[Place, Any] = attrs.field(factory=dict)  # what is told once, such as role and finish_reason
    num_logprobs: dict[int, int] = attrs.field(factory=dict)  # by choice
    num_token_ids: dict[int, int] = attrs.field(factory=dict)  # by choice
    has_usage: bool = False

    def note(self, chunk: Chunk) -> None:
        """Note that a chunk was sent."""
        self.first = self.first or chunk
        self.has_usage |= chunk.get("usage") is not None and not chunk.get("choices")
        for choice in chunk.get("choices", ()):
            for place, value in _values(choice):
                if _is_text(place):
                    self.texts.setdefault(place, SentText()).add(value)
                else:
                    self.facts[place] = value
            index = choice["index"]
            self.num_logprobs[index] = self.num_logprobs.get(index, 0) + len(_logprobs(choice))
            self.num_token_ids[index] = self.num_token_ids.get(index, 0) + len(choice.get("token_ids") or ())


@attrs.define(eq=False)
class ChunkContinuation:
    """Makes the chunks of another engine those that follow on what was sent."""

    sent: SentChunks
    _expected: dict[Place, ExpectedText] = attrs.field(init=False)
    _num_logprobs: dict[int, int] = attrs.field(init=False)
    _num_token_ids: dict[int, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._expected = {place: ExpectedText(text.whole()) for place, text in self.sent.texts.items()}
        self._num_logprobs = dict(self.sent.num_logprobs)
        self._num_token_ids = dict(self.sent.num_token_ids)

    def follow(self, chunk: Chunk) -> Chunk | None:
        """Return what the client is to be sent for a chunk of this engine; None for what it has.

        Raises:
            Diverged: the chunk differs from what was sent.
        """
        if "error" in chunk:  # ends the stream
            return chunk
        choices = [kept for choice in chunk.get("choices", ()) if (kept := self._choice(choice)) is not None]
        is_usage = chunk.get("usage") is not None and not chunk.get("choices")
        if not choices and not (is_usage and not self.sent.has_usage):
            return None
        first = self.sent.first or chunk
        return {**chunk, "id": first["id"], "created": first["created"], "choices": choices}

    def _choice(self, choice: Chunk) -> Chunk | None:
        kept: Chunk = {}
        has_news = False
        for place, value in _values(choice):
            if _is_text(place):
                rest = self._expected[place].rest_of(value) if place in self._expected else value
                has_news |= bool(rest)
                _put(kept, place, rest)
            elif place not in self.sent.facts:
                if place[-1] == "finish_reason":
                    self._check_end(choice["index"])
                has_news = True
                _put(kept, place, value)
            elif place[-1] == "finish_reason" and self.sent.facts[place] != value:
                raise Diverged(f"it ends with {value!r} where {self.sent.facts[place]!r} was sent")
            elif place[-1] == "index":  # of a tool call, which each piece of it names
                _put(kept, place, value)
        index, logprobs = choice["index"], _logprobs(choice)
        num_old = _taken(self._num_logprobs, index, len(logprobs))
        token_ids = choice.get("token_ids") or []
        new_ids = token_ids[_taken(self._num_token_ids, index, len(token_ids)) :]
        if not has_news and num_old == len(logprobs) and not new_ids:
            return None
        whole: Chunk = {"index": index, "finish_reason": None, **kept}
        whole.setdefault(*(("delta", {}) if "delta" in choice else ("text", "")))
        if "tool_calls" in whole.get("delta", {}):
            whole["delta"]["tool_calls"] = list(whole["delta"]["tool_calls"].values())
        if choice.get("logprobs") is not None:
            whole["logprobs"] = _without(choice["logprobs"], num_old)
        if choice.get("token_ids") is not None:
            whole["token_ids"] = new_ids
        return whole

    def _check_end(self, index: int) -> None:
        """Check that a choice, which ends, has all that was sent of it.

        Raises:
            Diverged: it is shorter.
        """
        for place, text in self._expected.items():
            if place[0] == index and not text.is_here:
                missing = text.whole[text.num_chars : text.num_chars + 40]
                raise Diverged(f"it ends where {missing!r} was sent")


def _values(choice: Chunk) -> list[tuple[Place, Any]]:
    """Return the texts and facts of a choice with their places."""
    index = choice["index"]
    found: list[tuple[Place, Any]] = []
    if "text" in choice:
        found.append(((index, "text"), choice["text"]))
    for name, value in (choice.get("delta") or {}).items():
        if name == "tool_calls":
            for call in value or ():
                at = (index, "delta", name, call["index"])
                function = call.get("function") or {}
                found.append(((*at, "index"), call["index"]))
                found += [((*at, key), call[key]) for key in ("id", "type") if key in call]
                found += [((*at, "function", key), one) for key, one in function.items()]
        elif value is not None:
            found.append(((index, "delta", name), value))
    found += [
        ((index, name), choice[name])
        for name in ("finish_reason", "stop_reason", "prompt_token_ids")
        if choice.get(name) is not None
    ]
    return found


def _is_text(place: Place) -> bool:
    return place[-1] in ("text", "content", "reasoning_content", "reasoning", "arguments", "refusal")


def _taken(rest: dict[int, int], index: int, number: int) -> int:
    """Return how many of a chunk's entries the client has already, and count them off."""
    num_old = min(number, rest.get(index, 0))
    rest[index] = rest.get(index, 0) - num_old
    return num_old


def _put(choice: Chunk, place: Place, value: Any) -> None:
    at = choice
    for name in place[1:-1]:
        at = at.setdefault(name, {})
    at[place[-1]] = value


def _logprobs(choice: Chunk) -> list[Any]:
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("content") or logprobs.get("tokens") or []


def _without(logprobs: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: value[number:] if isinstance(value, list) else value for name, value in logprobs.items()}
