"""Run tests against mutants: each mutant in a process of its own, forked from one that has collected the tests.

A mutant of a function is made by giving the function the changed code, which takes no import: a fork, the tests that
ran the changed line when nothing was changed, the quickest first, until one fails. mutmut and cosmic-ray collect the
tests anew for every mutant, which takes longer than the tests of a pure module run; that is why this is written here.
A mutant of a module or class body has to be imported, and is: its process is forked from one that has imported the
libraries and nothing of this project.

A mutant is killed by the test that fails, or by the time limit of each test: three times the processor time that the
longest of its tests took, and 3 s. Processor time does not depend on what else the machine does.
"""

from __future__ import annotations

import ast
import gc
import importlib
import json
import os
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, FrameType, FunctionType
from typing import Any

import attrs
import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.operators import Mutant, load
from tests.source_tree import ROOT

TIME_LIMIT = "time limit"
WALL_LIMIT_S = 300.0  # for a mutant that waits and uses no processor
NO_TEST = "no test runs it"

Report = Callable[[Mutant, str | None, int], None]
"""Takes a mutant, what killed it (None: it survived), and the number of tests that were asked."""


@attrs.define
class Baseline:
    """What the tests do while nothing is changed.

    Args:
        seconds: Processor time by test, in the order of collection, of the tests that pass.
        lines: Tests by file and line of the source that they run.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, list[str]]]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the changed statement, the quickest first."""
        by_line = self.lines.get(mutant.file, {})
        first, last = mutant.lines
        found = {test for line in range(first, last + 1) for test in by_line.get(line, ())}
        return sorted(found & self.seconds.keys(), key=lambda test: self.seconds[test])


def run_mutants(mutants: Sequence[Mutant], tests: Sequence[str], slowest_s: float, report: Report) -> int:
    """Try every mutant with `tests` (arguments of pytest); tests that take longer than `slowest_s` are left out.

    Returns:
        The number of tests that passed while nothing was changed.
    """
    inside = [mutant for mutant in mutants if mutant.function]
    outside = [mutant for mutant in mutants if not mutant.function]
    for line in _forked(lambda tell: _pytest(tests, [_Server(inside, slowest_s, tell)]), WALL_LIMIT_S * 1000):
        if "libraries" in line:
            libraries, number = line["libraries"], line["tests"]
        else:
            report(inside[line["mutant"]], line["killed_by"], line["tests"])
    for name in libraries if outside else ():
        _import_quietly(name)
    for mutant in outside:
        report(mutant, _try_import(mutant, tests), number)
    return int(number)


