"""Tool-call formats of model families, each a small automaton; `TOOL_FORMATS` has them by name.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call; Hermes, Qwen2.5, Qwen3
    llama3_json  {"name": ..., "parameters": {...}}, the whole answer; several with ; between them; Llama 3.1 and later
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}, once per call
    gpt_oss      <|channel|>commentary to=functions.name<|message|>{...}<|call|>; see `harmony`

Marked text that is not a call is returned as text, so nothing of the answer is lost. A call whose arguments have begun
cannot be taken back; if it turns out to be malformed, it ends and is marked invalid.

Source: the formats are those of the models' own chat templates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar, Protocol

from triolet.core.tools.automaton import Automaton, State
from triolet.core.tools.calls import CallWriter, ObjectCall
from triolet.core.tools.events import AnswerEvent, TextPiece
from triolet.core.tools.harmony import HarmonyFormat
from triolet.core.tools.reasoning import HARMONY
from triolet.core.tools.scanning import WHITESPACE, ValueScanner, split_at_marker

MAX_NAME_CHARS = 64


class ToolFormat(Protocol):
    """Parser that finds the calls in an answer, the same ones however the text is cut into pieces."""

    def feed(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of text."""
        ...

    def finish(self) -> list[AnswerEvent]:
        """End the answer: return the text held back, and end the call that is open."""
        ...


class CallAutomaton(Automaton):
    """Base of the formats.

    Args:
        names: of the functions that may be called.
        barred: names of those that may not.
    """

    MARKS: ClassVar[tuple[str, ...]]  # what the format writes around calls
    OPENING: ClassVar[str]  # the one before calls
    CLOSING: ClassVar[str | None] = None  # the one behind each

    def __init__(self, names: Collection[str] = (), barred: Collection[str] = ()) -> None:
        super().__init__(self._in_text)
        self._names, self._barred = frozenset(names), frozenset(barred)
        self._lead: list[str] = []  # text that announced a call, in pieces; returned as text if none follows
        self._num_calls = 0
        self._call: ObjectCall | None = None

    def finish(self) -> list[AnswerEvent]:
        call, self._call = self._call, None
        if call is not None:
            return call.end() if call.has_begun else [TextPiece(call.raw)]
        if self._state == self._behind_broken_call:
            self._held = ""  # the beginning of a mark
        return _text("".join([*self._lead, self._held]))

    def _in_text(self) -> list[AnswerEvent] | None:
        """Read text outside of calls."""
        raise AssertionError("every format begins somewhere")

    def _behind_call(self) -> list[AnswerEvent] | None:
        """Read on after a complete call."""
        raise AssertionError("every format goes on somewhere")

    def _behind_broken_call(self) -> list[AnswerEvent] | None:
        """Drop what follows a malformed call up to a mark: it is neither text nor a call."""
        marks = [self.OPENING] if self.CLOSING is None else [self.OPENING, self.CLOSING]
        _, marker, self._held = split_at_marker(self._held, marks)
        if marker is None:
            return None
        if marker == self.OPENING:
            self._held = marker + self._held
        self._state = self._in_text
        return []

    def _open_call(self, *, needs_arguments: bool = False) -> list[AnswerEvent]:
        self._call = ObjectCall(
            self._num_calls, "".join(self._lead), is_name=self._is_name, needs_arguments=needs_arguments
        )
        self._lead, self._state = [], self._in_call
        return []

    def _is_name(self, name: str) -> bool:
        """Return True if the name can be that of a function; after a marker every one can that is not barred."""
        return bool(name) and name not in self._barred

    def _in_call(self) -> list[AnswerEvent] | None:
        call = self._call
        assert call is not None
        num_used, events = call.take(self._held)
        self._held = self._held[num_used:]
        if call.is_whole or call.is_broken:
            self._call = None
            # Nothing was told of it yet, so it is text after all.
            if not call.has_begun:
                self._state = self._in_text
                return _text(call.raw)
            self._num_calls += 1
            self._state = self._behind_call if call.is_whole else self._behind_broken_call
            events += call.end()
        return events

    def _give_back(self) -> list[AnswerEvent]:
        """Return the text that announced a call, if none follows."""
        lead, self._lead, self._state = self._lead, [], self._in_text
        return _text("".join(lead))

    def _lead_on(self) -> bool:
        """Add whitespace to the text that announced a call; return False if no other text is left."""
        bare = self._held.lstrip(WHITESPACE)
        self._lead.append(self._held[: len(self._held) - len(bare)])
        self._held = bare
        return bool(bare)

    def _skip(self, chars: str) -> bool:
        """Drop these characters at the start of the held text; return False if nothing is left."""
        self._held = self._held.lstrip(chars)
        return bool(self._held)

    def _find(self, marker: str, then: State) -> list[AnswerEvent] | None:
        """Pass text on up to a marker, and continue with another state behind it."""
        before, found, self._held = split_at_marker(self._held, [marker])
        if found is not None:
            self._lead, self._state = [marker], then
            return _text(before)
        return _text(before) or None


