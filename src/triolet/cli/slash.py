"""Commands of the chat, which begin with a `/`, carried out on its state.

Nothing is written here; an `Effect` holds the lines to write and the next step of the chat.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import click

from triolet.cli.conversation import ChatFileError, ChatHistory, SavedChat, attached_text, file_text
from triolet.cli.models.presets import Preset
from triolet.cli.models.sampling import SAMPLING_OPTIONS, kind_of, with_sampling_values
from triolet.cli.options import text_or_file
from triolet.core.request.params import SamplingParams
from triolet.core.tools.answer import THINKING_SWITCHES
from triolet.errors import InvalidParams

MAY_BE_NONE: Final = frozenset(option.name for option in SAMPLING_OPTIONS if option.may_be_none)
FILTERS: Final = ("top_p", "top_k", "min_p")  # of what is drawn from; greedy sampling ignores them
_COMMAND: Final = re.compile(r"/[a-z?]*(\s|$)", re.IGNORECASE)  # "/usr/bin/env is what?" is a question
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_ESCAPES: Final = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


class Next(enum.Enum):
    """Next step of the chat after a command."""

    ASK = enum.auto()
    REPLY = enum.auto()
    LEAVE = enum.auto()
    EDIT = enum.auto()  # the last message, in an editor
    FORK = enum.auto()  # several replies to the last message
    LIST_MODELS = enum.auto()
    SWITCH_MODEL = enum.auto()


class ThinkMode(enum.Enum):
    """Reasoning of the model: left to it and shown, asked for, switched off, or not shown."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"
    HIDE = "hide"

    @property
    def wish(self) -> bool | None:
        """True or False to ask the model to reason or not to; None to leave it to the model."""
        return {ThinkMode.ON: True, ThinkMode.OFF: False}.get(self)


MAX_FORKS: Final = 4
THINKING_WORDS: Final = {
    ThinkMode.AUTO: "The model reasons as it likes, and its reasoning is shown.",
    ThinkMode.ON: "The model is asked to reason, and its reasoning is shown.",
    ThinkMode.OFF: "The model is asked not to reason.",
    ThinkMode.HIDE: "Reasoning is not shown; /think show shows that of the last reply.",
}


@attrs.frozen
class Effect:
    """Result of a command: lines to show, or an error, and the next step."""

    say: tuple[str, ...] = ()
    complaint: str | None = None
    next: Next = Next.ASK
    argument: str = ""  # of the next step: a text to edit, a number of replies, the name of a model


@attrs.define(kw_only=True)
class ChatState:
    """State of the chat that commands change."""

    conversation: ChatHistory  # history so far
    defaults: SamplingParams  # sampling parameters of the model
    knows_defaults: bool = True  # False if a server has defaults of its own
    sampling: dict[str, Any] = attrs.field(factory=dict)  # values of the user that replace them, by field
    stats: bool = True  # True if the line of timings is shown
    model: str = ""  # name of the model
    can_think: bool = True  # True if the model can be asked to reason or not to
    thinking: ThinkMode = ThinkMode.AUTO
    last_reasoning: str = ""  # of the last reply
    forks: list[str] = attrs.field(factory=list)  # replies to the last message that one can be picked from

    def params(self) -> SamplingParams:
        """Return the sampling parameters of the next reply."""
        return attrs.evolve(self.defaults, **self.sampling)

    def saved(self) -> SavedChat:
        """Return what the file of this chat holds."""
        return SavedChat(history=self.conversation, model=self.model, sampling=self.sampling)


def is_command(text: str) -> bool:
    """Return True if `text` is for the chat rather than for the model: it begins with a / and a word of letters."""
    return _COMMAND.match(text) is not None


def run(text: str, state: ChatState) -> Effect:
    """Carry out one command line; upper and lower case mean the same in the command's name."""
    word, argument = [*text.split(maxsplit=1), ""][:2]
    name = word.lower()
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        # Not sent to the model, as in other terminal chats: it is more often a typing error than a message.
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        as_text = "/help lists the commands; with a space before the / it is a message"
        hint = f"did you mean {close[0]}?" if close else as_text
        return Effect(complaint=f"unknown command {word}; {hint}")
    return command.run(state, argument.strip())


