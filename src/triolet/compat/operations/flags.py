"""Flags of `EngineArgs` for a program's own command line, as vLLM's `add_cli_args` makes them."""

from __future__ import annotations

import json
import sys
from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    Namespace,
)
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from triolet.config.engine import EngineConfig
from triolet.config.fields import FieldRule, rule_of
from triolet.config.vllm_names import DROPPED, ELSEWHERE, FIXED, IN_VLLM
from triolet.errors import ConfigError

_OBJECTS: Final = ("speculative_config", "hf_overrides", "distributed_executor_backend", "worker_use_ray")


class FlexibleArgumentParser(ArgumentParser):
    """Argument parser that takes flags with underscores, too, as vLLM's does."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse words; those of a command line by default."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)


def _with_dashes(word: str) -> str:
    flag, is_valued, value = word.partition("=")
    return flag.replace("_", "-") + is_valued + value if flag.startswith("--") else word


def add_flags(parser: ArgumentParser, defaults: object, *, logs_requests: bool) -> None:
    """Add the flags to a parser, under vLLM's names and ours.

    Args:
        defaults: has the default of each argument as an attribute.
        logs_requests: whether there are those of the lines about requests.
    """
    group = parser.add_argument_group("Engine")
    for field in attrs.fields(EngineConfig):
        rule, name = rule_of(field), IN_VLLM.get(field.name, field.name)
        flags = dict.fromkeys((_flag(name), _flag(field.name)))
        sentence = field.metadata["help"].replace("%", "%%")  # argparse formats it
        options: dict[str, Any] = {"dest": name, "default": getattr(defaults, name), "help": sentence}
        if rule.metavar is None:
            group.add_argument(*flags, action=BooleanOptionalAction, **options)
            continue
        options |= {"type": _reader(field.name, rule), "metavar": rule.metavar}
        if rule.metavar.endswith(",..."):  # with spaces between them in vLLM
            options |= {"nargs": "+", "action": _Joined}
        group.add_argument(*flags, **options)
    group.add_argument("--disable-log-stats", action="store_true")
    if logs_requests:
        group.add_argument("--enable-log-requests", action=BooleanOptionalAction, default=False)
        group.add_argument("--max-log-len", type=int, default=None)
    known = {field.name for field in attrs.fields(EngineConfig)}
    for name in dict.fromkeys((*_OBJECTS, *FIXED, *DROPPED, *ELSEWHERE)):
        if name not in known:
            options = {"dest": name, "default": getattr(defaults, name), "help": SUPPRESS}
            # Without a value it asks for true, as `--enable-expert-parallel` does.
            group.add_argument(_flag(name), type=_value, nargs="?", const=True, **options)


class _Joined(Action):
    """Joins several words, each of several values."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, tuple(one for word in values for one in word))


def _flag(name: str) -> str:
    return "--" + name.strip("_").replace("_", "-")


def _reader(name: str, rule: FieldRule) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return rule.read(name, text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


def _value(text: str) -> object:
    """Return the value of an argument whose type is vLLM's: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return {"none": None, "true": True, "false": False}.get(text.lower(), text)
