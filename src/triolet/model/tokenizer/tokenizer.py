"""Text to token ids and back, and chat messages to text.

A tokenizer.json is read with `tokenizers` alone. Older folders, with a sentencepiece model or a vocabulary and
merges, are converted by transformers, which is only imported for them. A folder without a tokenizer is no error: the
engine then takes and gives token ids.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import tokenizers

from triolet.config.engine import EngineConfig
from triolet.core.chat_template import ChatTemplate
from triolet.core.json_text import between_windows
from triolet.core.output.detokenizer import Piece
from triolet.core.request.prompt import ChatPrompt, TextPair
from triolet.core.request.tokenizer_interface import Tokenize, Tokenized
from triolet.core.tools.answer import thinking_switch_among
from triolet.errors import ChatTemplateError, ConfigError, InvalidPrompt, ModelFileError, UnsupportedFeature
from triolet.model.folder.tokenizer_settings import TEMPLATES, tokenizer_settings
from triolet.model.tokenizer.added_tokens import apply_settings
from triolet.model.tokenizer.context_free_tokens import token_pieces
from triolet.model.tokenizer.special_text import MarkedChat, MarkedText, SpecialTexts

SLOW_TOKENIZER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
# A shorter text takes less than half a millisecond to encode, where each byte is a token.
LONG_TEXT_CHARS = 512
WHOLE_TEXT_CHARS = 2**17  # up to this length a text is encoded before its length in tokens is known
# Of a longer one, whose tokens are counted first. So few take memory that the process has; for 2**15 and more
# characters the system is asked for some each time, which stops all threads for milliseconds.
WINDOW_CHARS = 2**13
UNICODE_WINDOW_CHARS = 2**15  # looked through in one call, which holds the GIL: for 0.1 ms
# Tokens that the cuts between windows may add to a text of 4 MiB, whose tokens may be as long as windows: one for each.
MAX_CUT_TOKENS = 1000


@attrs.frozen
class EstimatedIds(Sequence[int]):
    """Numbers in place of the ids of a text, about as many as it has tokens."""

    _numbers: range

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        found = self._numbers[index]
        return EstimatedIds(found) if isinstance(found, range) else found


@attrs.define(eq=False)
class PromptIds:
    """Ids of a prompt, put together of its parts.

    A text of special tokens that must not become any has a part for each of them, hundreds of thousands: a list of the
    parts would be joined, counted and freed in one C call each, which hold the GIL.
    """

    max_tokens: int | None  # longest prompt whose ids are kept; None for no limit
    num_tokens: int = attrs.field(default=0, init=False)  # about, if it is an estimate
    is_estimate: bool = attrs.field(default=False, init=False)
    ids: list[int] = attrs.field(factory=list, init=False)  # none of a longer prompt

    @property
    def is_too_long(self) -> bool:
        """True if the prompt is longer than `max_tokens`."""
        return self.max_tokens is not None and self.num_tokens > self.max_tokens

    def add(self, parts: Iterable[Sequence[int]]) -> None:
        """Append parts, one by one as they are encoded."""
        for part in parts:
            self.num_tokens += len(part)
            self.is_estimate |= isinstance(part, EstimatedIds)
            if not self.is_too_long:
                self.ids += part
            elif self.ids:
                self.ids = []


@attrs.frozen(eq=False)
class TextTokenizer:
    """One model's tokenizer and chat template."""

    backend: tokenizers.Tokenizer  # does the work; its calls may run in any thread
    # None for a model without one; the error if the template cannot be compiled.
    chat_template: ChatTemplate | ChatTemplateError | None
    # Likewise, for chats with tools; None if that is the same one.
    tool_template: ChatTemplate | ChatTemplateError | None = attrs.field(default=None, kw_only=True)
    # Special tokens by the names that templates know them by, such as `bos_token`.
    template_tokens: Mapping[str, str] = attrs.field(factory=dict)
    # What keeps special tokens out of prompts that only users' texts would bring there; None to let them.
    special_texts: SpecialTexts | None = None
    # Of tokenizer.json, UTF-8. It is written out when the tokenizer is loaded: that holds the GIL for a tenth of a
    # second if the vocabulary is large, and the first grammar would stop all streams for it.
    _json: bytes = attrs.field(repr=False)
    _pieces: Mapping[bool, Piece] = attrs.field(init=False)
    # Text of a short chat in which the template's switch of reasoning is on; empty without such a switch.
    thinking_prompt: str = attrs.field(init=False, repr=False)

    @_json.default
    def _make_json(self) -> bytes:
        return _written_out(self.backend)

    @_pieces.default
    def _make_pieces(self) -> Mapping[bool, Piece]:
        return {skips: token_pieces(self.backend, skip_special_tokens=skips) for skips in (False, True)}

    @thinking_prompt.default
    def _make_thinking_prompt(self) -> str:
        if (switch := thinking_switch_among(self.template_variables)) is None:
            return ""
        hello = [{"role": "user", "content": "Hello!"}]
        with suppress(ChatTemplateError):
            return self.render(ChatPrompt(messages=hello, chat_template_kwargs={switch: True}))
        return ""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text, with or without the special tokens that the model wants around a prompt."""
        ids: list[int] = self._encoding(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        if len(text) < LONG_TEXT_CHARS:
            return self.backend.encode(text, add_special_tokens=add_special_tokens)
        # `encode` holds the GIL for its whole length and would delay the tokens of all requests
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding

    def _encode_up_to(
        self, max_tokens: int | None, text: str, *, add_special_tokens: bool = False
    ) -> Sequence[int]:
        """Encode a text; of one that is much too long, return only as many numbers as it has tokens, about."""
        if (unlisted := self._unlisted(max_tokens, text)) is not None:
            return unlisted
        return _ids(self._encoding(text, add_special_tokens=add_special_tokens), max_tokens)

    def _unlisted(self, max_tokens: int | None, *texts: str) -> EstimatedIds | None:
        """Count about the tokens of texts; None if they are not much too long.

        A text of 4 MiB may have millions of tokens. They would take 140 bytes each, and all threads of the process wait
        while the system gives and takes so much memory.
        """
        if max_tokens is None or sum(map(len, texts)) <= WHOLE_TEXT_CHARS:
            return None
        num_tokens = sum(
            len(self._encoding(text[start : start + WINDOW_CHARS], add_special_tokens=False))
            for text in texts
            for start in range(0, len(text), WINDOW_CHARS)
        )
        # A cut adds or takes away a few tokens, of texts with very long words perhaps some more.
        is_too_long = num_tokens > 1.1 * max_tokens + MAX_CUT_TOKENS
        return EstimatedIds(range(num_tokens)) if is_too_long else None

    def _encode_marked(
        self, marked: MarkedText, *, add_special_tokens: bool, max_tokens: int | None
    ) -> Iterable[Sequence[int]]:
        """Encode a text whose special tokens are marked, part by part."""
        if marked.mark is None or self.special_texts is None:
            return [self._encode_up_to(max_tokens, marked.text, add_special_tokens=add_special_tokens)]
        encode = partial(self._encode_up_to, max_tokens)
        return self.special_texts.encode(marked, encode, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode token ids; ids without a token (padding of the vocabulary) have no text."""
        text: str
        if len(token_ids) < LONG_TEXT_CHARS:
            text = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        else:  # `decode` holds the GIL for its whole length as well
            [text] = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def pieces(self, *, skip_special_tokens: bool) -> Piece:
        return self._pieces[skip_special_tokens]

    def render(self, messages: Sequence[Mapping[str, Any]] | ChatPrompt) -> str:
        """Render a conversation, up to the beginning of the assistant's next turn unless it says otherwise.

        Raises:
            UnsupportedFeature: the model has no chat template.
            ChatTemplateError: the template refused the messages, or failed.
        """
        if not isinstance(messages, ChatPrompt):
            messages = ChatPrompt(messages=messages)
        template = self._template(messages.chat_template, has_tools=bool(messages.tools))
        # The model would never see them.
        if messages.tools and not template.reads_tools:
            raise UnsupportedFeature(
                "tools must be empty: the model's chat template has no place for them", field="tools"
            )
        return template.render(
            messages.messages,
            add_generation_prompt=messages.add_generation_prompt,
            continue_final_message=messages.continue_final_message,
            tools=messages.tools,
            **messages.chat_template_kwargs,
        )

    def _template(self, source: str | None, *, has_tools: bool) -> ChatTemplate:
        """Return the template of that source, or the model's own for a chat with tools or without."""
        if source is not None:
            return _compiled(source, self.template_tokens)
        template = (self.tool_template if has_tools else None) or self.chat_template
        if template is None:
            raise UnsupportedFeature(
                "prompt must be text or token ids: the model has no chat template", field="prompt"
            )
        if isinstance(template, ChatTemplateError):
            # A new one for each request: a shared one would collect the tracebacks of all.
            raise ChatTemplateError(*template.args)
        return template

    def tokenize(self, message: Tokenize) -> Tokenized:
        """Tokenise: a chat template writes its own special tokens, a plain text gets those of the model by default."""
        token_type_start: int | None = None
        special, most = self.special_texts, message.max_tokens
        found = PromptIds(most)
        match message.prompt:
            case None:
                text = None
            case str(text):
                _check_unicode("prompt", text)
                marked = MarkedText(text) if special is None else special.mark_text(text)
                adds = message.add_special_tokens
                found.add(self._encode_marked(marked, add_special_tokens=adds, max_tokens=most))
            case TextPair():
                text, token_type_start = self._join(message.prompt, found)
            case messages:
                chat = MarkedChat(messages) if special is None else special.mark_chat(messages)
                marked = MarkedText(self.render(chat.prompt), chat.mark)
                text = marked.unmarked
                _check_unicode("prompt", text)
                adds = isinstance(messages, ChatPrompt) and messages.add_special_tokens
                found.add(self._encode_marked(marked, add_special_tokens=adds, max_tokens=most))
        marks = tuple(tuple(self.encode(mark, add_special_tokens=False)) for mark in message.marks)
        bad_words = self.encode_bad_words(message.bad_words)
        if found.is_too_long:
            num_tokens = found.num_tokens
            return Tokenized(
                text, (), bad_words, marks, num_unlisted=num_tokens, is_estimate=found.is_estimate
            )
        return Tokenized(text, tuple(found.ids), bad_words, marks, token_type_start)

    def _join(self, pair: TextPair, found: PromptIds) -> tuple[str, int | None]:
        """Encode two texts to one prompt, with the special tokens that the model wants around them.

        Args:
            found: gets the token ids.
        Returns:
            A text for display, and the position of the first token of type 1.
        """
        for field, text in (("prompt", pair.text), ("text_pair", pair.text_pair)):
            _check_unicode(field, text)
        shown, most = f"{pair.text} {pair.text_pair}", found.max_tokens
        if (special := self.special_texts) is not None:
            first, rest = special.encode_pair(
                special.mark_text(pair.text),
                special.mark_text(pair.text_pair),
                partial(self._encode_up_to, most),
            )
            found.add(first)
            start = special.second_type_after(found.num_tokens)
            found.add(rest)
            return shown, start
        if (unlisted := self._unlisted(most, pair.text, pair.text_pair)) is not None:
            found.add([unlisted])
            return shown, None
        # the batch call lets other threads run meanwhile
        [encoding] = self.backend.encode_batch([(pair.text, pair.text_pair)], add_special_tokens=True)
        found.add([_ids(encoding, most)])
        if found.is_too_long:
            return shown, None
        types = encoding.type_ids
        return shown, types.index(1) if 1 in types else None

    @property
    def template_source(self) -> str:
        return _source_of(self.chat_template)

    @property
    def tool_template_source(self) -> str:
        return _source_of(self.tool_template)

    @property
    def template_variables(self) -> frozenset[str]:
        return self.chat_template.variables if isinstance(self.chat_template, ChatTemplate) else frozenset()

    def tokenizer_json(self) -> bytes:
        return self._json

    def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ids that would write each word, at a beginning and after a space.

        Raises:
            InvalidPrompt: a word has no tokens.

        Source: vLLM's `bad_words`: the variant with a space counts if it is a sequence of the same length with another
            first token.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            _check_unicode("bad_words", word)
            bare = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            if not bare:
                raise InvalidPrompt(
                    f"bad_words entries must tokenize to at least one token, got {word!r}",
                    field="bad_words",
                    got=word,
                )
            sequences[bare] = None
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                sequences[spaced] = None
        return tuple(sequences)