def take_settings(preset: Preset, state: ChatState) -> tuple[str, ...]:
    """Let the sampling and the system prompt of a preset hold from here on; return the lines that say so."""
    warned: tuple[str, ...] = ()
    if preset.sampling:
        sampling = {**state.sampling, **preset.sampling}
        state.sampling, warned = with_sampling_values(state.defaults, sampling)
    if preset.system is not None:
        state.conversation.system = preset.system
    taken = ["sampling"] * bool(preset.sampling) + ["system prompt"] * (preset.system is not None)
    told = (f"From the next message on with the preset's {' and '.join(taken)}.",) if taken else ()
    return (*(f"  {sentence}" for sentence in warned), *told)


# ----------------------------------------------------------------------------------------- commands


def _help(state: ChatState, argument: str) -> Effect:
    lines = [(command.usage, command.help) for command in COMMANDS.values()]
    lines += [
        ('"""', "begins and ends a message of several lines"),
        ("\\", "at the end of a line: the message goes on in the next"),
        (" /", "a space before the /: a message, and no command"),
        ("Ctrl-G", "opens the line that is being typed in an editor"),
        ("Ctrl-R", "searches earlier messages; Enter takes what was found"),
        ("Ctrl-C", "stops the reply, keeping what there is of it"),
        ("Ctrl-D", "leaves"),
    ]
    width = max(len(usage) for usage, _ in lines)
    return Effect(say=tuple(f"  {usage:<{width}}  {text}" for usage, text in lines))


def _clear(state: ChatState, argument: str) -> Effect:
    state.conversation.exchanges.clear()
    state.conversation.attached.clear()
    state.forks.clear()
    kept = "; the system prompt stays" if state.conversation.system else ""
    return Effect(say=(f"A new conversation{kept}.",))


def _regen(state: ChatState, argument: str) -> Effect:
    if not state.conversation.exchanges:
        return Effect(complaint="there is no reply to make again")
    params = state.params()
    if params.is_greedy:
        return Effect(
            say=("At temperature 0 the reply is the same; /set temperature 0.8 varies it.",), next=Next.REPLY
        )
    if params.seed is not None:
        return Effect(
            say=("With a fixed seed the reply is the same; /set seed none varies it.",), next=Next.REPLY
        )
    return Effect(next=Next.REPLY)


def _undo(state: ChatState, argument: str) -> Effect:
    exchange = state.conversation.take_back()
    state.forks.clear()
    if exchange is None:
        return Effect(complaint="there is nothing to take back")
    return Effect(say=(f"Took back: {_shortened(exchange.question)}",))


def _system(state: ChatState, argument: str) -> Effect:
    conversation = state.conversation
    if not argument:
        return Effect(
            say=(conversation.system or "No system prompt; /system TEXT sets one, /system @FILE reads it.",)
        )
    if argument == "none":
        conversation.system = None
        return Effect(say=("No system prompt from here on.",))
    try:
        conversation.system = text_or_file(argument, "/system")
    except click.UsageError as error:
        return Effect(complaint=error.message)
    return Effect(say=("The system prompt holds from the next message on.",))


def _set(state: ChatState, argument: str) -> Effect:
    word, text = [*argument.split(maxsplit=1), "", ""][:2]
    name = word.lower().replace("-", "_")
    kinds: dict[str, Callable[[str], Any]] = {option.name: kind_of(option) for option in SAMPLING_OPTIONS}
    if not name:
        return Effect(say=tuple(_setting(state, known) for known in kinds))
    if name not in kinds:
        close = difflib.get_close_matches(name, kinds, n=1)
        hint = f"did you mean {close[0]}?" if close else "it knows " + ", ".join(kinds)
        return Effect(complaint=f"/set does not know {name}; {hint}")
    warned: tuple[str, ...] = ()
    if text:
        try:
            warned = _change(state, name, text, kinds[name])
        except InvalidParams as error:
            return Effect(complaint=str(error))
        except ValueError:
            kind = "a whole number" if kinds[name] is int else "a number"
            or_word = ", none or default" if name in MAY_BE_NONE else " or default"
            return Effect(complaint=f"{name} must be {kind}{or_word}; got {text!r}")
    return Effect(say=(*(f"  {sentence}" for sentence in warned), _setting(state, name)))


