"""Rules of the house that a reader of the source can check: what never appears, and what always does."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.source_tree import ROOT, package_files, parse, python_files, where

PACKAGE = package_files()
TESTS = python_files(ROOT / "tests")
PROGRAMS = python_files(ROOT / "examples", ROOT / "benchmarks", ROOT / "tools")

Rule = Callable[[ast.Module], Iterator[ast.AST]]


def breaches(rule: Rule, files: list[Path], mark: str) -> list[str]:
    """Return the breaches of a rule in those of the files in which its mark stands: elsewhere it cannot be broken."""
    marked = (path for path in files if mark in path.read_text(encoding="utf-8"))
    return [where(path, node) for path in marked for node in rule(parse(path))]


def called(node: ast.AST) -> str:
    """The dotted name that a call names, such as `torch.load`; empty for anything else."""
    return dotted(node.func) if isinstance(node, ast.Call) else ""


def dotted(node: ast.expr) -> str:
    """Unparse an expression, names without `ast.unparse`, which takes longer."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value, attr=name):
            return f"{dotted(value)}.{name}"
    return ast.unparse(node)


def last_name(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def last_name_called(node: ast.AST) -> str:
    """The last part of `called(node)`."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name
    return last_name(called(node))


def sets(node: ast.AST, *names: str) -> bool:
    """Tell whether a call has `name=True`, for one of the names."""
    words = node.keywords if isinstance(node, ast.Call) else []
    return any(word.arg in names and ast.unparse(word.value) == "True" for word in words)


# ---------------------------------------------------------------- data is never run as code


CODE_IN_DISGUISE = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
}
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}


def runs_data_as_code(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if CODE_IN_DISGUISE & {
                name.partition(".")[0] for name in [origin, *(one.name for one in node.names)]
            }:
                yield node
        elif isinstance(node, ast.Call):
            name = called(node)
            if name in RUNS_TEXT or name.startswith(("torch.load", "torch.hub.", "yaml.load")):
                yield node
            if sets(node, "allow_pickle", "shell"):
                yield node


# ------------------------------------------------------------------------ Trio's own manners


SCOPES = {"CancelScope", "move_on_after", "move_on_at", "fail_after", "fail_at", "open_nursery"}
MAY_YIELD_IN_A_SCOPE = {"asynccontextmanager", "fixture"}  # their frames are entered and left in order


def yields_inside_a_scope(tree: ast.Module) -> Iterator[ast.AST]:
    """A consumer may drop a generator at any yield, and a scope around it then closes out of order."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        blocks = [node for node in own_nodes(function) if isinstance(node, ast.With | ast.AsyncWith)]
        if not blocks or decorators_of(function) & MAY_YIELD_IN_A_SCOPE:
            continue
        for block in blocks:
            if any(opens_scope(item) for item in block.items):
                yield from (node for node in own_nodes(block) if isinstance(node, ast.Yield | ast.YieldFrom))


def decorators_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {last_name(dotted(decorator).partition("(")[0]) for decorator in function.decorator_list}


def opens_scope(item: ast.withitem) -> bool:
    return last_name_called(item.context_expr) in SCOPES


def own_nodes(parent: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `parent`, not those of functions defined inside it."""
    waiting = [*ast.iter_child_nodes(parent)]
    while waiting:
        child = waiting.pop()
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            waiting += ast.iter_child_nodes(child)


def opens_unbounded_channel(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if (
            called(node).partition("[")[0].endswith("open_memory_channel")
            and "inf" in ast.unparse(node).partition("(")[2]
        ):
            yield node


def abandons_threads(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if sets(node, "abandon_on_cancel", "cancellable"):
            yield node


# ------------------------------------------------------------------------------ nothing is a stub


def is_unfinished(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc):
            yield node


# --------------------------------------------------- docstrings name parameters that there are


def parameters_of(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    arguments = node.args
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    return {one.arg for one in every if one is not None}


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Fields of a class, what its `__init__` takes, and what its methods set and are."""
    found: set[str] = set()
    for part in node.body:
        match part:
            case ast.AnnAssign(target=ast.Name(id=name)):
                found |= {name, name.lstrip("_")}  # attrs takes a private field without its underscore
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found |= {name} | (parameters_of(part) if name == "__init__" else set())
    stored = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
    return found | {each.attr for each in stored if isinstance(each.ctx, ast.Store)}


def named_in(docstring: str, section: str) -> list[str]:
    """Names that an indented section of a docstring explains, each before a colon."""
    found = re.search(rf"^{section}:\n((?: +.*\n?|\n)+)", docstring, re.MULTILINE)
    return re.findall(r"^    \*{0,2}(\w+):", found[1], re.MULTILINE) if found else []


def explains_what_is_not_there(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            known, named = (
                attributes_of(node),
                named_in(docstring, "Args") + named_in(docstring, "Attributes"),
            )
        else:
            known, named = parameters_of(node), named_in(docstring, "Args")
        if not set(named) <= known:
            yield node


# ---------------------------------------------------------------------- tests can fail, every one


ASSERTING_CALLS = (
    "assert",
    "check",
    "expect",
)  # torch.testing.assert_close, pool.check(), a helper of that name
ASSERTING_CONTEXTS = {"raises", "warns", "RaisesGroup", "fail"}


def can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    name = last_name_called(node)
    return name in ASSERTING_CONTEXTS or name.lstrip("_").startswith(ASSERTING_CALLS)


def can_not_fail(tree: ast.Module) -> Iterator[ast.AST]:
    """Tests that assert nothing, neither themselves nor in a function of their file that they call."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    helpers = {function.name for function in functions if any(map(can_fail, ast.walk(function)))}
    for function in functions:
        if not function.name.startswith("test_") or function.name in helpers:
            continue
        if not helpers & {last_name_called(node) for node in ast.walk(function)}:
            yield function


# ---------------------------------------------- the page's policy forbids text that becomes a function


def polls_in_the_page(tree: ast.Module) -> Iterator[ast.AST]:
    """Calls of playwright's `wait_for_function`, which fail where the condition is not true at the first look."""
    yield from (node for node in ast.walk(tree) if last_name_called(node) == "wait_for_function")


# ---------------------------------------------------------------------------------- the rules hold


@pytest.mark.parametrize(
    ("rule", "files", "mark"),
    [
        pytest.param(runs_data_as_code, PACKAGE, "", id="data is never run as code"),
        pytest.param(
            yields_inside_a_scope,
            PACKAGE + PROGRAMS + TESTS,
            "yield",
            id="no yield inside a scope or nursery",
        ),
        pytest.param(opens_unbounded_channel, PACKAGE, "channel", id="every channel is bounded"),
        pytest.param(abandons_threads, PACKAGE + PROGRAMS, "cancel", id="no thread is abandoned"),
        pytest.param(is_unfinished, PACKAGE + PROGRAMS, "NotImplementedError", id="nothing is a stub"),
        pytest.param(
            explains_what_is_not_there, PACKAGE, "Args:", id="a docstring explains parameters that there are"
        ),
        pytest.param(can_not_fail, TESTS, "def test_", id="every test can fail"),
        pytest.param(polls_in_the_page, TESTS, "wait_for", id="no condition is polled inside the page"),
    ],
)
def test_the_house_keeps_its_rule(rule: Rule, files: list[Path], mark: str) -> None:
    assert breaches(rule, files, mark) == []


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (runs_data_as_code, "import pickle"),
        (runs_data_as_code, "def late(): from marshal import loads"),
        (runs_data_as_code, "from torch import serialization, nn; torch.load('weights.bin')"),
        (runs_data_as_code, "eval('1 + 1')"),
        (runs_data_as_code, "np.load(path, allow_pickle=True)"),
        (runs_data_as_code, "subprocess.run(line, shell=True)"),
        (
            yields_inside_a_scope,
            "async def f():\n async with trio.open_nursery() as nursery:\n  yield nursery",
        ),
        (yields_inside_a_scope, "def f():\n with lock, trio.fail_after(1):\n  while True:\n   yield 1"),
        (opens_unbounded_channel, "trio.open_memory_channel(math.inf)"),
        (opens_unbounded_channel, "trio.open_memory_channel[Message](max_buffer_size=float('inf'))"),
        (abandons_threads, "trio.to_thread.run_sync(work, abandon_on_cancel=True)"),
        (is_unfinished, "def f(): raise NotImplementedError"),
        (explains_what_is_not_there, 'def f(x):\n """Do.\n\n Args:\n     y: it.\n """'),
        (explains_what_is_not_there, 'class C:\n """Hold.\n\n Args:\n     y: it.\n """\n x: int'),
        (can_not_fail, "def test_f(): f()"),
        (can_not_fail, "async def test_f(): assert True"),
        (polls_in_the_page, "page.wait_for_function('window.first')"),
    ],
)
def test_a_breach_is_found(rule: Rule, source: str) -> None:
    assert list(rule(ast.parse(source)))


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (runs_data_as_code, "model.eval(); re.compile('a'); torch.compile(model); from pickles import jar"),
        (
            yields_inside_a_scope,
            "@contextlib.asynccontextmanager\nasync def f():\n async with open_nursery():\n  yield",
        ),
        (yields_inside_a_scope, "async def f():\n with trio.CancelScope():\n  def g():\n   yield 1"),
        (opens_unbounded_channel, "trio.open_memory_channel[Info](1)"),
        (abandons_threads, "trio.to_thread.run_sync(work, abandon_on_cancel=False)"),
        (
            explains_what_is_not_there,
            'def f(*x, **y):\n """Do.\n\n Args:\n     x: it.\n     **y: more: of it.\n """',
        ),
        (explains_what_is_not_there, 'class C:\n """Hold.\n\n Args:\n     x: it.\n """\n _x: int'),
        (can_not_fail, "def test_f():\n with pytest.raises(ValueError):\n  f()"),
        (can_not_fail, "def verify(x):\n assert x\ndef test_f():\n verify(f())"),
        (can_not_fail, "def test_f(): torch.testing.assert_close(a, b)"),
        (polls_in_the_page, "page.wait_for_selector('[data-first]')"),
    ],
)
def test_what_only_resembles_a_breach_is_let_through(rule: Rule, source: str) -> None:
    assert not list(rule(ast.parse(source)))


