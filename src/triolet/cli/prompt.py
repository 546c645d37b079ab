"""Prompt of the chat: one line or several, with editing and history.

prompt_toolkit runs an event loop of its own, so it gets a worker thread. It puts the terminal into raw mode, in which
Ctrl-C is a key. A key that ends a line without a message is returned as a value, not raised as an exception.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import trio
from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus, is_searching
from prompt_toolkit.formatted_text import AnyFormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress, KeyProcessor
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.styles import Style

from triolet.cli.screen import TAB_COLUMNS

QUOTES: Final = '"""'
_NO_COMMAND: Final = " "
PASTE_CHARS: Final = 32
"""Characters in one read from which on they are taken as pasted text: no hand types so fast."""
REDRAW_INTERVAL_S: Final = 0.03  # a paste comes in many reads, each of which would draw all of it
FILE_COMMANDS: Final = ("/load", "/read", "/save")
STYLE: Final = Style.from_dict(
    {"prompt": "bold ansicyan", "more": "ansibrightblack", "placeholder": "ansibrightblack"}
)


class Key(enum.Enum):
    """Key that ended the line without a message."""

    INTERRUPT = "Ctrl-C"
    END = "Ctrl-D"


class Prompt:
    """Reader of messages from the terminal.

    Args:
        colour: True if the prompt may be coloured.
        commands: commands that Tab completes.
        history: earlier messages.
        keys: source of keys; by default the terminal.
        output: destination of the line; by default the terminal.
    """

    def __init__(
        self,
        *,
        colour: bool,
        commands: Sequence[str] = (),
        history: History | None = None,
        keys: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._waiting = False
        self._interrupted = False
        self._session: PromptSession[str] = PromptSession(
            [("class:prompt", "› ")],
            multiline=True,
            prompt_continuation=_continuation,
            placeholder=_placeholder,
            tempfile_suffix=".md",  # for editors that colour by it
            key_bindings=_key_bindings(),
            history=history or InMemoryHistory(),
            completer=CommandCompleter(commands),
            complete_while_typing=Condition(lambda: get_app().current_buffer.text.startswith("/")),
            input_processors=[
                TabsProcessor(TAB_COLUMNS, " ", " ")
            ],  # without it a tab of a paste is shown as ^I
            enable_suspend=True,  # Ctrl-Z would otherwise be a character of the message
            style=STYLE,
            color_depth=None if colour else ColorDepth.DEPTH_1_BIT,
            input=keys,
            output=output,
        )
        self._session.app.min_redraw_interval = REDRAW_INTERVAL_S
        _take_runs_as_pastes(self._session.app.key_processor)

    async def ask(self, text: str = "", *, in_editor: bool = False) -> str | Key:
        """Return the message that was typed, or the key that ended the line; a cancelled scope ends it as well.

        Args:
            text: message to begin with.
            in_editor: True opens it in an editor at first.
        """
        self._waiting = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._interrupt_if_cancelled)
            answer = await trio.to_thread.run_sync(
                self._ask, text, in_editor
            )  # not abandoned: it holds the terminal
            # Before the cancellation, which would be taken for one that ends the next line.
            self._waiting = self._interrupted = False
            nursery.cancel_scope.cancel()
        return answer

    def interrupt(self) -> None:
        """End the line that is being typed, or else the next one, as Ctrl-C does; from any thread."""
        self._interrupted = True
        loop = self._session.app.loop
        with contextlib.suppress(RuntimeError):  # the loop has closed, so the line has ended
            if loop is not None:
                loop.call_soon_threadsafe(self._leave_if_interrupted)

    async def _interrupt_if_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            if self._waiting:
                self.interrupt()

    def _ask(self, text: str, in_editor: bool) -> str | Key:
        def begin() -> None:
            self._leave_if_interrupted()
            if in_editor:
                _ = self._session.default_buffer.open_in_editor()

        try:
            return message_of(self._session.prompt(default=text, pre_run=begin))
        except KeyboardInterrupt:
            return Key.INTERRUPT
        except EOFError:
            return Key.END

    def _leave_if_interrupted(self) -> None:
        app = self._session.app
        if self._interrupted and app.is_running and not app.is_done:
            app.exit(exception=KeyboardInterrupt())


