"""The shape of the source: folders that can be overlooked, imports without circles, unique names, docstrings."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath

import pytest

from tests.source_tree import PACKAGE_FOLDERS, package_modules, parse
from tests.test_layering import imported_modules


@functools.cache
def modules_of_the_package() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules: seconds, which a run that only collects does not need."""
    return {module: parse(path) for module, path in package_modules()}


# ------------------------------------------------------------------------------ a folder's modules

MAX_MODULES = 14
NOT_COUNTED = {"__init__.py", "__main__.py"}


def wide_folders(files: Iterable[PurePath]) -> dict[str, int]:
    """The folders with more than MAX_MODULES modules of their own."""
    widths = Counter(str(path.parent) for path in files if path.name not in NOT_COUNTED)
    return {folder: width for folder, width in widths.items() if width > MAX_MODULES}


def test_no_folder_holds_more_modules_than_can_be_overlooked() -> None:
    files = [
        PurePath(package) / path.relative_to(folder)
        for package, folder in PACKAGE_FOLDERS.items()
        for path in (path for _, path in package_modules())
        if path.is_relative_to(folder)
    ]
    assert len(files) == len(list(package_modules()))
    assert wide_folders(files) == {}


def test_a_wide_folder_is_found() -> None:
    files = [PurePath("core", f"module_{number}.py") for number in range(15)]
    assert wide_folders(files) == {"core": 15}
    assert wide_folders([*files[:14], PurePath("core/__init__.py"), PurePath("core/kv_cache/pool.py")]) == {}


# ------------------------------------------------------------------------------------ import circles


def import_graph(modules: Mapping[str, ast.Module], packages: set[str]) -> dict[str, set[str]]:
    """Module -> the modules of `modules` that it imports anywhere, also in functions and for types only."""
    return {
        module: {target for target in _targets(module, tree, modules, packages) if target != module}
        for module, tree in modules.items()
    }


def _targets(
    module: str, tree: ast.Module, modules: Mapping[str, ast.Module], packages: set[str]
) -> Iterator[str]:
    package = module.split(".") if module in packages else module.split(".")[:-1]
    for node in ast.walk(tree):
        for origin in imported_modules(node, package):
            # `from package import module` means the module, `from module import name` the module, too.
            names = [name.name for name in node.names] if isinstance(node, ast.ImportFrom) else []
            inner = [f"{origin}.{name}" for name in names]
            yield from (target for target in inner if target in modules)
            if origin in modules and not all(target in modules for target in inner or [""]):
                yield origin


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module.

    Source: R. Tarjan, "Depth-first search and linear graph algorithms", 1972.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    packages = {module for module, path in package_modules() if path.name == "__init__.py"}
    graph = import_graph(modules_of_the_package(), packages)
    # `triolet/__init__.py` puts the parts together; what imports the package itself is bound by tests/test_layering.py.
    assert circles({module: targets - {"triolet"} for module, targets in graph.items()}) == []


def graph_of(**sources: str) -> dict[str, set[str]]:
    modules = {name.replace("_", "."): ast.parse(source) for name, source in sources.items()}
    return import_graph(modules, {"p"})


@pytest.mark.parametrize(
    "sources",
    [
        {"p_a": "import p.b", "p_b": "from p.a import name"},
        {"p_a": "from p import b", "p_b": "def late(): from p import a"},
        {
            "p_a": "from p.b import name",
            "p_b": "if TYPE_CHECKING:\n from p.c import name",
            "p_c": "import p.a",
        },
        {"p_a": "from .b import name", "p_b": "from . import a"},
    ],
)
def test_a_circle_is_found(sources: dict[str, str]) -> None:
    assert circles(graph_of(p="", **sources)) == [sorted(name.replace("_", ".") for name in sources)]


@pytest.mark.parametrize(
    "sources",
    [
        {"p_a": "import p.b", "p_b": "import p.c", "p_c": ""},
        {"p_a": "from p.c import name", "p_b": "from p import a, c", "p_c": ""},
        {"p_a": "from p.a import itself"},
    ],
)
def test_imports_in_one_direction_are_no_circle(sources: dict[str, str]) -> None:
    assert circles(graph_of(p="", **sources)) == []


# ------------------------------------------------------------------------------------- class names


def shared_class_names(modules: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """Public names of classes that stand in more than one module: name -> modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in modules.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return {name: where for name, where in found.items() if len(where) > 1}


def test_a_public_class_name_means_one_class() -> None:
    assert shared_class_names(modules_of_the_package()) == {}


def test_a_class_name_that_stands_twice_is_found() -> None:
    modules = {
        "a": ast.parse("class Row: ...\nclass _Own: ..."),
        "b": ast.parse("class Row: ...\nclass _Own: ..."),
    }
    assert shared_class_names(modules) == {"Row": ["a", "b"]}


# -------------------------------------------------------------------------------------- docstrings

# A first sentence that begins like this is a riddle until the code has been read: "Whose time `next_s` was."
RIDDLE = re.compile(
    r"(?:What|Who|Whose|Whom|Whatever|Whoever|Whether|How|Where|When|Which|It|Its|Of|This|That|These|Those|They"
    r"|Nobody|Somebody)\b"
)
ONLY_A_REFERENCE = re.compile(r"See\b")


def riddles(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions whose docstring does not begin with a verb that names what they do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if RIDDLE.match(text) or ONLY_A_REFERENCE.match(text):
                yield node


def test_a_docstring_begins_with_a_verb() -> None:
    trees = modules_of_the_package().items()
    assert [f"{module}:{node.lineno}" for module, tree in trees for node in riddles(tree)] == []


@pytest.mark.parametrize(
    "text",
    ["What came.", "Whose time it was.", "See `Engine`.", "Its length.", "Whether it is.", "Nobody waits."],
)
def test_a_docstring_that_is_a_riddle_is_found(text: str) -> None:
    assert len(list(riddles(ast.parse(f'class A:\n async def f():\n  """{text}"""')))) == 1


@pytest.mark.parametrize(
    "text", ["Return the serial with the earliest deadline.", "Iterate over blocks.", "Offer a row."]
)
def test_a_docstring_that_says_what_is_done_is_let_through(text: str) -> None:
    assert not list(riddles(ast.parse(f'def f():\n """{text}"""')))