def _ids(encoding: tokenizers.Encoding, max_tokens: int | None) -> Sequence[int]:
    """Return the ids of an encoding; if there are more than `max_tokens`, other numbers, as many.

    The list of ids is made by one call, which holds the GIL for 25 ns a token: text of 4 MiB may have millions.
    """
    if max_tokens is not None and len(encoding) > max_tokens:
        return range(len(encoding))
    ids: list[int] = encoding.ids
    return ids


def _check_unicode(field: str, text: str) -> None:
    """Half a surrogate pair, which Python's strings may hold, is no character that a tokenizer could know."""
    give_way = between_windows.get()
    for start in range(0, len(text), UNICODE_WINDOW_CHARS):
        try:
            text[start : start + UNICODE_WINDOW_CHARS].encode()
        except UnicodeEncodeError as error:
            half, place = error.object[error.start], start + error.start
            raise InvalidPrompt(
                f"{field} must be Unicode text; got the lone surrogate {half!r} at {place}",
                field=field,
                got=half,
            ) from None
        give_way()


def load_configured_tokenizer(config: EngineConfig, folder: Path) -> TextTokenizer | None:
    """Read the tokenizer that a configuration names, by default that of the model; None if the model has none.

    Args:
        config: of the engine; its chat template, if it has one, takes the place of the tokenizer's.
        folder: of the model, or its GGUF file.
    Raises:
        ConfigError: a tokenizer that was named is not there, or `chat_template` is no template.
        ModelError: it cannot be read.
    """
    tokenizer = load_tokenizer(
        Path(config.tokenizer or folder),
        trust_remote_code=config.trust_remote_code,
        allow_special_tokens=config.allow_special_tokens,
    )
    if tokenizer is None and config.tokenizer is not None:
        raise ConfigError("tokenizer", "a folder with a tokenizer", config.tokenizer)
    if config.chat_template is None:
        return tokenizer
    if tokenizer is None:
        raise ConfigError("chat_template", "left out for a model without a tokenizer", config.chat_template)
    return with_template(tokenizer, config.chat_template)


