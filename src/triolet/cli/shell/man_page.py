"""`triolet man`: the manual page, in roff, made from the help of the commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

from triolet import __version__


def man_page(program: click.Group) -> str:
    """Return the page of a program: its commands with their arguments and options."""
    context = click.Context(program, info_name="triolet")
    lines = [
        f'.TH TRIOLET 1 "" "triolet {__version__}" "User Commands"',
        ".ad l",  # names of options are long and are not broken: full lines would have gaps
        ".SH NAME",
        _roff("triolet - " + program.get_short_help_str(200).rstrip(".").lower()),
        ".SH SYNOPSIS",
        ".B triolet",
        r"\fICOMMAND\fR [\fIARGUMENTS\fR]",
        ".SH DESCRIPTION",
        *_paragraphs(program.help or ""),
        ".SH COMMANDS",
    ]
    for name in program.list_commands(context):
        command = program.get_command(context, name)
        assert command is not None, "it was listed"
        lines += _command(command, click.Context(command, info_name=name, parent=context))
    lines += [".SH EXIT STATUS"]
    for code, text in (
        (0, "success"),
        (1, "an error"),
        (2, "a wrong command line"),
        (130, "Ctrl-C"),
        (143, "SIGTERM"),
    ):
        lines += [".TP", f".B {code}", text]
    return "\n".join(lines) + "\n"


def _command(command: click.Command, context: click.Context) -> Iterator[str]:
    arguments = " ".join(command.collect_usage_pieces(context))
    yield f'.SS "{_roff(f"triolet {context.info_name} {arguments}").strip()}"'
    yield from _paragraphs(command.help or "")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            yield ".TP"
            yield rf"\fB{_roff(record[0])}\fR"
            yield _roff(" ".join(record[1].split()))


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield ".PP"
        yield _roff(" ".join(paragraph.split()))


def _roff(text: str) -> str:
    """Return a text with what roff would read as its own escaped."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    # A line that begins with a point or an apostrophe is a request.
    return "\\&" + text if text.startswith((".", "'")) else text


def install(program: click.Group) -> Path:
    """Write the page where `man` finds it; return its path.

    Raises:
        OSError: it cannot be written.
    """
    folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    path = folder / "man" / "man1" / "triolet.1"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(man_page(program), encoding="utf-8")
    return path
