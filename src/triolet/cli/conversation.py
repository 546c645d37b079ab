"""History of a chat: a system prompt and exchanges, of which the last may still wait for its reply; and its file.

The file is one JSON object, with the messages in OpenAI's form:

    {"triolet_chat": 1, "model": "...", "sampling": {...}, "messages": [...]}
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from triolet.config.whole_file import write_file

FORMAT_KEY: Final = "triolet_chat"
FORMAT_VERSION: Final = 1
MAX_ATTACHED_CHARS: Final = (
    1_000_000  # of a file that goes with a message: more than any context has room for
)


class ChatFileError(ValueError):
    """File that cannot be read or written as a chat; the message names the file and the rule."""


@attrs.define
class Exchange:
    """Question and its answer, which is None until it is complete."""

    question: str
    answer: str | None = None
    attached: tuple[str, ...] = ()  # texts of files that the question begins with


@attrs.define
class ChatHistory:
    """History of one conversation with a model."""

    system: str | None = None  # the system prompt; None for none
    exchanges: list[Exchange] = attrs.field(factory=list)
    attached: list[str] = attrs.field(factory=list)  # texts of files that go with the next question

    def ask(self, question: str) -> None:
        """Begin an exchange."""
        text = "\n\n".join([*self.attached, question])
        self.exchanges.append(Exchange(text, attached=tuple(self.attached)))
        self.attached.clear()

    def answer(self, text: str) -> None:
        """Complete the last exchange, or replace its answer."""
        self.exchanges[-1].answer = text

    def take_back(self) -> Exchange | None:
        """Forget the last exchange and return it; None if there was none."""
        return self.exchanges.pop() if self.exchanges else None

    def take_back_unanswered(self) -> Exchange | None:
        """Forget the last exchange if it has no answer, and return it; its files go with the next question again."""
        if not self.exchanges or self.exchanges[-1].answer is not None:
            return None
        exchange = self.exchanges.pop()
        self.attached = [*exchange.attached, *self.attached]
        return exchange

    def messages(self, *, with_last_answer: bool = False) -> list[dict[str, str]]:
        """Return the chat messages, up to the last question for the model to answer."""
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer or ""})
        return messages if with_last_answer else messages[:-1]


@attrs.frozen(kw_only=True)
class SavedChat:
    """Content of a chat file."""

    history: ChatHistory
    model: str = ""  # name of the model that answered last
    sampling: Mapping[str, Any] = attrs.field(factory=dict)  # values of the user, by field

    def write(self, path: Path) -> None:
        """Write the file, readable for its user only; a file that holds something else is not replaced.

        Raises:
            ChatFileError: it cannot be written.
        """
        messages = self.history.messages(with_last_answer=True)
        content = {
            FORMAT_KEY: FORMAT_VERSION,
            "model": self.model,
            "sampling": self.sampling,
            "messages": messages,
        }
        try:
            encoded = json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
            if path.exists() and (path.stat().st_size or not path.is_file()):
                SavedChat.read(path)
            write_file(path.resolve(), encoded)  # a link stays one
        except OSError as error:
            raise ChatFileError(f"{path} cannot be written; {error.strerror}") from error
        except UnicodeError as error:
            raise ChatFileError(f"{path} cannot be written; a message must be UTF-8; {error}") from error

    @classmethod
    def read(cls, path: Path) -> SavedChat:
        """Read a file.

        Raises:
            ChatFileError: it cannot be read, or is no chat.
        """
        try:
            _check_regular(path)
            content = json.loads(path.read_text(encoding="utf-8"))
            json.dumps(content, ensure_ascii=False).encode()  # fails for a lone surrogate, such as "\ud800"
            if content[FORMAT_KEY] != FORMAT_VERSION:
                raise ChatFileError(
                    f"{path} has version {content[FORMAT_KEY]}; this program reads {FORMAT_VERSION}"
                )
            return cls(
                history=_history_of(content["messages"]),
                model=str(content.get("model", "")),
                sampling=dict(content.get("sampling", {})),
            )
        except OSError as error:
            raise ChatFileError(f"{path} cannot be read; {error.strerror}") from error
        except ChatFileError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ChatFileError(f"{path} must be a chat that /save wrote; it is something else") from error


def state_folder() -> Path:
    """Return the folder for what outlives a chat: history, and conversations that were not saved."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "triolet"


def unused_path(folder: Path) -> Path:
    """Return the path of a file that does not exist, for a conversation that its user gave no name."""
    stem = f"unsaved-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.json").exists())


def file_text(path: Path) -> str:
    """Return the content of a file that goes with a message.

    Raises:
        ChatFileError: it cannot be read, is no text, or is too long.
    """
    try:
        _check_regular(path)
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_ATTACHED_CHARS + 1)
    except (OSError, UnicodeError) as error:
        raise ChatFileError(f"{path} must be a readable text file; {error}") from error
    if len(text) > MAX_ATTACHED_CHARS:
        raise ChatFileError(f"{path} must have at most {MAX_ATTACHED_CHARS:,} characters; it has more")
    return text


def _check_regular(path: Path) -> None:
    """Check that a file has an end: a pipe or a device may have none, and would hold up the chat.

    Raises:
        ChatFileError: it is something else than a file or a folder, which the opening tells of.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ChatFileError(f"{path} must be a file; it is a pipe or a device")


def attached_text(path: Path, text: str) -> str:
    """Return the content of a file as a part of a message, under its name."""
    return f"{path.name}:\n```\n{text.rstrip()}\n```"


def _history_of(messages: list[Mapping[str, str]]) -> ChatHistory:
    """Return the history from its messages, in which questions and answers alternate.

    Raises:
        ValueError: they do not, or something else than a text was said.
    """
    said = [(message["role"], message["content"]) for message in messages]
    if not all(isinstance(content, str) for _, content in said):
        raise ValueError
    history = ChatHistory(said.pop(0)[1] if said and said[0][0] == "system" else None)
    if [role for role, _ in said] != ["user", "assistant"] * (len(said) // 2):
        raise ValueError
    history.exchanges = [
        Exchange(question, answer) for (_, question), (_, answer) in zip(said[::2], said[1::2], strict=True)
    ]
    return history
