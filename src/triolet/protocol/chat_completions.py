"""Request body and answer objects of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from triolet.core.output.logprobs import Logprob
from triolet.core.output.outputs import CompletionOutput
from triolet.core.request.param_validation import ApiFamily
from triolet.core.request.params import SamplingParams
from triolet.core.tools import (
    AnswerEvent,
    AnswerParser,
    ReasoningPiece,
    TextPiece,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
    ToolPlan,
)
from triolet.core.tools.answer import effort_values
from triolet.protocol.errors import missing, wrong
from triolet.protocol.generation import GenerationRequest, finish_reason, finite, likeliest, shown_token
from triolet.protocol.json.structuring import CONVERTER, Wrong
from triolet.protocol.responses.response_items import Message
from triolet.protocol.sampling import OffersTools

MAX_MESSAGES = 65_536  # at four tokens each, these fill the longest contexts in use
ROLES = ("system", "developer", "user", "assistant", "tool")

Piece = dict[str, Any]
"""Entry of `choices`, of a chunk or of a whole answer."""


@attrs.frozen
class ChatMessages:
    """Messages of a chat, with known roles; the chat template checks their contents."""

    messages: tuple[Message, ...]

    @classmethod
    def of(cls, value: Any, _: Any = None) -> ChatMessages:
        """Build the messages from JSON data."""
        if not isinstance(value, list) or not value:
            raise Wrong("a list of at least one message", value)
        if len(value) > MAX_MESSAGES:
            raise wrong("messages", f"at most {MAX_MESSAGES} messages", len(value))
        for place, message in enumerate(value):
            if not isinstance(message, dict):
                raise wrong(f"messages[{place}]", "an object", message)
            if message.get("role") not in ROLES:
                raise wrong(f"messages[{place}].role", "one of " + ", ".join(ROLES), message.get("role"))
            content = message.get("content")
            if content == [] and not message.get("tool_calls") and message.get("refusal") is None:
                raise wrong(f"messages[{place}].content", "a text or a list of at least one part", [])
            if content is None and message["role"] != "assistant":
                raise missing(f"messages[{place}].content")
            _check_calls(message.get("tool_calls"), f"messages[{place}].tool_calls")
        return cls(tuple(map(_known_to_templates, value)))


def _check_calls(calls: Any, at: str) -> None:
    """Check the calls of an earlier answer; a template that misses a part of one could not say what it is."""
    if calls is None:
        return
    if not isinstance(calls, list):
        raise wrong(at, "a list of calls", calls)
    for place, call in enumerate(calls):
        if not isinstance(call, dict):
            raise wrong(f"{at}[{place}]", "an object", call)
        if not isinstance(function := call.get("function"), dict):
            raise wrong(f"{at}[{place}].function", "an object with a name and arguments", function)
        if not isinstance(name := function.get("name"), str):
            raise wrong(f"{at}[{place}].function.name", "a string", name)
        if not isinstance(arguments := function.get("arguments"), str | dict | None):
            raise wrong(f"{at}[{place}].function.arguments", "JSON, as a text", arguments)


def _known_to_templates(message: Message) -> Message:
    # Chat templates have no role `developer`, and no refusals: to a model they are what it said.
    if message["role"] == "developer":
        return {**message, "role": "system"}
    if message["role"] != "assistant":
        return message
    content = message.get("content")
    if content is None and (message.get("refusal") is not None or not message.get("tool_calls")):
        # Chats are sent back with the message of an answer that was empty.
        return {**message, "content": message.get("refusal") or ""}
    return {**message, "content": list(map(_said, content))} if isinstance(content, list) else message


def _said(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "text", "text": part.get("refusal")} if is_refusal else part


@attrs.frozen(kw_only=True)
class ChatRequest(OffersTools, GenerationRequest):
    """Body of `/v1/chat/completions`."""

    FAMILY = ApiFamily.CHAT

    messages: ChatMessages  # the chat so far
    max_completion_tokens: int | None = None  # OpenAI's newer name of `max_tokens`; it counts beside that one
    logprobs: bool = False  # True to send log-probabilities of the tokens
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call
    # `none`, `auto`, `required`, or the function that must be called.
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_tool_calls: bool = True
    # `none` or `minimal` switches reasoning off where the chat template can, and a higher effort on. A template that
    # reads `reasoning_effort` gets it.
    reasoning_effort: str | None = None
    # Further values for the chat template.
    chat_template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    add_generation_prompt: bool = True  # True if the answer is a new message of the assistant
    # True to continue the last message; not together with `add_generation_prompt`.
    continue_final_message: bool = False
    # True to add the special tokens of the tokenizer to those of the chat template.
    add_special_tokens: bool = False
    include_reasoning: bool = True  # True to send the reasoning of the model with the answer

    def check(self) -> None:
        super().check()
        if not self.logprobs and (num_top := self.sampling.get("logprobs")):
            raise wrong("top_logprobs", "left out where logprobs is false", num_top)

    def num_logprobs(self) -> int | None:
        return self.sampling.get("logprobs", 0) if self.logprobs else None

    def prompt(
        self, plan: ToolPlan, thinking_switch: str | None = None, efforts: Mapping[str, str] | None = None
    ) -> Any:
        """Return the prompt for `Engine.generate`.

        Args:
            thinking_switch: value of the chat template that the effort sets; None for none.
            efforts: what the chat template takes as `reasoning_effort`, by effort; empty or None for no such value.
        """
        values = effort_values(self.reasoning_effort, thinking_switch, efforts or {})
        return {
            "messages": list(self.messages.messages),
            "tools": plan.template_tools,
            "chat_template_kwargs": {**values, **self.chat_template_kwargs},
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
        }

    def params(self, defaults: SamplingParams, plan: ToolPlan) -> SamplingParams:
        """Return the parameters for the engine: those of the client, and the model's defaults for the rest.

        Raises:
            WireError: a value out of its range.
        """
        chosen: dict[str, Any] = {}
        if self.max_completion_tokens is not None:
            chosen["max_tokens"] = self.max_completion_tokens
        chosen["structured_outputs"] = plan.structured_outputs
        if not plan.skip_special_tokens:
            chosen["skip_special_tokens"] = self.sampling.get("skip_special_tokens", False)
        return self.sampling_params(defaults, **chosen)

    def names(self) -> Mapping[str, str]:
        names = super().names()
        if self.max_completion_tokens is not None:
            names = {**names, "max_tokens": "max_completion_tokens"}
        return names


@attrs.define(eq=False, kw_only=True)
class ChatChoice:
    """Builder of one entry of `choices` from the outputs of the engine, in pieces that together are the message."""

    index: int  # among the answers
    parser: AnswerParser  # separates text, reasoning and tool calls
    num_top: int | None  # most likely tokens per position, -1 for all; None for no log-probabilities
    new_id: Callable[[str], str]  # returns a new id with a prefix, for tool calls
    includes_reasoning: bool = True  # False leaves the reasoning out
    includes_token_ids: bool = False  # True to send the ids of the tokens
    shows_ids: bool = (
        False  # True to show `token_id:ID` in place of a token's text, beside its log-probability
    )
    # Tokens so far of the outputs with reasoning in them.
    num_reasoning_tokens: int = attrs.field(default=0, init=False)
    _text: list[str] = attrs.field(factory=list, init=False)
    _reasoning: list[str] = attrs.field(factory=list, init=False)
    _calls: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    _ends_call: bool = attrs.field(default=False, init=False)  # True if the last call has valid arguments
    _logprobs: list[dict[str, Any]] = attrs.field(factory=list, init=False)
    _sent_logprobs: int = attrs.field(default=0, init=False)
    _token_ids: list[int] = attrs.field(factory=list, init=False)
    _sent_token_ids: int = attrs.field(default=0, init=False)
    _ending: tuple[str, str | int | None] | None = attrs.field(default=None, init=False)

    def begin(self) -> Piece:
        """Return the first piece."""
        return self._piece({"role": "assistant", "content": ""})

    def add(self, completion: CompletionOutput) -> list[Piece]:
        """Return the pieces of an output, of kind DELTA or the only one.

        Raises:
            WireError: the answer could not be finished.
        """
        is_last = completion.finish_reason is not None
        if self.num_top is not None and completion.logprobs is not None:
            pairs = zip(completion.token_ids, completion.logprobs, strict=True)
            self._logprobs += [
                position(token_id, at, self.num_top, as_ids=self.shows_ids) for token_id, at in pairs
            ]
        self._token_ids += completion.token_ids if self.includes_token_ids else ()
        events = self.parser.feed(completion.text)
        if any(isinstance(event, ReasoningPiece) for event in events):
            self.num_reasoning_tokens += len(completion.token_ids)
        deltas = [self._delta(event) for event in (*events, *(self.parser.finish() if is_last else ()))]
        pieces = [self._piece(delta) for delta in deltas if delta]
        if is_last:
            reason, detail = finish_reason(completion)
            self._ending = ("tool_calls" if self._ends_call and reason == "stop" else reason, detail)
            pieces.append(self._piece({}))
        if pieces and self.num_top is not None:
            pieces[0]["logprobs"] = {"content": self._logprobs[self._sent_logprobs :]}
            self._sent_logprobs = len(self._logprobs)
        if pieces and self.includes_token_ids:
            pieces[0]["token_ids"] = self._token_ids[self._sent_token_ids :]
            self._sent_token_ids = len(self._token_ids)
        return pieces

    def whole(self) -> Piece:
        """Return the entry of a whole answer, after its last output."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not self._text else "".join(self._text),
            "refusal": None,
        }
        if self._reasoning:
            message |= _reasoning("".join(self._reasoning))
        if self._calls:
            message["tool_calls"] = self._calls
        reason, detail = self._ending or (None, None)
        return {
            "index": self.index,
            "message": message,
            "logprobs": None if self.num_top is None else {"content": self._logprobs},
            "finish_reason": reason,
            "stop_reason": detail,
            **({"token_ids": self._token_ids} if self.includes_token_ids else {}),
        }

    def _delta(self, event: AnswerEvent) -> dict[str, Any] | None:
        match event:
            case TextPiece(text=text):
                self._text.append(text)
                return {"content": text}
            case ReasoningPiece() if not self.includes_reasoning:
                return None
            case ReasoningPiece(text=text):
                self._reasoning.append(text)
                return _reasoning(text)
            case ToolCallBegin(index=index, name=name):
                call = {"id": self.new_id("call"), "type": "function"}
                self._calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": index, **call, "function": {"name": name, "arguments": ""}}]}
            case ToolCallArguments(index=index, text=text):
                self._calls[-1]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case ToolCallEnd(is_valid=is_valid):
                self._ends_call = is_valid
                return None

    def _piece(self, delta: dict[str, Any]) -> Piece:
        reason, detail = self._ending or (None, None)
        piece: Piece = {
            "index": self.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None if delta else reason,
        }
        if not delta:
            piece["stop_reason"] = detail
        return piece