def with_template(tokenizer: TextTokenizer, given: str) -> TextTokenizer:
    """Return a tokenizer with another chat template, for chats with tools as well.

    Args:
        tokenizer: of the model.
        given: path of a file with a template, or the text of one.
    Raises:
        ConfigError: `chat_template` names no readable file, or is no template.
    """
    template = _given_template(given, tokenizer.template_tokens)
    return attrs.evolve(
        tokenizer, chat_template=template, tool_template=None, json=tokenizer.tokenizer_json()
    )


def check_template(given: str | None) -> None:
    """Check the chat template of a configuration, before its model is loaded, which may take minutes.

    Args:
        given: path of a file with a template, or the text of one; None for none.
    Raises:
        ConfigError: see `with_template`.
    """
    if given is not None:
        _given_template(given, {})


def _given_template(given: str, tokens: Mapping[str, str]) -> ChatTemplate:
    template = _compiled_or_error(source := _given_source(given), tokens)
    if isinstance(template, ChatTemplateError) or "{" not in source:
        is_broken = isinstance(template, ChatTemplateError)
        reason = str(template).rstrip(".") if is_broken else "it shows no messages"
        raise ConfigError("chat_template", f"a chat template in Jinja ({reason})", given)
    return template


def _given_source(given: str) -> str:
    """Return the text of a template that is given as a file or as itself."""
    path = os.path.expanduser(given)
    if "{" in given and not os.path.isfile(path):
        return given
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        rule = f"the path of a readable text file, or the text of a chat template in Jinja ({reason})"
        raise ConfigError("chat_template", rule, given) from None


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, allow_special_tokens: bool = True
) -> TextTokenizer | None:
    """Read the tokenizer of a model folder or a GGUF file; None if it has none.

    Args:
        folder: of the model, or its GGUF file.
        trust_remote_code: whether Python code in the folder may run.
        allow_special_tokens: whether texts of prompts may hold special tokens; else they are text like any other.

    Raises:
        ModelFileError: a file is there and cannot be read.
        UnsupportedModel: a GGUF file has a kind of vocabulary that is not known.
    """
    read = _load_gguf_tokenizer(folder) if folder.is_file() else _load_folder(folder, trust_remote_code)
    if read is None or allow_special_tokens:
        return read
    return attrs.evolve(read, special_texts=SpecialTexts(read.backend))


