"""Interface between the chat and the model that answers: what is asked, what comes back, and what a backend can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import attrs

from triolet.cli.models.presets import Preset
from triolet.cli.reply import Reply
from triolet.core.request.params import SamplingParams
from triolet.core.request.structured_outputs import StructuredOutputsParams


@attrs.frozen(kw_only=True)
class ReplyRequest:
    """One question with the conversation before it."""

    messages: list[dict[str, str]]
    sampling: Mapping[str, Any] = attrs.field(
        factory=dict
    )  # values of the user, by field of `SamplingParams`
    thinks: bool | None = (
        None  # True or False asks the model to reason or not to; None leaves it to the model
    )
    form: StructuredOutputsParams | None = None  # form of the answer: any JSON, or a schema; None for text


class ReplySink(Protocol):
    """Receiver of a reply as it comes."""

    def text(self, text: str) -> None:
        """Take the next piece of the answer."""

    def reasoning(self, text: str) -> None:
        """Take the next piece of the reasoning."""

    def waits_for(self, reason: Callable[[], str]) -> None:
        """Take a function that says what the reply waits for, asked for again and again until the first text."""

    def notice(self, sentence: str) -> None:
        """Take a sentence about the reply, such as a lost connection."""

    def starts_over(self) -> None:
        """Forget what came: the reply begins again."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event of the server as it came."""


@attrs.frozen
class ModelEntry:
    """Model that a backend can use."""

    name: str
    remark: str = ""  # such as its longest context
    is_present: bool = False  # the one in use


class ChatBackend(Protocol):
    """Model of a chat."""

    @property
    def facts(self) -> tuple[str, ...]:
        """Name of the model and what is known of it, for the greeting."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence, tokens; None if it is not known."""

    @property
    def defaults(self) -> SamplingParams:
        """Sampling parameters that hold where the user has set none."""

    @property
    def knows_defaults(self) -> bool:
        """True if `defaults` are those of the model; False if the server has its own."""

    @property
    def thinking_switch(self) -> str | None:
        """Value of the chat template that `ReplyRequest.thinks` sets; None if the model has none."""

    async def reply(self, request: ReplyRequest, reply: Reply, sink: ReplySink) -> None:
        """Stream an answer into `reply` and to `sink`; cancellation ends it in the model, too."""

    async def models(self) -> list[ModelEntry]:
        """Return the models that `switch` takes."""

    async def switch(self, model: str) -> Preset | None:
        """Use another model from here on, and return its preset if it has one; on an error the present one stays."""
