"""Forms of a prompt: text, token ids or a chat, and the checks on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, cast

import attrs

from triolet.core.untracked import hide_numbers
from triolet.errors import InvalidPrompt, PromptTooLong, shown

FLAGS = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
FIELDS = ("messages", "tools", "chat_template", "chat_template_kwargs", *FLAGS)


@attrs.frozen(kw_only=True)
class ChatPrompt:
    """Chat as a prompt: values for the chat template, which checks and copies them."""

    messages: Sequence[Mapping[str, Any]]
    # Descriptions of tools, as the template expects them; None for none.
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None  # another template than the model's own, in Jinja
    # Further values for the template, by name; only such as it reads.
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    add_generation_prompt: bool = True  # True to end with the beginning of an assistant message
    # True to leave the last message open; not together with `add_generation_prompt`.
    continue_final_message: bool = False
    # True to add the special tokens that the tokenizer puts around a text, such as its first token; most
    # templates write them themselves.
    add_special_tokens: bool = False

    @classmethod
    def parse(cls, prompt: Mapping[str, Any]) -> ChatPrompt:
        """Return the prompt from a mapping such as `{"messages": [...], "tools": [...]}`, with the names of `FIELDS`.

        Raises:
            InvalidPrompt: an unknown key, or a value of the wrong type.
        """
        if unknown := [key for key in prompt if key not in FIELDS]:
            raise InvalidPrompt(
                f"prompt must have no fields but {', '.join(FIELDS)}; got {shown(unknown[0])}",
                field="prompt",
                got=unknown[0],
            )
        values = prompt.get("chat_template_kwargs") or {}
        if taken := {"tools", *FLAGS} & set(values):
            raise InvalidPrompt(
                f"chat_template_kwargs must not hold {taken.pop()!r}, which has a place of its own",
                field="chat_template_kwargs",
            )
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise InvalidPrompt(
                f"chat_template_kwargs must be a mapping with texts as keys; got {shown(values)}",
                field="chat_template_kwargs",
                got=values,
            )
        given = {name: value for name, value in prompt.items() if value is not None}
        found = cls(**{**given, "chat_template_kwargs": values})
        found._check_ending()
        if not isinstance(found.chat_template, str | None):
            raise InvalidPrompt(
                f"chat_template must be a text; got {shown(found.chat_template)}",
                field="chat_template",
                got=found.chat_template,
            )
        return found

    def _check_ending(self) -> None:
        for name in FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidPrompt(
                    f"{name} must be true or false; got {shown(value)}", field=name, got=value
                )
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidPrompt(
                "continue_final_message must be false where add_generation_prompt is true",
                field="continue_final_message",
                got=True,
            )


@attrs.frozen
class TextPair:
    """Two texts that the tokenizer joins to one prompt, as the model was trained with; for pooled requests."""

    text: str
    text_pair: str


Prompt = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, Any]]

_FORMS = (
    "a text, a list of token ids, {'prompt_token_ids': [...]}, {'prompt': '...'}, a list of chat messages "
    "or {'messages': [...], 'tools': [...]}"
)


@attrs.frozen
class ParsedPrompt:
    """A prompt of known form; one of the first two is None."""

    token_ids: tuple[int, ...] | None = None  # a prompt that came as ids
    # A prompt that came as text or as chat messages, and must be tokenised.
    content: str | Sequence[Mapping[str, Any]] | ChatPrompt | TextPair | None = None
    text: str | None = None  # the text that came with the ids; shown to the caller, and not checked
    add_special_tokens: bool = True  # False to leave out the special tokens around a text; see `Tokenize`


def parse_prompt(prompt: object) -> ParsedPrompt:
    """Recognise the form of a prompt.

    Raises:
        InvalidPrompt: the prompt has none of the known forms.
    """
    match prompt:
        case str():
            return ParsedPrompt(content=prompt)
        case {"prompt_token_ids": token_ids, **others}:
            text = _known_text(others)
            return ParsedPrompt(token_ids=_token_ids(token_ids), text=text)
        case {"prompt": str(text), "text_pair": str(pair), **others}:
            _refuse_keys(others)
            return ParsedPrompt(content=TextPair(text, pair))
        case {"prompt": str(text), **others}:
            adds = others.pop("add_special_tokens", None)
            _refuse_keys(others)
            if not isinstance(adds, bool | None):
                field = "add_special_tokens"
                raise InvalidPrompt(
                    f"{field} must be true or false; got {shown(adds)}", field=field, got=adds
                )
            return ParsedPrompt(content=text, add_special_tokens=adds is not False)
        case [Mapping(), *_]:
            return ParsedPrompt(content=cast("Sequence[Mapping[str, Any]]", prompt))
        case {"messages": _}:
            return ParsedPrompt(content=ChatPrompt.parse(cast("Mapping[str, Any]", prompt)))
        case bytes() | bytearray() | Mapping():
            raise _of_no_form(prompt)
        case Sequence():
            return ParsedPrompt(token_ids=_token_ids(prompt))
        case _:
            raise _of_no_form(prompt)


def _of_no_form(prompt: object) -> InvalidPrompt:
    return InvalidPrompt(
        f"prompt must be {_FORMS}; got {type(prompt).__name__}", field="prompt", got=type(prompt)
    )


def _known_text(others: Mapping[Any, Any]) -> str | None:
    """Return the text that may stand beside token ids; other keys are refused."""
    _refuse_keys({key: value for key, value in others.items() if key != "prompt"})
    text = others.get("prompt")
    if text is not None and not isinstance(text, str):
        raise InvalidPrompt(
            f"prompt beside prompt_token_ids must be text; got {type(text).__name__}",
            field="prompt",
            got=type(text),
        )
    return text


def _refuse_keys(others: Mapping[Any, Any]) -> None:
    others = {key: value for key, value in others.items() if value is not None}
    if others:
        keys = ", ".join(shown(key) for key in list(others)[:3])
        raise InvalidPrompt(
            f"prompt must have no other keys than prompt and prompt_token_ids; got {keys}",
            field="prompt",
            got=list(others),
        )


class TokenIds(tuple[int, ...]):
    """Token ids of which each was found to be an integer where they were made, perhaps in a thread."""

    __slots__ = ()

    def __new__(cls, token_ids: Iterable[int]) -> Self:
        made = super().__new__(cls, token_ids)
        hide_numbers(made)
        return made


def _token_ids(token_ids: object) -> tuple[int, ...]:
    if type(token_ids) is TokenIds:
        return token_ids
    if isinstance(token_ids, str | bytes | Mapping) or not isinstance(token_ids, Sequence):
        raise InvalidPrompt(
            f"prompt_token_ids must be a list of integers; got {type(token_ids).__name__}",
            field="prompt_token_ids",
            got=type(token_ids),
        )
    if not set(map(type, token_ids)) <= {int}:
        wrong = next(token_id for token_id in token_ids if type(token_id) is not int)
        raise InvalidPrompt(
            f"prompt_token_ids must contain only integers; got {shown(wrong)}",
            field="prompt_token_ids",
            got=wrong,
        )
    return tuple(token_ids)


def check_prompt(
    token_ids: Sequence[int], *, vocab_size: int, max_model_len: int, has_answer: bool = True
) -> None:
    """Check a tokenised prompt against the model.

    Args:
        vocab_size: ids must be below it.
        max_model_len: longest sequence, tokens.
        has_answer: whether at least one token of it is the answer's.
    Raises:
        InvalidPrompt: the prompt is empty, or has an id that the model does not have.
        PromptTooLong: the prompt leaves no room for an answer.
    """
    if not token_ids:
        raise InvalidPrompt("The decoder prompt cannot be empty", field="prompt", got=())
    if len(token_ids) + has_answer > max_model_len:
        raise PromptTooLong(len(token_ids), max_model_len, has_answer=has_answer)
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidPrompt(
            f"Token id {shown(wrong)} is out of vocabulary; prompt_token_ids must be in [0, {vocab_size})",
            field="prompt_token_ids",
            got=wrong,
        )
