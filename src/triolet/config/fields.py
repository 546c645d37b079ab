"""Building blocks of a configuration: fields with a sentence for `--help`, a default, and a rule in plain words.

A rule checks values, reads the texts of flags and environment variables, and says how `--help` shows the field, so that
command line, environment and documentation are derived from the fields alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import attrs

from triolet.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "TRIOLET_"
KEY_RULE: Final = "of visible ASCII characters, as a header has them"
_SCALED: Final = re.compile(r"(?P<number>[0-9]+)(\.(?P<fraction>[0-9]+))?(?P<factor>[kKmMgGtT])")
_KEY: Final = re.compile("[!-~]+")
MAX_SECONDS: Final = 1e9  # thirty years; a longer wait is better called none


class _Hidden:
    """Stand for a secret in a message, which may be logged."""

    def __repr__(self) -> str:
        return "a secret that is not shown"


_HIDDEN: Final = _Hidden()


@attrs.frozen(kw_only=True)
class FieldRule:
    """Rule of one field, called by attrs as its validator."""

    accepts: Callable[[Any], bool]  # tell whether a value is allowed
    expected: str  # the same in words, completing "<field> must be ..."
    parse: Callable[[str], object] = str  # make the value from a text; raises ValueError
    expected_text: str = "a text"  # what a text must be to be parsed, completing the same sentence
    metavar: str | None  # placeholder of the value in `--help`; None for a flag that is on or off
    choices: tuple[str, ...] = ()  # all values, where there are a few
    aliases: Mapping[str, str] = attrs.field(factory=dict)  # other names of some of them
    is_optional: bool = False  # None is allowed, and its text is `none`

    def __call__(self, _config: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if value is None and self.is_optional:
            return
        if not self.accepts(value):
            is_secret = attribute.metadata.get("is_secret", False) and value
            raise ConfigError(attribute.name, self.expected, _HIDDEN if is_secret else value)

    def named(self, value: object) -> object:
        """Return the value that another name of it stands for; any other value as it is."""
        return self.aliases.get(value, value) if isinstance(value, str) else value

    def read(self, name: str, text: str) -> object:
        """Return the value that a flag or an environment variable stands for.

        Args:
            text: as it was written.
        Raises:
            ConfigError: the text cannot be parsed.
        """
        if self.is_optional and text.lower() == "none":
            return None
        try:
            return self.parse(text)
        except ValueError:
            or_none = ", or none" if self.is_optional else ""
            raise ConfigError(name, self.expected_text + or_none, text) from None


def option(
    sentence: str,
    *,
    default: Any,
    rule: FieldRule,
    is_secret: bool = False,
    converter: Callable[[Any], Any] | None = None,
) -> Any:
    """Return an attrs field with its sentence for `--help` and its rule; a secret is left out of every `repr`."""
    metadata = {"help": sentence, "rule": rule, "is_secret": is_secret}
    if rule.aliases and converter is None:
        converter = rule.named
    return attrs.field(
        default=default, validator=rule, converter=converter, repr=not is_secret, metadata=metadata
    )


def rule_of(field: attrs.Attribute[Any]) -> FieldRule:
    """Return the rule of a configuration's field."""
    rule: FieldRule = field.metadata["rule"]
    return rule


