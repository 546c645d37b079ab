"""Check and measure triolet on this machine's GPU with one command: `make gpu`, or `python3 benchmarks/gpu.py`.

    python3 benchmarks/gpu.py [--dry-run] [--sections NAME,...] [--wheels FOLDER] [--budget S] [--output FILE]

Needs torch and triton; other packages may lie as wheels in a folder (tools/gpu_wheels.py fetches them). Each section of
`gpu_sections.py` runs in a process of its own with a time limit, because an illegal access poisons all later CUDA calls
of a process: a section that fails, hangs or crashes is reported, and the next one begins. Results are JSON lines in the
form of benchmarks/results; each is written the moment it is known, so a run that is cut off keeps what it has.

`--dry-run` runs every section on a pretended device: CPU tensors, the Triton kernels in Triton's interpreter, tiny
models. It shows that the command works; its times mean nothing, and each of its lines says so (`dry_run`).

Exits with 1 if a section did not pass, or without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Longest time of each section in seconds; the budget of the whole run cuts the last ones shorter.
SECTIONS = {"ceilings": 40, "kernels": 120, "parity": 100, "engine": 60, "faults": 80, "bench": 300}
BUDGET_S = 470.0  # under 8 minutes
NO_GPU = (
    "make gpu needs a CUDA GPU, and torch sees none here: nothing was measured "
    "(make gpu ARGS=--dry-run tries the command on a pretended device)."
)

Write = Callable[[dict[str, Any]], None]


def has_gpu() -> bool:
    """Return whether torch sees a GPU, asked in a process that does not keep a CUDA context."""
    probe = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return (
        subprocess.run([sys.executable, "-c", probe], stderr=subprocess.DEVNULL, check=False).returncode == 0
    )


def install_wheels(folder: Path, target: Path) -> None:
    """Unpack carried wheels into a folder; nothing is fetched."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if wheels:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(target), *wheels], check=True)


def lines_of(command: list[str], environment: dict[str, str], limit_s: float) -> Iterator[str | int | None]:
    """Yield the lines that a program writes; last its exit status, or None if it was killed at the limit."""
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert child.stdout is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in child.stdout or ():
            lines.put(line)
        lines.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end_s = time.monotonic() + limit_s
    try:
        while (line := lines.get(timeout=max(0.0, end_s - time.monotonic()))) is not None:
            yield line
        yield child.wait(timeout=max(1.0, end_s - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired):
        yield None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        reader.join()
        child.stdout.close()


def run_section(
    command: list[str], environment: dict[str, str], limit_s: float, write: Write
) -> dict[str, Any]:
    """Run a section, write its results as they come, and return how it ended.

    Returns:
        outcome (passed, failed or timed out), number of results, and the names of the cases that failed.
    """
    failed: list[str] = []
    num_results, outcome = 0, "failed"
    for line in lines_of(command, environment, limit_s):
        if line is None:
            outcome = "timed out"
        elif isinstance(line, int):
            outcome = "passed" if line == 0 and num_results and not failed else "failed"
            if line:
                failed.append(f"exit status {line}")
        else:
            try:
                result = json.loads(line)
            except ValueError:  # a library's chatter
                print(line, end="", file=sys.stderr)
                continue
            num_results += 1
            if result.get("passed") is False:
                failed.append(str(result.get("case")))
            write(result)
    return {"outcome": outcome, "results": num_results, "failed": failed}


def run(options: argparse.Namespace, environment: dict[str, str], write: Write) -> bool:
    """Run all sections; return whether every one passed.

    They share one GPU, and each has it for itself. On a pretended device there is nothing to share, and as many run at
    a time as there are processors.
    """
    ceilings: dict[str, Any] = {}
    end_s = time.monotonic() + options.budget

    def note(result: dict[str, Any]) -> None:
        if result.get("bench") == "gpu_ceilings":
            ceilings.update({name: result[name] for name in result if name.endswith("_per_s")})
        write(result)

    def summary_of(section: str) -> dict[str, Any]:
        began_s = time.monotonic()
        limit_s = min(SECTIONS[section], end_s - began_s)
        if limit_s < 5:
            summary: dict[str, Any] = {"outcome": "skipped", "results": 0, "failed": ["no time was left"]}
        else:
            command = [sys.executable, str(ROOT / "benchmarks" / "gpu_sections.py"), section]
            command += ["--ceilings", json.dumps(ceilings), "--limit", str(limit_s)]
            command += ["--dry-run"] if options.dry_run else []
            summary = run_section(command, environment, limit_s, note)
        summary = {"bench": "gpu_section", "section": section, **summary}
        write({**summary, "seconds": round(time.monotonic() - began_s, 1), "dry_run": options.dry_run})
        return summary

    first = [section for section in options.sections if section == "ceilings"]  # the others are told of them
    others = [section for section in options.sections if section != "ceilings"]
    with ThreadPoolExecutor(os.cpu_count() if options.dry_run else 1) as pool:
        summaries = [*pool.map(summary_of, first), *pool.map(summary_of, others)]
    print(file=sys.stderr)
    for summary in summaries:
        words = f"{summary['section']:10} {summary['outcome']:10} {summary['results']:4} results"
        print(words, "; ".join(summary["failed"]), file=sys.stderr)
    return all(summary["outcome"] == "passed" for summary in summaries)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="run the whole on a pretended device")
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="some of them, in this order, but ceilings first"
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "gpu-wheels", help="carried wheels")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for the whole run")
    parser.add_argument("--output", type=Path, help="append the lines to this file too")
    options = parser.parse_args()
    options.sections = options.sections.split(",")
    if unknown := set(options.sections) - SECTIONS.keys():
        parser.error(f"--sections must be some of {', '.join(SECTIONS)}; got {', '.join(sorted(unknown))}")
    if not options.dry_run and not has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 1

    writing = threading.Lock()

    def write(result: dict[str, Any]) -> None:
        text = json.dumps(result)
        with writing:
            print(text, flush=True)
            if options.output is not None:
                # Opened for each line: what is written survives the end of the run.
                with options.output.open("a") as file:
                    file.write(text + "\n")

    with tempfile.TemporaryDirectory() as packages:
        install_wheels(options.wheels, Path(packages))
        paths = [str(ROOT / "src"), packages, os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
        }
        if options.dry_run:
            environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        return 0 if run(options, environment, write) else 1


if __name__ == "__main__":
    sys.exit(main())
