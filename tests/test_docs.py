"""The README and docs/ say what is so: their programs run, their tables are the code's, their links lead somewhere."""

from __future__ import annotations

import importlib
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest

import triolet
from tests import performance_tables
from tests.documentation import (
    PAGES,
    TABLES,
    Block,
    anchors,
    blocks,
    links,
    outside_of_tables,
    table_names,
    with_tables,
)
from tests.source_tree import ROOT, package_modules
from triolet.config.engine import EngineConfig
from triolet.config.server import GatewayConfig
from triolet.core.request.param_validation import ApiFamily
from triolet.kernels.cpu.gemm.blocks import GGUF_FORMATS
from triolet.model.architectures.families import _FAMILIES
from triolet.model.gguf.ggml_types import TYPES
from triolet.protocol.sampling import WIRE_NAMES

PYTHON = list(blocks("python"))
TESTS = [block for block in PYTHON if "async def test_" in block.text]
# A program starts its event loop itself, or has none.
PROGRAM = re.compile(r"^((trio|anyio|asyncio)\.run\(|with triolet\.blocking\.)", re.MULTILINE)
PROGRAMS = [block for block in PYTHON if PROGRAM.search(block.text)]
SNIPPETS = [block for block in PYTHON if block not in (*TESTS, *PROGRAMS)]
SNIPPET_HEAD = (
    "import attrs, trio, triolet\nfrom triolet import SamplingParams\n\nasync def snippet(engine):\n"
)


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_a_program_of_the_documentation_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.py"
    path.write_text(block.text, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", TESTS, ids=str)
def test_a_test_of_the_documentation_passes(block: Block, tmp_path: Path) -> None:
    (tmp_path / "test_block.py").write_text(block.text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntrio_mode = true\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and "1 passed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", sorted({block.page for block in SNIPPETS}), ids=lambda page: page.relative_to(ROOT).as_posix()
)
async def test_the_snippets_of_a_page_run_with_an_engine(page: Path, tmp_path: Path) -> None:
    left = [block for block in SNIPPETS if block.page == page]
    while left:
        async with triolet.open_engine() as engine:
            while left:
                block = left.pop(0)
                path = (
                    tmp_path / f"{block}.py"
                )  # named as the block, so that a traceback tells which one it was
                path.write_text(SNIPPET_HEAD + textwrap.indent(block.text, "    "), encoding="utf-8")
                await runpy.run_path(str(path))["snippet"](engine)
                assert engine.statistics().num_requests_live == 0, block
                if "engine.drain(" in block.text:
                    break  # a drained engine takes nothing new


def test_the_readme_shows_the_heart_of_the_embedding_example() -> None:
    readme = next(block.text for block in PROGRAMS if block.page.name == "README.md")
    example = (ROOT / "examples" / "embed.py").read_text(encoding="utf-8")
    lines = readme[readme.index("with trio.move_on_after") : readme.index("trio.run(")].split("\n")
    assert [line.strip() for line in lines if line.strip() and line.strip() not in example] == []
    assert len([line for line in readme.splitlines() if line]) <= 12


@pytest.mark.parametrize("page", [page for page in PAGES if table_names(page)], ids=lambda page: page.name)
def test_a_table_says_what_the_code_says(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    assert source == with_tables(source), "write the tables anew: python -m tests.documentation"


def test_every_table_is_used_and_every_field_of_the_configuration_is_in_one() -> None:
    assert {name for page in PAGES for name in table_names(page)} == TABLES.keys()
    for config in (EngineConfig, GatewayConfig):
        table = "\n".join(TABLES[config.__name__]())
        assert [field.name for field in attrs.fields(config) if f"`{field.name}`" not in table] == []


PERFORMANCE = ROOT / "docs" / "performance.md"


@pytest.mark.parametrize("name", performance_tables.TABLES)
def test_every_table_of_figures_names_its_commit_its_rounds_and_its_machine(name: str) -> None:
    first, _, head, _, *rows = performance_tables.TABLES[name]()
    assert first.startswith("Machine: ")
    assert head.startswith("| machine | commit | rounds |")
    assert rows and not [row for row in rows if row.startswith("|  |")]


def test_figures_of_the_performance_page_stand_in_tables_made_from_results() -> None:
    lines = outside_of_tables(PERFORMANCE.read_text(encoding="utf-8")).splitlines()
    assert [line for line in lines if line.startswith("|") and re.search(r"\| [\d,.]+ \|", line)] == []


def test_a_peer_is_compared_only_within_its_run() -> None:
    one, other = ({"model": "m", "commit": "c", "floor": floor} for floor in (1.0, 2.0))
    lines = [{**run, "engine": engine} for run in (one, other) for engine in ("triolet", "vllm")]
    assert performance_tables.runs_of(lines, "model", "floor") == [lines[:2], lines[2:]]


def test_a_table_has_the_latest_run_of_each_machine() -> None:
    lines = [{"cpu": cpu, "model": "m", "number": number} for number, cpu in enumerate("ABBA")]
    assert performance_tables.latest(lines, "model") == [lines[3], lines[2]]


def test_every_family_of_the_native_decoder_is_named() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert [architecture for architecture in _FAMILIES if f"`{architecture}`" not in text] == []


def test_the_table_of_gguf_types_says_which_are_kept() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]*`) \| ([^|]*) \|$", text, re.MULTILINE)
    told = {name: what for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    kept = {name for name, what in told.items() if what.startswith("kept by the CPU kernels")}
    converted = {name for name, what in told.items() if what == "converted to `dtype`"}
    assert kept == GGUF_FORMATS.keys()
    assert kept | converted | {"F32", "F16", "BF16"} == {kind.name for kind in TYPES.values()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []


REFERENCE = "\n".join(
    page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
)


@pytest.mark.parametrize("module", ["triolet", "triolet.compat", "triolet.server", "triolet.errors"])
def test_every_public_name_is_in_the_api_reference(module: str) -> None:
    public = getattr(importlib.import_module(module), "__all__", None)
    names = [module] if public is None else [f"{module}.{name}" for name in public if name != "errors"]
    assert [name for name in names if not has_entry(REFERENCE, name)] == []


def has_entry(reference: str, name: str) -> bool:
    """`::: NAME`, or a row of a table that names the entry of the same thing under its other name."""
    return f"\n::: {name}\n" in reference or f"\n| `{name}` | [triolet." in reference


def test_a_name_without_an_entry_is_found() -> None:
    reference = "\n::: triolet.Engine\n| `triolet.compat.Logprob` | [triolet.Logprob][] |\n"
    assert has_entry(reference, "triolet.Engine")
    assert has_entry(reference, "triolet.compat.Logprob")
    assert not has_entry(reference, "triolet.Logprob")
    assert not has_entry(reference, "triolet.compat.Engine")


ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_OWN_WORDS = 15


def test_every_package_is_in_the_table_of_the_architecture() -> None:
    packages = {name for name, path in package_modules() if path.name == "__init__.py"}
    # Of C++, the package above them tells.
    parts = {
        name.removeprefix("triolet.").replace(".", "/") for name in packages if ".kernels.cpu." not in name
    }
    rows = re.findall(r"^\| `([a-z_/]+)` \|", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(rows) == parts - {"triolet"} | {"errors"}


def test_every_code_of_an_error_is_on_the_page_of_its_protocol() -> None:
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("http.md", "protocol.md"))
    sources = [
        path for module, path in package_modules() if re.match(r"triolet\.(server|protocol|router)\b", module)
    ]
    codes = {
        code for path in sources for code in re.findall(r'\bcode="(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert len(codes) > 30
    assert {code for code in codes if f"`{code}`" not in pages} == set()


def test_every_sampling_parameter_of_a_response_is_on_the_page_of_the_protocol() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    names = WIRE_NAMES[ApiFamily.RESPONSES].values()
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_glossary_is_short() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("## Glossary")[2].partition("\n## ")[0]
    words = [
        word for row in re.findall(r"^\| ([a-z, ]+) \|", section, re.MULTILINE) for word in row.split(", ")
    ]
    assert 1 < len(words) - 1 <= MAX_OWN_WORDS, words  # without the head of the table


[UNIT] = [block for block in blocks("ini") if block.page.name == "deployment.md"]


def test_the_snapshot_of_the_systemd_unit_is_in_a_folder_that_it_may_write_to() -> None:
    state = re.search(r"^StateDirectory=(\w+)$", UNIT.text, re.MULTILINE)
    assert state is not None
    assert f"--snapshot /var/lib/{state[1]}/" in UNIT.text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "triolet.service"
    unit.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", UNIT.text, flags=re.MULTILINE))
    ended = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, [line for line in ended.stderr.splitlines() if "triolet" in line]) == (0, [])


def test_every_page_of_the_documentation_can_be_reached() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert [page.name for page in (ROOT / "docs").rglob("*.md") if page.resolve() not in linked] == []
