"""Chat templates: render the messages of a chat to the text of a prompt.

A chat template is a Jinja program from a model folder, so it is not trusted. It runs in a sandbox (`sandbox`), on
copies of plain data (`messages`), with a work budget that every operation is charged to (`operations`). The
text is the same as that of transformers' `apply_chat_template(tokenize=False)`.
"""

from triolet.core.chat_template.forms import with_parsed_arguments
from triolet.core.chat_template.program import (
    DEFAULT_MAX_OUTPUT_CHARS,
    DEFAULT_MAX_WORK,
    MAX_SOURCE_CHARS,
    ChatTemplate,
)

__all__ = [
    "DEFAULT_MAX_OUTPUT_CHARS",
    "DEFAULT_MAX_WORK",
    "MAX_SOURCE_CHARS",
    "ChatTemplate",
    "with_parsed_arguments",
]