class Configuration:
    """Base of the configurations: how they are made from keywords and from texts."""

    __slots__ = ()

    @classmethod
    def create(cls, config: Self | None = None, /, **fields: Any) -> Self:
        """Return the given configuration, or the default one, with some fields changed.

        Raises:
            ConfigError: `config` is no such configuration, or a field is unknown or wrong.
        """
        known = cls.rules()
        if config is not None and not isinstance(config, cls):
            rule = f"an {cls.__name__}; all else is given by keyword, such as {next(iter(known))}=..."
            raise ConfigError("config", rule, config)
        if unknown := sorted(fields.keys() - known.keys()):
            rule = f"a field of {cls.__name__} ({', '.join(known)})"
            raise ConfigError(unknown[0], rule, fields[unknown[0]])
        changed: Self = attrs.evolve(config or cls(), **fields)  # type: ignore[misc]
        return changed

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Self:
        """Make a configuration from the texts of flags and environment variables.

        Args:
            texts: by field name; several values of one field are separated by commas.
        Raises:
            ConfigError: an unknown or wrong field.
        """
        rules = cls.rules()
        # create() refuses unknown names: their texts stay as they are until then
        return cls.create(
            **{name: rules[name].read(name, text) if name in rules else text for name, text in texts.items()}
        )

    @classmethod
    def check_texts(cls, texts: Mapping[str, str]) -> None:
        """Check the texts of some fields, each by its own rule: what goes together is known of the whole configuration.

        Args:
            texts: by name of a field.
        Raises:
            ConfigError: a wrong one.
        """
        for field in cls._fields():
            if field.name in texts:
                rule = rule_of(field)
                rule(None, field, rule.read(field.name, texts[field.name]))

    @classmethod
    def environment_fields(cls, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the texts of the `TRIOLET_*` variables that name a field, by field name.

        Args:
            environ: by default this process's. `config.environment.unknown_variables` finds misspelt names in it.
        """
        environ = os.environ if environ is None else environ
        keys = {name: variable_name(name) for name in cls.rules()}
        return {name: environ[key] for name, key in keys.items() if key in environ}

    def without_secrets(self) -> Self:
        """Return a copy without secrets, for a process that has no use for them."""
        changed: Self = attrs.evolve(self, **{field.name: field.default for field in self._secrets()})  # type: ignore[misc]
        return changed

    @classmethod
    def secret_variables(cls) -> frozenset[str]:
        """Return the names of environment variables that such a process must not inherit either."""
        return frozenset(variable_name(field.name) for field in cls._secrets())

    @classmethod
    def _secrets(cls) -> list[attrs.Attribute[Any]]:
        return [field for field in cls._fields() if field.metadata["is_secret"]]

    @classmethod
    def rules(cls) -> dict[str, FieldRule]:
        """Return the rule of each field, by name, in the order of the class."""
        return {field.name: rule_of(field) for field in cls._fields()}

    @classmethod
    def _fields(cls) -> tuple[attrs.Attribute[Any], ...]:
        fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cls)  # type: ignore[arg-type]
        return fields


def variable_name(field: str) -> str:
    """Return the name of a field's environment variable."""
    return ENVIRONMENT_PREFIX + field.upper()


# -------------------------------------------------------------------------------------------- rules


def one_of(choices: tuple[str, ...], aliases: Mapping[str, str] | None = None) -> FieldRule:
    """Allow one of a few words, or another name of one."""
    names = aliases or {}
    return FieldRule(
        accepts=lambda value: value in choices,
        expected="one of " + ", ".join(choices),
        parse=lambda text: names.get(text, text),
        metavar="|".join(choices),
        choices=choices,
        aliases=names,
    )


def whole(
    minimum: int, maximum: int = 2**63 - 1, *, optional: bool = False, has_suffixes: bool = False
) -> FieldRule:
    """Allow a whole number within bounds, both included; with suffixes its text may be such as `4k`, see `scaled`."""
    bounds = f"of at least {minimum}" if maximum >= 2**63 - 1 else f"from {minimum} to {maximum}"
    return FieldRule(
        accepts=lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum
        ),
        expected=f"a whole number {bounds}",
        parse=scaled if has_suffixes else int,
        expected_text="a whole number, such as 4096, 4k (4000) or 4K (4096)"
        if has_suffixes
        else "a whole number",
        metavar="N",
        is_optional=optional,
    )


def scaled(text: str) -> int:
    """Return the whole number of a text, which may end in a factor: k, m, g, t are decimal, K, M, G, T binary.

    Raises:
        ValueError: it is none; a fraction may stand before a decimal factor only.

    Source: vLLM's `human_readable_int`.
    """
    if (match := _SCALED.fullmatch(text.strip())) is None:
        return int(text)
    number, fraction, factor = match["number"], match["fraction"] or "", match["factor"]
    scale: int = (1024 if factor.isupper() else 1000) ** ("kmgt".index(factor.lower()) + 1)
    if factor.isupper() and fraction:
        return int(text)  # no whole number: raises
    return int(f"{number}{fraction}") * scale // int("1" + "0" * len(fraction))


def seconds(*, optional: bool = False) -> FieldRule:
    """Allow a number of seconds above 0."""
    return FieldRule(
        accepts=lambda value: _is_number(value) and 0 < value <= MAX_SECONDS,
        expected=f"above 0 and at most {MAX_SECONDS:g} seconds",
        parse=float,
        expected_text="a number of seconds",
        metavar="SECONDS",
        is_optional=optional,
    )


def factor(*, optional: bool = False) -> FieldRule:
    """Allow a number above 1 that another quantity is multiplied by."""
    return FieldRule(
        accepts=lambda value: _is_number(value) and 1 < value <= MAX_SECONDS,
        expected=f"above 1 and at most {MAX_SECONDS:g}",
        parse=float,
        expected_text="a number",
        metavar="FACTOR",
        is_optional=optional,
    )


