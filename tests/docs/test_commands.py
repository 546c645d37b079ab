"""The commands of the documentation: each can be typed, and those of triolet run, as they stand, on triolet-nano."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
import trustme
from click.testing import CliRunner

from tests.docs.commands import Command, commands_of, shell_blocks
from tests.documentation import Block
from tests.e2e.server import Server, serve
from tests.ports import free_port
from tests.source_tree import ROOT
from triolet import nano
from triolet.cli import main

BLOCKS = shell_blocks()
COMMANDS = [(block, command) for block in BLOCKS for command in commands_of(block)]
OF_TRIOLET = [block for block in BLOCKS if any(one.program == "triolet" for one in commands_of(block))]
ROUTES = (ROOT / "docs" / "http.md").read_text(encoding="utf-8") + (ROOT / "docs" / "lora.md").read_text(
    encoding="utf-8"
)

# Programs that are no part of triolet, and what is looked at instead of running them.
OTHERS = (".", "cat", "export", "docker", "python", "pip", "make", "curl")
# Commands that do not run here, by the beginning of their line.
NOT_RUN = {
    "triolet pull": "needs the hub",
    "triolet generate --model meta-llama": "two processes of a model of 16 GB",
    "triolet serve --runner remote": "waits for a worker on another machine",
    "triolet worker": "needs an engine on another machine",
    "triolet serve --otlp": "needs a collector, without which it logs errors",
}
# The same with less to do: later flags win.
SHORTER = {
    "bench": ("--num-prompts", "2", "--output-len", "8", "--input-len", "8", "--max-num-seqs", "2"),
    "bench serve": ("--num-prompts", "2", "--output-len", "4", "--input-len", "4"),
    "generate": ("--max-tokens", "8"),
    "chat": ("--max-tokens", "8"),
    "quantize": ("--no-report",),
}
STDIN = {"chat": "Hello!\n", "rm": "y\n"}
SERVERS = ("serve", "route")


# ----------------------------------------------------------------------------------------- typing them


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name, and a home with a model in its cache."""
    (tmp_path / "persona.txt").write_text("Answer briefly.")
    (tmp_path / ".triolet-token").write_text("a" * 32)
    (tmp_path / "requests.jsonl").write_text("")
    (tmp_path / "config.toml").write_text('[presets.poet]\nsystem = "Answer in rhymes."\n')
    (tmp_path / "models.toml").write_text("[presets.small]\n[presets.large]\n")
    batch = next(block for block in BLOCKS if "cat in.jsonl" in block.text)
    (tmp_path / "in.jsonl").write_text(
        batch.text.splitlines()[1].replace('"body": {', '"body": {"max_tokens": 8, ')
    )
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").symlink_to(nano.PATH)
    for name in ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B"):
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("a" * 40)
        shutil.copytree(nano.PATH, repository / "snapshots" / ("a" * 40))
    environment = {
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),  # compiled kernels
        "SHELL": "/bin/bash",
        "KEY": "secret",
        "TRIOLET_CONFIG": str(tmp_path / "config.toml"),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", environment["HF_HUB_CACHE"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(command: Command) -> tuple[str, list[str]]:
    """Return the name of triolet's command, of one word or two, and its arguments."""
    words = list(command.words[1:])
    if " ".join(words[:2]) in main.commands:
        return " ".join(words[:2]), words[2:]
    return words[0], words[1:]


def test_commands_are_taken_apart_as_a_shell_does() -> None:
    text = "$ echo \"a  b\" | x -q -   # so\nout\n$ A=1 y --to 'c\n  d' >> f &\n$ z\n"
    found = commands_of(Block(ROOT, 1, "console", text))
    assert found == [
        Command(("x", "-q", "-"), piped="a  b\n"),
        Command(("y", "--to", "c\n  d"), {"A": "1"}, target="f"),
        Command(("z",)),
    ]


