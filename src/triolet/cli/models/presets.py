"""Presets: a model with its sampling, system prompt, chat template and engine fields, under a name of the user's.

They are in one TOML file, the first of these that exists:

    $TRIOLET_CONFIG
    $XDG_CONFIG_HOME/triolet/config.toml    (~/.config/triolet/config.toml)
    /etc/triolet/config.toml

A command takes the name of a preset as its MODEL. A flag wins over the preset, and the preset over the environment,
because it was named for this one command.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click

from triolet.cli.failures import CommandFailure
from triolet.cli.models.sampling import SAMPLING_OPTIONS, with_sampling_values
from triolet.config.engine import EngineConfig
from triolet.config.environment import SECRET_VARIABLES
from triolet.config.fields import ENVIRONMENT_PREFIX
from triolet.core.request.params import SamplingParams
from triolet.errors import ConfigError, InvalidParams, shown

VARIABLE: Final = f"{ENVIRONMENT_PREFIX}CONFIG"
SYSTEM_FILE: Final = Path("/etc/triolet/config.toml")
NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
SAMPLING: Final = frozenset(one.name for one in SAMPLING_OPTIONS)
# MODEL and the template are fields of the preset itself, and `seed` is one of its sampling.
ENGINE: Final = EngineConfig.rules().keys() - {"model", "chat_template", "seed"}
HIDDEN: Final = "(set)"  # in place of a secret


class PresetError(CommandFailure):
    """File of presets that cannot be read, or a preset in it that is wrong; exit code 2, as for a wrong flag."""

    exit_code = 2


@attrs.frozen(kw_only=True)
class Preset:
    """Settings of one name."""

    name: str
    model: str | None = None  # folder, GGUF file or hub id; None for triolet-nano
    system: str | None = None  # system prompt of a chat
    template: str | None = None  # chat template in place of the model's own, in Jinja
    sampling: Mapping[str, Any] = attrs.field(factory=dict)  # by field of `SamplingParams`
    engine: Mapping[str, str] = attrs.field(factory=dict)  # texts, by field of `EngineConfig`

    @property
    def engine_fields(self) -> Mapping[str, str]:
        """Return the texts of `engine`, and the template as the engine's field."""
        return {**self.engine, **({} if self.template is None else {"chat_template": self.template})}

    def described(self) -> dict[str, Any]:
        """Return what was set, without secrets."""
        secrets = {field.name for field in attrs.fields(EngineConfig) if field.metadata["is_secret"]}
        engine = {name: HIDDEN if name in secrets else text for name, text in self.engine.items()}
        values = attrs.asdict(self) | {"engine": engine}
        return {name: value for name, value in values.items() if value not in (None, {})}


def find_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the file of presets; None without one.

    Raises:
        PresetError: `TRIOLET_CONFIG` names no file.
    """
    environ = os.environ if environ is None else environ
    if named := environ.get(VARIABLE):
        path = Path(os.path.expanduser(named))
        if not path.is_file():
            raise PresetError(f"{VARIABLE} must name a file; got {named!r}")
        return path
    return next((path for path in places(environ)[1:] if path.is_file()), None)


def places(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return the files that are looked for, in this order; the first stands for `TRIOLET_CONFIG`."""
    environ = os.environ if environ is None else environ
    folder = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [Path(f"${VARIABLE}"), folder / "triolet" / "config.toml", SYSTEM_FILE]


def find_preset(name: str) -> Preset | None:
    """Return the preset of that name; None if there is none.

    Raises:
        PresetError: the file cannot be read, or this preset is wrong.
    """
    # Paths and hub ids are no names of presets, so that they need no file that can be read.
    if NAME.fullmatch(name) is None or (path := find_file()) is None:
        return None
    table = _tables(path).get(name)
    return None if table is None else read_preset(path, name, table)


def read_presets(path: Path) -> list[Preset]:
    """Return all presets of a file.

    Raises:
        PresetError: it cannot be read, or a preset in it is wrong.
    """
    return [read_preset(path, name, table) for name, table in _tables(path).items()]


def usable_presets() -> list[Preset]:
    """Return the presets of the user's file that are right; a wrong one is told of where it is used."""
    found: list[Preset] = []
    with contextlib.suppress(PresetError):  # of the file as a whole
        if (path := find_file()) is None:
            return found
        for name, table in _tables(path).items():
            with contextlib.suppress(PresetError):
                found.append(read_preset(path, name, table))
    return found


