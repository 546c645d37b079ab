"""The program of a peer that has no engine: it does with each round what its options say."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # peers are started without PYTHONPATH

from benchmarks.peers.line_protocol import Jobs, Run, Timer, serve


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Run]:
    print("an engine talks while it loads")
    if package := options.get("package"):
        __import__(package)
    return {"version": "1.2.3"}, lambda jobs: run(jobs, **options)


def run(jobs: Jobs, *, does: str = "answers", **options: Any) -> dict[str, Any]:
    print("and while it runs")
    if does == "raises":
        raise ValueError("no room for 7 tokens")
    if does == "ends":
        os._exit(3)
    if does == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    timer = Timer([due_s for _, _, due_s in jobs])
    while timer.awaits_more:
        for row in timer.arrivals(is_idle=True):
            prompt, num_tokens, _ = jobs[row]
            for number in range(num_tokens - (does == "gives too little")):
                timer.note(row, [prompt[0] + number])
    return timer.figures()


if __name__ == "__main__":
    serve(start)
