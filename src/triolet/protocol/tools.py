"""What requests of both protocols that may offer tools have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from triolet.core.request.structured_outputs import StructuredOutputsParams
from triolet.core.tools import ToolPlan, plan_tools
from triolet.errors import InvalidRequest
from triolet.protocol.errors import WireError


class Offer(Protocol):
    """A request, as far as it is about tools."""

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Functions that the model may call."""
        ...

    @property
    def tool_choice(self) -> str | Mapping[str, Any] | None:
        """Whether and which it has to."""
        ...

    @property
    def parallel_tool_calls(self) -> bool:
        """Whether several at once."""
        ...

    def form(self) -> StructuredOutputsParams | None:
        """The form that the text of the answer is to have."""
        ...

    def refusal(self, error: BaseException) -> WireError:
        """What the client is told about an exception."""
        ...


class OffersTools:
    """A request that is also an `Offer`."""

    __slots__ = ()

    def plan(self: Offer, tool_parser: str | None = None, reasoning_parser: str | None = None) -> ToolPlan:
        """What follows from the tools: how they are shown, what is forced, and how the answer is read.

        Args:
            tool_parser: the model's format of calls.
            reasoning_parser: the model's marks of reasoning.
        Raises:
            WireError: a wrong tool, choice or form, or one that this model can not serve.
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
