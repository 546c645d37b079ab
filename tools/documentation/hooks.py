"""Hooks of mkdocs: pages that lie outside of docs/, links to them, and a check of the finished site.

CONTRIBUTING.md, CHANGELOG.md and each program of examples/ become pages. Links between the files of the repository lead
where they lead on GitHub; here they are turned into links between pages.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# path in the repository: page of the site, relative to docs/
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples": "examples/index.md",
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in EXAMPLES},
}

_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>|<link\b[^>]*>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in docs/."""
    for source, page in PAGES.items():
        path = ROOT / source
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
        elif path.suffix == ".py":
            text = f"# {path.name}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
        else:
            text = _index_of_examples()
        files.append(File.generated(config, page, content=text))
    return files


def _index_of_examples() -> str:
    rows = [f"| [{path.name}]({path.stem}.md) | {_first_sentence(path)} |" for path in EXAMPLES]
    return "\n".join(["# Examples", "", "| program | what it shows |", "| --- | --- |", *rows, ""])


def _first_sentence(program: Path) -> str:
    text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages."""
    source = page.file.src_uri
    original = next((path for path, uri in PAGES.items() if uri == source), f"docs/{source}")
    here, there = PurePosixPath(source).parent, PurePosixPath(original).parent

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(str(there / match[2]))
        uri = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if uri is None or original.endswith(("examples", ".py")):
            return match[0]
        return match[1] + posixpath.relpath(uri, str(here)) + match[3]

    return _LINK.sub(rewritten, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site whose pages would load something from another machine."""
    for path in sorted(Path(config.site_dir).rglob("*.html")):
        for tag in _LOADED.findall(path.read_text(encoding="utf-8")):
            if "//" in tag and "rel=canonical" not in tag.replace('"', ""):
                raise PluginError(f"{path.name} loads something from a network: {tag}")
