"""`POST /tokenize` and `/detokenize`, after vLLM's, and OpenAI's `POST /v1/responses/input_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import attrs
import trio
from starlette.requests import Request
from starlette.responses import Response

from triolet.core.recovery.supervision import typed_shortages
from triolet.core.request.prompt import ChatPrompt, parse_prompt
from triolet.core.request.tokenizer_interface import (
    MAX_LISTED_TOKENS,
    Tokenize,
    Tokenized,
    TokenizerInterface,
)
from triolet.core.tools.answer import thinking_switch_of
from triolet.core.tools.choice import FunctionTool, parse_tools
from triolet.errors import InvalidRequest
from triolet.observability.loop_monitor import run_in_thread
from triolet.protocol.chat_completions import ChatMessages
from triolet.protocol.errors import WireError, missing, of_exception, unsupported, wrong
from triolet.protocol.json.encoding import encode_long
from triolet.protocol.json.structuring import structure
from triolet.protocol.responses.requests import CreateResponse, SamplingPlan
from triolet.protocol.responses.response_items import check_chat
from triolet.protocol.responses.store import previous_messages, prompt_of, with_items
from triolet.server.routes.app_context import AppContext, context_of, owner_of
from triolet.server.routes.request_body import read_json

MAX_THREADS = 2  # of one app, so that any number of requests leaves processor time to the engine
_NOT_OFFERED: Mapping[str, Any] = {
    "chat_template": None,
    "mm_processor_kwargs": None,
}


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    """Body of `/tokenize`: a text or a chat; see `ChatRequest` for the fields."""

    model: str | None = None
    prompt: str | None = None
    messages: ChatMessages | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    # Whether the special tokens that the tokenizer puts around a text are added: by default to a text, and not to a
    # chat, whose template writes them.
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @classmethod
    def of(cls, payload: Mapping[str, Any]) -> TokenizeRequest:
        for name, harmless in _NOT_OFFERED.items():
            if payload.get(name) not in (None, harmless):
                raise unsupported(name, f"{name} is not supported by this server")
        return structure(payload, cls)

    def content(self) -> str | ChatPrompt:
        """Return the text or chat to tokenize.

        Raises:
            WireError: neither a text nor a chat, or both, or an invalid chat or tool.
        """
        if self.prompt is not None and self.messages is None:
            return self.prompt
        if self.prompt is not None or self.messages is None:
            raise missing("prompt or messages")
        try:
            # The template sees what it sees in Chat Completions.
            tools = tuple(map(FunctionTool.for_template, parse_tools(self.tools)))
            chat = {
                "messages": list(self.messages.messages),
                "tools": tools or None,
                "chat_template_kwargs": self.chat_template_kwargs,
                "add_generation_prompt": self.add_generation_prompt,
                "continue_final_message": self.continue_final_message,
                "add_special_tokens": bool(self.add_special_tokens),
            }
            return ChatPrompt.parse(chat)
        except InvalidRequest as error:
            raise of_exception(error) from None


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    """Body of `/detokenize`."""

    tokens: tuple[int, ...]
    model: str | None = None


async def tokenize(request: Request) -> Response:
    """Answer the tokens of a prompt, those of the chat template included."""
    context = context_of(request)
    body = await read_json(request, TokenizeRequest.of)
    tokenizer = _tokenizer(context, body.model)
    most = _most_listed(context)
    message = Tokenize(
        body.content(), add_special_tokens=body.add_special_tokens is not False, max_tokens=most
    )
    field = "messages" if body.messages is not None else "prompt"
    try:
        tokenized = await _in_thread(partial(tokenizer.tokenize, message))
    except Exception as error:
        said = of_exception(error)
        said.param = field  # the engine names its own field for both
        raise said from error
    if tokenized.num_unlisted:
        raise _too_long(field, most, tokenized)
    answer: dict[str, Any] = {
        "count": tokenized.num_tokens,
        "max_model_len": context.engine.max_model_len,
        "tokens": tokenized.token_ids,
        "token_strs": None,
    }
    if body.return_token_strs:
        answer["token_strs"] = await _in_thread(partial(_strings, tokenizer, tokenized.token_ids))
    return await _json_response(answer)


async def input_tokens(request: Request) -> Response:
    """Answer how many tokens the prompt of a response would have."""
    context, owner = context_of(request), owner_of(request)

    def planned_body(payload: dict[str, Any]) -> tuple[CreateResponse, SamplingPlan]:
        given = payload.get("input")
        body = CreateResponse.of({**payload, "input": [] if given is None else given})
        return body, context.responses_context.planned(body)

    body, planned = await read_json(request, planned_body)
    body = context.named(body)
    store = context.responses_context.store
    before = previous_messages(body.previous_response_id, owner, store)
    new = with_items(body.input, owner, store).messages()
    check_chat(before, new)
    tokenizer = _tokenizer(context, None)
    prompt = body.prompt(
        prompt_of(body.instructions, (*before, *new)), planned.tools, thinking_switch_of(tokenizer)
    )
    try:
        content = parse_prompt(prompt).content
        message = Tokenize(content, max_tokens=(most := _most_listed(context)))
        tokenized = await _in_thread(partial(tokenizer.tokenize, message))
    except InvalidRequest as error:
        raise body.refusal(error) from error
    if tokenized.num_unlisted:
        raise _too_long("input", most, tokenized)
    return await _json_response({"object": "response.input_tokens", "input_tokens": tokenized.num_tokens})


async def detokenize(request: Request) -> Response:
    """Answer the text of tokens."""
    context = context_of(request)
    body = await read_json(request, lambda payload: structure(payload, DetokenizeRequest))
    tokenizer, vocab_size = _tokenizer(context, body.model), context.engine.model_info.vocab_size

    def decode() -> str:
        # The tokenizer may know more tokens than the model, or none of this id.
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise wrong("tokens", f"in [0, {vocab_size})", token_id)
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    return await _json_response({"prompt": await _in_thread(decode)})


def _most_listed(context: AppContext) -> int:
    return max(context.engine.max_model_len, MAX_LISTED_TOKENS)


def _too_long(field: str, most: int, tokenized: Tokenized) -> WireError:
    return WireError(
        f"{field} must have at most {most} tokens here, got {tokenized.shown_num_tokens}", param=field
    )


def _tokenizer(context: AppContext, model: str | None) -> TokenizerInterface:
    if model is not None:
        context.check_model(model)
    if context.engine.tokenizer is None:
        raise WireError("The model has no tokenizer.", code="unsupported_model", param="model")
    return context.engine.tokenizer


async def _json_response(answer: Mapping[str, Any]) -> Response:
    return Response(await _in_thread(partial(encode_long, answer)), media_type="application/json")


def _strings(tokenizer: TokenizerInterface, token_ids: tuple[int, ...]) -> list[str]:
    return [tokenizer.decode((token_id,), skip_special_tokens=False) for token_id in token_ids]


# One per Trio run: a limiter must not be shared between two of them.
_threads = trio.lowlevel.RunVar[trio.CapacityLimiter]("threads of /tokenize")


async def _in_thread(work: Any) -> Any:
    """Run `work` in a thread: tokenizing a megabyte takes a long time."""
    try:
        limiter = _threads.get()
    except LookupError:
        limiter = trio.CapacityLimiter(MAX_THREADS)
        _threads.set(limiter)
    with typed_shortages("tokenizing a text"):
        return await run_in_thread(work, limiter=limiter)