@pytest.mark.parametrize(
    ("block", "command"), COMMANDS, ids=[f"{block}-{command}"[:80] for block, command in COMMANDS]
)
def test_a_command_of_the_documentation_can_be_typed(
    block: Block, command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command.program == "triolet":
        name, arguments = named(command)
        for variable, value in command.environ.items():
            monkeypatch.setenv(variable, value)
        main.commands[name].make_context(
            name, [os.path.expandvars(one) for one in arguments], parent=click.Context(main)
        )
        return
    assert command.program in OTHERS
    check = {"make": make_has, "python": program_has, "pip": pip_can, "curl": server_has}.get(command.program)
    if check is not None:
        check(command)


def make_has(command: Command) -> None:
    assert re.search(rf"^{command.words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def program_has(command: Command) -> None:
    if command.words[1] == "-m":
        assert command.words[2] in ("venv", "triolet")
        return
    source = (ROOT / command.words[1]).read_text(encoding="utf-8")
    for flag in (word for word in command.words[2:] if word.startswith("--")):
        name = flag[2:].replace("-", "_")
        assert f'"{flag}"' in source or f"{name}" in source, flag


def pip_can(command: Command) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"triolet\[(\w+)\]", str(command)):
        assert extra in extras
    for requirements in re.findall(r"--requirement (\S+)", str(command)):
        assert (ROOT / requirements).exists()


def server_has(command: Command) -> None:
    path = re.search(r"(?:localhost|127\.0\.0\.1):\d+(/\S*)", str(command))
    assert path is not None and f"{path[1]}`" in ROUTES


def test_what_does_not_run_here_is_in_the_documentation() -> None:
    lines = [str(command) for _, command in COMMANDS]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []


# ---------------------------------------------------------------------------------------- running them


class Session:
    """One block, typed line by line."""

    def __init__(self, stack: ExitStack, desk: Path, shared: Callable[[], Server]) -> None:
        self.stack, self.desk, self.shared = stack, desk, shared
        self.ports: dict[str, str] = {}  # of the documentation, and those that are free here

    def run(self, command: Command) -> None:
        name, arguments = named(command)
        if any(str(command).startswith(start) for start in NOT_RUN):
            return
        if name in SERVERS:
            self.start(name, arguments)
            return
        arguments = [*(self.here(word) for word in arguments), *SHORTER.get(name, ())]
        if name in ("ps", "stop"):
            arguments += ["--url", self.shared().url]
        environ = {key: self.here(value) for key, value in command.environ.items()}
        typed = STDIN.get(name) if command.piped is None else command.piped
        result = CliRunner().invoke(main, [*name.split(), *arguments], input=typed, env=environ)
        assert result.exit_code == 0, (str(command), result.output, result.exception)
        assert result.stdout.strip() or name in ("quantize", "run-batch"), str(command)

    def start(self, name: str, arguments: list[str]) -> None:
        wanted = re.search(r"--port (\d+)", " ".join(arguments))
        kept = [
            re.sub(r"/(var/lib|run)/triolet", str(self.desk), word).replace("$KEY", "secret")
            for word in arguments
        ]
        if wanted is not None:
            self.ports[wanted[1]] = str(free_port()) if wanted[1] != "0" else "0"
        kept = [self.here(word) for word in kept]
        on_socket = "--uds" in kept
        if wanted is None and not on_socket:
            kept += ["--port", "0"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "triolet", name, *kept], env=environment, stdout=subprocess.PIPE, text=True
        )
        self.stack.callback(end, process)
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert re.match(r"unix:" if on_socket else r"https?://", url), (name, kept)
        if "--record" in kept:  # what is recorded is read by the next command
            body = b'{"model": "triolet-nano", "prompt": "Once upon", "max_tokens": 4}'
            with urllib.request.urlopen(f"{url}/v1/completions", body, timeout=300) as answer:
                assert answer.status == 200
            process.terminate()
            process.wait(30)

    def here(self, word: str) -> str:
        """Return a word with the ports that are free here."""

        def port(found: re.Match[str]) -> str:
            if found[0] not in self.ports:
                self.ports[found[0]] = str(self.shared().port)
            return self.ports[found[0]]

        return re.sub(r"(?<![\d.])80\d\d\b", port, word)


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(30)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[Callable[[], Server]]:
    """The server of blocks that start none, with two models; it is started when a block needs it."""
    with ExitStack() as stack:
        running: list[Server] = []

        def server() -> Server:
            if not running:
                models = ("--model", f"small={nano.PATH}", "--model", f"large={nano.PATH}")
                running.append(stack.enter_context(serve(*models)))
            return running[0]

        yield server


@pytest.mark.slow
@pytest.mark.parametrize("block", OF_TRIOLET, ids=str)
def test_the_commands_of_a_block_run(block: Block, desk: Path, shared: Callable[[], Server]) -> None:
    with ExitStack() as stack:
        session = Session(stack, desk, shared)
        for command in commands_of(block):
            if command.program == "triolet":
                session.run(command)
