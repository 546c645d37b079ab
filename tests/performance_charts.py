"""The charts of the README and docs/, made from benchmarks/results/*.jsonl.

`python -m tests.documentation` draws them anew, and a test fails where a file differs from the
results. Figures are those of the tables.
"""

from __future__ import annotations

from html import escape

from tests import performance_tables
from tests.source_tree import ROOT

PEERS = ROOT / "docs" / "throughput.svg"

_WIDTH, _LEFT, _LONGEST = 720, 310, 340  # pixels: the image, where bars begin, and the longest bar
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #222 }
.soft { fill: #666; font-size: 11px }
.title { font-size: 15px; font-weight: 600 }
.triolet { fill: #2f6f62 }
.peer { fill: #b9b2a4 }
@media (prefers-color-scheme: dark) {
  text { fill: #eee }
  .soft { fill: #aaa }
  .triolet { fill: #6fc2ae }
  .peer { fill: #6d675c }
}"""


def beside_peers() -> str:
    """Return an SVG of output tokens per second, triolet's beside its peers', of the runs with bfloat16 weights."""
    machine, _, head, _, *lines = performance_tables.beside_peers()
    names = _cells(head)
    runs = [dict(zip(names, _cells(line), strict=True)) for line in lines]
    drawn = [
        _text(0, 18, "Output tokens per second, bfloat16", "title"),
        _text(0, 36, "One run each: its bars are relative to its fastest engine.", "soft"),
    ]
    top = 62
    for run in (run for run in runs if run["weights"] == "bfloat16"):
        measured = {name: run[name] for name in ("triolet", "vLLM", "llama.cpp") if run[name]}
        drawn.append(_text(0, top, f"{run['model']}, {run['workload']}"))
        drawn.append(
            _text(0, top + 15, f"{run['machine']}, commit {run['commit']}, rounds: {run['rounds']}", "soft")
        )
        most = max(map(_value, measured.values()))
        for name, figure in measured.items():
            length = _LONGEST * _value(figure) / most
            kind = "triolet" if name == "triolet" else "peer"
            drawn.append(f'<text x="{_LEFT - 8}" y="{top}" text-anchor="end">{name}</text>')
            drawn.append(
                f'<rect class="{kind}" x="{_LEFT}" y="{top - 10}" width="{length:.1f}" height="12" rx="2"/>'
            )
            drawn.append(_text(_LEFT + length + 6, top, figure))
            top += 17
        top += 12 if len(measured) > 1 else 29
    for line in machine.split("; "):
        drawn.append(_text(0, top + 4, line, "soft"))
        top += 15
    label = "Output tokens per second of triolet, vLLM and llama.cpp"
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 14}" '
        f'role="img" aria-label="{label}">'
    )
    return "\n".join([opening, f"<style>{_STYLE}</style>", *drawn, "</svg>", ""])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _value(figure: str) -> float:
    return float(figure.replace(",", ""))


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    chosen = f' class="{kind}"' if kind else ""
    return f'<text{chosen} x="{x:.1f}" y="{y}">{escape(text)}</text>'
