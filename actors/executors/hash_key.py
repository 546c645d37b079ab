"""Key of the hashes of the prefix cache: secret, and with a prefix store on disk the same for all that share it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Final

from triolet.config.engine import EngineConfig
from triolet.errors import ConfigError

_NUM_BYTES: Final = 32


def hash_key(config: EngineConfig) -> bytes:
    """Return the key for an engine; that of a prefix store lies in its folder, for its owner to read.

    Raises:
        ConfigError: the folder of the store cannot be written, or what lies there is no key.
    """
    if config.kv_store is None:
        return secrets.token_bytes(_NUM_BYTES)
    try:
        key = _read_or_make(Path(config.kv_store))
    except OSError as error:
        rule = f"a folder that can be written ({error.strerror})"
        raise ConfigError("kv_store", rule, config.kv_store) from error
    if len(key) != _NUM_BYTES:
        raise ConfigError("kv_store", f"a prefix store, whose key has {_NUM_BYTES} bytes", config.kv_store)
    return key


def _read_or_make(folder: Path) -> bytes:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "key"
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    descriptor, temporary = tempfile.mkstemp(dir=folder)  # only its owner may read it
    try:
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_NUM_BYTES))
        # Whole from the start, and of two processes that make one at the same time one wins.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    return path.read_bytes()
