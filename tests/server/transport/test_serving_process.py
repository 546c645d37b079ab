"""Settings of a process that serves many clients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from triolet.server.transport.serving_process import NUM_DESCRIPTORS

PREPARED = """
import os, resource
from pathlib import Path
from triolet.server.transport.serving_process import prepare_to_serve

most = {most}
if most:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
before = os.listdir("/proc/self/fd")
prepare_to_serve()
assert os.listdir("/proc/self/fd") == before
limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
status = Path("/proc/self/status").read_text()
print(limit, status.partition("FDSize:")[2].split()[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells the size of the table")
@pytest.mark.parametrize("most", [None, 300])
def test_the_table_of_descriptors_has_room_for_as_many_as_a_server_may_use_from_its_start(
    most: int | None,
) -> None:
    told = subprocess.run(
        [sys.executable, "-c", PREPARED.format(most=most)], capture_output=True, text=True, check=True
    )
    limit, size = map(int, told.stdout.split())
    expected = NUM_DESCRIPTORS if limit < 0 else min(limit, NUM_DESCRIPTORS)
    assert expected <= size <= 2 * expected