# ------------------------------------------------------------------------------------ files, as text


# No file is split because of its length. One of more lines than this usually holds two things.
MAX_FILE_LINES = 600

# A folder of one developer's machine, in a path that is written out.
FOREIGN_PATH = re.compile(r"(?<![\w.~/-])/(?:home|root|Users|work|workspace|mnt|opt)/[\w.-]+")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX)\b")


def text_files() -> list[Path]:
    folders = ["actors", "benchmarks", "docs", "examples", "kernels", "src", "tests", "tools", ".ci"]
    found = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    top = [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(path for path in found + top if path.suffix in TEXT_SUFFIXES or path.name in TEXT_NAMES)


TEXT_SUFFIXES = {".cpp", ".h", ".jinja", ".md", ".py", ".toml", ".txt", ".yaml"}
TEXT_NAMES = {"Makefile", "run"}


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    texts = {path: path.read_text(encoding="utf-8") for path in text_files() if path != Path(__file__)}
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in texts.items()
        if pattern.search(text)  # in hardly any
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert lines_with(FOREIGN_PATH) == []


def test_no_file_puts_work_off_to_later() -> None:
    assert lines_with(UNFINISHED) == []


@pytest.mark.parametrize("line", ["see /home/ann/models", "'/root/cache'", "path=/work/out/x"])
def test_a_folder_of_one_machine_is_recognised(line: str) -> None:
    assert FOREIGN_PATH.search(line)


@pytest.mark.parametrize(
    "line", ["https://host/home/page", "~/work/models", "src/opt/x", "GET /v1/models", "a/home/b"]
)
def test_other_paths_are_let_through(line: str) -> None:
    assert not FOREIGN_PATH.search(line)


def too_long(lengths: Mapping[str, int]) -> dict[str, int]:
    return {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_a_file_of_the_package_holds_one_thing() -> None:
    assert too_long({where(path, parse(path)): len(path.read_text().splitlines()) for path in PACKAGE}) == {}


def test_a_file_that_is_too_long_is_found() -> None:
    assert too_long({"a.py": MAX_FILE_LINES, "b.py": MAX_FILE_LINES + 1}) == {"b.py": MAX_FILE_LINES + 1}