def read_preset(path: Path, name: str, table: object) -> Preset:
    """Return a preset from its table, with values that were checked.

    Raises:
        PresetError: a value is unknown or wrong; names file, field, rule and value.
    """
    where = f"{path}: presets.{name}"
    fields = _table_of(table, where, {"model", "system", "template", "sampling", "engine"})
    texts = {key: fields[key] for key in ("model", "system", "template") if key in fields}
    for key, text in texts.items():
        if not isinstance(text, str) or not text:
            raise PresetError(f"{where}.{key} must be a non-empty text; got {shown(text)}")
    for key in ("system", "template"):
        if key in texts:
            texts[key] = _text_of(texts[key], path, f"{where}.{key}")
    sampling = _table_of(fields.get("sampling", {}), f"{where}.sampling", SAMPLING)
    try:
        # A value that is raised is told of where the preset is used, and not by each command that reads the file.
        with_sampling_values(SamplingParams(), sampling)
    except InvalidParams as error:
        raise PresetError(f"{where}.sampling: {error}") from None
    values = _table_of(fields.get("engine", {}), f"{where}.engine", ENGINE)
    engine = {key: _engine_text(value) for key, value in values.items()}
    try:
        EngineConfig.check_texts(engine)  # a flag may give what goes with them
    except ConfigError as error:
        raise PresetError(
            f"{where}.engine.{error.field} must be {error.rule}; got {shown(error.got)}"
        ) from None
    return Preset(name=name, **texts, sampling=sampling, engine=engine)


def show_config(name: str | None, *, as_json: bool) -> None:
    """Print the file of presets, the presets, and the variables of the environment; or one preset.

    Raises:
        PresetError: the file cannot be read, or there is no preset of that name.
    """
    path = find_file()
    if name is None:
        presets = [] if path is None else read_presets(path)
    elif (preset := find_preset(name)) is not None:
        presets = [preset]
    else:
        raise PresetError(f"there is no preset {name!r} in {path or 'any file'}")
    variables = _variables()
    if as_json:
        found = {"file": None if path is None else str(path), "presets": [one.described() for one in presets]}
        click.echo(json.dumps(found | ({} if name else {"environment": variables}), ensure_ascii=False))
        return
    if name is None:
        looked = ", ".join(map(str, places()))
        click.echo(f"file: {path}" if path is not None else f"file: none (looked for {looked})")
        for variable, value in variables.items():
            click.echo(f"environment: {variable}={value}")
    for preset in presets:
        click.echo(f"\n{preset.name}")
        for key, value in _flat(preset.described()):
            click.echo(f"  {key} = {json.dumps(value, ensure_ascii=False)}")


def _variables() -> dict[str, str]:
    """Return the `TRIOLET_*` variables that are set, without secrets."""
    names = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX))
    return {name: HIDDEN if name in SECRET_VARIABLES else os.environ[name] for name in names}


def _flat(described: Mapping[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in described.items():
        if isinstance(value, Mapping):
            pairs += [(f"{key}.{inner}", one) for inner, one in value.items()]
        elif key != "name":
            pairs.append((key, value))
    return pairs


def _tables(path: Path) -> Mapping[str, Any]:
    """Return the tables of a file's presets, unchecked.

    Raises:
        PresetError: the file is no TOML, or has something beside presets.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PresetError(f"{path} must be readable TOML; {error}") from None
    tables = _table_of(
        _table_of(content, str(path), {"presets"}).get("presets", {}), f"{path}: presets", None
    )
    for name in tables:
        if NAME.fullmatch(name) is None:
            raise PresetError(
                f"{path}: the name of a preset must be letters, digits, . - and _; got {name!r}"
            )
    return tables


def _table_of(value: object, where: str, known: frozenset[str] | set[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PresetError(f"{where} must be a table; got {shown(value)}")
    if known is not None and (unknown := sorted(value.keys() - known)):
        raise PresetError(f"{where} must have only the fields {', '.join(sorted(known))}; got {unknown[0]!r}")
    return value


def _text_of(text: str, path: Path, where: str) -> str:
    """Return a text, or for `@FILE` the content of a file beside that of the presets."""
    if not text.startswith("@"):
        return text
    try:
        return (path.parent / os.path.expanduser(text[1:])).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise PresetError(f"{where} must name a readable text file; {error}") from None


def _engine_text(value: object) -> str:
    """Return the text that a flag would have for a value of TOML."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
