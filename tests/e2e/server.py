"""`triolet serve` as a program of its own, on a free port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from tests.source_tree import SRC


@attrs.frozen
class Server:
    """A running one.

    Args:
        process: it.
        url: where it listens.
    """

    process: subprocess.Popen[str]
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=120) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> dict[str, float]:
        """By name and labels, without those that all have."""
        found = {}
        for line in self.get("/metrics").splitlines():
            if line.startswith("triolet:"):
                name, _, value = line.rpartition(" ")
                name = (
                    name.removeprefix("triolet:")
                    .replace('engine="0",', "")
                    .replace('model_name="triolet-nano"', "")
                )
                found[name.replace("{}", "").replace("{,", "{").replace(",}", "}")] = float(value)
        return found

    def model(self) -> Any:
        return json.loads(self.get("/v1/models"))["data"][0]

    def stop(self, number: signal.Signals = signal.SIGTERM, within_s: float = 300) -> int:
        """Ask it to end; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(within_s)


@contextmanager
def serve(*flags: str, log: int = subprocess.DEVNULL) -> Iterator[Server]:
    """Start one with these flags; it has ended when the scope is left.

    Args:
        log: descriptor of a file for what it logs.
    """
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "triolet", "serve", "--port", "0", *flags],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "it has ended before it was ready"
        yield Server(process, url)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
