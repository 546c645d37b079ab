"""Chat templates: render the messages of a chat to the text of a prompt.

A chat template is a Jinja program from a model folder, so it is not trusted. It runs in a sandbox (`sandbox`), on
copies of plain data (`messages`), with a work budget (`meter`) that every operation is charged to (`operations`). The
text is the same as that of transformers' `apply_chat_template(tokenize=False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from triolet.core.chat_template.continuation import cut, marked
from triolet.core.chat_template.messages import plain_data, plain_messages, plain_tools
from triolet.core.chat_template.meter import Meter
from triolet.core.chat_template.program import TemplateProgram
from triolet.errors import ChatTemplateError

MAX_SOURCE_CHARS = 250_000
"""Longest template that is compiled; those of well-known models have up to about 20,000."""

DEFAULT_MAX_OUTPUT_CHARS = 8_000_000
"""Longest prompt: about two million tokens of English."""

DEFAULT_MAX_WORK = 3_000_000
"""Work budget: about a thousand times that of a long chat, one or two seconds of one processor core."""


class ChatTemplate:
    """Compiled chat template of a model. Rendering does not change it, so several threads may render at once.

    Args:
        source: the template, in Jinja, as in a model's `chat_template`.
        bos_token: the text that begins a sequence; a template sees it only if there is one.
        eos_token: the text that ends one, likewise.
        special_tokens: more such texts by name, such as `pad_token`.
        strftime_now: formats the present time as `time.strftime` does, for templates that write the date; without
            it they see no such function, and many then write a fixed date.
        max_output_chars: longest prompt, characters.
        max_work: units of work that one rendering may cost, see `meter`.

    Raises:
        ChatTemplateError: the source is no template.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Mapping[str, str] | None = None,
        strftime_now: Callable[[str], str] | None = None,
        max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
        max_work: int = DEFAULT_MAX_WORK,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ChatTemplateError(
                f"chat_template must be no longer than {MAX_SOURCE_CHARS} characters; got {len(source)}",
                field="chat_template",
            )
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **(special_tokens or {})}
        self._tokens = {name: token for name, token in tokens.items() if token}
        self._strftime_now = strftime_now
        self._max_output_chars = max_output_chars
        self._max_work = max_work
        self._source = source
        self._program = TemplateProgram.compile(source, Meter(max_work))
        own_names = {"messages", "tools", "add_generation_prompt", "strftime_now", *tokens}
        self._variables = self._program.variables - own_names

    @property
    def source(self) -> str:
        """Source of the template. The tool-call format, for instance, is detected from its markers."""
        return self._source

    @property
    def reads_tools(self) -> bool:
        """True if the template shows tools to the model."""
        return "tools" in self._program.variables

    @property
    def variables(self) -> frozenset[str]:
        """Names of further values that this template reads, such as `enable_thinking`."""
        return self._variables

    def render(
        self,
        messages: object,
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: object = None,
        **values: object,
    ) -> str:
        """Render messages to the text of the prompt.

        Args:
            messages: see `plain_messages`.
            add_generation_prompt: end with what an answer begins with.
            continue_final_message: end with the last message, as if it were not over.
            tools: descriptions of tools (JSON schemas), or None.
            **values: further values, by name, for the template: only such as it reads (`variables`).

        Raises:
            InvalidPrompt: messages, tools or values are not what they must be.
            ChatTemplateError: the template reads no value of that name, failed, refused the messages, or passed its
                limit of work or output.
        """
        if unread := sorted(values.keys() - self._variables):
            raise ChatTemplateError(f"the chat template reads no value named {unread[0]!r}", field=unread[0])
        plain = plain_messages(messages)
        seen_by_template: dict[str, Any] = {
            **self._tokens,
            "documents": None,
            **{name: plain_data(value, name) for name, value in values.items()},
            "messages": marked(plain) if continue_final_message else plain,
            "tools": plain_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._program.run(
            seen_by_template,
            meter=Meter(self._max_work),
            max_output_chars=self._max_output_chars,
            strftime_now=self._strftime_now,
        )
        return cut(text, plain[-1]) if continue_final_message else text