class CommandCompleter(Completer):
    """Completer of the first word of a line that begins with a `/`, and of the file that some commands take."""

    def __init__(self, commands: Sequence[str]) -> None:
        self._commands = commands
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        if typed.startswith("/"):
            for command in self._commands:
                if command.startswith(typed.lower()) and command != typed:
                    yield Completion(command, start_position=-len(typed))
        command, space, path = typed.partition(" ")
        if space and command.lower() in FILE_COMMANDS:
            yield from self._files.get_completions(Document(path), complete_event)


def is_open(text: str) -> bool:
    """Return True if a message began with three quotes that have not been closed."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def message_of(text: str) -> str:
    """Return the message from the typed text; bytes that are not UTF-8 become question marks."""
    # A message that was quoted or indented and begins with a / gets one space in front, which marks it as no
    # command (`without_mark`).
    typed = text.encode(errors="replace").decode()
    text = typed.strip()
    if text.startswith(QUOTES) and not is_open(text):
        text = text[len(QUOTES) : -len(QUOTES)].strip("\n")
        return _NO_COMMAND + text if text.startswith("/") else text
    return _NO_COMMAND + text if typed[:1].isspace() and text.startswith("/") else text


def without_mark(message: str) -> str:
    """Return a message without the space that marks it as no command."""
    return message[len(_NO_COMMAND) :] if message.startswith(_NO_COMMAND + "/") else message


class KeptHistory(FileHistory):
    """History in a file; a message that cannot be written there, as on a full disk, is kept until the chat ends."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def history_in(folder: Path) -> History:
    """Return the history of earlier messages, in a file of `folder`; in memory only if it cannot be written."""
    path = folder / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Messages are private: readable for their user only.
        path.touch(mode=0o600)
        with path.open("ab"):
            return KeptHistory(str(path))
    except OSError:
        return InMemoryHistory()


def _placeholder() -> AnyFormattedText:
    # A search shows its match in the empty line, and the placeholder would stand behind it.
    return [] if is_searching() else [("class:placeholder", "Type a message, or /help")]


def merge_runs(keys: Sequence[KeyPress]) -> list[KeyPress]:
    """Return keys with long runs of plain characters merged into pastes."""
    # Each key takes a millisecond, so that 40 kB from a terminal that does not mark pastes would take half a minute.
    merged: list[KeyPress] = []
    for is_plain, group in itertools.groupby(keys, key=lambda press: not isinstance(press.key, Keys)):
        run = list(group)
        if is_plain and len(run) >= PASTE_CHARS:
            run = [KeyPress(Keys.BracketedPaste, "".join(press.data for press in run))]
        merged += run
    return merged


def _take_runs_as_pastes(processor: KeyProcessor) -> None:
    feed = processor.feed_multiple

    def feed_merged(key_presses: list[KeyPress], first: bool = False) -> None:
        feed(merge_runs(key_presses), first)

    # The processor is made by the session, and its class cannot be chosen.
    processor.feed_multiple = feed_merged  # type: ignore[method-assign]


def _continuation(width: int, line_number: int, wrap_count: int) -> AnyFormattedText:
    return [("class:more", "  " if wrap_count else "… ")]


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()
    # In a search of the history these keys are the search's own: Enter takes what was found.
    in_message = has_focus(DEFAULT_BUFFER) & ~is_searching

    @bindings.add("enter", filter=in_message)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):  # the message goes on in the next line
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=in_message)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-g", filter=in_message)
    def _(event: KeyPressEvent) -> None:
        _ = event.current_buffer.open_in_editor()

    return bindings
