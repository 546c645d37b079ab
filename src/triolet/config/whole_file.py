"""Files that are written as a whole: whatever happens meanwhile, there is the old one or the new one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write a file atomically, readable for this user only.

    Raises:
        OSError: it cannot be written; the old file is kept.
    """
    descriptor, name = tempfile.mkstemp(
        prefix=f".{path.name[:64]}.", dir=path.absolute().parent
    )  # of mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            # Before the rename, or a power failure could leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
