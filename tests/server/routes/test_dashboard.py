"""The dashboard and the alerts in docs/ ask Prometheus for what servers and routers export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from tests.server.routes.harness import HELLO, serving
from tests.source_tree import ROOT
from triolet.client.address import ServerAddress
from triolet.config.server import GatewayConfig
from triolet.router.service import Router

DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = re.findall(r"^\| `(.*triolet:.*?)` \|", (ROOT / "docs" / "deployment.md").read_text(), re.MULTILINE)
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool")

# Metrics that must be on a panel: they say that the server, its clients or its parts fail.
ASKED = (
    "actor_restarts_total", "actor_restarting", "num_requests_waiting_by_reason", "open_websockets",
    "open_http_connections", "websocket_closes_total", "http_connection_closes_total", "http_responses_total",
    "gateway_rejections_total", "send_queue_bytes", "sse_waiting_bytes", "sse_sent_bytes_total", "key_requests_total",
)  # fmt: skip


@asynccontextmanager
async def exported() -> AsyncGenerator[tuple[str, Mapping[str, Any]]]:
    """The text of /metrics after a request, and collectors of a server and a router by the names of their series."""
    router = Router([ServerAddress.of("engine:1")], GatewayConfig())
    async with serving(config=GatewayConfig(api_keys=("key",))) as scene:
        headers = {"Authorization": "Bearer key"}
        await scene.post("/v1/chat/completions", {**HELLO, "max_tokens": 3}, headers=headers)
        await scene.get("/v1/models")  # refused
        text = (await scene.get("/metrics")).body.decode()
        context = scene.app.state.context
        registries = (context.metrics.registry, context.gateway_metrics.registry, router._metrics.registry)
        yield text, {name: one for each in registries for name, one in each._names_to_collectors.items()}


@pytest.mark.parametrize("query", [*QUERIES, *ALERTS])
async def test_a_query_names_exported_metrics_and_their_labels(query: str, autojump_clock: MockClock) -> None:
    async with exported() as (_, collectors):
        labels: set[str] = {"le"}
        for name in re.findall(r"triolet:\w+", query):
            assert name in collectors, name
            labels |= set(collectors[name]._labelnames)
    grouped = [name for group in re.findall(r"by \((.*?)\)", query) for name in group.split(", ")]
    selected = re.findall(r'(\w+)=~?"', query)
    assert {*grouped, *selected} <= labels


def test_every_label_of_a_legend_is_one_that_the_query_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = {
                name for group in re.findall(r"by \((.*?)\)", target["expr"]) for name in group.split(", ")
            }
            assert shown <= kept, panel["title"]


def test_the_gateway_and_the_restarts_are_on_the_dashboard() -> None:
    assert len(ALERTS) > 5  # found in the page's table
    asked = {name for query in QUERIES for name in re.findall(r"triolet:(\w+)", query)}
    assert set(ASKED) <= asked


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        is_above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or is_above
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


# vLLM's prefix has a colon, and this one of its histograms ends like a counter: both are kept for its dashboards.
KNOWN_LINT = (
    "metric names should not contain ':'",
    'iteration_tokens_total non-counter metrics should not have "_total" suffix',
)


@needs_promtool
async def test_promtool_finds_nothing_in_the_metrics_but_what_vllm_has_too(autojump_clock: MockClock) -> None:
    assert PROMTOOL is not None
    async with exported() as (text, _):
        said = await trio.run_process(
            [PROMTOOL, "check", "metrics"],
            stdin=text.encode(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    lines = (said.stdout + said.stderr).decode().splitlines()
    assert [line for line in lines if line and not line.endswith(KNOWN_LINT)] == []


@needs_promtool
def test_promtool_can_read_every_query(tmp_path: Path) -> None:
    assert PROMTOOL is not None
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m").replace("$model", "x")}
        for number, query in enumerate([*QUERIES, *ALERTS])
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML, too
    said = subprocess.run(
        [PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr
