"""Chat templates: compiled for the sandbox, rendered to prompts, and the errors that callers get from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, NoReturn

import attrs
from jinja2.environment import Template
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Macro

from triolet.core.chat_template.forms import TemplateForms
from triolet.core.chat_template.messages import (
    Message,
    cut,
    marked,
    plain_data,
    plain_messages,
    plain_tools,
)
from triolet.core.chat_template.operations import LimitReached, Meter
from triolet.core.chat_template.sandbox import Instrument, Refusal, Sandbox
from triolet.core.json_text import release
from triolet.errors import ChatTemplateError

MAX_SOURCE_CHARS = 250_000
"""Longest template that is compiled; those of well-known models have up to about 20,000."""

DEFAULT_MAX_OUTPUT_CHARS = 8_000_000
"""Longest prompt: about two million tokens of English."""

DEFAULT_MAX_WORK = 3_000_000
"""Work budget: about a thousand times that of a long chat, one or two seconds of one processor core."""

MAX_WORK_OF_A_TRIAL = 100_000
"""Work budget of a short chat that is rendered to find the forms that a template takes."""

MAX_MESSAGE_CHARS = 1000
"""Longest error message that is passed on."""

FILENAME = "<chat template>"


@attrs.frozen
class TemplateProgram:
    """Compiled and instrumented template."""

    code: CodeType  # compiled by Jinja
    variables: frozenset[str]  # the names that it reads and does not set itself

    @classmethod
    def compile(cls, source: str, meter: Meter) -> TemplateProgram:
        """Compile a template.

        Raises:
            ChatTemplateError: Jinja or Python cannot compile it.
        """
        environment = Sandbox(meter)
        try:
            tree = environment.parse(source)
            variables = find_undeclared_variables(tree)
            tree = Instrument().visit(tree)
            tree.set_environment(environment)
            code = environment.compile(tree, filename=FILENAME)
        except Exception as error:
            raise _as_chat_template_error(error, getattr(error, "lineno", None), "chat_template") from error
        return cls(code, frozenset(variables))

    def run(
        self,
        variables: Mapping[str, Any],
        *,
        meter: Meter,
        max_output_chars: int,
        strftime_now: Callable[[str], str] | None = None,
    ) -> str:
        """Render the template.

        Raises:
            ChatTemplateError: it failed, refused the messages, or passed a limit.
        """
        environment = Sandbox(meter, strftime_now)
        template = Template.from_code(environment, self.code, environment.make_globals(None))
        context = template.new_context(dict(variables))
        pieces, num_chars = [], 0
        try:
            for piece in template.root_render_func(context):
                pieces.append(piece)
                # Counted while it renders: a loop of a template could fill the memory before its end.
                num_chars += len(piece)
                if num_chars > max_output_chars:
                    raise LimitReached(f"its output passed the limit of {max_output_chars} characters")
        except Exception as error:
            raise _as_chat_template_error(error, _line_of(error, template), "messages") from error
        finally:
            environment.close()
            # The compiled functions are in the dict that they have their globals from.
            template.root_render_func.__globals__.clear()
            # And a macro is in the context that its function has, and may call itself.
            for value in context.vars.values():
                if isinstance(value, Macro):
                    value._func = _no_function
            context.vars.clear()
        return "".join(pieces)


def _no_function(*_: object) -> NoReturn:
    """Take the place of the function of a macro whose rendering is over."""
    raise RuntimeError("the rendering is over")


def _line_of(error: Exception, template: Template) -> int | None:
    """Return the line of the template where an error arose."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == FILENAME:
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def _as_chat_template_error(error: Exception, line: int | None, field: str) -> ChatTemplateError:
    """Convert an error to the one for the caller: the template's own message, or the kind of error and its line."""
    place = "" if line is None else f" in line {line}"
    if isinstance(error, Refusal):
        text = f"the chat template refused the messages: {error.message}"
    elif isinstance(error, LimitReached):
        text = f"the chat template was stopped{place}: {error}"
    # A message with an address in it shows an object of ours, and differs each time.
    elif isinstance(error, TemplateError | TypeError | ArithmeticError) and " at 0x" not in str(error):
        text = f"the chat template failed{place}: {getattr(error, 'message', error)}"
    else:
        text = f"the chat template failed{place}: {type(error).__name__}"
    return ChatTemplateError(text[:MAX_MESSAGE_CHARS], field=field)


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
        # What callers may pass is what a template reads beyond these.
        own_names = {"messages", "tools", "add_generation_prompt", "strftime_now", *tokens}
        self._variables = self._program.variables - own_names
        # Not a method of this object: only a full garbage collection would find the circle.
        render = functools.partial(_rendered_trial, self._program, self._tokens, strftime_now)
        self._forms = TemplateForms(render, may_read_parts="text" in source)

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
            raise ChatTemplateError(
                f"the chat template reads no value named {unread[0]!r}", field="chat_template_kwargs"
            )
        plain = self._forms.applied(plain_messages(messages))
        seen_by_template: dict[str, Any] = {
            **self._tokens,
            "documents": None,
            **{name: plain_data(value, name) for name, value in values.items()},
            "messages": marked(plain) if continue_final_message else plain,
            "tools": plain_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._program.run(
                seen_by_template,
                meter=Meter(self._max_work),
                max_output_chars=self._max_output_chars,
                strftime_now=self._strftime_now,
            )
            return cut(text, plain[-1]) if continue_final_message else text
        finally:
            copies = [*seen_by_template.values()]
            seen_by_template.clear()
            del plain
            release(copies)


def _rendered_trial(
    program: TemplateProgram,
    tokens: Mapping[str, str],
    strftime_now: Callable[[str], str] | None,
    messages: Sequence[Message],
) -> str:
    """Render a short chat without values of a caller."""
    variables = {
        **tokens,
        "documents": None,
        "messages": list(messages),
        "tools": None,
        "add_generation_prompt": False,
    }
    return program.run(
        variables,
        meter=Meter(MAX_WORK_OF_A_TRIAL),
        max_output_chars=MAX_WORK_OF_A_TRIAL,
        strftime_now=strftime_now,
    )
