"""Libraries of others that the page brings along."""

from __future__ import annotations

import hashlib
import json
import re

from tests.source_tree import SRC

FOLDER = SRC / "triolet" / "server" / "routes" / "static" / "vendor"
LICENCES = {
    "MIT": "Permission is hereby granted",
    "BSD-3-Clause": "Redistribution and use in source and binary forms",
}


def test_every_library_is_the_one_that_is_written_down_with_its_licence() -> None:
    written = json.loads((FOLDER / "vendored.json").read_text())
    known = {"vendored.json"}
    for library in written:
        content = (FOLDER / library["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == library["sha256"], library["file"]
        assert LICENCES[library["licence"]] in (FOLDER / library["licence_file"]).read_text()
        assert re.fullmatch(r"\d+\.\d+\.\d+", library["version"])
        assert library["tarball"].startswith(f"https://registry.npmjs.org/{library['package']}/-/")
        assert library["tarball"].endswith(f"-{library['version']}.tgz")
        assert library["integrity"].startswith("sha512-")
        known |= {library["file"], library["licence_file"]}
    assert {path.name for path in FOLDER.iterdir()} == known


def test_the_libraries_add_little_to_the_wheel() -> None:
    import zlib

    packed = sum(len(zlib.compress(path.read_bytes())) for path in FOLDER.iterdir())
    assert packed < 200_000
