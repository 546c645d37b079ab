"""File names of the traces that `start_profile` records."""

from __future__ import annotations

import itertools
import os
import re
import time

from triolet.errors import InvalidRequest, UnsupportedFeature, shown

_NUMBERS = itertools.count()  # of the traces of this process


def check_profiling(profile_dir: str | None, method: str) -> str:
    """Return the folder of the traces.

    Raises:
        UnsupportedFeature: there is none.
    """
    if profile_dir is None:
        raise UnsupportedFeature(f"{method} is not offered: profile_dir is not set", field="profile_dir")
    return profile_dir


def new_profile_path(profile_dir: str, prefix: object = None) -> str:
    """Return the path of a new trace.

    Raises:
        InvalidRequest: the prefix is no part of a file's name.
    """
    if prefix is not None and not (
        isinstance(prefix, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", prefix)
    ):
        raise InvalidRequest(
            f"prefix must be 1 to 100 letters, digits, dots, hyphens and underscores; got {shown(prefix)}",
            field="prefix",
            got=prefix,
        )
    name = f"{prefix or 'triolet'}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_NUMBERS)}.json"
    # Absolute: the worker may be a process with another working directory.
    return os.path.join(os.path.abspath(profile_dir), name)