def _stats(state: ChatState, argument: str) -> Effect:
    choices = {"on": True, "off": False, "": not state.stats}
    if argument.lower() not in choices:
        return Effect(complaint=f"/stats takes on or off; got {argument}")
    state.stats = choices[argument.lower()]
    return Effect(say=(f"Timings are {'shown' if state.stats else 'not shown'} after each reply.",))


def _save(state: ChatState, argument: str) -> Effect:
    if not argument:
        return Effect(complaint="/save takes the name of a file")
    path = Path(os.path.expanduser(argument))  # not of Path, which raises RuntimeError for ~nobody
    try:
        state.saved().write(path)
    except ChatFileError as error:
        return Effect(complaint=str(error))
    return Effect(say=(f"Saved {counted(len(state.conversation.exchanges), 'exchange')} to {path}.",))


def _load(state: ChatState, argument: str) -> Effect:
    if not argument:
        return Effect(complaint="/load takes the name of a file that /save wrote")
    path = Path(os.path.expanduser(argument))
    try:
        saved = SavedChat.read(path)
        state.sampling, warned = with_sampling_values(state.defaults, _sampling_of(saved, path))
    except (ChatFileError, InvalidParams) as error:
        return Effect(complaint=str(error))
    state.conversation, state.forks = saved.history, []
    other = saved.model if saved.model not in ("", state.model) else ""
    lines = [f"Loaded {counted(len(saved.history.exchanges), 'exchange')} from {path}."]
    lines += [f"  {sentence}" for sentence in warned]
    lines += [f"They are from {other}; /model {other} goes on with it."] if other else []
    return Effect(say=tuple(lines))


def _sampling_of(saved: SavedChat, path: Path) -> dict[str, Any]:
    known = {option.name for option in SAMPLING_OPTIONS}
    if unknown := sorted(saved.sampling.keys() - known):
        raise ChatFileError(f"{path} must set sampling parameters only; it sets {', '.join(unknown)}")
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in saved.sampling.items()
    }


def _read(state: ChatState, argument: str) -> Effect:
    if not argument:
        return Effect(complaint="/read takes the name of a text file")
    try:
        text = file_text(path := Path(os.path.expanduser(argument)))
    except ChatFileError as error:
        return Effect(complaint=str(error))
    state.conversation.attached.append(attached_text(path, text))
    characters = "1 character" if len(text) == 1 else f"{len(text):,} characters"
    return Effect(say=(f"{argument}, {characters}, goes with the next message.",))


def _edit(state: ChatState, argument: str) -> Effect:
    exchanges = state.conversation.exchanges
    return Effect(next=Next.EDIT, argument=exchanges[-1].question if exchanges else "")


def _models(state: ChatState, argument: str) -> Effect:
    return Effect(next=Next.LIST_MODELS)


def _model(state: ChatState, argument: str) -> Effect:
    if not argument:
        return Effect(say=(f"{state.model}; /models lists others, /model NAME goes on with one.",))
    return Effect(next=Next.SWITCH_MODEL, argument=argument)


def _fork(state: ChatState, argument: str) -> Effect:
    if not state.conversation.exchanges:
        return Effect(complaint="there is no message to answer in several ways")
    if state.params().is_greedy and state.knows_defaults:
        return Effect(complaint="at temperature 0 all replies are the same; /set temperature 0.8 varies them")
    if argument and not (argument.isdecimal() and 2 <= int(argument) <= MAX_FORKS):
        return Effect(complaint=f"/fork takes a number from 2 to {MAX_FORKS}; got {argument}")
    return Effect(next=Next.FORK, argument=argument or "2")


def _pick(state: ChatState, argument: str) -> Effect:
    if not state.forks:
        return Effect(complaint="there are no replies to pick from; /fork makes some")
    if not (argument.isdecimal() and 1 <= int(argument) <= len(state.forks)):
        return Effect(
            complaint=f"/pick takes a number from 1 to {len(state.forks)}; got {argument or 'none'}"
        )
    state.conversation.answer(state.forks[int(argument) - 1])
    return Effect(say=(f"The conversation goes on with reply {argument}.",))


