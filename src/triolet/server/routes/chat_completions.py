"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import attrs
from starlette.requests import Request
from starlette.responses import Response

from triolet.core.output.outputs import RequestOutput
from triolet.core.request.params import RequestOutputKind, SamplingParams
from triolet.core.tools import ToolPlan
from triolet.core.tools.answer import template_efforts_of, thinking_switch_of
from triolet.engine.token_stream import TokenStream
from triolet.protocol.chat_completions import ChatChoice, ChatRequest, Piece, chat_chunk, chat_completion
from triolet.server.routes.app_context import context_of
from triolet.server.routes.errors import refusals
from triolet.server.routes.generation_route import GenerationHandler
from triolet.server.routes.request_body import read_json
from triolet.server.routes.sse import EventSender
from triolet.server.transport.ids import id_maker


async def chat_completions(request: Request) -> Response:
    """Answer a chat, complete or in chunks."""
    context = context_of(request)
    engine, defaults = context.engine, context.engine.default_sampling_params()
    parsers = engine.tool_parser, engine.reasoning_parser, engine.tokenizer

    def planned_body(payload: dict[str, Any]) -> tuple[ChatRequest, ToolPlan, SamplingParams]:
        body = ChatRequest.of(payload)
        plan = body.plan(*parsers)
        return body, plan, body.params(defaults, plan)

    # A plan reads all tools and forms, so that of a long body is made where the body is parsed.
    body, plan, params = await read_json(request, planned_body)
    body = context.named(body)
    if engine.reasoning_parser is not None:  # reasoning tokens can only be counted as they come
        params = attrs.evolve(params, output_kind=RequestOutputKind.DELTA)
    return await _ChatCompletion.for_request(request, context, body, params, plan=plan).response(request)


@attrs.define(eq=False)
class _ChatCompletion(GenerationHandler[ChatRequest]):
    ID_PREFIX = "chatcmpl"

    plan: ToolPlan = attrs.field(kw_only=True)
    prompt_ids: dict[str, list[int]] = attrs.field(
        factory=dict, init=False
    )  # part of the answer, if asked for

    async def complete(self) -> dict[str, Any]:
        choices: list[ChatChoice] = []
        async with self._stream_of_engine() as stream:
            async for output in stream:
                choices = choices or self._choices(output)
                self._add(choices, output)
        whole = [choice.whole() for choice in choices]
        self.check_whole(whole)
        answer = chat_completion(**self.frame, choices=whole, usage=self._usage(choices))
        return {**answer, **self.prompt_ids}

    async def stream(self, events: EventSender) -> None:
        choices: list[ChatChoice] = []
        async with self._stream_of_engine() as stream:
            await events.start()
            self.tell_vendor_events(events, stream)
            async for output in stream:
                self.check_streamed(output)
                if not choices:
                    choices = self._choices(output)
                    begun = [choice.begin() for choice in choices]
                    first = self._chunk(begun, self._usage_so_far(choices))
                    await events.send({**first, **self.prompt_ids})
                for piece in self._add(choices, output):
                    await events.send(self._chunk([piece], self._usage_so_far(choices)))
        if self.body.includes_usage:
            await events.send(self._chunk([], self._usage(choices)))

    @asynccontextmanager
    async def _stream_of_engine(self) -> AsyncGenerator[TokenStream]:
        engine = self.context.engine
        tokenizer = engine.tokenizer
        prompt = self.body.prompt(self.plan, thinking_switch_of(tokenizer), template_efforts_of(tokenizer))
        with refusals(self.body), self.context.acquire_slot(self.owner):
            async with engine.generate(prompt, self.params, **self.arguments) as stream:
                yield stream

    def empty_chunk(self) -> dict[str, Any]:
        return self._chunk([], None)

    def _choices(self, output: RequestOutput) -> list[ChatChoice]:
        self.usage.add_prompt(output)
        if self.body.return_token_ids:
            self.prompt_ids = {"prompt_token_ids": list(output.prompt_token_ids)}
        num_top = self.body.num_top
        new_id = id_maker(self.context.engine.tool_parser)
        return [
            ChatChoice(
                index=index,
                parser=self.plan.parser(output.prompt),
                num_top=num_top,
                new_id=new_id,
                includes_reasoning=self.body.include_reasoning,
                includes_token_ids=self.body.return_token_ids,
                shows_ids=self.body.return_tokens_as_token_ids,
            )
            for index in range(self.body.n)
        ]

    def _add(self, choices: list[ChatChoice], output: RequestOutput) -> list[Piece]:
        self.usage.add(output)
        return [piece for one in output.outputs for piece in choices[one.index].add(one)]

    def _usage(self, choices: list[ChatChoice]) -> dict[str, Any]:
        num_reasoning_tokens = sum(choice.num_reasoning_tokens for choice in choices)
        return {
            **self.usage.body(),
            "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        }

    def _usage_so_far(self, choices: list[ChatChoice]) -> dict[str, Any] | None:
        return self._usage(choices) if self.body.includes_usage_in_chunks else None

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        return chat_chunk(**self.frame, choices=choices, usage=usage)