def _load_folder(folder: Path, trust_remote_code: bool) -> TextTokenizer | None:
    content = b""
    backend: tokenizers.Tokenizer | None
    settings = tokenizer_settings(folder, _read_json)
    if (file := folder / "tokenizer.json").is_file():
        backend, content = _read_backend(file)
        if apply_settings(backend, settings, _read_json(folder / "added_tokens.json")):
            content = b""
    elif (backend := _convert(folder, trust_remote_code)) is None:
        return None
    # Some folders save these settings of their training; a prompt is never cut or padded.
    if not content or backend.truncation is not None or backend.padding is not None:
        backend.no_truncation()
        backend.no_padding()
        content = _written_out(backend)
    template_tokens = _template_tokens(settings)
    template, tool_template = (
        _load_chat_template(folder, settings, template_tokens, name) for name in ("default", "tool_use")
    )
    return TextTokenizer(backend, template, template_tokens, tool_template=tool_template, json=content)


def _load_gguf_tokenizer(path: Path) -> TextTokenizer | None:
    from triolet.model.gguf.file import GgufFile
    from triolet.model.gguf.tokenizer import read_gguf_tokenizer

    if (read := read_gguf_tokenizer(GgufFile.open(path))) is None:
        return None
    template, tool_template = (
        None if source is None else _compiled_or_error(source, read.template_tokens)
        for source in (read.chat_template, read.tool_template)
    )
    return TextTokenizer(read.backend, template, read.template_tokens, tool_template=tool_template)


