"""Digest of a model's files, by which a recording knows the model again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

# What answers depend on: weights, configuration and tokenizer; not the model's README or its chat template.
SUFFIXES: Final = (".safetensors", ".gguf", ".bin", ".pt", ".json", ".model", ".txt")
CHUNK_BYTES: Final = 2**20


def digest_of_model(path: str, on_chunk: Callable[[], None] = lambda: None) -> str:
    """Return the digest of the contents of a model folder or a GGUF file, read from the disk.

    Args:
        on_chunk: called after every MiB; may raise to end the reading.
    Raises:
        OSError: a file cannot be read, or there is none.
    """
    place = Path(path)
    files = [place] if place.is_file() else sorted(one for one in place.iterdir() if one.suffix in SUFFIXES)
    if not files:
        raise FileNotFoundError(f"{path} holds no files of a model")
    digest = hashlib.blake2b(digest_size=16)
    for one in files:
        # Its own name says nothing about a single file; in a folder the names tell the files apart.
        name = b"" if one is place else one.name.encode()
        digest.update(len(name).to_bytes(8, "big") + name + one.stat().st_size.to_bytes(8, "big"))
        with one.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                on_chunk()
    return digest.hexdigest()
