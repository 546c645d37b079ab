"""A peer: another engine in a process of its own, asked for rounds, and stopped in between."""

from __future__ import annotations

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
WORKERS = {"vllm": "vllm_worker.py", "llama.cpp": "llama_cpp_worker.py"}


class Peer:
    """Starts the engine on entry, ends it on exit.

    Between rounds the whole process group is stopped (SIGSTOP): threads that spin while they wait would take the
    processor from whoever is measured next.

    Args:
        engine: a key of WORKERS.
        python: the interpreter that has the engine installed.
        options: for its worker.
    """

    def __init__(self, engine: str, python: str, options: dict[str, Any]) -> None:
        self.engine = engine
        self._command = [python, str(Path(__file__).parent / WORKERS[engine]), json.dumps(options)]
        self._environment = {**os.environ, **_advised(engine, python)}
        self._process: subprocess.Popen[str] | None = None
        self.facts: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        for name in ("PYTHONPATH", "PYTHONHOME"):
            self._environment.pop(name, None)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            self._command, **pipes, env=self._environment, text=True, start_new_session=True
        )
        self.facts = self._heard()
        self._signal(signal.SIGSTOP)
        return self

    def run(self, jobs: Sequence[tuple[list[int], int]]) -> dict[str, Any]:
        """All jobs (prompt ids, tokens wanted) at once; what `line_protocol.Timer` noted."""
        self._signal(signal.SIGCONT)
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(jobs) + "\n")
        self._process.stdin.flush()
        answer = self._heard()
        self._signal(signal.SIGSTOP)
        given = [len(token_ids) for token_ids in answer["token_ids"]]
        if given != [num_tokens for _, num_tokens in jobs]:
            raise RuntimeError(f"{self.engine} gave {given} tokens, which is not what it was asked for")
        return answer

    def _heard(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.engine} ended with {self._process.wait()}: {self._command}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.wait()


def _advised(engine: str, python: str) -> dict[str, str]:
    """What makes an engine fast here: Intel's OpenMP, as vLLM advises for CPUs; threads that stay on their cores."""
    if engine == "llama.cpp":
        return {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    path = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {"LD_PRELOAD": str(path)} if path.exists() else {}