def _written_out(backend: tokenizers.Tokenizer) -> bytes:
    """Return the JSON of a tokenizer; empty if parts of it are Python code, with which no grammar works."""
    try:
        text: str = backend.to_str()
    except Exception:  # the library raises nothing more special
        return b""
    return text.encode()


def _read_backend(file: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    try:
        content = file.read_bytes()
        return tokenizers.Tokenizer.from_buffer(content), content
    except Exception as error:
        raise ModelFileError(file, f"is not a tokenizer: {error}") from error


def _convert(folder: Path, trust_remote_code: bool) -> tokenizers.Tokenizer | None:
    if not any((folder / name).is_file() for name in SLOW_TOKENIZER_FILES):
        return None
    # Late: importing transformers takes seconds, and few folders need it.
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelFileError(folder, f"its tokenizer cannot be converted: {error}") from error
    if not getattr(converted, "is_fast", False):
        raise ModelFileError(folder, "its tokenizer has no fast form")
    backend: tokenizers.Tokenizer = converted.backend_tokenizer
    return backend


def _template_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    texts = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def _compiled(source: str, tokens: Mapping[str, str]) -> ChatTemplate:
    # The system clock is read here, and not in the core: a template may ask for today's date.
    return ChatTemplate(source, special_tokens=tokens, strftime_now=time.strftime)


def _load_chat_template(
    folder: Path, settings: Mapping[str, Any], tokens: Mapping[str, str], name: str
) -> ChatTemplate | ChatTemplateError | None:
    """Return the compiled chat template of that name, its error, or None if the model has none."""
    source = _template_source(folder, settings, name)
    return None if source is None else _compiled_or_error(source, tokens)


def _compiled_or_error(source: str, tokens: Mapping[str, str]) -> ChatTemplate | ChatTemplateError:
    try:
        return _compiled(source, tokens)
    except ChatTemplateError as error:
        return error  # not raised: text prompts need no template, so only conversations fail


def _source_of(template: ChatTemplate | ChatTemplateError | None) -> str:
    return template.source if isinstance(template, ChatTemplate) else ""


def _template_source(folder: Path, settings: Mapping[str, Any], name: str) -> str | None:
    # Newer folders have it in a file of its own, which goes before the settings.
    default = folder / "chat_template.jinja"
    path = default if name == "default" else folder / TEMPLATES / f"{name}.jinja"
    if path.is_file():
        return _read_text(path)
    if default.is_file():
        return None
    # Folders of models with images, as transformers 4 wrote them, have it in a JSON file of its own.
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get(name)
    elif name != "default":
        return None
    return template if isinstance(template, str) else None


def _token_text(value: object) -> str | None:
    if isinstance(value, Mapping):  # a special token is its text, or an object with its `content`
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelFileError(path, f"cannot be read: {reason}") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelFileError(path, "must hold one JSON object")
    return content
