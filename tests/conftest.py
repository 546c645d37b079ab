"""What every test relies on: no network, the same random examples each time, kernels that need no GPU."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import trio
from trio.testing import MockClock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

HAS_NVIDIA_DRIVER = Path("/dev/nvidiactl").exists()

# Triton reads this when a kernel is decorated, so it has to be said before any test module is imported.
if not HAS_NVIDIA_DRIVER:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Runs side by side (pytest-xdist) share the processors: each computes on its part of them, and so does what it starts.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _NUM_RUNS = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _NUM_RUNS)))

# Two test runs of one commit see the same examples, and no example fails for being slow on a busy machine.
hypothesis.settings.register_profile("house", deadline=None, derandomize=True, database=None)
# A run without the slow tests looks at fewer.
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("house"), max_examples=40)
hypothesis.settings.load_profile("house")

SLOW_TIMEOUT_S = 1800
BEGAN_S = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-for",
        type=float,
        metavar="SECONDS",
        help="run the slow tests last, and skip those that would begin later than this after the start",
    )


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.getoption("markexpr"):
        hypothesis.settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow-for") is not None:
        items.sort(key=_is_slow)
    for item in items:
        if _is_slow(item) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
        if item.get_closest_marker("gpu") and not HAS_NVIDIA_DRIVER:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA driver on this machine"))


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit_s = item.config.getoption("--slow-for")
    if limit_s is not None and _is_slow(item) and time.monotonic() - BEGAN_S > limit_s:
        pytest.skip(f"slow tests have had their {limit_s:.0f} s on this machine")


def pytest_sessionstart() -> None:
    gc.disable()  # until all is collected: it makes hundreds of thousands of objects that stay


def pytest_collection_finish() -> None:
    gc.enable()
    # A run has more than a million objects, and each engine that opens would collect them all: half a second of each
    # test. Engines leave garbage collection alone in a program that has frozen its objects.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Set aside what the tests of a file have imported, once nothing holds what they made.

    Hundreds of tests ask for a full collection, also by what they call, and each would visit the modules of all
    libraries that the tests before it have imported: a tenth of a second and more, milliseconds without them.
    """
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the skipped tests by reason, in one line: a machine without AVX-512 or AMX skips hundreds."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(_reason(report.longrepr) for report in reports)
    if reasons:
        counted = "; ".join(f"{number} {reason}" for reason, number in reasons.most_common())
        terminalreporter.write_line(f"skipped: {counted}")


def _reason(longrepr: object) -> str:
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return str(text).removeprefix("Skipped: ").partition("\n")[0]


def _is_local(host: object) -> bool:
    return host in (None, "", "localhost", "::1", b"localhost") or str(host).startswith("127.")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Let a test that reaches for another machine fail at once, as it would where there is no network."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo

    def local_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
            raise OSError(f"tests use no network; got a connection to {address!r}")
        connect(self, address)

    def local_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_local(host):
            raise socket.gaierror(socket.EAI_NONAME, f"tests use no network; got a look-up of {host!r}")
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", local_connect)
        patch.setattr(socket, "getaddrinfo", local_getaddrinfo)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread of torch and of the kernels: small tensors are slower on several, which wait for each other."""
    import torch  # here: most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def autojump_clock(monkeypatch: pytest.MonkeyPatch) -> MockClock:
    """Virtual time that jumps when nothing else is left to do, and stands still while a thread works.

    To Trio, a task that waits for a thread is idle: pytest-trio's own clock jumps from deadline to deadline meanwhile,
    as far as the thread is slow, so that a busy machine would decide the test.
    """
    clock = MockClock(autojump_threshold=0)
    monkeypatch.setattr(trio.to_thread, "run_sync", _stopping(clock, trio.to_thread.run_sync))
    return clock


def _stopping(clock: MockClock, run_sync: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    num_working = 0

    async def run_sync_with_the_clock_stopped(*arguments: Any, **options: Any) -> Any:
        nonlocal num_working
        num_working += 1
        clock.autojump_threshold = inf
        try:
            return await run_sync(*arguments, **options)
        finally:
            num_working -= 1
            if not num_working:
                clock.autojump_threshold = 0

    return run_sync_with_the_clock_stopped


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the spans of every engine with an endpoint go."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from triolet.observability import otlp

    made = InMemorySpanExporter()
    monkeypatch.setattr(made, "shutdown", lambda: None)  # one engine may follow another
    monkeypatch.setattr(otlp, "otlp_exporter", lambda endpoint: made)
    return made


@pytest.fixture
def stuck_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that takes questions and answers none; prompts of token ids do not need it."""
    from triolet.actors import tokenizer

    async def hold(_: object, request: tuple[Any, Any], run: object) -> None:
        _, reply = request
        with reply:
            await trio.sleep_forever()

    monkeypatch.setattr(tokenizer, "_answer", hold)
