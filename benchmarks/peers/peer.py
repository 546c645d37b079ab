"""Peer: another engine in a process of its own, which runs rounds on request and is stopped in between."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

GGUF = {"float32": "f32", "bfloat16": "bf16", "int8": "q8_0"}  # what llama.cpp calls them
WORKERS = {
    "vllm": "vllm_worker.py",
    "vllm-embedding": "vllm_embedding_worker.py",
    "llama.cpp": "llama_cpp_worker.py",
    "sentence-transformers": "sentence_transformers_worker.py",
}


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """Add `--vllm` and `--llama-cpp`."""
    parser.add_argument("--vllm", default=os.environ.get("BENCH_VLLM"), help="a Python that has vLLM")
    parser.add_argument(
        "--llama-cpp", default=os.environ.get("BENCH_LLAMA_CPP"), help="a Python that has llama-cpp-python"
    )


class PeerFailed(Exception):
    """The other engine could not be started, or failed to run a round."""


class Peer:
    """Context manager that starts the engine on entry and ends it on exit.

    Between rounds the whole process group is stopped (SIGSTOP): threads that spin while they wait would take the
    processor from the engine that is measured next.

    Args:
        engine: a key of WORKERS.
        python: the interpreter that has the engine installed.
        options: for its worker.
    Raises:
        PeerFailed: on entry and by `run`, with the engine's message.
    """

    def __init__(self, engine: str, python: str, options: dict[str, Any]) -> None:
        self.engine = engine
        self._command = [python, str(Path(__file__).parent / WORKERS[engine]), json.dumps(options)]
        self._environment = {**os.environ, **_advised(engine, python)}
        self._process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        for name in ("PYTHONPATH", "PYTHONHOME"):
            self._environment.pop(name, None)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        try:
            self._process = subprocess.Popen(
                self._command, **pipes, env=self._environment, text=True, start_new_session=True
            )
        except OSError as error:
            raise PeerFailed(f"the Python of {self.engine} cannot be started: {error}") from None
        try:
            self.facts = self._heard()
        except BaseException:
            self._end()
            raise
        self._signal(signal.SIGSTOP)
        return self

    def run(self, jobs: Sequence[tuple[list[int], int, float]]) -> dict[str, Any]:
        """Run a round of jobs.

        Args:
            jobs: for each the prompt's ids, the tokens wanted, and when it comes, seconds from now.
        Returns:
            What `line_protocol.Timer` noted.
        """
        answer = self.ask(jobs)
        given = [len(token_ids) for token_ids in answer["token_ids"]]
        if given != [num_tokens for _, num_tokens, _ in jobs]:
            raise PeerFailed(f"{self.engine} gave {given} tokens, which is not what it was asked for")
        return answer

    def ask(self, question: object) -> dict[str, Any]:
        """Return the worker's answer to a line of JSON; it runs only in between."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):  # what it died of is heard below
            self._signal(signal.SIGCONT)
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._heard()
        self._signal(signal.SIGSTOP)
        return answer

    def _heard(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(f"{self.engine} ended with {self._process.wait()}: {' '.join(self._command)}")
        heard: dict[str, Any] = json.loads(line)
        if (error := heard.get("error")) is not None:
            raise PeerFailed(f"{self.engine}, by {self._command[0]}: {error}")
        return heard

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # of what it had not read
                pipe.close()


def _advised(engine: str, python: str) -> dict[str, str]:
    """Return the environment that vLLM advises for CPUs: Intel's OpenMP, and threads that stay on their cores."""
    if engine == "llama.cpp":
        return {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    path = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(path)} if path.exists() else {}
