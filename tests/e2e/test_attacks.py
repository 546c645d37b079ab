"""A few attacks of benchmarks/attacks.py on a real server: what is refused, and that another client notices nothing.

No time decides here; `python benchmarks/attacks.py` measures the delays.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, serve
from tests.scale import one_in
from tests.source_tree import ROOT


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("attacks", ROOT / "benchmarks" / "attacks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


attacks = _load()
ATTACKS = attacks.attacks()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(
        "--api-keys", f"{attacks.ATTACKER},{attacks.WITNESS}", "--max-stored-responses", "16"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: Server) -> str:
    text: str = attacks.read_chat(attacks.Client(server.port, attacks.WITNESS))
    assert "1" in text and "20" in text
    return text


@pytest.mark.parametrize(
    ("name", "outcome"),
    one_in(
        2,
        [
            ("frames: empty fragments", "closed 1008"),
            ("frames: pings", "closed 1008"),
            ("frames: pongs", "closed 1008"),
            ("body: unknown keys", "413"),
            ("body: short logit_bias", "400"),
            ("body: objects", "400"),
            ("body: deep lists", "400"),
            ("body: metadata", "400"),
            ("body: long identifiers", "400"),
        ],
    ),
)
def test_an_attack_is_refused_and_the_stream_of_another_client_is_exact(
    name: str, outcome: str, server: Server, expected: str
) -> None:
    attacker = attacks.Client(server.port, attacks.ATTACKER)
    ATTACKS[name](attacker)
    assert dict(attacker.seen) == {outcome: 1}
    assert attacks.read_chat(attacks.Client(server.port, attacks.WITNESS)) == expected


def test_responses_of_one_key_do_not_displace_those_of_another(server: Server) -> None:
    witness = attacks.Client(server.port, attacks.WITNESS)
    first = json.loads(witness.request("POST", "/v1/responses", attacks.HELLO).partition(b"\r\n\r\n")[2])
    attacker = attacks.Client(server.port, attacks.ATTACKER)
    for _ in range(20):
        attacker.request("POST", "/v1/responses", {**attacks.HELLO, "max_output_tokens": 1})
    assert attacker.seen == {"200": 20}
    witness.request("POST", "/v1/responses", {**attacks.HELLO, "previous_response_id": first["id"]})
    assert witness.seen == {"200": 2}


def test_each_round_of_a_hostile_grammar_sends_another_one_within_the_limits() -> None:
    first, second = attacks.grammars(0), attacks.grammars(1)
    assert first.keys() == second.keys() and all(first[name] != second[name] for name in first)
    assert len(first["choices"]["choice"]) <= 4096


@pytest.mark.slow
def test_attacks_together_leave_the_streams_of_another_client_exact(tmp_path: Path) -> None:
    names = ["frames: pings", "body: metadata", "resumable responses"]
    output = tmp_path / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "attacks.py"), "--together", "2", "--settle", "0"]
    subprocess.run([*command, "--output", str(output), "--only", *names], check=True, timeout=300)
    [result] = map(json.loads, output.read_text().splitlines())
    assert result["exact"] and result["num_streams"] > 0 and result["num_health"] > 0
    assert result["statuses"].keys() == {"200"}
    outcomes = [set(result["attackers"][name]) - {"rounds"} for name in names]
    assert outcomes == [{"closed 1008"}, {"400"}, {"200"}]
    # What the steps of the loop were is a matter of the machine; that they were measured is not.
    assert result["loop"]["longest_ms"] > 0.0 and result["loop"]["longest_work_ms"] > 0.0
    assert result["loop"]["longest_task"] and result["loop"]["longest_work_task"]
    assert result["memory_mib"].keys() == {"before", "at_the_end", "after"}
