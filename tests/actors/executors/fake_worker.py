"""A process like that of the model runner, with the fake model, that misbehaves when told to.

    python -m tests.actors.executors.fake_worker [WHAT WHEN MARK TOLD]

WHEN is `load`, the number of a step of its life, `always`, or `poison`: each step that computes a prompt beginning with
POISON; or `reload`: each load but that of the process which has made the MARK.
Where a MARK is given, the file is made, and the next process that finds it behaves: a fault that comes once.
With `lose_memory` there is none for that step, nor for any later one of this process.
Where a folder TOLD is given, each misdeed makes a file in it first, so that a test knows when to move its clock on.

`python -m tests.actors.executors.fake_worker fork_server [hang|fork|- [WHAT ...]]` is their fork server.

`python -m tests.actors.executors.fake_worker ahead ...` has a device, a thread, that computes the steps it was handed.
For it WHEN may be `submit N`, the moment at which it is handed its N-th step, or `tell N`, when the result of that is
about to be told; the step `N` itself goes wrong in the device. With `wait_for_the_next` a step (WHEN is also `all`, or
`all but N`) is not done before the one after it was handed over, and with `lack_memory` there is none for it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from tests.core.fake_model import FakeModel
from triolet.config.engine import EngineConfig
from triolet.core.load_progress import IMPORTS, LoadProgress, OnProgress
from triolet.core.request.model_info import ModelInfo
from triolet.core.step_plan import StepPlan, StepResult, StepRunner
from triolet.core.worker_call import WorkerCall
from triolet.errors import ConfigError, InvariantViolated, UnknownWorkerMethod
from triolet.ipc.messages import REPLIES
from triolet.workers import fork_server
from triolet.workers.runner import FdTransport, serve

NUM_BLOCKS, BLOCK_SIZE, VOCAB = 64, 4, 50
POISON = 13
REPLIES_FD = 4  # where `serve` puts them: 3 is for the requests


class OwnError(Exception):
    """An exception that the engine's side does not know."""


def fail_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def say(data: bytes) -> None:
    os.write(REPLIES_FD, data)


def speak_rubbish_and_live() -> None:
    say(b"Segmentation fault? No, but no frame either.\n")
    time.sleep(60)


def say_half_a_frame() -> None:
    say(REPLIES.pack(StepResult(1, ()))[:-1])
    os._exit(0)


def leave_a_child_with_the_pipes() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"], pass_fds=[2, REPLIES_FD])
    os._exit(7)


def close_the_replies_and_live() -> None:
    os.close(REPLIES_FD)
    time.sleep(60)


def print_much() -> None:
    print("a stray line")
    print("not ended", end="", flush=True)
    sys.stderr.write("x" * 100_000 + "\nthe last line\n")
    sys.stderr.flush()


def compute_in_silence() -> None:
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:
        pass


MISDEEDS: dict[str, Callable[[], None]] = {
    "raise": fail_with(ValueError("planted")),
    "break_an_invariant": fail_with(InvariantViolated("planted")),
    "refuse": fail_with(ConfigError("max_model_len", "at most 256", 512)),
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda: time.sleep(60),
    "compute": compute_in_silence,
    "wait": lambda: time.sleep(1.0),
    "rubbish": speak_rubbish_and_live,
    "half_a_frame": say_half_a_frame,
    "another_step": lambda: say(REPLIES.pack(StepResult(999, ()))),
    "progress": lambda: say(REPLIES.pack(LoadProgress("weights", 0, 0))),
    "leave_a_child": leave_a_child_with_the_pipes,
    "close": close_the_replies_and_live,
    "print": print_much,
    "dawdle": lambda: time.sleep(0.05),
    "wait_for_the_next": lambda: None,
    "lack_memory": lambda: None,
    "lose_memory": lambda: None,
}


WORKER: dict[str, Callable[..., object]] = {
    "echo": lambda *args, **kwargs: (list(args), kwargs),
    "refuse": fail_with(KeyError("planted")),
    "own_error": fail_with(OwnError("planted")),
    "leave": fail_with(SystemExit(3)),
    "a_set": lambda: {1},
    "hang": lambda: time.sleep(60),
    "exit": lambda: os._exit(3),
}