class HermesFormat(CallAutomaton):
    """Format `hermes`; see the module's docstring."""

    OPENING, CLOSING = MARKS = ("<tool_call>", "</tool_call>")

    def _in_text(self) -> list[AnswerEvent] | None:
        return self._find(self.OPENING, self._open_call)

    def _behind_call(self) -> list[AnswerEvent] | None:
        # The whole mark waits, too: it is dropped with what follows it, or where the answer ends.
        if not self._skip(WHITESPACE) or self.CLOSING.startswith(self._held):
            return None
        self._held = self._held.removeprefix(self.CLOSING)
        self._state = self._in_text
        return []

    def finish(self) -> list[AnswerEvent]:
        if self._state == self._behind_call:
            self._held = ""  # the beginning of a mark
        return super().finish()


class Llama3JsonFormat(CallAutomaton):
    """Format `llama3_json`. Without a marker, only an object that names one of the request's functions is a call."""

    OPENING = "<|python_tag|>"
    MARKS = (OPENING,)

    def __init__(self, names: Collection[str] = (), barred: Collection[str] = ()) -> None:
        super().__init__(names, barred)
        self._state = self._at_beginning

    def _is_name(self, name: str) -> bool:
        return name in self._names if self._names else super()._is_name(name)

    def _at_beginning(self) -> list[AnswerEvent] | None:
        if not self._lead_on() or (self._held != self.OPENING and self.OPENING.startswith(self._held)):
            return None
        return self._open_call(needs_arguments=True) if self._held[0] == "{" else self._give_back()

    def _in_text(self) -> list[AnswerEvent] | None:
        return self._find(self.OPENING, self._behind_marker)

    def _behind_marker(self) -> list[AnswerEvent] | None:
        return self._open_call(needs_arguments=True)

    def _behind_call(self) -> list[AnswerEvent] | None:
        if not self._skip(WHITESPACE + ";"):
            return None
        self._state = self._at_beginning
        return []


class MistralFormat(CallAutomaton):
    """Format `mistral`, in both of its forms."""

    OPENING, ARGS, CALL_ID = MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, names: Collection[str] = (), barred: Collection[str] = ()) -> None:
        super().__init__(names, barred)
        self._value = ValueScanner()
        self._writer: CallWriter | None = None

    def _in_text(self) -> list[AnswerEvent] | None:
        return self._find(self.OPENING, self._behind_marker)

    def _behind_marker(self) -> list[AnswerEvent] | None:
        if not self._lead_on():
            return None
        if self._held[0] == "[":
            self._lead.append("[")
            self._held = self._held[1:]
            self._state = self._before_item
        elif self._held[0] == "{":
            self._open_call()
        else:
            self._state = self._in_name
        return []

    # ------------------------------------------------------------------------------ a list of objects

    def _before_item(self) -> list[AnswerEvent] | None:
        if not self._lead_on():
            return None
        return self._open_call() if self._held[0] == "{" else self._give_back()

    def _behind_call(self) -> list[AnswerEvent] | None:
        if not self._skip(WHITESPACE + ",]"):
            return None
        if self._held[0] == "{":
            return self._open_call()
        self._state = self._in_text
        return []

    # ------------------------------------------------------------------------ a name, then an object

    def _in_name(self) -> list[AnswerEvent] | None:
        name, marker, rest = split_at_marker(self._held, [self.ARGS, self.CALL_ID, "{"])
        if not _may_be_name(name):
            return self._give_back()
        # Newer templates put an id between name and arguments.
        if marker == self.CALL_ID:
            call_id, marker, rest = split_at_marker(rest, [self.ARGS, "{"])
            if not _may_be_name(call_id):
                return self._give_back()
        if marker is None:
            return None
        if not self._is_name(name):
            return self._give_back()
        self._lead, self._held = [], "{" + rest if marker == "{" else rest
        self._writer, self._value = CallWriter(self._num_calls, name), ValueScanner()
        self._state = self._before_arguments
        return self._writer.begin()

    def _before_arguments(self) -> list[AnswerEvent] | None:
        if not self._skip(WHITESPACE):
            return None
        self._state = self._in_arguments
        return []

    def _in_arguments(self) -> list[AnswerEvent] | None:
        assert self._writer is not None
        end = self._value.take(self._held, 0)
        events = self._writer.arguments(self._held[:end])
        self._held = self._held[end:]
        if self._value.is_over or self._value.is_broken:
            events += self._end_arguments()
            self._state = self._in_text if self._value.is_over else self._behind_broken_call
        return events

    def _end_arguments(self) -> list[AnswerEvent]:
        writer, self._writer = self._writer, None
        self._num_calls += 1
        return writer.end() if writer is not None else []

    def finish(self) -> list[AnswerEvent]:
        if self._state == self._behind_call:
            self._held = ""
        return self._end_arguments() if self._writer is not None else super().finish()


def _may_be_name(text: str) -> bool:
    """Return True if this is a function's name, or the beginning of one."""
    return len(text) <= MAX_NAME_CHARS and all(char.isalnum() or char in "_-." for char in text)


def _text(text: str) -> list[AnswerEvent]:
    return [TextPiece(text)] if text else []


TOOL_FORMATS: Mapping[str, type[CallAutomaton | HarmonyFormat]] = {
    "hermes": HermesFormat,
    "llama3_json": Llama3JsonFormat,
    "mistral": MistralFormat,
    HARMONY: HarmonyFormat,
}

# Of calls and of reasoning: the tokenizers of Llama 3, of Mistral and of gpt-oss have these among their special tokens.
SPECIAL_MARKS = frozenset(
    {*Llama3JsonFormat.MARKS, *MistralFormat.MARKS, "[THINK]", "[/THINK]", *HarmonyFormat.MARKS}
)
