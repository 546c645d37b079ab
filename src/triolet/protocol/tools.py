"""Tools of a request, in the part that Chat Completions and Responses have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import ToolPlan, plan_tools
from triolet.errors import InvalidRequest
from triolet.protocol.errors import WireError


class Offer(Protocol):
    """Fields of a request that concern tools."""

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Functions that the model may call."""
        ...

    @property
    def tool_choice(self) -> str | Mapping[str, Any] | None:
        """`none`, `auto`, `required`, or the function that must be called; None for the default."""
        ...

    @property
    def parallel_tool_calls(self) -> bool:
        """True if one answer may have several calls."""
        ...

    def form(self) -> StructuredOutputsParams | None:
        """Return the form that the text of the answer must have; None for any text."""
        ...

    def refusal(self, error: BaseException) -> WireError:
        """Return the error to send for an exception."""
        ...


class OffersTools:
    """Mixin that plans the tools of a request with the fields of `Offer`."""

    __slots__ = ()

    def plan(self: Offer, tool_parser: str | None = None, reasoning_parser: str | None = None) -> ToolPlan:
        """Return the plan of the tools: their descriptions in the prompt, the forced form, the parsers of the answer.

        Args:
            tool_parser: format of the model's tool calls.
            reasoning_parser: format of the model's reasoning.
        Raises:
            WireError: a wrong tool, choice or form, or one that this model cannot serve.
        """
        try:
            return plan_tools(
                self.tools,
                self.tool_choice,
                tool_parser=tool_parser,
                reasoning_parser=reasoning_parser,
                parallel_tool_calls=self.parallel_tool_calls,
                form=self.form(),
            )
        except InvalidRequest as error:
            raise self.refusal(error) from None