class Misbehaving:
    """A runner over the fake model."""

    def __init__(self, what: str = "", when: str = "", mark: str = "", told: str = "") -> None:
        self.what, self.when, self.mark, self.told = what, when, mark, told
        self.model = FakeModel(NUM_BLOCKS, BLOCK_SIZE, VOCAB)
        self.num_steps = 0

    def load(self, config: EngineConfig, on_progress: OnProgress) -> tuple[StepRunner, ModelInfo]:
        on_progress(LoadProgress("weights", 0, 2))
        self.misbehave("load")
        num_blocks = self._num_blocks(config, is_reload=self._is_reload())
        on_progress(LoadProgress("weights", 2, 2))
        return self, ModelInfo(
            folder=str(config.model),
            architecture="Fake",
            backend="native",
            vocab_size=VOCAB,
            max_position=4096,
            max_model_len=min(config.max_model_len or num_blocks * BLOCK_SIZE, num_blocks * BLOCK_SIZE),
            num_kv_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype="float32",
            device="cpu",
        )

    def _is_reload(self) -> bool:
        is_reload = self.when == "reload" and Path(self.mark).exists()
        if self.when == "reload":
            Path(self.mark).touch()
        return is_reload

    def _num_blocks(self, config: EngineConfig, *, is_reload: bool) -> int:
        if is_reload and self.what == "less_memory":
            if (config.num_kv_blocks or 0) > NUM_BLOCKS // 2:
                raise ConfigError("num_kv_blocks", f"at most {NUM_BLOCKS // 2} here", config.num_kv_blocks)
            return NUM_BLOCKS // 2
        if is_reload and self.what == "less_free_memory":
            return config.num_kv_blocks or NUM_BLOCKS // 2
        if is_reload:
            MISDEEDS[self.what]()
        return config.num_kv_blocks or NUM_BLOCKS

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.misbehave(str(self.num_steps))
        self.misbehave("always")
        result = self.model.execute(plan)
        if any(self.model.rows[row.row_id].start.prompt_token_ids[0] == POISON for row in plan.rows):
            self.misbehave("poison")
        return result

    def call(self, call: WorkerCall) -> object:
        """Make a call of a method of `WORKER`; a callable gets the runner itself."""
        if not isinstance(call.target, str):
            return call.target(self, *call.args, **call.kwargs)
        if call.target not in WORKER:
            raise UnknownWorkerMethod(call.target, f"one of {', '.join(WORKER)}")
        return WORKER[call.target](*call.args, **call.kwargs)

    def reset(self) -> None:
        self.model.rows.clear()

    def misbehave(self, when: str) -> None:
        if when != self.when or (self.mark and Path(self.mark).exists()):
            return
        if self.mark:
            Path(self.mark).touch()
        if self.told:
            Path(self.told, str(os.getpid())).touch()
        if self.what == "lose_memory":
            self.model.most_tokens = 0
        MISDEEDS[self.what]()


class _Handed:
    """A step that the device computes."""

    is_done = False

    def __init__(self, runner: MisbehavingDevice, plan: StepPlan, number: int) -> None:
        self._runner, self._number = runner, number
        self._computed = runner.device.submit(runner.compute, plan, number)

    def wait(self) -> None:
        self._computed.exception()

    def result(self) -> StepResult:
        result = self._computed.result()
        self._runner.misbehave(f"tell {self._number}")
        return result


class MisbehavingDevice(Misbehaving):
    """A runner over the fake model that takes steps before the results of those before."""

    def __init__(self, *misdeed: str) -> None:
        super().__init__(*misdeed)
        self.device = ThreadPoolExecutor(1)
        self.num_handed = 0
        self._has_next: dict[int, threading.Event] = defaultdict(threading.Event)

    def submit(self, plan: StepPlan) -> _Handed:
        self.num_handed += 1
        self._has_next[self.num_handed - 1].set()
        self.misbehave(f"submit {self.num_handed}")
        return _Handed(self, plan, self.num_handed)

    def compute(self, plan: StepPlan, number: int) -> StepResult:
        """In the device's thread."""
        if self.what == "wait_for_the_next" and self._waits(number):
            self._has_next[number].wait()
        if self.what == "lack_memory" and self.when == str(number):
            self.model.most_tokens = 0
        result = self.execute(plan)
        self.model.most_tokens = None
        return result

    def _waits(self, number: int) -> bool:
        """True for the step that WHEN names, for `all`, or for `all but N`."""
        is_any = self.when.startswith("all") and self.when != f"all but {number}"
        return is_any or self.when == str(number)


def main() -> None:
    if sys.argv[1:2] == ["fork_server"]:
        be_fork_server(*sys.argv[2:])
    is_ahead = sys.argv[1:2] == ["ahead"]
    runner = MisbehavingDevice(*sys.argv[2:]) if is_ahead else Misbehaving(*sys.argv[1:])
    serve(runner.load, FdTransport.take_over_standard_streams())


def be_fork_server(misdeed: str = "", *of_runner: str) -> NoReturn:
    """Be the fork server of such processes; `hang` in its imports, or `fork` no process."""

    def prepare(on_progress: OnProgress) -> None:
        on_progress(LoadProgress(IMPORTS, 0, 0))
        if misdeed == "hang":
            time.sleep(60)

    if misdeed == "fork":
        os.fork = fail_with(BlockingIOError("planted"))  # type: ignore[assignment]

    def become() -> NoReturn:
        serve(Misbehaving(*of_runner).load, FdTransport.take_over_standard_streams())

    fork_server.main(socket.socket(fileno=0), become, prepare)


if __name__ == "__main__":
    main()
