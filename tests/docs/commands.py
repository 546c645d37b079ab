"""The commands of the README and the pages in docs/, taken apart as a shell takes them apart."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import attrs

from tests.documentation import Block, blocks

SHELLS = ("console", "bash", "sh")
_PROMPT = re.compile(r"(?:\w+)?\$ ")  # of this machine, or of one that is named
_LAUNCHERS = ("srun",)  # programs that start another one
_ASSIGNMENT = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)


@attrs.frozen
class Command:
    """One simple command: what a shell would start as one program.

    Args:
        words: program and arguments, without quotes.
        environ: variables that are set for it alone.
        piped: text of the `echo` before it in the same pipe; None without one.
        in_background: whether a `&` ends it.
        target: file that its output is appended to; None without one.
    """

    words: tuple[str, ...]
    environ: dict[str, str] = attrs.field(factory=dict)
    piped: str | None = None
    in_background: bool = False
    target: str | None = None

    @property
    def program(self) -> str:
        """Name of the program, wherever it lies."""
        return self.words[0].rpartition("/")[2]

    def __str__(self) -> str:
        return " ".join(self.words)


def shell_blocks() -> list[Block]:
    """Return every block with commands."""
    return [block for language in SHELLS for block in blocks(language)]


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a block, in order."""
    return [command for line in _lines(block) for command in _simple_commands(line)]


def _lines(block: Block) -> Iterator[str]:
    """Return what is typed, each command on one line; the rest of a console is output."""
    text = block.text.replace("\\\n", " ")
    if block.language != "console":
        yield from filter(str.strip, text.splitlines())
        return
    typed: list[str] = []
    for line in text.splitlines():
        if prompt := _PROMPT.match(line):
            typed.append(line[prompt.end() :])
        elif typed and _is_open(typed[-1]):  # a quote goes on over the end of the line
            typed[-1] += "\n" + line
    yield from typed


def _is_open(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def _simple_commands(line: str) -> Iterator[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    piped: str | None = None
    tokens = [*lexer, ";"]
    while tokens:
        token = tokens.pop(0)
        if token not in ("|", "||", "&", "&&", ";", ">>", ">"):
            words.append(token)
            continue
        target = tokens.pop(0) if token in (">>", ">") else None
        command = _command(words, piped, in_background=token == "&", target=target)
        words, piped = [], None
        if command is None:
            continue
        if token == "|" and command.program == "echo":
            piped = " ".join(command.words[1:]) + "\n"
            continue
        yield command


def _command(
    words: list[str], piped: str | None, *, in_background: bool, target: str | None
) -> Command | None:
    environ = {}
    while words and (found := _ASSIGNMENT.fullmatch(words[0])):
        environ[found[1]] = found[2]
        words = words[1:]
    while words and words[0] in _LAUNCHERS:
        words = words[1:]
    if not words:
        return None
    return Command(tuple(words), environ, piped, in_background, target)
