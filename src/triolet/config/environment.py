"""`TRIOLET_*` variables: those that nothing reads, most likely a misspelt field, and those with secrets."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Final

from triolet.config.engine import EngineConfig
from triolet.config.fields import ENVIRONMENT_PREFIX, variable_name
from triolet.config.server import GatewayConfig

# read elsewhere: by the command line, by the CPU kernels and their build, and by runner processes
OTHER_VARIABLES: Final = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in ("DEBUG", "CPU_TARGET", "PURE_WHEEL", "LIFELINE", "URL", "API_KEY", "CONFIG")
)

SECRET_VARIABLES: Final = (
    EngineConfig.secret_variables() | GatewayConfig.secret_variables() | {f"{ENVIRONMENT_PREFIX}API_KEY"}
)
"""Variables that no process that computes inherits, and no description shows."""


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Return the `TRIOLET_*` variables that are set and not known, each with the known name nearest to it, if any.

    Args:
        environ: by default this process's.
    """
    environ = os.environ if environ is None else environ
    fields = {*EngineConfig.rules(), *GatewayConfig.rules()}
    known = OTHER_VARIABLES | {variable_name(field) for field in fields}
    unknown = {name for name in environ if name.startswith(ENVIRONMENT_PREFIX)} - known
    return {name: _nearest(name, known) for name in sorted(unknown)}


def _nearest(name: str, known: Collection[str]) -> str | None:
    # without the prefix, which would make every name near to every other
    suffixes = sorted(variable.removeprefix(ENVIRONMENT_PREFIX) for variable in known)
    close = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), suffixes, n=1)
    return ENVIRONMENT_PREFIX + close[0] if close else None
