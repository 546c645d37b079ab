"""What the fields of a configuration are made of: a sentence for `--help`, a default, and a check with a plain rule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, Self

import attrs

from triolet.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "TRIOLET_"
MAX_SECONDS: Final = 1e9  # thirty years; a longer wait is better called none


def option(text: str, *, default: Any, validator: Any, is_secret: bool = False) -> Any:
    """A field together with the sentence that `--help` prints for it; a secret is in no `repr` (`without_secrets`)."""
    metadata = {"help": text, "is_secret": is_secret}
    return attrs.field(default=default, validator=validator, repr=not is_secret, metadata=metadata)


class Configuration:
    """What the configurations share: how they are made of keywords, and of texts."""

    __slots__ = ()

    @classmethod
    def create(cls, config: Self | None = None, /, **fields: Any) -> Self:
        """The given configuration with some fields changed.

        Raises:
            ConfigError: an unknown or wrong field.
        """
        if unknown := sorted(fields.keys() - cls.field_types().keys()):
            rule = f"a field of {cls.__name__} ({', '.join(cls.field_types())})"
            raise ConfigError(unknown[0], rule, fields[unknown[0]])
        changed: Self = attrs.evolve(config or cls(), **fields)  # type: ignore[misc]
        return changed

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Self:
        """Structure field texts, as flags and the environment bring them.

        Args:
            texts: by field name; several values of one field are separated by commas.
        Raises:
            ConfigError: an unknown or wrong field.
        """
        types = cls.field_types()
        return cls.create(
            **{name: from_text(name, text, types.get(name, "str")) for name, text in texts.items()}
        )

    @classmethod
    def environment_fields(cls, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Field texts from `TRIOLET_*` variables; others with that prefix are not ours to judge."""
        environ = os.environ if environ is None else environ
        keys = {name: ENVIRONMENT_PREFIX + name.upper() for name in cls.field_types()}
        return {name: environ[key] for name, key in keys.items() if key in environ}

    def without_secrets(self) -> Self:
        """The same for a process that has no use for them."""
        changed: Self = attrs.evolve(self, **{field.name: field.default for field in self._secrets()})  # type: ignore[misc]
        return changed

    @classmethod
    def secret_variables(cls) -> frozenset[str]:
        """Names of the environment variables that such a process must not inherit either."""
        return frozenset(ENVIRONMENT_PREFIX + field.name.upper() for field in cls._secrets())

    @classmethod
    def _secrets(cls) -> list[attrs.Attribute[Any]]:
        fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)  # type: ignore[arg-type]
        return [field for field in fields if field.metadata.get("is_secret")]

    @classmethod
    def field_types(cls) -> dict[str, str]:
        """Name of each field, and its type as it is written."""
        fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)  # type: ignore[arg-type]
        return {field.name: str(field.type) for field in fields}


def one_of(choices: tuple[str, ...]) -> Any:
    """Check for one of a few words."""

    def check(_config: object, attribute: attrs.Attribute[str], value: object) -> None:
        if value not in choices:
            raise ConfigError(attribute.name, "one of " + ", ".join(choices), value)

    return check


def whole(minimum: int, maximum: int = 2**63 - 1, *, optional: bool = False) -> Any:
    """Check for a whole number."""
    rule = f"of at least {minimum}" if maximum >= 2**63 - 1 else f"from {minimum} to {maximum}"

    def check(_config: object, attribute: attrs.Attribute[int], value: object) -> None:
        if optional and value is None:
            return
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= maximum:  # type: ignore[operator]
            raise ConfigError(attribute.name, f"a whole number {rule}", value)

    return check


def seconds(*, optional: bool = False) -> Any:
    """Check for a number of seconds above 0."""

    def check(_config: object, attribute: attrs.Attribute[float], value: object) -> None:
        if optional and value is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MAX_SECONDS:  # type: ignore[operator]
            raise ConfigError(attribute.name, f"above 0 and at most {MAX_SECONDS:g} seconds", value)

    return check


def times() -> Any:
    """Check for a number above 1 that something else is multiplied by, or none."""

    def check(_config: object, attribute: attrs.Attribute[float], value: object) -> None:
        if value is None:
            return
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 1 < value <= MAX_SECONDS:  # type: ignore[operator]
            raise ConfigError(attribute.name, f"above 1 and at most {MAX_SECONDS:g}", value)

    return check


def text(*, optional: bool = False) -> Any:
    """Check for a text that is not empty."""

    def check(_config: object, attribute: attrs.Attribute[str], value: object) -> None:
        if optional and value is None:
            return
        if not isinstance(value, str) or not value:
            raise ConfigError(attribute.name, "a non-empty text", value)

    return check


def texts(_config: object, attribute: attrs.Attribute[tuple[str, ...]], value: object) -> None:
    """Check for a tuple of texts, none of them empty."""
    if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(attribute.name, "a tuple of texts, none of them empty", value)


def flag(_config: object, attribute: attrs.Attribute[bool], value: object) -> None:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ConfigError(attribute.name, "true or false", value)


_TRUTHS: Final[Mapping[str, bool]] = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def from_text(name: str, text: str, type_name: str) -> object:
    """The value of a field as a flag or the environment writes it.

    Args:
        name: of the field.
        text: what was written.
        type_name: the field's annotation.
    Raises:
        ConfigError: it can not be read as that type.
    """
    if "tuple" in type_name:
        return tuple(item for item in (part.strip() for part in text.split(",")) if item)
    if "int" in type_name:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(name, "a whole number", text) from None
    if "float" in type_name:
        try:
            return None if text.lower() == "none" else float(text)
        except ValueError:
            raise ConfigError(name, "a number of seconds, or none", text) from None
    if "bool" in type_name:
        if text.lower() not in _TRUTHS:
            raise ConfigError(name, "true or false", text)
        return _TRUTHS[text.lower()]
    return text
