"""Chat templates compiled for the sandbox, and the errors that callers get from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

import attrs
from jinja2.environment import Template
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables

from triolet.core.chat_template.instrument import Instrument
from triolet.core.chat_template.meter import LimitReached, Meter
from triolet.core.chat_template.sandbox import Refusal, Sandbox
from triolet.errors import ChatTemplateError

MAX_MESSAGE_CHARS = 1000
"""Longest error message that is passed on."""

FILENAME = "<chat template>"


@attrs.frozen
class TemplateProgram:
    """Compiled and instrumented template.

    Args:
        code: compiled by Jinja.
        variables: the names that it reads and does not set itself.
    """

    code: CodeType
    variables: frozenset[str]

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
            raise _as_chat_template_error(error, getattr(error, "lineno", None)) from error
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
        pieces, num_chars = [], 0
        try:
            for piece in template.root_render_func(template.new_context(dict(variables))):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > max_output_chars:
                    raise LimitReached(f"its output passed the limit of {max_output_chars} characters")
        except Exception as error:
            raise _as_chat_template_error(error, _line_of(error, template)) from error
        return "".join(pieces)


def _line_of(error: Exception, template: Template) -> int | None:
    """Return the line of the template where an error arose."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == FILENAME:
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def _as_chat_template_error(error: Exception, line: int | None) -> ChatTemplateError:
    """Convert an error to the one for the caller: the template's own message, or the kind of error and its line."""
    place = "" if line is None else f" in line {line}"
    if isinstance(error, Refusal):
        text = f"the chat template refused the messages: {error.message}"
    elif isinstance(error, LimitReached):
        text = f"the chat template was stopped{place}: {error}"
    elif isinstance(error, TemplateError | TypeError | ArithmeticError) and " at 0x" not in str(error):
        text = f"the chat template failed{place}: {getattr(error, 'message', error)}"
    else:
        text = f"the chat template failed{place}: {type(error).__name__}"
    return ChatTemplateError(text[:MAX_MESSAGE_CHARS], field="chat_template")
