"""Models that a command line names, beside its first one or in its place: presets, NAME=MODEL, or a model itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import click

from triolet.cli.models.presets import Preset, find_preset
from triolet.config.engine import EngineConfig
from triolet.config.fields import variable_name
from triolet.errors import ConfigError, shown

if TYPE_CHECKING:
    from triolet.server.models.host import FurtherModel

Config = TypeVar("Config")

NAMED_MODEL: Final = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*)=(?P<model>.+)")
# Of one model only, so that no other one takes them over from the command line.
OF_ONE_MODEL: Final = (
    "model", "served_model_name", "tokenizer", "chat_template", "revision", "lora_modules", "prompt_adapters",
)  # fmt: skip
# In a process of its own a crash of the model does not end the server, and its steps do not block the event loop.
SERVER_DEFAULTS: Final = {"runner": "process"}


def has_name(named: list[str]) -> bool:
    """Return True if one of these is NAME=MODEL."""
    return any(NAMED_MODEL.fullmatch(one) for one in named)


def chosen_model(text: str) -> Preset:
    """Return the model that a text names: a preset, NAME=MODEL, or a model under its own name.

    Raises:
        PresetError: the file of presets cannot be read, or the preset is wrong.
    """
    if (preset := find_preset(text)) is not None:
        return preset
    if (named := NAMED_MODEL.fullmatch(text)) and not os.path.exists(text):
        return attrs.evolve(
            find_preset(named["model"]) or Preset(name="", model=named["model"]), name=named["name"]
        )
    return Preset(name=EngineConfig(model=text).model_name, model=text)


def config_of(
    preset: Preset, flags: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> EngineConfig:
    """Return the configuration of a model beside a command's first one, or in its place.

    Args:
        preset: the model.
        flags: texts of the engine's flags that count for every model.
        defaults: of the command, where they differ from the engine's.
    Raises:
        click.UsageError: a wrong value; names the flag or the variable it came from.
    """
    environment = EngineConfig.environment_fields()
    for name in OF_ONE_MODEL:
        environment.pop(name, None)
    fields = {
        **(defaults or {}),
        **environment,
        "served_model_name": preset.name,
        **preset.engine_fields,
        **flags,
    }
    if preset.model is not None:
        fields["model"] = preset.model
    config = blaming({**preset.engine, **flags}, lambda: EngineConfig.from_texts(fields))
    if config.record is not None:  # a recording has one writer
        config = attrs.evolve(config, record=f"{config.record}.{config.model_name.replace('/', '_')}")
    return config


def further_model(preset: Preset, flags: Mapping[str, str]) -> FurtherModel:
    """Return a model that a server loads on demand; flags count for it as for the first one."""
    config = config_of(preset, flags, SERVER_DEFAULTS)
    from triolet.cli.models.hub_cache import weight_bytes
    from triolet.server.models.host import FurtherModel

    return FurtherModel(config=config, size_bytes=weight_bytes(config.model))


def blaming(flags: Mapping[str, str], structure: Callable[[], Config]) -> Config:
    """Return what `structure` does.

    Args:
        flags: texts that came from flags, by field.
        structure: makes a configuration.
    Raises:
        click.UsageError: a wrong value; names the flag or the variable it came from.
    """
    try:
        return structure()
    except ConfigError as error:
        source = flag_of(error.field) if error.field in flags else variable_name(error.field)
        raise click.UsageError(f"{source} must be {error.rule}; got {shown(error.got)}") from error


def flag_of(field: str) -> str:
    """Return the flag of a field."""
    return "--" + field.replace("_", "-")
