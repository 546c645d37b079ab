"""The chart in docs/ shows figures that stand in a result file, with commit, rounds and machine."""

from __future__ import annotations

import json
import re

from tests.performance_charts import PEERS, beside_peers
from tests.source_tree import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "throughput.jsonl"


def test_the_chart_is_the_one_that_the_results_make() -> None:
    assert PEERS.read_text(encoding="utf-8") == beside_peers(), "draw it anew: python -m tests.documentation"


def test_every_figure_of_the_chart_is_in_a_result_of_its_commit_and_engine() -> None:
    measured = {
        (
            line["commit"],
            str(line["rounds"]),
            line["model"],
            line["workload"],
            line["engine"].lower(),
            f"{line['output_tokens_per_s']:,.0f}",
        )
        for line in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
        if line["dtype"] == "bfloat16"
    }
    shown = set()
    case: tuple[str, str] = ("", "")
    source: tuple[str, str] = ("", "")
    engine = ""
    for text in re.findall(r"<text[^>]*>([^<]*)</text>", PEERS.read_text(encoding="utf-8")):
        if found := re.fullmatch(r"([\w.-]+), (single|batch(?:-\d+)?|prefix)", text):
            case = found[1], found[2]
        elif found := re.fullmatch(r"\w.*, commit (\w+), rounds: (\d+)", text):
            source = found[1], found[2]
        elif text in ("triolet", "vLLM", "llama.cpp"):
            engine = text.lower()
        elif re.fullmatch(r"[\d,]+", text):
            shown.add((*source, *case, engine, text))
    assert len(shown) > 10
    assert shown - measured == set()
    assert "Machine: " in PEERS.read_text(encoding="utf-8")
