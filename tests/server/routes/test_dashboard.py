"""The dashboard in docs/ asks Prometheus for what the server tells it."""

from __future__ import annotations

import json
import re

import trio

from tests.server.routes.harness import HELLO, serving
from tests.source_tree import ROOT


async def test_every_number_on_the_dashboard_is_one_of_the_servers(
    autojump_clock: trio.testing.MockClock,
) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    async with serving() as scene:
        await scene.post("/v1/chat/completions", {**HELLO, "max_tokens": 3})
        told = set(re.findall(r"^(triolet:\w+)", (await scene.get("/metrics")).body.decode(), re.MULTILINE))
    names = {name for expression in asked for name in re.findall(r"triolet:\w+", expression)}
    assert len(names) > 10
    assert names <= told