def _pytest(tests: Sequence[str], plugins: list[object]) -> None:
    os.chdir(ROOT)
    # Libraries are imported before pytest could rewrite their assertions, and it would warn of that.
    quiet = ["-q", "-s", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    pytest.main([*tests, "-x", *quiet], plugins=[_Examples(), *plugins])


class _Examples:
    """Plugin that lets hypothesis stop at the first example that fails: shrinking takes longer than the tests."""

    def pytest_collection(self) -> None:
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        # Lines are traced while the time of each test is measured, and a health check would call that slow.
        hypothesis.settings.register_profile(
            "mutation", phases=phases, suppress_health_check=list(hypothesis.HealthCheck)
        )
        hypothesis.settings.load_profile("mutation")


class _Server:
    """Plugin that runs mutants instead of the tests, in forks of the process that has collected them."""

    def __init__(self, mutants: Sequence[Mutant], slowest_s: float, tell: Callable[[Any], None]) -> None:
        self._mutants = mutants
        self._slowest_s = slowest_s
        self._tell = tell

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        files = {str(ROOT / mutant.file): mutant.file for mutant in self._mutants}
        told = list(_forked(lambda tell: tell(_measure(items.values(), files)), WALL_LIMIT_S * 10))
        seconds = {test: spent for test, spent in told[0]["seconds"].items() if spent <= self._slowest_s}
        lines = {
            file: {int(line): tests for line, tests in by_line.items()}
            for file, by_line in told[0]["lines"].items()
        }
        baseline = Baseline(seconds, lines)
        self._tell({"libraries": _libraries(), "tests": len(seconds)})
        gc.unfreeze()  # frozen objects are not listed, and functions are looked for among the objects
        functions = _functions(files)
        trees = {file: load(ROOT / file) for file in files.values()}
        gc.freeze()  # a collection in a fork would copy every page of its parent
        for number, mutant in enumerate(self._mutants):
            asked = baseline.tests_of(mutant)
            killed_by = self._try(
                mutant, trees[mutant.file], functions, [items[test] for test in asked], baseline
            )
            self._tell({"mutant": number, "killed_by": killed_by, "tests": len(asked)})
        return True

    def _try(
        self,
        mutant: Mutant,
        tree: ast.Module,
        functions: dict[tuple[str, str, int], list[FunctionType]],
        items: list[pytest.Item],
        baseline: Baseline,
    ) -> str | None:
        if not items:
            return None
        path = str(ROOT / mutant.file)
        code = _code_of(mutant.apply(tree), path, mutant)
        # The longest of all, since any of them may be the one that sets up what they share.
        limit_s = 3 + 3 * max(baseline.seconds[item.nodeid] for item in items)

        def attempt(tell: Callable[[Any], None]) -> None:
            for function in functions[path, mutant.function, mutant.first_line]:
                function.__code__ = code
            tell({"failed": _first_failure(items, limit_s)})

        return _verdict(attempt, limit_s * len(items))


def _verdict(attempt: Callable[[Callable[[Any], None]], None], limit_s: float) -> str | None:
    told = list(_forked(attempt, WALL_LIMIT_S, limit_s))
    return told[0]["failed"] if told else TIME_LIMIT


def _first_failure(items: Sequence[pytest.Item], limit_s: float) -> str | None:
    """Return the first test that fails; this process ends at a test that takes more than `limit_s` of its time."""
    for item, following in zip(items, [*items[1:], None], strict=True):
        _limit_processor(time.process_time() + limit_s)
        if any(report.failed for report in runtestprotocol(item, log=False, nextitem=following)):
            return item.nodeid
    return None


def _measure(items: Any, files: dict[str, str]) -> dict[str, Any]:
    """Run all tests and note their processor time and the lines of `files` that each one runs."""
    seconds: dict[str, float] = {}
    lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    ran: set[tuple[str, int]] = set()

    def trace_lines(frame: FrameType, event: str, _: object) -> Any:
        ran.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        ran.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_lines

    in_order = list(items)
    for item, following in zip(in_order, [*in_order[1:], None], strict=True):
        ran.clear()
        threading.settrace(trace)
        sys.settrace(trace)
        begin = time.process_time()
        reports = runtestprotocol(item, log=False, nextitem=following)
        spent = time.process_time() - begin
        sys.settrace(None)
        if all(report.passed for report in reports):
            seconds[item.nodeid] = spent
        for path, line in ran:
            lines[files[path]][line].append(item.nodeid)
    return {"seconds": seconds, "lines": lines}


def _functions(files: dict[str, str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return the functions of `files` by file, qualified name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename in files:
            code = thing.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(thing)
    return found


def _code_of(tree: ast.Module, path: str, mutant: Mutant) -> CodeType:
    """Return the compiled code of the function that a mutant changes."""
    pending = [compile(tree, path, "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if (code.co_qualname, code.co_firstlineno) == (mutant.function, mutant.first_line):
            return code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    raise LookupError(f"{mutant.file} has no function {mutant.function} in line {mutant.first_line}")


# ------------------------------------------------------------------- mutants outside functions


def _try_import(mutant: Mutant, tests: Sequence[str]) -> str | None:
    """Run the tests in a process that imports the changed module."""
    path = str(ROOT / mutant.file)
    code = compile(mutant.apply(load(ROOT / mutant.file)), path, "exec", dont_inherit=True)
    get_code = SourceFileLoader.get_code

    def attempt(tell: Callable[[Any], None]) -> None:
        def changed(loader: SourceFileLoader, fullname: str) -> CodeType | None:
            return code if loader.path == path else get_code(loader, fullname)

        SourceFileLoader.get_code = changed  # type: ignore[method-assign,assignment]
        watch = _Watch()
        _pytest(tests, [watch])
        tell({"failed": watch.failed})

    return _verdict(attempt, WALL_LIMIT_S)


class _Watch:
    """Plugin that notes the first failure."""

    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed = self.failed or f"{report.nodeid}, when collected"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _libraries() -> list[str]:
    """Return the modules that are imported and are not of this project."""
    return [name for name in sys.modules if name.partition(".")[0] not in ("triolet", "tests", "__main__")]


def _import_quietly(name: str) -> None:
    try:
        importlib.import_module(name)
    except BaseException:
        return  # a module that only exists while another one runs


# ---------------------------------------------------------------------------------- processes


def _forked(
    work: Callable[[Callable[[Any], None]], None], wall_s: float, processor_s: float | None = None
) -> Iterator[Any]:
    """Run `work` in a fork, and yield what it tells: values of JSON.

    The fork is quiet. It ends when `work` does, after `processor_s` of processor time, or after `wall_s`.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _in_the_fork(work, writing, processor_s, reading)
    os.close(writing)
    alarm = threading.Timer(wall_s, os.kill, (child, 9))
    alarm.start()
    with os.fdopen(reading, encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
    os.waitpid(child, 0)
    alarm.cancel()


def _in_the_fork(
    work: Callable[[Callable[[Any], None]], None], writing: int, processor_s: float | None, reading: int
) -> None:
    code = 1
    try:
        os.close(reading)
        if processor_s is not None:
            _limit_processor(processor_s)
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
        work(lambda value: _write(writing, value))
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def _limit_processor(processor_s: float) -> None:
    """Have this process end when it has used so much processor time in all."""
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(processor_s) + 1, most))


def _write(file: int, value: Any) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(file, data) :]
