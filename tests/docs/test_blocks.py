"""Blocks of the documentation that are no programs: settings and messages are read by what reads them."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import click
import pytest
import trustme
import yaml  # type: ignore[import-untyped]

from tests.documentation import Block, blocks
from triolet.cli import main
from triolet.cli.models.presets import read_presets

# Languages whose blocks other tests run: commands, programs, systemd's unit.
RUN = {"console", "bash", "sh", "python", "py", "ini"}
[NGINX] = blocks("nginx")


def test_every_language_of_a_block_has_a_test() -> None:
    read = {"json", "toml", "yaml", "nginx", "text"}
    assert {block.language for block in blocks(None)} == RUN | read


@pytest.mark.parametrize("block", tuple(blocks("json")), ids=str)
def test_json_is_json(block: Block) -> None:
    """One value, or one on each line."""
    try:
        values = [json.loads(block.text)]
    except json.JSONDecodeError:
        values = [json.loads(line) for line in block.text.splitlines()]
    assert all(isinstance(value, dict) and value for value in values)


@pytest.mark.parametrize("block", tuple(blocks("toml")), ids=str)
def test_presets_are_read(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(block.text, encoding="utf-8")
    [preset] = read_presets(path)
    assert (preset.name, preset.sampling["max_tokens"], preset.engine) == (
        "poet",
        200,
        {"max_model_len": "4096"},
    )


@pytest.mark.parametrize("block", tuple(blocks("yaml")), ids=str)
def test_yaml_is_yaml_and_the_commands_in_it_can_be_typed(block: Block) -> None:
    value = yaml.safe_load(block.text)
    assert value.keys() in ({"scrape_configs"}, {"apiVersion", "kind", "metadata", "spec"})
    for container in value.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        name, *arguments = container["args"]
        command = main.commands[name]
        variables = [one["name"] for one in container["env"]]
        known = {option.envvar for option in command.params}
        assert set(variables) <= known | {f"TRIOLET_{flag}" for flag in map(variable, command.params)}
        command.make_parser(click.Context(command)).parse_args(arguments)


def variable(option: click.Parameter) -> str:
    return (option.name or "").upper()


@pytest.mark.parametrize("block", tuple(blocks("py")), ids=str)
def test_a_program_with_another_library_is_python(block: Block) -> None:
    assert ast.parse(block.text).body


def test_python_that_is_shown_as_text_is_python() -> None:
    programs = [block.text for block in blocks("text") if re.match(r"(class|async with) ", block.text)]
    assert len(programs) == 2
    for program in programs:
        assert ast.parse("async def program():\n" + textwrap.indent(program, "    ")).body


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx")
def test_nginx_takes_its_configuration(tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("llm.example")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "chain.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    server = NGINX.text.replace("/etc/ssl/llm.example", str(tmp_path))
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{server}\n}}\n"
    )
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
