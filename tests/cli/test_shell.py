"""Completion that is installed by one command, and the manual page made from the help."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from triolet.cli import main

RUN = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RUN:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda *arguments, **more: CliRunner().invoke(main, arguments, **more)


def test_completion_is_installed_once_and_keeps_the_users_lines(run: RUN, tmp_path: Path) -> None:
    start_file = tmp_path / ".bashrc"
    start_file.write_text("alias ll='ls -l'", encoding="utf-8")
    for _ in range(2):
        assert run("completion", env={"SHELL": "/bin/bash"}).exit_code == 0
    script = tmp_path / ".local/share/triolet/completion.bash"
    assert start_file.read_text(encoding="utf-8") == f"alias ll='ls -l'\n. {script}\n"
    command = ["bash", "-c", f'. "{start_file}"; complete -p triolet']
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert "triolet" in shown.stdout, shown.stderr


def test_completion_is_installed_in_a_start_file_that_is_not_utf_8(run: RUN, tmp_path: Path) -> None:
    start_file = tmp_path / ".bashrc"
    start_file.write_bytes(b"# caf\xe9\n")
    for _ in range(2):
        assert run("completion", "bash").exit_code == 0
    script = tmp_path / ".local/share/triolet/completion.bash"
    assert start_file.read_bytes() == b"# caf\xe9\n. " + bytes(script) + b"\n"


@pytest.mark.parametrize("arguments", [("completion", "bash"), ("completion", "fish"), ("man", "--install")])
def test_a_file_that_cannot_be_written_is_named_in_a_sentence(
    run: RUN, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    blocking = tmp_path / "a file"
    blocking.touch()
    result = run(*arguments, env={"HOME": str(blocking)})
    assert result.exit_code == 1
    assert result.stderr.startswith(f"triolet: error: {blocking}/")
    assert result.stderr.endswith(" cannot be read or written; Not a directory\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("man",), ("completion", "bash", "--print")])
def test_an_output_without_room_is_said_in_a_sentence(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "triolet", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.stderr == "triolet: error: the output cannot be written; No space left on device\n"
    assert ended.returncode == 1


def test_each_shell_has_its_file(run: RUN, tmp_path: Path) -> None:
    assert run("completion", "zsh").exit_code == run("completion", "fish").exit_code == 0
    assert (tmp_path / ".zshrc").read_text(encoding="utf-8").endswith("completion.zsh\n")
    assert "complete" in (tmp_path / ".config/fish/completions/triolet.fish").read_text(encoding="utf-8")
    assert "_TRIOLET_COMPLETE=zsh_complete" in run("completion", "zsh", "--print").stdout


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_a_zsh_without_completions_of_its_own_starts_them(run: RUN, tmp_path: Path) -> None:
    assert run("completion", "zsh").exit_code == 0
    command = ["zsh", "-f", "-c", f'. "{tmp_path}/.zshrc"; print -r -- ${{_comps[triolet]}}']
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (shown.stdout, shown.stderr) == ("_triolet_completion\n", "")


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands(run: RUN, tmp_path: Path) -> None:
    assert run("completion", "fish").exit_code == 0
    script = tmp_path / ".config/fish/completions/triolet.fish"
    command = ["fish", "--no-config", "-c", f'source "{script}"; complete --command triolet']
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert "triolet" in shown.stdout, shown.stderr


def test_an_unknown_shell_is_refused(run: RUN, tmp_path: Path) -> None:
    result = run("completion", env={"SHELL": "/bin/tcsh"})
    assert result.stderr == (
        "triolet: error: the shell must be one of bash, zsh, fish, named as an argument; got 'tcsh'\n"
    )
    assert (result.exit_code, list(tmp_path.iterdir())) == (1, [])


def test_the_manual_page_has_every_command_and_every_option(run: RUN, tmp_path: Path) -> None:
    assert run("man", "--install").exit_code == 0
    page = (tmp_path / ".local/share/man/man1/triolet.1").read_text(encoding="utf-8")
    assert page == run("man").stdout
    plain = page.replace("\\-", "-")
    for name, command in main.commands.items():
        section = plain.partition(f'.SS "triolet {name} ')[2].partition("\n.SS ")[0]
        assert section, name
        options = [one for one in command.params if isinstance(one, click.Option)]
        assert [one.opts[0] for one in options if one.opts[0] not in section] == []
    requests = {line.split()[0] for line in page.splitlines() if line.startswith((".", "'"))}
    assert requests == {".TH", ".ad", ".SH", ".SS", ".PP", ".TP", ".B"}


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_manual_page_is_set_without_warnings(run: RUN) -> None:
    page = run("man").stdout
    command = ["groff", "-man", "-Tutf8", "-ww"]
    shown = subprocess.run(command, input=page, capture_output=True, text=True, check=False)
    assert shown.stderr == ""
    assert re.search("Talk with a model", shown.stdout)