def _think(state: ChatState, argument: str) -> Effect:
    word = argument.lower()
    if word == "show":
        return Effect(
            say=tuple((state.last_reasoning or "The last reply has no reasoning.").strip().splitlines())
        )
    if word and word not in [mode.value for mode in ThinkMode]:
        return Effect(complaint=f"/think takes on, off, hide, auto or show; got {argument}")
    mode = ThinkMode(word or state.thinking.value)
    if mode.wish is not None and not state.can_think:
        return Effect(
            complaint=f"/think {word} needs a thinking switch, and {state.model or 'the model'} has none: its chat "
            f"template reads no {' or '.join(THINKING_SWITCHES)}; /think hide hides reasoning"
        )
    state.thinking = mode
    return Effect(say=(THINKING_WORDS[state.thinking],))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `2 exchanges`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _exit(state: ChatState, argument: str) -> Effect:
    return Effect(next=Next.LEAVE)


def _change(state: ChatState, name: str, text: str, kind: Callable[[str], Any]) -> tuple[str, ...]:
    """Set one parameter, or restore the model's default; return the warnings. A wrong value changes nothing."""
    # A copy, so that a wrong value leaves everything as it was.
    sampling = {known: value for known, value in state.sampling.items() if known != name}
    if text.lower() == "none" and name in MAY_BE_NONE:
        sampling[name] = None
    elif text.lower() != "default":
        sampling[name] = _texts(name, text) if kind is str else kind(text)
    state.sampling, warned = with_sampling_values(state.defaults, sampling)
    return warned


def _texts(name: str, text: str) -> tuple[str, ...]:
    r"""Read one text as it stands, or several in double quotes; \n, \t and \\ are escapes in both forms.

    Raises:
        InvalidParams: quotes that are not closed, or text outside of them.
    """
    if not text.startswith('"'):
        return (re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], text),)
    try:
        if _QUOTED.sub("", text).strip(" ,"):
            raise ValueError
        return tuple(json.loads(quoted, strict=False) for quoted in _QUOTED.findall(text))
    except ValueError:
        rule = 'one text, or several in double quotes, such as "###" "\\n\\n"'
        raise InvalidParams(f"{name} must be {rule}; got {text}", field=name, got=text) from None


def _setting(state: ChatState, name: str) -> str:
    if name not in state.sampling and not state.knows_defaults:
        return f"  {name:<18}  (the server's default)"
    params = state.params()
    value, remarks = getattr(params, name), [] if name in state.sampling else ["default"]
    if params.is_greedy and name in FILTERS:
        # It is kept, and counts again with another temperature.
        value = state.sampling.get(name, getattr(state.defaults, name))
        remarks.append("no effect at temperature 0")
    shown = (
        "none"
        if value in (None, ())
        else " ".join(map(_quoted, value))
        if isinstance(value, tuple)
        else value
    )
    remark = f"  ({'; '.join(remarks)})" if remarks else ""
    return f"  {name:<18}  {shown}{remark}"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)  # as it can be typed


def _shortened(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


@attrs.frozen
class Command:
    """Command with its usage, a line of help, and its function."""

    usage: str
    help: str
    run: Callable[[ChatState, str], Effect]


COMMANDS: Final = {
    "/help": Command("/help", "shows this", _help),
    "/clear": Command("/clear", "begins a new conversation", _clear),
    "/regen": Command("/regen", "makes the last reply again", _regen),
    "/undo": Command("/undo", "takes back the last message and its reply", _undo),
    "/system": Command("/system [TEXT|@FILE]", "shows or sets the system prompt; none removes it", _system),
    "/set": Command("/set [NAME [VALUE]]", "shows or sets temperature, ...; default undoes it", _set),
    "/fork": Command("/fork [N]", "answers the last message N times at once, side by side", _fork),
    "/pick": Command("/pick N", "goes on with one of these replies", _pick),
    "/edit": Command("/edit", "opens the last message in an editor, to ask it again", _edit),
    "/read": Command("/read FILE", "sends a text file with the next message", _read),
    "/save": Command("/save FILE", "writes the conversation to a file", _save),
    "/load": Command("/load FILE", "goes on with a conversation from a file", _load),
    "/models": Command("/models", "lists the models and presets", _models),
    "/model": Command("/model [NAME]", "shows the model, or goes on with another one", _model),
    "/think": Command("/think [WORD]", "on, off: reason or not; hide: not shown; show: the last", _think),
    "/stats": Command("/stats [on|off]", "shows timings after each reply, or not", _stats),
    "/exit": Command("/exit", "leaves, as does /bye", _exit),
}
ALIASES: Final = {"/bye": "/exit", "/quit": "/exit", "/?": "/help"}