def _reasoning(text: str) -> dict[str, str]:
    # The first name is vLLM's and OpenRouter's, the second one that of DeepSeek and of older versions of vLLM.
    return {"reasoning": text, "reasoning_content": text}


def position(
    token_id: int, logprobs: Mapping[int, Logprob], num_top: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return the log-probability of a token, and those of the most likely ones at its position.

    Args:
        as_ids: True to show `token_id:ID` in place of the texts of the tokens; their bytes are shown in any case.
    """

    def token(token_id: int) -> dict[str, Any]:
        one = logprobs[token_id]
        return {
            "token": shown_token(token_id, one.decoded_token, as_id=as_ids),
            "bytes": list((one.decoded_token or "").encode(errors="replace")),
            "logprob": finite(one.logprob),
        }

    return {**token(token_id), "top_logprobs": list(map(token, likeliest(logprobs, num_top)))}


def chat_completion(
    *, answer_id: str, created: int, model: str, choices: list[Piece], usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the whole answer."""
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": dict(usage),
        "service_tier": None,
        "system_fingerprint": None,
    }


def chat_chunk(
    *,
    answer_id: str,
    created: int,
    model: str,
    choices: list[Piece],
    usage: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a chunk of a stream; `usage` is set in the chunks that carry it."""
    chunk = {
        "id": answer_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
    }
    return chunk if usage is None else {**chunk, "usage": dict(usage)}


CONVERTER.register_structure_hook(ChatMessages, ChatMessages.of)
CONVERTER.register_structure_hook_func(
    lambda kind: kind == str | Mapping[str, Any] | None,
    lambda value, _: _tool_choice(value),
)


def _tool_choice(value: Any) -> str | Mapping[str, Any] | None:
    if value is not None and not isinstance(value, str | dict):
        raise Wrong("a string or an object", value)
    return value