def share() -> FieldRule:
    """Allow a part of a whole, above 0 and at most 1."""
    return FieldRule(
        accepts=lambda value: _is_number(value) and 0 < value <= 1,
        expected="above 0 and at most 1",
        parse=float,
        expected_text="a number",
        metavar="SHARE",
    )


def text(*, optional: bool = False) -> FieldRule:
    """Allow a text that is not empty."""
    return FieldRule(
        accepts=lambda value: isinstance(value, str) and bool(value),
        expected="a non-empty text",
        metavar="TEXT",
        is_optional=optional,
    )


def names(sentence: str) -> Any:
    """Return a field for a name, a tuple or list of names, or None; commas separate them in a flag.

    Its value is a text where there is one name, and a tuple of several ones.
    """

    def parse(text: str) -> tuple[str, ...]:
        if not (items := _items(text)):
            raise ValueError(text)
        return items

    def listed(value: object) -> tuple[object, ...]:
        return value if isinstance(value, tuple) else (value,)

    rule = attrs.evolve(
        texts(),
        accepts=lambda value: all(isinstance(item, str) and item for item in listed(value)),
        expected="a non-empty text or a tuple of such texts",
        parse=parse,
        is_optional=True,
    )
    return option(sentence, default=None, rule=rule, converter=_one_or_several)


def _one_or_several(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return tuple(value) if len(value) > 1 else value[0] if value else None


def matching(pattern: str, expected: str, *, optional: bool = False) -> FieldRule:
    """Allow a text that a regular expression matches as a whole."""
    expression = re.compile(pattern)
    return satisfying(lambda value: expression.fullmatch(value) is not None, expected, optional=optional)


def satisfying(is_valid: Callable[[str], bool], expected: str, *, optional: bool = False) -> FieldRule:
    """Allow a text of which a predicate is true."""
    return FieldRule(
        accepts=lambda value: isinstance(value, str) and is_valid(value),
        expected=expected,
        metavar="TEXT",
        is_optional=optional,
    )


def texts() -> FieldRule:
    """Allow a tuple of texts, none of them empty; commas separate them in a flag."""
    return FieldRule(
        accepts=lambda value: (
            isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
        ),
        expected="a tuple of texts, none of them empty",
        parse=_items,
        expected_text="one text or several with commas between them",
        metavar="TEXT,...",
    )


def each_matching(pattern: str, expected: str) -> FieldRule:
    """Allow a tuple of texts that a regular expression matches as a whole; commas separate them in a flag."""
    expression = re.compile(pattern)
    return attrs.evolve(
        texts(),
        accepts=lambda value: (
            isinstance(value, tuple)
            and all(isinstance(item, str) and expression.fullmatch(item) is not None for item in value)
        ),
        expected=f"a tuple of texts, each {expected}",
    )


def keys() -> FieldRule:
    """Allow a tuple of API keys; commas separate them in a flag, which may not be given empty."""

    def parse(text: str) -> tuple[str, ...]:
        # A variable that was to hold keys, and is empty, would leave a server open.
        if not (items := _items(text)):
            raise ValueError(text)
        return items

    return attrs.evolve(
        texts(),
        accepts=lambda value: isinstance(value, tuple) and all(map(is_key, value)),
        expected=f"a tuple of texts, none of them empty, {KEY_RULE}",
        parse=parse,
    )


def is_key(value: object) -> bool:
    """Return whether a value is a key that the header of a request can carry."""
    return isinstance(value, str) and _KEY.fullmatch(value) is not None


def bounds(minimum: int, maximum: int) -> FieldRule:
    """Allow None, or a least and a larger greatest whole number; a comma separates them in a flag."""
    return FieldRule(
        accepts=lambda value: (
            isinstance(value, tuple)
            and len(value) == 2
            and all(isinstance(item, int) and not isinstance(item, bool) for item in value)
            and minimum <= value[0] < value[1] <= maximum
        ),
        expected=f"(min, max) with {minimum} <= min < max <= {maximum}",
        parse=lambda text: tuple(int(part) for part in text.split(",")),
        expected_text="MIN,MAX",
        metavar="MIN,MAX",
        is_optional=True,
    )


def flag(*, optional: bool = False) -> FieldRule:
    """Allow true or false."""
    return FieldRule(
        accepts=lambda value: isinstance(value, bool),
        expected="true or false",
        parse=_truth,
        expected_text="true or false",
        metavar=None,
        is_optional=optional,
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(item for item in (part.strip() for part in text.split(",")) if item)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TRUTHS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def _truth(text: str) -> bool:
    try:
        return _TRUTHS[text.lower()]
    except KeyError:
        raise ValueError(text) from None
