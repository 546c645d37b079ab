"""`triolet completion`: the completion script of a shell, printed or installed.

The script is a file of its own, which the start-up file of the shell reads: a shell then starts without running
`triolet`. fish finds the file in its folder of completions.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Final

import click
from click.shell_completion import get_completion_class

from triolet.cli.failures import CommandFailure

PROGRAM: Final = "triolet"
VARIABLE: Final = "_TRIOLET_COMPLETE"
SHELLS: Final = ("bash", "zsh", "fish")
# A zsh whose start file does not call compinit has no compdef.
_START_ZSH: Final = "\n(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }\n"


def completion_script(command: click.Command, shell: str) -> str:
    """Return the script by which a shell completes a command."""
    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    completer = found(command, {}, PROGRAM, VARIABLE)
    # Not `source()`, which runs bash to ask for its version.
    script = completer.source_template % completer.source_vars()
    return script.replace("\n", _START_ZSH, 1) if shell == "zsh" else script


def present_shell() -> str:
    """Return the name of the user's shell.

    Raises:
        CommandFailure: it is none that completions are made for.
    """
    name = os.path.basename(os.environ.get("SHELL", ""))
    if name not in SHELLS:
        raise CommandFailure(
            f"the shell must be one of {', '.join(SHELLS)}, named as an argument; got {name!r}"
        )
    return name


def install(command: click.Command, shell: str) -> list[Path]:
    """Write the script, and have the shell read it when it starts; return the files that were written.

    Raises:
        OSError: a file cannot be written.
    """
    if shell == "fish":
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        script = folder / "fish" / "completions" / f"{PROGRAM}.fish"
    else:
        folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        script = folder / PROGRAM / f"completion.{shell}"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(completion_script(command, shell), encoding="utf-8")
    if shell == "fish":
        return [script]
    start_file = (
        Path.home() / ".bashrc"
        if shell == "bash"
        else Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc"
    )
    # Bytes: what the user has written there need not be UTF-8.
    line = os.fsencode(f". {shlex.quote(str(script))}")
    content = start_file.read_bytes() if start_file.exists() else b""
    if line in content.splitlines():
        return [script]
    before = b"" if not content or content.endswith(b"\n") else b"\n"
    with start_file.open("ab") as file:
        file.write(before + line + b"\n")
    return [script, start_file]
