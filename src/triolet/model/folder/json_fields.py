"""Reading the JSON files of a model folder: every wrong value is an error that names file, field and rule."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from triolet.errors import ModelFileError, shown


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold one object.

    Raises:
        ModelFileError: the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(path, "is missing") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    # Beside what is no JSON: an integer of thousands of digits, which Python does not read.
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"must hold a JSON object; got {type(value).__name__}")
    return value


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)  # JSON has no NaN, but Python's reader takes it
    # Python's integers go beyond its floats.
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@attrs.frozen
class Fields:
    """JSON object with access to its fields by name and type.

    A field that is absent takes the default. So does a null, except where an `optional_*` method is asked:
    there null means "none", which need not be the default.
    """

    path: Path  # the file, for error messages
    values: Mapping[str, Any]  # the object
    prefix: str = ""  # where in the file the object lies, such as `rope_parameters.`; for error messages

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def wrong(self, name: str, rule: str) -> ModelFileError:
        """Return the error for a field `name` that breaks `rule`."""
        return ModelFileError(
            self.path, f"{self.prefix}{name} must be {rule}; got {shown(self.values.get(name))}"
        )

    def _get(self, name: str, default: Any, rule: str, holds: Callable[[Any], bool]) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not holds(value):
            raise self.wrong(name, rule)
        return value

    def integer(self, name: str, default: int, *, minimum: int = 1) -> int:
        """Return an integer of at least `minimum`."""
        value = self.optional_integer(name, default, minimum=minimum)
        return default if value is None else value

    def optional_integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        """Return an integer of at least `minimum`, or None where the file says null."""
        if name not in self.values:
            return default
        value: int | None = self._get(
            name,
            None,
            f"an integer of at least {minimum}",
            lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= minimum,
        )
        return value

    def number(self, name: str, default: float) -> float:
        """Return a number as a float."""
        return float(self._get(name, default, "a number", _is_number))

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a number, or None where the file says null."""
        if name not in self.values:
            return default
        value = self._get(name, None, "a number", _is_number)
        return None if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value: bool = self._get(name, default, "true or false", lambda value: isinstance(value, bool))
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value: str = self._get(name, default, "a string", lambda value: isinstance(value, str))
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None if absent."""
        value = self._get(
            name,
            None,
            "a list of strings",
            lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        )
        return None if value is None else tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty if absent."""
        rule = "a list of integers"
        return tuple(
            self._get(name, (), rule, lambda v: isinstance(v, list) and all(type(x) is int for x in v))
        )

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers; empty if absent."""
        rule = "a list of numbers"
        return tuple(self._get(name, (), rule, lambda v: isinstance(v, list) and all(map(_is_number, v))))

    def section(self, name: str) -> Fields | None:
        """Return the object under `name`, or None if absent."""
        value = self._get(name, None, "an object", lambda value: isinstance(value, dict))
        return None if value is None else Fields(self.path, value, f"{self.prefix}{name}.")
