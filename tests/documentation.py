"""The README and the pages in docs/: their code blocks, their links, and the tables that are made from the code.

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`. Tests hold it to the code;
`python -m tests.documentation` writes the tables anew.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from tests import performance_charts, performance_tables
from tests.source_tree import ROOT
from tests.test_layering import EXCEPTIONS, FREE_LAYERS, LAYERS
from triolet import errors
from triolet.cli.models.sampling import SAMPLING_OPTIONS
from triolet.cli.slash import COMMANDS
from triolet.config.engine import EngineConfig
from triolet.config.fields import rule_of
from triolet.config.server import GatewayConfig
from triolet.core.metrics.iteration_stats import EngineStatistics
from triolet.core.output.output_processor import LiveRequest
from triolet.core.output.outputs import CompletionOutput, RequestOutput
from triolet.core.request.param_validation import ApiFamily, SamplingParameter
from triolet.core.request.params import SAMPLING_PARAMETERS
from triolet.core.request.request import RequestMetrics
from triolet.core.request.structured_outputs import StructuredOutputsParams

PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_ARGUMENTS = re.compile(r"^Args:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^# -+ (.+)$")
_CLASS = re.compile(r"^class ([A-Z]\w*)\(")


@attrs.frozen
class Block:
    """A fenced block of a page, and the line on which its text begins."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(language: str | None) -> Iterator[Block]:
    """Every block of that language, or of any, in all pages."""
    for page in PAGES:
        source = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(source):
            if language in (None, match[1]):
                yield Block(page, source.count("\n", 0, match.start()) + 2, match[1], match[2])


def links(page: Path) -> list[str]:
    """The targets of a page's links, code blocks left out."""
    return _LINK.findall(_BLOCK.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """What a link may name behind a `#`: the headings, written as their anchors."""
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ------------------------------------------------------------------------------------------- tables


def table_names(page: Path) -> list[str]:
    """The tables of a page."""
    return [match[2] for match in _TABLE.finditer(page.read_text(encoding="utf-8"))]


def outside_of_blocks(source: str) -> str:
    """Return a page's text without its fenced blocks."""
    return _BLOCK.sub("", source)


def outside_of_tables(source: str) -> str:
    """Return a page's text without the tables that are made."""
    return _TABLE.sub("", source)


def with_tables(source: str) -> str:
    """A page's text with every table as the code would have it now."""
    return _TABLE.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], source)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _code(text: object) -> str:
    return f"`{text}`"


def _described(cls: type) -> dict[str, str]:
    """What a class's docstring says of its arguments."""
    found = _ARGUMENTS.search(inspect.getdoc(cls) or "")
    assert found is not None, f"{cls.__name__} does not describe its arguments"
    return {match[1]: " ".join(match[2].split()) for match in _ARGUMENT.finditer(found[1])}


def _fields(cls: type) -> list[str]:
    """The documented fields of an attrs class."""
    rows = [(_code(name), text) for name, text in _described(cls).items()]
    return _table(("field", "what it is"), rows)


def _sampling_parameters() -> list[str]:
    rows = [
        (
            _code(one.name),
            _code(_shown(one.default)),
            "row" if one.spec.per_row else "request",
            _wire_names(one),
            one.spec.help,
        )
        for one in SAMPLING_PARAMETERS
    ]
    return _table(("field", "default", "read per", "over HTTP and WebSocket", "meaning"), rows)


def _wire_names(one: SamplingParameter) -> str:
    """Where the parameter has its own name, where another one, and where it is refused."""
    names = {family: one.wire_name(family) for family in ApiFamily}
    if not any(names.values()):
        return "refused: " + next(iter(one.spec.refused.values()))
    others = [
        f"{family.value}: " + (_code(name) if name else f"refused, {one.spec.refused[family]}")
        for family, name in names.items()
        if name != one.name
    ]
    return "; ".join(["yes", *others])


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _config(cls: type) -> list[str]:
    rows = [
        (_code(field.name), _kind(field), _code(_shown(field.default)), field.metadata["help"])
        for field in attrs.fields(cls)
    ]
    return _table(("field", "type", "default", "what it is"), rows)


def _kind(field: attrs.Attribute[Any]) -> str:
    choices = rule_of(field).choices
    return ", ".join(map(_code, choices)) if choices else _code(field.type)


def _sampling_flags() -> list[str]:
    rows = [(_code("--" + option.name.replace("_", "-")), option.spec.help) for option in SAMPLING_OPTIONS]
    return _table(("flag", "what it does"), rows)


def _slash_commands() -> list[str]:
    return _table(("command", "what it does"), [(_code(c.usage), c.help) for c in COMMANDS.values()])


def _errors() -> list[str]:
    """The classes of errors.py in their order, under the headings that stand between them."""
    rows, section = [], "all"
    for line in inspect.getsource(errors).splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
        elif name := _CLASS.match(line):
            text = (inspect.getdoc(getattr(errors, name[1])) or "").partition("\n\n")[0]
            rows.append((section, _code(name[1]), " ".join(text.split())))
    return _table(("whose", "error", "what it means"), rows)


def _layers() -> list[str]:
    rows = [
        (_code(name), _codes(layer.ours) or "nothing", _codes(layer.third_party) or "nothing")
        for name, layer in LAYERS.items()
    ]
    free = (", ".join(map(_code, sorted(FREE_LAYERS))), "what they need", "what they need")
    exceptions = [(_code(module), *_of_both(names)) for module, names in EXCEPTIONS.items()]
    return _table(("package", "of triolet", "of others"), [*rows, free, *exceptions])


def _codes(names: Iterable[str]) -> str:
    return ", ".join(map(_code, sorted(names)))


def _of_both(names: Iterable[str]) -> tuple[str, str]:
    """Split what a module may import beyond its package into ours and others'."""
    ours = [name.removeprefix("triolet.") for name in names if name.startswith("triolet.")]
    others = [name for name in names if not name.startswith("triolet.")]
    return _also(ours), _also(others)


def _also(names: list[str]) -> str:
    return f"also {_codes(names)}" if names else ""


TABLES: dict[str, Callable[[], list[str]]] = {
    "EngineConfig": lambda: _config(EngineConfig),
    "GatewayConfig": lambda: _config(GatewayConfig),
    "SamplingParams": _sampling_parameters,
    "StructuredOutputsParams": lambda: _fields(StructuredOutputsParams),
    "RequestOutput": lambda: _fields(RequestOutput),
    "CompletionOutput": lambda: _fields(CompletionOutput),
    "RequestMetrics": lambda: _fields(RequestMetrics),
    "LiveRequest": lambda: _fields(LiveRequest),
    "EngineStatistics": lambda: _fields(EngineStatistics),
    "errors": _errors,
    "layers": _layers,
    "sampling_flags": _sampling_flags,
    "slash_commands": _slash_commands,
    **performance_tables.TABLES,
}


def _write_tables() -> None:
    for page in PAGES:
        source = page.read_text(encoding="utf-8")
        if (written := with_tables(source)) != source:
            page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    _write_tables()
    performance_charts.PEERS.write_text(performance_charts.beside_peers(), encoding="utf-8")
