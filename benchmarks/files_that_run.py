"""Files of triolet that run for one operation: how much code a reader has to know to follow it.

python benchmarks/files_that_run.py [CASE ...] [--runner thread|inline] [--rounds 3] [--list] [--output FILE.jsonl]

Cases, each measured from the call to its end, in an engine that is open and has done the same once before:

    generate    a prompt of text, eight tokens, until the stream has ended
    websocket   from `response.create` to `response.completed`, greedy as all cases, on a connection that is open; the
                model has a plain chat template and no format of calls: what one model brings along is left out
    break       from a `break` in the body of a stream until its scope is left: its blocks are free then, or quarantined
                until the step in flight has ended
    crash       from the death of the model runner's process to the next output of the stream

A file counts when one of its functions is called or resumed, in any thread of this process; imports do not count, nor
does the process of a model runner. Of several rounds the files that ran in all of them count, which leaves out what
runs now and then for other reasons, such as the watchdog.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any
from unittest import mock

import trio
from common import machine, report
from trio_websocket import open_websocket_url

import triolet
from triolet.actors import watchdog
from triolet.config.server import GatewayConfig
from triolet.server import serve

PACKAGE = Path(triolet.__file__).resolve().parent
FOLDERS = {str((PACKAGE / part).resolve()): part for part in ("actors", "kernels", "")}
EIGHT_TOKENS = triolet.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
MANY_TOKENS = triolet.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPT = "Once upon a time"
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
NEVER_S = 600.0  # longer than all rounds
TARGETS = {"generate": 40, "websocket": 60, "break": 10, "crash": 30}


class Recorder:
    """Names of the files whose functions are called between `start` and `stop`, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_on = False
        # A thread that already runs would not be seen, and Trio uses its threads again in later runs: this comes before
        # any engine is opened, once for all cases.
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call" and frame.f_code.co_name != "<module>":
            name = name_in_package(frame.f_code.co_filename)
            if name is not None:
                self.files.add(name)

    def start(self) -> None:
        self._is_on = True

    def stop(self) -> None:
        self._is_on = False


@cache
def name_in_package(file: str) -> str | None:
    """Return the path below the package, or None for a file of another."""
    if not file.endswith(".py"):  # such as <string>
        return None
    path = str(Path(file).resolve())
    for folder, part in FOLDERS.items():
        if path.startswith(folder + os.sep):
            return str(Path(part, path[len(folder) + 1 :]))
    return None


# ------------------------------------------------------------------------------------------- cases

Case = Callable[[Recorder], Awaitable[None]]


@asynccontextmanager
async def generating(runner: str) -> AsyncIterator[Case]:
    async with triolet.open_engine(runner=runner) as engine:

        async def case(recorder: Recorder) -> None:
            recorder.start()
            async with engine.generate(PROMPT, EIGHT_TOKENS) as stream:
                async for _ in stream:
                    pass
            recorder.stop()

        yield case


def plain_model(folder: Path) -> str:
    """Make triolet-nano with a plain chat template in a folder; return the folder."""
    for file in (PACKAGE / "nano").glob("*.*"):
        (folder / file.name).symlink_to(file)
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text())
    path.unlink()
    path.write_text(json.dumps({**tokenizer, "chat_template": PLAIN_TEMPLATE}))
    return str(folder)


@asynccontextmanager
async def on_a_websocket(runner: str) -> AsyncIterator[Case]:
    with TemporaryDirectory() as folder:
        model = plain_model(Path(folder))
        async with triolet.open_engine(model, runner=runner) as engine, trio.open_nursery() as nursery:
            address: str = await nursery.start(serve, engine, GatewayConfig(port=0))
            async with open_websocket_url(address.replace("http", "ws", 1) + "/v1/responses") as socket:
                create = {
                    "type": "response.create",
                    "model": engine.model_name,
                    "input": PROMPT,
                    "temperature": 0,
                }

                async def case(recorder: Recorder) -> None:
                    recorder.start()
                    await socket.send_message(json.dumps(create))
                    while json.loads(await socket.get_message())["type"] != "response.completed":
                        pass
                    recorder.stop()

                yield case
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def breaking_out(runner: str) -> AsyncIterator[Case]:
    async with triolet.open_engine(runner=runner) as engine:

        async def case(recorder: Recorder) -> None:
            async with engine.generate(PROMPT, MANY_TOKENS) as stream:
                async for output in stream:
                    if len(output.outputs[0].token_ids) >= 8:
                        recorder.start()
                        break
            recorder.stop()
            assert engine.statistics().kv_blocks_in_use == 0

        yield case


@asynccontextmanager
async def crashing(_: str) -> AsyncIterator[Case]:
    # On a busy machine a restart takes longer than the watchdog's interval, and the watchdog would be in every round.
    with mock.patch.object(watchdog, "MAX_SILENCE_S", NEVER_S):
        async with triolet.open_engine(runner="process", step_timeout=NEVER_S) as engine:

            async def case(recorder: Recorder) -> None:
                async with engine.generate(PROMPT, MANY_TOKENS) as stream:
                    outputs = aiter(stream)
                    while len((await anext(outputs)).outputs[0].token_ids) < 8:
                        pass
                    process_id = engine.model_info.process_id
                    assert process_id is not None
                    os.kill(process_id, signal.SIGKILL)
                    recorder.start()
                    while (info := engine._core.model.info) is None or info.process_id in (None, process_id):
                        await anext(outputs)
                    recorder.stop()

            yield case


CASES = {"generate": generating, "websocket": on_a_websocket, "break": breaking_out, "crash": crashing}


async def measured(recorder: Recorder, case: str, runner: str, rounds: int) -> list[str]:
    """Return the files that ran in every round."""
    async with CASES[case](runner) as run:
        await run(recorder)  # the first one imports what is imported late
        found = []
        for _ in range(rounds):
            recorder.files = set()
            await run(recorder)
            found.append(recorder.files)
    return sorted(set.intersection(*found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--runner", choices=("thread", "inline"), default="thread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="print the files as well")
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.cases) - CASES.keys()):
        parser.error(f"no such case: {', '.join(unknown)}")
    logging.disable()  # the crashes are wanted
    lines: list[dict[str, Any]] = []
    recorder = Recorder()
    for case in arguments.cases or CASES:
        files = trio.run(measured, recorder, case, arguments.runner, arguments.rounds)
        runner = "process" if case == "crash" else arguments.runner
        facts = {"bench": "files_that_run", "case": case, "runner": runner, "rounds": arguments.rounds}
        lines.append({**facts, "files": len(files), "target": TARGETS[case], **machine()})
        if arguments.list:
            print(f"{case}: {len(files)} files", *files, sep="\n    ")
    report(lines, ["case", "runner", "files", "target"], arguments.output)


if __name__ == "__main__":
    main()
