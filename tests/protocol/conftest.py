from __future__ import annotations

from typing import Any

import pytest

from triolet.core.tools import ToolPlan, plan_tools
from triolet.protocol import sampling


@pytest.fixture
def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The tool parser of every plan that a request makes of its tools."""
    parsers: list[str | None] = []

    def counted(*arguments: Any, tool_parser: str | None = None, **fields: Any) -> ToolPlan:
        parsers.append(tool_parser)
        return plan_tools(*arguments, tool_parser=tool_parser, **fields)

    monkeypatch.setattr(sampling, "plan_tools", counted)
    return parsers
